// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/policy.hpp"
#include "engine/app/policy_file.hpp"
#include "support/catch.hpp"

#include <cstddef>
#include <random>
#include <string>
#include <utility>
#include <vector>

using app_test::contains;
using app_test::refusal;
using engine::parse_policy;

namespace {

std::string with(const std::string& members) {
    return R"({"uniprefill_policy": 1, )" + members + "}";
}

std::string refused(const std::string& json) {
    return refusal([&] { parse_policy(json, "f.json"); });
}

bool same(const uniprefill::selection_rule& a, const uniprefill::selection_rule& b) {
    return a.kind == b.kind && a.scope == b.scope && a.ties == b.ties && a.crossing == b.crossing &&
           a.p.value == b.p.value && a.budget_rows == b.budget_rows && a.min_kept_rows == b.min_kept_rows &&
           a.max_kept_rows == b.max_kept_rows;
}

bool same(const engine::policy& a, const engine::policy& b) {
    bool equal = a.name == b.name && a.comment == b.comment && a.block_rows == b.block_rows &&
                 a.num_observations == b.num_observations && a.sink == b.sink && a.tail == b.tail &&
                 a.min_length == b.min_length && a.span == b.span && a.propagation == b.propagation &&
                 a.rules.size() == b.rules.size() && a.lists.has_value() == b.lists.has_value();
    for (std::size_t i = 0; equal && i < a.rules.size(); ++i) {
        equal = a.rules[i].layer == b.rules[i].layer && same(a.rules[i].rule, b.rules[i].rule);
    }
    if (equal && a.lists) {
        equal = same(a.lists->rule, b.lists->rule) && a.lists->sink == b.lists->sink &&
                a.lists->window == b.lists->window && a.list_means == b.list_means &&
                a.list_sampling.has_value() == b.list_sampling.has_value();
    }
    if (equal && a.list_sampling) {
        equal = a.list_sampling->query_rows == b.list_sampling->query_rows &&
                a.list_sampling->sample == b.list_sampling->sample;
    }
    return equal;
}

} // namespace

TEST_CASE("app: SmolLM2 gets schedule A and lists, which ship") {
    const engine::policy a = engine::default_policy({"Smollm2 135M 8k Lc100K Mix1 Ep2", 30, 576});
    const std::vector<std::pair<int, double>> schedule = {{1, .99},  {7, .99},  {15, .995}, {19, .995},
                                                          {21, .99}, {23, .95}, {25, .99},  {27, .90}};
    REQUIRE(a.rules.size() == schedule.size());
    for (std::size_t i = 0; i < schedule.size(); ++i) {
        CHECK(a.rules[i].layer == schedule[i].first);
        CHECK(same(a.rules[i].rule, uniprefill::selection_rule::top_p(schedule[i].second)));
    }
    CHECK(a.block_rows == 64);
    CHECK(a.num_observations == 128);
    CHECK(a.sink == 128);
    CHECK(a.tail == 128);
    CHECK(a.propagation == uniprefill::propagation::cumulative);
    CHECK(contains(a.comment, "0.0093"));
    REQUIRE(a.lists);
    CHECK(same(a.lists->rule, uniprefill::selection_rule::top_p(0.99, uniprefill::mass_scope::all)));
    CHECK(a.lists->sink == 64);
    CHECK(a.lists->window == 256);
}

TEST_CASE("app: other models get the fixed list") {
    const auto layers_of = [](const engine::policy& made) {
        std::vector<int> out;
        for (const auto& entry : made.rules) {
            CHECK(same(entry.rule, uniprefill::selection_rule::top_p(0.98)));
            out.push_back(entry.layer);
        }
        return out;
    };
    const std::vector<int> list = {7, 11, 15, 19, 23, 27};
    CHECK(layers_of(engine::default_policy({"SmolLM 135M", 30, 576})) == list);
    CHECK(layers_of(engine::default_policy({"Llama 3.1 8B", 32, 4096})) == list);
    CHECK(layers_of(engine::default_policy({"SmolLM2 360M", 32, 960})) == list);
    CHECK(layers_of(engine::default_policy({"", 9, 64})) == std::vector<int>{7});
    CHECK(layers_of(engine::default_policy({"", 8, 64})).empty());
    CHECK(engine::dense().rules.empty());
}

