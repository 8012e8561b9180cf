// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/model_shapes.hpp"
#include "engine/app/options.hpp"
#include "engine/app/policy_file.hpp"
#include "support/catch.hpp"

#include <sstream>
#include <string>
#include <utility>
#include <vector>

using app_test::contains;
using app_test::refusal;
using engine::options;

namespace {

std::vector<std::string> words(const std::string& line) {
    std::istringstream in(line);
    std::vector<std::string> out;
    for (std::string word; in >> word;) {
        out.push_back(word);
    }
    return out;
}

options parsed(const std::string& line) {
    return engine::parse_command_line(words(line), 4).run.value();
}

std::string refused(const std::string& line) {
    return refusal([&] { parsed(line); });
}

const engine::model_identity smollm2 = {"SmolLM2", 30, 576};

engine::policy resolved(const std::string& line) {
    return engine::resolve_policy(parsed("compare -m m -t hello " + line), smollm2);
}

std::string refused_policy(const std::string& line) {
    return refusal([&] { resolved(line); });
}

} // namespace

TEST_CASE("app: options of the commands") {
    const options compare =
        parsed("compare --model m.gguf --text-file - --threads 3 --arithmetic bf16x3 --tokens 7 "
               "--seed 18446744073709551615 --temperature 0.5 --top-k 4 --top-p 0.9 --out d --json "
               "--continuation 12");
    CHECK(compare.command == engine::command::compare);
    CHECK(compare.model == "m.gguf");
    CHECK(compare.text_file.value() == "-");
    CHECK(!compare.text);
    CHECK(compare.threads == 3);
    CHECK(compare.arithmetic == engine::arithmetic::bf16x3);
    CHECK(compare.tokens == 7);
    CHECK(compare.sampling.seed == 18446744073709551615U);
    CHECK(compare.sampling.temperature == 0.5);
    CHECK(compare.sampling.top_k == 4);
    CHECK(compare.sampling.top_p == 0.9);
    CHECK(compare.out == "d");
    CHECK(compare.json);
    CHECK(compare.continuation.value() == 12);
    CHECK(!compare.policy.any());

    const options generate = parsed("generate -m m -t hi --dense");
    CHECK(generate.command == engine::command::generate);
    CHECK(generate.dense);
    CHECK(generate.threads == 4);
    CHECK(generate.tokens == 128);

    CHECK(parsed("inspect --model=x --json").model == "x");
    CHECK(parsed("inspect x").model == "x");
}

