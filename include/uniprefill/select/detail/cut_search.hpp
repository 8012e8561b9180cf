// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where a running sum over ranked blocks reaches a target, found without sorting: a histogram of weights
/// over all blocks tells the few that can be the one, of which each is compared with each.
#pragma once

#include <uniprefill/select/detail/held_blocks.hpp>
#include <uniprefill/select/detail/quick_types.hpp>

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
    rows, ///< as they are held: free or forced ones
    none, ///< no sum: every block of at least some mass lies before the cut
};

struct cut_goal {
    cut_weight weight = cut_weight::none;
    bool from_end = false;       ///< blocks rank by order alone
    std::uint64_t target = 0;    ///< of the sum, 1 <= target <= all of it; or the least mass before the cut
    std::uint64_t whole = 0;     ///< no less than all weights together
    std::uint64_t free_mass = 0; ///< of all blocks that have free rows
    std::int32_t mass_bits = 63; ///< masses are below 2^mass_bits

    /// What a block adds to the sum.
    [[nodiscard]] UNIPREFILL_API std::uint64_t weight_of(std::uint64_t mass,
                                                         std::int32_t rows) const noexcept {
        return weight == cut_weight::mass     ? mass
               : weight == cut_weight::blocks ? 1
                                              : static_cast<std::uint64_t>(rows);
    }
};

/// A block that may be the one at the cut.
struct alignas(16) collected_block {
    std::uint64_t mass = 0; ///< by which it ranks
    std::int32_t order = -1;
    std::int32_t rows = 0;
    std::uint64_t weight = 0;
    std::uint64_t free_mass = 0; ///< 0 where it has no free rows

    [[nodiscard]] UNIPREFILL_API constexpr block_rank rank() const noexcept { return {mass, order}; }
};

/// The keys that may be the cut's. Keys rise with rank. They are masses, or, once a single mass is open,
/// orders from the last one on; 0 and the highest key are lighter and heavier blocks then.
struct open_keys {
    std::uint64_t low = 0;
    std::uint64_t end = 0; ///< one past the highest
    bool by_order = false;
    std::uint64_t mass = 0;

    [[nodiscard]] static UNIPREFILL_API open_keys of_orders(std::uint64_t mass,
                                                            std::int32_t blocks) noexcept {
        return {1, static_cast<std::uint64_t>(blocks) + 1, true, mass};
    }
    /// The key of a block of mass @p of_block; for keys by order alone.
    template <class Blocks>
    [[nodiscard]] UNIPREFILL_API std::uint64_t order_key(std::uint64_t of_block, std::int32_t block,
                                                         const Blocks& blocks) const noexcept {
        return block >= blocks.count ? 0
               : of_block == mass    ? static_cast<std::uint64_t>(blocks.count - blocks.order(block))
               : of_block > mass     ? ~std::uint64_t{0}
                                     : 0;
    }
};

/// What lies on either side of a cut.
struct cut_result {
    block_rank at{};               ///< the block at the cut, of order -1: the cut lies between blocks
    std::int32_t rows_before = 0;  ///< rows that count of the blocks before it
    std::uint64_t mass_before = 0; ///< free mass of the blocks before it, and its own
};

/// ceil(share * whole), or the least integer above share * whole.
[[nodiscard]] UNIPREFILL_API inline std::uint64_t mass_target(std::uint64_t whole, unit_fraction share,
                                                              bool must_exceed) noexcept {
#if defined(__CUDA_ARCH__)
    const wide_product product{__umul64hi(whole, share.value), whole * share.value};
#else
    const wide_product product = wide_product::of(whole, share.value);
#endif
    const std::uint64_t floor = (product.high << 1) | (product.low >> 63);
    return floor + (must_exceed || (product.low << 1) != 0 ? 1 : 0);
}

