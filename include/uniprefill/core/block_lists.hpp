// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which blocks of keys each head reads: what select writes from masses by head, and attention reads.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Lists of blocks, one for each (segment, head) of a step, in one array.
///
/// A block is G rows of a segment, counted from its first, as masses have it: rows that enter the layer,
/// whose keys the layer stores, whether a decision drops them afterwards or not. The query of a row reads the
/// key of a row not after it if that row's block is in the list, or is not before the first block with a
/// position inside the query's window of `window` positions (its own included). Keys before the segment's
/// first row, cached or not, are read by every query.
///
/// What a query reads follows from its own position and the segment's list: not from other queries, packing
/// or tiles. But lists follow from the segment's end: so do, from the next layer on, keys of all its rows
/// (see page_signature.hpp, if they are shared). Lists hold for any layer whose segments have the same rows.
struct block_lists {
    memory_space space = memory_space::host;
    std::int32_t block_rows = 0; ///< G
    std::int32_t window = 0; ///< positions; 0: no window, the lists alone, which may leave a query nothing
    std::int32_t max_segments = 0; ///< that `offsets` has room for
    std::int32_t num_segments = 0;
    std::int32_t num_heads = 0;      ///< lists of a segment: one for each query head, or for each KV head
    std::int64_t* offsets = nullptr; // [max_segments * num_heads + 1] in `blocks`, [segment][head]
    std::int32_t* blocks = nullptr;  // [capacity] ascending in each list
    std::int64_t capacity = 0;

    /// Blocks that all lists of a step within @p bounds hold at most.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t most_blocks(const limits& bounds,
                                                                           std::int32_t heads) noexcept {
        return bounds.max_blocks() * heads;
    }
    /// Carves the arrays for any step within @p bounds.
    /// @param heads lists of a segment: bounds.num_heads or bounds.num_kv_heads
    [[nodiscard]] static UNIPREFILL_HOST_API block_lists carve(workspace& memory, const limits& bounds,
                                                               std::int32_t heads,
                                                               memory_space space) noexcept {
        block_lists made;
        made.space = space;
        made.block_rows = bounds.block_rows;
        made.max_segments = bounds.max_segments;
        made.num_heads = heads;
        made.capacity = most_blocks(bounds, heads);
        made.offsets = memory.take<std::int64_t>(std::int64_t{bounds.max_segments} * heads + 1);
        made.blocks = memory.take<std::int32_t>(made.capacity);
        return made;
    }
};

UNIPREFILL_END_NAMESPACE