TEST_CASE("app: options of calibrate") {
    const options chosen =
        parsed("calibrate m.gguf --texts a.txt b.txt --tokens 2048 --windows 6 --divergence 0.02 "
               "--for-length 32768 --lists off --time-limit 1.5 --seed 7 --threads 2 --out p.json");
    CHECK(chosen.command == engine::command::calibrate);
    CHECK(chosen.model == "m.gguf");
    CHECK(chosen.calibrate.texts == std::vector<std::string>{"a.txt", "b.txt"});
    CHECK(chosen.calibrate.tokens == 2048);
    CHECK(chosen.calibrate.windows == 6);
    CHECK(chosen.calibrate.divergence == 0.02);
    CHECK(chosen.calibrate.for_length.value() == 32768);
    CHECK(!chosen.calibrate.lists);
    CHECK(chosen.calibrate.minutes == 1.5);
    CHECK(chosen.calibrate.seed == 7);
    CHECK(chosen.calibrate.out == "p.json");
    CHECK(chosen.threads == 2);

    const options usual = parsed("calibrate --texts a --texts b -m m");
    CHECK(usual.calibrate.texts.size() == 2);
    CHECK(usual.calibrate.tokens == 4096);
    CHECK(usual.calibrate.windows == 8);
    CHECK(usual.calibrate.lists);
    CHECK(!usual.calibrate.for_length);
    CHECK(usual.calibrate.minutes == 60);

    const std::string good = "calibrate m --texts a ";
    CHECK(refused(good) == "");
    CHECK(refused("calibrate m") == "--texts: expected text files, came none");
    CHECK(contains(refused("calibrate --texts a"), "--model: expected the path of a GGUF file, came none"));
    CHECK(contains(refused(good + "--tokens 511"), "--tokens: expected a whole number of at least 512"));
    CHECK(contains(refused(good + "--windows 0"), "--windows: expected a whole number from 1 to 1000"));
    for (const std::string bad : {"0", "-1", "nan", "inf", "x"}) {
        CHECK(contains(refused(good + "--divergence " + bad), "--divergence: expected a number above 0"));
        CHECK(contains(refused(good + "--time-limit " + bad), "--time-limit: expected a number above 0"));
    }
    CHECK(contains(refused(good + "--lists maybe"), "--lists: expected on or off, came 'maybe'"));
    CHECK(contains(refused(good + "--for-length 0"), "--for-length"));

    CHECK(usual.device == engine::device_kind::cpu);
    CHECK(!usual.calibrate.lin);
    CHECK(!usual.calibrate.worst);
    CHECK(!usual.calibrate.divergence);
    const options within =
        parsed(good + "--device cuda --lin 0.45 --att 0.1 --worst 0.5 --begin p.json --lists off");
    CHECK(!within.calibrate.lists);
    CHECK(within.device == engine::device_kind::cuda);
    CHECK(within.calibrate.lin.value() == 0.45);
    CHECK(within.calibrate.att.value() == 0.1);
    CHECK(within.calibrate.worst == 0.5);
    CHECK(within.calibrate.begin == "p.json");
    CHECK(contains(refused(good + "--device gpu"), "--device: expected cpu or cuda, came 'gpu'"));
    CHECK(contains(refused(good + "--lin 0.5"), "--att: expected a number, as the other bound is given"));
    CHECK(contains(refused(good + "--att 0.5"), "--lin: expected a number, as the other bound is given"));
    CHECK(contains(refused(good + "--begin p.json"), "--begin: expected --lin and --att beside it"));
    CHECK(contains(refused(good + "--worst 0.1"), "--worst: expected --lin and --att beside it"));
    CHECK(contains(refused(good + "--lin 0.5 --att 0.5 --divergence 0.01"),
                   "--divergence: expected neither --lin nor --att beside it, came both"));
    for (const std::string bad : {"0", "1.1", "nan", "x"}) {
        CHECK(contains(refused(good + "--att 1 --lin " + bad), "--lin: expected a number in (0, 1]"));
        CHECK(contains(refused(good + "--lin 1 --att " + bad), "--att: expected a number in (0, 1]"));
    }
    CHECK(contains(refused(good + "--worst -1"), "--worst: expected a number of at least 0, came '-1'"));
}

TEST_CASE("app: options of serve-sim") {
    const options serve =
        parsed("serve-sim -m m --texts list --trace t.csv --requests 9 --rate 0.5 --seed 7 --order 3 "
               "--min-prompt 10 --max-prompt 20 --min-new 1 --max-new 2 --shared 0 --slots 3 "
               "--prefill-budget 600 --pages 100 --preemption swap --no-prefix-cache --step-seconds 0.25 "
               "--processor-time --check --span 512 --json");
    CHECK(serve.command == engine::command::serve_sim);
    CHECK(serve.serve.workload.texts == "list");
    CHECK(serve.serve.workload.trace == "t.csv");
    CHECK(serve.serve.workload.requests == 9);
    CHECK(serve.serve.workload.rate == 0.5);
    CHECK(serve.serve.workload.seed == 7);
    CHECK(serve.serve.workload.order == 3);
    CHECK(serve.serve.workload.min_prompt == 10);
    CHECK(serve.serve.workload.max_prompt == 20);
    CHECK(serve.serve.workload.min_new == 1);
    CHECK(serve.serve.workload.max_new == 2);
    CHECK(serve.serve.workload.shared == 0);
    CHECK(serve.serve.slots == 3);
    CHECK(serve.serve.budget == 600);
    CHECK(serve.serve.pages == 100);
    CHECK(serve.serve.preemption == engine::preemption::swap);
    CHECK(serve.serve.without_prefix_cache);
    CHECK(serve.serve.step_seconds == 0.25);
    CHECK(serve.serve.processor_time);
    CHECK(serve.serve.check);
    CHECK(serve.policy.span.value() == 512);
    CHECK(serve.json);

    CHECK(refused("serve-sim -m m") == "--texts: expected a file that names text files, came none");
    const std::string good = "serve-sim -m m --texts l ";
    CHECK(refused(good) == "");
    CHECK(contains(refused(good + "--rate 0"), "--rate: expected a number above 0"));
    CHECK(contains(refused(good + "--shared 1.5"), "--shared: expected a number in [0, 1]"));
    CHECK(contains(refused(good + "--preemption kill"), "--preemption: expected recompute or swap"));
    CHECK(contains(refused(good + "--max-prompt 5"), "--max-prompt: expected at least 200, came 5"));
    CHECK(contains(refused(good + "--max-new 2"), "--max-new: expected at least 8, came 2"));
    CHECK(contains(refused(good + "--slots 0"), "--slots"));
}

