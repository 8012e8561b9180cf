// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Whether a number hidden in a long text is still found: the same prompts read dense and by each rule, the
// outcomes paired. Results are written after every trial, and trials that the file already holds are not run
// again.

#include "quality/open_model.hpp"
#include "quality/option_values.hpp"
#include "quality/passkey_prompt.hpp"
#include "quality/rules.hpp"
#include "quality/sign_test.hpp"
#include "quality/windows.hpp"

#include "engine/app/host_info.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"
#include "engine/reading/reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

namespace {

using json = nlohmann::ordered_json;
using quality_bench::arithmetic_of;
using quality_bench::number_of;
using quality_bench::passkey_prompt;

struct arguments {
    std::string model;
    std::string data;
    std::string out = "quality_passkeys.json";
    std::string commit;
    std::vector<std::int64_t> lengths{2048, 4096, 7900};
    std::int32_t trials = 48; ///< of each length
    std::uint64_t seed = 1;
    std::vector<std::string> policy_files;
    std::vector<std::string> names; ///< of known rules to run as well
    int threads = engine::usable_cores();
    engine::cpu::arithmetic kind = engine::cpu::arithmetic::automatic;
    quality_bench::device device = quality_bench::device::cpu;
};

std::vector<std::int64_t> numbers_of(const std::string& name, const std::string& text) {
    std::vector<std::int64_t> made;
    for (std::size_t start = 0; start <= text.size();) {
        const std::size_t end = std::min(text.find(',', start), text.size());
        made.push_back(number_of<std::int64_t>(name, text.substr(start, end - start), 1));
        start = end + 1;
    }
    return made;
}

arguments parse(int argc, char** argv) {
    arguments made;
    for (int i = 1; i < argc; i += 2) {
        const std::string name = argv[i];
        if (i + 1 == argc) throw engine::error(name, "a value after it", "none");
        const std::string value = argv[i + 1];
        if (name == "--model") {
            made.model = value;
        } else if (name == "--data") {
            made.data = value;
        } else if (name == "--out") {
            made.out = value;
        } else if (name == "--commit") {
            made.commit = value;
        } else if (name == "--lengths") {
            made.lengths = numbers_of(name, value);
        } else if (name == "--trials") {
            made.trials = number_of<std::int32_t>(name, value, 1);
        } else if (name == "--seed") {
            made.seed = number_of<std::uint64_t>(name, value, 0);
        } else if (name == "--policy") {
            made.policy_files.push_back(value);
        } else if (name == "--rule") {
            made.names.push_back(value);
        } else if (name == "--threads") {
            made.threads = number_of<int>(name, value, 1);
        } else if (name == "--arithmetic") {
            made.kind = arithmetic_of(name, value);
        } else if (name == "--device") {
            made.device = quality_bench::device_of(name, value);
        } else {
            throw engine::error("argument",
                                "--model --data --out --commit --lengths --trials --seed --policy --rule "
                                "--threads --arithmetic --device",
                                engine::quoted(name));
        }
    }
    if (made.model.empty() || made.data.empty()) {
        throw engine::error("--model and --data", "both", "one or none");
    }
    return made;
}

/// Dense first: the others are paired with it.
std::vector<quality_bench::rule> rules_for(const arguments& chosen, const engine::prompt_model& model) {
    std::vector<quality_bench::rule> rules{
        {"dense", engine::dense(), std::nullopt},
        {"shipped", engine::default_policy(model.identity()), std::nullopt}};
    const auto known = quality_bench::known_rules();
    for (const std::string& name : chosen.names) {
        const auto found =
            std::find_if(known.begin(), known.end(), [&](const auto& rule) { return rule.name == name; });
        if (found == known.end()) {
            throw engine::error("--rule", "a rule of rules.cpp", engine::quoted(name));
        }
        rules.push_back(*found);
    }
    for (const std::string& file : chosen.policy_files) {
        rules.push_back(quality_bench::rule_of_file(file, model.config().layers));
        rules.back().name = file.substr(file.rfind('/') + 1);
    }
    quality_bench::check_names(rules);
    return rules;
}

bool likeliest_is(const float* logits, std::int32_t vocab, std::int32_t token) {
    return std::max_element(logits, logits + vocab) - logits == token;
}

/// Whether greedy continuation is the answer, token by token. Feeding the answer is the same as generating it
/// until a token differs, which is all that is asked.
bool finds(engine::prompt_model& model, const engine::policy& policy, const passkey_prompt& prompt) {
    const auto length = static_cast<std::int32_t>(prompt.tokens.size());
    const auto following = static_cast<std::int32_t>(prompt.answer.size());
    const std::int32_t vocab = model.config().vocab;
    const auto reading = model.reader_of(policy, length, following);
    engine::prompt_reader& pass = *reading;
    pass.prefill(prompt.tokens);
    if (!likeliest_is(pass.logits().data(), vocab, prompt.answer.front())) return false;
    pass.feed({prompt.answer.begin(), prompt.answer.end() - 1});
    for (std::size_t i = 1; i < prompt.answer.size(); ++i) {
        const float* row = pass.logits().data() + static_cast<std::ptrdiff_t>(i - 1) * vocab;
        if (!likeliest_is(row, vocab, prompt.answer[i])) return false;
    }
    return true;
}

/// Found counts of each rule, and the pairing of each with the dense run.
json summarise(const json& trials) {
    json summary = json::object();
    for (const json& trial : trials) {
        for (const auto& [name, found] : trial["found"].items()) {
            json& row = summary[name];
            if (row.is_null()) row = {{"trials", 0}, {"found", 0}};
            row["trials"] = row["trials"].get<int>() + 1;
            row["found"] = row["found"].get<int>() + (found.get<bool>() ? 1 : 0);
        }
    }
    for (auto& [name, row] : summary.items()) {
        if (name == "dense") continue;
        quality_bench::paired_counts counts;
        for (const json& trial : trials) {
            const json& found = trial["found"];
            if (!found.contains(name) || !found.contains("dense")) continue;
            const bool dense = found["dense"].get<bool>();
            const bool ours = found[name].get<bool>();
            std::int32_t& into = dense && ours ? counts.both
                                 : dense       ? counts.only_reference
                                 : ours        ? counts.only_ours
                                               : counts.neither;
            ++into;
        }
        const quality_bench::sign_test verdict = quality_bench::sign_test_of(counts);
        row["both"] = counts.both;
        row["only_dense"] = counts.only_reference;
        row["only_ours"] = counts.only_ours;
        row["neither"] = counts.neither;
        row["p_fewer"] = verdict.fewer;
        row["p_two_sided"] = verdict.two_sided;
    }
    return summary;
}

void write(const json& results, const std::string& path) {
    const std::string temporary = path + ".part";
    std::ofstream file(temporary);
    file << results.dump(1) << '\n';
    file.close();
    if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
        throw engine::error("--out", "a file that can be written", engine::quoted(path));
    }
}

