// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Moving rows in device memory: kept ones together, and back to where they were. Rows are bytes: any element
/// type, any stride. Rows of multiples of 16 bytes at such addresses and strides move fastest.
///
/// One launch for up to eight tensors (in place, a short one before it). Nothing is allocated, waited for or
/// read back: map and count are read when the kernel runs, so a captured call is replayed with others. Map
/// entries outside 0..rows.num_rows - 1 (padding among them) move nothing. The bytes written don't depend on
/// cuda_device::max_ctas, and no thread block relies on others running beside it.
///
/// Errors: those of the host's functions in compaction.hpp, not_supported for a map in host memory,
/// out_of_range for rows beyond 2^30 words, backend_error for a failed launch. Complexity: O(bytes of kept
/// rows). Thread-safe on different tensors and scratch. Deterministic.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/propagate/compaction.hpp>
#include <uniprefill/propagate/row_map.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Bytes of scratch that moves in place need, whatever their size. Pure, constant.
[[nodiscard]] inline UNIPREFILL_HOST_API std::size_t in_place_scratch_bytes() noexcept;

/// Gathers kept rows: destinations[t] row j = sources[t] row kept_to_old[j]. Order stays. Rows of a
/// destination beyond the kept ones are left alone.
///
/// In place (same address and stride) is allowed where the map ascends, and moves only what has to move.
/// Otherwise source and destination share no byte of a row, nor do different tensors.
/// @param rows a selection, or a map of a row_lineage, in device memory
/// @param sources [count] at least rows.num_rows rows each
/// @param destinations [count] at least rows.num_kept rows each, of the same row_bytes
/// @param scratch in_place_scratch_bytes() bytes of device memory, only used during the call; not needed, and
/// may be
///        `{}`, where nothing is in place
/// @return the first argument that is wrong; nothing is launched then
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                                 const byte_rows* destinations, std::int32_t count,
                                                 workspace scratch, const cuda_device& device,
                                                 backend::cuda::stream stream) noexcept;

/// The same for one tensor.
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows& source,
                                                 const byte_rows& destination, workspace scratch,
                                                 const cuda_device& device,
                                                 backend::cuda::stream stream) noexcept {
    return compact(rows, &source, &destination, 1, scratch, device, stream);
}

/// The way back: destinations[t] row kept_to_old[j] = sources[t] row j. Rows of a destination that were
/// dropped are left alone. Not in place, except by an identity map, which then does nothing.
/// @param sources [count] at least rows.num_kept rows each
/// @param destinations [count] at least rows.num_rows rows each, of the same row_bytes
/// @return the first argument that is wrong; nothing is launched then
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                                 const byte_rows* destinations, std::int32_t count,
                                                 const cuda_device& device,
                                                 backend::cuda::stream stream) noexcept;

/// The same for one tensor.
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows& source,
                                                 const byte_rows& destination, const cuda_device& device,
                                                 backend::cuda::stream stream) noexcept {
    return scatter(rows, &source, &destination, 1, device, stream);
}

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/cuda_compaction.inl>
