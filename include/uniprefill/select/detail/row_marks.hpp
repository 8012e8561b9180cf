// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Marks on the rows of one segment while it is decided: 0 stays, -1 goes. They live in old_to_kept, where a
/// dropped row's -1 is final already and kept rows get their number at the end.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t row_stays = 0;
inline constexpr std::int32_t row_goes = -1;

inline UNIPREFILL_HOST_API void mark_rows(std::int32_t* marks, std::int32_t begin, std::int32_t end,
                                          std::int32_t mark) noexcept {
    for (std::int32_t row = begin; row < end; ++row) {
        marks[row] = mark;
    }
}

/// Marks forced rows of a segment as staying and all others as going: is_forced_row() for a whole segment, by
/// ranges. @return the forced rows. O(rows + spans * log(rows)).
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t
mark_forced_rows(const batch_view& batch, std::int32_t segment, std::int32_t* marks) noexcept {
    const std::int32_t begin = batch.segment_begin(segment);
    const std::int32_t end = batch.segment_end(segment);
    const std::int32_t request = batch.request_of(segment);
    const request_options options = batch.options_of(request);
    mark_rows(marks, begin, end, row_goes);
    mark_rows(marks, begin, first_row_at(batch.positions, begin, end, options.sink), row_stays);
    mark_rows(marks, options.tail < end - begin ? end - options.tail : begin, end, row_stays);
    if (batch.forced.offsets != nullptr) {
        for (std::int32_t i = batch.forced.offsets[request]; i < batch.forced.offsets[request + 1]; ++i) {
            const position_span span = batch.forced.spans[i];
            const std::int32_t from = first_row_at(batch.positions, begin, end, span.begin);
            mark_rows(marks, from, first_row_at(batch.positions, from, end, span.end), row_stays);
        }
    }
    std::int32_t forced = 0;
    for (std::int32_t row = begin; row < end; ++row) {
        forced += marks[row] == row_stays ? 1 : 0;
    }
    return forced;
}

/// Lets the first @p count rows of [begin, end) that go stay.
inline UNIPREFILL_HOST_API void keep_first_free_rows(std::int32_t* marks, std::int32_t begin,
                                                     std::int32_t end, std::int32_t count) noexcept {
    for (std::int32_t row = begin; row < end && count > 0; ++row) {
        if (marks[row] == row_goes) {
            marks[row] = row_stays;
            --count;
        }
    }
}

/// Where only @p rows of a segment's rows have a place: forced ones first (of too many the latest), then the
/// latest. @p forced counts the rows that are marked as staying.
inline UNIPREFILL_HOST_API void keep_latest_rows(std::int32_t* marks, std::int32_t begin, std::int32_t end,
                                                 std::int32_t forced, std::int32_t rows) noexcept {
    const bool too_many = forced > rows;
    const std::int32_t from = too_many ? row_stays : row_goes;
    std::int32_t left = too_many ? forced - rows : rows - forced;
    if (too_many) {
        for (std::int32_t row = begin; left > 0; ++row) {
            if (marks[row] == from) {
                marks[row] = row_goes;
                --left;
            }
        }
    } else {
        for (std::int32_t row = end; left > 0 && row > begin;) {
            if (marks[--row] == from) {
                marks[row] = row_stays;
                --left;
            }
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
