// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/error.hpp"
#include "engine/model/machine.hpp"
#include "engine/small_model.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

using engine_test::small_model;
using uniprefill::request_tag;

namespace {

struct loaded {
    loaded()
        : plain(uniprefill_test::seed())
        , file(engine_test::span_of(plain.file))
        , ops(engine::cpu::arithmetic::automatic)
        , weights(file, ops.kind()) {}
    small_model plain;
    engine::gguf file;
    engine::cpu_ops ops;
    engine::cpu_weights weights;
};

enum class listing { none, of_segments, by_query_block };

engine::session_options selecting_at(const std::vector<std::pair<int, double>>& layers, listing listed) {
    engine::session_options options;
    options.max_step_rows = 300;
    options.max_tokens = 320;
    options.block_rows = 8;
    options.num_observations = 12;
    for (const auto& [layer, p] : layers) {
        options.selecting.push_back({layer, uniprefill::selection_rule::top_p(p), nullptr});
    }
    if (listed == listing::by_query_block) {
        options.list_sampling = uniprefill::query_sampling{32, 5};
    }
    if (listed != listing::none) {
        options.lists.emplace();
        options.lists->rule = uniprefill::selection_rule::top_p(0.5, uniprefill::mass_scope::all);
        options.lists->sink = 6;
        options.lists->window = 20;
    }
    return options;
}

engine::planned_request request_of(request_tag tag, std::int32_t first,
                                   const std::vector<std::int32_t>& tokens) {
    engine::planned_request request;
    request.tag = tag;
    request.first_position = first;
    request.tokens = tokens;
    request.options.sink = 6;
    request.options.tail = 10;
    request.logits_rows = {static_cast<std::int32_t>(tokens.size()) - 1};
    return request;
}

struct pass {
    std::vector<float> logits; ///< of the prompt and of what follows it
    std::vector<std::int32_t> dropped_at;
    std::vector<std::int64_t> rows_and_pairs;
};

pass read(loaded& model, const engine::session_options& options, engine::trail* left,
          const engine::trail* from, std::int32_t layer) {
    engine::cpu_session session(model.weights, model.ops, options);
    session.admit(0);
    pass made;
    {
        const engine::step_plan plan(
            {request_of(request_tag::prefill, 0, model.plain.random_tokens(300, 5))});
        engine::cpu_machine machine(session, plan);
        if (left != nullptr) machine.record_into(*left);
        if (from != nullptr) machine.begin_at(layer, *from);
        machine.run();
        made.logits = machine.logits();
        made.dropped_at = machine.dropped_at();
        for (const auto& record : machine.layers()) {
            made.rows_and_pairs.insert(made.rows_and_pairs.end(), {record.rows_in, record.rows_kept,
                                                                   record.pairs, record.estimator_pairs});
        }
    }
    const engine::step_plan plan({request_of(request_tag::verify, 300, model.plain.random_tokens(9, 6))});
    engine::cpu_machine machine(session, plan);
    machine.run();
    made.logits.insert(made.logits.end(), machine.logits().begin(), machine.logits().end());
    return made;
}

bool same(const pass& a, const pass& b) {
    return a.logits.size() == b.logits.size() &&
           std::memcmp(a.logits.data(), b.logits.data(), a.logits.size() * sizeof(float)) == 0 &&
           a.dropped_at == b.dropped_at && a.rows_and_pairs == b.rows_and_pairs;
}

} // namespace

TEST_CASE("trail: a step that begins where another was comes out the same, bit for bit") {
    loaded model;
    for (const listing listed : {listing::none, listing::of_segments, listing::by_query_block}) {
        engine::trail left;
        const auto first = selecting_at({{1, 0.7}, {3, 0.6}}, listed);
        const pass expected = read(model, first, &left, nullptr, 0);
        CHECK(same(read(model, first, nullptr, nullptr, 0), expected));
        CHECK(left.bytes() > 0);
        for (std::int32_t layer = 1; layer < small_model::layers; ++layer) {
            CHECK(same(read(model, first, nullptr, &left, layer), expected));
        }
        // Another policy joins up to its first difference, and leaves a trail in turn.
        const auto second = selecting_at({{1, 0.7}, {4, 0.5}}, listed);
        const pass whole = read(model, second, nullptr, nullptr, 0);
        CHECK_FALSE(same(whole, expected));
        engine::trail again;
        CHECK(same(read(model, second, &again, &left, 3), whole));
        CHECK(same(read(model, second, nullptr, &again, 5), whole));
        const auto third = selecting_at({{1, 0.7}, {4, 0.5}, {5, 0.5}}, listed);
        CHECK(same(read(model, third, nullptr, &again, 5), read(model, third, nullptr, nullptr, 0)));
    }
}

TEST_CASE("forward: lists by query block that hold everything are dense, and fewer blocks are fewer pairs") {
    loaded model;
    const std::vector<std::pair<int, double>> layers{{1, 0.7}, {3, 0.6}};
    const pass dense = read(model, selecting_at(layers, listing::none), nullptr, nullptr, 0);
    engine::session_options own = selecting_at(layers, listing::by_query_block);
    own.lists->window = 0;
    own.lists->rule = uniprefill::selection_rule::top_p(1, uniprefill::mass_scope::all);
    const pass whole = read(model, own, nullptr, nullptr, 0);
    CHECK(whole.logits == dense.logits);
    CHECK(whole.dropped_at == dense.dropped_at);
    own.lists->rule = uniprefill::selection_rule::top_p(0.4, uniprefill::mass_scope::all);
    const pass part = read(model, own, nullptr, nullptr, 0);
    CHECK(part.logits != dense.logits);
    std::size_t fewer = 0;
    for (std::size_t layer = 0; layer < part.rows_and_pairs.size() / 4; ++layer) {
        CHECK(whole.rows_and_pairs[4 * layer + 2] == dense.rows_and_pairs[4 * layer + 2]);
        fewer += part.rows_and_pairs[4 * layer + 2] < dense.rows_and_pairs[4 * layer + 2] ? 1 : 0;
    }
    CHECK(fewer > 0);
    std::int64_t looked = 0; // of layer 0, by one row in five of each 32, from the last one back
    for (std::int64_t first = 0; first < 300; first += 32) {
        for (std::int64_t row = std::min<std::int64_t>(first + 32, 300) - 1; row >= first; row -= 5) {
            looked += row + 1;
        }
    }
    CHECK(part.rows_and_pairs[3] == looked);
}

TEST_CASE("trail: what doesn't fit is refused") {
    loaded model;
    engine::trail left;
    left.may_begin = {false, true, true, true, true, true};
    const auto options = selecting_at({{1, 0.7}, {3, 0.6}}, listing::none);
    read(model, options, &left, nullptr, 0);
    CHECK(left.begins_at(1));
    CHECK_FALSE(left.begins_at(0));
    CHECK_THROWS_AS(read(model, options, nullptr, &left, 0), engine::error);
    CHECK_THROWS_AS(read(model, options, nullptr, &left, small_model::layers), engine::error);
    // Dropped otherwise before the layer that it begins at.
    CHECK_THROWS_AS(read(model, selecting_at({}, listing::none), nullptr, &left, 4), engine::error);
    auto revived = options;
    revived.propagation = uniprefill::propagation::revive;
    CHECK_THROWS_AS(read(model, revived, nullptr, &left, 2), engine::error);
}
