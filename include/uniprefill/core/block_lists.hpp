// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which blocks of keys each head reads: what select writes, from masses by head or for each block of query
/// rows, and attention reads.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What became of the lists by query block of a step.
struct block_list_report {
    std::int64_t wanted = 0;    ///< blocks that all lists name together, those without room counted
    std::int64_t unfitting = 0; ///< lists that had no room in `blocks`, and so read everything
    std::int64_t untrusted = 0; ///< lists whose scores couldn't be trusted, and so read everything
};

/// Lists of blocks in one array: one for each (segment, head) of a step or, where `query_rows` is set, one
/// for each (block of query rows, head).
///
/// A block is G rows of a segment, counted from its first, as masses have it: rows that enter the layer,
/// whose keys the layer stores, whether a decision drops them afterwards or not. The query of a row reads the
/// key of a row not after it if that row's block is in the list, or is not before the first block with a
/// position inside the query's window of `window` positions (its own included). Keys before the segment's
/// first row, cached or not, are read by every query.
///
/// What a query reads follows from its own position and its list: not from other queries, packing
/// or tiles. But lists follow from the segment's end, or from that of its query block: so do, from the next
/// layer on, keys of all its rows (see page_signature.hpp, if they are shared). Lists of segments hold for
/// any layer whose segments have the same rows.
///
/// *Lists by query block.* Query block j of a segment is its query rows j * query_rows to (j + 1) *
/// query_rows - 1, counted among those that have queries: lists hold for the rows that were kept when they
/// were made. Its lists are numbers [query_block_place(segment, first kept row, query_rows) + j][head];
/// numbers that no query block has are empty lists. A list whose offset is negative (`~` of where it begins)
/// names no block and reads everything: what the room of `blocks` doesn't hold, and what can't be trusted.
/// Whether a list finds room hangs on the lists before it: where there isn't room for all, whether a query
/// reads everything follows from what else is in the step.
struct block_lists {
    memory_space space = memory_space::host;
    std::int32_t block_rows = 0; ///< G
    std::int32_t window = 0; ///< positions; 0: no window, the lists alone, which may leave a query nothing
    std::int32_t max_segments = 0; ///< that `offsets` has room for
    std::int32_t num_segments = 0;
    std::int32_t num_heads = 0; ///< lists of a segment: one for each query head, or for each KV head
    std::int64_t* offsets =
        nullptr;                    // [segments or query blocks][num_heads], and one more: places in `blocks`
    std::int32_t* blocks = nullptr; // [capacity] ascending in each list
    std::int64_t capacity = 0;
    std::int32_t query_rows = 0;         ///< query rows of a list; 0: all of a segment
    std::int64_t max_query_blocks = 0;   ///< that `offsets` has room for, where query_rows is set
    block_list_report* report = nullptr; ///< of lists by query block; null: not wanted

    /// Blocks that all lists of a step within @p bounds hold at most.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t most_blocks(const limits& bounds,
                                                                           std::int32_t heads) noexcept {
        return bounds.max_blocks() * heads;
    }
    /// The same of lists by query block, @p query_rows rows each: it grows with the square of the rows.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t
    most_blocks(const limits& bounds, std::int32_t heads, std::int32_t query_rows) noexcept {
        return most_query_blocks(bounds, query_rows) * heads *
               (std::int64_t{bounds.max_rows} / bounds.block_rows + 1);
    }
    /// Query blocks of a step within @p bounds, numbers that none has counted.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t
    most_query_blocks(const limits& bounds, std::int32_t query_rows) noexcept {
        return std::int64_t{bounds.max_rows} / query_rows + bounds.max_segments;
    }
    /// The number of a segment's first query block, whose first query is kept row @p first_kept.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t
    query_block_place(std::int32_t segment, std::int32_t first_kept, std::int32_t query_rows) noexcept {
        return std::int64_t{first_kept} / query_rows + segment;
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
    /// Carves the arrays of lists by query block.
    /// @param query_rows query rows of a list, >= 1. With heads of a list together best a multiple of the
    ///                   rows that attention packs into a tile (on compute capability 9.0: 128, or 192 where
    ///                   head_dim is 64).
    /// @param capacity   blocks that there is room for; most_blocks() is always enough. Lists are given room
    ///                   in the order of their numbers, and from the first on that has none, those that name
    ///                   a block read everything.
    [[nodiscard]] static UNIPREFILL_HOST_API block_lists carve(workspace& memory, const limits& bounds,
                                                               std::int32_t heads, memory_space space,
                                                               std::int32_t query_rows,
                                                               std::int64_t capacity) noexcept {
        block_lists made;
        made.space = space;
        made.block_rows = bounds.block_rows;
        made.max_segments = bounds.max_segments;
        made.num_heads = heads;
        made.query_rows = query_rows;
        made.max_query_blocks = most_query_blocks(bounds, query_rows);
        made.capacity = capacity;
        made.offsets = memory.take<std::int64_t>(made.max_query_blocks * heads + 1);
        made.blocks = memory.take<std::int32_t>(capacity);
        made.report = memory.take<block_list_report>(1);
        return made;
    }

    /// One list as it is read.
    struct entries {
        std::int64_t begin = 0; ///< in `blocks`
        std::int64_t count = 0;
        bool everything = false; ///< no list: every key that a query sees is read
    };
    /// List @p index, from offsets that make sense.
    [[nodiscard]] UNIPREFILL_API entries list(std::int64_t index) const noexcept {
        const std::int64_t begin = offsets[index];
        if (query_rows > 0 && begin < 0) {
            return {~begin, 0, true};
        }
        return {begin, place_of(offsets[index + 1]) - begin, false};
    }
    /// Where in `blocks` an offset points to, whether its list reads everything or not.
    [[nodiscard]] UNIPREFILL_API std::int64_t place_of(std::int64_t offset) const noexcept {
        return query_rows > 0 && offset < 0 ? ~offset : offset;
    }
};

UNIPREFILL_END_NAMESPACE
