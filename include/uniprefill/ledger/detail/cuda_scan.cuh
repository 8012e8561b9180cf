// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Prefix sums over the threads of a thread block.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// By shuffles; CUB's block scan does the same, but takes three seconds of each compilation.
class UNIPREFILL_HIDDEN ledger_scan {
  public:
    static constexpr std::int32_t warps = ledger_threads / 32;
    /// In shared memory.
    struct room {
        std::int32_t sums[warps];
    };

    explicit __device__ ledger_scan(room& shared)
        : shared_(shared) {}

    /// Called by all threads, with a barrier between two calls that share a room.
    /// @param[out] before sum of the values of lower threads
    /// @param[out] all    sum of all values
    __device__ void exclusive_sum(std::int32_t value, std::int32_t& before, std::int32_t& all) const {
        const std::int32_t lane = ledger_thread() % 32;
        const std::int32_t warp = ledger_thread() / 32;
        std::int32_t sum = value; // of this lane and those below it
        for (std::int32_t distance = 1; distance < 32; distance *= 2) {
            const std::int32_t other = __shfl_up_sync(~0u, sum, static_cast<unsigned>(distance));
            sum += lane >= distance ? other : 0;
        }
        if (lane == 31) {
            shared_.sums[warp] = sum;
        }
        __syncthreads();
        before = sum - value;
        all = 0;
        for (std::int32_t w = 0; w < warps; ++w) {
            before += w < warp ? shared_.sums[w] : 0;
            all += shared_.sums[w];
        }
    }

  private:
    room& shared_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
