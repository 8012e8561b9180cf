// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The blocks of one query block's list, picked by a team from their masses: the same as the host's.
#pragma once

#include <uniprefill/select/detail/list_search.hpp>
#include <uniprefill/select/detail/query_block_work.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The blocks of a query block's list: [begin, end) of them are candidates.
struct weighed_blocks {
    const std::int64_t* masses = nullptr; // [count] those of thread i % size() were written by that thread
    std::int32_t count = 0;
    std::int32_t begin = 0;
    std::int32_t end = 0;
    tie_order ties = tie_order::lower_block_first;

    [[nodiscard]] UNIPREFILL_API bool is_candidate(std::int32_t block) const noexcept {
        return block >= begin && block < end;
    }
    [[nodiscard]] UNIPREFILL_API std::uint64_t mass_of(std::int32_t block) const noexcept {
        return static_cast<std::uint64_t>(masses[block]);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t order(std::int32_t block) const noexcept {
        return ties == tie_order::lower_block_first ? block : count - 1 - block;
    }
    [[nodiscard]] static UNIPREFILL_API constexpr bool weighs_free_apart() noexcept { return false; }
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint64_t free_mass_of(std::int32_t) noexcept {
        return 0;
    }
};

/// As held_blocks, of weighed ones, which are loaded whenever they are visited.
template <class Team>
class held_weights {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t count = Team::held_blocks;

    [[nodiscard]] static UNIPREFILL_API constexpr std::int32_t rows_of(const weighed_blocks&,
                                                                       std::int32_t) noexcept {
        return 1; // only candidates are asked for
    }
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each_chunk(const Team& team, const weighed_blocks& blocks, Visit visit) noexcept {
        UNIPREFILL_ONE_COPY
        for (std::int32_t chunk = 0; chunk < blocks.count; chunk += count * team.size()) {
            std::uint64_t masses[count];
            std::int32_t rows[count];
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = chunk + team.rank() + k * team.size();
                masses[k] = blocks.is_candidate(b) ? blocks.mass_of(b) : 0;
                rows[k] = blocks.is_candidate(b) ? 1 : -1;
            }
            visit(chunk + team.rank(), masses, rows);
        }
    }
};

/// Picks the blocks of a list.
/// @param mark called by all threads alike with (block, whether it is listed), each with blocks of its own,
///             of which some may lie behind the last one
/// @return its length, or query_list_marks::untrusted
UNIPREFILL_ANY_TEAM
template <class Team, class Mark>
[[nodiscard]] UNIPREFILL_API std::int32_t pick_query_list(Team& team, const weighed_blocks& blocks,
                                                          const selection_rule& rule, std::int32_t block_rows,
                                                          std::int32_t sink_blocks, Mark mark) noexcept {
    constexpr std::int32_t count = held_weights<Team>::count;
    held_weights<Team> held;
    tally mine;
    std::uint64_t bits = 0;
    held.each_chunk(team, blocks,
                    [&](std::int32_t, const std::uint64_t(&masses)[count], const std::int32_t(&)[count]) {
                        UNIPREFILL_UNROLL
                        for (std::int32_t k = 0; k < count; ++k) {
                            mine.mass += masses[k];
                            bits |= masses[k];
                        }
                    });
    mine.bits = static_cast<std::uint32_t>(bit_length(bits));
    const tally all = team.combine(mine, false);
    if (all.mass == 0 || all.mass >= tally::full) {
        return query_list_marks::untrusted;
    }
    const last_block last = list_search<Team, weighed_blocks, held_weights<Team>>(
                                team, blocks, held, rule, block_rows, blocks.end - blocks.begin,
                                static_cast<std::int32_t>(all.bits))
                                .find(all.mass);
    tally listed;
    held.each_chunk(
        team, blocks,
        [&](std::int32_t first, const std::uint64_t(&masses)[count], const std::int32_t(&rows)[count]) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = first + k * team.size();
                const bool is_listed =
                    (rows[k] > 0 && last.reaches(masses[k], blocks.order(b))) || b < sink_blocks;
                listed.blocks += is_listed ? 1 : 0;
                mark(b, is_listed);
            }
        });
    return static_cast<std::int32_t>(team.combine(listed, false).blocks);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
