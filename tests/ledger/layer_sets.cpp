// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Which layers share a set.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

using namespace ledger_test;

namespace {

using layers = std::vector<std::int32_t>;

layers map_of(up::set_relation relation, const layers& selecting, std::int32_t num_layers,
              std::int32_t expected_sets) {
    layers sets(static_cast<std::size_t>(num_layers), -7);
    std::int32_t num_sets = -1;
    const auto map =
        relation == up::set_relation::nested ? up::cumulative_layer_sets : up::revived_layer_sets;
    must(map(selecting.data(), static_cast<std::int32_t>(selecting.size()), num_layers, sets.data(),
             num_sets));
    CHECK(num_sets == expected_sets);
    return sets;
}

} // namespace

TEST_CASE("cumulative: kept rows enter up to and including the next selecting layer", "[ledger]") {
    const auto nested = up::set_relation::nested;
    CHECK(map_of(nested, {}, 3, 1) == layers{0, 0, 0});
    CHECK(map_of(nested, {1, 3}, 6, 3) == layers{0, 0, 1, 1, 2, 2});
    CHECK(map_of(nested, {0, 1, 2}, 3, 3) == layers{0, 1, 2});
    CHECK(map_of(nested, {2}, 3, 1) == layers{0, 0, 0}); // no layer after it
}

TEST_CASE("revived: every row enters each selecting layer", "[ledger]") {
    const auto independent = up::set_relation::independent;
    CHECK(map_of(independent, {}, 3, 1) == layers{0, 0, 0});
    CHECK(map_of(independent, {1, 4}, 7, 3) == layers{0, 0, 1, 1, 0, 2, 2});
    CHECK(map_of(independent, {0, 1, 3}, 5, 3) == layers{0, 0, 1, 0, 2}); // none between 0 and 1
    CHECK(map_of(independent, {2}, 3, 1) == layers{0, 0, 0});
}

TEST_CASE("maps of layers refuse lists that are no lists of layers", "[ledger]") {
    layers sets(4);
    std::int32_t num_sets = 0;
    for (const layers& wrong : {layers{1, 1}, layers{2, 1}, layers{-1}, layers{4}}) {
        const up::status refused = up::cumulative_layer_sets(
            wrong.data(), static_cast<std::int32_t>(wrong.size()), 4, sets.data(), num_sets);
        CHECK(refused.code == up::status_code::invalid_argument);
        CHECK(std::string(refused.argument) == "selecting_layers");
    }
    CHECK_FALSE(up::revived_layer_sets(nullptr, 1, 4, sets.data(), num_sets).ok());
    CHECK_FALSE(up::revived_layer_sets(nullptr, 0, 0, sets.data(), num_sets).ok());
    CHECK_FALSE(up::revived_layer_sets(nullptr, 0, 4, nullptr, num_sets).ok());
    CHECK(num_sets == 0);
}
