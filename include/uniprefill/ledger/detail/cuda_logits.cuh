// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The rows that need logits, listed by one thread block: a thread for each request.
#pragma once

#include <uniprefill/ledger/detail/cuda_scan.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

template <class Index>
struct cuda_logits_task {
    std::int32_t layer = 0;
    span_lists wanted{};
    std::int32_t max_spans = 0; ///< that `wanted.offsets` may name
    Index* out = nullptr;       // [size]
    std::int32_t size = 0;
    Index* offsets = nullptr; // [num_requests + 1] or null
};

template <class Index>
class UNIPREFILL_HIDDEN logits_lister {
  public:
    __device__ logits_lister(const cuda_ledger_state& ledger, const cuda_step& step,
                             const cuda_logits_task<Index>& task)
        : ledger_(ledger)
        , step_(step)
        , task_(task)
        , set_(ledger.set_of(task.layer)) {}

    __device__ void run(ledger_scan::room& scan) {
        std::int32_t rows = 0;   // of the requests so far
        std::int64_t listed = 0; // of these
        for (std::int32_t first = 0; first < step_.num_requests; first += ledger_threads) {
            const std::int32_t r = first + ledger_thread();
            const bool there = r < step_.num_requests && is_there(r);
            std::int32_t here = 0;
            std::int32_t first_row = 0;
            std::int32_t all_rows = 0;
            if (there) {
                const request_record state = ledger_.record(step_.request_ids[r]);
                here = state.length(set_) - state.length_before(set_);
            }
            ledger_scan(scan).exclusive_sum(here, first_row, all_rows);
            __syncthreads();
            std::int32_t mine = 0;
            std::int32_t before = 0;
            std::int32_t all = 0;
            if (there) {
                visit(r, 0, [&](std::int32_t) { mine += mine < most_of_a_request ? 1 : 0; });
            }
            ledger_scan(scan).exclusive_sum(mine, before, all);
            std::int64_t at = listed + before;
            if (r < step_.num_requests && task_.offsets != nullptr) {
                task_.offsets[r] = static_cast<Index>(at);
            }
            if (there) {
                visit(r, rows + first_row, [&](std::int32_t row) {
                    if (at < task_.size) {
                        task_.out[at] = row;
                    }
                    ++at;
                });
            }
            rows += all_rows;
            listed += all;
            __syncthreads();
        }
        for (std::int64_t i = listed + ledger_thread(); i < task_.size; i += ledger_threads) {
            task_.out[i] = -1;
        }
        if (ledger_thread() == 0) {
            if (task_.offsets != nullptr) {
                task_.offsets[step_.num_requests] = static_cast<Index>(listed);
            }
            if (listed > task_.size) {
                ledger_.raise(ledger_complaint::too_many_logits, -1, task_.layer, task_.size);
            }
        }
    }

  private:
    /// Counted at most, so that sums fit: 4 M rows, 256 requests at a time.
    static constexpr std::int32_t most_of_a_request = 1 << 22;

    [[nodiscard]] __device__ bool is_there(std::int32_t r) const {
        const std::int32_t request = step_.request_ids[r];
        return ledger_.is_slot(request) && ledger_.record(request).header->open == step_.ticket;
    }
    /// Calls visitor(row) for each row of a request that needs logits, -1 for one that was dropped.
    template <class Visitor>
    __device__ void visit(std::int32_t r, std::int32_t first_row, Visitor visitor) const {
        const request_record state = ledger_.record(step_.request_ids[r]);
        const std::int32_t begin = state.header->committed.num_tokens;
        const std::int32_t end = state.header->staged.num_tokens;
        const auto visit_span = [&](position_span span) {
            for (std::int32_t position = span.begin > begin ? span.begin : begin;
                 position < (span.end < end ? span.end : end); ++position) {
                visitor(state.holds(set_, position)
                            ? first_row + state.rows_below(set_, position) - state.length_before(set_)
                            : -1);
            }
        };
        if (task_.wanted.offsets == nullptr) {
            visit_span({state.header->tag == request_tag::verify ? begin : end - 1, end});
            return;
        }
        const std::int32_t first = task_.wanted.offsets[r];
        const std::int32_t last = task_.wanted.offsets[r + 1];
        if (first < 0 || last < first || last > task_.max_spans) {
            ledger_.raise(ledger_complaint::wanted, step_.request_ids[r], task_.layer, last);
            return;
        }
        for (std::int32_t i = first; i < last; ++i) {
            visit_span(task_.wanted.spans[i]);
        }
    }

    const cuda_ledger_state& ledger_;
    const cuda_step& step_;
    const cuda_logits_task<Index>& task_;
    std::int32_t set_;
};

template <class Index>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(ledger_threads)
    logits_kernel(const __grid_constant__ cuda_ledger_state ledger, const __grid_constant__ cuda_step step,
                  const __grid_constant__ cuda_logits_task<Index> task) {
    __shared__ ledger_scan::room scan;
    let_next_kernel_start();
    wait_for_previous_kernel();
    logits_lister<Index>(ledger, step, task).run(scan);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
