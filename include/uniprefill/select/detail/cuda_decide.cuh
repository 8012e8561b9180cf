// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which thread decides which segment: small ones by warps, middling ones by thread blocks, large ones by
/// clusters.
#pragma once

#include <uniprefill/select/detail/cuda_block_team.cuh>
#include <uniprefill/select/detail/team_decision.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The thread blocks that share the decisions of a step. Clusters are whole in it.
struct decision_share {
    std::int32_t cta = 0;
    std::int32_t ctas = 1;
    std::int32_t warp_blocks = -1; ///< segments of up to this many blocks go to a warp each,
    std::int32_t cta_blocks = -1; ///< of up to this many to a thread block each, all others to a cluster each
};

/// Decides this thread block's share of the segments. @p tell_warp: (segment, verdict), called by all threads
/// of a warp that decided; @p tell_block: by all threads of the thread blocks that decided.
template <class Rule, class TellWarp, class TellBlock>
__device__ UNIPREFILL_HIDDEN void decide_share(const step_view& step, const Rule* rules,
                                               const sort_buffers& buffers, const decision_share& share,
                                               block_team& team, TellWarp tell_warp, TellBlock tell_block) {
    const std::int32_t segments = step.batch.num_segments;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    const auto blocks_of = [&](std::int32_t s) {
        return step.block.blocks(rows_of_segment(step.batch, s).size());
    };

    if (share.warp_blocks >= 0) {
        warp_team warp;
        constexpr std::int32_t warps = select_threads / 32;
#pragma unroll 1
        for (std::int32_t s = thread / 32 * share.ctas + share.cta; s < segments; s += share.ctas * warps) {
            if (blocks_of(s) <= share.warp_blocks) {
                tell_warp(s, team_decision<warp_team, Rule>(warp, step, rules, buffers, s).run());
            }
        }
    }
    const std::int32_t clusters = share.ctas / cluster_ctas();
    const std::int32_t cluster = share.cta / cluster_ctas();
    const bool has_clusters = cluster_ctas() > 1;
    // Where all segments are decided alike nobody has to look for those that concern it.
    const bool alike = share.warp_blocks < 0 && (!has_clusters || share.cta_blocks < 0);
#pragma unroll 1
    for (std::int32_t together = alike && has_clusters ? 1 : 0; together < (has_clusters ? 2 : 1);
         ++together) {
        const std::int32_t first = together != 0 ? cluster : share.cta;
        const std::int32_t stride = together != 0 ? clusters : share.ctas;
        const auto is_ours = [&](std::int32_t s) {
            const std::int32_t blocks = blocks_of(s);
            return blocks > share.warp_blocks &&
                   (blocks > share.cta_blocks && has_clusters) == (together != 0);
        };
        if (together != 0) {
            team.together();
        } else {
            team.alone();
        }
#pragma unroll 1
        for (std::int64_t from = first; from < segments; from += std::int64_t{stride} * select_threads) {
            if (!alike) { // threads look in parallel; most often there is nothing
                const std::int64_t mine = from + std::int64_t{stride} * thread;
                if (__syncthreads_or(mine < segments && is_ours(static_cast<std::int32_t>(mine))) == 0) {
                    continue;
                }
            }
            const std::int64_t to = from + std::int64_t{stride} * select_threads;
#pragma unroll 1
            for (std::int64_t s = from; s < to && s < segments; s += stride) {
                const auto segment = static_cast<std::int32_t>(s);
                if (alike || is_ours(segment)) {
                    tell_block(segment,
                               team_decision<block_team, Rule>(team, step, rules, buffers, segment).run());
                }
            }
        }
    }
    team.alone();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
