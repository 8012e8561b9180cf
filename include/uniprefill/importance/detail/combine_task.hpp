// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the CUDA estimator combines: one number for each (query row, slot) becomes first the softmax
/// denominator of each row, then the shares of each block in fixed point. Every sum has an order that follows
/// from the segment alone.
#pragma once

#include <uniprefill/importance/detail/plan_layout.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

struct cuda_combine_task {
    limits bounds;
    batch_view batch;
    cuda_tiling tiling;
    cuda_buffers buffers;
    const float* sink_logits = nullptr; // [num_heads]
    mass_view out;
    head_mass_view per_head;
};

/// The denominator of rows that pad a KV head's: 2^(partial - this) is 0.
inline constexpr float of_no_row = 3.402823466e+38f;

} // namespace detail

UNIPREFILL_END_NAMESPACE
