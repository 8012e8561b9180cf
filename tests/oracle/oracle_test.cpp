// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The oracle against numbers that were worked out by hand.

#include "oracle/oracle.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <limits>
#include <numeric>

namespace {

constexpr double not_a_number = std::numeric_limits<double>::quiet_NaN();

/// One head of dimension 1: q is 1 everywhere, so that a key's score is its value (a logarithm, so that
/// shares are ratios of small integers).
oracle::segment_problem keys_with_weights(const std::vector<double>& weights, int context = 0) {
    const int keys = static_cast<int>(weights.size());
    const int rows = keys - context;
    oracle::segment_problem problem;
    problem.q = oracle::tensor(rows, 1, 1);
    problem.keys = oracle::tensor(keys, 1, 1);
    for (int row = 0; row < rows; ++row) {
        problem.q.at(row, 0, 0) = 1;
        problem.positions.push_back(context + row);
    }
    for (int key = 0; key < keys; ++key) {
        problem.keys.at(key, 0, 0) = std::log(weights[static_cast<std::size_t>(key)]);
        problem.key_positions.push_back(key);
    }
    problem.observers = {rows - 1};
    problem.forced.assign(static_cast<std::size_t>(rows), false);
    problem.block_rows = 2;
    return problem;
}

std::vector<int> upto(int count) {
    std::vector<int> numbers(static_cast<std::size_t>(count));
    std::iota(numbers.begin(), numbers.end(), 0);
    return numbers;
}

} // namespace

TEST_CASE("oracle masses: shares of one observer, by block") {
    const auto masses = oracle::masses_of(keys_with_weights({1, 2, 3, 4, 10}));
    REQUIRE(masses.free.size() == 3);
    CHECK(masses.free[0] == Approx(3.0 / 20));
    CHECK(masses.free[1] == Approx(7.0 / 20));
    CHECK(masses.free[2] == Approx(10.0 / 20));
    CHECK(masses.forced == std::vector<double>{0, 0, 0});
    CHECK(masses.head_free[0] == masses.free);
    CHECK_FALSE(masses.non_finite);
}

TEST_CASE("oracle masses: context takes its share and has no block") {
    const auto masses = oracle::masses_of(keys_with_weights({5, 5, 2, 3, 5}, 2));
    REQUIRE(masses.free.size() == 2);
    CHECK(masses.free[0] == Approx(5.0 / 20));
    CHECK(masses.free[1] == Approx(5.0 / 20));
}

TEST_CASE("oracle masses: an earlier observer doesn't see later keys") {
    auto problem = keys_with_weights({1, 3, 4, 8});
    problem.observers = {1, 3};
    const auto masses = oracle::masses_of(problem);
    CHECK(masses.free[0] == Approx(1.0 + 4.0 / 16));
    CHECK(masses.free[1] == Approx(12.0 / 16));
}

TEST_CASE("oracle masses: forced rows keep a number of their own, and their place in the softmax") {
    auto problem = keys_with_weights({1, 2, 3, 4});
    problem.forced = {true, false, false, true};
    const auto masses = oracle::masses_of(problem);
    CHECK(masses.free[0] == Approx(0.2));
    CHECK(masses.forced[0] == Approx(0.1));
    CHECK(masses.free[1] == Approx(0.3));
    CHECK(masses.forced[1] == Approx(0.4));
}

TEST_CASE("oracle masses: a sink logit takes its part of the denominator") {
    auto problem = keys_with_weights({1, 2, 3, 4});
    problem.score.sink_logits = {std::log(10.0)};
    const auto masses = oracle::masses_of(problem);
    CHECK(masses.free[0] == Approx(3.0 / 20));
    CHECK(masses.free[1] == Approx(7.0 / 20));
}

TEST_CASE("oracle masses: scale and soft-cap") {
    auto problem = keys_with_weights({4, 9});
    problem.block_rows = 1;
    problem.score.scale = 0.5; // square roots: 2 and 3
    CHECK(oracle::masses_of(problem).free[1] == Approx(0.6));
    problem.score.scale = 1;
    problem.score.softcap = 1e-9; // everything becomes equal
    CHECK(oracle::masses_of(problem).free[1] == Approx(0.5));
}

TEST_CASE("oracle masses: query heads share KV heads in groups, and sum") {
    oracle::segment_problem problem;
    problem.q = oracle::tensor(2, 4, 1);
    problem.keys = oracle::tensor(2, 2, 1);
    for (int row = 0; row < 2; ++row) {
        for (int head = 0; head < 4; ++head) {
            problem.q.at(row, head, 0) = 1;
        }
    }
    problem.keys.at(0, 0, 0) = std::log(3.0); // KV head 0: shares 3/4, 1/4
    problem.keys.at(1, 1, 0) = std::log(4.0); // KV head 1: shares 1/5, 4/5
    problem.positions = problem.key_positions = {0, 1};
    problem.observers = {1};
    problem.forced = {false, false};
    problem.block_rows = 1;
    const auto masses = oracle::masses_of(problem);
    CHECK(masses.head_free[1][0] == Approx(0.75));
    CHECK(masses.head_free[2][0] == Approx(0.2));
    CHECK(masses.free[0] == Approx(2 * 0.75 + 2 * 0.2));
    CHECK(masses.free[1] == Approx(2 * 0.25 + 2 * 0.8));
}

