// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The decision about one segment, taken by a team. The same outcome as segment_decision, bit for bit.
#pragma once

#include <uniprefill/select/detail/cut_search.hpp>
#include <uniprefill/select/detail/outcome_rules.hpp>
#include <uniprefill/select/detail/step_view.hpp>
#include <uniprefill/select/detail/team_sort.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether a rule's fields make sense; of a rule of one's own, those that every rule has.
template <class Rule>
[[nodiscard]] UNIPREFILL_API bool is_sound_rule(const Rule& rule) noexcept {
    if constexpr (std::is_same_v<Rule, selection_rule>) {
        return validate(rule).ok();
    } else {
        return validate(static_cast<const rule_base&>(rule)).ok();
    }
}

/// This thread's share of the rows that stay of a segment's first @p wanted blocks. @p held: its blocks, used
/// only where they are ranked.
UNIPREFILL_ANY_TEAM
template <class Team>
[[nodiscard]] UNIPREFILL_API std::uint32_t
kept_rows_before(const Team& team, const segment_blocks& blocks, held_blocks<Team>& held,
                 const segment_verdict& verdict, std::int64_t wanted) noexcept {
    const std::int32_t last = wanted < blocks.count ? static_cast<std::int32_t>(wanted) : blocks.count;
    if (last <= 0) {
        return 0;
    }
    if (last == blocks.count || verdict.form == keep_form::all) {
        const std::int32_t all =
            last == blocks.count ? verdict.kept : blocks.rows_of(last - 1).end - blocks.rows.begin;
        return team.rank() == 0 ? static_cast<std::uint32_t>(all) : 0;
    }
    std::uint32_t kept = 0;
    if (verdict.form != keep_form::ranked) {
        UNIPREFILL_ONE_COPY
        for (std::int64_t b = team.rank(); b < last; b += team.size()) {
            kept += static_cast<std::uint32_t>(fate_of(verdict, blocks, static_cast<std::int32_t>(b)).kept());
        }
        return kept;
    }
    // All rows, but those that go.
    constexpr std::int32_t count = held_blocks<Team>::count;
    held.each_chunk(
        team, blocks,
        [&](std::int32_t first, const std::uint64_t(&masses)[count], const std::int32_t(&rows)[count]) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t block = first + k * team.size();
                const bool goes =
                    block < last && rows[k] > 0 && !verdict.ranks_before_cut(masses[k], blocks.order(block));
                const std::int32_t stay = block == verdict.cut_block ? verdict.cut_rows : 0;
                kept -= goes ? static_cast<std::uint32_t>(rows[k] - stay) : 0;
            }
        });
    const std::int32_t all = blocks.rows_of(last - 1).end - blocks.rows.begin;
    return kept + (team.rank() == 0 ? static_cast<std::uint32_t>(all) : 0);
}

/// Decides one segment.
template <class Team, class Rule>
class team_decision {
  public:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API team_decision(Team& team, const step_view& step, const Rule* rules,
                                 const sort_buffers& buffers, std::int32_t segment) noexcept
        : team_(team)
        , step_(step)
        , buffers_(buffers)
        , segment_(segment)
        , request_(request_of_segment(step.batch, segment))
        , options_(step.batch.options_of(request_))
        , rule_(rules[request_])
        , fault_(step.faults[segment])
        , rows_(rows_of_segment(step.batch, segment)) {
        held_.load(team, step.free_mass + step.block.offset(segment, rows_.begin),
                   step.block.blocks(rows_.size()));
    }

