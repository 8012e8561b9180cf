// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the host can say about a step whose arrays are in device memory.
#pragma once

#include <uniprefill/core/batch.hpp>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] inline UNIPREFILL_HOST_API status check_device_batch(const batch_view& batch,
                                                                   const limits& bounds) noexcept {
    constexpr auto out_of_range = status_code::out_of_range;
    constexpr auto invalid = status_code::invalid_argument;
    if (batch.space != memory_space::device) {
        return failure(status_code::not_supported, "batch.space", "device memory", 0);
    }
    if (batch.num_requests < 0 || batch.num_requests > bounds.max_requests) {
        return failure(out_of_range, "batch.num_requests", "0..limits.max_requests", batch.num_requests);
    }
    if (batch.num_segments < 0 || batch.num_segments > bounds.max_segments) {
        return failure(out_of_range, "batch.num_segments", "0..limits.max_segments", batch.num_segments);
    }
    if (batch.num_rows < 0 || batch.num_rows > bounds.max_rows) {
        return failure(out_of_range, "batch.num_rows", "0..limits.max_rows", batch.num_rows);
    }
    if ((batch.cu_segments == nullptr) != (batch.segment_request == nullptr)) {
        return failure(invalid, "batch.cu_segments", "both segment arrays or neither",
                       batch.cu_segments != nullptr ? 1 : 0);
    }
    if (batch.cu_segments == nullptr && batch.num_segments != batch.num_requests) {
        return failure(invalid, "batch.num_segments", "num_requests where no segment arrays are given",
                       batch.num_segments);
    }
    if (batch.num_requests > 0 && (batch.tags == nullptr || batch.cu_seqlens == nullptr)) {
        return failure(invalid, batch.tags == nullptr ? "batch.tags" : "batch.cu_seqlens",
                       "an array, not a null pointer", 0);
    }
    return batch.num_requests == 0 || batch.num_rows == 0 || batch.positions != nullptr
               ? success()
               : failure(invalid, "batch.positions", "an array, not a null pointer", 0);
}

/// As above, for operations that look at each segment's request.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_device_segments(const batch_view& batch,
                                                                      const limits& bounds) noexcept {
    UNIPREFILL_TRY(check_device_batch(batch, bounds));
    if (batch.num_segments < batch.num_requests) {
        return failure(status_code::invalid_argument, "batch.num_segments",
                       "at least one segment for each request", batch.num_segments);
    }
    return batch.num_requests > 0 || batch.num_segments + batch.num_rows == 0
               ? success()
               : failure(status_code::invalid_argument, "batch.num_requests",
                         "more than 0 where there are rows or segments", 0);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
