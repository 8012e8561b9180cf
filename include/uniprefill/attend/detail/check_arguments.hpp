// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What attention refuses before it writes anything.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/check_attention.hpp>
#include <uniprefill/core/detail/check_keys.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>

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

/// Lists of as many segments and heads, whatever they hold.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_list_shape(const block_lists& lists,
                                                                 const batch_view& batch,
                                                                 const selection& kept, const limits& bounds,
                                                                 memory_space space) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(lists.space == space, status_code::not_supported, "lists.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(lists.space)));
    UNIPREFILL_TRY(require(lists.block_rows == bounds.block_rows, invalid, "lists.block_rows",
                           "limits.block_rows (G)", lists.block_rows));
    UNIPREFILL_TRY(require(lists.window >= 0, invalid, "lists.window", ">= 0", lists.window));
    UNIPREFILL_TRY(require(lists.num_segments == batch.num_segments, invalid, "lists.num_segments",
                           "batch.num_segments", lists.num_segments));
    UNIPREFILL_TRY(require(lists.query_rows >= 0, invalid, "lists.query_rows", ">= 0", lists.query_rows));
    if (lists.query_rows > 0) {
        const std::int64_t blocks = std::int64_t{kept.kept_bound} / lists.query_rows + batch.num_segments;
        UNIPREFILL_TRY(require(lists.max_query_blocks >= blocks, invalid, "lists.max_query_blocks",
                               ">= kept.kept_bound / query_rows + batch.num_segments",
                               lists.max_query_blocks));
    }
    return require(lists.num_heads == bounds.num_heads || lists.num_heads == bounds.num_kv_heads, invalid,
                   "lists.num_heads", "limits.num_heads or limits.num_kv_heads", lists.num_heads);
}

/// Lists [@p first, @p last) of a segment.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_list_entries(const block_lists& lists,
                                                                   std::int64_t first, std::int64_t last,
                                                                   std::int32_t segment_blocks) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    for (std::int64_t index = first; index < last; ++index) {
        const std::int64_t begin = lists.place_of(lists.offsets[index]);
        const std::int64_t end = lists.place_of(lists.offsets[index + 1]);
        UNIPREFILL_TRY(require(begin <= end && end <= lists.capacity, invalid, "lists.offsets",
                               "offsets that don't fall and end within lists.capacity", end));
        const block_lists::entries list = lists.list(index);
        std::int32_t least = 0;
        for (std::int64_t i = list.begin; i < list.begin + list.count; ++i) {
            const std::int32_t block = lists.blocks[i];
            UNIPREFILL_TRY(require(block >= least && block < segment_blocks, invalid, "lists.blocks",
                                   "blocks of their segment that ascend", block));
            least = block + 1;
        }
    }
    return success();
}

/// @p batch and @p kept have been checked. O(list entries).
[[nodiscard]] inline UNIPREFILL_HOST_API status check_lists(const block_lists& lists, const batch_view& batch,
                                                            const selection& kept,
                                                            const limits& bounds) noexcept {
    if (lists.offsets == nullptr) {
        return success();
    }
    UNIPREFILL_TRY(check_list_shape(lists, batch, kept, bounds, memory_space::host));
    UNIPREFILL_TRY(require(lists.place_of(lists.offsets[0]) >= 0, status_code::invalid_argument,
                           "lists.offsets", "offsets from 0 on", lists.offsets[0]));
    const std::int64_t all = lists.query_rows > 0
                                 ? std::int64_t{kept.kept_bound} / lists.query_rows + batch.num_segments
                                 : batch.num_segments;
    if (lists.place_of(lists.offsets[all * lists.num_heads]) > 0) {
        UNIPREFILL_TRY(require_pointer(lists.blocks, "lists.blocks"));
    }
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        const std::int32_t blocks =
            num_blocks(batch.segment_end(segment) - batch.segment_begin(segment), bounds.block_rows);
        std::int64_t first = segment;
        std::int64_t count = 1;
        if (lists.query_rows > 0) {
            const std::int32_t begin = kept.segment_begin(batch, segment);
            first = block_lists::query_block_place(segment, begin, lists.query_rows);
            count = num_blocks(kept.segment_end(batch, segment) - begin, lists.query_rows);
        }
        UNIPREFILL_TRY(
            check_list_entries(lists, first * lists.num_heads, (first + count) * lists.num_heads, blocks)
                .at_request(segment));
    }
    return success();
}

/// Packed rows of a unit, and items of a step, are counted in 32 bits.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_item_count(std::int32_t rows, std::int32_t unit_heads,
                                                                 std::int32_t units, std::int32_t segments,
                                                                 std::int32_t tile_rows,
                                                                 const block_lists& lists) noexcept {
    const std::int64_t packed = std::int64_t{rows} * unit_heads;
    const bool by_query_block = lists.offsets != nullptr && lists.query_rows > 0;
    const std::int64_t tiles = packed / tile_rows + (by_query_block ? rows / lists.query_rows : 0) + segments;
    return require(packed < INT32_MAX - tile_rows && tiles < INT32_MAX / units, status_code::out_of_range,
                   "kept.kept_bound", "fewer than 2^31 rows times heads of a list, and tiles of them", rows);
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
        const status of_values = check_cache_alignment(values.cached);
        UNIPREFILL_TRY(require(of_values.ok(), of_values.code, "values.cached",
                               "rows that start at multiples of 16 bytes", 1));
    }
    return success();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
