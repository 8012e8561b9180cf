// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How the masses of tensor-parallel ranks become one: what a reduction is, none, and one behind a pointer.
#pragma once

#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/status.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

/// Whether @p Reduction can be called as one: `status operator()(std::int64_t* buffer, std::int64_t count,
/// rank_reduction how, Stream queue) const noexcept`.
///
/// A reduction combines the rank buffers (core/mass.hpp: masses and fault words) of all ranks in place,
/// element by element, as integers, and leaves the same `count` integers on each. So every rank selects
/// alike, without a broadcast, and a fault on one rank keeps all on every rank. The result must not depend on
/// the order of ranks, which integer sums and maxima don't. mpi_reduction and nccl_reduction are two.
///
/// Every rank of a step calls it once for each decision, with the same count and operator; none does where
/// decide() refuses its arguments, which every rank then does, given the same ones. A status other than ok
/// ends decide(), which returns it: the buffer means nothing then, and this rank has dropped nothing. Ranks
/// learn of each other's errors in the engine's own way, as for any other collective.
template <class Reduction, class Stream>
inline constexpr bool is_reduction_v = std::is_nothrow_invocable_r_v<status, const Reduction&, std::int64_t*,
                                                                     std::int64_t, rank_reduction, Stream>;

/// The reduction of an engine without tensor parallelism.
struct no_reduction {
    /// Leaves the buffer as it is and refuses nothing: one rank is all there is. O(1), thread-safe,
    /// deterministic; puts nothing on the stream.
    template <class Stream>
    UNIPREFILL_HOST_API status operator()(std::int64_t*, std::int64_t, rank_reduction,
                                          Stream) const noexcept {
        return success();
    }
};

/// The user's own reduction behind a function pointer, for those who choose at run time. Without a function
/// it is no_reduction.
template <class Stream>
struct reduction_callback {
    /// What is called, with `context` first. Reports errors by its status; must not throw.
    using function = status (*)(void* context, std::int64_t* buffer, std::int64_t count, rank_reduction how,
                                Stream queue);
    function call = nullptr;
    void* context = nullptr; ///< handed through as it is

    /// Calls the function and returns its status, errors among them, or success where there is none. As
    /// thread-safe, as deterministic and as capturable as the function; O(1) besides.
    UNIPREFILL_HOST_API status operator()(std::int64_t* buffer, std::int64_t count, rank_reduction how,
                                          Stream queue) const noexcept {
        return call == nullptr ? success() : call(context, buffer, count, how, queue);
    }
};

UNIPREFILL_END_NAMESPACE
