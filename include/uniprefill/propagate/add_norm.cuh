// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The compaction of a selecting layer fused with what follows it in the layer: residual add and RMSNorm.
///
/// Hidden states and residuals are read once and written once, kept rows only: four rows of traffic where
/// gathering both, copying them back, adding and normalising take twelve.
///
/// Deterministic: the result of a row depends on that row, the weights and epsilon alone, not on its place,
/// other rows, the grid or the run. One launch (in place, a short one before it). Complexity: O(bytes of kept
/// rows). Thread-safe on different tensors and scratch. Otherwise as compaction.cuh says.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/propagate/row_map.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What is gathered, added and normalised. Addresses, row strides and rows are multiples of 16 bytes.
/// @tparam Element float, half or bfloat16
/// @tparam Weight of the norm: Element or float
template <class Element, class Weight = Element>
struct add_norm {
    element_rows<const Element> hidden;   // [num_rows, hidden_size] before: what the layer's operator gave
    element_rows<const Element> residual; // [num_rows, hidden_size] before
    /// [num_kept, hidden_size] normalised. May be the very rows of `hidden` or of `residual` (same address
    /// and stride); otherwise it shares no byte of a row with them.
    element_rows<Element> out_hidden;
    element_rows<Element> out_residual; // [num_kept, hidden_size] the sum; as above, and not out_hidden
    const Weight* weight = nullptr;     // [hidden_size]
    float epsilon = 1e-6f;              ///< > 0
    bool one_plus_weight = false;       ///< the factor is 1 + weight (Gemma, Qwen3-Next), not weight
};

/// For each kept row j, with i = kept_to_old[j]:
///
///     out_residual[j] = hidden[i] + residual[i], rounded to Element
///     out_hidden[j]   = out_residual[j] / sqrt(mean(out_residual[j]^2) + epsilon) * weight, rounded to
///     Element
///
/// Sums, products and the root are float; each result is rounded once. The error before that last rounding is
/// at most 2^-19 of the result (hidden_size up to 65536, results that aren't subnormal). RMSNorm: Zhang and
/// Sennrich 2019, equation 4. Rows of map entries outside 0..rows.num_rows - 1 are left alone, and so are
/// rows beyond the kept ones. An identity map makes it a plain fused add and norm.
/// @param rows a selection, or a map of a row_lineage, in device memory
/// @param scratch in_place_scratch_bytes() bytes of device memory, only used during the call; not needed, and
/// may be
///        `{}`, where nothing is in place
/// @return the first argument that is wrong, misaligned for addresses, strides or rows that are no multiples
/// of 16
///         bytes, out_of_range for rows longer than 64 KiB; nothing is launched then
template <class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status compact_add_norm(const row_map& rows,
                                                          const add_norm<Element, Weight>& norm,
                                                          workspace scratch, const cuda_device& device,
                                                          backend::cuda::stream stream) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/cuda_add_norm.inl>
