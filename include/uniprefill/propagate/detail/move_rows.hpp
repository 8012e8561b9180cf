// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The loops that move rows. Nothing is checked here.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/propagate/row_map.hpp>

#include <cstddef>
#include <cstdint>
#include <cstring>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

enum class move_direction : std::int32_t { gather, scatter };

/// Moves the rows [begin, end) after compaction, run by run of rows that were neighbours before.
template <move_direction Direction>
UNIPREFILL_HOST_API void move_rows(const row_map& rows, const byte_rows& source, const byte_rows& destination,
                                   std::int32_t begin, std::int32_t end) noexcept {
    const bool dense =
        source.row_stride_bytes == source.row_bytes && destination.row_stride_bytes == destination.row_bytes;
    const auto* from = static_cast<const std::byte*>(source.data);
    auto* to = static_cast<std::byte*>(destination.data);
    for (std::int32_t kept = begin; kept < end;) {
        const std::int32_t old = rows.identity ? kept : rows.kept_to_old[kept];
        std::int32_t run = dense && rows.identity ? end - kept : 1;
        while (dense && kept + run < end && rows.kept_to_old[kept + run] == old + run) {
            ++run;
        }
        const std::int64_t read = Direction == move_direction::gather ? old : kept;
        const std::int64_t written = Direction == move_direction::gather ? kept : old;
        // A run that moves down by less than its length overlaps itself.
        std::memmove(to + written * destination.row_stride_bytes, from + read * source.row_stride_bytes,
                     static_cast<std::size_t>(source.row_bytes) * static_cast<std::size_t>(run));
        kept += run;
    }
}

/// Moves all rows between tensors that share no byte.
template <move_direction Direction>
UNIPREFILL_HOST_API void copy_rows(const row_map& rows, const byte_rows& source,
                                   const byte_rows& destination) noexcept {
#if defined(_OPENMP)
    constexpr std::int32_t chunk = 256; // rows
    // Bytes; below, starting threads costs more. Not every compiler sees that the pragma uses it.
    [[maybe_unused]] constexpr std::int64_t worth_threads = std::int64_t{1} << 20;
    const std::int32_t chunks = rows.num_kept / chunk + 1;
#    pragma omp parallel for schedule(static) if (rows.num_kept * source.row_bytes >= worth_threads)
    for (std::int32_t c = 0; c < chunks; ++c) {
        const std::int32_t begin = c * chunk;
        move_rows<Direction>(rows, source, destination, begin,
                             rows.num_kept - begin < chunk ? rows.num_kept : begin + chunk);
    }
#else
    move_rows<Direction>(rows, source, destination, 0, rows.num_kept);
#endif
}

/// Gathers in place. Row j comes from row j or a later one, so in ascending order nothing is overwritten
/// before it is read. The first rows are usually where they belong.
inline UNIPREFILL_HOST_API void compact_in_place(const row_map& rows, const byte_rows& tensor) noexcept {
    std::int32_t first = 0;
    while (first < rows.num_kept && rows.kept_to_old[first] == first) {
        ++first;
    }
    move_rows<move_direction::gather>(rows, tensor, tensor, first, rows.num_kept);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
