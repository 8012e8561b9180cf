// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What dropping tokens does to a real model's answers: each rule on each window, compared with the dense run.
// Results are written after every window, and windows that a results file already holds are not run again.

#include "quality/open_model.hpp"
#include "quality/option_values.hpp"
#include "quality/passkey_prompt.hpp"
#include "quality/rules.hpp"
#include "quality/windows.hpp"

#include "engine/app/host_info.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/app/quality.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"
#include "engine/reading/reader.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace {

using json = nlohmann::ordered_json;

struct arguments {
    std::string model;
    std::string data;
    std::string out = "quality.json";
    std::string commit;
    std::string between;  ///< a file for the essays' text between windows, instead of measuring
    std::string tokenize; ///< a list of text files to turn into a stream, instead of measuring
    std::vector<std::string> policy_files;
    std::string cache;         ///< a folder for the dense answers; empty: none
    std::string set = "kinds"; ///< of rules: known_rules(), mean_rules(), chunk_rules() or ablation_rules()
    std::vector<std::string> names; ///< of the rules to measure; none: all
    int threads = engine::usable_cores();
    engine::cpu::arithmetic kind = engine::cpu::arithmetic::automatic;
    quality_bench::device device = quality_bench::device::cpu;
};

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
        } else if (name == "--tokenize") {
            made.tokenize = value;
        } else if (name == "--cache") {
            made.cache = value;
        } else if (name == "--between") {
            made.between = value;
        } else if (name == "--policy") {
            made.policy_files.push_back(value);
        } else if (name == "--rules") {
            if (value != "kinds" && value != "means" && value != "chunks" && value != "ablations") {
                throw engine::error(name, "kinds, means, chunks or ablations", value);
            }
            made.set = value;
        } else if (name == "--rule") {
            made.names.push_back(value);
        } else if (name == "--threads") {
            made.threads = quality_bench::number_of(name, value, 1);
        } else if (name == "--arithmetic") {
            made.kind = quality_bench::arithmetic_of(name, value);
        } else if (name == "--device") {
            made.device = quality_bench::device_of(name, value);
        } else {
            throw engine::error(
                "argument",
                "--model --data --out --commit --device --threads --rules --rule --policy --arithmetic "
                "--tokenize --between --cache",
                name);
        }
    }
    if (made.model.empty() || (made.data.empty() && made.tokenize.empty())) {
        throw engine::error("--model and --data", "both", "one or none");
    }
    if (made.device == quality_bench::device::cuda && made.set == "chunks") {
        throw engine::error("--rules", "kinds, means or ablations on a CUDA device", made.set);
    }
    return made;
}

/// Each file of the list tokenised alone, one after another, as a stream of token ids.
void tokenize(const arguments& chosen) {
    const engine::tokenizer words(engine::gguf::open(chosen.model));
    std::ifstream list(chosen.tokenize);
    if (!list) throw engine::error("--tokenize", "a file that can be read", chosen.tokenize);
    std::ofstream out(chosen.out, std::ios::binary);
    std::string path;
    while (std::getline(list, path)) {
        std::ifstream file(path, std::ios::binary);
        if (!file) throw engine::error("--tokenize", "a list of files that can be read", path);
        const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
        for (const std::int32_t token : words.encode(text)) {
            const auto bits = static_cast<std::uint32_t>(token);
            for (int shift = 0; shift < 32; shift += 8) {
                out.put(static_cast<char>((bits >> shift) & 0xffu));
            }
        }
    }
    if (!out.flush()) throw engine::error("--out", "a file that can be written", chosen.out);
}

/// Text of the streams that no window holds, for a calibration that is judged on the windows.
void write_between(const arguments& chosen) {
    const engine::tokenizer words(engine::gguf::open(chosen.model));
    std::ofstream out(chosen.between, std::ios::binary);
    for (const std::int32_t token : quality_bench::essays_between_windows(chosen.data)) {
        out << words.bytes_of(token);
    }
    if (!out.flush()) throw engine::error("--between", "a file that can be written", chosen.between);
}

