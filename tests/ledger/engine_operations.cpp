// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A simulated engine serves random requests by what the ledger says; one that knows where every row must be.

#include "ledger/simulated_engine.hpp"
#include "support/catch.hpp"

#include <iostream>

using namespace ledger_test;
using up::set_relation;

namespace {

/// @p operations at scale 1. Every kind of operation must have happened.
void serve(const engine_shape& shape, std::int64_t operations) {
    const std::uint64_t seed = property::base_seed();
    INFO(shape.name << ": UNIPREFILL_TEST_SEED=" << seed);
    simulated_engine engine(shape, seed);
    const auto scaled = property::scaled(static_cast<int>(operations));
    try {
        engine.run(scaled);
    } catch (const std::exception& fault) {
        FAIL(fault.what());
    }
    std::cout << shape.name << ", " << scaled << " operations:";
    for (const auto* counts : {&engine.done, &engine.seen}) {
        for (const auto& [what, times] : *counts) {
            std::cout << " " << what << " " << times << (what == counts->rbegin()->first ? "" : ",");
            CHECK(times * 2000 > scaled); // enough to say something
        }
        std::cout << (counts == &engine.done ? ";" : "\n");
    }
    const bool drops = engine.done.count("give up") != 0;
    CHECK(engine.done.size() == (drops ? 17 : 16));
    CHECK(drops == (*std::max_element(shape.layer_sets.begin(), shape.layer_sets.end()) > 0));
    CHECK(engine.seen.size() == 3);
}

} // namespace

TEST_CASE("cumulative drops, mixed page sizes, windows", "[ledger]") {
    serve({"cumulative", set_relation::nested, {0, 0, 1, 1, 2}, {4, 4, 2, 8, 4}, {0, 9, 0, 9, 0}, 90, 420},
          300'000);
}

TEST_CASE("revived rows", "[ledger]") {
    serve({"revived",
           set_relation::independent,
           {0, 1, 1, 0, 2, 0},
           {4, 4, 4, 4, 4, 4},
           {0, 0, 0, 0, 0, 0},
           80,
           500},
          200'000);
}

TEST_CASE("every layer selects, and has a window", "[ledger]") {
    serve({"every layer selects", set_relation::nested, {0, 1, 2, 3}, {3, 3, 3, 3}, {5, 20, 5, 40}, 100, 150},
          200'000);
}

TEST_CASE("nothing selects", "[ledger]") {
    serve({"nothing selects", set_relation::nested, {0, 0}, {16, 16}, {0, 30}, 120, 44}, 130'000);
}

TEST_CASE("any rows in any layer", "[ledger]") {
    serve({"any rows in any layer",
           set_relation::independent,
           {1, 2, 3, 2},
           {1, 4, 1, 4},
           {0, 0, 17, 17},
           70,
           500},
          150'000);
}

TEST_CASE("long texts", "[ledger]") { // beyond two cumulative counts
    serve({"long texts", set_relation::nested, {0, 1, 1, 2}, {16, 16, 16, 16}, {0, 0, 200, 0}, 1100, 420},
          50'000);
}
