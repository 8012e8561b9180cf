// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a decision asks of the threads that take it together.
///
/// A *team* is any number of threads that call the same functions with the same arguments, each with a rank
/// of its own. Element i belongs to thread i % size(). The decision is written against this interface alone,
/// so the device's warps, thread blocks and clusters run the very functions that tests run with a single
/// thread on the host:
/// * `rank()`, `size()`: this thread's number, and how many there are
/// * `held_blocks`: how many of its blocks a thread keeps in registers
/// * `combine(tally)`: the tallies of all threads together, for each of them
/// * `sync()`: waits for the others, whose writes to global memory can be seen then
/// * `lanes()`: the threads that can look at each other's registers, a team within the team
/// * `has_bins`: whether the team searches by histograms. One that doesn't must hold all blocks of a segment.
///
/// With bins, further:
/// * `digit_bits`, `start_search()`: empties all bins and the collection
/// * `add(digits, weights)`: puts weights into bins, 0 <= digit < 2^digit_bits; of a weight of 0 the digit
/// may
///   be anything
/// * `find(need)`: from the highest bin down, the bin in which the running sum of weights reaches @p need,
/// for
///   each thread; bin 0 where the weights don't reach
/// * `collect(block)`, `capacity`: hands a block to everyone, `collected(i)` after the next combine(). Only
///   the first `capacity` are kept.
///
/// Lanes:
/// * `rank()`, `size`: this lane's number, and how many there are
/// * `any(mine, round)`: one of the lanes for which @p mine is true, the same for each; -1: none. Which one
///   differs from round to round.
/// * `from(value, lane)`: the value that a lane has
/// * `sum(weight)`, `combine(tally)`: over all lanes, for each of them
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

/// In front of a function template for any team: teams of the device have functions that only the device
/// runs.
#if defined(__CUDACC__)
#    define UNIPREFILL_ANY_TEAM _Pragma("nv_exec_check_disable")
#else
#    define UNIPREFILL_ANY_TEAM
#endif

/// In front of a loop over what registers hold: registers have no addresses, so nothing may be left of it.
/// And in front of one that is rarely run, of which one copy is enough.
#if defined(__CUDA_ARCH__)
#    define UNIPREFILL_UNROLL _Pragma("unroll")
#    define UNIPREFILL_ONE_COPY _Pragma("unroll 1")
#else
#    define UNIPREFILL_UNROLL
#    define UNIPREFILL_ONE_COPY
#endif

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Numbers that every thread counts over its own elements.
struct tally {
    /// Sums of masses stop here: at or beyond 2^63 they are no masses any more.
    UNIPREFILL_HIDDEN static constexpr std::uint64_t full = std::uint64_t{1} << 63;

    std::uint64_t largest = 0; ///< combined by maximum
    std::uint64_t mass = 0;    ///< combined by a sum that stops at `full`
    std::uint32_t rows = 0;    ///< combined by a sum
    std::uint32_t blocks = 0;  ///< combined by a sum

    /// Adds to the mass; neither number is above `full`.
    UNIPREFILL_API constexpr void add_mass(std::uint64_t more) noexcept {
        mass = more > full - mass ? full : mass + more;
    }
};

/// What team::find() found.
struct found_bin {
    std::uint64_t above = 0; ///< weights in the bins above it
    std::uint32_t digit = 0;
};

/// Binary digits of a number.
[[nodiscard]] UNIPREFILL_API inline std::int32_t bit_length(std::uint64_t number) noexcept {
#if defined(__CUDA_ARCH__)
    return 64 - __clzll(static_cast<long long>(number));
#else
    std::int32_t bits = 0;
    for (; number != 0; number >>= 1) {
        ++bits;
    }
    return bits;
#endif
}

[[nodiscard]] UNIPREFILL_API inline std::int32_t bit_length(std::uint32_t number) noexcept {
#if defined(__CUDA_ARCH__)
    return 32 - __clz(static_cast<int>(number));
#else
    return bit_length(std::uint64_t{number});
#endif
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
