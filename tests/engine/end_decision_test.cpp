// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Decisions when the prompt ends: what layers hold then, and the answers of the tokens that follow, against a
// plain forward pass in which the prompt saw everything and what follows sees what was kept.

#include "support/catch.hpp"

#include "engine/app_support.hpp"
#include "engine/model/end_decision.hpp"
#include "engine/model/machine.hpp"
#include "engine/model/paged_kv_store.hpp"
#include "engine/small_model.hpp"

#include <cmath>
#include <memory>
#include <utility>

using engine::cpu::arithmetic;
using engine_test::small_model;
using uniprefill::propagation;
using uniprefill::request_tag;

namespace {

constexpr std::int32_t prompt_tokens = 300;
constexpr std::int32_t max_tokens = 400;
constexpr std::int32_t page_tokens = 16;

struct loaded {
    loaded()
        : plain(uniprefill_test::seed())
        , file(engine_test::span_of(plain.file))
        , ops(arithmetic::fp32)
        , weights(file, ops.kind()) {}
    small_model plain;
    engine::gguf file;
    engine::cpu_ops ops;
    engine::cpu_weights weights;
};

engine::session_options options_of(propagation mode, bool at_end = true) {
    engine::session_options options;
    options.max_requests = 2;
    options.max_segments = 4;
    options.max_step_rows = prompt_tokens;
    options.max_tokens = max_tokens;
    options.block_rows = 8;
    options.num_observations = 12;
    options.propagation = mode;
    options.decide_at_end = at_end;
    for (const std::int32_t layer : {1, 3, 4}) {
        options.selecting.push_back({layer, uniprefill::selection_rule::top_p(0.6), nullptr});
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
    request.options.tail = 12;
    request.logits_rows = {static_cast<std::int32_t>(tokens.size()) - 1};
    return request;
}

std::vector<float> run(engine::cpu_session& session, const engine::planned_request& request) {
    const engine::step_plan plan({request});
    engine::cpu_machine machine(session, plan);
    machine.run();
    return machine.logits();
}

/// Request 0 reads a prompt, in chunks that end at @p ends.
std::vector<float> read(engine::cpu_session& session, const std::vector<std::int32_t>& prompt,
                        const std::vector<std::int32_t>& ends) {
    session.admit(0);
    std::vector<float> logits;
    std::int32_t first = 0;
    for (const std::int32_t end : ends) {
        logits = run(session,
                     request_of(request_tag::chunk, first, {prompt.begin() + first, prompt.begin() + end}));
        first = end;
    }
    return logits;
}

void decide(engine::cpu_session& session, const std::vector<std::int32_t>& prompt) {
    engine::decide_at_end(session, request_of(request_tag::prefill, 0, prompt));
}

using held_positions = std::vector<std::vector<int>>; // [layers]

held_positions stored(engine::cpu_session& session) {
    held_positions made;
    for (std::int32_t layer = 0; layer < small_model::layers; ++layer) {
        uniprefill::held_rows held;
        uniprefill::throw_if_failed(session.drops().rows_of(0, layer, held));
        std::vector<std::int32_t> positions(static_cast<std::size_t>(held.length()));
        held.copy_positions(0, positions.data(), held.length());
        made.emplace_back(positions.begin(), positions.end());
    }
    return made;
}

held_positions everything(int count) {
    std::vector<int> all;
    for (int position = 0; position < count; ++position) {
        all.push_back(position);
    }
    return held_positions(small_model::layers, all);
}

double largest_difference(const std::vector<float>& ours, const std::vector<double>& expected) {
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(ours[i]) - expected[i]));
    }
    return worst;
}

/// Pages for the next rows in every layer, as a server takes them.
void reserve(engine::cpu_session& session, engine::paged_kv_store& pages, std::int32_t rows) {
    for (std::int32_t layer = 0; layer < small_model::layers; ++layer) {
        uniprefill::held_rows held;
        uniprefill::throw_if_failed(session.drops().rows_of(0, layer, held));
        pages.reserve(layer, 0, held.length(), rows);
    }
}

} // namespace

