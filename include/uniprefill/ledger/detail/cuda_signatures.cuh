// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Signatures of pages on the device: a warp for each request and layer, as each signature goes on from the
/// one before it.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/detail/page_chain.hpp>
#include <uniprefill/ledger/layer_list.hpp>
#include <uniprefill/ledger/request_texts.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t signing_warps = 4; ///< of a thread block: chains are long, and spread

template <class Token>
struct cuda_signing_task {
    const std::int32_t* requests = nullptr; // [count]
    std::int32_t count = 0;
    layer_list layers;
    page_signer signer;
    request_texts<Token> texts;
    std::int32_t page_tokens = 1;
    page_signature* signatures = nullptr; // [layers, count, capacity]
    std::int32_t capacity = 0;
    std::int32_t* num_pages = nullptr; // [layers, count]
};

template <class Token>
class UNIPREFILL_HIDDEN page_signing {
  public:
    __device__ page_signing(const cuda_ledger_state& ledger, const cuda_signing_task<Token>& task)
        : ledger_(ledger)
        , task_(task) {}

    /// By one thread. @param chain request chain % count, in the layer at place chain / count
    __device__ void sign(std::int64_t chain) const { task_.num_pages[chain] = sign_layer(chain); }

  private:
    /// @return the pages signed
    [[nodiscard]] __device__ std::int32_t sign_layer(std::int64_t chain) const {
        const auto r = static_cast<std::int32_t>(chain % task_.count);
        const std::int32_t request = task_.requests[r];
        const std::int32_t layer = task_.layers.at(static_cast<std::int32_t>(chain / task_.count));
        if (request == -1 || !ledger_.require_layer(layer)) {
            return 0;
        }
        const auto refuse = [&](ledger_complaint what, std::int64_t came) {
            ledger_.raise(what, request, layer, came);
            return 0;
        };
        if (!ledger_.is_admitted(request)) {
            return refuse(ledger_complaint::unknown_request, request);
        }
        const request_record state = ledger_.record(request);
        const held_rows held = held_rows_maker::make(state, ledger_.set_of(layer));
        const std::int32_t pages = held.pages(task_.page_tokens);
        if (pages > task_.capacity) {
            return refuse(ledger_complaint::too_many_signatures, pages);
        }
        if (held.num_tokens() > task_.texts.stride) {
            return refuse(ledger_complaint::text, held.num_tokens());
        }
        const std::int64_t text = task_.texts.rows == request_index::batch ? r : request;
        sign_chain(state, ledger_.layout.layer_sets(ledger_.memory), layer, task_.signer,
                   task_.texts.tokens + text * task_.texts.stride, task_.page_tokens, pages,
                   task_.signatures + chain * task_.capacity);
        return pages;
    }

    const cuda_ledger_state& ledger_;
    const cuda_signing_task<Token>& task_;
};

template <class Token>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(signing_warps * 32)
    sign_kernel(const __grid_constant__ cuda_ledger_state ledger,
                const __grid_constant__ cuda_signing_task<Token> task) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (ledger_thread() % 32 != 0) {
        return;
    }
    const std::int64_t chains = std::int64_t{task.layers.count} * task.count;
    for (std::int64_t chain = std::int64_t{blockIdx.x} * signing_warps + ledger_thread() / 32; chain < chains;
         chain += std::int64_t{gridDim.x} * signing_warps) {
        page_signing<Token>(ledger, task).sign(chain);
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
