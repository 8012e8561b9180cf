// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The device's own plan of a run: which segments are scored, how much work each is, and where its numbers
/// go. The host knows upper bounds only.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Query rows of a KV head are padded to this many: one matrix instruction's rows.
inline constexpr std::int32_t row_tile = 64;
/// Query rows whose denominators one thread block sums.
inline constexpr std::int32_t denominator_rows = 32;

/// What follows from G and the keys of a tile. A tile is keys that are multiplied at once; a slot is the
/// place of one number for each query row: a block, or a tile's part of a block that is larger than a tile.
struct cuda_tiling {
    std::int32_t block_rows = 64;
    std::int32_t tile_keys = 128;
    std::int32_t chunk_rows = 512; ///< query rows of a KV head that a thread block holds at once

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
    std::int64_t first_tile = 0;    ///< of its work, lead tiles and tiles, among that of all segments
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
    /// What it costs a thread block to change to another (KV head, chunk of query rows), in tiles: queries
    /// have to be fetched, and the last tile has keys that not every row sees.
    std::int32_t lead_tiles = 0;

    [[nodiscard]] UNIPREFILL_API std::int64_t slots() const noexcept {
        return std::int64_t{context_slots} + own_slots + cut_slots;
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t tiles() const noexcept { return context_tiles + own_tiles; }
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
};

/// Makes the plan of one segment; the running sums are filled in by the caller.
class UNIPREFILL_HIDDEN segment_planner {
  public:
    /// @param plausible false: refuse it
    UNIPREFILL_API segment_planner(const cuda_plan_task& task, std::int32_t segment, bool plausible) noexcept
        : task_(task)
        , batch_(task.batch)
        , segment_(segment)
        , plausible_(plausible) {}

    /// @param listed [n] room for named observation rows
    [[nodiscard]] UNIPREFILL_API cuda_segment plan(std::int32_t* listed) noexcept {
        const limits& bounds = task_.bounds;
        const std::int32_t begin = clamp(batch_.segment_begin(segment_), 0, batch_.num_rows);
        const std::int32_t end = clamp(batch_.segment_end(segment_), begin, batch_.num_rows);
        made_.first_row = begin;
        made_.rows = end - begin;
        made_.request = batch_.request_of(segment_);
        made_.out_block = block_offset(segment_, begin, bounds.block_rows);
        if (made_.request < 0 || made_.request >= batch_.num_requests) {
            made_.request = 0;
            return refused();
        }
        // Everything is loaded before anything is judged, so that the loads don't wait for each other.
        const request_options options = batch_.options_of(made_.request);
        made_.request_row = batch_.cu_seqlens[made_.request];
        made_.cached = batch_.cached_len(made_.request);
        const bool is_prefill = batch_.is_prefill(made_.request);
        if (made_.rows > 0) {
            first_position_ = batch_.positions[begin];
            last_position_ = batch_.positions[end - 1];
        }
        if (!is_prefill || options.enabled == 0) {
            return made_;
        }
        if (!plausible_ || begin != batch_.segment_begin(segment_) || end != batch_.segment_end(segment_) ||
            made_.cached < 0 || made_.cached > bounds.max_cached_tokens || made_.request_row < 0 ||
            made_.request_row > begin || !find_spans()) {
            return refused();
        }
        if (made_.rows == 0 || made_.rows < options.min_length) {
            return made_;
        }
        made_.sink_rows = options.sink <= first_position_ ? 0
                          : options.sink > last_position_
                              ? made_.rows
                              : bracketed_row_at(batch_.positions, begin, end, options.sink) - begin;
        made_.tail_rows = clamp(options.tail, 0, made_.rows);
        if (!has_free_row()) {
            return made_;
        }
        list_observations(listed);
        if (made_.num_observations == 0) {
            made_.has_fault = 1;
            made_.fault = mass_fault::unscored;
            return made_;
        }
        const cuda_tiling& tiling = task_.tiling;
        made_.context = made_.cached + begin - made_.request_row;
        made_.query_rows = made_.num_observations * bounds.group_heads();
        made_.lanes = (made_.query_rows + row_tile - 1) / row_tile * row_tile;
        made_.context_tiles = parts(made_.context, tiling.tile_keys);
        made_.own_tiles = parts(made_.rows, tiling.tile_keys);
        // Not worth a split where there are few tiles.
        made_.lead_tiles = made_.tiles() >= 128 ? 4 : 0;
        made_.context_slots = parts(made_.context, tiling.slot_keys());
        made_.own_slots = parts(made_.rows, tiling.slot_keys());
        std::int32_t last_cut = -1;
        made_.num_cuts = visit_cuts([&](std::int32_t, std::int32_t block) { last_cut = block; });
        made_.cut_slots = made_.num_cuts * tiling.slots_of_a_block();
        // The segment's last block may end before its last slots: no tile fills those of its forced part.
        const std::int32_t missing = (last_cut + 1) * tiling.slots_of_a_block() - made_.own_slots;
        made_.cut_slots -= missing > 0 ? missing : 0;
        return made_;
    }