TEST_CASE("after decisions at the prompt's end, tokens see what was kept") {
    loaded model;
    const auto prompt = model.plain.random_tokens(prompt_tokens, 3);
    const auto more = model.plain.random_tokens(20, 4);
    for (const propagation mode : {propagation::cumulative, propagation::revive}) {
        engine::cpu_session session(model.weights, model.ops, options_of(mode));
        const auto logits = read(session, prompt, {100, 200, prompt_tokens});
        CHECK(stored(session) == everything(prompt_tokens)); // nothing was dropped on the way
        const auto dense = everything(prompt_tokens);
        CHECK(largest_difference(logits, model.plain.logits(prompt, dense, dense).back()) < 1e-3);

        decide(session, prompt);
        held_positions kept = stored(session);
        CHECK(kept[0] == dense[0]);
        CHECK(kept[1] == dense[1]);
        CHECK(kept[2].size() < 200);
        CHECK(kept[5].size() < 200);
        if (mode == propagation::cumulative) {
            CHECK(kept[5].size() < kept[2].size());
        } else {
            CHECK(kept[3] == dense[3]);
        }
        for (std::int32_t layer = 0; layer < small_model::layers; ++layer) {
            CHECK(session.cache().rows(layer, 0).length ==
                  static_cast<std::int64_t>(kept[static_cast<std::size_t>(layer)].size()));
        }
        std::vector<std::int32_t> tokens = prompt;
        std::vector<float> last;
        for (const std::int32_t token : more) {
            const auto position = static_cast<std::int32_t>(tokens.size());
            last = run(session, request_of(request_tag::decode, position, {token}));
            tokens.push_back(token);
            for (auto& of : kept) {
                of.push_back(position);
            }
        }
        CHECK(stored(session) == kept);
        const auto processed = everything(static_cast<int>(tokens.size()));
        const auto expected = model.plain.logits(tokens, kept, processed, prompt_tokens).back();
        CHECK(largest_difference(last, expected) < 1e-3);
        // And what was given up would have been seen.
        const auto seeing_all = model.plain.logits(tokens, processed, processed).back();
        CHECK(largest_difference(last, seeing_all) > 1e-2);
    }
}

TEST_CASE("decisions at the prompt's end don't depend on its chunks, nor on what came after it") {
    loaded model;
    const auto prompt = model.plain.random_tokens(prompt_tokens, 5);
    engine::cpu_session whole(model.weights, model.ops, options_of(propagation::cumulative));
    const auto logits = read(whole, prompt, {prompt_tokens});
    decide(whole, prompt);
    const held_positions kept = stored(whole);

    // Chunks shorter than the observations too.
    engine::cpu_session chunked(model.weights, model.ops, options_of(propagation::cumulative));
    CHECK(read(chunked, prompt, {7, 150, 293, prompt_tokens}) == logits);
    decide(chunked, prompt);
    CHECK(stored(chunked) == kept);

    engine::cpu_session late(model.weights, model.ops, options_of(propagation::cumulative));
    read(late, prompt, {prompt_tokens});
    for (std::int32_t position = prompt_tokens; position < prompt_tokens + 3; ++position) {
        run(late, request_of(request_tag::decode, position, {11}));
    }
    decide(late, prompt);
    held_positions with_later = kept;
    for (auto& of : with_later) {
        of.insert(of.end(), {prompt_tokens, prompt_tokens + 1, prompt_tokens + 2});
    }
    CHECK(stored(late) == with_later);
}

TEST_CASE("the first selecting layer decides at the end as it does on the way") {
    loaded model;
    const auto prompt = model.plain.random_tokens(prompt_tokens, 6);
    engine::cpu_session at_end(model.weights, model.ops, options_of(propagation::cumulative));
    read(at_end, prompt, {prompt_tokens});
    decide(at_end, prompt);
    engine::cpu_session on_the_way(model.weights, model.ops, options_of(propagation::cumulative, false));
    read(on_the_way, prompt, {prompt_tokens});
    CHECK(stored(at_end)[2] == stored(on_the_way)[2]);
}

