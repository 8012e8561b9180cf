// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Positions given up after a prompt has ended: a thread block for each request.
#pragma once

#include <uniprefill/ledger/detail/cuda_layer_change.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

class UNIPREFILL_HIDDEN set_keeper : private layer_change {
  public:
    using layer_change::room;

    /// @param step its rows are what the layer keeps
    __device__ set_keeper(const cuda_ledger_state& ledger, const cuda_step& step, std::int32_t layer,
                          room& shared)
        : layer_change(ledger, step, layer, shared) {}

    template <class Index>
    __device__ void keep_only(std::int32_t r, Index* from_rows) {
        request_ = step_.request_ids[r];
        if (request_ == -1 || !enter(r)) {
            return;
        }
        for (std::int32_t i = ledger_thread(); from_rows != nullptr && i < count_; i += ledger_threads) {
            from_rows[step_.begin(r) + i] = state_.rows_below(set_, positions_[i]);
        }
        const bool all = count_ == state_.length(set_);
        __syncthreads();
        if (!all) {
            give_up();
        }
    }

  private:
    /// The same in each thread.
    [[nodiscard]] __device__ bool enter(std::int32_t r) {
        if (!ledger_.is_admitted(request_)) {
            return refuse(ledger_complaint::unknown_request, request_);
        }
        state_ = ledger_.record(request_);
        if (state_.header->open != 0) {
            return refuse(ledger_complaint::busy_request, request_);
        }
        if (set_ == 0) {
            return refuse(ledger_complaint::whole_layer, layer_);
        }
        if (!step_.rows_are_there(r)) {
            return refuse(ledger_complaint::offsets, step_.rows.cu_seqlens[r + 1]);
        }
        count_ = step_.count(r);
        positions_ = step_.rows.positions + step_.begin(r);
        const bool nested =
            ledger_.bounds.relation == set_relation::nested && set_ + 1 < ledger_.bounds.num_sets;
        bool good = true;
        std::int32_t in_next_set = 0;
        for (std::int32_t first = 0; first < count_; first += ledger_threads) {
            const std::int32_t i = first + ledger_thread();
            bool in_next = false;
            if (i < count_) {
                const std::int32_t position = positions_[i];
                const std::int32_t previous = i > 0 ? positions_[i - 1] : -1;
                if (position <= previous || position >= state_.header->committed.num_tokens ||
                    !state_.holds(set_, position)) {
                    ledger_.raise(ledger_complaint::kept_position, request_, layer_, position);
                    good = false;
                } else {
                    in_next = nested && state_.holds(set_ + 1, position);
                }
            }
            in_next_set += __syncthreads_count(in_next ? 1 : 0);
        }
        if (__syncthreads_and(good ? 1 : 0) == 0) {
            return false;
        }
        return !nested || in_next_set == state_.length(set_ + 1)
                   ? true
                   : refuse(ledger_complaint::kept_by_next_set, in_next_set);
    }

    /// As the host's ledger does it.
    __device__ void give_up() {
        const request_extent extent = state_.header->committed;
        // What lies behind the last position given up stays dense: positions count down with their places.
        const std::int32_t least = extent.dense_from;
        std::int32_t low = 0; // of the places from here on, all positions are in that tail
        std::int32_t high = count_;
        while (low < high) {
            const std::int32_t middle = low + (high - low) / 2;
            const bool in_tail =
                positions_[middle] >= least && positions_[middle] - middle == extent.num_tokens - count_;
            high = in_tail ? middle : high;
            low = in_tail ? low : middle + 1;
        }
        const std::int32_t end = extent.num_tokens - (count_ - low);
        set_writer writer(state_.sets, positions_, low, shared_);
        state_.sets.fill(extent.dense_from, end, share_of_thread());
        __syncthreads();
        writer.keep(set_, 0, end, [&](std::int32_t set) { return set == set_; });
        for (std::int32_t set = 1; set < ledger_.bounds.num_sets; ++set) {
            const bool changed = set == set_;
            const std::int32_t below = writer.recount(set, changed ? 0 : extent.dense_from, end,
                                                      changed ? 0 : state_.committed_below[set]);
            if (ledger_thread() == 0) {
                state_.committed_below[set] = state_.staged_below[set] = below;
            }
        }
        if (ledger_thread() == 0) {
            state_.committed_below[0] = state_.staged_below[0] = end;
            request_extent left = extent;
            left.dense_from = end;
            state_.header->committed = state_.header->staged = left;
        }
        __syncthreads();
    }
};

template <class Index>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    keep_only_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ cuda_step step,
                     std::int32_t layer, Index* from_rows) {
    __shared__ set_keeper::room room;
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto r = static_cast<std::int32_t>(blockIdx.x); r < step.num_requests;
         r += static_cast<std::int32_t>(gridDim.x)) {
        set_keeper(ledger, step, layer, room).keep_only(r, from_rows);
        __syncthreads();
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
