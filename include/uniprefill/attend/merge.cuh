// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The merge of attention states on CUDA devices; merge.hpp says what it is.
#pragma once

#include <uniprefill/attend/merge.hpp>
#include <uniprefill/core/cuda.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// States that one call merges at most; more of them go in several calls.
inline constexpr std::int32_t max_merged_states = 16;

/// Merges @p count states, with every row in device memory: what the host's does, with weights and sums in
/// single precision, in the order of parts. Rows may start anywhere that elements can.
///
/// One launch, no synchronisation, no allocation, no workspace; capture-safe: the list of parts is frozen,
/// their rows are not. Thread-safe, deterministic. O(parts * elements).
///
/// @param device filled by cuda_device::current()
/// @param parts  [count] in host memory, at most max_merged_states, with rows in device memory
/// @param out    may be the memory of one of the parts; overlaps nothing else
/// @param lse    [num_rows, num_heads] may be that of one of the parts; null: not wanted
/// @return invalid_argument or out_of_range, naming the argument; `request` holds the part's index
template <class T>
UNIPREFILL_HOST_API status merge_attention(const cuda_device& device, const attention_state<T>* parts,
                                           std::int32_t count, const head_rows<T>& out, float* lse,
                                           backend::cuda::stream stream) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/cuda_merge.inl>