TEST_CASE("app: texts are taken as they are") {
    for (const std::string text :
         {"[a, b]", "-x", "--model", "a=b", "compare", "{}", "%", "two words", "\n", "\xff"}) {
        const auto line = engine::parse_command_line({"compare", "--text", text, "-m", "m"}, 4);
        INFO(text);
        CHECK(line.run.value().text.value() == text);
        CHECK(line.run.value().model == "m");
    }
    CHECK(engine::parse_command_line({"compare", "--text=a = b", "-m", "m"}, 4).run.value().text.value() ==
          "a = b");
}

TEST_CASE("app: help and version are texts, not errors") {
    const auto help_of = [](const std::string& line) {
        const engine::command_line understood = engine::parse_command_line(words(line), 4);
        CHECK(!understood.run);
        return understood.print;
    };
    CHECK(contains(help_of("--help"), "compare"));
    CHECK(contains(help_of("-h"), "inspect"));
    const std::string compare = help_of("compare --help");
    for (const char* option :
         {"--model",        "--text",     "--text-file",   "--policy",      "--layers",   "--p",
          "--scope",        "--selector", "--budget",      "--min-kept",    "--max-kept", "--block-rows",
          "--observations", "--sink",     "--tail",        "--propagation", "--threads",  "--arithmetic",
          "--tokens",       "--seed",     "--temperature", "--out",         "--json",     "--continuation"}) {
        INFO(option);
        CHECK(contains(compare, option));
    }
    CHECK(contains(help_of("generate --p 7 --help"), "--dense")); // help wins over the bad value
    CHECK(contains(help_of("--version"), "uniprefill-engine 0."));
}

