// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a selection rule sees of a segment: its candidate blocks by rank, heaviest first.
#pragma once

#include <uniprefill/core/fixed_point.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Masses of the candidate blocks of one segment in falling order, and their running sums. Fixed point, never
/// negative, and the total is above 0 whenever a rule is asked.
struct ranked_blocks {
    const std::int64_t* masses = nullptr; // [count] masses[0] >= masses[1] >= ...
    const std::int64_t* sums = nullptr;   // [count] sums[k] = masses[0] + ... + masses[k]
    std::int64_t total = 0;               ///< sums[count - 1]; the 100 % that p is a share of
    std::int32_t count = 0;               ///< candidate blocks, at least 1

    /// The least k for which the k heaviest blocks hold at least @p share of the total, exactly. O(log
    /// count).
    [[nodiscard]] UNIPREFILL_API std::int32_t blocks_holding(unit_fraction share) const noexcept {
        return first(count - 1,
                     [&](std::int32_t k) { return at_least_fraction(u(sums[k]), share, u(total)); }) +
               1;
    }
    /// The least k for which the k heaviest blocks hold more than @p share of the total, all blocks where
    /// none do. O(log count).
    [[nodiscard]] UNIPREFILL_API std::int32_t blocks_exceeding(unit_fraction share) const noexcept {
        return first(count - 1,
                     [&](std::int32_t k) { return more_than_fraction(u(sums[k]), share, u(total)); }) +
               1;
    }
    /// Blocks that weigh at least @p share of the heaviest. O(log count).
    [[nodiscard]] UNIPREFILL_API std::int32_t blocks_within(unit_fraction share) const noexcept {
        return first(count,
                     [&](std::int32_t k) { return !at_least_fraction(u(masses[k]), share, u(masses[0])); });
    }

  private:
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint64_t u(std::int64_t mass) noexcept {
        return static_cast<std::uint64_t>(mass);
    }
    /// The first index below @p end where @p holds is true, @p end where it never is. Once true, it stays
    /// true.
    template <class Predicate>
    [[nodiscard]] static UNIPREFILL_API std::int32_t first(std::int32_t end, Predicate holds) noexcept {
        std::int32_t begin = 0;
        while (begin < end) {
            const std::int32_t middle = begin + (end - begin) / 2;
            if (holds(middle)) {
                end = middle;
            } else {
                begin = middle + 1;
            }
        }
        return begin;
    }
};

UNIPREFILL_END_NAMESPACE
