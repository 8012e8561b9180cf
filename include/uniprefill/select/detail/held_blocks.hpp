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

/// A block as its thread holds it.
struct held_block {
    std::uint64_t mass = 0; ///< over the rule's scope; tally::full where it is no mass
    std::int32_t block = INT32_MAX;
    std::int32_t free_rows = -1; ///< -1: no candidate, or beyond the segment

    [[nodiscard]] UNIPREFILL_API bool is_candidate() const noexcept { return free_rows >= 0; }
};

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
            held_[k].mass = b < blocks ? static_cast<std::uint64_t>(free_mass[b]) : 0;
        }
    }
    /// Makes blocks of the masses that load() began with.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const segment_blocks& blocks) noexcept {
        make(team, blocks, 0);
        chunk_ = 0;
    }
    /// Calls @p visit(held_block) for each of this thread's blocks, and a few that are no candidates.
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each(const Team& team, const segment_blocks& blocks, Visit visit) noexcept {
        each_chunk(team, blocks, [&](const held_block(&chunk)[count]) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                visit(chunk[k]);
            }
        });
    }
    /// As above, with as many as are held at a time.
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each_chunk(const Team& team, const segment_blocks& blocks, Visit visit) noexcept {
        const std::int32_t size = count * team.size();
        std::int32_t chunk = 0;
        do {
            if constexpr (Team::has_bins) {
                if (chunk != chunk_) {
                    load(team, blocks.free_mass + chunk, blocks.count - chunk);
                    make(team, blocks, chunk);
                    chunk_ = chunk;
                }
            }
            visit(held_);
            chunk += size;
        } while (Team::has_bins && chunk < blocks.count);
    }
    [[nodiscard]] UNIPREFILL_API const held_block& operator[](std::int32_t k) const noexcept {
        return held_[k];
    }

  private:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const segment_blocks& blocks, std::int32_t chunk) noexcept {
        const std::int32_t first = chunk + team.rank();
        const bool whole_scope = blocks.scope == mass_scope::all;
        if (whole_scope) {
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = first + k * team.size();
                const std::int64_t forced = b < blocks.count ? blocks.forced_mass[b] : 0;
                held_[k].mass = total_mass(held_[k].mass, static_cast<std::uint64_t>(forced));
            }
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            held_block& held = held_[k];
            const std::int32_t b = first + k * team.size();
            const std::int32_t free_rows = blocks.forced.count_outside_spans(blocks.rows_of(b));
            held.block = b;
            held.mass = total_mass(held.mass, 0);
            held.free_rows = b < blocks.count ? free_rows : -1;
        }
        if (blocks.forced.num_spans > 0) {
            subtract_spans(team, blocks, first);
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            held_[k].free_rows = !whole_scope && held_[k].free_rows == 0 ? -1 : held_[k].free_rows;
        }
    }
    /// One block after the other, so that the search through spans is there once.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void subtract_spans(const Team& team, const segment_blocks& blocks,
                                       std::int32_t first) noexcept {
        UNIPREFILL_ONE_COPY
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t b = first + i * team.size();
            if (b >= blocks.count) {
                break;
            }
            const std::int32_t free_rows = blocks.free_rows(b);
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                held_[k].free_rows = k == i ? free_rows : held_[k].free_rows;
            }
        }
    }
    [[nodiscard]] UNIPREFILL_API static std::uint64_t total_mass(std::uint64_t a, std::uint64_t b) noexcept {
        const std::uint64_t sum = a + b;
        return ((a | b | sum) >> 63) != 0 ? tally::full : sum;
    }

    held_block held_[count];
    std::int32_t chunk_ = 0; ///< first block of the team that is held
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
