// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How the CUDA estimator plans a segment: whether it is scored, on which rows and keys, and what it adds to
/// the running sums that say where its numbers go.
#pragma once

#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/importance/detail/named_rows.hpp>
#include <uniprefill/importance/detail/plan_layout.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether a segment doesn't end before it begins. Ranges that overlap would make of every later stage a
/// guess: where any segment falls, none is scored.
[[nodiscard]] inline UNIPREFILL_API bool segment_ascends(const batch_view& batch,
                                                         std::int32_t segment) noexcept {
    return batch.segment_begin(segment) <= batch.segment_end(segment);
}

/// What a segment adds to the running sums.
[[nodiscard]] inline UNIPREFILL_API plan_sums work_of(const cuda_plan_task& task,
                                                      const cuda_segment& what) noexcept {
    const std::int64_t kv_heads = task.bounds.num_kv_heads;
    const std::int64_t chunks = (what.lanes + task.tiling.chunk_rows - 1) / task.tiling.chunk_rows;
    plan_sums work;
    work.tiles = kv_heads * chunks * what.cost();
    work.stats = kv_heads * what.lanes;
    work.partials = what.slots() * work.stats;
    work.blocks = num_blocks(what.rows, task.tiling.block_rows);
    work.cuts = what.num_cuts;
    return work;
}

/// Makes the plan of one segment: plan(), then place() once the work of the segments before it is known.
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
        if (has_many_tiles()) {
            made_.lead_tiles = 1;
            made_.trail_tiles = 2;
        }
        made_.context_slots = parts(made_.context, tiling.slot_keys());
        made_.own_slots = parts(made_.rows, tiling.slot_keys());
        std::int32_t last_cut = -1;
        made_.num_cuts = visit_cuts([&](std::int32_t, std::int32_t block) { last_cut = block; });
        if (made_.num_cuts > most_cuts_of_a_segment) {
            made_.num_observations = made_.num_cuts = 0;
            return refused();
        }
        made_.cut_slots = made_.num_cuts * tiling.slots_of_a_block();
        // The segment's last block may end before its last slots: no tile fills those of its forced part.
        const std::int32_t missing = (last_cut + 1) * tiling.slots_of_a_block() - made_.own_slots;
        made_.cut_slots -= missing > 0 ? missing : 0;
        return made_;
    }

    /// Gives the segment its places, and writes it, unless its numbers don't fit the workspace: then it isn't
    /// scored.
    /// @param made by plan(), @param before the work of all segments before this one, @param mine its own
    UNIPREFILL_API void place(cuda_segment& made, const plan_sums& before,
                              const plan_sums& mine) const noexcept {
        const cuda_buffers& buffers = task_.buffers;
        made.first_tile = before.tiles;
        made.first_stat = before.stats;
        made.first_partial = before.partials;
        made.first_block = before.blocks;
        made.first_cut = static_cast<std::int32_t>(before.cuts);
        if (made.num_observations > 0 &&
            (before.partials + mine.partials > buffers.max_partials ||
             before.stats + mine.stats > buffers.max_stats || before.cuts + mine.cuts > buffers.max_cuts)) {
            made.has_fault = 1;
            made.fault = mass_fault::overflow;
            made.num_observations = 0;
            made.num_cuts = 0;
        }
        if (made.num_cuts > 0) {
            visit_cuts([&](std::int32_t cut, std::int32_t block) {
                buffers.cut_blocks[made.first_cut + cut] = block;
            });
        }
        buffers.segments[segment_] = made;
        buffers.first_tiles[segment_] = made.first_tile;
        buffers.first_stats[segment_] = made.first_stat;
        buffers.first_blocks[segment_] = made.first_block;
        buffers.faulty[segment_] = 0;
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

    /// Whether thread blocks have so many tiles each that another part of one doesn't matter. As an upper
    /// bound of rows says it, so that all segments agree.
    [[nodiscard]] UNIPREFILL_API bool has_many_tiles() const noexcept {
        const std::int64_t tiles =
            std::int64_t{batch_.num_rows} / task_.tiling.tile_keys + made_.context_tiles;
        return tiles * task_.bounds.num_kv_heads >= std::int64_t{12} * task_.ctas;
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
        made_.named = 1;
        made_.num_observations =
            list_named_rows(batch_.positions, made_.first_row, made_.first_row + made_.rows, named.spans,
                            first, last, n, listed);
    }

    const cuda_plan_task& task_;
    const batch_view& batch_;
    cuda_segment made_{};
    std::int32_t segment_;
    bool plausible_;
    std::int32_t first_position_ = 0;
    std::int32_t last_position_ = 0;
};

/// Ends what place() wrote for @p count segments.
inline UNIPREFILL_API void write_totals(const cuda_buffers& buffers, std::int32_t count,
                                        const plan_sums& all) noexcept {
    *buffers.totals = all;
    buffers.first_tiles[count] = all.tiles;
    buffers.first_stats[count] = all.stats;
    buffers.first_blocks[count] = all.blocks;
}

/// Whether a row of a segment, counted from its first, is forced.
[[nodiscard]] inline UNIPREFILL_API bool is_forced(const batch_view& batch, const cuda_segment& what,
                                                   std::int32_t row) noexcept {
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