TEST_CASE("app: bad command lines are refused in one line that says it all") {
    const std::string base = "compare -m m -t hello ";
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "command: expected calibrate, compare, generate, inspect, prefill or serve-sim "
             "(uniprefill-engine --help), "
             "came none"},
        {"run",
         "command: expected calibrate, compare, generate, inspect, prefill or serve-sim (uniprefill-engine "
         "--help), came 'run'"},
        {"compare -t hello", "--model: expected the path of a GGUF file, came none"},
        {"inspect", "--model: expected the path of a GGUF file, came none"},
        {"compare -m m", "prompt: expected --text or --text-file, came neither"},
        {"compare -m m -t a -f b", "prompt: expected one of --text and --text-file, came both"},
        {base + "--p", "--p: expected one value, came none"},
        {base + "--p= --json", "--p: expected one value, came none after the ="},
        {base + "--p 0.5 --p 0.6", "--p: expected one value, came more than one"},
        {base + "--p 0", "--p: expected a number in (0, 1], came '0'"},
        {base + "--p 1.01", "--p: expected a number in (0, 1], came '1.01'"},
        {base + "--p -0.5", "--p: expected a number in (0, 1], came '-0.5'"},
        {base + "--p nan", "--p: expected a number in (0, 1], came 'nan'"},
        {base + "--p 0.9x", "--p: expected a number in (0, 1], came '0.9x'"},
        {base + "-G 7", "--block-rows: expected a whole number from 8 to 256, came '7'"},
        {base + "--block-rows 257", "--block-rows: expected a whole number from 8 to 256, came '257'"},
        {base + "-n 0", "--observations: expected a whole number from 1 to 512, came '0'"},
        {base + "-n 513", "--observations: expected a whole number from 1 to 512, came '513'"},
        {base + "-n 99999999999999999999", "--observations: expected a whole number from 1 to 512"},
        {base + "--sink -1", "--sink: expected a whole number of at least 0, came '-1'"},
        {base + "--threads 5", "--threads: expected a whole number from 1 to 4, came '5'"},
        {base + "--threads 0", "--threads: expected a whole number from 1 to 4, came '0'"},
        {base + "--threads two", "--threads: expected a whole number from 1 to 4, came 'two'"},
        {base + "--scope inside", "--scope: expected free or all, came 'inside'"},
        {base + "--selector best",
         "--selector: expected top-p, fixed-ratio, fixed-budget or max-fraction, came 'best'"},
        {base + "--propagation never", "--propagation: expected cumulative or revive, came 'never'"},
        {base + "--arithmetic int8", "--arithmetic: expected auto, fp32, bf16 or bf16x3, came 'int8'"},
        {base + "--layers 7,11,", "--layers: expected a whole number from 0 to 4095, came ''"},
        {base + "--layers 7,x", "--layers: expected a whole number from 0 to 4095, came 'x'"},
        {base + "--layers 7:2", "--layers: expected a number in (0, 1], came '2'"},
        {base + "--layers 7,7", "--layers: expected layers in rising order, each once, came 7 after 7"},
        {base + "--layers 11,7", "--layers: expected layers in rising order, each once, came 7 after 11"},
        {base + "--selector fixed-budget", "--budget: expected the rows"},
        {base + "--selector top-p --budget 5",
         "--budget: expected --selector fixed-budget beside it, came top-p"},
        {base + "--selector fixed-ratio", "--p: expected the share for --selector fixed-ratio, came none"},
        {base + "--selector fixed-ratio --layers 7:0.5,9",
         "--p: expected the share for --selector fixed-ratio, came none"},
        {base + "--temperature -1", "--temperature: expected a number of at least 0, came '-1'"},
        {base + "--temperature inf", "--temperature: expected a number of at least 0, came 'inf'"},
        {base + "--seed -1", "--seed: expected a whole number of at least 0, came '-1'"},
        {base + "--nonsense",
         "command line: expected options that uniprefill-engine compare --help lists, came '--nonsense'"},
        {base + "stray", "came 'stray'"},
        {base + "--dense", "came '--dense'"},
        {"generate -m m -t x --dense --p 0.5",
         "--dense: expected no option about the policy beside it, came one"},
        {"generate -m m -t x --out d", "came '--out'"},
        {"inspect m n", "came 'n'"},
        {"compare generate -m m", "came 'generate"},
    };
    for (const auto& [line, expected] : cases) {
        const std::string said = refused(line);
        INFO(line << "\n" << said);
        CHECK(contains(said, expected));
        CHECK(!contains(said, "\n"));
    }
    CHECK(refusal([] {
              engine::parse_command_line({"compare", "-m", "m", "--text", ""}, 4);
          }) == "--text: expected a prompt, came an empty text");
    CHECK(!contains(refusal([] { engine::parse_command_line({"compare", "\x1b[2J\n"}, 4); }), "\x1b"));
}

