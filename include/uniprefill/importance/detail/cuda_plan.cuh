// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The device's own plan of a run: which segments are scored, how much work each is, and where its numbers
/// go. The host knows upper bounds only.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/detail/segment_plan.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t plan_threads = 256;

/// The sums of the threads before this one; @p all of all threads. Call with whole warps.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline plan_sums
sums_before(const plan_sums& mine, plan_sums (&of_warps)[plan_threads / 32], plan_sums& all) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const auto warp = static_cast<std::int32_t>(threadIdx.x / 32);
    plan_sums sums = mine;
#pragma unroll 1
    for (std::int32_t distance = 1; distance < 32; distance *= 2) {
        const auto before = [&](std::int64_t& sum) {
            const std::int64_t other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
            sum += lane >= distance ? other : 0;
        };
        before(sums.tiles);
        before(sums.stats);
        before(sums.partials);
        before(sums.blocks);
        before(sums.cuts);
    }
    if (lane == 31) {
        of_warps[warp] = sums;
    }
    __syncthreads();
    all = plan_sums{};
    for (std::int32_t w = 0; w < static_cast<std::int32_t>(blockDim.x / 32); ++w) {
        if (w == warp) {
            sums = all + sums;
        }
        all = all + of_warps[w];
    }
    __syncthreads();
    return sums - mine;
}

/// Plans all segments; one thread block, of whole warps.
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(plan_threads) plan_kernel(const cuda_plan_task task) {
    __shared__ plan_sums of_warps[plan_threads / 32];
    const auto threads = static_cast<std::int32_t>(blockDim.x);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const cuda_buffers& buffers = task.buffers;
    const std::int32_t count = task.batch.num_segments;
    bool ascending = true;
    for (std::int32_t s = static_cast<std::int32_t>(threadIdx.x); s < count; s += threads) {
        ascending = ascending && segment_ascends(task.batch, s);
    }
    ascending = __syncthreads_and(ascending ? 1 : 0) != 0;
    plan_sums before{};
    for (std::int32_t first = 0; first < count; first += threads) {
        const std::int32_t index = first + static_cast<std::int32_t>(threadIdx.x);
        segment_planner planner(task, index, ascending);
        cuda_segment made{};
        plan_sums mine{};
        if (index < count) {
            made = planner.plan(buffers.observations + std::int64_t{index} * task.bounds.num_observations);
            mine = work_of(task, made);
        }
        plan_sums all;
        const plan_sums sums = before + sums_before(mine, of_warps, all);
        if (index < count) {
            planner.place(made, sums, mine);
        }
        before = before + all;
    }
    if (threadIdx.x == 0) {
        write_totals(buffers, count, before);
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