/// The block at which the running sum of weights reaches @p need, among the first @p count collected ones:
/// each is compared with each.
UNIPREFILL_ANY_TEAM
template <class Team>
[[nodiscard]] UNIPREFILL_API cut_result cut_among(Team& team, std::int32_t count,
                                                  std::uint64_t need) noexcept {
    const std::int32_t bits = team.share_bits(count);
    const std::int32_t shares = 1 << bits;
    const std::int32_t share = team.near_rank() & (shares - 1);
    UNIPREFILL_ONE_COPY
    for (std::int32_t base = 0; base + (team.group_rank() >> bits) < count;
         base += team.near_size() >> bits) {
        const std::int32_t mine = base + (team.near_rank() >> bits);
        const collected_block block = mine < count ? team.collected(mine) : collected_block{};
        tally sides;
        constexpr std::int32_t at_once = 4;
        UNIPREFILL_ONE_COPY
        for (std::int32_t from = share; from < count; from += at_once * shares) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < at_once; ++k) {
                const std::int32_t i = from + k * shares;
                const collected_block other = i < count ? team.collected(i) : collected_block{};
                const bool before = other.rank().before(block.rank());
                sides.mass += before ? other.weight : 0;
                sides.rows += before ? static_cast<std::uint32_t>(other.rows) : 0;
                sides.free += before ? other.free_mass : 0;
            }
        }
        team.sum_shares(sides, bits);
        if (mine < count && share == 0 && sides.mass < need && sides.mass + block.weight >= need) {
            team.tell(cut_result{block.rank(), static_cast<std::int32_t>(sides.rows),
                                 sides.free + block.free_mass});
        }
    }
    return team.told();
}

/// The keys of as many blocks as a thread holds at a time. Blocks that are no candidates have the lowest.
UNIPREFILL_ANY_TEAM
template <class Team, class Blocks, std::int32_t Count>
UNIPREFILL_API void keys_of(const open_keys& open, bool from_end, const Team& team, const Blocks& blocks,
                            std::int32_t first, const std::uint64_t (&masses)[Count],
                            const std::int32_t (&rows)[Count], std::uint64_t (&keys)[Count]) noexcept {
    UNIPREFILL_UNROLL
    for (std::int32_t k = 0; k < Count; ++k) {
        keys[k] = masses[k];
    }
    if (open.by_order) {
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < Count; ++k) {
            const std::uint64_t key =
                open.order_key(from_end ? 0 : masses[k], first + k * team.size(), blocks);
            keys[k] = rows[k] >= 0 ? key : 0;
        }
    }
}