TEST_CASE("app: the policy follows from model, file and options") {
    CHECK(resolved("").rules.size() == 8);
    CHECK(contains(resolved("").name, "schedule A"));
    CHECK(engine::resolve_policy(parsed("generate -m m -t x --dense"), smollm2).rules.empty());

    const engine::policy changed =
        resolved("--p 0.9 --scope all -G 32 -n 64 --sink 5 --propagation revive --min-kept 3");
    REQUIRE(changed.rules.size() == 8);
    CHECK(engine::share_of(changed.rules[3].rule) == 0.9);
    CHECK(changed.rules[3].rule.scope == uniprefill::mass_scope::all);
    CHECK(changed.rules[3].rule.min_kept_rows == 3);
    CHECK(changed.block_rows == 32);
    CHECK(changed.num_observations == 64);
    CHECK(changed.tail == 64); // follows n, as it did
    CHECK(changed.sink == 5);
    CHECK(changed.propagation == uniprefill::propagation::revive);
    CHECK(contains(changed.name, "changed by options"));
    CHECK(resolved("-n 64 --tail 9").tail == 9);

    REQUIRE(resolved("").lists);
    CHECK(engine::share_of(resolved("").lists->rule) == 0.99);
    CHECK_FALSE(engine::resolve_policy(parsed("generate -m m -t x --dense"), smollm2).lists);
    CHECK_FALSE(resolved("--lists off").lists);
    {
        const app_test::scratch_folder folder;
        const std::string file = (folder.path() / "p.json").string();
        const auto off = [&](const std::string& lists) {
            std::ofstream(file) << R"({"uniprefill_policy": 1, "layers": [], "lists": )" << lists << "}";
            return resolved("--policy " + file + " --lists off");
        };
        CHECK_FALSE(off(R"({"mean": true, "layers": [3]})").list_means);
        CHECK(off(R"({"mean": true, "layers": [3]})").list_rules.empty());
        CHECK_FALSE(off(R"({"query_rows": 64})").list_sampling);
    }
    CHECK(engine::share_of(resolved("--lists 0.95").lists->rule) == 0.95);
    CHECK(resolved("--lists 0.95").lists->window == 256);
    CHECK(contains(resolved("--lists 0.95").name, "changed by options"));
    CHECK(contains(refused_policy("--lists 1.5"), "--lists: expected a number in (0, 1], came"));

    const engine::policy listed = resolved("--layers 7:0.9,11,15 --p 0.5");
    REQUIRE(listed.rules.size() == 3);
    CHECK(engine::share_of(listed.rules[0].rule) == 0.9);
    CHECK(engine::share_of(listed.rules[1].rule) == 0.5);
    CHECK(engine::share_of(resolved("--layers 7").rules[0].rule) == 0.98);
    CHECK(engine::share_of(resolved("--layers 7 --scope all").rules[0].rule) == 0.99);
    CHECK(resolved("--selector fixed-budget --budget 512").rules[0].rule.budget_rows == 512);

    CHECK(refused_policy("--layers 7,30") ==
          "--layers: expected layers from 0 to 29, which the model has, came layer 30");
    CHECK(contains(refused_policy("--span 100"), "policy: span: expected"));
    CHECK(contains(refused_policy("--min-kept 9 --max-kept 8"), "max_kept"));
    CHECK(contains(refused_policy("--budget 9"), "budget: expected none unless"));
    CHECK(contains(refused_policy("--policy missing.json"),
                   "policy file 'missing.json': expected a file that can be read"));

    const app_test::scratch_folder folder;
    const std::string path = (folder.path() / "p.json").string();
    std::ofstream(path) << R"({"uniprefill_policy": 1, "tail": 7, "layers": [{"layer": 40, "p": 0.5}]})";
    CHECK(contains(refused_policy("--policy " + path), "p.json: layers: expected layers from 0 to 29"));
    CHECK(contains(refused_policy("--policy " + path), "came layer 40"));
    std::ofstream(path)
        << R"({"uniprefill_policy": 1, "tail": 7, "layers": [], "lists": {"layers": [{"layer": 30}]}})";
    CHECK(contains(refused_policy("--policy " + path), "p.json: lists.layers: expected layers from 0 to 29"));
    CHECK(contains(refused_policy("--policy " + path + " --layers 4"), "p.json: lists.layers: expected"));
    std::ofstream(path) << R"({"uniprefill_policy": 1, "tail": 7, "layers": [{"layer": 40, "p": 0.5}]})";
    CHECK(resolved("--policy " + path + " --layers 4 -n 32").tail == 7);
}

TEST_CASE("app: prompts from text, file and standard input") {
    std::istringstream input(std::string("from\0stdin", 10));
    const auto read = [&](const std::vector<std::string>& more) {
        std::vector<std::string> all = {"compare", "-m", "m"};
        all.insert(all.end(), more.begin(), more.end());
        return engine::read_prompt(engine::parse_command_line(all, 4).run.value(), input);
    };
    CHECK(read({"-t", "hello"}) == "hello");
    CHECK(read({"-f", "-"}) == std::string("from\0stdin", 10));
    input.clear();
    CHECK(refusal([&] { read({"-f", "-"}); }) == "prompt: expected at least one byte, came an empty text");
    const app_test::scratch_folder folder;
    const std::string path = (folder.path() / "prompt").string();
    CHECK(contains(refusal([&] {
                       read({"-f", path});
                   }),
                   "--text-file: expected a file that can be read, came '"));
    CHECK(contains(refusal([&] {
                       read({"-f", folder.path().string()});
                   }),
                   "--text-file: expected a file that can be read"));
    std::string bytes(200000, 'x');
    bytes[5] = '\xff';
    std::ofstream(path, std::ios::binary) << bytes;
    CHECK(read({"-f", path}) == bytes);
}

