// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What the words are.
struct stage_words {
    const request_tag* tags = nullptr;         // [num_requests]
    const std::int32_t* cu_seqlens = nullptr;  // [num_requests + 1]
    const std::int32_t* request_ids = nullptr; // [num_requests]
    const std::int32_t* cu_leaving = nullptr;  // [num_requests + 1]
    const std::int32_t* positions = nullptr;   // [num_leaving]
    std::int32_t num_requests = 0;
    std::int32_t num_rows = 0;
    std::int32_t num_leaving = 0;

    /// The word at place @p index, below stage_rows_words().
    [[nodiscard]] UNIPREFILL_API std::int32_t at(std::int64_t index) const noexcept {
        const std::int32_t header[] = {stage_rows_format, num_requests, num_rows, num_leaving};
        if (index < 4) {
            return header[index];
        }
        index -= 4;
        if (index < num_requests) {
            return request_ids[index];
        }
        index -= num_requests;
        if (index < num_requests) {
            return static_cast<std::int32_t>(tags[index]);
        }
        index -= num_requests;
        if (index <= num_requests) {
            return num_requests > 0 ? cu_seqlens[index] : 0;
        }
        index -= std::int64_t{num_requests} + 1;
        if (index <= num_requests) {
            return num_requests > 0 ? cu_leaving[index] : 0;
        }
        return positions[index - num_requests - 1];
    }
};

/// Whether there is what write_stage_rows() reads, as far as the host can see.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_stage_rows(const batch_view& batch,
                                                                 const std::int32_t* request_ids,
                                                                 const batch_view& leaving,
                                                                 const std::int32_t* words, std::int64_t size,
                                                                 memory_space space) noexcept {
    const auto bad = [](const char* argument, const char* expected, std::int64_t came) {
        return failure(status_code::invalid_argument, argument, expected, came);
    };
    const std::int32_t requests = batch.num_requests;
    if (requests < 0 || leaving.num_requests != requests) {
        return bad("leaving.num_requests", "the requests of the step", leaving.num_requests);
    }
    if (batch.space != space || leaving.space != space) {
        return failure(status_code::not_supported, "batch.space", "the ledger's memory",
                       space == memory_space::host ? 1 : 0);
    }
    if (requests > 0 && (batch.tags == nullptr || batch.cu_seqlens == nullptr || request_ids == nullptr ||
                         leaving.cu_seqlens == nullptr)) {
        return bad("batch", "tags, cu_seqlens and request_ids", 0);
    }
    if (leaving.num_rows < 0 || (leaving.num_rows > 0 && leaving.positions == nullptr)) {
        return bad("leaving.positions", "num_rows positions", leaving.num_rows);
    }
    return words != nullptr && size >= stage_rows_words(requests, leaving.num_rows)
               ? success()
               : failure(status_code::out_of_range, "size", "at least stage_rows_words()", size);
}

/// Views into words of a step of @p num_requests requests.
[[nodiscard]] inline UNIPREFILL_HOST_API stage_rows view_stage_rows(const std::int32_t* words,
                                                                    std::int32_t num_requests,
                                                                    std::int32_t num_rows,
                                                                    std::int32_t num_entering,
                                                                    memory_space space) noexcept {
    static_assert(sizeof(request_tag) == sizeof(std::int32_t));
    stage_rows made;
    made.request_ids = words + 4;
    made.batch.space = space;
    made.batch.num_requests = made.batch.num_segments = num_requests;
    made.batch.num_rows = num_rows;
    made.batch.tags = reinterpret_cast<const request_tag*>(made.request_ids + num_requests);
    made.batch.cu_seqlens = made.request_ids + std::int64_t{2} * num_requests;
    made.entering = made.batch;
    made.entering.num_rows = num_entering;
    made.entering.cu_seqlens = made.batch.cu_seqlens + num_requests + 1;
    made.entering.positions = made.entering.cu_seqlens + num_requests + 1;
    return made;
}

} // namespace detail

inline status write_stage_rows(const batch_view& batch, const std::int32_t* request_ids,
                               const batch_view& leaving, std::int32_t* words, std::int64_t size) noexcept {
    UNIPREFILL_TRY(detail::check_stage_rows(batch, request_ids, leaving, words, size, memory_space::host));
    const detail::stage_words what{batch.tags,        batch.cu_seqlens,   request_ids,    leaving.cu_seqlens,
                                   leaving.positions, batch.num_requests, batch.num_rows, leaving.num_rows};
    for (std::int64_t i = 0; i < stage_rows_words(batch.num_requests, leaving.num_rows); ++i) {
        words[i] = what.at(i);
    }
    return success();
}

inline status read_stage_rows(const std::int32_t* words, std::int64_t size, stage_rows& came) noexcept {
    const auto bad = [](const char* argument, const char* expected, std::int64_t value) {
        return failure(status_code::invalid_argument, argument, expected, value);
    };
    if (words == nullptr || size < stage_rows_words(0, 0)) {
        return bad("size", "at least the words of an empty step", size);
    }
    if (words[0] != stage_rows_format) {
        return bad("words", "a buffer that write_stage_rows() of this version wrote", words[0]);
    }
    const std::int32_t requests = words[1];
    const std::int32_t rows = words[3];
    if (requests < 0 || words[2] < 0 || rows < 0 || size < stage_rows_words(requests, rows)) {
        return bad("size", "at least the words of so many requests and rows", size);
    }
    came = detail::view_stage_rows(words, requests, words[2], rows, memory_space::host);
    return success();
}

UNIPREFILL_END_NAMESPACE