/// Of all threads of this process, which neighbours on a busy machine lengthen little.
double processor_seconds() {
    return static_cast<double>(std::clock()) / CLOCKS_PER_SEC;
}

/// Logits of the prompt's last row and of the fed rows, and what the prompt took: of the processor, or of the
/// device.
struct answers {
    std::vector<float> logits;
    double prefill_s = 0;
};

answers ask(engine::prompt_reader& pass, const quality_bench::window& window, quality_bench::device on) {
    answers made;
    const double start = processor_seconds();
    pass.prefill(window.prompt);
    made.prefill_s = on == quality_bench::device::cpu ? processor_seconds() - start : pass.prefill_seconds();
    made.logits = pass.logits();
    pass.feed(window.fed);
    made.logits.insert(made.logits.end(), pass.logits().begin(), pass.logits().end());
    return made;
}

/// The dense run's answers, from the cache where it has them: prompt, model and arithmetic are its key.
answers ask_dense(engine::prompt_model& model, const arguments& chosen, const quality_bench::window& window) {
    using quality_bench::fed_tokens;
    const auto size = static_cast<std::streamsize>(
        std::size_t{fed_tokens + 1} * static_cast<std::size_t>(model.config().vocab) * sizeof(float));
    std::string path;
    if (!chosen.cache.empty() && chosen.device == quality_bench::device::cpu) { // a device reads again sooner
        std::vector<std::int32_t> key = window.prompt;
        key.insert(key.end(), window.fed.begin(), window.fed.end());
        key.push_back(static_cast<std::int32_t>(std::filesystem::file_size(chosen.model) & 0x7fffffff));
        path = chosen.cache + "/" + quality_bench::hash_of(key) + "-" + model.arithmetic() + ".dense";
        answers held;
        held.logits.resize(static_cast<std::size_t>(size) / sizeof(float));
        std::ifstream file(path, std::ios::binary);
        if (file.read(reinterpret_cast<char*>(&held.prefill_s), sizeof(double)) &&
            file.read(reinterpret_cast<char*>(held.logits.data()), size)) {
            return held;
        }
    }
    const auto dense = model.reader_of(engine::dense(), quality_bench::prompt_tokens, fed_tokens);
    const answers made = ask(*dense, window, chosen.device);
    if (!path.empty()) {
        std::filesystem::create_directories(chosen.cache);
        std::ofstream file(path + ".part", std::ios::binary);
        file.write(reinterpret_cast<const char*>(&made.prefill_s), sizeof(double));
        file.write(reinterpret_cast<const char*>(made.logits.data()), size);
        file.close();
        if (!file) throw engine::error("--cache", "a folder with room", engine::quoted(chosen.cache));
        std::filesystem::rename(path + ".part", path);
    }
    return made;
}

std::unique_ptr<engine::prompt_reader> reader_of(engine::prompt_model& model, const arguments& chosen,
                                                 const quality_bench::rule& rule) {
    using quality_bench::fed_tokens;
    using quality_bench::prompt_tokens;
    if (chosen.device == quality_bench::device::cuda) {
        return model.reader_of(rule.policy, prompt_tokens, fed_tokens);
    }
    return std::make_unique<engine::reader>(dynamic_cast<engine::loaded_model&>(model), rule.policy,
                                            prompt_tokens, fed_tokens, rule.reading);
}

