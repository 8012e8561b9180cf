// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which block is the last of those that a rule lists, found by a team.
#pragma once

#include <uniprefill/select/detail/cut_search.hpp>
#include <uniprefill/select/detail/list_rules.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The last block that ranks among the listed ones: blocks of more mass are, and of as much those up to its
/// order.
struct last_block {
    std::uint64_t mass = 0;
    std::int32_t order = INT32_MAX;

    [[nodiscard]] static UNIPREFILL_API constexpr last_block none() noexcept { return {tally::full, -1}; }
    [[nodiscard]] UNIPREFILL_API bool reaches(std::uint64_t of_block,
                                              std::int32_t order_of_block) const noexcept {
        return of_block > mass || (of_block == mass && order_of_block <= order);
    }
};

/// The search for it, by the rule that ships.
/// @tparam Blocks, Held  as find_cut() takes them; every candidate counts as one row
template <class Team, class Blocks, class Held>
class list_search {
  public:
    /// @param candidates blocks that are ranked
    /// @param mass_bits  their masses are below 2^mass_bits
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API list_search(Team& team, const Blocks& blocks, Held& held, const selection_rule& rule,
                               std::int32_t block_rows, std::int32_t candidates,
                               std::int32_t mass_bits) noexcept
        : team_(team)
        , blocks_(blocks)
        , held_(held)
        , rule_(rule)
        , block_rows_(block_rows)
        , candidates_(candidates) {
        goal_.mass_bits = mass_bits;
    }

    /// The only call of find_cut(), so that its instructions are fetched once.
    /// @param total of the candidates' masses, more than 0
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API last_block find(std::uint64_t total) noexcept {
        std::int32_t wanted = 0;
        bool rule_decides = choose(total, wanted);
        UNIPREFILL_ONE_COPY
        for (;;) {
            if (!rule_decides && !aim_at(wanted)) {
                return wanted > 0 ? last_block{} : last_block::none();
            }
            const cut_result cut = find_cut(team_, blocks_, held_, goal_);
            if (seeks_heaviest_) {
                seeks_heaviest_ = false;
                goal_.weight = cut_weight::none;
                goal_.target = mass_target(cut.at.mass, rule_.p, false);
                continue;
            }
            if (rule_decides) {
                const std::int32_t found = cut.rows_before + (cut.at.order >= 0 ? 1 : 0);
                wanted = bounded(found);
                if (wanted != found) {
                    rule_decides = false;
                    continue;
                }
            }
            return cut.at.order >= 0 ? last_block{cut.at.mass, cut.at.order}
                                     : last_block{goal_.target, INT32_MAX};
        }
    }

  private:
    [[nodiscard]] UNIPREFILL_API std::int32_t bounded(std::int32_t wanted) const noexcept {
        return bounded_blocks(rule_, wanted, candidates_, block_rows_);
    }
    /// Aims at so many blocks. @return whether these are some, but not all
    UNIPREFILL_API bool aim_at(std::int32_t blocks) noexcept {
        goal_.weight = cut_weight::blocks;
        goal_.whole = static_cast<std::uint64_t>(candidates_);
        goal_.target = static_cast<std::uint64_t>(blocks);
        return blocks > 0 && blocks < candidates_;
    }
    /// Asks the rule. @return whether goal_ is the cut that it wants, still without its bounds; else @p
    /// wanted blocks are, within them
    UNIPREFILL_API bool choose(std::uint64_t total, std::int32_t& wanted) noexcept {
        if (rule_.kind == rule_kind::max_fraction) {
            seeks_heaviest_ = true;
            static_cast<void>(aim_at(1));
            return true;
        }
        if (rule_.kind == rule_kind::top_p && rule_.p.value != unit_fraction::one) {
            goal_.weight = cut_weight::mass;
            goal_.whole = total;
            goal_.target = mass_target(total, rule_.p, rule_.crossing == crossing::published);
            return true;
        }
        wanted =
            bounded(rule_.kind == rule_kind::fixed_ratio ? ceil_fraction(rule_.p, candidates_) : candidates_);
        return false;
    }

    Team& team_;
    const Blocks& blocks_;
    Held& held_;
    const selection_rule& rule_;
    std::int32_t block_rows_;
    std::int32_t candidates_;
    cut_goal goal_{};
    bool seeks_heaviest_ = false; ///< the goal is the heaviest block, a share of which is wanted
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
