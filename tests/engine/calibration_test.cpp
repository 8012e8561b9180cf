// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/policy_file.hpp"
#include "engine/calibration/cpu_windows.hpp"
#include "engine/calibration/outcome.hpp"
#include "engine/calibration/search.hpp"
#include "engine/error.hpp"
#include "engine/small_model.hpp"
#include "support/catch.hpp"

#include <nlohmann/json.hpp>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace calibration = engine::calibration;
using calibration::choice;
using engine_test::small_model;

namespace {

struct loaded {
    loaded()
        : plain(20260101)
        , file(engine_test::span_of(plain.file))
        , ops(engine::cpu::arithmetic::automatic)
        , weights(file, ops.kind()) {}
    small_model plain;
    engine::gguf file;
    engine::cpu_ops ops;
    engine::cpu_weights weights;
};

engine::policy small_blocks() {
    engine::policy base;
    base.block_rows = 8;
    base.num_observations = 12;
    base.sink = 8;
    base.tail = 12;
    return base;
}

constexpr std::int32_t tokens = 320;

std::vector<calibration::window> windows_of(const loaded& model, std::int32_t count) {
    return calibration::draw_windows(model.plain.random_tokens(count * 400, 9), tokens, count, 1);
}

bool near(double a, double b) {
    return std::fabs(a - b) < 1e-9;
}

} // namespace

TEST_CASE("calibration: windows are drawn from all over the texts, without overlap, and repeat") {
    std::vector<std::int32_t> text(10000);
    for (std::size_t i = 0; i < text.size(); ++i) {
        text[i] = static_cast<std::int32_t>(i);
    }
    const auto drawn = calibration::draw_windows(text, 512, 8, 3);
    REQUIRE(drawn.size() == 8);
    for (std::size_t i = 0; i < drawn.size(); ++i) {
        CHECK(drawn[i].prompt.size() == 512);
        CHECK(drawn[i].fed.size() == 64);
        CHECK(drawn[i].begin >= static_cast<std::int64_t>(i) * 1250);
        CHECK(drawn[i].begin + 576 <= static_cast<std::int64_t>(i + 1) * 1250);
        CHECK(drawn[i].prompt.front() == drawn[i].begin);
        CHECK(drawn[i].fed.front() == drawn[i].prompt.back() + 1);
    }
    CHECK(calibration::draw_windows(text, 512, 8, 3)[5].begin == drawn[5].begin);
    CHECK(calibration::draw_windows(text, 512, 8, 4)[5].begin != drawn[5].begin);
    CHECK_THROWS_AS(calibration::draw_windows(text, 512, 18, 3), engine::error);
    CHECK_THROWS_AS(calibration::draw_windows({}, 512, 1, 3), engine::error);
}

TEST_CASE("calibration: work against hand numbers") {
    engine::llama_config config;
    config.layers = 2;
    config.hidden = 4;
    config.ffn = 8;
    config.heads = 2;
    config.kv_heads = 1;
    config.head_dim = 2;
    // By row: q, k and v 2 * 4 * (4 + 4) = 64, output and MLP 2 * 4 * 4 + 6 * 4 * 8 = 224; 16 a pair.
    const calibration::cost_model cost(config, 100);
    const double pairs = 5050;
    const double dense = 100 * (64 + 224) + pairs * 16;
    CHECK(near(cost.attention_share(), pairs * 16 / dense));
    engine::layer_record whole;
    whole.rows_in = 10;
    whole.rows_kept = 10;
    whole.pairs = 55;
    const calibration::work all = cost.of({whole, whole}, 10);
    CHECK(near(all.lin, 1));
    CHECK(near(all.att, 1));
    CHECK(near(all.total, 1));
    // The second layer keeps half of its rows and of its pairs, and looks at 20.
    engine::layer_record half = whole;
    half.rows_kept = 5;
    half.pairs = 22;
    half.estimator_pairs = 20;
    const calibration::work less = cost.of({whole, half}, 10);
    CHECK(near(less.lin, 0.75));
    CHECK(near(less.att, 0.7));
    CHECK(near(less.looks, 20.0 / 110));
    const double expected = 100 * (64 + 0.75 * 224) + 0.7 * pairs * 16 + 20.0 / 10 / 2 * 100 * 8;
    CHECK(near(less.total, expected / dense));
}

