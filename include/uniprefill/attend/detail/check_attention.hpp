// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What attention refuses before it writes anything.
#pragma once

#include <uniprefill/attend/options.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/check_keys.hpp>
#include <uniprefill/core/selection.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether the limits are good and agree with the policy's constants.
template <class Policy>
[[nodiscard]] UNIPREFILL_HOST_API status check_attention_bounds(const limits& bounds) noexcept {
    using block_rows = typename Policy::block_rows;
    using head_dim = typename Policy::head_dim;
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(require(block_rows(bounds.block_rows).value() == bounds.block_rows, invalid,
                           "limits.block_rows (G)", "the policy's G", bounds.block_rows));
    return require(head_dim(bounds.head_dim).value() == bounds.head_dim, invalid, "limits.head_dim",
                   "the policy's D", bounds.head_dim);
}

/// The answer with its argument named as one of the values.
[[nodiscard]] inline UNIPREFILL_HOST_API status of_values(status answer) noexcept {
    if (!answer.ok()) {
        answer.argument = "values.cached";
    }
    return answer;
}

/// Shapes and addresses of queries, keys, values and outputs.
template <class T, class Cache>
[[nodiscard]] UNIPREFILL_HOST_API status check_attention_rows(const head_rows<const T>& queries,
                                                              const key_source<T, Cache>& keys,
                                                              const key_source<T, Cache>& values,
                                                              const head_rows<T>& out, std::int32_t key_rows,
                                                              std::int32_t query_rows, bool has_cache,
                                                              const limits& bounds) noexcept {
    const head_rows<const T> written{out.data,     out.row_stride, out.head_stride,
                                     out.num_rows, out.num_heads,  out.head_dim};
    UNIPREFILL_TRY(check_rows(queries, bounds.num_heads, bounds.head_dim, query_rows, "queries",
                              "limits.num_heads heads"));
    UNIPREFILL_TRY(check_rows(keys.rows, bounds.num_kv_heads, bounds.head_dim, key_rows, "keys.rows",
                              "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(check_rows(values.rows, bounds.num_kv_heads, bounds.head_dim, key_rows, "values.rows",
                              "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(
        check_rows(written, bounds.num_heads, bounds.head_dim, query_rows, "out", "limits.num_heads heads"));
    if (has_cache) {
        UNIPREFILL_TRY(check_cache(keys.cached));
        UNIPREFILL_TRY(of_values(check_cache(values.cached)));
    }
    return success();
}

/// Rows that copies of 16 bytes can read and write.
template <class T, class Cache>
[[nodiscard]] UNIPREFILL_HOST_API status check_attention_alignment(const head_rows<const T>& queries,
                                                                   const key_source<T, Cache>& keys,
                                                                   const key_source<T, Cache>& values,
                                                                   const head_rows<T>& out,
                                                                   bool has_cache) noexcept {
    UNIPREFILL_TRY(
        require_aligned(queries.data, queries.row_stride, queries.head_stride, 0, sizeof(T), "queries"));
    UNIPREFILL_TRY(require_aligned(keys.rows.data, keys.rows.row_stride, keys.rows.head_stride, 0, sizeof(T),
                                   "keys.rows"));
    UNIPREFILL_TRY(require_aligned(values.rows.data, values.rows.row_stride, values.rows.head_stride, 0,
                                   sizeof(T), "values.rows"));
    UNIPREFILL_TRY(require_aligned(out.data, out.row_stride, out.head_stride, 0, sizeof(T), "out"));
    if (has_cache) {
        UNIPREFILL_TRY(check_cache_alignment(keys.cached));
        UNIPREFILL_TRY(of_values(check_cache_alignment(values.cached)));
    }
    return success();
}

[[nodiscard]] inline UNIPREFILL_HOST_API status
check_attention_options(const attention_options& options) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(check_params(options.params));
    UNIPREFILL_TRY(require(options.params.key_scales == nullptr, status_code::not_supported,
                           "options.params.key_scales", "null: no FP8 keys", 1));
    UNIPREFILL_TRY(require(options.window >= 0, invalid, "options.window", ">= 0", options.window));
    return require(options.cached_positions == nullptr || options.cached_positions_stride >= 0, invalid,
                   "options.cached_positions_stride", ">= 0", options.cached_positions_stride);
}

/// Which rows have queries: a decision about this batch.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_kept(const selection& kept, const batch_view& batch,
                                                           memory_space space) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    if (kept.identity) {
        return success();
    }
    UNIPREFILL_TRY(require(kept.space == space, status_code::not_supported, "kept.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(kept.space)));
    UNIPREFILL_TRY(require(kept.num_requests == batch.num_requests, invalid, "kept.num_requests",
                           "batch.num_requests", kept.num_requests));
    UNIPREFILL_TRY(require(kept.num_segments == batch.num_segments, invalid, "kept.num_segments",
                           "batch.num_segments", kept.num_segments));
    UNIPREFILL_TRY(
        require(kept.num_rows == batch.num_rows, invalid, "kept.num_rows", "batch.num_rows", kept.num_rows));
    UNIPREFILL_TRY(require(kept.kept_bound >= 0 && kept.kept_bound <= batch.num_rows,
                           status_code::out_of_range, "kept.kept_bound", "0..batch.num_rows",
                           kept.kept_bound));
    UNIPREFILL_TRY(require_pointer(kept.kept_to_old, "kept.kept_to_old"));
    UNIPREFILL_TRY(require_pointer(kept.cu_seqlens, "kept.cu_seqlens"));
    return require_pointer(kept.cu_segments, "kept.cu_segments");
}

/// Lists of as many segments and heads; their entries are another matter.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_list_shape(const block_lists& lists,
                                                                 std::int32_t num_segments,
                                                                 memory_space space,
                                                                 const limits& bounds) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    if (lists.offsets == nullptr) {
        return success();
    }
    UNIPREFILL_TRY(require(lists.space == space, status_code::not_supported, "lists.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(lists.space)));
    UNIPREFILL_TRY(require(lists.block_rows == bounds.block_rows, invalid, "lists.block_rows",
                           "limits.block_rows (G)", lists.block_rows));
    UNIPREFILL_TRY(require(lists.num_heads == bounds.num_heads || lists.num_heads == bounds.num_kv_heads,
                           invalid, "lists.num_heads", "limits.num_heads or limits.num_kv_heads",
                           lists.num_heads));
    UNIPREFILL_TRY(require(lists.num_segments == num_segments, invalid, "lists.num_segments",
                           "batch.num_segments", lists.num_segments));
    UNIPREFILL_TRY(require(lists.window >= 0, invalid, "lists.window", ">= 0", lists.window));
    return require_pointer(lists.blocks, "lists.blocks");
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
