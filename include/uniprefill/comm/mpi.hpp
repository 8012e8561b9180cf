// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Masses reduced by MPI, in host memory. Opt-in: needs <mpi.h>, so no other header includes it.
///
/// Device buffers: an engine that has MPI alone between its GPUs copies the rank buffer to pinned memory on
/// its stream, waits for the stream, calls mpi_reduction on the copy, and copies back on the stream; one
/// functor of its own, which can't be captured in a graph, since it waits.
#pragma once

#include <uniprefill/comm/detail/check_buffer.hpp>
#include <uniprefill/comm/reduction.hpp>
#include <uniprefill/core/backend.hpp>

#include <mpi.h>

#include <climits>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// An error of MPI as a status; `came` holds MPI's code. @p what must be a string literal. O(1), thread-safe,
/// deterministic.
[[nodiscard]] inline UNIPREFILL_HOST_API status mpi_result(int code, const char* what) noexcept {
    return code == MPI_SUCCESS ? success() : failure(status_code::backend_error, what, "MPI_SUCCESS", code);
}

/// Reduces rank buffers in host memory over an intracommunicator that the caller keeps.
///
/// MPI ends the process on an error unless the communicator's error handler is MPI_ERRORS_RETURN; with that,
/// errors come back as a status. The handler is the caller's and isn't touched.
class mpi_reduction {
  public:
    /// @param ranks    every rank that holds heads, and no other; best a duplicate (MPI_Comm_dup), so that no
    ///                 other message can meet ours
    /// @param at_once  integers handed to one MPI call at most (MPI counts by `int`), >= 1 and the same on
    ///                 every rank
    explicit UNIPREFILL_HOST_API mpi_reduction(MPI_Comm ranks, int at_once = INT_MAX) noexcept
        : ranks_(ranks)
        , at_once_(at_once) {}

    /// All-reduces in place: see is_reduction_v. Blocks until every rank has called it.
    ///
    /// Refuses a null communicator or buffer, a negative count and at_once < 1 with invalid_argument, before
    /// any message; MPI's own errors are backend_error. Complexity O(count log ranks) or better, MPI's
    /// choice. Thread-safe as MPI was initialised (MPI_Init_thread), one call for each communicator at a
    /// time. The result is exact and the same on every rank. Not capturable: no device is involved.
    UNIPREFILL_HOST_API status operator()(std::int64_t* buffer, std::int64_t count, rank_reduction how,
                                          host_stream) const noexcept {
        UNIPREFILL_TRY(detail::check_rank_buffer(ranks_ != MPI_COMM_NULL, buffer, count));
        if (at_once_ < 1) {
            return failure(status_code::invalid_argument, "at_once", ">= 1", at_once_);
        }
        for (std::int64_t done = 0; done < count; done += at_once_) {
            const std::int64_t left = count - done;
            UNIPREFILL_TRY(
                mpi_result(MPI_Allreduce(MPI_IN_PLACE, buffer + done,
                                         left < at_once_ ? static_cast<int>(left) : at_once_, MPI_INT64_T,
                                         how == rank_reduction::sum ? MPI_SUM : MPI_MAX, ranks_),
                           "MPI_Allreduce"));
        }
        return success();
    }

  private:
    MPI_Comm ranks_;
    int at_once_;
};

UNIPREFILL_END_NAMESPACE
