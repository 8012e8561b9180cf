// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"
#include "engine/model/estimator_pairs.hpp"
#include "engine/model/machine.hpp"
#include "engine/small_model.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <utility>

using engine::cpu::arithmetic;
using engine_test::small_model;
using uniprefill::request_tag;

namespace {

/// A loaded small model.
struct loaded {
    explicit loaded(arithmetic kind = arithmetic::automatic)
        : plain(uniprefill_test::seed())
        , file(engine_test::span_of(plain.file))
        , ops(kind)
        , weights(file, ops.kind()) {}
    small_model plain;
    engine::gguf file;
    engine::cpu_ops ops;
    engine::cpu_weights weights;
};

enum class dropping { none, cumulative, revive };

/// Short lists: every head reads few blocks besides its window's.
uniprefill::list_options<> short_lists(double p = 0.5) {
    uniprefill::list_options<> lists;
    lists.rule = uniprefill::selection_rule::top_p(p, uniprefill::mass_scope::all);
    lists.sink = 6;
    lists.window = 20;
    return lists;
}

engine::session_options options_of(dropping mode, bool listed = false) {
    engine::session_options options;
    options.max_requests = 4;
    options.max_segments = 16;
    options.max_step_rows = 2048;
    options.max_tokens = 1024;
    options.block_rows = 8;
    options.num_observations = 12;
    if (listed) options.lists = short_lists();
    if (mode != dropping::none) {
        options.propagation =
            mode == dropping::revive ? uniprefill::propagation::revive : uniprefill::propagation::cumulative;
        for (const std::int32_t layer : {1, 3, 4}) {
            options.selecting.push_back({layer, uniprefill::selection_rule::top_p(0.6), nullptr});
        }
    }
    return options;
}

engine::planned_request request_of(std::int32_t id, request_tag tag, std::int32_t first,
                                   const std::vector<std::int32_t>& tokens) {
    engine::planned_request request;
    request.id = id;
    request.tag = tag;
    request.first_position = first;
    request.tokens = tokens;
    request.options.sink = 6;
    request.options.tail = 10;
    request.logits_rows = {static_cast<std::int32_t>(tokens.size()) - 1};
    return request;
}

struct pass {
    std::vector<float> logits;
    std::vector<engine::layer_record> layers;
    std::vector<std::int32_t> dropped_at;
};

pass run(engine::cpu_session& session, std::vector<engine::planned_request> requests) {
    const engine::step_plan plan(std::move(requests));
    engine::cpu_machine machine(session, plan);
    machine.run();
    return {machine.logits(), machine.layers(), machine.dropped_at()};
}

bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

std::vector<int> stored_positions(engine::cpu_session& session, std::int32_t id, std::int32_t layer) {
    uniprefill::held_rows held;
    uniprefill::throw_if_failed(session.drops().rows_of(id, layer, held));
    std::vector<std::int32_t> positions(static_cast<std::size_t>(held.length()));
    held.copy_positions(0, positions.data(), held.length());
    return {positions.begin(), positions.end()};
}

std::vector<int> all_positions(int count) {
    std::vector<int> all;
    for (int i = 0; i < count; ++i) {
        all.push_back(i);
    }
    return all;
}

double largest_difference(const float* ours, const std::vector<double>& expected) {
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(ours[i]) - expected[i]));
    }
    return worst;
}

/// Positions that each layer processed, from the layer at which each was dropped (cumulative).
std::vector<std::vector<int>> processed_by(const pass& made) {
    std::vector<std::vector<int>> processed(small_model::layers);
    for (int l = 0; l < small_model::layers; ++l) {
        for (int t = 0; t < static_cast<int>(made.dropped_at.size()); ++t) {
            const std::int32_t at = made.dropped_at[static_cast<std::size_t>(t)];
            if (at < 0 || at > l) processed[static_cast<std::size_t>(l)].push_back(t);
        }
    }
    return processed;
}

const std::vector<arithmetic> kinds = {arithmetic::fp32, arithmetic::bf16x3, arithmetic::bf16};

} // namespace

