// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From verdicts to everything that a selection holds, each thread block for its own stretch of blocks.
#pragma once

#include <uniprefill/select/detail/cuda_block_team.cuh>
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
struct writer_memory {
    union {
        block_team_memory team;
        block_place places[select_threads];
    };
    std::int32_t sums[32];
    std::int32_t segments[2]; ///< of the first block of the cluster, and of this thread block
};
static_assert(sizeof(block_place[select_threads]) <= offsetof(block_team_memory, of_warps));

/// Writes the rows of a selection. Made once in a kernel, by every thread.
class row_writer {
  public:
    __device__ UNIPREFILL_HIDDEN row_writer(const step_view& step, const selection_arrays& out,
                                            const segment_verdict* verdicts, writer_memory& memory)
        : step_(step)
        , out_(out)
        , verdicts_(verdicts)
        , memory_(memory)
        , thread_(static_cast<std::int32_t>(threadIdx.x))
        , thread_of_grid_(std::int64_t{blockIdx.x} * select_threads + threadIdx.x)
        , threads_of_grid_(std::int64_t{gridDim.x} * select_threads) {}

    /// Call this, and then __syncthreads(), before run().
    __device__ UNIPREFILL_HIDDEN static void clear(writer_memory& memory) {
        if (threadIdx.x == 0) { // segments in no order may leave them as they are
            memory.segments[0] = memory.segments[1] = 0;
        }
    }

    /// @p team: the thread block's, alone. Reads the verdicts of all segments.
    __device__ UNIPREFILL_HIDDEN void run(block_team& team) {
        const batch_view& batch = step_.batch;
        const std::int32_t last = batch.num_segments - 1;
        const row_range last_rows = last >= 0 ? rows_of_segment(batch, last) : row_range{};
        const std::int64_t blocks =
            last >= 0 ? step_.block.offset(last, last_rows.begin) + step_.block.blocks(last_rows.size()) : 0;
        const std::int64_t words = (blocks + 31) / 32;
        const std::int64_t words_of_cta = (words + gridDim.x - 1) / gridDim.x;
        const auto first_word = [&](std::int64_t cta) {
            return cta * words_of_cta < words ? cta * words_of_cta : words;
        };
        const std::int64_t begin = 32 * first_word(blockIdx.x);
        const std::int64_t end = 32 * first_word(std::int64_t{blockIdx.x} + 1);

        // Kept rows before this cluster's blocks: of earlier segments, and of the segment that the first of
        // these blocks belongs to, by shares of the cluster's threads. Kept rows of all segments, and of this
        // thread block's own blocks. Whether segments are in order; if not, the numbers don't matter.
        tally mine;
        block_place held;
        if (last >= 0) {
            const std::int64_t first =
                32 * first_word(static_cast<std::int32_t>(blockIdx.x) - rank_in_cluster());
            const bool leads = rank_in_cluster() == 0;
#pragma unroll 1
            for (std::int32_t s = thread_; s < batch.num_segments; s += select_threads) {
                const std::int64_t from = step_.block.offset(s, batch.segment_begin(s));
                const std::int64_t to =
                    s < last ? step_.block.offset(s + 1, batch.segment_begin(s + 1)) : INT64_MAX;
                const auto kept = static_cast<std::uint32_t>(verdicts_[s].kept);
                mine.largest |= segment_is_in_order(batch, s) ? 0u : 1u;
                mine.rows += leads && to <= first ? kept : 0;
                mine.blocks += kept;
                if (from <= first && first < to) {
                    memory_.segments[0] = s;
                }
                if (from <= begin && begin < to) {
                    memory_.segments[1] = s;
                }
            }
            __syncthreads();
            team.together();
            mine.rows += kept_before(team, memory_.segments[0], first);
            team.alone();
            for (std::int64_t i = begin + thread_; i < end; i += select_threads) {
                held = place_of(i, blocks, memory_.segments[1]);
                mine.mass += held.kept;
            }
        }
        const tally sum = team.combine(mine);
        if (sum.largest != 0) {
            keep_everything();
            return;
        }
        std::int32_t place = team.exchange(sum);
        const auto total = static_cast<std::int32_t>(sum.blocks);

#pragma unroll 1
        for (std::int64_t from = begin; from < end; from += select_threads) {
            if (end - begin > select_threads) {
                held = from + thread_ < end ? place_of(from + thread_, blocks, memory_.segments[1])
                                            : block_place{};
            }
            const bool whole = held.rows > 0 && held.kept == held.rows;
            const unsigned bits = __ballot_sync(~0u, whole);
            if (thread_ % 32 == 0 && from + thread_ < end) {
                out_.keep_bits[(from + thread_) / 32] = bits;
            }
            std::int32_t kept = 0;
            const std::int32_t sum_here = block_prefix(held.kept, memory_.sums, kept);
            held.place = place + sum_here - held.kept;
            place += kept;
            memory_.places[thread_] = held;
            __syncthreads();
            const std::int64_t left = end - from;
            write_blocks(left < select_threads ? static_cast<std::int32_t>(left) : select_threads);
        }
        write_rest(words, last_rows.end, total);
        if (blockIdx.x == gridDim.x - 1) {
            write_segments(total);
        }
        team.leave();
    }