TEST_CASE("calibration: choices in words and as policies") {
    using calibration::layer_step;
    using calibration::list_step;
    choice one = calibration::dense_choice(6);
    CHECK(describe(one) == "dense");
    one.steps[3] = layer_step(0.99);
    one.steps[5] = layer_step(0.90);
    CHECK(describe(one) == "3:0.99 5:0.9");
    choice other = one;
    CHECK(first_difference(one, other) == 6);
    other.window = 3; // of lists that there are none of
    CHECK(first_difference(one, other) == 6);
    other = one;
    other.steps[5] = layer_step(0.995);
    CHECK(first_difference(one, other) == 5);
    other = with_lists(other, list_step(0.99));
    CHECK(first_difference(one, other) == 0);
    CHECK(describe(other) == "3:0.99 5:0.995 + lists 0.99");
    const engine::policy made = policy_of(other, small_blocks());
    CHECK(made.block_rows == 8);
    REQUIRE(made.rules.size() == 2);
    CHECK(made.rules[0].layer == 3);
    CHECK(near(engine::share_of(made.rules[0].rule), 0.99));
    CHECK(made.rules[0].rule.scope == uniprefill::mass_scope::free);
    REQUIRE(made.lists);
    CHECK(near(engine::share_of(made.lists->rule), 0.99));
    CHECK(made.list_rules.empty());
    CHECK(calibration::fixed_list_choices(calibration::dense_choice(6)).empty());
    const choice listed = with_lists(calibration::dense_choice(12), list_step(0.99));
    CHECK(calibration::fixed_list_choices(listed).size() == 5);
    CHECK(describe(calibration::fixed_list_choices(listed)[2]) == "7:0.98 + lists 0.99");
}

TEST_CASE("calibration: lists of their own by layer, there and back") {
    using calibration::list_step;
    choice one = with_lists(calibration::dense_choice(6), list_step(0.98));
    one.steps[2] = calibration::layer_step(0.985);
    one.lists[1] = list_step(0.90);
    one.lists[4] = 0;
    one.window = 3;
    CHECK(describe(one) == "2:0.985 + lists 0.98 1:0.9 4:1 window 512");
    const engine::policy made = policy_of(one, small_blocks());
    REQUIRE(made.lists);
    CHECK(made.lists->window == 512);
    REQUIRE(made.list_rules.size() == 2);
    CHECK(made.list_rules[1].layer == 4);
    CHECK(near(engine::share_of(made.list_rules[1].rule), 1));
    CHECK(made.sink == 8); // the base's
    one.sink = 2;
    one.tail = 5;
    const engine::policy forced = policy_of(one, small_blocks());
    CHECK(forced.sink == 64);
    CHECK(forced.tail == 256);
    CHECK(describe(one) == "2:0.985 + lists 0.98 1:0.9 4:1 window 512 sink 64 tail 256");
    CHECK(calibration::choice_of(forced, 6) == one);
    choice unforced = one;
    unforced.sink = 3;
    CHECK(first_difference(one, unforced) == 0); // lists are made anew, too
    unforced = with_lists(unforced, 0);
    choice as_forced = unforced;
    as_forced.sink = 2;
    CHECK(first_difference(as_forced, unforced) == 2);
    // Through a file, too.
    CHECK(calibration::choice_of(engine::parse_policy(write_policy(forced), "policy"), 6) == one);
    choice other = one;
    other.lists[3] = list_step(0.95);
    CHECK(first_difference(one, other) == 3);
    other = one;
    other.window = 1;
    CHECK(first_difference(one, other) == 0);
    // p between two steps: the nearer one; other rules: refused.
    engine::policy near_by = made;
    near_by.rules[0].rule = uniprefill::selection_rule::top_p(0.9849);
    CHECK(calibration::choice_of(near_by, 6).steps == one.steps);
    CHECK(calibration::choice_of(near_by, 6).sink == 0); // 8 rows are nearest to 16
    near_by.rules[0].rule = uniprefill::selection_rule::published_top_p(0.99);
    CHECK_THROWS_AS(calibration::choice_of(near_by, 6), engine::error);
    CHECK_THROWS_AS(calibration::choice_of(made, 2), engine::error);
}