TEST_CASE("dense logits equal a plain double forward pass") {
    for (const arithmetic kind : {arithmetic::fp32, arithmetic::bf16x3}) {
        loaded model(kind);
        const std::vector<std::int32_t> tokens = model.plain.random_tokens(150, 1);
        engine::cpu_session session(model.weights, model.ops, options_of(dropping::none));
        session.admit(0);
        auto request = request_of(0, request_tag::prefill, 0, tokens);
        request.logits_rows = {0, 70, 149};
        const pass made = run(session, {request});
        const std::vector<std::vector<int>> everything(small_model::layers, all_positions(150));
        const auto expected = model.plain.logits(tokens, everything, everything);
        for (std::size_t i = 0; i < 3; ++i) {
            const double worst =
                largest_difference(made.logits.data() + i * static_cast<std::size_t>(model.plain.vocab),
                                   expected[static_cast<std::size_t>(request.logits_rows[i])]);
            INFO(engine::cpu::name(kind) << ", row " << i);
            CHECK(worst < (kind == arithmetic::fp32 ? 1e-3 : 3e-2));
        }
    }
}

TEST_CASE("decoding token by token gives the bits of one prefill") {
    for (const arithmetic kind : kinds) {
        loaded model(kind);
        const std::vector<std::int32_t> tokens = model.plain.random_tokens(90, 2);
        engine::cpu_session session(model.weights, model.ops, options_of(dropping::none));
        session.admit(0);
        session.admit(1);
        const pass whole = run(session, {request_of(0, request_tag::prefill, 0, tokens)});
        std::vector<float> last;
        for (std::int32_t t = 0; t < 90; ++t) {
            const request_tag tag = t == 0 ? request_tag::prefill : request_tag::decode;
            last = run(session, {request_of(1, tag, t, {tokens[static_cast<std::size_t>(t)]})}).logits;
        }
        INFO(engine::cpu::name(kind));
        CHECK(same_bits(whole.logits, last));
    }
}

TEST_CASE("sparsified prefill and decode equal recomputing with an explicit mask") {
    loaded model(arithmetic::fp32);
    const std::vector<std::int32_t> prompt = model.plain.random_tokens(300, 3);
    const std::vector<std::int32_t> more = model.plain.random_tokens(20, 4);
    engine::cpu_session session(model.weights, model.ops, options_of(dropping::cumulative));
    session.admit(2);
    const pass made = run(session, {request_of(2, request_tag::prefill, 0, prompt)});
    REQUIRE(made.layers[4].rows_kept < 200); // something was dropped

    std::vector<std::vector<int>> stored;
    for (int l = 0; l < small_model::layers; ++l) {
        stored.push_back(stored_positions(session, 2, l));
        // The ledger tells what the layers processed: keys of rows alive on entry.
        CHECK(static_cast<std::int64_t>(stored.back().size()) ==
              made.layers[static_cast<std::size_t>(l)].rows_in);
    }
    auto processed = processed_by(made);
    std::vector<std::int32_t> tokens = prompt;
    auto expected = model.plain.logits(tokens, stored, processed);
    CHECK(largest_difference(made.logits.data(), expected.back()) < 1e-3);

    for (std::size_t i = 0; i < more.size(); ++i) {
        const auto position = static_cast<std::int32_t>(tokens.size());
        const pass step = run(session, {request_of(2, request_tag::decode, position, {more[i]})});
        tokens.push_back(more[i]);
        for (int l = 0; l < small_model::layers; ++l) {
            stored[static_cast<std::size_t>(l)].push_back(position);
            processed[static_cast<std::size_t>(l)].push_back(position);
        }
        if (i % 6 == 5) {
            expected = model.plain.logits(tokens, stored, processed);
            INFO("after " << i + 1 << " tokens");
            CHECK(largest_difference(step.logits.data(), expected.back()) < 1e-3);
        }
    }
    CHECK(stored_positions(session, 2, 5) == stored[5]);
}

