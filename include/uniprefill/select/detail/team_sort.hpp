// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The ranked blocks that a rule of one's own asks for, sorted by a team.
#pragma once

#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/detail/segment_blocks.hpp>
#include <uniprefill/select/detail/team.hpp>
#include <uniprefill/select/ranked_blocks.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Arrays over the blocks of all segments, as block_offset() lays them out.
struct sort_buffers {
    std::int64_t* masses[2] = {};
    std::int32_t* orders[2] = {};

    [[nodiscard]] static UNIPREFILL_HOST_API sort_buffers carve(workspace& memory,
                                                                std::int64_t blocks) noexcept {
        sort_buffers made;
        for (std::int32_t i = 0; i < 2; ++i) {
            made.masses[i] = memory.take<std::int64_t>(blocks);
            made.orders[i] = memory.take<std::int32_t>(blocks);
        }
        return made;
    }
    /// The buffers from entry @p offset on.
    [[nodiscard]] UNIPREFILL_API sort_buffers from(std::int64_t offset) const noexcept {
        sort_buffers made;
        for (std::int32_t i = 0; i < 2; ++i) {
            made.masses[i] = masses[i] + offset;
            made.orders[i] = orders[i] + offset;
        }
        return made;
    }
};

/// Candidates by rank.
struct sorted_blocks {
    ranked_blocks ranked{};
    const std::int32_t* orders = nullptr; // [ranked.count]
};

/// How many entries of the sorted run [begin, end) rank before (mass, order).
[[nodiscard]] inline UNIPREFILL_API std::int32_t rank_in_run(const std::int64_t* masses,
                                                             const std::int32_t* orders, std::int32_t begin,
                                                             std::int32_t end, std::int64_t mass,
                                                             std::int32_t order) noexcept {
    const std::int32_t first = begin;
    while (begin < end) {
        const std::int32_t middle = begin + (end - begin) / 2;
        if (masses[middle] > mass || (masses[middle] == mass && orders[middle] < order)) {
            begin = middle + 1;
        } else {
            end = middle;
        }
    }
    return begin - first;
}

/// Sorts the candidates of a segment, of which there are @p candidates with masses that sum to @p total, by
/// merging runs, and sums them up. O(blocks / size * log(blocks)^2 + size).
UNIPREFILL_ANY_TEAM
template <class Team, class Blocks>
[[nodiscard]] UNIPREFILL_API sorted_blocks sort_blocks(Team& team, const Blocks& blocks,
                                                       const sort_buffers& buffers, std::int32_t candidates,
                                                       std::int64_t total) noexcept {
    const std::int32_t count = blocks.count;
    for (std::int32_t b = team.rank(); b < count; b += team.size()) {
        const std::int32_t order = blocks.order(b);
        buffers.masses[0][order] = blocks.is_candidate(b) ? static_cast<std::int64_t>(blocks.mass_of(b)) : -1;
        buffers.orders[0][order] = order;
    }
    team.sync();
    std::int32_t now = 0;
    for (std::int64_t run = 1; run < count; run *= 2) {
        const std::int64_t* masses = buffers.masses[now];
        const std::int32_t* orders = buffers.orders[now];
        for (std::int32_t i = team.rank(); i < count; i += team.size()) {
            const std::int64_t mine = i / run * run;
            const std::int64_t pair = mine / (2 * run) * (2 * run);
            const std::int64_t other = mine == pair ? mine + run : pair;
            const auto begin = static_cast<std::int32_t>(other < count ? other : count);
            const auto end = static_cast<std::int32_t>(other + run < count ? other + run : count);
            const auto place = static_cast<std::int32_t>(pair + (i - mine)) +
                               rank_in_run(masses, orders, begin, end, masses[i], orders[i]);
            buffers.masses[1 - now][place] = masses[i];
            buffers.orders[1 - now][place] = orders[i];
        }
        now = 1 - now;
        team.sync();
    }
    // Sums: each thread over a stretch of its own, then with what lies before it.
    const std::int64_t* masses = buffers.masses[now];
    std::int64_t* sums = buffers.masses[1 - now];
    const std::int32_t stretch = (candidates + team.size() - 1) / team.size();
    const std::int64_t first = static_cast<std::int64_t>(stretch) * team.rank();
    const auto begin = static_cast<std::int32_t>(first < candidates ? first : candidates);
    const std::int32_t end = candidates - begin > stretch ? begin + stretch : candidates;
    std::int64_t sum = 0;
    for (std::int32_t i = begin; i < end; ++i) {
        sum += masses[i];
        sums[i] = sum;
    }
    team.sync();
    std::int64_t before = 0;
    for (std::int32_t last = stretch - 1; last < begin; last += stretch) {
        before += sums[last];
    }
    team.sync();
    for (std::int32_t i = begin; i < end; ++i) {
        sums[i] += before;
    }
    team.sync();
    return {{masses, sums, total, candidates}, buffers.orders[now]};
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