TEST_CASE("pages that decisions at the end free are handed back, and the answers stay") {
    loaded model;
    const auto prompt = model.plain.random_tokens(prompt_tokens, 7);
    engine::cpu_session plain(model.weights, model.ops, options_of(propagation::cumulative));
    read(plain, prompt, {prompt_tokens});
    decide(plain, prompt);

    engine::paged_kv_limits limits;
    limits.layers = small_model::layers;
    limits.requests = 2;
    limits.kv_heads = small_model::kv_heads;
    limits.head_dim = small_model::head_dim;
    limits.max_tokens = max_tokens;
    limits.pages = 200;
    limits.page_tokens = page_tokens;
    auto store = std::make_unique<engine::paged_kv_store>(limits);
    engine::paged_kv_store& pages = *store;
    engine::cpu_session paged(model.weights, model.ops, options_of(propagation::cumulative),
                              std::move(store));
    for (const std::int32_t end : {150, prompt_tokens}) {
        if (end == 150) {
            paged.admit(0);
        }
        reserve(paged, pages, 150);
        run(paged,
            request_of(request_tag::chunk, end - 150, {prompt.begin() + end - 150, prompt.begin() + end}));
    }
    const std::int32_t before = pages.pool().num_taken();
    decide(paged, prompt);
    CHECK(stored(paged) == stored(plain));
    uniprefill::page_rule rule;
    rule.page_tokens = page_tokens;
    std::vector<std::int32_t> freed(static_cast<std::size_t>(before));
    std::int32_t count = 0;
    const std::int32_t id = 0;
    uniprefill::throw_if_failed(paged.drops().hand_back_pages(&id, 1, paged.drops().every_layer(), rule,
                                                              pages.tables(), freed.data(), before, count));
    for (std::int32_t i = 0; i < count; ++i) {
        pages.pool().give_back(freed[static_cast<std::size_t>(i)]);
    }
    std::int32_t needed = 0;
    for (const auto& of : stored(paged)) {
        needed += uniprefill::num_blocks(static_cast<std::int32_t>(of.size()), page_tokens);
    }
    CHECK(pages.pool().num_taken() == needed);
    CHECK(needed < before);
    for (std::int32_t position = prompt_tokens; position < prompt_tokens + 40; ++position) {
        reserve(paged, pages, 1);
        const auto request = request_of(request_tag::decode, position, {position % 50});
        REQUIRE(run(paged, request) == run(plain, request));
    }
}

TEST_CASE("decisions at the end that can't be taken") {
    loaded model;
    const auto prompt = model.plain.random_tokens(prompt_tokens, 8);
    engine::cpu_session on_the_way(model.weights, model.ops, options_of(propagation::cumulative, false));
    read(on_the_way, prompt, {prompt_tokens});
    CHECK(app_test::refusal([&] { decide(on_the_way, prompt); }) ==
          "decisions at the prompt's end: expected a session made with decide_at_end, came another one");
    engine::cpu_session session(model.weights, model.ops, options_of(propagation::cumulative));
    session.admit(0);
    CHECK(app_test::refusal([&] { decide(session, prompt); }) ==
          "decisions at the prompt's end: expected the last 12 queries of layer 1, came 0");
    // A step that is thrown away leaves no queries, a released request none either.
    const engine::step_plan plan({request_of(request_tag::prefill, 0, prompt)});
    {
        engine::cpu_machine abandoned(session, plan);
        for (int i = 0; i < 17; ++i) {
            REQUIRE(abandoned.advance());
        }
    }
    CHECK(session.last_queries().of(0, 0).empty());
    session.release(0);
    read(session, prompt, {prompt_tokens});
    CHECK_FALSE(session.last_queries().of(0, 0).empty());
    session.release(0);
    CHECK(session.last_queries().of(0, 0).empty());
}
