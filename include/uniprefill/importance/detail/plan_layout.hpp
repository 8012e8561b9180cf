// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the CUDA estimator's plan says of a segment, and where in the workspace its numbers lie. Plan and
/// sums are functions of host and device, so that tests run them without a device.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Query rows of a KV head are padded to this many: one matrix instruction's rows.
inline constexpr std::int32_t row_tile = 64;
/// Query rows whose denominators are summed together, by a warp or a thread block.
inline constexpr std::int32_t denominator_rows = 32;
/// Blocks of a segment that forced boundaries may cut: score kernels note their numbers in 16 bits.
inline constexpr std::int32_t most_cuts_of_a_segment = 32767;

/// What follows from G and the keys of a tile. A tile is keys that are multiplied at once; a slot is the
/// place of one number for each query row: a block, or a tile's part of a block that is larger than a tile.
struct cuda_tiling {
    std::int32_t block_rows = 64;
    std::int32_t tile_keys = 128;
    std::int32_t chunk_rows = 512; ///< query rows of a KV head that a thread block holds at once

    /// The one that needs the most numbers: the workspace is sized for it, whatever the element types.
    [[nodiscard]] static UNIPREFILL_API constexpr cuda_tiling largest(std::int32_t block_rows) noexcept {
        return {block_rows, 64, 256};
    }

    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t slot_keys() const noexcept {
        return block_rows < tile_keys ? block_rows : tile_keys;
    }
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t slots_of_a_block() const noexcept {
        return block_rows / slot_keys();
    }
};

/// A segment as the kernels see it. Its keys are the request's cached ones, then rows of the step from the
/// request's first to the segment's last; those before the segment's own are its context.
struct cuda_segment {
    std::int64_t context = 0;       ///< keys before the segment's first row
    std::int64_t cached = 0;        ///< of these, the first so many are in the cache
    std::int64_t first_tile = 0;    ///< of its work, lead, tiles and trail, among that of all segments
    std::int64_t first_stat = 0;    ///< of its rows, among those of all segments: [kv head][lane]
    std::int64_t first_partial = 0; ///< of its numbers: [slot][kv head][lane]
    std::int64_t first_block = 0;   ///< of its own blocks, among those of all segments
    std::int64_t out_block = 0;     ///< in the arrays of mass_view
    std::int32_t request = 0;
    std::int32_t request_row = 0; ///< packed, the first row of the request
    std::int32_t first_row = 0;   ///< packed
    std::int32_t rows = 0;
    std::int32_t num_observations = 0; ///< 0 where the segment isn't scored
    std::int32_t named = 0;            ///< whether the rows are listed in cuda_buffers::observations
    std::int32_t query_rows = 0;       ///< group heads * observations
    std::int32_t lanes = 0;            ///< query_rows, padded to row_tile
    std::int32_t context_tiles = 0;
    std::int32_t own_tiles = 0;
    std::int32_t context_slots = 0;
    std::int32_t own_slots = 0; ///< those of forced parts of cut blocks follow
    std::int32_t first_cut = 0; ///< in cuda_buffers::cut_blocks
    std::int32_t num_cuts = 0;  ///< blocks that a forced boundary may cut, ascending
    std::int32_t cut_slots = 0; ///< as many for each as a block has
    std::int32_t sink_rows = 0; ///< rows at positions below the sink
    std::int32_t tail_rows = 0;
    std::int32_t first_span = 0; ///< forced spans of the request
    std::int32_t end_span = 0;
    mass_fault fault = mass_fault::overflow;
    std::int32_t has_fault = 0;
    /// What work costs besides its tiles, in tiles, for each (KV head, chunk of query rows): queries have to
    /// be fetched before the first, and the last has keys that not every row sees.
    std::int32_t lead_tiles = 0;
    std::int32_t trail_tiles = 0;
    std::int32_t reserved = 0; ///< copies go by 8 bytes: all of them are written