TEST_CASE("revived rows are frozen, come back and are scored again") {
    loaded model(arithmetic::fp32);
    const std::vector<std::int32_t> prompt = model.plain.random_tokens(300, 5);
    engine::cpu_session session(model.weights, model.ops, options_of(dropping::revive));
    session.admit(0);
    const pass made = run(session, {request_of(0, request_tag::prefill, 0, prompt)});
    for (const std::size_t selecting : {1u, 3u, 4u}) {
        CHECK(made.layers[selecting].rows_in == 300);
        CHECK(made.layers[selecting].rows_kept < 300);
    }
    // Layer 2 holds what layer 1 kept, layer 5 what layer 4 kept; layer 3 everything. Layers 3 and 4 process
    // what they keep, and the ledger has no layer between them to tell layer 3's: so the mask is checked up
    // to layer 3's keys.
    std::vector<std::vector<int>> stored;
    for (int l = 0; l < small_model::layers; ++l) {
        stored.push_back(stored_positions(session, 0, l));
    }
    CHECK(stored[3] == all_positions(300));
    CHECK(stored[4] == all_positions(300));
    CHECK(static_cast<std::int64_t>(stored[2].size()) == made.layers[1].rows_kept);
    CHECK(static_cast<std::int64_t>(stored[5].size()) == made.layers[4].rows_kept);
}

TEST_CASE("revival at one layer equals recomputing with an explicit mask") {
    loaded model(arithmetic::fp32);
    const std::vector<std::int32_t> prompt = model.plain.random_tokens(260, 6);
    engine::session_options options = options_of(dropping::revive);
    options.selecting.resize(2); // layers 1 and 3: layers 2 and 4 tell what they kept
    engine::cpu_session session(model.weights, model.ops, options);
    session.admit(0);
    const pass made = run(session, {request_of(0, request_tag::prefill, 0, prompt)});
    std::vector<std::vector<int>> stored;
    for (int l = 0; l < small_model::layers; ++l) {
        stored.push_back(stored_positions(session, 0, l));
    }
    auto processed = stored;
    processed[1] = stored[2];
    processed[3] = stored[4];
    REQUIRE(processed[1].size() < 260);
    REQUIRE(processed[3] != processed[1]);
    const auto expected = model.plain.logits(prompt, stored, processed);
    CHECK(largest_difference(made.logits.data(), expected.back()) < 1e-3);
}

TEST_CASE("kept rows have the same bits whether decided before or after attention") {
    for (const arithmetic kind : kinds) {
        for (const auto& [mode, listed] : {std::pair{dropping::cumulative, false},
                                           {dropping::revive, false},
                                           {dropping::cumulative, true},
                                           {dropping::revive, true}}) {
            loaded model(kind);
            const std::vector<std::int32_t> prompt = model.plain.random_tokens(400, 7);
            engine::session_options options = options_of(mode, listed);
            engine::cpu_session before(model.weights, model.ops, options);
            options.decide_after_attention = true;
            engine::cpu_session after(model.weights, model.ops, options);
            before.admit(0);
            after.admit(0);
            const pass a = run(before, {request_of(0, request_tag::prefill, 0, prompt)});
            const pass b = run(after, {request_of(0, request_tag::prefill, 0, prompt)});
            INFO(engine::cpu::name(kind));
            REQUIRE(a.layers[1].rows_kept < 400);
            CHECK(a.layers[1].pairs < b.layers[1].pairs);
            CHECK(a.dropped_at == b.dropped_at);
            CHECK(same_bits(a.logits, b.logits));
            for (std::int32_t l = 0; l < small_model::layers; ++l) {
                const engine::kv_sequence x = before.cache().rows(l, 0);
                const engine::kv_sequence y = after.cache().rows(l, 0);
                REQUIRE(x.length == y.length);
                const auto size = static_cast<std::size_t>(x.length * x.row_stride) * sizeof(float);
                CHECK(std::memcmp(x.k, y.k, size) == 0);
                CHECK(std::memcmp(x.v, y.v, size) == 0);
            }
        }
    }
}