  private:
    /// This thread's share of the kept rows of a segment that lie before entry @p first of arrays laid out by
    /// block_offset().
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t
    kept_before(const block_team& team, std::int32_t segment, std::int64_t first) const {
        const row_range rows = rows_of_segment(step_.batch, segment);
        const segment_verdict& verdict = verdicts_[segment];
        const segment_blocks seg = step_.blocks_of(segment, rows, verdict);
        const std::int64_t blocks = first - step_.block.offset(segment, rows.begin);
        segment_blocks part = seg;
        part.count = blocks < seg.count ? static_cast<std::int32_t>(blocks) : seg.count;
        std::uint32_t kept = 0;
        if (part.count <= 0) {
            return kept;
        }
        if (verdict.form == keep_form::all) {
            return team.rank() == 0 ? static_cast<std::uint32_t>(seg.rows_of(part.count - 1).end - rows.begin)
                                    : 0;
        }
        if (verdict.form == keep_form::ranked) {
            held_blocks<block_team> held;
            held.load(team, part.free_mass, part.count);
            held.make(team, part);
            held.each(team, part, [&](const held_block& block) {
                if (block.block < part.count) {
                    const std::int32_t free_rows = block.free_rows > 0 ? block.free_rows : 0;
                    kept += static_cast<std::uint32_t>(seg.rows_of(block.block).size() - free_rows);
                    kept += static_cast<std::uint32_t>(
                        verdict.ranks_before_cut(block.mass, seg.order(block.block)) ? free_rows
                        : block.block == verdict.cut_block                           ? verdict.cut_rows
                                                                                     : 0);
                }
            });
            return kept;
        }
#pragma unroll 1
        for (std::int64_t b = team.rank(); b < part.count; b += team.size()) {
            kept += static_cast<std::uint32_t>(fate_of(verdict, seg, static_cast<std::int32_t>(b)).kept());
        }
        return kept;
    }

