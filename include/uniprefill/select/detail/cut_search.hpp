// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where a running sum over ranked blocks reaches a target, found without sorting: a histogram of weights
/// over all blocks tells the few that can be the one, pivots tell which of those it is.
#pragma once

#include <uniprefill/select/detail/held_blocks.hpp>
#include <uniprefill/select/detail/pick.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Keys below 2^bits by digits of `Digits` bits that rise with them: small keys linearly, large ones like
/// floating-point numbers of a 3-bit exponent. Whatever the largest mass, neighbours of the cut get bins of
/// their own, where a linear scale would put them all into one.
template <std::int32_t Digits>
struct key_digits {
    static_assert(Digits >= 5 && Digits <= 16);
    UNIPREFILL_HIDDEN static constexpr std::int32_t fraction = Digits - 3;

    std::int32_t unit = 0; ///< log2 of the keys of the smallest digits

    [[nodiscard]] static UNIPREFILL_API constexpr key_digits of(std::int32_t bits) noexcept {
        return {bits > fraction + 7 ? bits - (fraction + 7) : 0};
    }
    [[nodiscard]] UNIPREFILL_API std::uint32_t digit(std::uint64_t key) const noexcept {
        const auto scaled = static_cast<std::uint32_t>(key >> unit);
        const std::int32_t level = bit_length(scaled) - (fraction + 1);
        return level <= 0 ? scaled : (static_cast<std::uint32_t>(level) << fraction) + (scaled >> level);
    }
    /// Keys of a digit: 2^bits from the returned one on.
    [[nodiscard]] UNIPREFILL_API std::uint64_t first_key(std::uint32_t digit,
                                                         std::int32_t& bits) const noexcept {
        const auto octave = static_cast<std::int32_t>(digit >> fraction) - 1;
        const std::int32_t level = octave > 0 ? octave : 0;
        bits = unit + level;
        return static_cast<std::uint64_t>(digit - (static_cast<std::uint32_t>(level) << fraction)) << bits;
    }
};

/// What is searched for.
enum class cut_weight : std::int32_t {
    mass,
    blocks,
    free_rows,
    forced_rows,
    none, ///< no sum: every block of at least some mass lies before the cut
};

struct cut_goal {
    cut_weight weight = cut_weight::none;
    bool from_end = false;     ///< blocks rank by order alone
    std::uint64_t target = 0;  ///< of the sum, 1 <= target <= all of it; or the least mass before the cut
    std::uint64_t largest = 0; ///< mass

    /// Whether a block has a part in it.
    [[nodiscard]] UNIPREFILL_API bool counts(const held_block& held) const noexcept {
        return held.is_candidate() || from_end;
    }
    /// Rows of a block that count on the way to the cut.
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_of(const held_block& held,
                                                      const segment_blocks& blocks) const noexcept {
        const std::int32_t free_rows = held.free_rows > 0 ? held.free_rows : 0;
        return weight != cut_weight::forced_rows ? free_rows
               : held.block < blocks.count       ? blocks.rows_of(held.block).size() - free_rows
                                                 : 0;
    }
    /// What a block that counts adds to the sum.
    [[nodiscard]] UNIPREFILL_API std::uint64_t weight_of(const held_block& held,
                                                         const segment_blocks& blocks) const noexcept {
        return weight == cut_weight::mass     ? held.mass
               : weight == cut_weight::blocks ? 1
                                              : static_cast<std::uint64_t>(rows_of(held, blocks));
    }
    /// Counts a block that counts and lies before or after the cut.
    UNIPREFILL_API void count(const held_block& held, const segment_blocks& blocks, bool before,
                              tally& sides) const noexcept {
        if (before) {
            sides.rows += static_cast<std::uint32_t>(rows_of(held, blocks));
        } else if (held.free_rows > 0 && !from_end) {
            sides.mass += blocks.scope == mass_scope::all
                              ? static_cast<std::uint64_t>(blocks.free_mass[held.block])
                              : held.mass;
        }
    }
};

/// What is known of the cut: the keys that are still open. Keys rise with rank. They are masses, or, once a
/// single mass is open, orders from the last one on; 0 and the highest key are lighter and heavier blocks
/// then.
struct open_keys {
    std::uint64_t low = 0;
    std::int32_t bits = 0; ///< 2^bits keys from `low` on are open; -1: none
    bool by_order = false;
    std::uint64_t mass = 0;

    [[nodiscard]] static UNIPREFILL_API open_keys of_masses(std::uint64_t largest) noexcept {
        open_keys all;
        all.bits = bit_length(largest);
        return all;
    }
    [[nodiscard]] static UNIPREFILL_API open_keys of_orders(std::uint64_t mass,
                                                            std::int32_t blocks) noexcept {
        open_keys all;
        all.low = 1;
        all.bits = bit_length(static_cast<std::uint64_t>(blocks - 1));
        all.by_order = true;
        all.mass = mass;
        return all;
    }
    [[nodiscard]] static UNIPREFILL_API open_keys none_below(std::uint64_t mass) noexcept {
        open_keys none;
        none.low = mass;
        none.bits = -1;
        return none;
    }
    [[nodiscard]] UNIPREFILL_API std::uint64_t key_of(const held_block& held, const segment_blocks& blocks,
                                                      bool from_end) const noexcept {
        if (!by_order) {
            return held.mass;
        }
        const std::uint64_t of_block = from_end ? 0 : held.mass;
        return of_block == mass  ? static_cast<std::uint64_t>(blocks.count - blocks.order(held.block))
               : of_block > mass ? ~std::uint64_t{0}
                                 : 0;
    }
    /// The first key beyond the open ones.
    [[nodiscard]] UNIPREFILL_API std::uint64_t end() const noexcept {
        return bits < 0 ? low : low + (std::uint64_t{1} << bits);
    }
};