TEST_CASE("a request's bits don't depend on what runs beside it, nor on threads") {
    const bool listed = GENERATE(false, true);
    loaded model;
    const auto long_prompt = model.plain.random_tokens(333, 8);
    const auto short_prompt = model.plain.random_tokens(5, 9);
    const auto other_prompt = model.plain.random_tokens(200, 10);
    engine::cpu_session alone(model.weights, model.ops, options_of(dropping::cumulative, listed));
    alone.admit(0);
    engine::cpu::set_threads(1);
    const pass expected = run(alone, {request_of(0, request_tag::prefill, 0, long_prompt)});
    alone.admit(1);
    run(alone, {request_of(1, request_tag::prefill, 0, other_prompt)});
    const pass next = run(alone, {request_of(1, request_tag::decode, 200, {11})});

    engine::cpu::set_threads(3);
    engine::cpu_session packed(model.weights, model.ops, options_of(dropping::cumulative, listed));
    packed.admit(0);
    packed.admit(1);
    packed.admit(3);
    run(packed, {request_of(1, request_tag::prefill, 0, other_prompt)});
    const pass made = run(packed, {request_of(1, request_tag::decode, 200, {11}),
                                   request_of(3, request_tag::prefill, 0, long_prompt),
                                   request_of(0, request_tag::prefill, 0, short_prompt)});
    const auto vocab = static_cast<std::ptrdiff_t>(model.plain.vocab);
    CHECK(same_bits(next.logits, {made.logits.begin(), made.logits.begin() + vocab}));
    CHECK(same_bits(expected.logits, {made.logits.begin() + vocab, made.logits.begin() + 2 * vocab}));
    CHECK(std::equal(expected.dropped_at.begin(), expected.dropped_at.end(), made.dropped_at.begin() + 1));
    for (std::int32_t l = 0; l < small_model::layers; ++l) {
        CHECK(stored_positions(packed, 3, l) == stored_positions(alone, 0, l));
        CHECK(stored_positions(packed, 0, l) == all_positions(5));
        CHECK(stored_positions(packed, 1, l).back() == 200);
    }
}

TEST_CASE("spans decided in one step or in one step each keep the same rows") {
    const bool listed = GENERATE(false, true);
    loaded model(arithmetic::fp32);
    const auto prompt = model.plain.random_tokens(300, 11);
    engine::cpu_session together(model.weights, model.ops, options_of(dropping::cumulative, listed));
    together.admit(0);
    auto request = request_of(0, request_tag::prefill, 0, prompt);
    request.span_ends = {100, 200, 300};
    const pass one = run(together, {request});

    engine::cpu_session apart(model.weights, model.ops, options_of(dropping::cumulative, listed));
    apart.admit(0);
    pass last;
    for (std::int32_t first = 0; first < 300; first += 100) {
        const request_tag tag = first == 0 ? request_tag::prefill : request_tag::chunk;
        last =
            run(apart, {request_of(0, tag, first, {prompt.begin() + first, prompt.begin() + first + 100})});
    }
    for (std::int32_t l = 0; l < small_model::layers; ++l) {
        CHECK(stored_positions(together, 0, l) == stored_positions(apart, 0, l));
    }
    REQUIRE(stored_positions(together, 0, 5).size() < 250);
    CHECK(same_bits(one.logits, last.logits));
}

