// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block lists made by teams, the same as the host's, bit for bit: one team marks the blocks of a list, then,
/// once the lengths of all lists are known, another writes their numbers.
#pragma once

#include <uniprefill/select/detail/list_rules.hpp>
#include <uniprefill/select/detail/list_search.hpp>
#include <uniprefill/select/detail/listed_blocks.hpp>
#include <uniprefill/select/detail/step_view.hpp>
#include <uniprefill/select/detail/team_sort.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What teams read of a step, all but the rule, and what they leave for each other. Lists are numbered
/// [segment][head].
struct list_step {
    batch_view batch{};
    const std::int64_t* free_mass = nullptr;   // [query heads, blocks]
    const std::int64_t* forced_mass = nullptr; // [query heads, blocks]
    std::int64_t head_stride = 0;
    const std::int64_t* faults = nullptr;
    block_size block{};
    std::int32_t max_spans = 0; ///< limits::max_forced_spans
    std::int32_t sink = 0;
    std::int32_t num_heads = 1;  ///< lists of a segment
    std::int32_t group = 1;      ///< query heads of a list
    std::int64_t max_blocks = 0; ///< limits::max_blocks()

    std::int32_t* lengths = nullptr; // [segments * num_heads] ~length of a list that has every block
    std::uint8_t* marks = nullptr; // [num_heads, max_blocks] 1: listed; of lists that don't have every block

    /// The marks of a list, given its segment's first row.
    [[nodiscard]] UNIPREFILL_API std::uint8_t* marks_of(std::int32_t segment, std::int32_t head,
                                                        std::int32_t first_row) const noexcept {
        return marks + head * max_blocks + block.offset(segment, first_row);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t num_lists() const noexcept {
        return batch.num_segments * num_heads;
    }
};

/// What a team knows of the order of a step's segments, once it has looked.
struct step_order {
    bool is_known = false;
    bool is_sound = true;
};

/// Marks the blocks of one list.
template <class Team, class Rule>
class list_decision {
  public:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API list_decision(Team& team, const list_step& step, const Rule& rule,
                                 const sort_buffers& buffers, std::int32_t list) noexcept
        : team_(team)
        , step_(step)
        , rule_(rule)
        , buffers_(buffers)
        , list_(list)
        , segment_(list / step.num_heads)
        , head_(list - segment_ * step.num_heads)
        , rows_(rows_of_segment(step.batch, segment_)) {
        const std::int64_t at = std::int64_t{head_} * step.group * step.head_stride + offset();
        segment_blocks& segment = blocks_.segment;
        segment.rows = rows_;
        segment.block_rows = step.block.rows;
        segment.count = blocks_.count = step.block.blocks(rows_.size());
        segment.scope = rule.scope;
        segment.ties = rule.ties;
        segment.free_mass = step.free_mass + at;
        segment.forced_mass = step.forced_mass + at;
        blocks_.head_stride = step.head_stride;
        blocks_.group = step.group;
        held_.load(team, blocks_);
    }

    /// @param order  looked at by the first list of a team
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void run(step_order& order) noexcept {
        const keep_reason doubt = find_forced();
        tally mine;
        if (!order.is_known) {
            UNIPREFILL_ONE_COPY
            for (std::int32_t s = team_.rank(); s < step_.batch.num_segments; s += team_.size()) {
                mine.rows += segment_is_in_order(step_.batch, s) ? 0 : 1;
            }
        }
        const tally all = add_up(mine);
        order.is_sound = order.is_sound && all.rows == 0;
        order.is_known = true;
        if (!order.is_sound || doubt != keep_reason::selected || step_.faults[segment_] != 0 ||
            all.mass == 0 || all.mass >= tally::full) {
            tell(~blocks_.count);
            return;
        }
        candidates_ = static_cast<std::int32_t>(all.blocks);
        mass_bits_ = static_cast<std::int32_t>(all.bits);
        mark(find_last(all.mass));
    }

  private:
    /// Of the segment's first block, among those of all segments.
    [[nodiscard]] UNIPREFILL_API std::int64_t offset() const noexcept {
        return step_.block.offset(segment_, rows_.begin);
    }
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void tell(std::int32_t length) const noexcept {
        if (team_.rank() == 0) {
            step_.lengths[list_] = length;
        }
    }

    /// The list's sinks, and the rows that its scope leaves out. @return why these can't be told
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API keep_reason find_forced() noexcept {
        const batch_view& batch = step_.batch;
        const end_positions ends = end_positions::of(batch.positions, rows_);
        blocks_.sink_blocks =
            step_.block.blocks(ends.row_at(batch.positions, rows_, step_.sink) - rows_.begin);
        if (rule_.scope == mass_scope::all) {
            return keep_reason::selected;
        }
        const std::int32_t request = request_of_segment(batch, segment_);
        const request_options options = batch.options_of(request);
        const position_span* spans = nullptr;
        std::int32_t num_spans = 0;
        const keep_reason doubt =
            find_spans(team_, batch.forced, request, options, step_.max_spans, spans, num_spans);
        blocks_.segment.forced = find_forced_rows(
            batch, rows_, ends.row_at(batch.positions, rows_, options.sink), options, spans, num_spans);
        return doubt;
    }