TEST_CASE("app: every shipped policy parses") {
    CHECK(!engine::shipped_policies().empty());
    for (const engine::shipped_policy& shipped : engine::shipped_policies()) {
        INFO(shipped.file);
        CHECK(refusal([&] { parse_policy(shipped.json, shipped.file); }).empty());
    }
}

TEST_CASE("app: a policy file's defaults and inheritance") {
    const engine::policy made =
        parse_policy(with(R"("observations": 32, "scope": "all", "selector": "top-p", "budget": 0,
                "layers": [3, {"layer": 5, "scope": "free"}, {"layer": 8, "p": 0.5, "ties": "higher-block-first",
                "crossing": "published", "min_kept": 10, "max_kept": 99},
                {"layer": 9, "selector": "fixed-budget", "budget": 512}])"),
                     "f");
    CHECK(made.block_rows == 64);
    CHECK(made.tail == 32);
    REQUIRE(made.rules.size() == 4);
    CHECK(same(made.rules[0].rule, uniprefill::selection_rule::top_p(0.99, uniprefill::mass_scope::all)));
    CHECK(same(made.rules[1].rule, uniprefill::selection_rule::top_p(0.98)));
    uniprefill::selection_rule published = uniprefill::selection_rule::published_top_p(0.5);
    published.min_kept_rows = 10;
    published.max_kept_rows = 99;
    CHECK(same(made.rules[2].rule, published));
    CHECK(made.rules[3].rule.budget_rows == 512);

    const engine::policy budget = parse_policy(
        with(
            R"("selector": "fixed-budget", "budget": 64, "layers": [1, {"layer": 2, "selector": "top-p", "p": 1}])"),
        "f");
    CHECK(budget.rules[0].rule.budget_rows == 64);
    CHECK(budget.rules[1].rule.budget_rows == 0);
    CHECK(budget.rules[1].rule.p.value == uniprefill::unit_fraction::one);
    CHECK(parse_policy(with(R"("comment": ["a", "b"], "layers": [])"), "f").comment == "a\nb");
}

TEST_CASE("app: policies survive being written and read") {
    std::mt19937_64 random(uniprefill_test::seed());
    const auto below = [&](int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); };
    for (int round = 0; round < 200; ++round) {
        engine::policy made;
        made.name = "policy \"" + std::to_string(round) + "\" \xc3\xa9";
        made.comment = "one\ntwo";
        made.block_rows = 8 + below(249);
        made.num_observations = 1 + below(512);
        made.sink = below(1000);
        made.tail = below(1000);
        made.min_length = below(10000);
        made.span = below(2) * (512 + below(10000));
        made.propagation = static_cast<uniprefill::propagation>(below(2));
        const auto any_rule = [&] {
            uniprefill::selection_rule rule;
            rule.kind = static_cast<uniprefill::rule_kind>(below(4));
            rule.scope = static_cast<uniprefill::mass_scope>(below(2));
            rule.ties = static_cast<uniprefill::tie_order>(below(2));
            rule.crossing = static_cast<uniprefill::crossing>(below(2));
            if (rule.kind == uniprefill::rule_kind::fixed_budget) {
                rule.budget_rows = 500 + below(500);
            } else {
                rule.p = uniprefill::unit_fraction::from((1 + below(1000)) / 1000.0);
            }
            rule.min_kept_rows = below(400);
            if (below(2) == 1) rule.max_kept_rows = 1000 + below(1000);
            return rule;
        };
        int layer = -1;
        for (int i = below(9); i > 0; --i) {
            layer += 1 + below(5);
            made.rules.push_back({layer, any_rule()});
        }
        if (below(2) == 1) {
            made.lists = uniprefill::list_options<>{any_rule(), below(500), below(500)};
            made.list_means = below(2) == 1;
            if (!made.list_means && below(2) == 1)
                made.list_sampling = uniprefill::query_sampling{1 + below(200), 1 + below(20)};
        }
        const std::string text = engine::write_policy(made);
        INFO(text);
        CHECK(same(parse_policy(text, "f"), made));
    }
}

