// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Means of blocks on CUDA devices; means.hpp says what they are.
#pragma once

#include <uniprefill/attend/means.hpp>
#include <uniprefill/core/cuda.cuh>

UNIPREFILL_BEGIN_NAMESPACE

/// Averages the rows of every whole block of a step, for keys and values in one launch, with every array in
/// device memory: the bits of the host's average_blocks(), but that elements, sums and means
/// below 2^-126 are 0.
///
/// Bound by memory: it reads 2 * rows * num_kv_heads * head_dim elements once and writes a G-th of that,
/// O(rows). No synchronisation, no allocation, no workspace; capture-safe: replayed with other lengths.
/// Offsets that make no sense are clamped to batch.num_rows. Deterministic, thread-safe.
///
/// @param device filled by cuda_device::current()
/// @param keys   as values, and means: rows that start at multiples of 16 bytes, heads of whole 16 bytes
/// @param batch  in device memory; num_rows may be an upper bound
/// @return invalid_argument, out_of_range, misaligned or not_supported, naming the argument; nothing has been
///         launched then. backend_error where the launch fails
template <class T>
UNIPREFILL_HOST_API status average_blocks(const cuda_device& device, const head_rows<const T>& keys,
                                          const head_rows<const T>& values, const batch_view& batch,
                                          const limits& bounds, const block_means<T>& means,
                                          backend::cuda::stream stream) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/cuda_means.inl>