TEST_CASE("lists of all blocks give the bits of none, short ones read less, and decoding reads all") {
    for (const arithmetic kind : kinds) {
        loaded model(kind);
        const auto prompt = model.plain.random_tokens(400, 12);
        engine::session_options options = options_of(dropping::cumulative);
        engine::cpu_session dense(model.weights, model.ops, options);
        options.lists = short_lists(1);
        options.list_means = true; // of no block
        engine::cpu_session whole(model.weights, model.ops, options);
        options.lists = short_lists();
        options.list_means = false;
        engine::cpu_session few(model.weights, model.ops, options);
        pass passes[3];
        engine::cpu_session* const sessions[] = {&dense, &whole, &few};
        for (int i = 0; i < 3; ++i) {
            sessions[i]->admit(0);
            passes[i] = run(*sessions[i], {request_of(0, request_tag::prefill, 0, prompt)});
        }
        CHECK(same_bits(passes[0].logits, passes[1].logits));
        CHECK(passes[0].dropped_at == passes[1].dropped_at);
        CHECK_FALSE(same_bits(passes[0].logits, passes[2].logits));
        for (std::size_t l = 0; l < static_cast<std::size_t>(small_model::layers); ++l) {
            CHECK(passes[0].layers[l].pairs == passes[1].layers[l].pairs);
            CHECK(passes[2].layers[l].pairs * 10 < passes[0].layers[l].pairs * 9);
            CHECK(passes[1].layers[l].estimator_pairs > 0); // each layer looks
        }
        const pass next = run(few, {request_of(0, request_tag::decode, 400, {3})});
        for (std::int32_t l = 0; l < small_model::layers; ++l) {
            CHECK(next.layers[static_cast<std::size_t>(l)].pairs ==
                  static_cast<std::int64_t>(stored_positions(few, 0, l).size()));
            CHECK(next.layers[static_cast<std::size_t>(l)].estimator_pairs == 0);
        }
    }
}

TEST_CASE("what a look scores: of each span its last rows, of those left alone nothing") {
    uniprefill::request_options options;
    options.sink = 6;
    options.tail = 10;
    const auto last = [](std::int64_t end, std::int64_t rows) { return rows * (2 * end - rows + 1) / 2; };
    CHECK(engine::pairs_of_look({0, 100}, options, 12) == last(100, 12));
    CHECK(engine::pairs_of_look({0, 40, 100}, options, 12) == last(40, 12) + last(100, 12));
    CHECK(engine::pairs_of_look({0, 40, 50, 61}, options, 12) == last(40, 12) + last(61, 11)); // a tail alone
    options.min_length = 41;
    CHECK(engine::pairs_of_look({0, 40, 100}, options, 12) == last(100, 12));
    options.min_length = 0;
    options.sink = 50;
    CHECK(engine::pairs_of_look({0, 40, 100}, options, 12) == last(100, 12)); // sinks alone
    options.enabled = 0;
    CHECK(engine::pairs_of_look({0, 40, 100}, options, 12) == 0);

    // The engine's own count, layer after layer, from the rows that each span still has.
    loaded model;
    engine::cpu_session session(model.weights, model.ops, options_of(dropping::cumulative));
    session.admit(0);
    auto request = request_of(0, request_tag::prefill, 0, model.plain.random_tokens(300, 21));
    request.options.min_length = 40;
    request.span_ends = {120, 150, 300};
    const pass made = run(session, {request});
    CHECK(made.layers[4].rows_in < 300);
    for (const std::size_t layer : {1u, 3u, 4u}) {
        std::vector<std::int32_t> bounds{0};
        for (const auto& span : made.layers[layer].outcomes) {
            bounds.push_back(bounds.back() + span.rows);
        }
        CAPTURE(layer, bounds);
        REQUIRE(bounds.size() == 4);
        CHECK(made.layers[layer].estimator_pairs > 0);
        CHECK(made.layers[layer].estimator_pairs == engine::pairs_of_look(bounds, request.options, 12));
    }
}

TEST_CASE("query blocks that are left alone score nothing") {
    loaded model;
    const auto prompt = model.plain.random_tokens(300, 22);
    engine::session_options options = options_of(dropping::none, true);
    options.list_sampling = uniprefill::query_sampling{32, 8};
    const auto scored = [&](engine::planned_request request) {
        engine::cpu_session session(model.weights, model.ops, options);
        session.admit(0);
        return run(session, {std::move(request)}).layers[2].estimator_pairs;
    };
    std::int64_t whole = 0;
    std::int64_t first = 0; // of the span of 100 rows alone
    for (std::int64_t begin = 0; begin < 300; begin += 32) {
        for (std::int64_t row = std::min<std::int64_t>(begin + 32, 300) - 1; row >= begin; row -= 8) {
            whole += row + 1;
        }
    }
    for (std::int64_t begin = 0; begin < 100; begin += 32) {
        for (std::int64_t row = std::min<std::int64_t>(begin + 32, 100) - 1; row >= begin; row -= 8) {
            first += row + 1;
        }
    }
    auto request = request_of(0, request_tag::prefill, 0, prompt);
    CHECK(scored(request) == whole);
    request.options.min_length = 301;
    CHECK(scored(request) == 0);
    request.options.min_length = 0;
    request.options.enabled = 0;
    CHECK(scored(request) == 0);
    request.options.enabled = 1;
    request.span_ends = {100, 300};
    request.options.min_length = 0;
    const std::int64_t both = scored(request);
    request.options.min_length = 101;
    CHECK(scored(request) == both - first);
}