TEST_CASE("app: bad policies are refused by path") {
    const std::vector<std::pair<std::string, std::string>> cases = {
        {"", "f.json: expected JSON, came what isn't, at line 1, column 1"},
        {"{\n  \"a\": nope}", "line 2"},
        {"[]", "f.json: expected a JSON object, came an array"},
        {"{}", "f.json: uniprefill_policy: expected 1, came none"},
        {R"({"uniprefill_policy": 2, "layers": []})", "uniprefill_policy: expected 1, came 2"},
        {R"({"uniprefill_policy": "1", "layers": []})",
         "uniprefill_policy: expected a whole number, came '1'"},
        {with(R"("name": "x")"), "f.json: layers: expected an array, came none"},
        {with(R"("layers": 7)"), "layers: expected an array, came 7"},
        {with(R"("layers": [], "layer": 3)"), "f.json: layer: expected a key that policies have"},
        {with(R"("layers": [{"layer": 3, "q": 0.5}])"), "layers[0].q: expected a key that policies have"},
        {with(R"("layers": [], "sink": 1, "sink": 2)"), "f.json: sink: expected the key once"},
        {with(R"("layers": [{"layer": 1, "layer": 2}])"), "layer: expected the key once"},
        {with(R"("layers": ["7"])"), "layers[0].layer: expected a whole number, came '7'"},
        {with(R"("layers": [7.5])"), "layers[0].layer: expected a whole number, came 7.5"},
        {with(R"("layers": [null])"), "layers[0].layer: expected a whole number, came null"},
        {with(R"("layers": [{"p": 0.5}])"), "layers[0].layer: expected a whole number, came none"},
        {with(R"("layers": [-1])"), "layers[0].layer: expected 0 to 4095, came -1"},
        {with(R"("layers": [99999])"), "layers[0].layer: expected 0 to 4095, came 99999"},
        {with(R"("layers": [99999999999999999999])"), "layers[0].layer"},
        {with(R"("layers": [4294967303])"), "layers[0].layer: expected a number of 32 bits"},
        {with(R"("layers": [-9223372036854775808])"), "layers[0].layer: expected a number of 32 bits"},
        {with(R"("layers": [7, 7])"), "layers[1].layer: expected a layer after 7, came 7"},
        {with(R"("layers": [7, 3])"), "layers[1].layer: expected a layer after 7, came 3"},
        {with(R"("layers": [{"layer": 3, "p": 0}])"), "layers[0].p: expected a number in (0, 1], came 0"},
        {with(R"("layers": [{"layer": 3, "p": 1.5}])"), "layers[0].p: expected a number in (0, 1], came 1.5"},
        {with(R"("layers": [{"layer": 3, "p": -0.5}])"), "layers[0].p"},
        {with(R"("layers": [{"layer": 3, "p": 1e999}])"), "a number out of range"},
        {with(R"("layers": [{"layer": 3, "p": "0.5"}])"),
         "layers[0].p: expected a number in (0, 1], came '0.5'"},
        {with(R"("layers": [], "p": 2)"), "f.json: p: expected a number in (0, 1], came 2"},
        {with(R"("layers": [], "block_rows": 7)"), "block_rows: expected 8 to 256, came 7"},
        {with(R"("layers": [], "block_rows": 257)"), "block_rows: expected 8 to 256, came 257"},
        {with(R"("layers": [], "observations": 0)"), "observations: expected 1 to 512, came 0"},
        {with(R"("layers": [], "observations": 513)"), "observations: expected 1 to 512, came 513"},
        {with(R"("layers": [], "sink": -1)"), "sink: expected 0 to"},
        {with(R"("layers": [], "tail": true)"), "tail: expected a whole number, came true"},
        {with(R"("layers": [], "span": 100)"), "span: expected 0 (the whole prompt) or at least the 128"},
        {with(R"("layers": [], "propagation": "both")"),
         "propagation: expected 'cumulative' or 'revive', came 'both'"},
        {with(R"("layers": [], "scope": "inside")"), "scope: expected 'free' or 'all', came 'inside'"},
        {with(R"("layers": [], "selector": 3)"), "selector: expected 'top-p'"},
        {with(R"("layers": [], "name": 3)"), "name: expected a text, came 3"},
        {with(R"("layers": [], "comment": [3])"), "comment: expected a text or an array of texts, came 3"},
        {with(R"("layers": [{"layer": 1, "selector": "fixed-budget"}])"),
         "layers[0].budget: expected >= 1, came 0"},
        {with(R"("layers": [{"layer": 1, "budget": 5}])"), "layers[0].budget: expected none unless"},
        {with(R"("layers": [{"layer": 1, "selector": "fixed-ratio"}])"),
         "layers[0].p: expected a number in (0, 1] for"},
        {with(R"("layers": [{"layer": 1, "min_kept": 5, "max_kept": 4}])"), "layers[0].max_kept"},
        {with(R"("layers": [{"layer": 1, "p": [[0.5]]}])"), "at most 4 levels"},
        {with(R"("layers": [], "lists": 0.99)"), "lists: expected an object, came 0.99"},
        {with(R"("layers": [], "lists": {"layer": 1})"), "lists.layer: expected a key that policies have"},
        {with(R"("layers": [], "lists": {"p": 2})"), "lists.p: expected a number in (0, 1], came 2"},
        {with(R"("layers": [], "lists": {"window": -1})"), "lists.window: expected 0 to"},
        {with(R"("layers": [], "lists": {"mean": 1})"), "lists.mean: expected true or false, came 1"},
        {with(R"("layers": [], "lists": {"sample": 8})"), "lists.sample: expected none without query_rows"},
        {with(R"("layers": [], "lists": {"query_rows": 0})"), "lists.query_rows: expected 1 to"},
        {with(R"("layers": [], "lists": {"query_rows": 64, "sample": 0})"), "lists.sample: expected 1 to"},
        {with(R"("layers": [], "lists": {"sink": 0.5})"), "lists.sink: expected a whole number, came 0.5"},
        {with(R"("layers": [], "lists": {"selector": "fixed-ratio"})"),
         "lists.p: expected a number in (0, 1] for"},
        {with(R"("layers": [], "lists": {"selector": "fixed-budget"})"),
         "lists.budget: expected >= 1, came 0"},
        {with("\"layers\": [], \"name\": \"\xff\""), "f.json: expected JSON"},
        {std::string(R"({"uniprefill_policy": 1, "layers": []}\0x)", 40), "f.json: expected JSON"},
        {std::string(60000, '['), "at most 4 levels"},
        {std::string((std::size_t{1} << 16) + 1, ' '), "at most 65536 bytes"},
        {with("\"layers\": [], \"name\": \"" + std::string(201, 'x') + "\""),
         "name: expected at most 200 bytes"},
    };
    for (const auto& [json, expected] : cases) {
        const std::string line = refused(json);
        INFO(json.substr(0, 200) << "\n" << line);
        CHECK(contains(line, expected));
        CHECK(contains(line, "f.json"));
        CHECK(!contains(line, "\n"));
        CHECK(line.size() < 300);
    }
}