    /// The same verdict for every thread.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API segment_verdict run() noexcept {
        verdict_.kept = rows_.size();
        blocks_ =
            step_.blocks_of(segment_, rows_, forced_rows{}, mass_scope::free, tie_order::lower_block_first);
        const auto tag = static_cast<std::int32_t>(step_.batch.tags[request_]);
        const bool known = tag >= 0 && tag <= static_cast<std::int32_t>(request_tag::verify);
        if (!known || !step_.batch.is_prefill(request_) || options_.enabled == 0) {
            verdict_.reason = !known                             ? keep_reason::invalid
                              : step_.batch.is_prefill(request_) ? keep_reason::switched_off
                                                                 : keep_reason::not_prefill;
        } else if (rows_.size() == 0) {
            verdict_.reason = keep_reason::empty;
        } else if (!is_sound_rule(rule_)) {
            verdict_.reason = keep_reason::invalid;
        } else {
            decide();
        }
        return verdict_;
    }

    /// After run(): this thread's share of the rows that stay of the first @p blocks blocks, which may be
    /// fewer than none or more than all.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API std::uint32_t kept_before(std::int64_t blocks) noexcept {
        return kept_rows_before(team_, blocks_, held_, verdict_, blocks);
    }
    [[nodiscard]] UNIPREFILL_API const segment_blocks& blocks() const noexcept { return blocks_; }

  private:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void decide() noexcept {
        const keep_reason doubt = find_forced();
        count();
        verdict_.reason = reason(doubt);
        if (must_run_dense_again(rule_, rows_.size(), num_forced(), verdict_.reason)) {
            verdict_.reason = keep_reason::rerun_dense;
            keep_latest();
        } else if (verdict_.reason == keep_reason::selected) {
            keep_ranked();
        } else {
            return;
        }
        search();
    }

    [[nodiscard]] UNIPREFILL_API std::int32_t num_forced() const noexcept {
        return rows_.size() - free_rows_;
    }

    /// @return why the spans can't be heeded, `selected` where they can
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API keep_reason find_forced() noexcept {
        const position_span* spans = nullptr;
        std::int32_t num_spans = 0;
        const keep_reason doubt =
            find_spans(team_, step_.batch.forced, request_, options_, step_.max_spans, spans, num_spans);
        const std::int32_t first_free =
            first_row_beyond_sink(team_, step_.batch.positions, rows_, options_.sink,
                                  [&](std::int32_t row) { return step_.batch.positions[row]; });
        const forced_rows forced =
            find_forced_rows(step_.batch, rows_, first_free, options_, spans, num_spans);
        verdict_.free = forced.free;
        verdict_.num_spans = num_spans;
        verdict_.near_spans = forced.near_spans;
        verdict_.whole_scope = rule_.scope == mass_scope::all;
        verdict_.higher_first = rule_.ties == tie_order::higher_block_first;
        blocks_ = step_.blocks_of(segment_, rows_, forced, rule_.scope, rule_.ties);
        return doubt;
    }

    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void count() noexcept {
        constexpr std::int32_t held = held_blocks<Team>::count;
        const bool whole_scope = blocks_.scope == mass_scope::all;
        tally mine;
        std::uint64_t bits = 0;
        std::uint64_t top = 0; // its highest bit: a mass that is none, or too many of them
        held_.make(team_, blocks_);
        held_.each_chunk(
            team_, blocks_,
            [&](std::int32_t first, const std::uint64_t(&masses)[held], const std::int32_t(&rows)[held]) {
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < held; ++k) {
                    mine.rows += rows[k] > 0 ? static_cast<std::uint32_t>(rows[k]) : 0;
                    mine.blocks += rows[k] >= 0 ? 1 : 0;
                    mine.mass += masses[k];
                    bits |= masses[k];
                    top |= mine.mass;
                }
                if (whole_scope) {
                    UNIPREFILL_UNROLL
                    for (std::int32_t k = 0; k < held; ++k) {
                        if (rows[k] > 0) {
                            mine.free +=
                                static_cast<std::uint64_t>(blocks_.free_mass[first + k * team_.size()]);
                        }
                    }
                }
            });
        mine.mass = ((top | bits) >> 63) != 0 ? tally::full : mine.mass;
        mine.bits = static_cast<std::uint32_t>(bit_length(bits));
        const tally all = team_.combine(mine, whole_scope);
        free_rows_ = static_cast<std::int32_t>(all.rows);
        candidates_ = static_cast<std::int32_t>(all.blocks);
        total_ = all.mass;
        goal_.free_mass = whole_scope ? all.free : all.mass;
        goal_.mass_bits = static_cast<std::int32_t>(all.bits);
    }

    [[nodiscard]] UNIPREFILL_API keep_reason reason(keep_reason doubt) const noexcept {
        if (rows_.size() < options_.min_length || free_rows_ == 0) {
            return keep_reason::short_segment;
        }
        if (doubt != keep_reason::selected) {
            return doubt;
        }
        if (const keep_reason fault = reason_of_fault(fault_); is_fault(fault)) {
            return fault;
        }
        return total_ >= tally::full ? keep_reason::overflow
               : total_ == 0         ? keep_reason::zero_mass
                                     : keep_reason::selected;
    }

    /// Under exact rows that can't be had: forced rows first (of too many the latest), then the latest.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void keep_latest() noexcept {
        const std::int32_t places = rule_.exact_rows();
        const bool too_many = num_forced() > places;
        verdict_.kept = places;
        verdict_.form = too_many ? keep_form::latest_forced : keep_form::latest_free;
        verdict_.cut_block = blocks_.count;
        blocks_.ties = tie_order::higher_block_first; // ranked from the end
        goal_.from_end = true;
        goal_.weight = cut_weight::rows;
        if (too_many) {
            held_.hold_forced_rows(team_, blocks_);
        }
        goal_.whole = static_cast<std::uint64_t>(rows_.size());
        goal_.target = static_cast<std::uint64_t>(too_many ? places : places - num_forced());
    }

    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void keep_ranked() noexcept {
        verdict_.total_mass = static_cast<std::int64_t>(total_);
        std::int32_t wanted = free_rows_;
        rule_decides_ = rule_.exact_rows() <= 0 && choose(wanted);
        if (!rule_decides_) {
            aim_at_rows(wanted);
        }
    }

    /// Aims at the free rows that stay where the rule's blocks hold @p wanted.
    UNIPREFILL_API void aim_at_rows(std::int32_t wanted) noexcept {
        const std::int32_t left = free_rows_to_keep(rule_, rows_.size(), num_forced(), wanted);
        verdict_.kept = num_forced() + left;
        goal_.weight = left == 0 ? cut_weight::none : cut_weight::rows;
        goal_.whole = static_cast<std::uint64_t>(free_rows_);
        goal_.target = left == 0 ? tally::full : static_cast<std::uint64_t>(left);
    }

    /// Searches for the goal, and once more where what was found changes it: the heaviest block a goal of
    /// mass, the rule's bounds on kept rows a goal of rows. The only call of
    /// the search, so that its instructions are fetched once.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void search() noexcept {
        UNIPREFILL_ONE_COPY
        for (;;) {
            if (!goal_.from_end && !rule_decides_ && verdict_.kept == rows_.size()) {
                verdict_.reason = keep_reason::everything;
                return;
            }
            if (goal_.target == 0) {
                return; // from the end: forced rows alone
            }
            const cut_result cut = find_cut(team_, blocks_, held_, goal_);
            if (seeks_heaviest_) {
                seeks_heaviest_ = false;
                goal_.weight = cut_weight::none;
                goal_.target = mass_target(cut.at.mass, fraction_, false);
                continue;
            }
            const std::int32_t block = cut.at.order >= 0 ? blocks_.order(cut.at.order) : -1;
            if (goal_.from_end) {
                verdict_.cut_block = block;
                verdict_.cut_rows = static_cast<std::int32_t>(goal_.target) - cut.rows_before;
                return;
            }
            const std::int32_t of_cut = block >= 0 ? blocks_.free_rows(block) : 0;
            if (rule_decides_) {
                const std::int32_t wanted = cut.rows_before + of_cut;
                rule_decides_ = num_forced() + wanted != rows_.size() &&
                                free_rows_to_keep(rule_, rows_.size(), num_forced(), wanted) == wanted;
                if (!rule_decides_) {
                    aim_at_rows(wanted);
                    continue;
                }
                verdict_.kept = num_forced() + wanted;
            }
            keep_down_to(cut, block, of_cut, verdict_.kept - num_forced() - cut.rows_before);
            return;
        }
    }

    /// Keeps blocks by rank before the cut, and @p cut_rows of the @p free_rows free rows of @p block, the
    /// one at it.
    UNIPREFILL_API void keep_down_to(const cut_result& cut, std::int32_t block, std::int32_t free_rows,
                                     std::int32_t cut_rows) noexcept {
        verdict_.form = keep_form::ranked;
        verdict_.dropped_mass = static_cast<std::int64_t>(goal_.free_mass - cut.mass_before);
        if (block < 0) { // every block of at least some mass
            verdict_.cut_mass =
                goal_.target < tally::full ? static_cast<std::int64_t>(goal_.target) : INT64_MAX;
            verdict_.cut_order = goal_.target < tally::full ? blocks_.count : 0;
            return;
        }
        verdict_.cut_mass = static_cast<std::int64_t>(cut.at.mass);
        verdict_.cut_order = cut.at.order + (cut_rows == free_rows ? 1 : 0);
        if (cut_rows != free_rows) {
            verdict_.cut_block = block;
            verdict_.cut_rows = cut_rows;
            verdict_.dropped_mass +=
                share_rounded_up(blocks_.free_mass[block], free_rows - cut_rows, free_rows);
        }
    }

    /// Asks the rule. @return whether goal_ is the cut that it wants; else @p wanted free rows are in its
    /// blocks
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API bool choose(std::int32_t& wanted) noexcept {
        if constexpr (std::is_same_v<Rule, selection_rule>) {
            switch (rule_.kind) {
            case rule_kind::max_fraction:
                seeks_heaviest_ = true;
                fraction_ = rule_.p;
                goal_.weight = cut_weight::blocks;
                goal_.whole = static_cast<std::uint64_t>(candidates_);
                goal_.target = 1;
                return true;
            case rule_kind::top_p:
                goal_.weight = cut_weight::mass;
                goal_.whole = total_;
                goal_.target = mass_target(total_, rule_.p, rule_.crossing == crossing::published);
                return rule_.p.value != unit_fraction::one;
            default:
                goal_.weight = cut_weight::blocks;
                goal_.whole = static_cast<std::uint64_t>(candidates_);
                goal_.target = static_cast<std::uint64_t>(ceil_fraction(rule_.p, candidates_));
                return goal_.target < static_cast<std::uint64_t>(candidates_);
            }
        } else {
            const sorted_blocks sorted =
                sort_blocks(team_, blocks_, buffers_.from(step_.block.offset(segment_, rows_.begin)),
                            candidates_, static_cast<std::int64_t>(total_));
            const std::int32_t chosen = clamped(rule_.keep_count(sorted.ranked), 0, candidates_);
            tally mine;
            for (std::int32_t k = team_.rank(); k < chosen; k += team_.size()) {
                const std::int32_t order = sorted.orders[k];
                mine.rows += static_cast<std::uint32_t>(blocks_.free_rows(
                    blocks_.ties == tie_order::lower_block_first ? order : blocks_.count - 1 - order));
            }
            wanted = static_cast<std::int32_t>(team_.combine(mine, false).rows);
            return false;
        }
    }

    Team& team_;
    const step_view& step_;
    const sort_buffers& buffers_;
    std::int32_t segment_;
    std::int32_t request_;
    request_options options_;
    Rule rule_;
    std::int64_t fault_;
    row_range rows_;
    segment_blocks blocks_{};
    held_blocks<Team> held_;
    segment_verdict verdict_{};
    std::int32_t free_rows_ = 0;
    std::int32_t candidates_ = 0;
    std::uint64_t total_ = 0;
    cut_goal goal_{};
    bool rule_decides_ = false;   ///< the goal is the rule's, not yet bounded
    bool seeks_heaviest_ = false; ///< the goal is the heaviest block, of which fraction_ is wanted
    unit_fraction fraction_{};
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
