// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernels of a step. What a step tells its engine is worked out by thread blocks beside those that
/// change the state, in the same launch.
#pragma once

#include <uniprefill/ledger/detail/cuda_append.cuh>
#include <uniprefill/ledger/detail/cuda_step_arrays.cuh>
#include <uniprefill/ledger/detail/cuda_step_check.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What thread blocks share that tell of rows: offsets of requests, and of a step that begins a bit for each
/// slot. Dynamic, in words.
[[nodiscard]] inline UNIPREFILL_HOST_API std::size_t ledger_shared_bytes(std::int32_t num_requests,
                                                                         std::int32_t max_requests) noexcept {
    return (static_cast<std::size_t>(num_requests) + 1 + (static_cast<std::size_t>(max_requests) + 31) / 32) *
           sizeof(std::int32_t);
}

/// Opens the step: the last thread block. The others tell of its rows.
template <class Slots, class Index, class Slot>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    begin_step_kernel(const __grid_constant__ cuda_ledger_state ledger,
                      const __grid_constant__ cuda_step step,
                      const __grid_constant__ step_wishes<Slots, Index, Slot> wanted) {
    extern __shared__ std::int32_t ledger_memory[];
    __shared__ ledger_scan::room scan;
    std::int32_t* const offsets = ledger_memory;
    auto* const seen = reinterpret_cast<std::uint32_t*>(ledger_memory + step.num_requests + 1);
    let_next_kernel_start();
    wait_for_previous_kernel();
    step_check check(ledger, step, seen);
    const bool opens = blockIdx.x == gridDim.x - 1;
    const bool good = check.passes(opens) && check.positions_go_on();
    if (!opens) {
        const std::int32_t stretches = stretches_of(wanted.out.num_rows);
        const auto block = static_cast<std::int32_t>(blockIdx.x);
        step_teller<Slots, Index, Slot>(ledger, step, rows_source::arriving, wanted, block / stretches, !good,
                                        offsets)
            .tell(block % stretches, stretches, scan);
        return;
    }
    if (!good) {
        return;
    }
    for (std::int32_t r = ledger_thread(); r < step.num_requests; r += ledger_threads) {
        if (step.request_ids[r] >= 0) {
            request_header& header = *ledger.record(step.request_ids[r]).header;
            header.open = step.ticket;
            header.tag = step.rows.tags[r];
            header.staged.num_tokens = header.committed.num_tokens + step.count(r);
        }
    }
}

/// Whether there are no more rows than the arrays have: places among them then fit an int32. Called by all
/// threads of a thread block.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline bool offsets_are_good(const cuda_step& step) {
    bool good = true;
    for (std::int32_t r = ledger_thread(); r < step.num_requests; r += ledger_threads) {
        good = step.rows_are_there(r) && good;
    }
    return __syncthreads_and(good ? 1 : 0) != 0;
}

/// @p num_stagers thread blocks stage the rows that enter a layer, the others tell of them.
template <class Slots, class Index, class Slot>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    append_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ cuda_step step,
                  const __grid_constant__ step_wishes<Slots, Index, Slot> wanted, std::int32_t layer,
                  std::int32_t num_stagers) {
    extern __shared__ std::int32_t ledger_memory[];
    __shared__ set_stager::room room;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    if (block >= num_stagers) {
        const std::int32_t stretches = stretches_of(wanted.out.num_rows);
        step_teller<Slots, Index, Slot>(ledger, step, rows_source::entering, wanted,
                                        (block - num_stagers) / stretches, !offsets_are_good(step),
                                        ledger_memory)
            .tell((block - num_stagers) % stretches, stretches, room.scan);
        return;
    }
    for (std::int32_t r = block; r < step.num_requests; r += num_stagers) {
        set_stager(ledger, step, layer, room).append(r);
        __syncthreads();
    }
}

template <class Slots, class Index, class Slot>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    look_up_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ cuda_step step,
                   const __grid_constant__ step_wishes<Slots, Index, Slot> wanted) {
    extern __shared__ std::int32_t ledger_memory[];
    __shared__ ledger_scan::room scan;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t stretches = stretches_of(wanted.out.num_rows);
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    step_teller<Slots, Index, Slot>(ledger, step, rows_source::staged, wanted, block / stretches, false,
                                    ledger_memory)
        .tell(block % stretches, stretches, scan);
}

/// Ends the step for the requests that are in it: a warp for each.
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    end_step_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ cuda_step step,
                    bool commits) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const thread_share lanes{static_cast<std::int32_t>(threadIdx.x % 32), 32};
    const auto warps = static_cast<std::int32_t>(gridDim.x * blockDim.x / 32);
    for (auto r = static_cast<std::int32_t>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
         r < step.num_requests; r += warps) {
        const std::int32_t request = step.request_ids[r];
        if (request == -1) {
            continue;
        }
        if (!ledger.is_admitted(request) || ledger.record(request).header->open != step.ticket) {
            if (lanes.thread == 0) {
                ledger.raise(ledger_complaint::not_in_step, request, -1, request);
            }
            continue;
        }
        const request_record state = ledger.record(request);
        const request_extent committed = state.header->committed;
        const request_extent staged = state.header->staged;
        __syncwarp();
        if (staged.dense_from != committed.dense_from) {
            if (!commits) {
                state.sets.clear(committed.dense_from, staged.dense_from, lanes);
            }
            for (std::int32_t set = lanes.thread; set < ledger.bounds.num_sets; set += lanes.step) {
                if (commits) {
                    state.committed_below[set] = state.staged_below[set];
                } else {
                    state.staged_below[set] = state.committed_below[set];
                }
            }
        }
        if (lanes.thread == 0) {
            (commits ? state.header->committed : state.header->staged) = commits ? staged : committed;
            state.header->close();
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
