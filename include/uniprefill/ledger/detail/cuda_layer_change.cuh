// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the classes share by which a thread block changes what a layer holds of a request.
#pragma once

#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/detail/cuda_set_writer.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

class UNIPREFILL_HIDDEN layer_change {
  public:
    using room = set_writer::room;

  protected:
    __device__ layer_change(const cuda_ledger_state& ledger, const cuda_step& step, std::int32_t layer,
                            room& shared)
        : ledger_(ledger)
        , step_(step)
        , shared_(shared)
        , layer_(layer)
        , set_(ledger.set_of(layer)) {}

    /// Raises a fault for the request. @return false
    [[nodiscard]] __device__ bool refuse(ledger_complaint what, std::int64_t came) const {
        if (ledger_thread() == 0) {
            ledger_.raise(what, request_, layer_, came);
        }
        return false;
    }

    const cuda_ledger_state& ledger_;
    const cuda_step& step_;
    room& shared_;
    request_record state_{};
    const std::int32_t* positions_ = nullptr; // [count_] of the request
    std::int32_t count_ = 0;
    std::int32_t request_ = -1;
    std::int32_t layer_;
    std::int32_t set_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
