// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] inline UNIPREFILL_HOST_API status validate_spans(const span_lists& lists, const char* name,
                                                               std::int32_t num_requests) noexcept {
    if (lists.offsets == nullptr) {
        return success();
    }
    if (lists.offsets[0] != 0) {
        return failure(status_code::invalid_argument, name, "offsets that start at 0", lists.offsets[0]);
    }
    for (std::int32_t r = 0; r < num_requests; ++r) {
        const std::int32_t begin = lists.offsets[r];
        const std::int32_t end = lists.offsets[r + 1];
        if (end < begin) {
            return failure(status_code::invalid_argument, name, "offsets that don't fall", end).at_request(r);
        }
        if (end > begin && lists.spans == nullptr) {
            return failure(status_code::invalid_argument, name, "spans, not a null pointer", 0).at_request(r);
        }
        std::int32_t previous_end = 0;
        for (std::int32_t i = begin; i < end; ++i) {
            const position_span span = lists.spans[i];
            if (span.begin < previous_end || span.end < span.begin) {
                return failure(status_code::invalid_argument, name, "sorted, disjoint, non-negative spans",
                               span.begin)
                    .at_request(r);
            }
            previous_end = span.end;
        }
    }
    return success();
}

[[nodiscard]] inline UNIPREFILL_HOST_API status validate_segments(const batch_view& batch) noexcept {
    if ((batch.cu_segments == nullptr) != (batch.segment_request == nullptr)) {
        return failure(status_code::invalid_argument, "batch.cu_segments", "both segment arrays or neither",
                       batch.cu_segments != nullptr ? 1 : 0);
    }
    if (batch.cu_segments == nullptr) {
        return batch.num_segments == batch.num_requests
                   ? success()
                   : failure(status_code::invalid_argument, "batch.num_segments",
                             "num_requests where no segment arrays are given", batch.num_segments);
    }
    std::int32_t segment = 0;
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        std::int32_t row = batch.cu_seqlens[r];
        const std::int32_t first = segment;
        while (segment < batch.num_segments && batch.segment_request[segment] == r) {
            if (batch.cu_segments[segment] != row || batch.cu_segments[segment + 1] < row) {
                return failure(status_code::invalid_argument, "batch.cu_segments",
                               "segments that tile their request", batch.cu_segments[segment])
                    .at_request(r);
            }
            row = batch.cu_segments[++segment];
        }
        if (segment == first || row != batch.cu_seqlens[r + 1]) {
            return failure(status_code::invalid_argument, "batch.cu_segments",
                           "at least one segment, and segments that tile their request", row)
                .at_request(r);
        }
    }
    return segment == batch.num_segments
               ? success()
               : failure(status_code::invalid_argument, "batch.segment_request",
                         "request indices that ascend from 0", batch.segment_request[segment]);
}

} // namespace detail

inline UNIPREFILL_HOST_API status validate(const batch_view& batch, const limits& bounds) noexcept {
    if (batch.space != memory_space::host) {
        return failure(status_code::not_supported, "batch.space", "host memory", 1);
    }
    if (batch.num_requests < 0 || batch.num_requests > bounds.max_requests) {
        return failure(status_code::out_of_range, "batch.num_requests", "0..limits.max_requests",
                       batch.num_requests);
    }
    if (batch.num_segments < 0 || batch.num_segments > bounds.max_segments) {
        return failure(status_code::out_of_range, "batch.num_segments", "0..limits.max_segments",
                       batch.num_segments);
    }
    if (batch.num_rows < 0 || batch.num_rows > bounds.max_rows) {
        return failure(status_code::out_of_range, "batch.num_rows", "0..limits.max_rows", batch.num_rows);
    }
    if (batch.num_requests == 0) {
        if (batch.num_rows != 0) {
            return failure(status_code::invalid_argument, "batch.num_rows", "0 without requests",
                           batch.num_rows);
        }
        return batch.num_segments == 0 ? success()
                                       : failure(status_code::invalid_argument, "batch.num_segments",
                                                 "0 without requests", batch.num_segments);
    }
    if (batch.tags == nullptr || batch.cu_seqlens == nullptr) {
        return failure(status_code::invalid_argument,
                       batch.tags == nullptr ? "batch.tags" : "batch.cu_seqlens",
                       "an array, not a null pointer", 0);
    }
    if (batch.num_rows > 0 && batch.positions == nullptr) {
        return failure(status_code::invalid_argument, "batch.positions", "an array, not a null pointer", 0);
    }
    if (batch.cu_seqlens[0] != 0) {
        return failure(status_code::invalid_argument, "batch.cu_seqlens", "0 first", batch.cu_seqlens[0]);
    }
    std::int64_t cached = 0;
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        const auto bad = [r](const char* argument, const char* expected, std::int64_t came) {
            return failure(status_code::invalid_argument, argument, expected, came).at_request(r);
        };
        const std::int32_t begin = batch.cu_seqlens[r];
        const std::int32_t end = batch.cu_seqlens[r + 1];
        if (end < begin || end > batch.num_rows) {
            return bad("batch.cu_seqlens", "offsets that don't fall and end at num_rows", end);
        }
        const auto tag = static_cast<std::int32_t>(batch.tags[r]);
        if (tag < 0 || tag > static_cast<std::int32_t>(request_tag::verify)) {
            return bad("batch.tags", "prefill, chunk, decode or verify", tag);
        }
        if (batch.cached_len(r) < 0) {
            return bad("batch.cached_lens", ">= 0", batch.cached_len(r));
        }
        if (batch.tags[r] == request_tag::prefill && batch.cached_len(r) != 0) {
            return bad("batch.cached_lens", "0 for a request tagged prefill (tag it chunk)",
                       batch.cached_len(r));
        }
        cached += batch.cached_len(r);
        const request_options options = batch.options_of(r);
        if (options.sink < 0 || options.tail < 0 || options.min_length < 0) {
            return bad("batch.options", "non-negative sink, tail and min_length",
                       options.sink < 0   ? options.sink
                       : options.tail < 0 ? options.tail
                                          : options.min_length);
        }
        std::int32_t previous = -1;
        for (std::int32_t row = begin; row < end; ++row) {
            if (batch.positions[row] <= previous) {
                return bad("batch.positions", "non-negative positions that ascend", batch.positions[row]);
            }
            previous = batch.positions[row];
        }
    }
    if (batch.cu_seqlens[batch.num_requests] != batch.num_rows) {
        return failure(status_code::invalid_argument, "batch.cu_seqlens", "num_rows last",
                       batch.cu_seqlens[batch.num_requests]);
    }
    if (cached > bounds.max_cached_tokens) {
        return failure(status_code::out_of_range, "batch.cached_lens",
                       "a sum within limits.max_cached_tokens", cached);
    }
    UNIPREFILL_TRY(detail::validate_segments(batch));
    UNIPREFILL_TRY(detail::validate_spans(batch.forced, "batch.forced", batch.num_requests));
    return detail::validate_spans(batch.observed, "batch.observed", batch.num_requests);
}

UNIPREFILL_END_NAMESPACE
