// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Means of blocks of keys and values: what stands in for the blocks that a query skips.
///
/// Attention by block lists leaves a query's mass on the blocks that it skips out of the softmax's
/// denominator, and their values out of its output. With means, a block of G keys that a query sees whole and
/// reads nothing of is one key more to it:
/// @code
///   score = score of (q, mean of the block's keys) + log G,   value = mean of the block's values
/// @endcode
/// which is what the block would give if its keys were all alike (second order in how they differ
/// otherwise). Source: mean correction of FlashPrefill V2, arXiv 2608.19758.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Means of one layer's blocks: block b of a segment is row block_offset(segment, first row, G) + b, as
/// masses have it. Rows of blocks with fewer than G rows are neither written nor read.
template <class T>
struct block_means {
    head_rows<T> keys;   // [blocks, num_kv_heads, head_dim] null: no means
    head_rows<T> values; // [blocks, num_kv_heads, head_dim]

    /// Rows that the means of @p batch need.
    [[nodiscard]] static UNIPREFILL_API std::int64_t rows_of(const batch_view& batch,
                                                             std::int32_t block_rows) noexcept {
        return std::int64_t{batch.num_rows} / block_rows + batch.num_segments;
    }
    /// Carves the arrays for any step within @p bounds: 2 * bounds.max_blocks() rows of all KV heads.
    [[nodiscard]] static UNIPREFILL_HOST_API block_means carve(workspace& memory,
                                                               const limits& bounds) noexcept {
        const std::int64_t row = std::int64_t{bounds.num_kv_heads} * bounds.head_dim;
        const auto take = [&] {
            const std::int64_t blocks = bounds.max_blocks();
            return head_rows<T>{memory.take<T>(blocks * row),
                                row,
                                bounds.head_dim,
                                static_cast<std::int32_t>(blocks),
                                bounds.num_kv_heads,
                                bounds.head_dim};
        };
        block_means made;
        made.keys = take();
        made.values = take();
        return made;
    }
};

/// Averages the rows of every whole block of a step, on the host.
///
/// Errors: invalid_argument, or what validate() says of @p bounds and @p batch; nothing has been written
/// then. Sums are in single precision, by rising row, and are rounded to T once. Deterministic: a block's
/// bits follow from its rows alone. NaN and infinity stay in their block, head and element. Reads every key
/// and value once: O(rows * num_kv_heads * head_dim), no workspace. Threads: OpenMP's, where the including
/// project compiles with it. Thread-safe.
///
/// @param keys   [batch.num_rows, num_kv_heads, head_dim] of the rows that entered the layer, rotated
/// @param values [batch.num_rows, num_kv_heads, head_dim] of the same rows
/// @param batch  in host memory; checked with validate()
/// @param means  at least block_means::rows_of(batch, bounds.block_rows) rows each; overlap nothing else
/// @return the first argument that is wrong
/// @tparam Build names the compiler flags of the calling translation unit; leave it alone
template <class T, std::int32_t Build = detail::host_build>
UNIPREFILL_HOST_API status average_blocks(const head_rows<const T>& keys, const head_rows<const T>& values,
                                          const batch_view& batch, const limits& bounds,
                                          const block_means<T>& means, host_stream stream = {}) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/host_means.inl>
