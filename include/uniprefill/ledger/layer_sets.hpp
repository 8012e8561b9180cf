// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which layers share a stored set: the maps from layer to set that a drop ledger is made with.
///
/// Set 0 holds every position. Sets 1, 2, ... are numbered in the order of the first layer that uses them. A
/// set's rows are those of the set before (that of the layer before its first layer; set 0 for layer 0)
/// unless an append at its first layer says otherwise. Under set_relation::nested the map never falls.
///
/// A cache that keeps its own rows for each head counts (layer, head) as a layer of its own:
/// layer * num_heads + head.
///
/// The functions are pure: safe on any thread, deterministic. Selecting layers that don't ascend or lie
/// outside the model are refused, and nothing is written then.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] inline UNIPREFILL_HOST_API status
check_selecting_layers(const std::int32_t* selecting_layers, std::int32_t count, std::int32_t num_layers,
                       const std::int32_t* layer_sets) noexcept {
    if (num_layers < 1) {
        return failure(status_code::invalid_argument, "num_layers", ">= 1", num_layers);
    }
    if (count < 0 || (count > 0 && selecting_layers == nullptr)) {
        return failure(status_code::invalid_argument, "selecting_layers", "an array of count layers", count);
    }
    if (layer_sets == nullptr) {
        return failure(status_code::invalid_argument, "layer_sets", "an array, not a null pointer", 0);
    }
    std::int32_t previous = -1;
    for (std::int32_t i = 0; i < count; ++i) {
        if (selecting_layers[i] <= previous || selecting_layers[i] >= num_layers) {
            return failure(status_code::invalid_argument, "selecting_layers",
                           "ascending layers below num_layers", selecting_layers[i]);
        }
        previous = selecting_layers[i];
    }
    return success();
}

} // namespace detail

/// The map of `cumulative` propagation: the rows that a selecting layer keeps enter the layers after it, up
/// to and including the next selecting layer. Nested. O(num_layers).
/// @param selecting_layers [count] ascending
/// @param[out] layer_sets  [num_layers] the set of each layer
/// @param[out] num_sets    for ledger_limits::num_sets
[[nodiscard]] inline UNIPREFILL_HOST_API status cumulative_layer_sets(const std::int32_t* selecting_layers,
                                                                      std::int32_t count,
                                                                      std::int32_t num_layers,
                                                                      std::int32_t* layer_sets,
                                                                      std::int32_t& num_sets) noexcept {
    UNIPREFILL_TRY(detail::check_selecting_layers(selecting_layers, count, num_layers, layer_sets));
    std::int32_t set = 0;
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        layer_sets[layer] = set;
        if (set < count && selecting_layers[set] == layer) {
            ++set;
        }
    }
    num_sets = layer_sets[num_layers - 1] + 1;
    return success();
}

/// The map of `revive` propagation: every row enters each selecting layer (set 0), the kept ones the layers
/// between it and the next. Independent. O(num_layers). Parameters as in cumulative_layer_sets().
[[nodiscard]] inline UNIPREFILL_HOST_API status revived_layer_sets(const std::int32_t* selecting_layers,
                                                                   std::int32_t count,
                                                                   std::int32_t num_layers,
                                                                   std::int32_t* layer_sets,
                                                                   std::int32_t& num_sets) noexcept {
    UNIPREFILL_TRY(detail::check_selecting_layers(selecting_layers, count, num_layers, layer_sets));
    std::int32_t passed = 0;    // selecting layers before this one
    std::int32_t last_used = 0; // the highest set in use
    std::int32_t current = 0;   // set of the layers since the last selecting layer, 0 while there are none
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        if (passed < count && selecting_layers[passed] == layer) {
            layer_sets[layer] = 0;
            ++passed;
            current = 0;
            continue;
        }
        if (passed > 0 && current == 0) {
            current = ++last_used;
        }
        layer_sets[layer] = current;
    }
    num_sets = last_used + 1;
    return success();
}

UNIPREFILL_END_NAMESPACE
