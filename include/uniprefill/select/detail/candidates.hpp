// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The blocks of a segment one after another, each seen by one thread of a team.
#pragma once

#include <uniprefill/select/detail/segment_blocks.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A block as its thread sees it.
struct seen_block {
    std::uint64_t mass = 0;      ///< over the rule's scope; tally::full where it is no mass
    std::uint64_t free_mass = 0; ///< of its rows that may be dropped
    std::int32_t block = 0;
    std::int32_t free_rows = 0;
    bool is_there = false;     ///< false: beyond the segment
    bool is_candidate = false; ///< false: beyond the segment, or nothing of it may be dropped
};

/// Calls @p visit(seen_block) for each of this thread's blocks, and a few that aren't there. Masses are
/// loaded some at a time: memory answers them together.
UNIPREFILL_ANY_TEAM
template <class Team, class Visit>
UNIPREFILL_API void each_block(const Team& team, const segment_blocks& blocks, Visit visit) noexcept {
    constexpr std::int32_t at_once = 4;
    const bool whole_scope = blocks.scope == mass_scope::all;
    UNIPREFILL_ONE_COPY
    for (std::int32_t first = team.rank(); first < blocks.count; first += at_once * team.size()) {
        seen_block seen[at_once];
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < at_once; ++k) {
            seen[k].block = first + k * team.size();
            seen[k].is_there = seen[k].block < blocks.count;
            if (seen[k].is_there) {
                seen[k].free_mass = static_cast<std::uint64_t>(blocks.free_mass[seen[k].block]);
            }
        }
        if (whole_scope) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < at_once; ++k) {
                const std::uint64_t forced =
                    seen[k].is_there ? static_cast<std::uint64_t>(blocks.forced_mass[seen[k].block]) : 0;
                const std::uint64_t sum = seen[k].free_mass + forced;
                seen[k].mass = ((seen[k].free_mass | forced | sum) >> 63) != 0 ? tally::full : sum;
            }
        } else {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < at_once; ++k) {
                seen[k].mass = (seen[k].free_mass >> 63) != 0 ? tally::full : seen[k].free_mass;
            }
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < at_once; ++k) {
            const std::int32_t outside = blocks.forced.count_outside_spans(blocks.rows_of(seen[k].block));
            seen[k].free_rows = seen[k].is_there ? outside : 0;
        }
        if (blocks.forced.num_spans > 0) { // one after the other: the search through spans is there once
            UNIPREFILL_ONE_COPY
            for (std::int32_t i = 0; i < at_once && first + i * team.size() < blocks.count; ++i) {
                const std::int32_t free_rows = blocks.free_rows(first + i * team.size());
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < at_once; ++k) {
                    seen[k].free_rows = k == i ? free_rows : seen[k].free_rows;
                }
            }
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < at_once; ++k) {
            seen[k].is_candidate = seen[k].free_rows > 0 || (whole_scope && seen[k].is_there);
            visit(seen[k]);
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
