// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Requests of a device ledger come, go back, are copied and go: a thread block for each. One that can't is
/// left as it is.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// An empty ledger with these layer maps behind each other.
struct ledger_maps {
    static constexpr std::int32_t most = 480; ///< numbers that a launch can carry
    std::int32_t numbers[most];
    std::int32_t first;
    std::int32_t count;
};
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    map_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ ledger_maps maps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    std::int32_t* const numbers = ledger.layout.layer_sets(ledger.memory) + maps.first;
    for (std::int32_t i = ledger_thread(); i < maps.count; i += ledger_threads) {
        numbers[i] = maps.numbers[i];
    }
    if (ledger_thread() == 0) {
        *ledger.fault = ledger_fault::no_fault;
    }
}

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    admit_kernel(const __grid_constant__ cuda_ledger_state ledger, const std::int32_t* requests,
                 std::int32_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); r < count;
         r += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        const std::int32_t request = requests[r];
        if (request == -1) {
            continue;
        }
        if (!ledger.is_slot(request)) {
            ledger.raise(ledger_complaint::slot, request, -1, request);
        } else if (atomicCAS(&ledger.record(request).header->admitted, 0, 1) != 0) {
            ledger.raise(ledger_complaint::taken, request, -1, request);
        }
    }
}

/// Every layer forgets the positions from @p num_tokens on.
class UNIPREFILL_HIDDEN request_forgetter {
  public:
    explicit __device__ request_forgetter(const cuda_ledger_state& ledger)
        : ledger_(ledger) {}

    /// Called by all threads of a thread block. @return whether the request is one that can
    [[nodiscard]] __device__ bool forget(std::int32_t request, std::int32_t num_tokens) const {
        const ledger_complaint what = judge(request, num_tokens);
        __syncthreads();
        if (what != ledger_complaint::none) {
            if (ledger_thread() == 0) {
                ledger_.raise(what, request, -1, what == ledger_complaint::rollback ? num_tokens : request);
            }
            return false;
        }
        const request_record state = ledger_.record(request);
        const request_extent extent = state.header->committed;
        const bool stored = num_tokens < extent.dense_from;
        __syncthreads();
        if (stored) {
            for (std::int32_t set = ledger_thread(); set < ledger_.bounds.num_sets; set += ledger_threads) {
                const std::int32_t below = set == 0 ? num_tokens : state.sets.rank(set, num_tokens);
                state.committed_below[set] = state.staged_below[set] = below;
            }
            __syncthreads();
            state.sets.clear(num_tokens, extent.dense_from, share_of_thread());
        }
        if (ledger_thread() == 0) {
            request_extent left = extent;
            left.num_tokens = num_tokens;
            left.dense_from = stored ? num_tokens : extent.dense_from;
            state.header->committed = state.header->staged = left;
        }
        __syncthreads();
        return true;
    }

  private:
    [[nodiscard]] __device__ ledger_complaint judge(std::int32_t request, std::int32_t num_tokens) const {
        if (!ledger_.is_admitted(request)) {
            return ledger_complaint::unknown_request;
        }
        const request_header& header = *ledger_.record(request).header;
        return header.open != 0                                             ? ledger_complaint::busy_request
               : num_tokens < 0 || num_tokens > header.committed.num_tokens ? ledger_complaint::rollback
                                                                            : ledger_complaint::none;
    }
    const cuda_ledger_state& ledger_;
};

/// @param num_tokens [count] positions to keep; null: the slots are free afterwards
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    rollback_kernel(const __grid_constant__ cuda_ledger_state ledger, const std::int32_t* requests,
                    const std::int32_t* num_tokens, std::int32_t count) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x); r < count;
         r += static_cast<std::int32_t>(gridDim.x)) {
        const std::int32_t request = requests[r];
        if (request == -1) {
            continue;
        }
        const bool done =
            request_forgetter(ledger).forget(request, num_tokens != nullptr ? num_tokens[r] : 0);
        if (done && num_tokens == nullptr && ledger_thread() == 0) {
            ledger.record(request).header->admitted = 0;
        }
    }
}

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    fork_kernel(const __grid_constant__ cuda_ledger_state ledger, const std::int32_t* requests,
                const std::int32_t* copies, std::int32_t count) {
    __shared__ std::int32_t claimed;
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x); r < count;
         r += static_cast<std::int32_t>(gridDim.x)) {
        const std::int32_t request = requests[r];
        const std::int32_t copy = copies[r];
        if (request == -1) {
            continue;
        }
        // A copy that this launch makes of another request can't be copied by it, too.
        bool is_new = false;
        for (std::int32_t i = ledger_thread(); i < count; i += ledger_threads) {
            is_new = is_new || (i != r && requests[i] != -1 && copies[i] == request);
        }
        is_new = __syncthreads_or(is_new ? 1 : 0) != 0;
        if (ledger_thread() == 0) {
            claimed = 0;
            if (is_new || !ledger.is_admitted(request)) {
                ledger.raise(ledger_complaint::unknown_request, request, -1, request);
            } else if (ledger.record(request).header->open != 0) {
                ledger.raise(ledger_complaint::busy_request, request, -1, request);
            } else if (!ledger.is_slot(copy)) {
                ledger.raise(ledger_complaint::slot, copy, -1, copy);
            } else if (atomicCAS(&ledger.record(copy).header->admitted, 0, 1) != 0) {
                ledger.raise(ledger_complaint::taken, copy, -1, copy);
            } else {
                claimed = 1;
            }
        }
        __syncthreads();
        if (claimed != 0) {
            const request_record from = ledger.record(request);
            const request_record to = ledger.record(copy);
            for (std::int32_t set = ledger_thread(); set < ledger.bounds.num_sets; set += ledger_threads) {
                to.committed_below[set] = from.committed_below[set];
                to.staged_below[set] = from.staged_below[set];
            }
            to.sets.copy_prefix(from.sets, from.header->committed.dense_from, share_of_thread());
            if (ledger_thread() == 0) {
                to.header->committed = from.header->committed;
                to.header->staged = from.header->staged;
            }
        }
        __syncthreads();
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