TEST_CASE("oracle masses: what isn't finite is told where an observer scores it") {
    auto problem = keys_with_weights({1, 2, 3, 4});
    problem.q.at(0, 0, 0) = not_a_number; // no observer
    CHECK_FALSE(oracle::masses_of(problem).non_finite);
    problem.keys.at(3, 0, 0) = std::numeric_limits<double>::infinity();
    CHECK(oracle::masses_of(problem).non_finite);
    problem.observers = {1}; // masked there, and still told
    CHECK(oracle::masses_of(problem).non_finite);
    problem.observers = {};
    CHECK(oracle::masses_of(problem).unscored);
    CHECK_FALSE(oracle::masses_of(problem).non_finite);
}

TEST_CASE("oracle: observers and forced rows") {
    CHECK(oracle::observers_of({3, 5, 8, 9}, {}, 3) == std::vector<int>{1, 2, 3});
    CHECK(oracle::observers_of({3, 5, 8, 9}, {}, 9) == std::vector<int>{0, 1, 2, 3});
    CHECK(oracle::observers_of({3, 5, 8, 9}, {{0, 6}, {9, 10}}, 2) == std::vector<int>{1, 3});
    CHECK(oracle::observers_of({3, 5, 8, 9}, {{6, 8}}, 2).empty());
    CHECK(oracle::forced_rows({3, 5, 8, 9}, 5, 1, {{8, 9}}) == std::vector<bool>{true, false, true, true});
    CHECK(oracle::forced_rows({3, 5}, 0, 7, {}) == std::vector<bool>{true, true});
}

TEST_CASE("oracle propagation: cumulative and revived") {
    for (const auto mode : {oracle::propagation::cumulative, oracle::propagation::revive}) {
        oracle::row_history history(mode, upto(5));
        CHECK(history.enter(true) == upto(5));
        history.keep({true, false, true, false, true});
        CHECK(history.enter(false) == std::vector<int>{0, 2, 4});
        const bool revives = mode == oracle::propagation::revive;
        CHECK(history.enter(true) == (revives ? upto(5) : std::vector<int>{0, 2, 4}));
        history.keep(revives ? std::vector<bool>{true, true, false, false, true}
                             : std::vector<bool>{true, false, true});
        CHECK(history.enter(false) == (revives ? std::vector<int>{0, 1, 4} : std::vector<int>{0, 4}));
        CHECK(history.stored()[2].size() == (revives ? 5u : 3u));
        CHECK(history.processed()[0] == std::vector<int>{0, 2, 4});
        const auto dropped = history.dropped_ranges(3);
        REQUIRE(dropped.size() == 1);
        CHECK(dropped[0].begin == (revives ? 2 : 1));
        CHECK(dropped[0].end == 4);
        CHECK(history.dropped_ranges(0).empty());
    }
}

TEST_CASE("oracle attention: a mask by stored positions, causality and window") {
    const auto allowed = oracle::stored_causal_mask({4, 6}, {0, 2, 4, 6}, {0, 4, 6}, 3);
    CHECK(allowed[0] == std::vector<bool>{false, false, true, false});
    CHECK(allowed[1] == std::vector<bool>{false, false, true, true});
    const auto unbounded = oracle::stored_causal_mask({4, 6}, {0, 2, 4, 6}, {0, 4, 6});
    CHECK(unbounded[1] == std::vector<bool>{true, false, true, true});
}

TEST_CASE("oracle attention: shares of the allowed keys weigh the values") {
    oracle::tensor q(1, 1, 1);
    q.at(0, 0, 0) = 1;
    oracle::tensor k(3, 1, 1);
    oracle::tensor v(3, 1, 2);
    for (int key = 0; key < 3; ++key) {
        k.at(key, 0, 0) = std::log(key + 1.0);
        v.at(key, 0, 0) = key;
        v.at(key, 0, 1) = 10;
    }
    oracle::score_parameters score;
    const auto two = oracle::masked_attention(q, k, v, score, {{true, false, true}});
    CHECK(two.at(0, 0, 0) == Approx(2 * 3.0 / 4));
    CHECK(two.at(0, 0, 1) == Approx(10));
    score.sink_logits = {std::log(4.0)};
    CHECK(oracle::masked_attention(q, k, v, score, {{true, false, true}}).at(0, 0, 1) == Approx(5));
    CHECK(oracle::masked_attention(q, k, v, {}, {{false, false, false}}).at(0, 0, 1) == 0);
}