TEST_CASE("calibration: a policy that choices can't say is refused by its field") {
    using uniprefill::selection_rule;
    choice one = with_lists(calibration::dense_choice(6), calibration::list_step(0.98));
    one.steps[2] = calibration::layer_step(0.985);
    one.lists[4] = 0;
    one.sink = one.tail = 1;
    const engine::policy good = policy_of(one, small_blocks());
    REQUIRE(good.list_rules.size() == 1);
    const auto said = [&](const auto& change) {
        engine::policy changed = good;
        change(changed);
        try {
            calibration::check_begin(changed, 6, tokens, "--begin: ");
        } catch (const engine::error& refused) {
            return std::string(refused.what());
        }
        return std::string();
    };
    CHECK(said([](engine::policy&) {}).empty());
    CHECK(said([](engine::policy& of) { of.list_means = true; }).empty());
    CHECK(said([](engine::policy& of) { of.min_length = tokens; }).empty());
    using change = void (*)(engine::policy&);
    const std::vector<std::pair<std::string, change>> changes = {
        {"propagation", [](engine::policy& of) { of.propagation = uniprefill::propagation::revive; }},
        {"span", [](engine::policy& of) { of.span = 128; }},
        {"min_length", [](engine::policy& of) { of.min_length = tokens + 1; }},
        {"layers", [](engine::policy& of) { of.rules[0].layer = 6; }},
        {"layers[0].selector",
         [](engine::policy& of) { of.rules[0].rule = selection_rule::fixed_budget(64); }},
        {"layers[0].scope", [](engine::policy& of) { of.rules[0].rule.scope = uniprefill::mass_scope::all; }},
        {"layers[0].min_kept", [](engine::policy& of) { of.rules[0].rule.min_kept_rows = 1; }},
        {"layers[0].max_kept", [](engine::policy& of) { of.rules[0].rule.max_kept_rows = 999; }},
        {"layers[0].ties",
         [](engine::policy& of) { of.rules[0].rule.ties = uniprefill::tie_order::higher_block_first; }},
        {"layers[0].crossing",
         [](engine::policy& of) { of.rules[0].rule.crossing = uniprefill::crossing::published; }},
        {"lists.scope", [](engine::policy& of) { of.lists->rule.scope = uniprefill::mass_scope::free; }},
        {"lists.min_kept", [](engine::policy& of) { of.lists->rule.min_kept_rows = 64; }},
        {"lists.layers[0].max_kept", [](engine::policy& of) { of.list_rules[0].rule.max_kept_rows = 9; }},
        {"lists.layers", [](engine::policy& of) { of.list_rules[0].layer = 6; }},
        {"lists.query_rows",
         [](engine::policy& of) {
             of.list_sampling = uniprefill::query_sampling{64, 8};
         }},
    };
    for (const auto& [field, apply] : changes) {
        INFO(field << "\n" << said(apply));
        CHECK(said(apply).rfind("--begin: " + field + ": expected ", 0) == 0);
    }
    // What isn't refused is what comes back.
    engine::policy with_means = good;
    with_means.list_means = true;
    const engine::policy again = policy_of(calibration::choice_of(with_means, 6), with_means);
    CHECK(write_policy(again) == write_policy(with_means));
}