    /// Calls @p visit(index, block) for each own block that a forced boundary cuts, ascending. @return how
    /// many.
    template <class Visit>
    UNIPREFILL_API std::int32_t visit_cuts(Visit visit) const noexcept {
        const std::int32_t begin = made_.first_row;
        const std::int32_t end = begin + made_.rows;
        const std::int32_t tail_begin = end - made_.tail_rows;
        std::int32_t count = 0;
        std::int32_t last_block = -1;
        const auto boundary = [&](std::int32_t row) {
            const std::int32_t own = row - begin;
            const std::int32_t block = own / task_.tiling.block_rows;
            if (own > 0 && row < end && own % task_.tiling.block_rows != 0 && block > last_block) {
                visit(count++, block);
                last_block = block;
            }
        };
        boundary(begin + made_.sink_rows);
        bool tail_is_due = true;
        for (std::int32_t i = made_.first_span; i < made_.end_span; ++i) {
            const position_span span = batch_.forced.spans[i];
            const std::int32_t from = bracketed_row_at(batch_.positions, begin, end, span.begin);
            const std::int32_t to = bracketed_row_at(batch_.positions, from, end, span.end);
            if (tail_is_due && tail_begin <= from) {
                boundary(tail_begin);
                tail_is_due = false;
            }
            boundary(from);
            if (tail_is_due && tail_begin <= to) {
                boundary(tail_begin);
                tail_is_due = false;
            }
            boundary(to);
        }
        if (tail_is_due) {
            boundary(tail_begin);
        }
        return count;
    }

  private:
    [[nodiscard]] static UNIPREFILL_API std::int32_t clamp(std::int32_t value, std::int32_t low,
                                                           std::int32_t high) noexcept {
        return value < low ? low : value > high ? high : value;
    }
    [[nodiscard]] static UNIPREFILL_API std::int32_t parts(std::int64_t whole, std::int32_t part) noexcept {
        return static_cast<std::int32_t>((whole + part - 1) / part);
    }
    [[nodiscard]] UNIPREFILL_API cuda_segment refused() noexcept {
        made_.has_fault = 1;
        made_.fault = mass_fault::overflow;
        return made_;
    }

    /// @return false where the offsets make no sense.
    [[nodiscard]] UNIPREFILL_API bool find_spans() noexcept {
        if (batch_.forced.offsets == nullptr) {
            return true;
        }
        made_.first_span = batch_.forced.offsets[made_.request];
        made_.end_span = batch_.forced.offsets[made_.request + 1];
        const bool good = made_.first_span >= 0 && made_.first_span <= made_.end_span &&
                          made_.end_span <= task_.bounds.max_forced_spans;
        made_.end_span = good ? made_.end_span : made_.first_span;
        return good;
    }

