// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// An append on the device: a thread block for each request turns the positions that enter a layer into sets.
#pragma once

#include <uniprefill/ledger/detail/cuda_layer_change.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

class UNIPREFILL_HIDDEN set_stager : private layer_change {
  public:
    using layer_change::room;

    __device__ set_stager(const cuda_ledger_state& ledger, const cuda_step& step, std::int32_t layer,
                          room& shared)
        : layer_change(ledger, step, layer, shared) {}

    __device__ void append(std::int32_t r) {
        request_ = step_.request_ids[r];
        if (!enter(r)) {
            return;
        }
        if (set_ != 0 && ledger_.first_layer(set_) == layer_) {
            stage();
        }
    }

  private:
    /// Whether the rows may enter the layer. The same in each thread.
    [[nodiscard]] __device__ bool enter(std::int32_t r) {
        if (!step_.rows_are_there(r)) {
            return refuse(ledger_complaint::offsets, step_.rows.cu_seqlens[r + 1]);
        }
        count_ = step_.count(r);
        if (request_ == -1) {
            return count_ == 0 ? false : refuse(ledger_complaint::empty_place, count_);
        }
        if (!ledger_.is_admitted(request_)) {
            return refuse(ledger_complaint::unknown_request, request_);
        }
        state_ = ledger_.record(request_);
        if (state_.header->open != step_.ticket) {
            return refuse(ledger_complaint::not_in_step, request_);
        }
        positions_ = step_.rows.positions + step_.begin(r);
        const bool starts = ledger_.first_layer(set_) == layer_;
        if ((!state_.header->droppable() || !starts || set_ == 0) &&
            count_ != state_.length(set_) - state_.length_before(set_)) {
            return refuse(ledger_complaint::entering_count, count_);
        }
        const bool any_subset = starts && ledger_.bounds.relation == set_relation::independent;
        const std::int32_t end = state_.header->staged.num_tokens;
        bool good = true;
        for (std::int32_t i = ledger_thread(); i < count_; i += ledger_threads) {
            const std::int32_t position = positions_[i];
            const std::int32_t previous = i > 0 ? positions_[i - 1] : state_.header->committed.num_tokens - 1;
            const bool ordered = position > previous && position < end;
            if (!ordered || (!any_subset && !state_.holds(set_, position))) {
                ledger_.raise(ordered ? ledger_complaint::entering_dropped : ledger_complaint::entering_order,
                              request_, layer_, position);
                good = false;
            }
        }
        return __syncthreads_and(good ? 1 : 0) != 0;
    }

    [[nodiscard]] __device__ bool follows(std::int32_t set) const {
        return set_follows(ledger_.layout.layer_sets(ledger_.memory),
                           ledger_.layout.first_layers(ledger_.memory), set, set_);
    }

    /// As the host's ledger does it.
    __device__ void stage() {
        const request_extent committed = state_.header->committed;
        const request_extent staged = state_.header->staged;
        const bool stored = staged.dense_from != committed.dense_from;
        if (!stored && count_ == staged.num_tokens - committed.num_tokens) {
            return; // the tail stays dense
        }
        if (!stored) {
            state_.sets.fill(committed.dense_from, staged.num_tokens, share_of_thread());
        }
        set_writer writer(state_.sets, positions_, count_, shared_);
        writer.keep(set_, committed.num_tokens, staged.num_tokens, [&](std::int32_t set) {
            // Nested sets above follow by themselves.
            return set == set_ || (ledger_.bounds.relation == set_relation::independent && follows(set));
        });
        for (std::int32_t set = 1; set < ledger_.bounds.num_sets; ++set) {
            if (!stored || follows(set)) {
                const std::int32_t below =
                    writer.recount(set, committed.dense_from, staged.num_tokens, state_.committed_below[set]);
                if (ledger_thread() == 0) {
                    state_.staged_below[set] = below;
                }
            }
        }
        if (ledger_thread() == 0 && !stored) {
            state_.header->staged.dense_from = staged.num_tokens;
            state_.staged_below[0] = staged.num_tokens;
        }
        __syncthreads();
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
