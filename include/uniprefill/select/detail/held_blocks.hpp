// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The blocks of a segment that belong to one thread of a team, in registers: all of them where a segment is
/// small, else one chunk after another.
#pragma once

#include <uniprefill/select/detail/segment_blocks.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

template <class Team>
class held_blocks {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t count = Team::held_blocks;

    /// Starts to load masses, before anything is known of forced rows: memory answers while that is found
    /// out.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void load(const Team& team, const std::int64_t* free_mass, std::int32_t blocks) noexcept {
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            const std::int32_t b = team.rank() + k * team.size();
            mass_[k] = b < blocks ? static_cast<std::uint64_t>(free_mass[b]) : 0;
        }
    }
    /// Makes blocks of the masses that load() began with, once. Without these two, blocks are loaded when
    /// they are visited.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const segment_blocks& blocks) noexcept {
        if (chunk_ < 0) {
            make(team, blocks, 0);
        }
    }
    /// From here on the forced rows of blocks take the place of the free ones.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void hold_forced_rows(const Team& team, const segment_blocks& blocks) noexcept {
        holds_forced_ = true;
        load(team, blocks.free_mass, blocks.count);
        make(team, blocks, 0);
    }
    /// Rows of a block that count, as they are held.
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_of(const segment_blocks& blocks,
                                                      std::int32_t block) const noexcept {
        const std::int32_t free_rows = blocks.free_rows(block);
        return holds_forced_ ? blocks.rows_of(block).size() - free_rows : free_rows;
    }
    /// Calls @p visit(first, masses, rows) for as many of this thread's blocks as it holds at a time: numbers
    /// first + k * team.size(), with their masses over the rule's scope (tally::full or more where they are
    /// none) and their rows that count. Blocks that are no candidates have no mass and -1 rows; the last ones
    /// may lie beyond the segment.
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each_chunk(const Team& team, const segment_blocks& blocks, Visit visit) noexcept {
        std::int32_t chunk = 0;
        UNIPREFILL_ONE_COPY
        do {
            if (chunk != chunk_) {
                load(team, blocks.free_mass + chunk, blocks.count - chunk);
                make(team, blocks, chunk);
            }
            visit(chunk + team.rank(), mass_, rows_);
            chunk += count * team.size();
        } while (chunk < blocks.count);
    }

  private:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const segment_blocks& blocks, std::int32_t chunk) noexcept {
        const std::int32_t first = chunk + team.rank();
        const bool whole_scope = blocks.scope == mass_scope::all;
        chunk_ = chunk;
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            rows_[k] = blocks.free_rows_outside_spans(first + k * team.size());
        }
        if (blocks.forced.num_spans > 0) { // one after the other: the search through spans is there once
            UNIPREFILL_ONE_COPY
            for (std::int32_t i = 0; i < count && first + i * team.size() < blocks.count; ++i) {
                const std::int32_t free_rows = blocks.free_rows(first + i * team.size());
                UNIPREFILL_UNROLL
                for (std::int32_t k = 0; k < count; ++k) {
                    rows_[k] = k == i ? free_rows : rows_[k];
                }
            }
        }
        if (whole_scope) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = first + k * team.size();
                const std::uint64_t free = mass_[k];
                const std::uint64_t forced =
                    b < blocks.count ? static_cast<std::uint64_t>(blocks.forced_mass[b]) : 0;
                mass_[k] = (free + forced) | ((free | forced) & tally::full);
            }
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            const bool counts = rows_[k] > 0 || (whole_scope && first + k * team.size() < blocks.count);
            mass_[k] = counts ? mass_[k] : 0;
            rows_[k] = counts ? rows_[k] : -1;
        }
        if (holds_forced_) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = first + k * team.size();
                const std::int32_t free_rows = rows_[k] > 0 ? rows_[k] : 0;
                rows_[k] = b < blocks.count ? blocks.rows_of(b).size() - free_rows : -1;
            }
        }
    }

    std::uint64_t mass_[count];
    std::int32_t rows_[count];
    std::int32_t chunk_ = -1; ///< first block of the team that is held
    bool holds_forced_ = false;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
