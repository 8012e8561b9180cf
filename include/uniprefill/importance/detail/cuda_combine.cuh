// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From one number for each (query row, slot) to fixed-point masses: first the softmax denominator of each
/// row, then the shares of each block. Every sum has an order that follows from the segment alone.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/detail/cuda_math.cuh>
#include <uniprefill/importance/detail/cuda_plan.cuh>

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