TEST_CASE("of its own span a query reads what is listed, of what came before all") {
    loaded model;
    const auto prompt = model.plain.random_tokens(300, 15);
    engine::session_options options = options_of(dropping::none);
    options.lists.emplace();
    options.lists->rule = uniprefill::selection_rule::fixed_budget(1); // one block of 8 for each head
    options.lists->rule.scope = uniprefill::mass_scope::all;
    options.lists->sink = 0;
    options.lists->window = 1; // its own block
    std::int64_t least = 0;
    for (std::int32_t row = 0; row < 300; ++row) {
        least += row / 100 * 100 + row % 100 % 8 + 1;
    }
    const auto read_by = [&](const std::vector<std::int32_t>& spans, std::int32_t chunk) {
        engine::cpu_session session(model.weights, model.ops, options);
        session.admit(0);
        std::vector<std::int64_t> pairs(static_cast<std::size_t>(small_model::layers), 0);
        for (std::int32_t first = 0; first < 300; first += chunk) {
            const request_tag tag = chunk == 300 ? request_tag::prefill : request_tag::chunk;
            auto request =
                request_of(0, tag, first, {prompt.begin() + first, prompt.begin() + first + chunk});
            request.span_ends = spans;
            const pass one = run(session, {request});
            for (std::size_t l = 0; l < pairs.size(); ++l) {
                pairs[l] += one.layers[l].pairs;
            }
        }
        return pairs;
    };
    for (const std::int64_t pairs : read_by({100, 200, 300}, 300)) {
        CHECK(pairs >= least);
        CHECK(pairs <= least + 300 * 8);
    }
    for (const std::int64_t pairs : read_by({100}, 100)) {
        CHECK(pairs >= least);
        CHECK(pairs <= least + 300 * 8);
    }
}

TEST_CASE("with means each block that a head skips is one key more") {
    loaded model;
    const auto prompt = model.plain.random_tokens(300, 15);
    engine::session_options options = options_of(dropping::none);
    options.lists.emplace();
    options.lists->rule = uniprefill::selection_rule::fixed_budget(1); // one block of 8 for each head
    options.lists->rule.scope = uniprefill::mass_scope::all;
    options.lists->sink = 0;
    options.lists->window = 1; // its own block
    std::int64_t own_blocks = 0, before = 0;
    for (std::int32_t row = 0; row < 300; ++row) {
        own_blocks += row / 100 * 100 + row % 100 % 8 + 1;
        before += row % 100 / 8;
    }
    const auto read = [&](bool means, bool packed) {
        options.list_means = means;
        engine::cpu_session session(model.weights, model.ops, options);
        session.admit(0);
        session.admit(1);
        auto request = request_of(1, request_tag::prefill, 0, prompt);
        request.span_ends = {100, 200, 300};
        std::vector<engine::planned_request> requests{request};
        if (packed) {
            requests.insert(requests.begin(),
                            request_of(0, request_tag::prefill, 0, model.plain.random_tokens(93, 18)));
        }
        return run(session, requests);
    };
    const pass without = read(false, false);
    const pass with = read(true, false);
    // At the first layer both have the same lists: a row whose head's one block lies before its own reads 8
    // keys of it, or else one mean.
    const std::int64_t listed = without.layers[0].pairs - own_blocks;
    const std::int64_t met = with.layers[0].pairs - own_blocks - before;
    CHECK(listed > 0);
    CHECK(std::abs(8 * met - 7 * listed) <= 8 * 3 * 2); // each of three spans rounds its mean over heads
    CHECK_FALSE(same_bits(without.logits, with.logits));
    const pass packed = read(true, true);
    const std::vector<float> last(packed.logits.end() - static_cast<std::ptrdiff_t>(with.logits.size()),
                                  packed.logits.end());
    CHECK(same_bits(last, with.logits));
}

