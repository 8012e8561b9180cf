// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/layer_record.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

/// What a step that reads one prompt left at each layer: where another step, which drops the same up to some
/// layer, can begin. Costs hidden state, keys and values of each layer's rows.
struct trail {
    struct stop {
        std::vector<float> hidden;  ///< [rows, hidden] that entered; empty where nobody may begin
        std::vector<float> k, v;    ///< [rows, kv_heads * head_dim]
        std::vector<float> queries; ///< of the last n rows, where the layer selects
        layer_record record;
    };
    std::vector<bool> may_begin; ///< by layer: whether hidden states are kept; empty: at all
    std::vector<stop> stops;     ///< by layer

    bool begins_at(std::int32_t layer) const {
        const auto at = static_cast<std::size_t>(layer);
        return at < stops.size() && !stops[at].hidden.empty();
    }
    std::size_t bytes() const {
        std::size_t floats = 0;
        for (const stop& one : stops) {
            floats += one.hidden.size() + one.k.size() + one.v.size() + one.queries.size();
        }
        return floats * sizeof(float);
    }
};

} // namespace engine
