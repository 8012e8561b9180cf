// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From verdicts to everything that a selection holds, each thread block for its own stretch of blocks.
#pragma once

#include <uniprefill/select/detail/cuda_block_team.cuh>
#include <uniprefill/select/detail/quick_decision.hpp>
#include <uniprefill/select/detail/team_decision.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The arrays of a selection, and how much of them is to be written.
struct selection_arrays {
    std::uint32_t* keep_bits = nullptr;
    std::int32_t* kept_to_old = nullptr;
    std::int32_t* old_to_kept = nullptr;
    std::int32_t* cu_seqlens = nullptr;
    std::int32_t* cu_segments = nullptr;
    segment_outcome* outcomes = nullptr;
    std::int64_t keep_words = 0;
    std::int32_t kept_bound = 0;
    std::int32_t words_of_cta = 1; ///< each thread block's stretch of keep_bits
    block_size stretch{};          ///< the blocks of that
    block_size fours{};            ///< fours of rows in a block, a last part included
};

/// A block whose rows are to be written.
struct block_place {
    std::int32_t first_row = 0;
    std::int32_t place = 0; ///< of its first kept row
    std::int32_t segment = 0;
    std::uint16_t rows = 0;
    std::uint16_t kept = 0;
};

/// What all threads of a thread block share while it writes. The places lie over the bins of its team.
template <class Team>
struct writer_memory {
    UNIPREFILL_HIDDEN static constexpr std::int32_t threads = Team::near_size();

    union {
        typename Team::memory team;
        block_place places[threads];
    };
    std::uint32_t sums[32];
    std::uint32_t kept_before[32]; ///< by warps
    std::uint32_t kept[32];

    static_assert(sizeof(block_place[threads]) <= sizeof(Team::memory::counts));
};

/// What becomes of block @p block of a segment, all but its place.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline block_place place_of(std::int32_t segment,
                                                                       const segment_blocks& blocks,
                                                                       const segment_verdict& verdict,
                                                                       std::int32_t block) {
    const block_fate fate = fate_of(verdict, blocks, block);
    return {blocks.rows_of(block).begin, 0, segment, static_cast<std::uint16_t>(fate.rows),
            static_cast<std::uint16_t>(fate.kept())};
}

/// Writes the rows of a selection. Made once in a kernel, by every thread.
template <class Team>
class row_writer {
    UNIPREFILL_HIDDEN static constexpr std::int32_t threads = Team::near_size();

  public:
    __device__ UNIPREFILL_HIDDEN row_writer(const step_view& step, const selection_arrays& out,
                                            writer_memory<Team>& memory)
        : step_(step)
        , out_(out)
        , memory_(memory)
        , thread_(static_cast<std::int32_t>(threadIdx.x))
        , slot_((thread_ + threads - 32) % threads) {}

