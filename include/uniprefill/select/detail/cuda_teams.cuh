// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Threads of the device that work together: sums over warps and thread blocks, and a warp as a team.
#pragma once

#include <uniprefill/select/detail/team.hpp>

#include <cuda_runtime.h>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Threads of every thread block of the selector.
inline constexpr std::int32_t select_threads = 256;

/// The sum over a warp of numbers up to 2^63, stopping there. By three limbs: 32 of 27 bits fit 32 bits.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint64_t warp_sum(std::uint64_t mine) {
    constexpr std::uint64_t limb = (std::uint64_t{1} << 27) - 1;
    const std::uint64_t low = __reduce_add_sync(~0u, static_cast<unsigned>(mine & limb));
    const std::uint64_t middle =
        __reduce_add_sync(~0u, static_cast<unsigned>((mine >> 27) & limb)) + (low >> 27);
    const std::uint64_t high = __reduce_add_sync(~0u, static_cast<unsigned>(mine >> 54)) + (middle >> 27);
    return high >= std::uint64_t{1} << 9 ? tally::full
                                         : (high << 54) | ((middle & limb) << 27) | (low & limb);
}

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint64_t warp_max(std::uint64_t mine) {
    const auto high = static_cast<unsigned>(mine >> 32);
    const unsigned highest = __reduce_max_sync(~0u, high);
    const unsigned low = high == highest ? static_cast<unsigned>(mine) : 0;
    return (static_cast<std::uint64_t>(highest) << 32) | __reduce_max_sync(~0u, low);
}

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline tally warp_combine(const tally& mine) {
    tally all;
    all.largest = warp_max(mine.largest);
    all.mass = warp_sum(mine.mass);
    all.rows = __reduce_add_sync(~0u, mine.rows);
    all.blocks = __reduce_add_sync(~0u, mine.blocks);
    return all;
}

/// The sum of this lane's number and those of lower lanes, of the first @p Lanes.
template <unsigned Lanes = 32, class Number>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN Number warp_prefix(Number mine) {
    const unsigned lane = threadIdx.x % 32;
#pragma unroll
    for (unsigned step = 1; step < Lanes; step *= 2) {
        const Number other = __shfl_up_sync(~0u, mine, step);
        mine += lane >= step ? other : Number{0};
    }
    return mine;
}

/// The lanes of a warp.
class warp_lanes {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t size = 32;

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t rank() const {
        return static_cast<std::int32_t>(threadIdx.x % 32);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t any(bool mine, std::int32_t round) const {
        const unsigned lanes = __ballot_sync(~0u, mine);
        const unsigned turn = static_cast<unsigned>(round) * 11u % 32u;
        const int first = __ffs(static_cast<int>(__funnelshift_r(lanes, lanes, turn)));
        return first == 0 ? -1 : (first - 1 + static_cast<std::int32_t>(turn)) % 32;
    }
    template <class Number>
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN Number from(Number mine, std::int32_t lane) const {
        return __shfl_sync(~0u, mine, lane);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint64_t sum(std::uint64_t mine) const {
        return warp_sum(mine);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN tally combine(const tally& mine) const {
        return warp_combine(mine);
    }
};

/// A warp, for segments of which its lanes can hold every block.
class warp_team {
  public:
    UNIPREFILL_HIDDEN static constexpr std::int32_t held_blocks = 4;
    UNIPREFILL_HIDDEN static constexpr bool has_bins = false;
    UNIPREFILL_HIDDEN static constexpr std::int32_t most_blocks = 32 * held_blocks;

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t rank() const {
        return static_cast<std::int32_t>(threadIdx.x % 32);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t size() const { return 32; }
    __device__ UNIPREFILL_HIDDEN void sync() const { __syncwarp(); }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN tally combine(const tally& mine) const {
        return warp_combine(mine);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN warp_lanes lanes() const { return {}; }
};

/// The sum of this thread's number and those of lower threads; @p total of all. @p sums: [32], in shared
/// memory, used by nobody else. Call with all threads of the thread block.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t
block_prefix(std::int32_t mine, std::int32_t* sums, std::int32_t& total) {
    const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x / 32);
    const std::int32_t sum = warp_prefix(mine);
    __syncthreads(); // the last call's readers
    if (threadIdx.x % 32 == 31) {
        sums[warp] = sum;
    }
    __syncthreads();
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int32_t of_warp = lane < select_threads / 32 ? sums[lane] : 0;
    total = static_cast<std::int32_t>(__reduce_add_sync(~0u, static_cast<unsigned>(of_warp)));
    return sum + static_cast<std::int32_t>(
                     __reduce_add_sync(~0u, static_cast<unsigned>(lane < warp ? of_warp : 0)));
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