/// What an earlier run left in the file, if it was about the same prompts.
void go_on(json& results, const arguments& chosen) {
    std::ifstream before(chosen.out);
    if (!before) return;
    const json found = json::parse(before, nullptr, false);
    if (!found.is_object()) throw engine::error("--out", "a results file or none", "something else");
    for (const char* same : {"arithmetic", "seed", "trials", "sentence", "question"}) {
        if (found.value(same, json()) != results[same]) {
            throw engine::error("--out", std::string("a results file with the same ") + same, "another");
        }
    }
    results["lengths"] = found.at("lengths");
}

void run(const arguments& chosen) {
    engine::cpu::set_threads(chosen.threads);
    const auto opened = quality_bench::open_model(chosen.model, chosen.device, chosen.kind);
    engine::prompt_model& model = *opened;
    const std::vector<std::int32_t> essays = quality_bench::read_stream(chosen.data + "/essays.i32");
    const std::vector<quality_bench::rule> rules = rules_for(chosen, model);
    const auto encode = [&](const std::string& text) { return model.words().encode(text); };
    json results{{"commit", chosen.commit},
                 {"cpu", engine::cpu_name()},
                 {"device", model.device()},
                 {"arithmetic", model.arithmetic()},
                 {"seed", chosen.seed},
                 {"trials", chosen.trials},
                 {"sentence", quality_bench::passkey_sentence("KEY")},
                 {"question", quality_bench::passkey_question()},
                 {"lengths", json::object()}};
    go_on(results, chosen);
    for (const std::int64_t length : chosen.lengths) {
        json& of = results["lengths"][std::to_string(length)];
        if (of.is_null()) of = {{"summary", json::object()}, {"trials", json::array()}};
        for (std::int32_t trial = 0; trial < chosen.trials; ++trial) {
            const passkey_prompt prompt =
                quality_bench::make_passkey_prompt(encode, essays, length, trial, chosen.trials, chosen.seed);
            const auto place = static_cast<std::size_t>(trial);
            if (of["trials"].size() <= place) {
                of["trials"].push_back({{"trial", trial},
                                        {"depth", prompt.depth},
                                        {"key", prompt.key},
                                        {"prompt", quality_bench::hash_of(prompt.tokens)},
                                        {"found", json::object()}});
            }
            json& row = of["trials"][place];
            if (row["prompt"] != quality_bench::hash_of(prompt.tokens)) {
                throw engine::error("--out", "a results file about the same prompts", "another");
            }
            bool fresh = false;
            for (const auto& rule : rules) {
                if (row["found"].contains(rule.name)) continue;
                row["found"][rule.name] = finds(model, rule.policy, prompt);
                fresh = true;
            }
            if (!fresh) continue;
            of["summary"] = summarise(of["trials"]);
            write(results, chosen.out);
        }
        for (const auto& [name, row] : of["summary"].items()) {
            std::printf("%5lld tokens  %-24s %2d of %2d", static_cast<long long>(length), name.c_str(),
                        row["found"].get<int>(), row["trials"].get<int>());
            if (row.contains("p_fewer")) {
                std::printf("  dense alone %2d, alone %2d, p (fewer) %.3f, p (two-sided) %.3f",
                            row["only_dense"].get<int>(), row["only_ours"].get<int>(),
                            row["p_fewer"].get<double>(), row["p_two_sided"].get<double>());
            }
            std::printf("\n");
        }
        std::fflush(stdout);
    }
}

} // namespace

int main(int argc, char** argv) {
    try {
        run(parse(argc, argv));
        return 0;
    } catch (const std::exception& failure) {
        std::cerr << "uniprefill-passkeys: " << failure.what() << '\n';
        return 2;
    }
}