    [[nodiscard]] UNIPREFILL_API bool has_free_row() const noexcept {
        const std::int32_t begin = made_.first_row;
        const std::int32_t end = begin + made_.rows - made_.tail_rows;
        std::int32_t covered = begin + made_.sink_rows;
        for (std::int32_t i = made_.first_span; i < made_.end_span && covered < end; ++i) {
            const position_span span = batch_.forced.spans[i];
            if (bracketed_row_at(batch_.positions, begin, end, span.begin) > covered) {
                return true;
            }
            const std::int32_t to = bracketed_row_at(batch_.positions, begin, end, span.end);
            covered = to > covered ? to : covered;
        }
        return covered < end;
    }

    UNIPREFILL_API void list_observations(std::int32_t* listed) noexcept {
        const std::int32_t n = task_.bounds.num_observations;
        const span_lists& named = batch_.observed;
        std::int32_t first = 0;
        std::int32_t last = 0;
        if (named.offsets != nullptr) {
            first = named.offsets[made_.request];
            last = named.offsets[made_.request + 1];
        }
        // Offsets that make no sense count as none: which rows observe is a choice, not a promise.
        if (first >= last || first < 0 || last > task_.bounds.max_forced_spans) {
            made_.num_observations = made_.rows < n ? made_.rows : n;
            return;
        }
        const std::int32_t begin = made_.first_row;
        const std::int32_t end = begin + made_.rows;
        std::int32_t count = 0;
        for (std::int32_t i = last; i > first && count < n; --i) {
            const std::int32_t from =
                bracketed_row_at(batch_.positions, begin, end, named.spans[i - 1].begin);
            const std::int32_t to = bracketed_row_at(batch_.positions, from, end, named.spans[i - 1].end);
            for (std::int32_t row = to; row > from && count < n; --row) {
                listed[count++] = row - 1 - begin;
            }
        }
        for (std::int32_t low = 0, high = count - 1; low < high; ++low, --high) {
            const std::int32_t swapped = listed[low];
            listed[low] = listed[high];
            listed[high] = swapped;
        }
        made_.named = 1;
        made_.num_observations = count;
    }

    const cuda_plan_task& task_;
    const batch_view& batch_;
    cuda_segment made_{};
    std::int32_t segment_;
    bool plausible_;
    std::int32_t first_position_ = 0;
    std::int32_t last_position_ = 0;
};

inline constexpr std::int32_t plan_threads = 256;

/// The sums of the threads before this one; @p all of all threads. Call with whole warps.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline plan_sums
sums_before(const plan_sums& mine, plan_sums (&of_warps)[plan_threads / 32], plan_sums& all) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
    plan_sums sums = mine;
#pragma unroll 1
    for (std::int32_t distance = 1; distance < 32; distance *= 2) {
        const auto before = [&](std::int64_t& sum) {
            const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
            sum += lane >= distance ? other : 0;
        };
        before(sums.tiles);
        before(sums.stats);
        before(sums.partials);
        before(sums.blocks);
        before(sums.cuts);
    }
    if (lane == 31) {
        of_warps[warp] = sums;
    }
    __syncthreads();
    all = plan_sums{};
    for (std::int32_t w = 0; w < static_cast<std::int32_t>(blockDim.x / 32); ++w) {
        if (w == warp) {
            sums = all + sums;
        }
        all = all + of_warps[w];
    }
    __syncthreads();
    return sums - mine;
}

