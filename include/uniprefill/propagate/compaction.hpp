// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Moving rows: kept ones together, and back to where they were. Rows are bytes: any element type, any
/// stride.
///
/// Errors: invalid_argument, out_of_range or not_supported (device memory), with nothing moved; `request` of
/// the status holds the index of the tensor concerned. Complexity: O(bytes of kept rows), no workspace. Out
/// of place, rows are spread over OpenMP threads where the including project compiles with it; the bytes
/// written are the same for any number of threads (deterministic). Thread-safe on different tensors.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/propagate/row_map.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Gathers kept rows: destinations[t] row j = sources[t] row kept_to_old[j], for @p count tensors such as
/// hidden states, residuals and positions. Order stays. Rows of a destination beyond the kept ones are left
/// alone.
///
/// In place (same address and stride) is allowed and moves only what has to move; an identity map then does
/// nothing. Otherwise source and destination share no byte of a row, nor do different tensors.
/// @param rows a selection, or a map of a row_lineage
/// @param sources [count] at least rows.num_rows rows each
/// @param destinations [count] at least rows.num_kept rows each, of the same row_bytes
/// @return the first argument that is wrong
[[nodiscard]] inline UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                                        const byte_rows* destinations, std::int32_t count,
                                                        host_stream stream) noexcept;

/// The same for one tensor.
[[nodiscard]] inline UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows& source,
                                                        const byte_rows& destination,
                                                        host_stream stream) noexcept {
    return compact(rows, &source, &destination, 1, stream);
}

/// The way back: destinations[t] row kept_to_old[j] = sources[t] row j. Rows of a destination that were
/// dropped are left alone. Not in place, except by an identity map, which then does nothing.
/// @param sources [count] at least rows.num_kept rows each
/// @param destinations [count] at least rows.num_rows rows each, of the same row_bytes
/// @return the first argument that is wrong
[[nodiscard]] inline UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                                        const byte_rows* destinations, std::int32_t count,
                                                        host_stream stream) noexcept;

/// The same for one tensor.
[[nodiscard]] inline UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows& source,
                                                        const byte_rows& destination,
                                                        host_stream stream) noexcept {
    return scatter(rows, &source, &destination, 1, stream);
}

UNIPREFILL_END_NAMESPACE

#include <uniprefill/propagate/detail/compaction.inl>
