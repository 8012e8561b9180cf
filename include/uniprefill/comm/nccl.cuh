// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Masses reduced by NCCL, in device memory, on the stream. Opt-in: needs <nccl.h>, so no other header
/// includes it.
#pragma once

#include <uniprefill/comm/detail/check_buffer.hpp>
#include <uniprefill/comm/reduction.hpp>
#include <uniprefill/core/backend.hpp>

#include <nccl.h>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A result of NCCL as a status; `came` holds NCCL's code. @p what must be a string literal. O(1),
/// thread-safe, deterministic.
[[nodiscard]] inline UNIPREFILL_HOST_API status nccl_result(ncclResult_t code, const char* what) noexcept {
    return code == ncclSuccess
               ? success()
               : failure(status_code::backend_error, what, "ncclSuccess", static_cast<std::int32_t>(code));
}

/// Reduces rank buffers in device memory over a communicator that the caller keeps.
class nccl_reduction {
  public:
    /// @param ranks  every rank that holds heads, and no other; a blocking communicator (NCCL's default)
    explicit UNIPREFILL_HOST_API nccl_reduction(ncclComm_t ranks) noexcept
        : ranks_(ranks) {}

    /// All-reduces in place, in the stream's order: see is_reduction_v. Returns once that is enqueued.
    ///
    /// Refuses a null communicator or buffer and a negative count with invalid_argument, before anything is
    /// enqueued; NCCL's own errors are backend_error, among them ncclInProgress of a non-blocking
    /// communicator. Complexity O(count). One call for each communicator at a time; thread-safe otherwise, as
    /// NCCL is. The result is exact, deterministic and the same on every rank. Waits for nothing and can be
    /// captured in a graph; NCCL may allocate when a communicator is used for the first time, so use it once
    /// before.
    UNIPREFILL_HOST_API status operator()(std::int64_t* buffer, std::int64_t count, rank_reduction how,
                                          backend::cuda::stream queue) const noexcept {
        UNIPREFILL_TRY(detail::check_rank_buffer(ranks_ != nullptr, buffer, count));
        return nccl_result(ncclAllReduce(buffer, buffer, static_cast<std::size_t>(count), ncclInt64,
                                         how == rank_reduction::sum ? ncclSum : ncclMax, ranks_, queue),
                           "ncclAllReduce");
    }

  private:
    ncclComm_t ranks_;
};

UNIPREFILL_END_NAMESPACE