TEST_CASE("with lists, keys of later layers follow from the whole span, without them from what came before") {
    loaded model;
    const auto one = model.plain.random_tokens(200, 16);
    auto other = model.plain.random_tokens(200, 17);
    std::copy_n(one.begin(), 100, other.begin());
    for (const bool listed : {false, true}) {
        engine::cpu_session session(model.weights, model.ops, options_of(dropping::none, listed));
        session.admit(0);
        session.admit(1);
        run(session, {request_of(0, request_tag::prefill, 0, one)});
        run(session, {request_of(1, request_tag::prefill, 0, other)});
        for (std::int32_t l = 0; l < small_model::layers; ++l) {
            const engine::kv_sequence a = session.cache().rows(l, 0);
            const engine::kv_sequence b = session.cache().rows(l, 1);
            const auto size = static_cast<std::size_t>(100 * a.row_stride) * sizeof(float);
            CHECK((std::memcmp(a.k, b.k, size) == 0) == (!listed || l == 0));
        }
    }
}

TEST_CASE("lists and decisions when the prompt ends are refused together") {
    loaded model;
    engine::session_options options = options_of(dropping::cumulative, true);
    options.decide_at_end = true;
    CHECK_THROWS_AS(engine::cpu_session(model.weights, model.ops, options), engine::error);
    options = options_of(dropping::cumulative, true);
    options.lists->window = -1;
    CHECK_THROWS_AS(engine::cpu_session(model.weights, model.ops, options), uniprefill::error);
}

TEST_CASE("a machine that is parked or thrown away leaves no trace") {
    loaded model;
    const auto prompt = model.plain.random_tokens(120, 12);
    const auto urgent = model.plain.random_tokens(40, 13);
    engine::cpu_session session(model.weights, model.ops, options_of(dropping::cumulative));
    engine::cpu_session quiet(model.weights, model.ops, options_of(dropping::cumulative));
    session.admit(0);
    session.admit(1);
    quiet.admit(0);
    const pass expected = run(quiet, {request_of(0, request_tag::prefill, 0, prompt)});

    const engine::step_plan plan({request_of(0, request_tag::prefill, 0, prompt)});
    {
        engine::cpu_machine abandoned(session, plan);
        for (int i = 0; i < 17; ++i) {
            REQUIRE(abandoned.advance());
        }
    }
    CHECK(stored_positions(session, 0, 0).empty());
    engine::cpu_machine parked(session, plan);
    for (int i = 0; i < 15; ++i) {
        REQUIRE(parked.advance());
    }
    run(session, {request_of(1, request_tag::prefill, 0, urgent)});
    parked.run();
    CHECK(same_bits(expected.logits, parked.logits()));
    CHECK(stored_positions(session, 1, 0) == all_positions(40));
}

TEST_CASE("logits of prompt rows can be had, since they are forced") {
    loaded model(arithmetic::fp32);
    const auto prompt = model.plain.random_tokens(300, 14);
    engine::cpu_session session(model.weights, model.ops, options_of(dropping::cumulative));
    session.admit(0);
    auto request = request_of(0, request_tag::prefill, 0, prompt);
    request.logits_rows = {50, 123, 299};
    const pass made = run(session, {request});
    CHECK(made.dropped_at[50] == -1);
    CHECK(made.dropped_at[123] == -1);
    CHECK(made.logits.size() == 3u * static_cast<std::size_t>(model.plain.vocab));
    std::vector<std::vector<int>> stored;
    for (int l = 0; l < small_model::layers; ++l) {
        stored.push_back(stored_positions(session, 0, l));
    }
    const auto expected = model.plain.logits(prompt, stored, processed_by(made));
    CHECK(largest_difference(made.logits.data() + model.plain.vocab, expected[123]) < 1e-3);
}