namespace {

/// Blocks of two rows with these masses, nothing forced.
oracle::selection_problem blocks_of_two(const std::vector<std::int64_t>& masses) {
    oracle::selection_problem problem;
    problem.block_rows = 2;
    problem.free_mass = masses;
    problem.forced_mass.assign(masses.size(), 0);
    problem.forced.assign(2 * masses.size(), false);
    return problem;
}

std::vector<int> kept_rows(const oracle::selection_problem& problem, const oracle::rule& how) {
    std::vector<int> kept;
    const auto out = oracle::select(problem, how);
    for (std::size_t row = 0; row < out.keep.size(); ++row) {
        if (out.keep[row]) kept.push_back(static_cast<int>(row));
    }
    return kept;
}

oracle::rule top_p(double p) {
    oracle::rule how;
    how.fraction = oracle::fraction(p);
    return how;
}

} // namespace

TEST_CASE("oracle selection: the fewest blocks that hold p, and what is met exactly") {
    const auto problem = blocks_of_two({10, 40, 20, 30});
    CHECK(kept_rows(problem, top_p(0.25)) == std::vector<int>{2, 3});
    CHECK(kept_rows(problem, top_p(0.5)) == std::vector<int>{2, 3, 6, 7});
    CHECK(oracle::select(problem, top_p(0.5)).dropped == 30);
    CHECK(oracle::select(problem, top_p(0.5)).total == 100);
    const auto even = blocks_of_two({25, 25, 25, 25});
    CHECK(kept_rows(even, top_p(0.5)) == std::vector<int>{0, 1, 2, 3});
    auto published = top_p(0.5);
    published.keep_when_exactly_met = true;
    CHECK(kept_rows(even, published) == std::vector<int>{0, 1, 2, 3, 4, 5});
    published.later_block_first = true;
    CHECK(kept_rows(even, published) == std::vector<int>{2, 3, 4, 5, 6, 7});
    CHECK(kept_rows(problem, top_p(1e-6)) == std::vector<int>{2, 3});
    CHECK(oracle::select(blocks_of_two({5, 0}), top_p(1)).reason == oracle::kept_because::everything);
    CHECK(kept_rows(blocks_of_two({5, 0}), top_p(0.999)) == std::vector<int>{0, 1});
}

TEST_CASE("oracle selection: ratio and fraction of the largest") {
    const auto problem = blocks_of_two({10, 40, 20, 30});
    oracle::rule how = top_p(0.5);
    how.kind = oracle::rule_kind::ratio;
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 3, 6, 7});
    how.fraction = oracle::fraction(0.51);
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 3, 4, 5, 6, 7});
    how.kind = oracle::rule_kind::max_fraction;
    how.fraction = oracle::fraction(0.75);
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 3, 6, 7});
}

TEST_CASE("oracle selection: bounds and budget cut a block") {
    auto problem = blocks_of_two({10, 40, 20, 30});
    oracle::rule how = top_p(0.25);
    how.min_rows = 3;
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 3, 6});
    how = top_p(0.9);
    how.max_rows = 5;
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 3, 4, 6, 7});
    CHECK(oracle::select(problem, how).dropped == 10 + 10);
    how = oracle::rule{};
    how.kind = oracle::rule_kind::budget;
    how.budget = 3;
    problem.forced[0] = true;
    CHECK(kept_rows(problem, how) == std::vector<int>{0, 2, 3});
    problem.forced.assign(8, false);
    problem.forced[1] = problem.forced[2] = problem.forced[5] = problem.forced[6] = true;
    CHECK(oracle::select(problem, how).reason == oracle::kept_because::rerun_dense);
    CHECK(kept_rows(problem, how) == std::vector<int>{2, 5, 6});
    problem.forced[1] = problem.forced[2] = false;
    problem.fault = oracle::kept_because::non_finite;
    CHECK(kept_rows(problem, how) == std::vector<int>{5, 6, 7});
    CHECK(oracle::select(problem, how).reason == oracle::kept_because::rerun_dense);
    how.budget = 100;
    CHECK(oracle::select(problem, how).reason == oracle::kept_because::non_finite);
}

TEST_CASE("oracle selection: forced rows stay and are left out of the mass, or count") {
    auto problem = blocks_of_two({0, 40, 20, 30});
    problem.forced_mass = {100, 5, 0, 0};
    problem.forced = {true, true, true, false, false, false, false, false};
    CHECK(kept_rows(problem, top_p(0.4)) == std::vector<int>{0, 1, 2, 3});
    CHECK(kept_rows(problem, top_p(0.5)) == std::vector<int>{0, 1, 2, 3, 6, 7});
    oracle::rule all = top_p(0.5);
    all.over = oracle::scope::all;
    CHECK(kept_rows(problem, all) == std::vector<int>{0, 1, 2});
    CHECK(oracle::select(problem, all).total == 195);
    CHECK(oracle::select(problem, all).dropped == 90);
}