TEST_CASE("app: how the tokens of a text are used") {
    const auto plan = [](const std::string& more, int tokens, int context) {
        return engine::plan_prompt(parsed("compare -m m -t x " + more), tokens, context);
    };
    const engine::prompt_plan gpl = plan("", 7639, 8192);
    CHECK(gpl.prompt == 7575);
    CHECK(gpl.held_out == 64);
    CHECK(gpl.compared == 64);
    const engine::prompt_plan brief = plan("", 127, 8192);
    CHECK(brief.prompt == 127);
    CHECK(brief.held_out == 0);
    CHECK(brief.compared == 64);
    CHECK(plan("", 128, 8192).prompt == 64);
    CHECK(plan("--continuation 0", 1000, 8192).held_out == 0);
    CHECK(plan("--continuation 9", 10, 8192).prompt == 1);
    CHECK(contains(refusal([&] { plan("--continuation 10", 10, 8192); }),
                   "--continuation: expected fewer than the text's 10"));
    CHECK(contains(refusal([&] { plan("", 0, 8192); }), "prompt: expected at least one token"));
    CHECK(refusal([&] { plan("", 8192, 8192); }).empty());
    CHECK(contains(refusal([&] { plan("", 8193, 8192); }),
                   "prompt: expected at most 8192 tokens, the model's context"));
    CHECK(contains(refusal([&] { plan("--tokens 1000", 8000, 8192); }), "with 1000 that follow"));
    CHECK(contains(refusal([&] { plan("--tokens 1000000000", 2000000000, 8192); }), "prompt"));

    const auto generate = engine::plan_prompt(parsed("generate -m m -t x"), 100, 228);
    CHECK(generate.prompt == 100);
    CHECK(generate.held_out == 0);
    CHECK(!refusal([] { engine::plan_prompt(parsed("generate -m m -t x"), 101, 228); }).empty());
}

TEST_CASE("app: devices") {
    CHECK(parsed("generate -m m -t hello").device == engine::device_kind::cpu);
    CHECK(parsed("generate -m m -t hello --device cuda").device == engine::device_kind::cuda);
    CHECK(parsed("compare -m m -t hello --device cuda").device == engine::device_kind::cuda);
    CHECK(refused("generate -m m -t hello --device gpu") == "--device: expected cpu or cuda, came 'gpu'");
    CHECK(contains(refused("serve-sim -m m --texts t --device cuda"), "command line"));
}

TEST_CASE("app: options of prefill") {
    using engine::attention_kind;
    using engine::prefill_mode;
    const engine::prefill_options plain = parsed("prefill --device cuda").prefill;
    CHECK(plain.shape == "llama3-8b");
    CHECK(plain.tokens == std::vector<std::int32_t>{32768});
    CHECK(plain.modes == std::vector<prefill_mode>{prefill_mode::dense});
    CHECK(plain.attention == std::vector<attention_kind>{attention_kind::uniprefill});
    CHECK(plain.counts == engine::counts_kind::read);
    CHECK(plain.selecting.empty());
    CHECK_FALSE(plain.in_turn);

    const options line =
        parsed("prefill --device cuda --shape llama3.2-1b --layers 12 --tokens 4096,131072 --mode "
               "dense,drop,lists,both --attention cudnn,uniprefill --counts budget --keep 0.5 --blocks 0.25 "
               "--selecting 3,7 --list-heads kv --list-sink 1 --list-window 2 --min-length 5 --warmups 3 "
               "--repeats 9 "
               "--seed 12 --bucket-rows 256 --in-turn --json f.json");
    CHECK(line.command == engine::command::prefill);
    const engine::prefill_options& all = line.prefill;
    CHECK(all.shape == "llama3.2-1b");
    CHECK(all.layers.value() == 12);
    CHECK(all.tokens == std::vector<std::int32_t>{4096, 131072});
    CHECK(all.modes.size() == 4);
    CHECK(all.attention == std::vector<attention_kind>{attention_kind::cudnn, attention_kind::uniprefill});
    CHECK(all.counts == engine::counts_kind::budget);
    CHECK(all.keep == 0.5);
    CHECK(all.blocks == 0.25);
    CHECK(all.selecting == std::vector<std::int32_t>{3, 7});
    CHECK(all.lists_by_kv_head);
    CHECK(all.list_sink == 1);
    CHECK(all.list_window == 2);
    CHECK(all.min_length == 5);
    CHECK(all.warmups == 3);
    CHECK(all.repeats == 9);
    CHECK(all.in_turn);
    CHECK(all.seed == 12);
    CHECK(all.bucket_rows == 256);
    CHECK(all.json == "f.json");

    CHECK(contains(refused("prefill"), "--device: expected cuda"));
    const std::string on = "prefill --device cuda ";
    CHECK(contains(refused(on + "--shape gpt"), "--shape: expected llama3-8b, "));
    CHECK(refused(on + "--mode dense,dense") == "--mode: expected each value once, came 'dense,dense'");
    CHECK(contains(refused(on + "--mode fast"), "--mode: expected dense, drop, lists or both"));
    CHECK(contains(refused(on + "--tokens 4096,"), "--tokens"));
    CHECK(contains(refused(on + "--tokens 0"), "--tokens"));
    CHECK(contains(refused(on + "--keep 1.5"), "--keep"));
    CHECK(contains(refused(on + "--counts guess"), "--counts: expected read, budget or buckets"));
    CHECK(contains(refused(on + "--selecting 7:0.5"), "--keep has the share"));
    CHECK(refused(on + "--layers 4 --selecting 1,4") == "--selecting: expected layers 0 to 3, came 4");
    CHECK(contains(refused(on + "--mode lists,both --attention cudnn"), "--attention: expected uniprefill"));
    CHECK(parsed(on + "--mode lists,dense --attention cudnn").prefill.modes.size() == 2);
}

