// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Rows by position, and numbers kept within bounds.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// @p value, moved into least..most.
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t clamped(std::int32_t value, std::int32_t least,
                                                            std::int32_t most) noexcept {
    return value < least ? least : value > most ? most : value;
}

/// The first row of [begin, end) at @p position or later. Positions ascend. Whatever they are, the answer
/// lies in begin..end and doesn't fall when @p position grows.
[[nodiscard]] inline UNIPREFILL_API std::int32_t first_row_at(const std::int32_t* positions,
                                                              std::int32_t begin, std::int32_t end,
                                                              std::int32_t position) noexcept {
    while (begin < end) {
        const std::int32_t middle = begin + (end - begin) / 2;
        if (positions[middle] >= position) {
            end = middle;
        } else {
            begin = middle + 1;
        }
    }
    return begin;
}

/// As first_row_at(), with fewer steps: positions ascend by at least 1 a row, so the ends bracket the answer.
/// Rows without gaps need no step at all.
[[nodiscard]] inline UNIPREFILL_API std::int32_t bracketed_row_at(const std::int32_t* positions,
                                                                  std::int32_t begin, std::int32_t end,
                                                                  std::int32_t position) noexcept {
    if (begin >= end) {
        return begin;
    }
    const std::int64_t first = positions[begin];
    const std::int64_t last = positions[end - 1];
    if (first >= position) {
        return begin;
    }
    if (last < position) {
        return end;
    }
    const std::int64_t highest = begin + (position - first);
    const std::int64_t lowest = end - 1 - (last - position);
    const auto to = static_cast<std::int32_t>(highest < end - 1 ? highest : end - 1);
    const auto from = static_cast<std::int32_t>(lowest > begin + 1 ? lowest : begin + 1);
    return first_row_at(positions, from < to ? from : to, to, position);
}

/// The first of a request's keys at @p position or later, among those before the own one of packed row
/// @p row: cached ones are counted first, then the request's rows.
/// @param cached_positions of the request; null: cached token i is at position i
[[nodiscard]] inline UNIPREFILL_API std::int32_t
first_key_at(const std::int32_t* cached_positions, std::int32_t cached, const std::int32_t* positions,
             std::int32_t request_begin, std::int32_t row, std::int32_t position) noexcept {
    if (position <= 0) {
        return 0;
    }
    const std::int32_t first = cached_positions != nullptr
                                   ? bracketed_row_at(cached_positions, 0, cached, position)
                                   : (position < cached ? position : cached);
    return first < cached
               ? first
               : cached + bracketed_row_at(positions, request_begin, row, position) - request_begin;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
