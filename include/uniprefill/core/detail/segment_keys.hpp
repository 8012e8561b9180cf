// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where a segment's rows, queries and keys are, whatever the arrays say within bounds: on a device nobody
/// has checked them. Plain functions of host and device.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Rows that a segment has queries of: [begin, end) of the kept ones.
struct kept_range {
    std::int32_t begin;
    std::int32_t end;
};
/// @tparam Step has `batch`, `cu_kept` ([num_segments + 1] first kept row; null: as the batch's rows) and
/// `kept_bound`
template <class Step>
[[nodiscard]] UNIPREFILL_API kept_range kept_of(const Step& step, std::int32_t segment) noexcept {
    const bool mapped = step.cu_kept != nullptr;
    const std::int32_t begin = mapped ? step.cu_kept[segment] : step.batch.segment_begin(segment);
    const std::int32_t end = mapped ? step.cu_kept[segment + 1] : step.batch.segment_end(segment);
    const std::int32_t first = clamped(begin, 0, step.kept_bound);
    return {first, clamped(end, first, step.kept_bound)};
}

/// Keys of a segment are counted from its request's first: cached ones, then the request's rows.
struct segment_keys {
    std::int32_t request;
    std::int32_t request_begin; ///< packed row
    std::int32_t begin;         ///< packed row
    std::int32_t rows;
    std::int32_t cached;
    std::int32_t context; ///< keys before the segment's first row
};
[[nodiscard]] inline UNIPREFILL_API segment_keys segment_keys_of(const batch_view& batch,
                                                                 std::int32_t segment) noexcept {
    segment_keys made{};
    made.request = clamped(batch.request_of(segment), 0, batch.num_requests - 1);
    made.request_begin = clamped(batch.cu_seqlens[made.request], 0, batch.num_rows);
    made.begin = clamped(batch.segment_begin(segment), made.request_begin, batch.num_rows);
    made.rows = clamped(batch.segment_end(segment), made.begin, batch.num_rows) - made.begin;
    const std::int32_t cached = batch.cached_len(made.request);
    made.cached = cached > 0 ? cached : 0;
    made.context = made.cached + made.begin - made.request_begin;
    return made;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
