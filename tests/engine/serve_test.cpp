// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The server against every request run alone, on a small model of random weights: schedules, budgets, pools
// and ways of making room are drawn; tokens must be the same.

#include "support/catch.hpp"

#include "engine/app_support.hpp"
#include "engine/serving/simulation.hpp"
#include "engine/small_model.hpp"

#include <algorithm>
#include <fstream>
#include <memory>
#include <random>

using engine::preemption;
using engine_test::small_model;

namespace {

constexpr std::int32_t max_tokens = 250;

struct loaded {
    loaded()
        : plain(uniprefill_test::seed()) {
        const std::string path = std::string(ENGINE_TEST_OUTPUT) + "/serve_small_model.gguf";
        std::ofstream(path, std::ios::binary)
            .write(reinterpret_cast<const char*>(plain.file.data()),
                   static_cast<std::streamsize>(plain.file.size()));
        model = std::make_unique<engine::loaded_model>(path, engine::cpu::arithmetic::automatic);
    }
    small_model plain;
    std::unique_ptr<engine::loaded_model> model;
};

engine::policy spans_of(std::int32_t span, uniprefill::propagation mode) {
    engine::policy made;
    made.block_rows = 8;
    made.num_observations = 12;
    made.sink = 6;
    made.tail = 4;
    made.span = span;
    made.propagation = mode;
    for (const std::int32_t layer : {1, 3, 4}) {
        made.rules.push_back({layer, uniprefill::selection_rule::top_p(0.6)});
    }
    return made;
}

/// Prompts of which half begin like others do.
std::vector<engine::serving_request> draw_requests(const small_model& plain, std::mt19937_64& random,
                                                   std::int32_t count) {
    const auto below = [&](std::uint64_t bound) { return static_cast<int>(random() % bound); };
    const std::vector<std::vector<std::int32_t>> openings = {plain.random_tokens(150, 1),
                                                             plain.random_tokens(90, 2)};
    std::vector<engine::serving_request> made;
    for (std::int32_t i = 0; i < count; ++i) {
        engine::serving_request one;
        if (below(2) == 0) {
            const auto& opening = openings[static_cast<std::size_t>(below(2))];
            one.prompt.assign(opening.begin(), opening.end() - below(40));
        }
        const auto rest = plain.random_tokens(1 + below(70), random());
        one.prompt.insert(one.prompt.end(), rest.begin(), rest.end());
        one.new_tokens = 1 + below(30);
        made.push_back(std::move(one));
    }
    return made;
}

/// What happened in all runs together.
struct happened {
    engine::server_counts sums{};
    std::int64_t repeated_rows = 0;
    void add(const engine::server_counts& counts) {
        sums.preemptions += counts.preemptions;
        sums.prefix_hits += counts.prefix_hits;
        sums.prefix_evictions += counts.prefix_evictions;
        sums.mixed_steps += counts.mixed_steps;
        sums.swapped_pages += counts.swapped_pages;
        sums.recomputed_rows += counts.recomputed_rows;
        sums.copied_pages += counts.copied_pages;
        sums.pages_handed_back += counts.pages_handed_back;
    }
};

/// Serves the requests in the order given, up to three steps between them. @return tokens by request
std::vector<std::vector<std::int32_t>> serve(engine::server& serving,
                                             const std::vector<engine::serving_request>& requests,
                                             const std::vector<std::size_t>& order, std::mt19937_64& random,
                                             happened& all) {
    std::size_t next = 0;
    std::size_t wait = 0;
    std::vector<std::size_t> asked; // by number in the server
    while (next < order.size() || !serving.idle()) {
        if (next < order.size() && (wait == 0 || serving.idle())) {
            serving.submit(requests[order[next]]);
            asked.push_back(order[next++]);
            wait = static_cast<std::size_t>(random() % 4);
            continue;
        }
        wait -= wait > 0 ? 1 : 0;
        all.repeated_rows += serving.step().repeated_rows;
    }
    std::vector<std::vector<std::int32_t>> tokens(requests.size());
    for (std::size_t id = 0; id < asked.size(); ++id) {
        tokens[asked[id]] = serving.request(static_cast<std::int32_t>(id)).tokens;
    }
    return tokens;
}

engine::server_options options_of(std::int32_t budget, std::int32_t pages, preemption way, bool prefixes) {
    engine::server_options options;
    options.prefix_cache = prefixes;
    options.slots = 5;
    options.budget = budget;
    options.pages = pages;
    options.max_tokens = max_tokens;
    options.preemption = way;
    return options;
}

} // namespace