    /// Of this thread block, where the step has one segment.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN block_stretch stretch() const {
        const auto cta = static_cast<std::int32_t>(blockIdx.x);
        const std::int32_t size = out_.stretch.rows;
        return {size * (cta - rank_in_cluster()), size * cta, cluster_ctas(), out_.stretch};
    }
    /// A thread's first block: its mass, which is loaded before it is needed, and what can be told of it
    /// before the cut is known.
    struct first_block {
        block_rank rank{};
        row_range rows{};
        std::int32_t free_rows = 0;
    };
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN first_block load_first() const {
        const std::int32_t block = static_cast<std::int32_t>(blockIdx.x) * out_.stretch.rows + slot_;
        first_block made;
        if (slot_ < out_.stretch.rows && block < step_.block.blocks(step_.batch.num_rows)) {
            made.rank.mass = static_cast<std::uint64_t>(step_.free_mass[block]);
        }
        return made;
    }
    __device__ UNIPREFILL_HIDDEN void look_at_first(const segment_blocks& blocks, first_block& first) const {
        if ((slot_ & ~31) < out_.stretch.rows) {
            look_at(blocks, static_cast<std::int32_t>(blockIdx.x) * out_.stretch.rows + slot_, first);
        }
    }
    /// Writes everything where the step has one segment, decided quickly.
    template <class Decision>
    __device__ UNIPREFILL_HIDDEN void run_quickly(const Decision& decision, first_block first) {
        const segment_blocks& blocks = decision.blocks();
        // Meanwhile one warp looks for places, most often alone.
        write_rest((blocks.count + 31) / 32, blocks.rows.end, decision.kept(), 1);
        const std::int32_t begin = static_cast<std::int32_t>(blockIdx.x) * out_.stretch.rows;
        std::int32_t place = decision.place();
        end_ = begin + out_.stretch.rows < blocks.count ? begin + out_.stretch.rows : blocks.count;
#pragma unroll 1
        for (std::int32_t from = begin; from < static_cast<std::int32_t>(end_); from += threads) {
            const std::int32_t block = from + slot_;
            block_place held;
            if (block < static_cast<std::int32_t>(end_)) {
                if (from > begin) {
                    first.rank.mass = static_cast<std::uint64_t>(blocks.free_mass[block]);
                }
                if (thread_ < 32 || from > begin) { // the first warp had to look for the bin
                    look_at(blocks, block, first);
                }
                held.first_row = first.rows.begin;
                held.rows = static_cast<std::uint16_t>(first.rows.size());
                held.kept = static_cast<std::uint16_t>(first.rows.size() -
                                                       decision.rows_that_go(first.rank, first.free_rows));
            }
            write_chunk(held, from, place, [&](const block_place& at, std::int32_t lane) {
                write_part(at, lane, decision.verdict(), blocks);
            });
        }
        write_only_segment(decision.verdict());
    }

    /// Writes everything where the step has one segment. @p decision: by a team of the whole cluster.
    template <class Decision>
    __device__ UNIPREFILL_HIDDEN void run_alone(Team& team, Decision& decision,
                                                const segment_verdict& verdict) {
        const row_range rows = rows_of_segment(step_.batch, 0);
        const std::int32_t count = step_.block.blocks(rows.size());
        const auto cut_off = [count](std::int64_t block) {
            return static_cast<std::int32_t>(block < count ? block : count);
        };
        const block_stretch blocks = stretch();
        const std::int32_t begin = cut_off(blocks.own);
        end_ = cut_off(std::int64_t{blocks.own} + out_.stretch.rows);
        tally mine;
        mine.rows = decision.kept_before(blocks.of_cluster);
        mine.bits = segment_is_in_order(step_.batch, 0) ? 0 : 1;
        team.sync(); // others may still look at this thread block's sums
        team.alone();
        // In a cluster the kept rows of each thread block's own blocks are counted before they are written.
        std::int32_t place = 0;
#pragma unroll 1
        for (std::int32_t round = Team::is_clustered ? 0 : 1; round < 2; ++round) {
            if (round == 1) {
                const tally sum = team.combine(mine, false);
                if (sum.bits != 0) {
                    keep_everything();
                    team.sync_cluster(); // others may still look at what this one found
                    return;
                }
                place = team.exchange(sum);
            }
#pragma unroll 1
            for (std::int32_t from = begin; from < end_; from += threads) {
                block_place held;
                if (from + slot_ < end_) {
                    held = place_of(0, decision.blocks(), verdict, from + slot_);
                }
                if (round == 0) {
                    mine.mass += held.kept;
                } else {
                    write_chunk(held, from, place, [&](const block_place& at, std::int32_t lane) {
                        write_part(at, lane, verdict, decision.blocks());
                    });
                }
            }
        }
        write_rest((count + 31) / 32, rows.end, verdict.kept);
        write_only_segment(verdict);
        team.leave();
    }

    /// Writes everything where another kernel has told verdicts, and the places of blocks in their segments.
    __device__ UNIPREFILL_HIDDEN void run(const segment_verdict* verdicts, const block_place* places) {
        const batch_view& batch = step_.batch;
        const auto begin = std::int64_t{blockIdx.x} * out_.stretch.rows;
        std::uint32_t kept = 0;
        std::uint32_t before = 0; // of segments that end before this thread block's stretch
        bool disorder = false;
#pragma unroll 1
        for (std::int32_t s = thread_; s < batch.num_segments; s += threads) {
            const auto of_segment = static_cast<std::uint32_t>(verdicts[s].kept);
            disorder |= !segment_is_in_order(batch, s);
            kept += of_segment;
            before += step_.block.offset(s + 1, batch.segment_end(s)) <= begin ? of_segment : 0;
        }
        row_range last{};
        std::int64_t entries = 0;
        if (batch.num_segments > 0) {
            last = rows_of_segment(batch, batch.num_segments - 1);
            entries =
                step_.block.offset(batch.num_segments - 1, last.begin) + step_.block.blocks(last.size());
        }
        kept = __reduce_add_sync(~0u, kept);
        before = __reduce_add_sync(~0u, before);
        if (thread_ % 32 == 0) {
            memory_.kept[thread_ / 32] = kept;
            memory_.kept_before[thread_ / 32] = before;
        }
        if (__syncthreads_or(disorder ? 1 : 0) != 0) {
            keep_everything();
            return;
        }
        end_ = begin + out_.stretch.rows < entries ? begin + out_.stretch.rows : entries;
        std::int32_t place = begin < end_ ? places[begin].place : 0;
        const auto lane = thread_ % 32;
        const auto total =
            static_cast<std::int32_t>(__reduce_add_sync(~0u, lane < threads / 32 ? memory_.kept[lane] : 0));
        place += static_cast<std::int32_t>(
            __reduce_add_sync(~0u, lane < threads / 32 ? memory_.kept_before[lane] : 0));
#pragma unroll 1
        for (std::int64_t from = begin; from < end_; from += threads) {
            const block_place held = from + slot_ < end_ ? places[from + slot_] : block_place{};
            write_chunk(held, from, place, [&](const block_place& at, std::int32_t lane) {
                const row_range rows = rows_of_segment(batch, at.segment);
                const segment_verdict verdict = verdicts[at.segment];
                write_part(at, lane, verdict, step_.blocks_of(at.segment, rows, verdict));
            });
        }
        write_rest((entries + 31) / 32, last.end, total);
        if (blockIdx.x == gridDim.x - 1) {
            write_segments(verdicts, total);
        }
    }

  private:
    __device__ UNIPREFILL_HIDDEN static void look_at(const segment_blocks& blocks, std::int32_t block,
                                                     first_block& first) {
        first.rank.order = blocks.order(block);
        first.rows = blocks.rows_of(block);
        first.free_rows = blocks.free_rows_outside_spans(block);
    }
    /// Writes what became of entries @p from to end_ - 1 of arrays laid out by block_offset(), or of as many
    /// of them as there are threads: each has one. @p place: of the first kept row.
    /// @p part(block, lane) writes the rows of a block of which only some stay, together with its warp.
    template <class Part>
    __device__ UNIPREFILL_HIDDEN void write_chunk(block_place held, std::int64_t from, std::int32_t& place,
                                                  Part part) {
        const auto left = static_cast<std::int32_t>(end_ - from < threads ? end_ - from : threads);
        const bool has_any = (slot_ & ~31) < left; // its whole warp alike
        const bool whole = held.rows > 0 && held.kept == held.rows;
        std::uint32_t sum_here = held.kept;
        if (left > 32) {
            std::uint32_t kept = 0;
            sum_here =
                block_prefix<threads>(held.kept, static_cast<unsigned>(slot_) / 32, memory_.sums, kept);
            held.place = place + static_cast<std::int32_t>(sum_here) - held.kept;
            place += static_cast<std::int32_t>(kept);
        } else if (has_any) { // the last ones
            held.place = place + static_cast<std::int32_t>(warp_prefix(sum_here)) - held.kept;
        }
        if (has_any) {
            const unsigned bits = __ballot_sync(~0u, whole);
            if (slot_ % 32 == 0) {
                out_.keep_bits[(from + slot_) / 32] = bits;
            }
            memory_.places[slot_] = held;
        }
        __syncthreads();
        write_whole_blocks(left);
        const bool in_bound = held.place + held.kept <= out_.kept_bound;
        const bool by_rows = held.kept > 0 && !(whole && in_bound);
        for (unsigned rest = __ballot_sync(~0u, by_rows); rest != 0; rest &= rest - 1) {
            part(memory_.places[(slot_ & ~31) + __ffs(static_cast<int>(rest)) - 1], thread_ % 32);
        }
        if (from + threads < end_) {
            __syncthreads();
        }
    }

    __device__ UNIPREFILL_HIDDEN void write_row(std::int32_t row, bool stays, std::int32_t place) const {
        stays = stays && place < out_.kept_bound;
        out_.old_to_kept[row] = stays ? place : -1;
        if (stays) {
            out_.kept_to_old[place] = row;
        }
    }

    /// Writes the rows of those of the first @p count blocks in shared memory that stay or go as a whole,
    /// four at a time.
    __device__ UNIPREFILL_HIDDEN void write_whole_blocks(std::int32_t count) const {
        const block_size& fours = out_.fours;
        const std::int32_t items = count * fours.rows;
#pragma unroll 2
        for (std::int32_t item = thread_; item < items; item += threads) {
            const std::int32_t i = fours.whole(item);
            const std::int32_t r = 4 * (item - i * fours.rows);
            const block_place at = memory_.places[i];
            const bool dropped = at.kept == 0;
            const bool in_bound = at.place + at.rows <= out_.kept_bound;
            if (r < at.rows && (dropped || (at.kept == at.rows && in_bound))) {
                const std::int32_t here = at.rows - r < 4 ? at.rows - r : 4;
                write_four(out_.old_to_kept, at.first_row + r, dropped ? -1 : at.place + r, dropped ? 0 : 1,
                           here);
                if (!dropped) {
                    write_four(out_.kept_to_old, at.place + r, at.first_row + r, 1, here);
                }
            }
        }
    }

    /// Writes @p count numbers, at most four, from @p value on.
    __device__ UNIPREFILL_HIDDEN static void write_four(std::int32_t* to, std::int32_t at, std::int32_t value,
                                                        std::int32_t step, std::int32_t count) {
        to += at;
        if (count == 4 && reinterpret_cast<std::uintptr_t>(to) % sizeof(int4) == 0) {
            *reinterpret_cast<int4*>(to) = int4{value, value + step, value + 2 * step, value + 3 * step};
            return;
        }
#pragma unroll
        for (std::int32_t i = 0; i < 4; ++i) {
            if (i < count) {
                to[i] = value + i * step;
            }
        }
    }

    /// Writes the rows of a block of which only some stay. Together with its warp.
    __device__ UNIPREFILL_HIDDEN void write_part(const block_place& at, std::int32_t lane,
                                                 const segment_verdict& verdict,
                                                 const segment_blocks& seg) const {
        const std::int32_t block = step_.block.whole(at.first_row - seg.rows.begin);
        const block_fate fate = fate_of(verdict, seg, block);
        const unsigned below = (1u << lane) - 1;
        std::int32_t free_before = 0;
        std::int32_t place = at.place;
#pragma unroll 1
        for (std::int32_t from = 0; from < at.rows; from += 32) {
            const std::int32_t row = at.first_row + from + lane;
            const bool ours = from + lane < at.rows;
            const bool forced = !ours || seg.forced.holds(seg.rows_of(block), row);
            const unsigned free_rows = __ballot_sync(~0u, !forced);
            const std::int32_t free_here = free_before + __popc(free_rows & below);
            const bool stays = ours && fate.keeps(forced, free_here, from + lane - free_here);
            const unsigned kept = __ballot_sync(~0u, stays);
            if (ours) {
                write_row(row, stays, place + __popc(kept & below));
            }
            free_before += __popc(free_rows);
            place += __popc(kept);
        }
    }

    /// What lies beyond the blocks, the rows and the kept rows of the step.
    /// By all threads but those of the first @p left_out warps' slots.
    __device__ UNIPREFILL_HIDDEN void write_rest(std::int64_t words, std::int32_t rows, std::int32_t kept,
                                                 std::int32_t left_out = 0) const {
        // Below 2^32: what is counted is below 2^31, and so is the grid.
        const std::int32_t mine = slot_ - 32 * left_out;
        if (mine < 0) {
            return;
        }
        const auto working = static_cast<std::uint32_t>(threads - 32 * left_out);
        const std::uint32_t each = gridDim.x * working;
        const std::uint32_t first = blockIdx.x * working + static_cast<std::uint32_t>(mine);
#pragma unroll 1
        for (std::uint32_t i = static_cast<std::uint32_t>(words) + first;
             i < static_cast<std::uint32_t>(out_.keep_words); i += each) {
            out_.keep_bits[i] = 0;
        }
#pragma unroll 1
        for (std::uint32_t i = static_cast<std::uint32_t>(rows) + first;
             i < static_cast<std::uint32_t>(step_.batch.num_rows); i += each) {
            out_.old_to_kept[i] = -1;
        }
#pragma unroll 1
        for (std::uint32_t i = static_cast<std::uint32_t>(kept & ~3) + 4 * first;
             i < static_cast<std::uint32_t>(out_.kept_bound); i += 4 * each) {
            const auto from = static_cast<std::int32_t>(i) > kept ? static_cast<std::int32_t>(i) : kept;
            const std::int32_t left = out_.kept_bound - from;
            const std::int32_t here = 4 - (from & 3);
            write_four(out_.kept_to_old, from, -1, 0, left < here ? left : here);
        }
    }

    /// Offsets and outcomes. For one thread block.
    __device__ UNIPREFILL_HIDDEN void write_segments(const segment_verdict* verdicts,
                                                     std::int32_t total) const {
        const batch_view& batch = step_.batch;
        std::int32_t before = 0;
#pragma unroll 1
        for (std::int32_t from = 0; from < batch.num_segments; from += threads) {
            const std::int32_t s = from + thread_;
            const bool ours = s < batch.num_segments;
            const std::int32_t kept = ours ? verdicts[s].kept : 0;
            std::uint32_t sum = 0;
            __syncthreads(); // the last round's readers
            const std::int32_t end = before + static_cast<std::int32_t>(block_prefix<threads>(
                                                  static_cast<std::uint32_t>(kept),
                                                  static_cast<unsigned>(thread_) / 32, memory_.sums, sum));
            before += static_cast<std::int32_t>(sum);
            if (ours) {
                write_segment(s, end - kept, end, verdicts[s]);
            }
        }
        if (thread_ == 0) {
            write_ends(total);
        }
    }
    /// The same of the only segment.
    __device__ UNIPREFILL_HIDDEN void write_only_segment(const segment_verdict& verdict) const {
        if (blockIdx.x == gridDim.x - 1 && thread_ == threads - 1) {
            write_segment(0, 0, verdict.kept, verdict);
            write_ends(verdict.kept);
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t bounded(std::int32_t place) const {
        return place < out_.kept_bound ? place : out_.kept_bound;
    }
    /// The outcome of segment @p s, whose kept rows are @p begin to @p end - 1, and where it begins.
    __device__ UNIPREFILL_HIDDEN void write_segment(std::int32_t s, std::int32_t begin, std::int32_t end,
                                                    const segment_verdict& verdict) const {
        const batch_view& batch = step_.batch;
        segment_outcome outcome = verdict.outcome(rows_of_segment(batch, s).size());
        if (end > out_.kept_bound) { // the engine promised fewer
            outcome.kept = bounded(end) - bounded(begin);
            outcome.reason = keep_reason::rerun_dense;
        }
        out_.outcomes[s] = outcome;
        out_.cu_segments[s] = bounded(begin);
        const std::int32_t request = batch.request_of(s);
        if (s == 0 || batch.request_of(s - 1) != request) {
            out_.cu_seqlens[request] = bounded(begin);
        }
    }
    /// Where the last segment and the last request end.
    __device__ UNIPREFILL_HIDDEN void write_ends(std::int32_t total) const {
        out_.cu_segments[step_.batch.num_segments] = bounded(total);
        out_.cu_seqlens[step_.batch.num_requests] = bounded(total);
    }

    /// Where the segments are in no order: every row stays where it is, offsets rise at least, no bit is set.
    __device__ UNIPREFILL_HIDDEN void keep_everything() const {
        const batch_view& batch = step_.batch;
#pragma unroll 1
        for (std::int64_t i = std::int64_t{blockIdx.x} * threads + thread_; i < batch.num_rows;
             i += std::int64_t{gridDim.x} * threads) {
            write_row(static_cast<std::int32_t>(i), true, static_cast<std::int32_t>(i));
        }
        write_rest(0, batch.num_rows, batch.num_rows);
        if (blockIdx.x != 0) {
            return;
        }
        const std::int32_t end = batch.num_rows < out_.kept_bound ? batch.num_rows : out_.kept_bound;
        if (thread_ == 0) {
            write_rising(batch.cu_seqlens, batch.num_requests, end, out_.cu_seqlens);
        }
        if (thread_ == threads - 1) {
            write_rising(batch.cu_segments != nullptr ? batch.cu_segments : batch.cu_seqlens,
                         batch.num_segments, end, out_.cu_segments);
        }
        __syncthreads();
#pragma unroll 1
        for (std::int32_t s = thread_; s < batch.num_segments; s += threads) {
            segment_outcome outcome;
            outcome.rows = outcome.kept = out_.cu_segments[s + 1] - out_.cu_segments[s];
            outcome.reason = end < batch.num_rows ? keep_reason::rerun_dense : keep_reason::invalid;
            out_.outcomes[s] = outcome;
        }
    }

    /// Copies @p count offsets and ends with @p end, none below the one before or above the end.
    __device__ UNIPREFILL_HIDDEN static void write_rising(const std::int32_t* offsets, std::int32_t count,
                                                          std::int32_t end, std::int32_t* out) {
        std::int32_t least = 0;
#pragma unroll 1
        for (std::int32_t i = 0; i < count; ++i) {
            least = i == 0 ? 0 : clamped(offsets[i], least, end);
            out[i] = least;
        }
        out[count] = end;
    }

    const step_view& step_;
    const selection_arrays& out_;
    writer_memory<Team>& memory_;
    std::int32_t thread_;
    std::int32_t
        slot_; ///< which of as many blocks as there are threads: the first warp, busy longest, has the last
    std::int64_t end_ =
        0; ///< of this thread block's stretch, in entries of arrays laid out by block_offset()
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
