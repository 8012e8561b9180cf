// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Ranking of one segment's blocks by mass.
#pragma once

#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/rule.hpp>

#include <algorithm>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Arrays for the segment that is being decided.
struct rank_scratch {
    std::int32_t* order = nullptr;     // [blocks] candidate blocks by rank
    std::int32_t* free_rows = nullptr; // [blocks] rows of each block that may be dropped
    std::int64_t* masses = nullptr;    // [blocks] by rank
    std::int64_t* sums = nullptr;      // [blocks] by rank

    [[nodiscard]] static UNIPREFILL_HOST_API rank_scratch carve(workspace& memory,
                                                                std::int64_t blocks) noexcept {
        rank_scratch made;
        made.order = memory.take<std::int32_t>(blocks);
        made.free_rows = memory.take<std::int32_t>(blocks);
        made.masses = memory.take<std::int64_t>(blocks);
        made.sums = memory.take<std::int64_t>(blocks);
        return made;
    }
};

/// The masses of one segment's blocks.
struct block_masses {
    const std::int64_t* free = nullptr;   // [blocks]
    const std::int64_t* forced = nullptr; // [blocks]
    mass_scope scope = mass_scope::free;

    /// Only for blocks that are_sound() has passed.
    [[nodiscard]] UNIPREFILL_HOST_API std::int64_t of(std::int32_t block) const noexcept {
        return scope == mass_scope::all ? free[block] + forced[block] : free[block];
    }
    /// Whether this block's mass is a mass, and adding it to @p total stays below 2^63.
    [[nodiscard]] UNIPREFILL_HOST_API bool is_sound(std::int32_t block, std::int64_t total) const noexcept {
        const std::int64_t room = INT64_MAX - total;
        if (free[block] < 0 || free[block] > room) {
            return false;
        }
        return scope == mass_scope::free || (forced[block] >= 0 && forced[block] <= room - free[block]);
    }
};

/// Ranks the candidates among @p blocks blocks. scratch.free_rows must be filled.
/// @return false where the masses can't be trusted; @p ranked is then not to be used.
[[nodiscard]] inline UNIPREFILL_HOST_API bool rank_blocks(const block_masses& masses, std::int32_t blocks,
                                                          tie_order ties, const rank_scratch& scratch,
                                                          ranked_blocks& ranked) noexcept {
    std::int32_t count = 0;
    std::int64_t total = 0;
    for (std::int32_t b = 0; b < blocks; ++b) {
        if (masses.scope == mass_scope::free && scratch.free_rows[b] == 0) {
            continue;
        }
        if (!masses.is_sound(b, total)) {
            return false;
        }
        total += masses.of(b);
        scratch.order[count++] = b;
    }
    const bool lower_first = ties == tie_order::lower_block_first;
    std::sort(scratch.order, scratch.order + count, [masses, lower_first](std::int32_t a, std::int32_t b) {
        const std::int64_t mass_a = masses.of(a);
        const std::int64_t mass_b = masses.of(b);
        return mass_a != mass_b ? mass_a > mass_b : (a < b) == lower_first && a != b;
    });
    std::int64_t sum = 0;
    for (std::int32_t k = 0; k < count; ++k) {
        scratch.masses[k] = masses.of(scratch.order[k]);
        sum += scratch.masses[k];
        scratch.sums[k] = sum;
    }
    ranked = {scratch.masses, scratch.sums, total, count};
    return true;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
