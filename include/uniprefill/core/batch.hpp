// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// One engine step as the library sees it: requests of any length and kind, packed row after row.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What a request does in this step. Declared by the engine, never guessed from a length.
enum class request_tag : std::int32_t {
    prefill, ///< the whole prompt, nothing cached before
    chunk,   ///< part of a prompt; earlier parts are in the cache
    decode,  ///< generated tokens; never scored, never dropped
    verify,  ///< speculative tokens; never scored, never dropped
};

/// A half-open range of original positions.
struct position_span {
    std::int32_t begin = 0;
    std::int32_t end = 0;
};

/// Ragged lists of position spans: those of request r are spans[offsets[r]] to spans[offsets[r + 1] - 1],
/// sorted and disjoint. Null offsets: no request has any.
struct span_lists {
    const std::int32_t* offsets = nullptr; // [num_requests + 1]
    const position_span* spans = nullptr;  // [offsets[num_requests]]
};

/// Run-time values of one request: which of its rows may be dropped at all.
struct request_options {
    std::int32_t enabled = 1;    ///< 0 keeps every row of the request at the cost of a comparison
    std::int32_t sink = 128;     ///< rows at original positions below this are forced
    std::int32_t tail = 128;     ///< the last rows of every span that are forced; apart from n
    std::int32_t min_length = 0; ///< segments with fewer alive rows than this are left alone
};

/// The step. Arrays live in `space` and belong to the engine; nothing here is copied or kept.
///
/// A *segment* is a (request, span) pair: the rows that one decision is about. Most steps have one segment
/// for each request (null `cu_segments` and `segment_request` say so); a step that prefills several spans of
/// one request lists them, in order, and their rows tile the request's rows exactly.
struct batch_view {
    memory_space space = memory_space::host;
    std::int32_t num_requests = 0;
    std::int32_t num_segments = 0; ///< == num_requests when the segment arrays are null
    std::int32_t num_rows = 0;     ///< rows alive now, or an upper bound where only the device knows

    const request_tag* tags = nullptr;             // [num_requests]
    const std::int32_t* cu_seqlens = nullptr;      // [num_requests + 1] first packed row of each request
    const std::int32_t* positions = nullptr;       // [num_rows] original positions, ascending in a request
    const std::int32_t* cached_lens = nullptr;     // [num_requests] keys this layer held before; null: 0
    const request_options* options = nullptr;      // [num_requests] null: defaults
    const std::int32_t* cu_segments = nullptr;     // [num_segments + 1] first packed row of each segment
    const std::int32_t* segment_request = nullptr; // [num_segments] ascending
    span_lists forced{};                           ///< spans of positions that are never dropped
    /// Positions whose queries observe, instead of the segment's last n rows. Only those alive and inside the
    /// segment count, at most the last n of them; a request without spans uses its last n rows.
    span_lists observed{};

    /// First packed row of a segment.
    [[nodiscard]] UNIPREFILL_API std::int32_t segment_begin(std::int32_t segment) const noexcept {
        return cu_segments != nullptr ? cu_segments[segment] : cu_seqlens[segment];
    }
    /// One past the last packed row of a segment.
    [[nodiscard]] UNIPREFILL_API std::int32_t segment_end(std::int32_t segment) const noexcept {
        return cu_segments != nullptr ? cu_segments[segment + 1] : cu_seqlens[segment + 1];
    }
    /// The request that a segment belongs to.
    [[nodiscard]] UNIPREFILL_API std::int32_t request_of(std::int32_t segment) const noexcept {
        return segment_request != nullptr ? segment_request[segment] : segment;
    }
    /// Keys that this layer held of a request before the step.
    [[nodiscard]] UNIPREFILL_API std::int32_t cached_len(std::int32_t request) const noexcept {
        return cached_lens != nullptr ? cached_lens[request] : 0;
    }
    /// Options of a request; the defaults where none are given.
    [[nodiscard]] UNIPREFILL_API request_options options_of(std::int32_t request) const noexcept {
        return options != nullptr ? options[request] : request_options{};
    }
    /// Whether the rows of a request are part of its prompt, and so may be dropped.
    [[nodiscard]] UNIPREFILL_API bool is_prefill(std::int32_t request) const noexcept {
        return tags[request] == request_tag::prefill || tags[request] == request_tag::chunk;
    }
};

/// Where the blocks of a segment start in arrays over all blocks of a step, given the segment's first packed
/// row. Ragged and without a prefix sum: ranges of different segments never meet, because a segment of L rows
/// has ceil(L / G) blocks and floor((start + L) / G) + 1 >= floor(start / G) + ceil(L / G).
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t block_offset(std::int32_t segment, std::int32_t first_row,
                                                                 std::int32_t block_rows) noexcept {
    return static_cast<std::int64_t>(first_row) / block_rows + segment;
}

/// Blocks of @p rows rows.
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t num_blocks(std::int32_t rows,
                                                               std::int32_t block_rows) noexcept {
    return rows / block_rows + (rows % block_rows != 0 ? 1 : 0);
}

/// Entries that the blocks of @p batch use in arrays laid out by block_offset(): none lies at or beyond this.
[[nodiscard]] UNIPREFILL_API inline std::int64_t used_blocks(const batch_view& batch,
                                                             std::int32_t block_rows) noexcept {
    if (batch.num_segments == 0) {
        return 0;
    }
    const std::int32_t last = batch.num_segments - 1;
    const std::int32_t begin = batch.segment_begin(last);
    return block_offset(last, begin, block_rows) + num_blocks(batch.segment_end(last) - begin, block_rows);
}

/// Whether a row must be kept: below the sink, in the segment's tail, or in a span that the caller named.
/// O(spans of the request). @p row is a packed row of @p segment.
[[nodiscard]] UNIPREFILL_API inline bool is_forced_row(const batch_view& batch, std::int32_t segment,
                                                       std::int32_t row) noexcept {
    const std::int32_t request = batch.request_of(segment);
    const request_options options = batch.options_of(request);
    const std::int32_t position = batch.positions[row];
    if (position < options.sink || batch.segment_end(segment) - row <= options.tail) {
        return true;
    }
    if (batch.forced.offsets != nullptr) {
        for (std::int32_t i = batch.forced.offsets[request]; i < batch.forced.offsets[request + 1]; ++i) {
            if (position >= batch.forced.spans[i].begin && position < batch.forced.spans[i].end) {
                return true;
            }
        }
    }
    return false;
}

/// Checks a host batch against @p bounds: array pointers, monotone offsets, segments that tile their
/// requests, ascending non-negative positions, sorted spans, non-negative options. O(rows + segments +
/// spans).
/// @return the first thing that is wrong, naming the request (or segment) concerned.
[[nodiscard]] inline UNIPREFILL_HOST_API status validate(const batch_view& batch,
                                                         const limits& bounds) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/core/detail/validate_batch.inl>