/// Finds the cut that @p goal names. Bins hold weights that are rounded to 32 bits, so what they tell is
/// checked exactly: rarely the cut lies in a bin beside the one that they name.
/// @tparam Blocks  segment_blocks and held_blocks, or what lists have instead
UNIPREFILL_ANY_TEAM
template <class Team, class Blocks, class Held>
[[nodiscard]] UNIPREFILL_API cut_result find_cut(Team& team, const Blocks& blocks, Held& held,
                                                 const cut_goal& goal) noexcept {
    constexpr std::int32_t count = Held::count;
    constexpr std::int32_t few = Team::capacity < 32 ? Team::capacity : 32; // compared sooner than counted
    const bool sums = goal.weight != cut_weight::none;
    const bool free_apart = blocks.weighs_free_apart();
    open_keys open{goal.target, goal.target};
    if (sums) {
        open = goal.from_end ? open_keys::of_orders(0, blocks.count)
                             : open_keys{0, std::uint64_t{1} << goal.mass_bits};
    }
    std::uint64_t above = 0; // weight beyond the open keys
    std::uint64_t inside = goal.whole;
    UNIPREFILL_ONE_COPY
    for (;;) {
        open_keys bin = open;
        const bool counts = sums && blocks.count > few;
        team.start_search(counts);
        if (counts) {
            const auto digits = key_digits<Team::digit_bits>::of(bit_length(open.end - open.low - 1));
            const std::int32_t length = bit_length(inside);
            const std::int32_t shift = length > 31 ? length - 31 : 0;
            const std::uint64_t half = (std::uint64_t{1} << shift) >> 1;
            held.each_chunk(team, blocks,
                            [&](std::int32_t first, const std::uint64_t(&masses)[count],
                                const std::int32_t(&rows)[count]) {
                                // No branches: what all blocks wait for is waited for at once.
                                std::uint64_t keys[count];
                                keys_of(open, goal.from_end, team, blocks, first, masses, rows, keys);
                                std::uint32_t places[count];
                                std::uint32_t weights[count];
                                UNIPREFILL_UNROLL
                                for (std::int32_t k = 0; k < count; ++k) {
                                    const std::uint64_t key = keys[k] - open.low;
                                    const bool is_open = rows[k] >= 0 && key < open.end - open.low;
                                    const std::uint32_t weight =
                                        goal.weight == cut_weight::mass
                                            ? static_cast<std::uint32_t>((masses[k] + half) >> shift)
                                        : goal.weight == cut_weight::blocks
                                            ? 1
                                            : static_cast<std::uint32_t>(rows[k]);
                                    places[k] = digits.digit(key);
                                    weights[k] = is_open ? weight : 0;
                                }
                                UNIPREFILL_UNROLL
                                for (std::int32_t k = 0; k < count; ++k) {
                                    if (weights[k] != 0) {
                                        team.add(places[k], weights[k]);
                                    }
                                }
                            });
            const std::uint64_t need = (goal.target - above + half) >> shift;
            const found_bin found = team.find(
                0, [=](found_bin&) { return need > 0 ? static_cast<std::uint32_t>(need) : 1; }, [] {});
            std::int32_t bits = 0;
            bin.low += digits.first_key(found.digit, bits);
            const std::uint64_t width = std::uint64_t{1} << bits;
            bin.end = open.end - bin.low < width ? open.end : bin.low + width;
        }
        tally mine;
        held.each_chunk(
            team, blocks,
            [&](std::int32_t first, const std::uint64_t(&masses)[count], const std::int32_t(&rows)[count]) {
                std::uint32_t at = 0;
                std::uint64_t keys[count];
                keys_of(bin, goal.from_end, team, blocks, first, masses, rows, keys);
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < count; ++k) { // blocks that have no part have the lowest key
                    const bool is_before = keys[k] >= bin.end;
                    const bool is_at = keys[k] >= bin.low && !is_before && rows[k] >= 0;
                    mine.mass += is_before ? masses[k] : 0;
                    mine.rows += is_before && rows[k] > 0 ? static_cast<std::uint32_t>(rows[k]) : 0;
                    mine.blocks += is_before ? 1 : 0;
                    at |= is_at ? 1u << k : 0;
                }
                if (free_apart) {
                    UNIPREFILL_UNROLL
                    for (std::int32_t k = 0; k < count; ++k) {
                        if (keys[k] >= bin.end && rows[k] > 0) {
                            mine.free += blocks.free_mass_of(first + k * team.size());
                        }
                    }
                }
                UNIPREFILL_ONE_COPY
                for (; at != 0; at &= at - 1) { // few
                    const std::int32_t block = first + (bit_length(at & (~at + 1)) - 1) * team.size();
                    const std::uint64_t mass = goal.from_end ? 0 : blocks.mass_of(block);
                    const std::int32_t rows_here = held.rows_of(blocks, block);
                    const std::uint64_t weight = goal.weight_of(mass, rows_here);
                    if (weight != 0) { // of no weight: no rows and no mass either
                        mine.inside += 1;
                        team.collect(collected_block{mass, blocks.order(block), rows_here, weight,
                                                     rows_here > 0 ? blocks.free_mass_of(block) : 0});
                    }
                }
            });
        tally sides = team.combine(mine, free_apart);
        sides.free = free_apart ? sides.free : sides.mass;
        if (!sums) {
            return {{}, static_cast<std::int32_t>(sides.rows), sides.free};
        }
        const std::uint64_t before = goal.weight == cut_weight::mass     ? sides.mass
                                     : goal.weight == cut_weight::blocks ? sides.blocks
                                                                         : sides.rows;
        if (before >= goal.target) { // the cut lies higher
            open.low = bin.end;
            inside = before - above;
            continue;
        }
        if (static_cast<std::int32_t>(sides.inside) > Team::capacity) {
            open =
                bin.end - bin.low == 1 && !bin.by_order ? open_keys::of_orders(bin.low, blocks.count) : bin;
            inside -= before - above;
            above = before;
            continue;
        }
        const auto candidates = static_cast<std::int32_t>(sides.inside);
        team.gather(candidates);
        cut_result result = cut_among(team, candidates, goal.target - before);
        if (result.at.order >= 0) {
            result.rows_before += static_cast<std::int32_t>(sides.rows);
            result.mass_before += sides.free;
            return result;
        }
        // The cut lies lower, perhaps below all open keys.
        above = before;
        UNIPREFILL_ONE_COPY
        for (std::int32_t i = 0; i < candidates; ++i) {
            above += team.collected(i).weight;
        }
        inside = goal.whole - above;
        open.end = bin.low;
        if (open.low == open.end) {
            open = {0, open.by_order ? open.mass : open.end};
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
