// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Whether a step may begin, as every thread block that asks finds it.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Judges the requests of a step that begins. All threads of a thread block call its functions.
class UNIPREFILL_HIDDEN step_check {
  public:
    /// @param seen [ceil(max_requests / 32)] room in shared memory
    __device__ step_check(const cuda_ledger_state& ledger, const cuda_step& step, std::uint32_t* seen)
        : ledger_(ledger)
        , step_(step)
        , seen_(seen) {}

    /// @param opens whether this thread block is the one that opens the step, and raises the fault
    [[nodiscard]] __device__ bool passes(bool opens) {
        const std::int32_t words = (ledger_.bounds.max_requests + 31) / 32;
        for (std::int32_t i = ledger_thread(); i < words; i += ledger_threads) {
            seen_[i] = 0;
        }
        __syncthreads();
        bool good = true;
        for (std::int32_t r = ledger_thread(); r < step_.num_requests; r += ledger_threads) {
            std::int64_t came = 0;
            const ledger_complaint what = judge(r, opens, came);
            good = good && what == ledger_complaint::none;
            if (opens && what != ledger_complaint::none) {
                ledger_.raise(what, step_.request_ids[r], -1, came);
            }
        }
        return __syncthreads_and(good ? 1 : 0) != 0;
    }

    /// Whether positions go on from the last ones. @pre passes()
    [[nodiscard]] __device__ bool positions_go_on() const {
        if (step_.rows.positions == nullptr) {
            return true;
        }
        constexpr std::int32_t few_rows = 4; // a thread looks at so many by itself
        bool good = true;
        bool any_more = false;
        for (std::int32_t r = ledger_thread(); r < step_.num_requests; r += ledger_threads) {
            if (step_.count(r) <= few_rows) {
                good = go_on(r, 0, 1) && good;
            } else {
                any_more = true;
            }
        }
        any_more = __syncthreads_or(any_more ? 1 : 0) != 0;
        for (std::int32_t r = 0; any_more && r < step_.num_requests; ++r) {
            if (step_.count(r) > few_rows) {
                good = go_on(r, ledger_thread(), ledger_threads) && good;
            }
        }
        return __syncthreads_and(good ? 1 : 0) != 0;
    }

  private:
    [[nodiscard]] __device__ ledger_complaint judge(std::int32_t r, bool opens, std::int64_t& came) {
        const std::int32_t request = step_.request_ids[r];
        const auto tag = static_cast<std::int32_t>(step_.rows.tags[r]);
        came = step_.rows.cu_seqlens[r + 1];
        if (!step_.rows_are_there(r)) {
            return ledger_complaint::offsets;
        }
        const std::int32_t count = step_.count(r);
        came = tag;
        if (tag < 0 || tag > static_cast<std::int32_t>(request_tag::verify)) {
            return ledger_complaint::tag;
        }
        came = count;
        if (request == -1) {
            return count == 0 ? ledger_complaint::none : ledger_complaint::empty_place;
        }
        came = request;
        if (!ledger_.is_admitted(request)) {
            return ledger_complaint::unknown_request;
        }
        const request_header& header = *ledger_.record(request).header;
        const std::uint32_t bit = 1u << (request % 32);
        const bool twice = (atomicOr(&seen_[request / 32], bit) & bit) != 0;
        // Others may look after the step has been opened.
        if (twice || (header.open != 0 && (opens || header.open != step_.ticket))) {
            return ledger_complaint::busy_request;
        }
        const std::int32_t held = header.committed.num_tokens;
        came = tag;
        if (tag == static_cast<std::int32_t>(request_tag::prefill) && held != 0) {
            return ledger_complaint::second_prefill;
        }
        came = std::int64_t{held} + count;
        return count > ledger_.bounds.max_tokens - held ? ledger_complaint::too_many_tokens
                                                        : ledger_complaint::none;
    }

    [[nodiscard]] __device__ bool go_on(std::int32_t r, std::int32_t first, std::int32_t stride) const {
        const std::int32_t request = step_.request_ids[r];
        if (request < 0) {
            return true;
        }
        const std::int32_t held = ledger_.record(request).header->committed.num_tokens;
        const std::int32_t* const positions = step_.rows.positions + step_.begin(r);
        const std::int32_t count = step_.count(r);
        for (std::int32_t i = first; i < count; i += stride) {
            if (positions[i] != held + i) {
                ledger_.raise(ledger_complaint::gap, request, -1, positions[i]);
                return false;
            }
        }
        return true;
    }

    const cuda_ledger_state& ledger_;
    const cuda_step& step_;
    std::uint32_t* seen_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
