// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What decisions read of a step.
#pragma once

#include <uniprefill/select/detail/segment_verdict.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What decisions read, all but the rules.
struct step_view {
    batch_view batch{};
    const std::int64_t* free_mass = nullptr;
    const std::int64_t* forced_mass = nullptr;
    const std::int64_t* faults = nullptr;
    block_size block{};
    std::int32_t max_spans = 0; ///< limits::max_forced_spans

    /// The blocks of a segment, once its verdict has its free rows, its spans and how it ranks.
    [[nodiscard]] UNIPREFILL_API segment_blocks blocks_of(std::int32_t segment, row_range rows,
                                                          const forced_rows& forced, mass_scope scope,
                                                          tie_order ties) const noexcept {
        const std::int64_t offset = block.offset(segment, rows.begin);
        segment_blocks made;
        made.rows = rows;
        made.block_rows = block.rows;
        made.count = block.blocks(rows.size());
        made.scope = scope;
        made.ties = ties;
        made.forced = forced;
        made.free_mass = free_mass + offset;
        made.forced_mass = forced_mass + offset;
        return made;
    }
    /// As blocks_of(), from a verdict.
    [[nodiscard]] UNIPREFILL_API segment_blocks blocks_of(std::int32_t segment, row_range rows,
                                                          const segment_verdict& verdict) const noexcept {
        forced_rows forced;
        forced.positions = batch.positions;
        forced.free = verdict.free;
        if (verdict.num_spans > 0) {
            forced.spans = batch.forced.spans + batch.forced.offsets[request_of_segment(batch, segment)];
            forced.num_spans = verdict.num_spans;
            forced.near_spans = verdict.near_spans;
        }
        return blocks_of(segment, rows, forced, verdict.whole_scope ? mass_scope::all : mass_scope::free,
                         verdict.higher_first ? tie_order::higher_block_first : tie_order::lower_block_first);
    }
};

/// The largest sink that is counted, whatever the team: positions may be anything, and decide alike all the
/// same.
inline constexpr std::int32_t sink_rows_counted = 512;

/// The first row of a segment beyond its sink. Positions ascend by at least 1 a row, so few rows can be in a
/// small sink: these are counted, all at once. @p position_of(row) tells the position of this thread's row.
UNIPREFILL_ANY_TEAM
template <class Team, class Position>
[[nodiscard]] UNIPREFILL_API std::int32_t first_row_beyond_sink(Team& team, const std::int32_t* positions,
                                                                row_range rows, std::int32_t sink,
                                                                Position position_of) noexcept {
    const std::int32_t most = clamped(sink, 0, rows.size());
    if (most > sink_rows_counted) {
        return end_positions::of(positions, rows).row_at(positions, rows, sink);
    }
    std::int32_t first = rows.begin;
    UNIPREFILL_ONE_COPY
    for (std::int32_t base = 0; base < most; base += team.near_size()) {
        const std::int32_t i = base + team.near_rank();
        first += team.count(i < most && position_of(rows.begin + i) < sink);
    }
    return first;
}

/// The forced spans of a request, none where they make no sense.
/// @return why the request's options or spans can't be heeded, `selected` where they can
UNIPREFILL_ANY_TEAM
template <class Team>
[[nodiscard]] UNIPREFILL_API keep_reason find_spans(Team& team, const span_lists& lists, std::int32_t request,
                                                    const request_options& options, std::int32_t max_spans,
                                                    const position_span*& spans,
                                                    std::int32_t& num_spans) noexcept {
    keep_reason doubt =
        (options.sink | options.tail | options.min_length) < 0 ? keep_reason::invalid : keep_reason::selected;
    num_spans = 0;
    if (lists.offsets == nullptr) {
        return doubt;
    }
    const std::int32_t begin = lists.offsets[request];
    const std::int32_t end = lists.offsets[request + 1];
    if (begin < 0 || end < begin || (end > begin && lists.spans == nullptr)) {
        return keep_reason::invalid;
    }
    if (end > begin && end > max_spans) {
        return doubt == keep_reason::selected ? keep_reason::overflow : doubt;
    }
    if (end > begin) {
        spans = lists.spans + begin;
        num_spans = end - begin;
        bool wrong = false;
        UNIPREFILL_ONE_COPY
        for (std::int32_t i = team.near_rank(); i < num_spans; i += team.near_size()) {
            const std::int32_t least = i > 0 ? spans[i - 1].end : 0;
            wrong = wrong || spans[i].begin < least || spans[i].end < spans[i].begin;
        }
        if (team.count(wrong) > 0) {
            doubt = keep_reason::invalid;
            num_spans = 0;
        }
    }
    return doubt;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