    /// What becomes of entry @p index of arrays laid out by block_offset(), all but its place. It belongs to
    /// segment @p least or a later one.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN block_place place_of(std::int64_t index, std::int64_t blocks,
                                                                    std::int32_t least) const {
        block_place made;
        if (index >= blocks) {
            return made;
        }
        made.segment = segment_at(step_.batch, step_.block.rows, index, least);
        const row_range rows = rows_of_segment(step_.batch, made.segment);
        const auto block = static_cast<std::int32_t>(index - step_.block.offset(made.segment, rows.begin));
        const segment_verdict verdict = verdicts_[made.segment];
        const segment_blocks seg = step_.blocks_of(made.segment, rows, verdict);
        if (block < seg.count) {
            made.first_row = seg.rows_of(block).begin;
            const block_fate fate = fate_of(verdict, seg, block);
            made.rows = static_cast<std::uint16_t>(fate.rows);
            made.kept = static_cast<std::uint16_t>(fate.kept());
        }
        return made;
    }

    __device__ UNIPREFILL_HIDDEN void write_row(std::int32_t row, bool stays, std::int32_t place) const {
        stays = stays && place < out_.kept_bound;
        out_.old_to_kept[row] = stays ? place : -1;
        if (stays) {
            out_.kept_to_old[place] = row;
        }
    }

    /// Writes the rows of the first @p count blocks in shared memory, a warp for each.
    __device__ UNIPREFILL_HIDDEN void write_blocks(std::int32_t count) const {
        const std::int32_t lane = thread_ % 32;
        const bool aligned = ((reinterpret_cast<std::uintptr_t>(out_.old_to_kept) |
                               reinterpret_cast<std::uintptr_t>(out_.kept_to_old)) %
                              sizeof(int4)) == 0;
        for (std::int32_t i = thread_ / 32; i < count; i += select_threads / 32) {
            const block_place at = memory_.places[i];
            const bool dropped = at.kept == 0;
            if (!dropped && at.kept != at.rows) {
                write_part(at, lane);
            } else if (aligned && ((at.first_row | at.rows | (dropped ? 0 : at.place)) & 3) == 0 &&
                       (dropped || at.place + at.rows <= out_.kept_bound)) {
                write_fours(at, dropped, lane);
            } else {
                for (std::int32_t r = lane; r < at.rows; r += 32) {
                    write_row(at.first_row + r, !dropped, at.place + r);
                }
            }
        }
    }

    /// Four rows at a time of a block that stays or goes as a whole: first all of one map, then of the other.
    __device__ UNIPREFILL_HIDDEN void write_fours(const block_place& at, bool dropped,
                                                  std::int32_t lane) const {
        const std::int32_t fours = at.rows / 4;
        for (std::int32_t i = lane; i < (dropped ? fours : 2 * fours); i += 32) {
            const bool back = i >= fours;
            const std::int32_t r = 4 * (back ? i - fours : i);
            const std::int32_t value = dropped ? -1 : r + (back ? at.first_row : at.place);
            const std::int32_t step = dropped ? 0 : 1;
            std::int32_t* to = back ? out_.kept_to_old + at.place + r : out_.old_to_kept + at.first_row + r;
            *reinterpret_cast<int4*>(to) = int4{value, value + step, value + 2 * step, value + 3 * step};
        }
    }

    /// Writes the rows of a block of which only some stay. Together with its warp.
    __device__ UNIPREFILL_HIDDEN void write_part(const block_place& at, std::int32_t lane) const {
        const row_range rows = rows_of_segment(step_.batch, at.segment);
        const segment_verdict verdict = verdicts_[at.segment];
        const segment_blocks seg = step_.blocks_of(at.segment, rows, verdict);
        const std::int32_t block = step_.block.whole(at.first_row - rows.begin);
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
    __device__ UNIPREFILL_HIDDEN void write_rest(std::int64_t words, std::int32_t rows,
                                                 std::int32_t kept) const {
#pragma unroll 1
        for (std::int64_t i = words + thread_of_grid_; i < out_.keep_words; i += threads_of_grid_) {
            out_.keep_bits[i] = 0;
        }
#pragma unroll 1
        for (std::int64_t i = rows + thread_of_grid_; i < step_.batch.num_rows; i += threads_of_grid_) {
            out_.old_to_kept[i] = -1;
        }
#pragma unroll 1
        for (std::int64_t i = kept + thread_of_grid_; i < out_.kept_bound; i += threads_of_grid_) {
            out_.kept_to_old[i] = -1;
        }
    }

    /// Offsets and outcomes. For one thread block.
    __device__ UNIPREFILL_HIDDEN void write_segments(std::int32_t total) const {
        const batch_view& batch = step_.batch;
        const auto bounded = [&](std::int32_t place) {
            return place < out_.kept_bound ? place : out_.kept_bound;
        };
        std::int32_t before = 0;
#pragma unroll 1
        for (std::int32_t from = 0; from < batch.num_segments; from += select_threads) {
            const std::int32_t s = from + thread_;
            const bool ours = s < batch.num_segments;
            std::int32_t kept = ours ? verdicts_[s].kept : 0;
            std::int32_t sum = 0;
            const std::int32_t end = before + block_prefix(kept, memory_.sums, sum);
            before += sum;
            if (ours) {
                const std::int32_t begin = end - kept;
                segment_outcome outcome = verdicts_[s].outcome(rows_of_segment(batch, s).size());
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
        }
        if (thread_ == 0) {
            out_.cu_segments[batch.num_segments] = bounded(total);
            out_.cu_seqlens[batch.num_requests] = bounded(total);
        }
    }

    /// Where the segments are in no order: every row stays where it is, offsets rise at least, no bit is set.
    __device__ UNIPREFILL_HIDDEN void keep_everything() const {
        const batch_view& batch = step_.batch;
#pragma unroll 1
        for (std::int64_t i = thread_of_grid_; i < batch.num_rows; i += threads_of_grid_) {
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
        if (thread_ == select_threads - 1) {
            write_rising(batch.cu_segments != nullptr ? batch.cu_segments : batch.cu_seqlens,
                         batch.num_segments, end, out_.cu_segments);
        }
        __syncthreads();
#pragma unroll 1
        for (std::int32_t s = thread_; s < batch.num_segments; s += select_threads) {
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
    const segment_verdict* verdicts_;
    writer_memory& memory_;
    std::int32_t thread_;
    std::int64_t thread_of_grid_;
    std::int64_t threads_of_grid_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
