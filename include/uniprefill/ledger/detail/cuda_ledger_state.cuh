// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A ledger's state as kernels see it, and the requests of a step.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/cuda.cuh>
#include <uniprefill/ledger/detail/ledger_layout.hpp>
#include <uniprefill/ledger/ledger_fault.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t ledger_threads = 256; ///< of each thread block of the ledger's kernels

struct cuda_ledger_state {
    ledger_limits bounds{};
    ledger_layout layout{};
    std::byte* memory = nullptr;
    unsigned long long* fault = nullptr;

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN request_record record(std::int32_t request) const {
        return layout.record(memory, request);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t set_of(std::int32_t layer) const {
        return layout.layer_sets(memory)[layer];
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t first_layer(std::int32_t set) const {
        return layout.first_layers(memory)[set];
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool is_slot(std::int32_t request) const {
        return request >= 0 && request < bounds.max_requests;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool is_admitted(std::int32_t request) const {
        return is_slot(request) && record(request).header->admitted != 0;
    }
    /// Whether a layer that an array names is one; raises a fault otherwise.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool require_layer(std::int32_t layer) const {
        if (layer >= 0 && layer < bounds.num_layers) {
            return true;
        }
        raise(ledger_complaint::layer, -1, layer, layer);
        return false;
    }
    __device__ UNIPREFILL_HIDDEN void raise(ledger_complaint what, std::int32_t request, std::int32_t layer,
                                            std::int64_t came) const {
        atomicMin(fault, static_cast<unsigned long long>(ledger_fault(what, request, layer, came).word()));
    }
};

/// The requests of a step, and rows: those that arrive with it, or those that enter a layer.
struct cuda_step {
    const std::int32_t* request_ids = nullptr; // [num_requests]
    std::int32_t num_requests = 0;
    std::int32_t ticket = 0; ///< what the headers of its requests say while it is open
    batch_view rows;

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t begin(std::int32_t r) const {
        return rows.cu_seqlens[r];
    }
    /// @pre rows_are_there()
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t count(std::int32_t r) const {
        return rows.cu_seqlens[r + 1] - rows.cu_seqlens[r];
    }
    /// Whether the rows of a request lie within the arrays.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool rows_are_there(std::int32_t r) const {
        const std::int32_t first = rows.cu_seqlens[r];
        const std::int32_t end = rows.cu_seqlens[r + 1];
        return first >= 0 && end >= first && end <= rows.num_rows && (r > 0 || first == 0);
    }
};

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t ledger_thread() {
    return static_cast<std::int32_t>(threadIdx.x);
}
/// A thread's share of words among those of its thread block.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline thread_share share_of_thread() {
    return {ledger_thread(), static_cast<std::int32_t>(blockDim.x)};
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