TEST_CASE("calibration: what is shared with the adopted choice changes no figure") {
    loaded model;
    const calibration::cost_model cost(model.weights.config(), 1024);
    const auto always = [] { return true; };
    calibration::cpu_windows from_the_beginning(model.weights, model.ops, small_blocks(),
                                                windows_of(model, 2), 0);
    calibration::cpu_windows joining(model.weights, model.ops, small_blocks(), windows_of(model, 2),
                                     std::size_t{1} << 30);
    calibration::trial plain(from_the_beginning, cost, always);
    calibration::trial sharing(joining, cost, always);
    const std::vector<bool> everywhere(6, true);
    REQUIRE(plain.read_dense(everywhere));
    REQUIRE(sharing.read_dense(everywhere));
    choice one = calibration::dense_choice(6);
    for (const auto& [layer, share] :
         {std::pair<std::size_t, double>{4, 0.98}, {2, 0.90}, {1, 0.95}, {3, 0.90}}) {
        one.steps[layer] = calibration::layer_step(share);
        if (layer == 3) one.lists[layer] = one.lists[layer + 1] = calibration::list_step(0.90);
        const auto expected = plain.run(one);
        const auto came = sharing.run(one);
        REQUIRE(expected);
        REQUIRE(came);
        CHECK(came->by_window == expected->by_window);
        CHECK(came->work.total == expected->work.total);
        CHECK(came->kl > 0);
        if (layer != 1) sharing.adopt(one, everywhere);
    }
    CHECK(from_the_beginning.layers_replayed() == 0);
    CHECK(joining.layers_replayed() > 0);
    CHECK(near(plain.run(calibration::dense_choice(6))->kl, 0));
}

TEST_CASE("calibration: lists at one layer alone are read there alone") {
    loaded model;
    calibration::cpu_windows reader(model.weights, model.ops, small_blocks(), windows_of(model, 1), 0);
    reader.read_dense(0, {}, 0);
    choice one = calibration::dense_choice(6);
    one.lists[3] = calibration::list_step(0.80);
    one.window = 0;
    const auto came = reader.read(0, one, 0);
    CHECK(came.kl > 0);
    constexpr std::int64_t all = std::int64_t{tokens} * (tokens + 1) / 2;
    for (std::size_t layer = 0; layer < 6; ++layer) {
        CHECK((came.layers[layer].pairs < all) == (layer == 3));
        CHECK((came.layers[layer].estimator_pairs > 0) == (layer == 3));
        CHECK(came.layers[layer].rows_kept == tokens);
    }
    // Beside a selection they are what they are by themselves.
    one.steps[2] = calibration::layer_step(0.80);
    const auto both = reader.read(0, one, 0);
    CHECK(both.layers[3].rows_in == both.layers[2].rows_kept);
    CHECK(both.layers[3].pairs < both.layers[4].pairs);
    CHECK(both.layers[4].estimator_pairs == 0);
}

TEST_CASE("calibration: on a small model it beats one p at fixed layers at equal work, and its file loads") {
    loaded model;
    const calibration::cost_model cost(model.weights.config(), 1024);
    calibration::cpu_windows reader(model.weights, model.ops, small_blocks(), windows_of(model, 3),
                                    std::size_t{1} << 30);
    calibration::trial trial(reader, cost, [] { return true; });
    REQUIRE(trial.read_dense(std::vector<bool>(6, true)));
    calibration::outcome found;
    found.model = "small";
    found.tokens = tokens;
    found.begins = {1, 2, 3};
    found.length = cost.length();
    for (const double share : {0.995, 0.99, 0.98, 0.95, 0.90}) {
        choice fixed = calibration::dense_choice(6);
        for (const std::size_t layer : {1u, 3u}) {
            fixed.steps[layer] = calibration::layer_step(share);
        }
        found.baseline.push_back({fixed, *trial.run(fixed)});
    }
    found.divergence = found.baseline[3].measured.kl;
    calibration::search search(
        6, {found.divergence, false, 1},
        {[&](const choice& one) { return trial.run(one); },
         [&](const choice& one, const std::vector<bool>& layers) { trial.adopt(one, layers); },
         [](const std::string&) {}});
    REQUIRE(search.probe());
    REQUIRE(search.run());
    found.probes = search.probes();
    found.path = search.path();
    found.best = search.best();
    found.complete = true;
    found.evaluations = search.evaluations();
    CHECK(found.best.measured.kl <= found.divergence);
    CHECK(found.best.measured.work.total < found.baseline[3].measured.work.total);
    if (const auto equal = baseline_at_equal_work(found)) CHECK(found.best.measured.kl < *equal);

    const engine::policy written = policy_of(found, small_blocks());
    const engine::policy loaded_again = engine::parse_policy(write_policy(written), "policy");
    CHECK(loaded_again.rules.size() == written.rules.size());
    CHECK(loaded_again.block_rows == 8);
    CHECK(loaded_again.comment == written.comment);
    CHECK(written.comment.find("3 windows of 320 tokens") != std::string::npos);
    CHECK(written.comment.find("\nChosen: " + describe(found.best.choice) + ".\n") != std::string::npos);
    CHECK(written.comment.find("came nearest") == std::string::npos);
    CHECK(table_of_layers(found).find("layer") != std::string::npos);
    CHECK(summary_of(found).find("Chosen: " + describe(found.best.choice)) != std::string::npos);
    const auto measured = nlohmann::json::parse(json_of(found));
    CHECK(measured["layers"].size() == 5);
    CHECK(measured["best"]["choice"] == describe(found.best.choice));
    CHECK(measured["fixed_list"].size() == 5);
    CHECK_FALSE(measured.contains("within"));
}