/// Every rule that @p result, a window's, doesn't hold yet.
void measure(engine::prompt_model& model, const arguments& chosen, const quality_bench::window& window,
             const std::vector<quality_bench::rule>& rules, json& result) {
    using quality_bench::fed_tokens;
    using quality_bench::prompt_tokens;
    const answers expected = ask_dense(model, chosen, window);
    result["dense_nll_expected"] = window.dense_nll;
    const bool on_cpu = chosen.device == quality_bench::device::cpu;
    result[on_cpu ? "dense_processor_s" : "dense_s"] = expected.prefill_s;
    for (const auto& rule : rules) {
        if (result["rules"].contains(rule.name)) continue;
        const auto ours = reader_of(model, chosen, rule);
        const answers came = ask(*ours, window, chosen.device);
        const engine::quality q = engine::compare_logits(expected.logits.data(), came.logits.data(),
                                                         fed_tokens + 1, model.config().vocab, window.fed);
        result["dense_nll"] = q.dense_nll;
        result["rules"][rule.name] = {
            {"kl_mean", q.kl_mean},
            {"kl_max", q.kl_max},
            {"agree", q.agree},
            {"sure", q.agree_sure},
            {"dnll", q.dnll},
            {"lin", engine::share_of_rows(ours->layers(), prompt_tokens)},
            {"att", engine::share_of_pairs(ours->layers(), prompt_tokens)},
            {"estimator", engine::share_of_estimator_pairs(ours->layers(), prompt_tokens)},
            {"held", ours->held_share()},
            {"time", came.prefill_s / expected.prefill_s},
        };
        if (const auto* const read = dynamic_cast<const engine::reader*>(ours.get())) {
            result["rules"][rule.name]["decision_s"] = read->decision_seconds();
        }
    }
}

double mean(const std::vector<double>& values) {
    double sum = 0;
    for (const double value : values) {
        sum += value;
    }
    return values.empty() ? 0 : sum / static_cast<double>(values.size());
}

double median(std::vector<double> values) {
    if (values.empty()) return 0;
    std::sort(values.begin(), values.end());
    const std::size_t half = values.size() / 2;
    return values.size() % 2 != 0 ? values[half] : (values[half - 1] + values[half]) / 2;
}

json summarise(const json& windows, const quality_bench::rule& rule) {
    std::map<std::string, std::vector<double>> columns;
    for (const auto& window : windows) {
        if (!window["rules"].contains(rule.name)) continue;
        const json& row = window["rules"][rule.name];
        for (const auto& [name, value] : row.items()) {
            if (value.is_number()) columns[name].push_back(value);
        }
        columns[window["stream"]].push_back(row["kl_mean"]);
    }
    const std::vector<double>& kl = columns["kl_mean"];
    json summary{{"windows", kl.size()},
                 {"kl_mean", mean(kl)},
                 {"kl_median", median(kl)},
                 {"kl_max", *std::max_element(kl.begin(), kl.end())}};
    for (const char* name : {"essays", "code", "law"}) {
        summary[std::string("kl_") + name] = mean(columns[name]);
    }
    for (const char* name : {"agree", "sure", "dnll", "lin", "att", "held"}) {
        if (!columns[name].empty()) summary[name] = mean(columns[name]);
    }
    for (const char* name : {"time", "decision_s"}) { // of a machine that may have been busy otherwise
        if (!columns[name].empty()) summary[name] = median(columns[name]);
    }
    if (rule.expected) {
        summary["expected"] = {
            {"kl_mean", rule.expected->kl_mean}, {"lin", rule.expected->lin}, {"att", rule.expected->att}};
    }
    return summary;
}

void write(const json& results, const std::string& path) {
    const std::string temporary = path + ".part";
    std::ofstream file(temporary);
    file << results.dump(1) << '\n';
    file.close();
    if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
        throw engine::error("--out", "a file that can be written", path);
    }
}

/// The results of a window, at the end of the list where there were none.
json& results_of(json& windows, const quality_bench::window& wanted) {
    for (json& window : windows) {
        if (window["stream"] == wanted.stream && window["window"] == wanted.index) return window;
    }
    windows.push_back({{"stream", wanted.stream}, {"window", wanted.index}, {"rules", json::object()}});
    return windows.back();
}

