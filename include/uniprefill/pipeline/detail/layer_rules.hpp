// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the facade does alike on every backend: it finds and judges selecting layers, and lets rows come and
/// go as the propagation asks.
#pragma once

#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/propagate/policy.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The index of a layer among the selecting ones, -1 where it isn't one.
template <class Rule>
[[nodiscard]] UNIPREFILL_HOST_API std::int32_t find_layer(const sparsifier_options<Rule>& options,
                                                          std::int32_t layer) noexcept {
    for (std::int32_t i = 0; i < options.num_selecting; ++i) {
        if (options.layers[i].layer == layer) {
            return i;
        }
    }
    return -1;
}

template <class Rule>
[[nodiscard]] UNIPREFILL_HOST_API status check_layers(const limits& bounds,
                                                      const sparsifier_options<Rule>& options) noexcept {
    if (options.num_selecting < 0 || (options.num_selecting > 0 && options.layers == nullptr)) {
        return failure(status_code::invalid_argument, "options.layers", "an array of num_selecting layers",
                       options.num_selecting);
    }
    std::int32_t previous = -1;
    for (std::int32_t i = 0; i < options.num_selecting; ++i) {
        const std::int32_t layer = options.layers[i].layer;
        if (layer <= previous || layer >= bounds.num_layers) {
            return failure(status_code::out_of_range, "options.layers",
                           "layers that ascend within limits.num_layers", layer)
                .at_layer(layer);
        }
        if (const status good = validate(options.layers[i].rule); !good.ok()) {
            return good.at_layer(layer);
        }
        previous = layer;
    }
    return success();
}

template <class Lineage>
[[nodiscard]] UNIPREFILL_HOST_API const byte_rows& rows_of(propagation mode, const Lineage& lineage,
                                                           const row_tensor& tensor) noexcept {
    return mode == propagation::revive ? revive::rows_of(lineage, tensor)
                                       : cumulative::rows_of(lineage, tensor);
}

/// @param selects whether the layer is a selecting one
template <class Lineage>
[[nodiscard]] UNIPREFILL_HOST_API status enter(propagation mode, bool selects, Lineage& lineage,
                                               const row_tensor* tensors, std::int32_t count,
                                               typename Lineage::stream queue) noexcept {
    return mode == propagation::revive && selects ? revive::enter(lineage, tensors, count, queue) : success();
}

template <class Lineage>
[[nodiscard]] UNIPREFILL_HOST_API status leave(propagation mode, Lineage& lineage, const selection& decided,
                                               const row_tensor* tensors, std::int32_t count,
                                               typename Lineage::stream queue) noexcept {
    if (decided.identity) {
        return lineage.check(decided);
    }
    return mode == propagation::revive ? revive::leave(lineage, decided, tensors, count, queue)
                                       : cumulative::leave(lineage, decided, tensors, count, queue);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
