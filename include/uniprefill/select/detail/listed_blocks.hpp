// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The blocks of a segment as one list ranks them, for teams: by the masses of one query head, or of all that
/// share a KV head.
#pragma once

#include <uniprefill/select/detail/segment_blocks.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The masses of a block, summed over query heads.
struct head_sum {
    std::uint64_t free = 0;
    std::uint64_t forced = 0;
    std::uint64_t top = 0; ///< its highest bit: a mass that is none, or too many of them

    UNIPREFILL_API void add(std::uint64_t more_free, std::uint64_t more_forced) noexcept {
        free += more_free;
        forced += more_forced;
        top |= more_free | more_forced | free | forced;
    }
    /// Over the scope; tally::full or more where it can't be trusted.
    [[nodiscard]] UNIPREFILL_API std::uint64_t over(mass_scope scope) const noexcept {
        return (free + (scope == mass_scope::all ? forced : 0)) | (top & tally::full);
    }
};

/// The blocks of one list.
struct listed_blocks {
    segment_blocks segment{}; ///< its masses are those of the list's first query head
    std::int32_t count = 0;
    std::int64_t head_stride = 0;
    std::int32_t group = 1;       ///< query heads
    std::int32_t sink_blocks = 0; ///< the first ones, which are listed whatever they weigh

    /// Masses of forced rows count under their scope, and must be sound wherever heads are summed up.
    [[nodiscard]] UNIPREFILL_API bool reads_forced() const noexcept {
        return segment.scope == mass_scope::all || group > 1;
    }
    [[nodiscard]] UNIPREFILL_API bool is_candidate(std::int32_t block) const noexcept {
        return segment.is_candidate(block);
    }
    [[nodiscard]] UNIPREFILL_API std::uint64_t mass_of(std::int32_t block) const noexcept {
        head_sum sum;
        UNIPREFILL_ONE_COPY
        for (std::int32_t head = 0; head < group; ++head) {
            const std::int64_t at = head * head_stride + block;
            sum.add(static_cast<std::uint64_t>(segment.free_mass[at]),
                    reads_forced() ? static_cast<std::uint64_t>(segment.forced_mass[at]) : 0);
        }
        return sum.over(segment.scope);
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t order(std::int32_t block) const noexcept {
        return segment.order(block);
    }
    /// A list asks only for places in the order.
    [[nodiscard]] static UNIPREFILL_API constexpr bool weighs_free_apart() noexcept { return false; }
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint64_t free_mass_of(std::int32_t) noexcept {
        return 0;
    }
};

/// As held_blocks, of a list: every candidate counts as one row, so that sums of rows count blocks.
template <class Team>
class held_list {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t count = Team::held_blocks;
    static_assert(count <= 32, "left_out_ has a bit for each");

    /// Loads the first blocks' masses, before anything is known of forced rows: memory answers while that is
    /// found out.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void load(const Team& team, const listed_blocks& blocks) noexcept {
        load(team, blocks, 0);
    }
    /// Makes blocks of what load() began with, once.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const listed_blocks& blocks) noexcept {
        make(team, blocks, 0);
    }
    [[nodiscard]] static UNIPREFILL_API constexpr std::int32_t rows_of(const listed_blocks&,
                                                                       std::int32_t) noexcept {
        return 1; // only candidates are asked for
    }
    /// While a chunk is visited: whether its block @p k has forced rows that its scope leaves out.
    [[nodiscard]] UNIPREFILL_API bool leaves_rows_out(std::int32_t k) const noexcept {
        return ((left_out_ >> k) & 1u) != 0;
    }
    /// Calls @p visit(first, masses, rows), as held_blocks does.
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each_chunk(const Team& team, const listed_blocks& blocks, Visit visit) noexcept {
        std::int32_t chunk = 0;
        UNIPREFILL_ONE_COPY
        do {
            if (chunk != chunk_) {
                load(team, blocks, chunk);
                make(team, blocks, chunk);
            }
            visit(chunk + team.rank(), mass_, rows_);
            chunk += count * team.size();
        } while (chunk < blocks.count);
    }

  private:
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void load(const Team& team, const listed_blocks& blocks, std::int32_t chunk) noexcept {
        head_sum sums[count];
        const std::int32_t first = chunk + team.rank();
        const bool both = blocks.reads_forced();
        for (std::int32_t head = 0; head < blocks.group; ++head) {
            const std::int64_t* const free = blocks.segment.free_mass + head * blocks.head_stride;
            const std::int64_t* const forced = blocks.segment.forced_mass + head * blocks.head_stride;
            std::uint64_t own[2][count];
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                const std::int32_t b = first + k * team.size();
                own[0][k] = b < blocks.count ? static_cast<std::uint64_t>(free[b]) : 0;
                own[1][k] = b < blocks.count && both ? static_cast<std::uint64_t>(forced[b]) : 0;
            }
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                sums[k].add(own[0][k], own[1][k]);
            }
        }
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            mass_[k] = sums[k].over(blocks.segment.scope);
        }
    }
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void make(const Team& team, const listed_blocks& blocks, std::int32_t chunk) noexcept {
        const std::int32_t first = chunk + team.rank();
        chunk_ = chunk;
        left_out_ = 0;
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            rows_[k] = first + k * team.size() < blocks.count ? 1 : -1;
        }
        if (blocks.segment.scope == mass_scope::all) {
            return;
        }
        // One after the other: the search through spans is there once.
        UNIPREFILL_ONE_COPY
        for (std::int32_t i = 0; i < count && first + i * team.size() < blocks.count; ++i) {
            const std::int32_t b = first + i * team.size();
            const std::int32_t free_rows = blocks.segment.free_rows(b);
            left_out_ |= free_rows < blocks.segment.rows_of(b).size() ? 1u << i : 0;
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < count; ++k) {
                rows_[k] = k == i && free_rows == 0 ? -1 : rows_[k];
            }
        }
        // What is no candidate has no mass; but a sum over heads is trusted whole or not at all.
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < count; ++k) {
            mass_[k] = rows_[k] > 0 ? mass_[k] : blocks.group > 1 ? mass_[k] & tally::full : 0;
        }
    }

    std::uint64_t mass_[count];
    std::int32_t rows_[count];
    std::uint32_t left_out_ = 0; ///< by bits
    std::int32_t chunk_ = -1;    ///< first block of the team that is held
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
