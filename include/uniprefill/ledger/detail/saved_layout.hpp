// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Where the parts of a saved request lie, and the checksum over them.
#pragma once

#include <uniprefill/ledger/detail/position_sets.hpp>
#include <uniprefill/ledger/saved_request.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Offsets in bytes.
struct saved_layout {
    std::uint64_t layer_sets = 0;
    std::uint64_t below = 0;
    std::uint64_t planes = 0;
    std::uint64_t bytes = 0;

    [[nodiscard]] static UNIPREFILL_API saved_layout of(std::int32_t num_layers, std::int32_t num_sets,
                                                        set_relation relation,
                                                        std::int32_t dense_from) noexcept {
        saved_layout made;
        made.layer_sets = sizeof(saved_header);
        made.below = made.layer_sets + sizeof(std::int32_t) * static_cast<std::uint64_t>(num_layers);
        const std::uint64_t end = made.below + sizeof(std::int32_t) * static_cast<std::uint64_t>(num_sets);
        made.planes = (end + 7) / 8 * 8;
        made.bytes = made.planes + sizeof(std::uint64_t) *
                                       static_cast<std::uint64_t>(count_planes(num_sets, relation)) *
                                       static_cast<std::uint64_t>(end_word(dense_from));
        return made;
    }
    /// As memory is counted; the largest size_t where no memory is that large.
    [[nodiscard]] UNIPREFILL_API std::size_t size() const noexcept {
        const auto most = static_cast<std::size_t>(-1);
        return bytes < most ? static_cast<std::size_t>(bytes) : most;
    }
};

/// One word's part of the checksum, which is the sum of all parts: in any order, by any number of threads.
/// The finaliser of splitmix64 (Steele, Lea, Flood 2014).
[[nodiscard]] inline UNIPREFILL_API std::uint64_t checksum_part(std::uint64_t word,
                                                                std::uint64_t index) noexcept {
    std::uint64_t z = word + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