    /// Masses and candidates, besides what @p mine has already.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API tally add_up(tally mine) noexcept {
        constexpr std::int32_t held = held_list<Team>::count;
        std::uint64_t bits = 0;
        std::uint64_t top = 0; // its highest bit: a mass that is none, or too many of them
        held_.make(team_, blocks_);
        held_.each_chunk(
            team_, blocks_,
            [&](std::int32_t, const std::uint64_t(&masses)[held], const std::int32_t(&rows)[held]) {
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < held; ++k) {
                    mine.blocks += rows[k] > 0 ? 1 : 0;
                    mine.mass += masses[k];
                    bits |= masses[k];
                    top |= mine.mass;
                }
            });
        mine.mass = ((top | bits) >> 63) != 0 ? tally::full : mine.mass;
        mine.bits = static_cast<std::uint32_t>(bit_length(bits));
        return team_.combine(mine, false);
    }

    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API last_block find_last(std::uint64_t total) noexcept {
        if constexpr (!std::is_same_v<Rule, selection_rule>) {
            return ask(total);
        } else {
            return list_search<Team, listed_blocks, held_list<Team>>(
                       team_, blocks_, held_, rule_, step_.block.rows, candidates_, mass_bits_)
                .find(total);
        }
    }
    /// A rule of one's own gets its blocks sorted.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API last_block ask(std::uint64_t total) noexcept {
        const sorted_blocks sorted =
            sort_blocks(team_, blocks_, buffers_.from(head_ * step_.max_blocks + offset()), candidates_,
                        static_cast<std::int64_t>(total));
        const std::int32_t wanted =
            bounded_blocks(rule_, rule_.exact_rows() > 0 ? candidates_ : rule_.keep_count(sorted.ranked),
                           candidates_, step_.block.rows);
        if (wanted == 0) {
            return last_block::none();
        }
        return {static_cast<std::uint64_t>(sorted.ranked.masses[wanted - 1]), sorted.orders[wanted - 1]};
    }

    /// Marks blocks up to @p last, and those that are listed whatever they weigh.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void mark(const last_block& last) noexcept {
        constexpr std::int32_t held = held_list<Team>::count;
        std::uint8_t* const marks = step_.marks_of(segment_, head_, rows_.begin);
        tally mine;
        held_.each_chunk(
            team_, blocks_,
            [&](std::int32_t first, const std::uint64_t(&masses)[held], const std::int32_t(&rows)[held]) {
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < held; ++k) {
                    const std::int32_t b = first + k * team_.size();
                    const bool ranks = rows[k] > 0 && last.reaches(masses[k], blocks_.order(b));
                    const bool listed = ranks || b < blocks_.sink_blocks || held_.leaves_rows_out(k);
                    if (b < blocks_.count) {
                        marks[b] = listed ? 1 : 0;
                        mine.blocks += listed ? 1 : 0;
                    }
                }
            });
        tell(static_cast<std::int32_t>(team_.combine(mine, false).blocks));
    }

    Team& team_;
    const list_step& step_;
    const Rule& rule_;
    const sort_buffers& buffers_;
    std::int32_t list_;
    std::int32_t segment_;
    std::int32_t head_;
    row_range rows_;
    listed_blocks blocks_{};
    held_list<Team> held_;
    std::int32_t candidates_ = 0;
    std::int32_t mass_bits_ = 0; ///< masses are below 2^mass_bits_
};

/// Where lists go.
struct list_arrays {
    std::int64_t* offsets = nullptr; // [lists + 1]
    std::int32_t* blocks = nullptr;  // [capacity]
    std::int64_t capacity = 0;
};

/// Writes lists [@p first, @p last), whose lengths and marks, and the lengths of all before, are there.
/// @param team  rank(), size(); sum(number): of all threads; prefix(number, total): the sum of this thread's
///              number and those of lower ranks
UNIPREFILL_ANY_TEAM
template <class Team>
UNIPREFILL_API void write_lists(Team& team, const list_step& step, const list_arrays& out, std::int32_t first,
                                std::int32_t last) noexcept {
    const auto length_of = [](std::int32_t told) { return told < 0 ? ~told : told; };
    std::int64_t before = 0;
    UNIPREFILL_EIGHT_COPIES
    for (std::int32_t list = team.rank(); list < first; list += team.size()) {
        before += length_of(step.lengths[list]);
    }
    std::int64_t next = team.sum(before);
    next = next < out.capacity ? next : out.capacity;
    if (first == 0 && team.rank() == 0) {
        out.offsets[0] = 0;
    }
    UNIPREFILL_ONE_COPY
    for (std::int32_t list = first; list < last; ++list) {
        const std::int32_t told = step.lengths[list];
        // Segments in no order may name more blocks than a step can have.
        const std::int64_t room = out.capacity - next;
        const std::int64_t length = length_of(told) < room ? length_of(told) : room;
        if (team.rank() == 0) {
            out.offsets[list + 1] = next + length;
        }
        std::int32_t* const to = out.blocks + next;
        next += length;
        if (told < 0) {
            for (std::int64_t b = team.rank(); b < length; b += team.size()) {
                to[b] = static_cast<std::int32_t>(b);
            }
            continue;
        }
        const std::int32_t segment = list / step.num_heads;
        const row_range rows = rows_of_segment(step.batch, segment);
        const std::int32_t count = step.block.blocks(rows.size());
        const std::uint8_t* const marks = step.marks_of(segment, list - segment * step.num_heads, rows.begin);
        std::int32_t place = 0;
        UNIPREFILL_ONE_COPY
        for (std::int32_t base = 0; base < count; base += 4 * team.size()) {
            const std::int32_t b = base + 4 * team.rank();
            std::uint32_t marked[4] = {};
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < 4; ++k) {
                marked[k] = b + k < count ? marks[b + k] : 0;
            }
            const std::uint32_t mine = marked[0] + marked[1] + marked[2] + marked[3];
            std::uint32_t total = 0;
            std::int32_t at = place + static_cast<std::int32_t>(team.prefix(mine, total) - mine);
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < 4; ++k) {
                if (marked[k] != 0) {
                    to[at++] = b + k;
                }
            }
            place += static_cast<std::int32_t>(total);
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