TEST_CASE("calibration: policies have short names, another for another policy") {
    calibration::outcome found;
    found.divergence = 0.02;
    found.seed = 7;
    found.best.choice = with_lists(calibration::dense_choice(100), calibration::list_step(0.98));
    for (std::size_t layer = 0; layer < 100; ++layer) {
        found.best.choice.steps[layer] = calibration::layer_step(0.9925);
        found.best.choice.lists[layer] = static_cast<std::int8_t>(1 + layer % 14);
    }
    const engine::policy one = policy_of(found, small_blocks());
    CHECK(one.name.rfind("calibrated for divergence 0.02, seed 7 (", 0) == 0);
    CHECK(policy_of(found, small_blocks()).name == one.name);
    ++found.best.choice.lists[99]; // far beyond what 200 bytes tell
    const engine::policy other = policy_of(found, small_blocks());
    CHECK(other.name != one.name);
    engine::policy other_base = small_blocks();
    other_base.block_rows = 16;
    CHECK(policy_of(found, other_base).name != other.name);
    found.within.emplace();
    found.within->lin = 0.45;
    found.within->att = 0.1;
    const engine::policy within = policy_of(found, small_blocks());
    CHECK(within.name.rfind("calibrated within lin 0.45, att 0.1, seed 7 (", 0) == 0);
    CHECK(within.name.size() < 80);
    CHECK(engine::parse_policy(write_policy(within), "p").comment == within.comment);
}

TEST_CASE("calibration: bounds that weren't met are said to be not met") {
    calibration::outcome found;
    found.best.choice = calibration::dense_choice(6);
    found.within.emplace();
    found.within->lin = 0.45;
    found.within->att = 0.1;
    const std::string missed = "Nothing was within lin 0.45 and att 0.1; this came nearest.";
    for (const auto& [lin, att, met] :
         {std::tuple{0.45, 0.1, true}, {0.46, 0.05, false}, {0.2, 0.11, false}}) {
        CAPTURE(lin, att);
        found.best.measured.work.lin = lin;
        found.best.measured.work.att = att;
        CHECK(is_within(found) == met);
        CHECK((policy_of(found, small_blocks()).comment.find(missed) == std::string::npos) == met);
        CHECK((summary_of(found).find(missed) == std::string::npos) == met);
        CHECK(nlohmann::json::parse(json_of(found))["within"] == met);
    }
}

