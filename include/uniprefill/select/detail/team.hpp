// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a decision asks of the threads that take it together.
///
/// A *team* is any number of threads that call the same functions with the same arguments, each with a rank
/// of its own. Element i belongs to thread i % size(). The decision is written against this interface alone,
/// so the device's thread blocks and clusters run the very functions that tests run with a single thread on
/// the host:
/// * `rank()`, `size()`: this thread's number, and how many there are
/// * `held_blocks`: how many of its blocks a thread keeps in registers
/// * `combine(tally, with_free)`: the tallies of all threads together, for each of them; `free` only if asked
///   for
/// * `count(mine)`: how many threads near this one say yes, for which `near_rank()` and `near_size()` count
/// * `note()`: where the thread whose near_rank() is 0 leaves a note, `noted()` by all near threads after the
///   next count()
/// * `sync()`: waits for the others, whose writes to global memory can be seen then
///
/// To search for a cut, further:
/// * `start_search(counts)`: empties the collection, and all bins if it @p counts
/// * `digit_bits`, `add(digit, weight)`: puts a weight into a bin, 0 <= digit < 2^digit_bits. All weights
///   together stay below 2^32.
/// * `find(mass, need_of, meanwhile)`: sums up masses too, and from the highest bin down finds the bin in
///   which the running sum of weights reaches need_of(found), for each thread; bin 0 where the weights don't
///   reach. `need_of` is asked by a few threads, knows the total, and may tell all a target; others do
///   meanwhile().
/// * `collect(candidate)`, `capacity`: hands a block to everyone. Only the first `capacity` are kept.
/// * `gather(count)`: after a combine(), makes collected blocks readable as `collected(i)`, i < count
/// * `share_bits(count)`: 2^bits neighbouring threads look at one of @p count collected blocks together;
///   near_size() is a multiple. `sum_shares(sides, bits)`: what those found together, for each of them.
///   `group_rank()`: the lowest near_rank() of those threads that have to do this in step
/// * `tell(result)` by at most one thread near this one, then `told()` by all: what was told since the last
///   start_search(), a result of order -1 if nothing was
///
/// For a quick decision, instead of combine() and the last four:
/// * `sum(sums)`: the sums of all threads together, for each of them, and how many blocks are collected
/// * `quick_collect()`, `quick_gather()` after a sum(), `quick_collected()`, `quick_tell()`, `quick_told()`
/// * `group_size` threads look at one collected block together, `sum_group(sums)` is what those found
/// * `add_near(cta, rows)`: where a cluster shares a stretch of rows, counts rows in that of a thread block;
///   sum() adds those of thread blocks before this thread's to its `ahead`
#pragma once

#include <uniprefill/core/config.hpp>
#include <uniprefill/core/detail/any_team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Numbers that every thread counts over its own elements.
struct tally {
    /// Sums of masses stop here: at or beyond 2^63 they are no masses any more.
    UNIPREFILL_HIDDEN static constexpr std::uint64_t full = std::uint64_t{1} << 63;

    std::uint64_t mass = 0; ///< combined by a sum that stops at `full`, like all sums of masses
    std::uint64_t free = 0; ///< mass of rows that may be dropped
    std::uint32_t rows = 0;
    std::uint32_t blocks = 0;
    std::uint32_t inside = 0; ///< blocks among which the cut may lie
    std::uint32_t bits = 0;   ///< combined by maximum
};

/// What team::find() found.
struct found_bin {
    std::uint32_t digit = 0;
    std::uint64_t total = 0;  ///< of the masses
    std::uint64_t target = 0; ///< as it was told
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
