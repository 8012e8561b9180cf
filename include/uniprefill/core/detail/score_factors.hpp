// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How the host turns products of queries and keys into scores in units of log2.
#pragma once

#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/detail/vector_math.hpp>

#include <cmath>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What queries are multiplied by beforehand, and what becomes of their products.
struct UNIPREFILL_HIDDEN score_factors {
    float factor = 1;                   ///< turns q.k into units of log2, or into x / cap
    float softcap = 0;                  ///< 0: none
    const float* sink_logits = nullptr; // [num_heads]

    void set(const attention_params& params, std::int32_t head_dim) noexcept {
        // In double precision: -ffast-math makes of a float's 1 / sqrt something else from place to place.
        const float scale = params.scale > 0
                                ? params.scale
                                : static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_dim)));
        factor = params.softcap > 0 ? scale / params.softcap : scale * log2_of_e;
        softcap = params.softcap;
        sink_logits = params.sink_logits;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
