// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernel that sums the shares of blocks.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/detail/block_masses.hpp>
#include <uniprefill/importance/head_reduction.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t mass_ctas = 4; ///< of a multiprocessor at once

/// The sum over a warp of numbers from 0 to 2^61 in all, by three sums of 20 or 21 bits each.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int64_t sum_over_warp(std::int64_t number) {
    constexpr std::uint32_t everyone = 0xffffffffu;
    const auto bits = static_cast<std::uint64_t>(number);
    const std::uint64_t low = __reduce_add_sync(everyone, static_cast<unsigned>(bits) & 0xfffffu);
    const std::uint64_t middle = __reduce_add_sync(everyone, static_cast<unsigned>(bits >> 20) & 0xfffffu);
    const std::uint64_t high = __reduce_add_sync(everyone, static_cast<unsigned>(bits >> 40));
    return static_cast<std::int64_t>(low + (middle << 20) + (high << 40));
}

/// The lanes of a warp, as mass_adder asks for them.
class UNIPREFILL_HIDDEN mass_lanes {
  public:
    static constexpr std::int32_t size = 32;

    __device__ mass_lanes()
        : lane_(static_cast<std::int32_t>(threadIdx.x % 32)) {}
    [[nodiscard]] __device__ std::int32_t rank() const { return lane_; }
    [[nodiscard]] __device__ std::int32_t first(bool mine) const {
        const std::uint32_t lanes = __ballot_sync(0xffffffffu, mine);
        return lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : -1;
    }
    [[nodiscard]] __device__ std::int64_t sum(std::int64_t mine) const { return sum_over_warp(mine); }

  private:
    std::int32_t lane_;
};

template <class HeadReduction, bool ByHead>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(mass_warps * 32, mass_ctas)
    mass_kernel(const __grid_constant__ cuda_combine_task task) {
    using adder_type = mass_adder<HeadReduction, ByHead, mass_lanes>;
    __shared__ typename adder_type::warp_masses of_warps;
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto s = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); s < task.out.num_segments;
         s += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        task.out.faults[s] = fault_of(task, s);
    }
    adder_type adder(task, mass_lanes(), static_cast<std::int32_t>(threadIdx.x / 32));
    const std::int64_t end = task.out.num_blocks * (blockIdx.x + std::int64_t{1}) / gridDim.x;
    std::int64_t first = task.out.num_blocks * blockIdx.x / gridDim.x;
    while (first < end) {
        const std::int32_t count = adder.enter(first, end);
        adder.add_blocks(first, count, of_warps);
        __syncthreads();
        adder.store(first, count, of_warps, static_cast<std::int32_t>(threadIdx.x));
        __syncthreads();
        first += count;
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
