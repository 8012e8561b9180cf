// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which of a few blocks is the one at the cut, by pivots: each round halves those that can still be it.
#pragma once

#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Heavier blocks rank first; among those of equal mass the lower order does.
struct block_rank {
    std::uint64_t mass = 0;
    std::int32_t order = -1;

    [[nodiscard]] UNIPREFILL_API constexpr bool before(const block_rank& other) const noexcept {
        return mass > other.mass || (mass == other.mass && order < other.order);
    }
};

/// A block that a lane holds. Weight 0: it takes no part.
struct weighed_block {
    block_rank rank{};
    std::uint64_t weight = 0;
};

/// The block at which the running sum of weights by rank reaches @p need, 1 <= need <= all weights together,
/// for each lane; order -1 where the weights don't reach. Ranks differ. Each lane has its first blocks of
/// @p count ones. About 1.4 * log2(count) rounds.
UNIPREFILL_ANY_TEAM
template <class Lanes, std::int32_t Held>
[[nodiscard]] UNIPREFILL_API block_rank pick(const Lanes& lanes, const weighed_block (&held)[Held],
                                             std::int32_t count, std::uint64_t need) noexcept {
    static_assert(Held <= 32);
    std::uint32_t open = 0;
    UNIPREFILL_UNROLL
    for (std::int32_t k = 0; k < Held; ++k) {
        open |= held[k].weight != 0 ? 1u << k : 0u;
    }
    UNIPREFILL_ONE_COPY
    for (std::int32_t round = 0;; ++round) {
        const std::int32_t lane = lanes.any(open != 0, round);
        if (lane < 0) {
            return {};
        }
        weighed_block pivot = held[0];
        UNIPREFILL_UNROLL
        for (std::int32_t k = Held - 1; k > 0; --k) {
            if (k * Lanes::size < count && (open & ((1u << k) - 1)) == 0 && ((open >> k) & 1u) != 0) {
                pivot = held[k];
            }
        }
        pivot.rank.mass = lanes.from(pivot.rank.mass, lane);
        pivot.rank.order = lanes.from(pivot.rank.order, lane);
        pivot.weight = lanes.from(pivot.weight, lane);
        std::uint32_t before = 0;
        std::uint32_t after = 0;
        std::uint64_t sum = 0;
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < Held; ++k) {
            if (k * Lanes::size < count) {
                const bool ahead = held[k].rank.before(pivot.rank);
                before |= ahead ? 1u << k : 0u;
                after |= !ahead && held[k].rank.order != pivot.rank.order ? 1u << k : 0u;
                sum += ahead ? held[k].weight : 0;
            }
        }
        sum = lanes.sum(sum);
        if (sum < need && sum + pivot.weight >= need) {
            return pivot.rank;
        }
        open &= sum < need ? after : before;
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
