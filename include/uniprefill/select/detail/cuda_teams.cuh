// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Sums over warps and thread blocks.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cuda_runtime.h>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The sum of this lane's number and those of lower lanes.
template <class Number>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN Number warp_prefix(Number mine) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned step = 1; step < 32; step *= 2) {
        const Number other = __shfl_up_sync(~0u, mine, step);
        mine += lane >= step ? other : Number{0};
    }
    return mine;
}

/// The sum of this thread's number and those of lower threads; @p total of all. @p sums: [32], in shared
/// memory, which nobody else uses until after the next barrier. Call with all threads of the thread block,
/// whose warps may count in another order than that of their numbers: @p warp is this one's.
template <std::int32_t Threads>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t
block_prefix(std::uint32_t mine, unsigned warp, std::uint32_t* sums, std::uint32_t& total) {
    const unsigned lane = threadIdx.x % 32;
    const std::uint32_t sum = warp_prefix(mine);
    if (lane == 31) {
        sums[warp] = sum;
    }
    __syncthreads();
    const std::uint32_t of_warp = lane < Threads / 32 ? sums[lane] : 0;
    total = __reduce_add_sync(~0u, of_warp);
    return sum + __reduce_add_sync(~0u, lane < warp ? of_warp : 0);
}

/// What the threads of a thread block share, in the kernel and in functions of their own alike, all of which
/// know that it is shared memory.
template <class Memory>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN Memory& shared_memory() {
    static_assert(sizeof(Memory) <= 48 * 1024, "more needs a permission for each function and device");
    alignas(16) __shared__ unsigned char storage[sizeof(Memory)];
    return *reinterpret_cast<Memory*>(storage);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
