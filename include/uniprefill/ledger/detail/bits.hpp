// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Operations on 64-bit words of positions.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t word_positions = 64;

[[nodiscard]] inline UNIPREFILL_API std::int32_t count_bits(std::uint64_t word) noexcept {
#if defined(__CUDA_ARCH__)
    return __popcll(word);
#elif defined(__GNUC__) || defined(__clang__)
    return __builtin_popcountll(word);
#else
    word -= (word >> 1) & 0x5555555555555555u;
    word = (word & 0x3333333333333333u) + ((word >> 2) & 0x3333333333333333u);
    word = (word + (word >> 4)) & 0x0f0f0f0f0f0f0f0fu;
    return static_cast<std::int32_t>((word * 0x0101010101010101u) >> 56);
#endif
}

/// Index of the lowest set bit. @pre word != 0
[[nodiscard]] inline UNIPREFILL_API std::int32_t lowest_bit(std::uint64_t word) noexcept {
    return count_bits((word & (~word + 1)) - 1);
}

/// The bits of word @p index that lie in positions [begin, end). @pre begin <= end
[[nodiscard]] inline UNIPREFILL_API std::uint64_t range_mask(std::int64_t index, std::int64_t begin,
                                                             std::int64_t end) noexcept {
    const std::int64_t first = begin - index * word_positions;
    const std::int64_t last = end - index * word_positions;
    if (first >= word_positions || last <= 0) {
        return 0;
    }
    const std::uint64_t from = first <= 0 ? ~std::uint64_t{0} : ~std::uint64_t{0} << first;
    const std::uint64_t below = last >= word_positions ? ~std::uint64_t{0} : (std::uint64_t{1} << last) - 1;
    return from & below;
}

/// Words that touch positions [begin, end): first to end_word - 1.
[[nodiscard]] inline UNIPREFILL_API std::int64_t end_word(std::int64_t end) noexcept {
    return (end + word_positions - 1) / word_positions;
}

/// A row's page and its place there.
struct row_place {
    std::int32_t page;
    std::int32_t row;
};

/// Division with remainder that is cheap where pages are powers of two. @pre row >= 0, page_tokens >= 1
[[nodiscard]] inline UNIPREFILL_API row_place place_of(std::int32_t row, std::int32_t page_tokens) noexcept {
    const std::int32_t below = page_tokens - 1;
    if ((page_tokens & below) == 0) {
        return {row >> count_bits(static_cast<std::uint32_t>(below)), row & below};
    }
    return {row / page_tokens, row % page_tokens};
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
