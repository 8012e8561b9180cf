// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How scores are made of queries and keys.
#pragma once

#include <uniprefill/core/config.hpp>

UNIPREFILL_BEGIN_NAMESPACE

/// How the model's attention scores its keys.
struct attention_params {
    float scale = 0;   ///< multiplies q.k; 0: 1 / sqrt(head_dim)
    float softcap = 0; ///< scaled scores x become cap * tanh(x / cap); 0: they stay
    /// One more term of each softmax's denominator, in natural-log units, not scaled and not capped. Finite:
    /// a value that isn't raises `non_finite` in every scored segment. Null: none.
    const float* sink_logits = nullptr; // [num_heads]
    /// FP8 keys only: what the keys of each KV head are multiplied by to get their values. Null: 1.
    const float* key_scales = nullptr; // [num_kv_heads]
};

UNIPREFILL_END_NAMESPACE