TEST_CASE("oracle selection: never on doubt") {
    auto problem = blocks_of_two({0, 0});
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::zero_mass);
    CHECK(kept_rows(problem, top_p(0.5)).size() == 4);
    problem.free_mass = {std::int64_t{1} << 62, std::int64_t{1} << 62};
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::overflow);
    problem.free_mass = {1, -1};
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::overflow);
    problem.min_length = 5;
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::short_segment);
    problem.enabled = false;
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::switched_off);
    problem.is_prefill = false;
    CHECK(oracle::select(problem, top_p(0.5)).reason == oracle::kept_because::not_prefill);
    CHECK(oracle::select({}, top_p(0.5)).reason == oracle::kept_because::empty);
    CHECK(oracle::is_fault(oracle::kept_because::zero_mass));
    CHECK_FALSE(oracle::is_fault(oracle::kept_because::short_segment));
}

TEST_CASE("oracle lists: context, listed blocks, and whole blocks of the window") {
    // Two keys of context, then blocks of 3: keys 2-4, 5-7, 8-10. Positions with a gap of 10 before key 7.
    const std::vector<int> positions{0, 1, 2, 3, 4, 5, 6, 17, 18, 19, 20};
    const auto reads = [&](int query, const std::vector<bool>& listed, int window) {
        const oracle::block_list list{2, 3, listed, window};
        const int position = positions[static_cast<std::size_t>(query)];
        const auto allowed = oracle::stored_causal_mask({position}, positions, positions);
        const std::vector<bool> read = oracle::listed_keys(allowed[0], position, positions, list);
        std::vector<int> keys;
        for (int key = 0; key < 11; ++key) {
            if (read[static_cast<std::size_t>(key)]) {
                keys.push_back(key);
            }
        }
        return keys;
    };
    CHECK(reads(9, {false, false, false}, 0) == std::vector<int>{0, 1});
    CHECK(reads(9, {true, false, false}, 0) == std::vector<int>{0, 1, 2, 3, 4});
    CHECK(reads(9, {false, false, true}, 0) == std::vector<int>{0, 1, 8, 9});
    CHECK(reads(9, {false, false, false}, 2) == std::vector<int>{0, 1, 8, 9});
    CHECK(reads(9, {false, false, false}, 3) == std::vector<int>{0, 1, 5, 6, 7, 8, 9}); // key 7 is at 17
    CHECK(reads(9, {false, false, false}, 13) == std::vector<int>{0, 1, 5, 6, 7, 8, 9});
    CHECK(reads(9, {false, false, false}, 16) ==
          std::vector<int>{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}); // and 4 at 4
    CHECK(reads(0, {true, true, true}, 5) == std::vector<int>{0});
}

TEST_CASE("oracle attention: one row, and what its bound is made of") {
    oracle::tensor q(1, 2, 2), k(3, 1, 2), v(3, 1, 1);
    q.at(0, 1, 0) = 1;
    q.at(0, 1, 1) = 1;
    for (int key = 0; key < 3; ++key) {
        k.at(key, 0, 0) = std::log(key + 1.0);
        v.at(key, 0, 0) = key == 1 ? -1 : 1;
    }
    oracle::score_parameters score;
    auto row = oracle::attend_row(q, 0, 1, k, v, score, {true, true, true});
    CHECK(row.reads == 3);
    CHECK(row.out[0] == Approx((1.0 - 2.0 + 3.0) / 6));
    CHECK(row.magnitude[0] == Approx(1));
    CHECK(row.lse == Approx(std::log(6.0)));
    CHECK(row.largest_score == Approx(std::log(3.0)));
    CHECK(row.score_magnitude == Approx(std::log(3.0))); // one product that isn't 0
    row = oracle::attend_row(q, 0, 1, k, v, score, {true, false, true}, 2);
    CHECK(row.out[0] == Approx(1));
    CHECK(row.score_magnitude == Approx(3 * std::log(3.0)));
    row = oracle::attend_row(q, 0, 1, k, v, score, {false, false, false});
    CHECK(row.out[0] == 0);
    CHECK(row.lse == -std::numeric_limits<double>::infinity());
    score.sink_logits = {0, std::log(4.0)};
    CHECK(oracle::attend_row(q, 0, 1, k, v, score, {false, false, false}).lse == Approx(std::log(4.0)));
    row = oracle::attend_row(q, 0, 1, k, v, score, {true, true, true});
    CHECK(row.lse == Approx(std::log(10.0)));
    CHECK(row.out[0] == Approx(0.2));
}