/// Plans all segments; one thread block, of whole warps.
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(plan_threads) plan_kernel(const cuda_plan_task task) {
    __shared__ plan_sums of_warps[plan_threads / 32];
    const auto threads = static_cast<std::int32_t>(blockDim.x);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const cuda_buffers& buffers = task.buffers;
    const std::int32_t count = task.batch.num_segments;
    // Ranges that overlap would make of every later stage a guess: where offsets fall, no segment is scored.
    bool ascending = true;
    for (std::int32_t s = static_cast<std::int32_t>(threadIdx.x); s < count; s += threads) {
        ascending = ascending && task.batch.segment_begin(s) <= task.batch.segment_end(s);
    }
    ascending = __syncthreads_and(ascending ? 1 : 0) != 0;
    plan_sums before{};
    for (std::int32_t first = 0; first < count; first += threads) {
        const std::int32_t index = first + static_cast<std::int32_t>(threadIdx.x);
        segment_planner planner(task, index, ascending);
        cuda_segment made{};
        plan_sums mine{};
        if (index < count) {
            made = planner.plan(buffers.observations + std::int64_t{index} * task.bounds.num_observations);
            const std::int64_t kv_heads = task.bounds.num_kv_heads;
            const std::int64_t chunks = (made.lanes + task.tiling.chunk_rows - 1) / task.tiling.chunk_rows;
            mine.tiles = kv_heads * chunks * (made.lead_tiles + made.tiles());
            mine.stats = kv_heads * made.lanes;
            mine.partials = made.slots() * mine.stats;
            mine.blocks = num_blocks(made.rows, task.tiling.block_rows);
            mine.cuts = made.num_cuts;
        }
        plan_sums all;
        const plan_sums sums = before + sums_before(mine, of_warps, all);
        if (index < count) {
            made.first_tile = sums.tiles;
            made.first_stat = sums.stats;
            made.first_partial = sums.partials;
            made.first_block = sums.blocks;
            made.first_cut = static_cast<std::int32_t>(sums.cuts);
            if (made.num_observations > 0 &&
                (sums.partials + mine.partials > buffers.max_partials ||
                 sums.stats + mine.stats > buffers.max_stats || sums.cuts + mine.cuts > buffers.max_cuts)) {
                made.has_fault = 1;
                made.fault = mass_fault::overflow;
                made.num_observations = 0;
                made.num_cuts = 0;
            }
            if (made.num_cuts > 0) {
                planner.visit_cuts([&](std::int32_t cut, std::int32_t block) {
                    buffers.cut_blocks[made.first_cut + cut] = block;
                });
            }
            buffers.segments[index] = made;
            buffers.first_tiles[index] = made.first_tile;
            buffers.first_stats[index] = made.first_stat;
            buffers.first_blocks[index] = made.first_block;
            buffers.faulty[index] = 0;
        }
        before = before + all;
    }
    if (threadIdx.x == 0) {
        *buffers.totals = before;
        buffers.first_tiles[count] = before.tiles;
        buffers.first_stats[count] = before.stats;
        buffers.first_blocks[count] = before.blocks;
    }
}

/// The last index below @p count whose entry isn't beyond @p value. Entries ascend, the first is 0.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t
find_segment(const std::int64_t* firsts, std::int32_t count, std::int64_t value) {
    std::int32_t begin = 0;
    std::int32_t end = count;
    while (end - begin > 1) {
        const std::int32_t middle = begin + (end - begin) / 2;
        if (firsts[middle] <= value) {
            begin = middle;
        } else {
            end = middle;
        }
    }
    return begin;
}

/// The row, counted from its segment's first, of an observation.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t
observation_row(const cuda_buffers& buffers, const cuda_segment& what, std::int32_t segment, std::int32_t n,
                std::int32_t observation) {
    return what.named != 0 ? buffers.observations[std::int64_t{segment} * n + observation]
                           : what.rows - what.num_observations + observation;
}

/// Whether a row of a segment, counted from its first, is forced.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline bool is_forced(const batch_view& batch,
                                                                 const cuda_segment& what, std::int32_t row) {
    if (row < what.sink_rows || row >= what.rows - what.tail_rows) {
        return true;
    }
    if (what.first_span == what.end_span) {
        return false;
    }
    // The first span that ends beyond the row: ends ascend, as spans are sorted and disjoint.
    const std::int32_t position = batch.positions[what.first_row + row];
    std::int32_t begin = what.first_span;
    std::int32_t end = what.end_span;
    while (begin < end) {
        const std::int32_t middle = begin + (end - begin) / 2;
        if (batch.forced.spans[middle].end <= position) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin < what.end_span && batch.forced.spans[begin].begin <= position;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