/// The rules that the command line asks for.
std::vector<quality_bench::rule> rules_for(const arguments& chosen, std::int32_t layers) {
    auto rules = chosen.set == "means"       ? quality_bench::mean_rules()
                 : chosen.set == "chunks"    ? quality_bench::chunk_rules()
                 : chosen.set == "ablations" ? quality_bench::ablation_rules()
                                             : quality_bench::known_rules();
    for (const std::string& path : chosen.policy_files) {
        rules.push_back(quality_bench::rule_of_file(path, layers));
    }
    quality_bench::check_names(rules);
    if (chosen.device == quality_bench::device::cuda && chosen.names.empty()) {
        const auto others = std::stable_partition(rules.begin(), rules.end(), [](const auto& rule) {
            return quality_bench::runs_on_cuda(rule.policy);
        });
        for (auto rule = others; rule != rules.end(); ++rule) {
            std::printf("left out, as the CUDA engine doesn't do it: %s\n", rule->name.c_str());
        }
        rules.erase(others, rules.end());
    }
    if (chosen.names.empty()) return rules;
    std::vector<quality_bench::rule> asked;
    for (const std::string& name : chosen.names) {
        const auto found =
            std::find_if(rules.begin(), rules.end(), [&](const auto& rule) { return rule.name == name; });
        if (found == rules.end()) throw engine::error("--rule", "a rule of the set", name);
        asked.push_back(*found);
    }
    return asked;
}

/// By rising index, so that a run that is cut short has windows of every stream.
std::vector<quality_bench::window> windows_of(const arguments& chosen) {
    auto windows = quality_bench::read_windows(chosen.data);
    std::stable_sort(windows.begin(), windows.end(),
                     [](const auto& a, const auto& b) { return a.index < b.index; });
    return windows;
}

void run(const arguments& chosen) {
    engine::cpu::set_threads(chosen.threads);
    const auto opened = quality_bench::open_model(chosen.model, chosen.device, chosen.kind);
    engine::prompt_model& model = *opened;
    const std::vector<quality_bench::rule> rules = rules_for(chosen, model.config().layers);
    json results{{"commit", chosen.commit},
                 {"cpu", engine::cpu_name()},
                 {"threads", chosen.threads},
                 {"device", model.device()},
                 {"arithmetic", model.arithmetic()},
                 {"prompt_tokens", quality_bench::prompt_tokens},
                 {"fed_tokens", quality_bench::fed_tokens},
                 {"summary", json::object()},
                 {"windows", json::array()}};
    if (std::ifstream before(chosen.out); before) {
        const json found = json::parse(before);
        if (found["arithmetic"] == results["arithmetic"]) {
            results["summary"] = found["summary"];
            results["windows"] = found["windows"];
        }
    }
    json& windows = results["windows"];
    for (const auto& window : windows_of(chosen)) {
        json& row = results_of(windows, window);
        const auto held = [&row](const auto& rule) { return row["rules"].contains(rule.name); };
        if (std::all_of(rules.begin(), rules.end(), held)) continue;
        measure(model, chosen, window, rules, row);
        for (const auto& rule : rules) {
            results["summary"][rule.name] = summarise(windows, rule);
        }
        write(results, chosen.out);
        std::printf("%-6s %2d  dense NLL %.3f (%.2f)", window.stream.c_str(), window.index,
                    row["dense_nll"].get<double>(), window.dense_nll);
        for (const auto& rule : rules) {
            const json& of = row["rules"][rule.name];
            std::printf("  %s: KL %.4f lin %.3f att %.3f", rule.name.c_str(), of["kl_mean"].get<double>(),
                        of["lin"].get<double>(), of["att"].get<double>());
        }
        std::printf("\n");
        std::fflush(stdout);
    }
    std::printf("\n%-20s %8s %8s %8s %8s %8s %8s\n", "rule", "KL mean", "median", "max", "dNLL", "lin",
                "att");
    for (const auto& [name, row] : results["summary"].items()) {
        std::printf("%-20s %8.4f %8.4f %8.4f %+8.4f %8.3f %8.3f\n", name.c_str(),
                    row["kl_mean"].get<double>(), row["kl_median"].get<double>(), row["kl_max"].get<double>(),
                    row["dnll"].get<double>(), row["lin"].get<double>(), row["att"].get<double>());
    }
}

} // namespace

int main(int argc, char** argv) {
    try {
        const arguments chosen = parse(argc, argv);
        if (!chosen.between.empty()) {
            write_between(chosen);
        } else if (chosen.tokenize.empty()) {
            run(chosen);
        } else {
            tokenize(chosen);
        }
        return 0;
    } catch (const std::exception& failure) {
        std::cerr << "uniprefill-quality: " << failure.what() << '\n';
        return 2;
    }
}
