// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// Layers and sets of the ledgers that random operations are tried on.

#include "ledger/ledger_fixture.hpp"

#include <algorithm>

namespace ledger_test {

struct ledger_shape {
    const char* name;
    up::set_relation relation;
    std::vector<std::int32_t> layer_sets;

    up::ledger_limits bounds(std::int32_t max_requests, std::int32_t max_tokens) const {
        return {max_requests, max_tokens, static_cast<std::int32_t>(layer_sets.size()),
                *std::max_element(layer_sets.begin(), layer_sets.end()) + 1, relation};
    }
};

inline const ledger_shape ledger_shapes[] = {
    {"cumulative", up::set_relation::nested, {0, 0, 1, 1, 2, 3, 3}},
    {"revived", up::set_relation::independent, {0, 0, 1, 1, 0, 2, 0, 3}},
    {"every layer selects", up::set_relation::nested, {0, 1, 2, 3, 4, 5, 6, 7, 8}},
    {"any rows in any layer", up::set_relation::independent, {1, 2, 3, 2, 4}},
    {"set 0 after another", up::set_relation::independent, {1, 0, 2, 1}},
    {"nested from the first layer on", up::set_relation::nested, {1, 1, 2}},
    {"nothing selects", up::set_relation::nested, {0, 0}},
};

} // namespace ledger_test