TEST_CASE("app: mutated policy files are read or refused, never worse") {
    std::mt19937_64 random(uniprefill_test::seed());
    const std::string seed = engine::shipped_policies().front().json;
    const std::string tokens[] = {"{",       "}",     "[",  "]",    ",",    ":",      "\"",
                                  "\\u0000", "1e999", "-1", "null", "true", "layers", "\xff"};
    int accepted = 0;
    for (int round = 0; round < 5000; ++round) {
        std::string text = seed;
        for (int change = static_cast<int>(random() % 4); change >= 0; --change) {
            const std::size_t at = random() % text.size();
            switch (random() % 4) {
            case 0:
                text[at] = static_cast<char>(random());
                break;
            case 1:
                text.erase(at, 1 + random() % 20);
                break;
            case 2:
                text.insert(at, tokens[random() % std::size(tokens)]);
                break;
            default:
                text.insert(at, text.substr(random() % text.size(), random() % 60));
            }
        }
        engine::policy made;
        const std::string line = refusal([&] { made = parse_policy(text, "f"); });
        if (!line.empty()) {
            CHECK(!contains(line, "\n"));
            continue;
        }
        ++accepted;
        CHECK(same(parse_policy(engine::write_policy(made), "f"), made));
    }
    INFO(accepted);
    CHECK(accepted > 100); // changes within comments, for one
    CHECK(accepted < 4000);
}

