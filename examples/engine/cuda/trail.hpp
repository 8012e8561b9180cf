// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/layer_facts.hpp"
#include "engine/cuda/runtime.hpp"

#include <uniprefill/core/element.hpp>
#include <uniprefill/core/selection.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine::cuda {

/// What a prefill left at each layer, on the device: where another of the same tokens, which does the same up
/// to some layer, can begin. A prefill may go on from a trail and leave the same one anew. Costs hidden
/// states where one may begin, and keys and values of every layer.
struct device_trail {
    struct stop {
        device_array<float> hidden; ///< [rows, hidden] that entered
        bool begins = false;        ///< whether it holds this trail's
        std::int32_t rows = 0;      ///< that products run over
        device_array<std::byte> memory;
        uniprefill::selection decided; ///< in `memory`; the identity where the layer decided nothing
        layer_facts facts;
    };
    std::vector<bool> may_begin;             ///< by layer: whether hidden states are kept; empty: at all
    std::vector<stop> stops;                 ///< by layer
    device_array<uniprefill::bfloat16> k, v; // [layers, prompt, KV elements]
    device_array<std::int32_t> entered;      // [layers]

    bool begins_at(std::int32_t layer) const {
        const auto at = static_cast<std::size_t>(layer);
        return at < stops.size() && stops[at].begins;
    }
    std::size_t bytes() const {
        std::size_t sum = k.bytes() + v.bytes() + entered.bytes();
        for (const stop& one : stops) {
            sum += one.hidden.bytes() + one.memory.bytes();
        }
        return sum;
    }
};

} // namespace engine::cuda
