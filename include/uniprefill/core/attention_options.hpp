// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a query sees, beside causality and block lists.
#pragma once

#include <uniprefill/core/attention_params.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The attention of a layer.
struct attention_options {
    attention_params params{}; ///< `key_scales` must be null: no FP8 here
    /// The model's own sliding window: a query at position p sees positions p - window + 1 to p, dropped ones
    /// counted; 0: all up to p.
    std::int32_t window = 0;
    /// Original positions of cached tokens, ascending in a request; null: token i is at position i. Read only
    /// where `window` is set.
    const std::int32_t* cached_positions = nullptr; // [num_requests, cached_positions_stride]
    std::int64_t cached_positions_stride = 0;       ///< entries from one request to the next
};

UNIPREFILL_END_NAMESPACE
