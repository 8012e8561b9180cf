// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Rows that a caller names to observe, in place of a segment's last ones.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Writes the last rows of [begin, end) whose positions lie in spans [first, last), ascending and counted
/// from @p begin. @param listed [n] @return how many there are, at most n
[[nodiscard]] inline UNIPREFILL_API std::int32_t
list_named_rows(const std::int32_t* positions, std::int32_t begin, std::int32_t end,
                const position_span* spans, std::int32_t first, std::int32_t last, std::int32_t n,
                std::int32_t* listed) noexcept {
    std::int32_t count = 0;
    for (std::int32_t i = last; i > first && count < n; --i) {
        const std::int32_t from = bracketed_row_at(positions, begin, end, spans[i - 1].begin);
        const std::int32_t to = bracketed_row_at(positions, from, end, spans[i - 1].end);
        for (std::int32_t row = to; row > from && count < n; --row) {
            listed[count++] = row - 1 - begin;
        }
    }
    for (std::int32_t low = 0, high = count - 1; low < high; ++low, --high) {
        const std::int32_t swapped = listed[low];
        listed[low] = listed[high];
        listed[high] = swapped;
    }
    return count;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