TEST_CASE("app: shapes of known models hold together") {
    std::istringstream names(engine::model_shape_names());
    int shapes = 0;
    for (std::string name; std::getline(names, name, ','); ++shapes) {
        name.erase(0, name.find_first_not_of(' '));
        const engine::llama_config config = engine::model_shape("--shape", name);
        CHECK(config.heads % config.kv_heads == 0);
        const engine::layer_pattern pattern = engine::model_pattern("--shape", name);
        const bool hybrid = pattern.period > 1;
        CHECK((config.head_dim == (hybrid ? 256 : 64) || config.head_dim == (hybrid ? 256 : 128)));
        CHECK((hybrid || config.rope_dims == config.head_dim));
        CHECK((hybrid || config.hidden == config.heads * config.head_dim));
        CHECK(config.rope_dims % 8 == 0);
        CHECK(config.layers % pattern.period == 0);
        CHECK(pattern.kind(config.layers - 1) == engine::layer_kind::full);
        CHECK(pattern.kind(0) == pattern.others);
        CHECK(config.ffn % 8 == 0);
    }
    CHECK(shapes == 8);
    const engine::llama_config llama = engine::model_shape("--shape", "llama3-8b");
    CHECK(llama.layers == 32);
    CHECK(llama.rope_base == 500000.0f);
    CHECK(engine::model_pattern("--shape", "llama3-8b").kind(5) == engine::layer_kind::full);
    CHECK(!engine::model_pattern("--shape", "llama3-8b").has(engine::layer_kind::linear));

    const engine::llama_config next = engine::model_shape("--shape", "qwen3-next-like");
    const engine::layer_pattern linear = engine::model_pattern("--shape", "qwen3-next-like");
    CHECK(next.ffn == 5632);
    CHECK(next.rope_dims == 64);
    CHECK(linear.has(engine::layer_kind::linear));
    CHECK(!linear.has(engine::layer_kind::window));
    CHECK(linear.kind(2) == engine::layer_kind::linear);
    CHECK(linear.kind(3) == engine::layer_kind::full);
    CHECK(linear.linear_v_heads % linear.linear_k_heads == 0);
    const engine::layer_pattern window = engine::model_pattern("--shape", "gemma3-12b-like");
    CHECK(window.kind(4) == engine::layer_kind::window);
    CHECK(window.kind(5) == engine::layer_kind::full);
    CHECK(window.window == 1024);
    CHECK(refused("prefill --device cuda --shape gemma3-12b-like --selecting 5,12") ==
          "--selecting: expected layers with full attention, came 12");
    CHECK(parsed("prefill --device cuda --shape qwen3-next-like --selecting 7,47").prefill.selecting.size() ==
          2);
}
