// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a pipeline stage tells the next one, in device memory.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/stage_rows.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// @param what with as many rows as there may be
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    write_stage_kernel(const __grid_constant__ cuda_ledger_state ledger,
                       const __grid_constant__ stage_words what, std::int32_t* words) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    stage_words counted = what;
    if (what.num_requests > 0) {
        counted.num_rows = what.cu_seqlens[what.num_requests];
        counted.num_leaving = what.cu_leaving[what.num_requests];
    } else {
        counted.num_rows = counted.num_leaving = 0;
    }
    const std::int64_t first = std::int64_t{blockIdx.x} * ledger_threads + ledger_thread();
    const bool rows_good = counted.num_rows >= 0 && counted.num_rows <= what.num_rows;
    if (!rows_good || counted.num_leaving < 0 || counted.num_leaving > what.num_leaving) {
        if (first == 0) {
            words[0] = 0; // no format: the next stage refuses it
            ledger.raise(ledger_complaint::offsets, -1, -1,
                         rows_good ? counted.num_leaving : counted.num_rows);
        }
        return;
    }
    const std::int64_t all = stage_rows_words(what.num_requests, counted.num_leaving);
    for (std::int64_t i = first; i < all; i += std::int64_t{gridDim.x} * ledger_threads) {
        words[i] = counted.at(i);
    }
}

/// Whether the words are those of such a step. Otherwise their first offset becomes one that no step begins
/// with.
/// @param what its numbers alone: requests, and how many rows there may be
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(32)
    check_stage_kernel(const __grid_constant__ cuda_ledger_state ledger,
                       const __grid_constant__ stage_words what, std::int32_t* words) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (ledger_thread() != 0) {
        return;
    }
    const bool good = words[0] == stage_rows_format && words[1] == what.num_requests && words[2] >= 0 &&
                      words[2] <= what.num_rows && words[3] >= 0 && words[3] <= what.num_leaving;
    if (!good) {
        ledger.raise(ledger_complaint::stage_words, -1, -1, words[0]);
        words[4 + std::int64_t{2} * what.num_requests] = -1;
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