/// What lies on either side of a cut.
struct cut_result {
    block_rank at{};              ///< the block at the cut, of order -1: the cut lies between blocks
    std::int32_t rows_before = 0; ///< rows that count of the blocks before it
    std::uint64_t mass_after = 0; ///< free mass of the blocks after it that have free rows
};

/// The block at which the running sum of weights reaches @p need, among the first @p count that lanes hold.
UNIPREFILL_ANY_TEAM
template <class Lanes, std::int32_t Held>
[[nodiscard]] UNIPREFILL_API cut_result cut_among(const Lanes& lanes, const segment_blocks& blocks,
                                                  const cut_goal& goal, const held_block (&held)[Held],
                                                  std::int32_t count, std::uint64_t need) noexcept {
    weighed_block weighed[Held];
    UNIPREFILL_UNROLL
    for (std::int32_t k = 0; k < Held; ++k) {
        if (k * Lanes::size < count && goal.counts(held[k])) {
            weighed[k].rank = {goal.from_end ? 0 : held[k].mass, blocks.order(held[k].block)};
            weighed[k].weight = goal.weight_of(held[k], blocks);
        }
    }
    const block_rank cut = pick(lanes, weighed, count, need);
    tally mine;
    UNIPREFILL_UNROLL
    for (std::int32_t k = 0; k < Held; ++k) {
        if (k * Lanes::size < count && goal.counts(held[k]) && weighed[k].rank.order != cut.order) {
            goal.count(held[k], blocks, weighed[k].rank.before(cut), mine);
        }
    }
    return {cut, static_cast<std::int32_t>(lanes.sum(std::uint64_t{mine.rows})), lanes.sum(mine.mass)};
}

/// Finds the cut that @p goal names. By histograms, a round narrows 64-bit masses by 9 bits at least.
UNIPREFILL_ANY_TEAM
template <class Team>
[[nodiscard]] UNIPREFILL_API cut_result find_cut(Team& team, const segment_blocks& blocks,
                                                 held_blocks<Team>& held, const cut_goal& goal) noexcept {
    const auto lanes = team.lanes();
    using lane_type = decltype(team.lanes());
    const bool sums = goal.weight != cut_weight::none;
    std::uint64_t need = goal.target;
    if constexpr (!Team::has_bins) {
        if (sums) {
            held_block copies[held_blocks<Team>::count];
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < held_blocks<Team>::count; ++k) {
                copies[k] = held[k];
            }
            return cut_among(lanes, blocks, goal, copies, blocks.count, need);
        }
    }
    open_keys open = !sums           ? open_keys::none_below(goal.target)
                     : goal.from_end ? open_keys::of_orders(0, blocks.count)
                                     : open_keys::of_masses(goal.largest);
    tally sides;
    for (;;) {
        if constexpr (Team::has_bins) {
            if (sums) {
                const auto digits = key_digits<Team::digit_bits>::of(open.bits);
                const std::uint64_t end = open.end();
                team.start_search();
                held.each_chunk(team, blocks, [&](const held_block(&chunk)[held_blocks<Team>::count]) {
                    std::uint32_t places[held_blocks<Team>::count];
                    std::uint64_t weights[held_blocks<Team>::count];
                    UNIPREFILL_UNROLL
                    for (std::int32_t k = 0; k < held_blocks<Team>::count; ++k) {
                        const std::uint64_t key = open.key_of(chunk[k], blocks, goal.from_end);
                        const bool is_open = goal.counts(chunk[k]) && key >= open.low && key < end;
                        places[k] = digits.digit(key - open.low);
                        weights[k] = is_open ? goal.weight_of(chunk[k], blocks) : 0;
                    }
                    team.add(places, weights);
                });
                const found_bin found = team.find(need);
                need -= found.above;
                open.low += digits.first_key(found.digit, open.bits);
            }
        }
        const std::uint64_t end = open.end();
        tally mine;
        held.each(team, blocks, [&](const held_block& block) {
            if (goal.counts(block)) {
                const std::uint64_t key = open.key_of(block, blocks, goal.from_end);
                if (key < open.low || key >= end) {
                    goal.count(block, blocks, key >= end, mine);
                } else if (goal.weight_of(block, blocks) != 0) { // of no weight: no rows and no mass either
                    mine.blocks += 1;
                    if constexpr (Team::has_bins) {
                        team.collect(block);
                    }
                }
            }
        });
        sides = team.combine(mine);
        if constexpr (Team::has_bins) {
            if (static_cast<std::int32_t>(sides.blocks) > Team::capacity &&
                !(open.by_order && open.bits == 0)) {
                open = open.bits == 0 && !open.by_order ? open_keys::of_orders(open.low, blocks.count) : open;
                continue;
            }
        }
        break;
    }
    cut_result result{{}, static_cast<std::int32_t>(sides.rows), sides.mass};
    if constexpr (Team::has_bins) {
        if (sides.blocks > 0) {
            const auto count = static_cast<std::int32_t>(sides.blocks);
            held_block candidates[Team::capacity / lane_type::size];
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < Team::capacity / lane_type::size; ++k) {
                const std::int32_t i = lanes.rank() + k * lane_type::size;
                if (i < count) {
                    candidates[k] = team.collected(i);
                }
            }
            const cut_result among = cut_among(lanes, blocks, goal, candidates, count, need);
            result.at = among.at;
            result.rows_before += among.rows_before;
            result.mass_after += among.mass_after;
        }
    }
    return result;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