    [[nodiscard]] UNIPREFILL_API std::int64_t slots() const noexcept {
        return std::int64_t{context_slots} + own_slots + cut_slots;
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t tiles() const noexcept { return context_tiles + own_tiles; }
    /// Of one (KV head, chunk of query rows), with what it costs besides.
    [[nodiscard]] UNIPREFILL_API std::int32_t cost() const noexcept {
        return lead_tiles + tiles() + trail_tiles;
    }
};

/// Running sums over segments.
struct plan_sums {
    std::int64_t tiles = 0;
    std::int64_t stats = 0;
    std::int64_t partials = 0;
    std::int64_t blocks = 0;
    std::int64_t cuts = 0;
    [[nodiscard]] friend UNIPREFILL_API plan_sums operator+(const plan_sums& a, const plan_sums& b) noexcept {
        return {a.tiles + b.tiles, a.stats + b.stats, a.partials + b.partials, a.blocks + b.blocks,
                a.cuts + b.cuts};
    }
    [[nodiscard]] friend UNIPREFILL_API plan_sums operator-(const plan_sums& a, const plan_sums& b) noexcept {
        return {a.tiles - b.tiles, a.stats - b.stats, a.partials - b.partials, a.blocks - b.blocks,
                a.cuts - b.cuts};
    }
};

/// The workspace, carved; importance_estimator::workspace_bytes() documents the sizes.
struct cuda_buffers {
    plan_sums* totals = nullptr;          // [1]
    cuda_segment* segments = nullptr;     // [S]
    std::int64_t* first_tiles = nullptr;  // [S + 1] cuda_segment::first_tile, close together
    std::int64_t* first_stats = nullptr;  // [S + 1]
    std::int64_t* first_blocks = nullptr; // [S + 1]
    std::int32_t* faulty = nullptr;       // [S] whether NaN or infinity was met
    std::int32_t* observations = nullptr; // [S][n] named rows, counted from their segment's first
    std::int32_t* cut_blocks = nullptr;   // [max_cuts]
    float* denominators = nullptr;        // [max_stats] log2 of a query row's softmax denominator
    float* partials = nullptr;            // [max_partials] log2 of the sum of a slot's 2^score
    std::int64_t max_stats = 0;
    std::int64_t max_partials = 0;
    std::int32_t max_cuts = 0;

    [[nodiscard]] static UNIPREFILL_HOST_API cuda_buffers carve(workspace& memory, const limits& bounds,
                                                                const cuda_tiling& tiling) noexcept {
        const auto smaller = [](std::int64_t a, std::int64_t b) { return a < b ? a : b; };
        const std::int64_t segments = bounds.max_segments;
        const std::int64_t rows = bounds.max_rows;
        const std::int64_t context = bounds.context_keys();
        // A segment's lanes: at most group * n rows, padded; of all segments together, at most group *
        // max_rows rows.
        const std::int64_t padded =
            (bounds.group_heads() * smaller(bounds.num_observations, rows) + row_tile - 1) / row_tile *
            row_tile;
        const std::int64_t scored = smaller(segments, rows);
        const std::int64_t all_lanes =
            smaller(scored * padded, bounds.group_heads() * rows + scored * (row_tile - 1));

        cuda_buffers made;
        made.max_cuts = static_cast<std::int32_t>(smaller(
            2 * segments + 2 * std::int64_t{bounds.max_forced_spans}, rows / bounds.block_rows + segments));
        made.max_stats = bounds.num_kv_heads * all_lanes;
        // Whole slots of own and context keys at full width, and for each segment one that isn't whole of
        // either.
        const std::int64_t whole = rows / tiling.slot_keys() + context / tiling.slot_keys() +
                                   std::int64_t{made.max_cuts} * tiling.slots_of_a_block();
        made.max_partials = bounds.num_kv_heads * (whole * padded + (context > 0 ? 2 : 1) * all_lanes);
        made.totals = memory.take<plan_sums>(1);
        made.segments = memory.take<cuda_segment>(segments);
        made.first_tiles = memory.take<std::int64_t>(segments + 1);
        made.first_stats = memory.take<std::int64_t>(segments + 1);
        made.first_blocks = memory.take<std::int64_t>(segments + 1);
        made.faulty = memory.take<std::int32_t>(segments);
        made.observations = memory.take<std::int32_t>(segments * bounds.num_observations);
        made.cut_blocks = memory.take<std::int32_t>(made.max_cuts);
        made.denominators = memory.take<float>(made.max_stats);
        made.partials = memory.take<float>(made.max_partials);
        return made;
    }
};

/// What the plan is made from.
struct cuda_plan_task {
    limits bounds;
    batch_view batch;
    cuda_tiling tiling;
    cuda_buffers buffers;
    std::int32_t ctas = 1; ///< thread blocks that share the tiles
};

/// The last index below @p count of which @p first_of(index) isn't beyond @p value, 0 where there is none.
/// First ones ascend.
template <class FirstOf>
[[nodiscard]] UNIPREFILL_API std::int32_t find_last(std::int32_t count, std::int64_t value,
                                                    FirstOf first_of) noexcept {
    std::int32_t begin = 0;
    std::int32_t end = count;
    while (end - begin > 1) {
        const std::int32_t middle = begin + (end - begin) / 2;
        if (first_of(middle) <= value) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}
/// The segment that has @p value, where @p firsts ascend from segment to segment.
[[nodiscard]] inline UNIPREFILL_API std::int32_t find_segment(const std::int64_t* firsts, std::int32_t count,
                                                              std::int64_t value) noexcept {
    return find_last(count, value, [firsts](std::int32_t index) { return firsts[index]; });
}

/// The row, counted from its segment's first, of an observation.
[[nodiscard]] inline UNIPREFILL_API std::int32_t observation_row(const cuda_buffers& buffers,
                                                                 const cuda_segment& what,
                                                                 std::int32_t segment, std::int32_t n,
                                                                 std::int32_t observation) noexcept {
    return what.named != 0 ? buffers.observations[std::int64_t{segment} * n + observation]
                           : what.rows - what.num_observations + observation;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
