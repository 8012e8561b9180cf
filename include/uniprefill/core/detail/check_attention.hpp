// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What is refused of a layer's attention before anything is written: queries, caches, parameters, windows
/// and kept rows.
#pragma once

#include <uniprefill/core/attention_options.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/check_keys.hpp>
#include <uniprefill/core/detail/vector_math.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Rows of queries, or of outputs, one for each query that is asked.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_query_rows(const head_rows<T>& rows, const limits& bounds,
                                                          std::int32_t num_rows, const char* argument,
                                                          const char* row_limit) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(rows.num_heads == bounds.num_heads, invalid, argument, "limits.num_heads heads",
                           rows.num_heads));
    UNIPREFILL_TRY(require(rows.head_dim == bounds.head_dim, invalid, argument,
                           "limits.head_dim elements of a head", rows.head_dim));
    UNIPREFILL_TRY(require(rows.num_rows >= num_rows, invalid, argument, row_limit, rows.num_rows));
    return num_rows > 0 ? require_pointer(rows.data, argument) : success();
}

/// The cache of keys, and that of values.
template <class Cache>
[[nodiscard]] UNIPREFILL_HOST_API status check_caches(const Cache& keys, const Cache& values) noexcept {
    UNIPREFILL_TRY(check_cache(keys));
    const status cache = check_cache(values);
    return cache.ok() ? success()
                      : failure(cache.code, "values.cached", "what is expected of keys.cached", 0);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status
require_no_key_scales(const attention_params& params) noexcept {
    return require(params.key_scales == nullptr, status_code::not_supported, "params.key_scales",
                   "null: no FP8 keys here", 1);
}

/// Scale, soft-cap and, where the host can read them, sink logits.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_attention_params(const attention_params& params,
                                                                       std::int32_t num_heads) noexcept {
    UNIPREFILL_TRY(check_params(params));
    UNIPREFILL_TRY(require_no_key_scales(params));
    for (std::int32_t head = 0; params.sink_logits != nullptr && head < num_heads; ++head) {
        UNIPREFILL_TRY(require(!is_non_finite(params.sink_logits[head] * log2_of_e),
                               status_code::invalid_argument, "params.sink_logits",
                               "finite numbers, of each head", head));
    }
    return success();
}

/// What a caller's argument of a window and of cached tokens' positions is called.
struct window_names {
    const char* window;
    const char* cached_positions;
    const char* cached_positions_stride;
};
UNIPREFILL_HIDDEN inline constexpr window_names names_in_options{"options.window", "options.cached_positions",
                                                                 "options.cached_positions_stride"};
UNIPREFILL_HIDDEN inline constexpr window_names names_in_attention{
    "attention.window", "attention.cached_positions", "attention.cached_positions_stride"};

[[nodiscard]] inline UNIPREFILL_HOST_API status check_window_shape(const attention_options& options,
                                                                   const window_names& names) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(options.window >= 0, invalid, names.window, ">= 0", options.window));
    return require(options.cached_positions == nullptr || options.cached_positions_stride >= 0, invalid,
                   names.cached_positions_stride, ">= 0", options.cached_positions_stride);
}

/// Positions of cached tokens, where a window asks for them. @p batch has been validated.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_window(const attention_options& options,
                                                             const batch_view& batch,
                                                             const window_names& names) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(check_window_shape(options, names));
    for (std::int32_t request = 0; options.window > 0 && request < batch.num_requests; ++request) {
        const std::int32_t cached = batch.cached_len(request);
        const std::int32_t row = batch.cu_seqlens[request];
        if (cached == 0 || row == batch.cu_seqlens[request + 1]) {
            continue;
        }
        std::int64_t previous = std::int64_t{cached} - 1;
        if (options.cached_positions != nullptr) {
            const std::int32_t* positions =
                options.cached_positions + request * options.cached_positions_stride;
            previous = -1;
            for (std::int32_t token = 0; token < cached; ++token) {
                UNIPREFILL_TRY(require(positions[token] > previous, invalid, names.cached_positions,
                                       "non-negative positions that ascend", positions[token])
                                   .at_request(request));
                previous = positions[token];
            }
        }
        UNIPREFILL_TRY(require(previous < batch.positions[row], invalid, names.cached_positions,
                               "positions before those of the request's rows", previous)
                           .at_request(request));
    }
    return success();
}

/// A decision about this batch, whatever its arrays hold.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_kept_shape(const selection& kept,
                                                                 const batch_view& batch,
                                                                 memory_space space) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(kept.space == space, status_code::not_supported, "kept.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(kept.space)));
    UNIPREFILL_TRY(require(kept.num_requests == batch.num_requests, invalid, "kept.num_requests",
                           "batch.num_requests", kept.num_requests));
    UNIPREFILL_TRY(require(kept.num_segments == batch.num_segments, invalid, "kept.num_segments",
                           "batch.num_segments", kept.num_segments));
    UNIPREFILL_TRY(
        require(kept.num_rows == batch.num_rows, invalid, "kept.num_rows", "batch.num_rows", kept.num_rows));
    if (kept.identity) {
        return require(kept.kept_bound == batch.num_rows, invalid, "kept.kept_bound",
                       "batch.num_rows where all rows are kept", kept.kept_bound);
    }
    UNIPREFILL_TRY(require(kept.kept_bound >= 0, invalid, "kept.kept_bound", ">= 0", kept.kept_bound));
    UNIPREFILL_TRY(require_pointer(kept.cu_segments, "kept.cu_segments"));
    return kept.kept_bound > 0 ? require_pointer(kept.kept_to_old, "kept.kept_to_old") : success();
}

/// @p batch has been validated.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_kept(const selection& kept,
                                                           const batch_view& batch) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(check_kept_shape(kept, batch, memory_space::host));
    if (kept.identity) {
        return success();
    }
    UNIPREFILL_TRY(
        require(kept.cu_segments[0] == 0, invalid, "kept.cu_segments", "0 first", kept.cu_segments[0]));
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        const std::int32_t begin = kept.cu_segments[segment];
        const std::int32_t end = kept.cu_segments[segment + 1];
        UNIPREFILL_TRY(require(begin <= end && end <= kept.kept_bound, invalid, "kept.cu_segments",
                               "offsets that don't fall and end at kept_bound", end)
                           .at_request(segment));
        std::int32_t least = batch.segment_begin(segment);
        for (std::int32_t i = begin; i < end; ++i) {
            const std::int32_t row = kept.kept_to_old[i];
            UNIPREFILL_TRY(require(row >= least && row < batch.segment_end(segment), invalid,
                                   "kept.kept_to_old", "rows of their segment that ascend", row)
                               .at_request(segment));
            least = row + 1;
        }
    }
    return success();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