TEST_CASE("what is served is what each request gives alone") {
    loaded small;
    std::mt19937_64 random(uniprefill_test::seed());
    const auto requests = draw_requests(small.plain, random, 40);
    happened all;
    for (const auto mode : {uniprefill::propagation::cumulative, uniprefill::propagation::revive}) {
        const engine::policy policy = spans_of(40, mode);
        std::vector<std::vector<std::int32_t>> expected;
        for (const auto& one : requests) {
            expected.push_back(engine::run_alone(*small.model, policy, one));
        }
        std::vector<std::size_t> order;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            order.push_back(i);
        }
        for (const preemption way : {preemption::recompute, preemption::swap}) {
            for (const std::int32_t budget : {51, 90, 400}) {       // 51 = span + n - 1
                for (const std::int32_t pages : {102, 170, 1000}) { // 102: one of the longest requests
                    std::shuffle(order.begin(), order.end(), random);
                    const bool prefixes = random() % 4 != 0;
                    engine::server serving(*small.model, policy, options_of(budget, pages, way, prefixes));
                    const auto tokens = serve(serving, requests, order, random, all);
                    INFO("budget " << budget << ", pages " << pages << ", swap " << (way == preemption::swap)
                                   << ", prefixes " << prefixes);
                    CHECK(tokens == expected);
                    serving.forget_prefixes();
                    CHECK(serving.pool().num_free() == pages);
                    CHECK(serving.counts().prefix_refusals == 0);
                    all.add(serving.counts());
                }
            }
        }
    }
    // Nothing of this means anything unless it happened.
    CHECK(all.sums.preemptions >= 20);
    CHECK(all.sums.prefix_hits > 20);
    CHECK(all.sums.prefix_evictions > 0);
    CHECK(all.sums.mixed_steps > 20);
    CHECK(all.sums.swapped_pages > 0);
    CHECK(all.sums.recomputed_rows > 0);
    CHECK(all.repeated_rows > 20);
    CHECK(all.sums.copied_pages > 0);
    CHECK(all.sums.pages_handed_back > 0);
}

TEST_CASE("a request that can't be served is refused before anything runs") {
    loaded small;
    const engine::policy policy = spans_of(40, uniprefill::propagation::cumulative);
    const auto tokens = [&](int count) { return small.plain.random_tokens(count, 5); };
    const auto of_server = [&](const engine::policy& by, std::int32_t budget, std::int32_t pages,
                               const engine::serving_request& asked) {
        return app_test::refusal([&] {
            engine::server serving(*small.model, by, options_of(budget, pages, preemption::swap, true));
            serving.submit(asked);
        });
    };
    CHECK(of_server(policy, 50, 90, {tokens(10), 1}) ==
          "prefill budget: expected at least span + n - 1 = 51 rows, the longest span, came 50");
    CHECK(of_server(policy, 51, 90, {{}, 3}) ==
          "request 0: expected a prompt of at least one token, came none");
    CHECK(of_server(policy, 51, 90, {tokens(10), 0}) == "request 0: expected at least one new token, came 0");
    CHECK(of_server(policy, 51, 90, {tokens(240), 11}) ==
          "request 0: expected at most 250 tokens with those asked for, came 251");
    CHECK(of_server(policy, 51, 90, {tokens(240), 10}) ==
          "request 0: expected at most the pool's 90 pages, came 102");
    CHECK(of_server(policy, 51, 102, {tokens(240), 10}) == "");
    engine::policy whole = policy;
    whole.span = 0;
    CHECK(of_server(whole, 100, 90, {tokens(101), 1}) ==
          "request 0: expected spans of at most 100 rows, the budget, came 101");
}