TEST_CASE("calibration: the fixed list's divergence at equal work") {
    calibration::outcome found;
    CHECK_FALSE(baseline_at_equal_work(found));
    const auto point = [](double kl, double work) {
        calibration::measured_choice made;
        made.measured.kl = kl;
        made.measured.work.total = work;
        return made;
    };
    found.baseline = {point(0.001, 0.8), point(0.01, 0.6), point(0.1, 0.4)};
    found.best = point(0.005, 0.5);
    REQUIRE(baseline_at_equal_work(found));
    CHECK(near(*baseline_at_equal_work(found), std::sqrt(0.001)));
    found.best = point(0.005, 0.9);
    CHECK_FALSE(baseline_at_equal_work(found));
    found.best = point(0.005, 0.3);
    CHECK_FALSE(baseline_at_equal_work(found));
}

TEST_CASE("calibration: stopped between windows") {
    loaded model;
    const calibration::cost_model cost(model.weights.config(), 1024);
    int left = 3;
    calibration::cpu_windows reader(model.weights, model.ops, small_blocks(), windows_of(model, 2),
                                    std::size_t{1} << 30);
    calibration::trial trial(reader, cost, [&] { return left-- > 0; });
    REQUIRE(trial.read_dense({}));
    CHECK_FALSE(trial.run(calibration::dense_choice(6)));
    left = 1;
    calibration::trial none(reader, cost, [&] { return left-- > 0; });
    CHECK_FALSE(none.read_dense({}));
}

namespace {

/// A reader that only says what it was asked for, on as many threads as it likes.
class counting_reader final : public calibration::window_reader {
  public:
    explicit counting_reader(std::int32_t workers)
        : workers_(workers)
        , asked(40) {}
    std::size_t windows() const override { return asked.size(); }
    std::int32_t prompt_tokens(std::size_t) const override { return 100; }
    std::int32_t layers() const override { return 2; }
    std::int32_t workers() const override { return workers_; }
    void read_dense(std::size_t window, const std::vector<bool>&, std::int32_t worker) override {
        note(window, worker);
    }
    answer read(std::size_t window, const choice&, std::int32_t worker) override {
        note(window, worker);
        if (window == failing) throw engine::error("window", "one that can be read", "another");
        engine::layer_record record;
        record.rows_in = record.rows_kept = 100;
        record.pairs = static_cast<std::int64_t>(100 + window);
        return {static_cast<double>(window) * 1e-3, {record, record}};
    }
    void adopt(std::size_t window, const choice&, const std::vector<bool>&, std::int32_t worker) override {
        note(window, worker);
    }
    void forget(std::size_t) override {}
    std::int64_t layers_run() const override { return 0; }
    std::int64_t layers_replayed() const override { return 0; }

  private:
    void note(std::size_t window, std::int32_t worker) {
        ++asked[window]; // of this window alone
        if (worker < 0 || worker >= workers_) ++strangers;
    }
    std::int32_t workers_;

  public:
    std::vector<int> asked;
    std::atomic<int> strangers{0};
    std::size_t failing = 1000;
};

} // namespace

TEST_CASE("calibration: windows read by several workers come to what one comes to") {
    engine::llama_config config;
    config.layers = 2;
    config.hidden = 4;
    config.ffn = 8;
    config.heads = 2;
    config.kv_heads = 1;
    config.head_dim = 2;
    const calibration::cost_model cost(config, 100);
    counting_reader alone(1);
    counting_reader several(5);
    const auto always = [] { return true; };
    const auto expected = calibration::trial(alone, cost, always).run(calibration::dense_choice(2));
    calibration::trial by_several(several, cost, always);
    const auto came = by_several.run(calibration::dense_choice(2));
    REQUIRE(expected);
    REQUIRE(came);
    CHECK(came->kl == expected->kl);
    CHECK(came->kl_max == expected->kl_max);
    CHECK(came->by_window == expected->by_window);
    CHECK(came->work.total == expected->work.total);
    CHECK(near(came->kl_max, 0.039));
    CHECK(by_several.read_dense({}));
    by_several.adopt(calibration::dense_choice(2), {});
    CHECK(several.asked == std::vector<int>(40, 3));
    CHECK(several.strangers == 0);
    several.failing = 17; // what one worker throws comes out of the call
    CHECK_THROWS_AS(by_several.run(calibration::dense_choice(2)), engine::error);
}