TEST_CASE("app: policy files on disk") {
    const app_test::scratch_folder folder;
    const std::string path = (folder.path() / "p.json").string();
    CHECK(contains(refusal([&] { engine::load_policy(path); }), "a file that can be read"));
    CHECK(contains(refusal([&] { engine::load_policy(folder.path().string()); }), "a file that can be read"));
    std::ofstream(path) << with(R"("layers": [3])");
    CHECK(engine::load_policy(path).rules.size() == 1);
}

TEST_CASE("app: layers are checked against the model") {
    const engine::policy list = engine::fixed_list(32);
    CHECK(refusal([&] { engine::check_layers(list, 28, "x: "); }).empty());
    CHECK(refusal([&] { engine::check_layers(list, 27, "x: "); }) ==
          "x: layers: expected layers from 0 to 26, which the model has, came layer 27");
}

TEST_CASE("app: lists of their own by layer") {
    const engine::policy read = engine::parse_policy(
        R"({"uniprefill_policy": 1, "layers": [], "lists": {"p": 0.98, "window": 128, "min_kept": 64,
            "layers": [2, {"layer": 3, "p": 0.9}, {"layer": 5, "p": 1}]}})",
        "f.json");
    REQUIRE(read.lists);
    CHECK(engine::share_of(read.lists->rule) == 0.98);
    REQUIRE(read.list_rules.size() == 3);
    CHECK(engine::share_of(read.list_rules[0].rule) == 0.98); // what stands beside them holds
    CHECK(engine::share_of(read.list_rules[1].rule) == 0.9);
    CHECK(read.list_rules[1].rule.min_kept_rows == 64);
    CHECK(read.list_rules[1].rule.scope == uniprefill::mass_scope::all);
    CHECK(engine::share_of(read.list_rules[2].rule) == 1);
    const engine::policy again = engine::parse_policy(engine::write_policy(read), "again");
    REQUIRE(again.list_rules.size() == 3);
    CHECK(engine::describe(again.list_rules[1].rule) == engine::describe(read.list_rules[1].rule));
    for (const auto& [lists, expected] : std::vector<std::pair<std::string, std::string>>{
             {R"({"layers": [3, 3]})", "lists.layers[1].layer: expected a layer after 3, came 3"},
             {R"({"layers": 3})", "lists.layers: expected an array"},
             {R"({"layers": [{"layer": 1, "p": 2}]})", "lists.layers[0].p: expected a number in (0, 1]"},
             {R"({"layers": [{"layer": 1, "sink": 2}]})", "lists.layers[0].sink: expected a key"}}) {
        try {
            static_cast<void>(engine::parse_policy(
                R"({"uniprefill_policy": 1, "layers": [], "lists": )" + lists + "}", "f.json"));
            FAIL(lists << " was taken");
        } catch (const engine::error& fault) {
            CAPTURE(lists, fault.what());
            CHECK(std::string(fault.what()).find(expected) != std::string::npos);
        }
    }
    CHECK(refusal([&] { check_layers(read, 5, "policy: "); }) ==
          "policy: lists.layers: expected layers from 0 to 4, which the model has, came layer 5");
    CHECK_NOTHROW(check_layers(read, 6, "policy: "));
    engine::policy without = read;
    without.lists.reset();
    CHECK_THROWS_AS(check(without, "policy: "), engine::error);
}
