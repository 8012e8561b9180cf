// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernels of the selector: everything at once, or decisions first and rows after them.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/detail/cuda_decide.cuh>
#include <uniprefill/select/detail/cuda_write_rows.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Segments of a step that is decided and written in one launch, whose verdicts lie in shared memory.
inline constexpr std::int32_t max_segments_at_once = 256;

/// What the kernels are given.
template <class Rule>
struct selector_call {
    step_view step{};
    selection_arrays out{};
    const Rule* rules = nullptr;
    sort_buffers buffers{};              ///< for rules of one's own
    segment_verdict* verdicts = nullptr; ///< [num_segments], not used at once
    std::int32_t warp_blocks = -1;       ///< as decision_share says
    std::int32_t cta_blocks = -1;
};

struct at_once_memory {
    writer_memory work; // its team decides
    std::uint64_t verdicts[max_segments_at_once][sizeof(segment_verdict) / 8];
};
static_assert(sizeof(at_once_memory) <= 48 * 1024, "more needs a permission for each function and device");

/// Copies a verdict to its place in thread block @p cta of the cluster.
__device__ UNIPREFILL_HIDDEN inline void store_verdict(std::uint64_t* place, std::int32_t cta,
                                                       const segment_verdict& verdict) {
    const auto* words = reinterpret_cast<const std::uint64_t*>(&verdict);
#pragma unroll
    for (std::int32_t i = 0; i < static_cast<std::int32_t>(sizeof verdict / 8); ++i) {
        store_to_cluster(place + i, cta, words[i]);
    }
}

/// Every cluster decides all segments for itself, then writes its own stretch of rows. No thread block waits
/// for one of another cluster.
template <class Rule>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads, 1)
    select_at_once(const __grid_constant__ selector_call<Rule> call) {
    alignas(16) __shared__ unsigned char storage[sizeof(at_once_memory)];
    auto& memory = *reinterpret_cast<at_once_memory*>(storage);
    block_team::clear(memory.work.team);
    row_writer::clear(memory.work);
    let_next_kernel_start();
    block_team team(memory.work.team);
    const std::int32_t ctas = cluster_ctas();
    if (ctas > 1) { // all must have started before anybody writes to another's shared memory
        arrive_at_cluster();
        wait_for_cluster();
    }
    wait_for_previous_kernel();
    const decision_share share{rank_in_cluster(), ctas, call.warp_blocks, call.cta_blocks};
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    decide_share(
        call.step, call.rules, call.buffers, share, team,
        [&](std::int32_t s, const segment_verdict& verdict) {
            if (thread % 32 < ctas) {
                store_verdict(memory.verdicts[s], thread % 32, verdict);
            }
        },
        [&](std::int32_t s, const segment_verdict& verdict) {
            if (team.size() > select_threads) { // all thread blocks have it
                if (thread == 0) {
                    store_verdict(memory.verdicts[s], share.cta, verdict);
                }
            } else if (thread < ctas) {
                store_verdict(memory.verdicts[s], thread, verdict);
            }
        });
    if (ctas > 1 && share.cta_blocks >= 0) {
        team.together();
        team.sync();
        team.alone();
    } else {
        __syncthreads();
    }
    row_writer(call.step, call.out, reinterpret_cast<const segment_verdict*>(memory.verdicts), memory.work)
        .run(team);
}

/// Decides all segments, each once.
template <class Rule>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads, 1)
    decide_segments(const __grid_constant__ selector_call<Rule> call) {
    alignas(16) __shared__ unsigned char storage[sizeof(block_team_memory)];
    auto& memory = *reinterpret_cast<block_team_memory*>(storage);
    block_team::clear(memory);
    let_next_kernel_start();
    block_team team(memory);
    wait_for_previous_kernel();
    const decision_share share{static_cast<std::int32_t>(blockIdx.x), static_cast<std::int32_t>(gridDim.x),
                               call.warp_blocks, call.cta_blocks};
    decide_share(
        call.step, call.rules, call.buffers, share, team,
        [&](std::int32_t s, const segment_verdict& verdict) {
            if (threadIdx.x % 32 == 0) {
                call.verdicts[s] = verdict;
            }
        },
        [&](std::int32_t s, const segment_verdict& verdict) {
            if (team.rank() == 0) {
                call.verdicts[s] = verdict;
            }
        });
    if (cluster_ctas() > 1) { // nobody leaves while others read its shared memory
        arrive_at_cluster();
        wait_for_cluster();
    }
}

/// Writes the rows that verdicts keep.
template <class = void>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads, 2)
    write_selection(const __grid_constant__ step_view step, const __grid_constant__ selection_arrays out,
                    const segment_verdict* verdicts) {
    alignas(16) __shared__ unsigned char storage[sizeof(writer_memory)];
    auto& memory = *reinterpret_cast<writer_memory*>(storage);
    row_writer::clear(memory);
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    block_team team(memory.team);
    row_writer(step, out, verdicts, memory).run(team);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
