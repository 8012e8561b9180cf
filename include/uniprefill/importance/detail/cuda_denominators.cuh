// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernel that finds the softmax denominators of query rows.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/detail/denominators.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A thread's part in the denominators of all groups.
class UNIPREFILL_HIDDEN denominator_adder {
    using warp_sums = denominator_group::warp_sums;
    static constexpr std::int32_t row_threads = denominator_group::row_threads;
    static constexpr std::int32_t warp_strands = denominator_group::warp_strands;

  public:
    __device__ denominator_adder(const cuda_combine_task& task, warp_sums& of_warps)
        : group_(task)
        , groups_(denominator_group::count(task))
        , of_warps_(of_warps)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32)) {}

    __device__ void run() {
        const std::int32_t at_once = denominator_group::at_once(groups_, gridDim.x);
        for (std::int64_t first = std::int64_t{blockIdx.x} * at_once; first < groups_;
             first += std::int64_t{gridDim.x} * at_once) {
            const bool has_one = warp_ < at_once && first + warp_ < groups_;
            bool is_long = false;
            if (has_one) {
                group_.enter(first + warp_);
                is_long = group_.is_long();
                if (group_.is_scored() && !is_long) {
                    add_alone();
                }
            }
            if (__syncthreads_or(is_long ? 1 : 0) == 0) {
                continue;
            }
            for (std::int32_t i = 0; i < at_once && first + i < groups_; ++i) {
                group_.enter(first + i);
                if (group_.is_long()) {
                    add_together();
                }
            }
        }
    }

  private:
    __device__ void add_alone() {
        const strand_sums mine = group_.add_strand(lane_ % row_threads, lane_ / row_threads, warp_strands);
#pragma unroll
        for (std::int32_t row = 0; row < 4; ++row) {
            const scaled_sum sum = add_strands_of_warp(mine.of_row(row));
            if (lane_ < row_threads) {
                group_.finish(lane_ * 4 + row, sum);
            }
        }
    }
    __device__ void add_together() {
        const strand_sums mine =
            group_.add_strand(lane_ % row_threads, static_cast<std::int32_t>(threadIdx.x) / row_threads,
                              warp_strands * denominator_warps);
#pragma unroll
        for (std::int32_t row = 0; row < 4; ++row) {
            const scaled_sum sum = add_strands_of_warp(mine.of_row(row));
            if (lane_ < row_threads) {
                of_warps_[warp_][lane_ * 4 + row] = sum;
            }
        }
        __syncthreads();
        if (warp_ == 0) {
            group_.finish(lane_, denominator_group::add_warps(of_warps_, lane_));
        }
        __syncthreads();
    }
    [[nodiscard]] static __device__ scaled_sum add_strands_of_warp(scaled_sum sum) {
#pragma unroll
        for (std::int32_t distance = row_threads; distance < 32; distance *= 2) {
            sum = sum + scaled_sum{__shfl_xor_sync(0xffffffffu, sum.top, distance),
                                   __shfl_xor_sync(0xffffffffu, sum.sum, distance)};
        }
        return sum;
    }

    denominator_group group_;
    std::int64_t groups_;
    warp_sums& of_warps_;
    std::int32_t lane_;
    std::int32_t warp_;
};

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(denominator_threads)
    denominator_kernel(const __grid_constant__ cuda_combine_task task) {
    __shared__ denominator_group::warp_sums of_warps;
    let_next_kernel_start();
    wait_for_previous_kernel();
    denominator_adder(task, of_warps).run();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
