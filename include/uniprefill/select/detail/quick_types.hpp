// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What threads tell each other while they decide the common case.
#pragma once

#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Heavier blocks rank first; among those of equal mass the lower order does.
struct block_rank {
    std::uint64_t mass = 0;
    std::int32_t order = -1;

    [[nodiscard]] UNIPREFILL_API constexpr bool before(const block_rank& other) const noexcept {
        return (mass > other.mass) | ((mass == other.mass) & (order < other.order)); // no branches
    }
};

/// What one warp finds out of a segment's request for all.
struct quick_note {
    unit_fraction share{};
    std::int32_t budget_rows = 0;
    std::int32_t min_kept_rows = 0;
    std::int32_t max_kept_rows = 0;
    tie_order ties = tie_order::lower_block_first;
    bool is_common = false;   ///< nothing is wrong, and nothing out of the ordinary
    bool by_rows = false;     ///< a budget of rows is what is filled up, else a share of the mass
    bool must_exceed = false; ///< the share
};

/// What a quick search collects.
struct alignas(16) quick_block {
    std::uint64_t mass = 0;
    std::int32_t order = -1;
    std::int32_t rows = 0; ///< that may be dropped

    [[nodiscard]] UNIPREFILL_API constexpr block_rank rank() const noexcept { return {mass, order}; }
};

/// Sums over the blocks of a team, or over those that rank before one.
struct quick_sums {
    std::uint64_t mass = 0;
    std::uint32_t rows = 0;
    std::uint32_t ahead = 0;     ///< rows that lie before a stretch
    std::uint32_t collected = 0; ///< collected blocks, told by team::sum()
};

/// What a quick search finds.
struct quick_cut {
    block_rank at{};               ///< the block at the cut, of order -1: none was found
    std::uint64_t mass_before = 0; ///< of blocks before it, and its own
    std::int32_t block = -1;       ///< its number
    std::int32_t rows = 0;         ///< its free rows
    std::int32_t rows_gone = 0;    ///< those that go
    std::int32_t kept = 0;         ///< free rows of the segment that stay
    std::int32_t place = 0;        ///< rows that stay of those before a stretch
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
