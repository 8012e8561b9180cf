// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Exact integer arithmetic for everything that decides which rows are kept.
#pragma once

#include <uniprefill/core/element.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A number in [0, 1] as an integer multiple of 2^-63. Every double of at least 2^-10 converts exactly.
struct unit_fraction {
    UNIPREFILL_HIDDEN static constexpr std::uint64_t one = std::uint64_t{1} << 63; ///< the number 1
    std::uint64_t value = one;

    /// Converts by the double's bits alone, so that compiler flags can't change the result. Values that are
    /// NaN, negative or above 1 give 0, which no rule accepts as p.
    [[nodiscard]] static UNIPREFILL_API unit_fraction from(double number) noexcept {
        const auto bits = bit_cast<std::uint64_t>(number);
        const std::uint64_t biased = (bits >> 52) & 0x7ffu;
        if (bits >> 63 != 0 || biased == 0) {
            return {0}; // negative, zero or subnormal
        }
        const std::uint64_t mantissa = (bits & ((std::uint64_t{1} << 52) - 1)) | (std::uint64_t{1} << 52);
        // number = mantissa * 2^(biased - 1075), so number * 2^63 = mantissa * 2^(biased - 1012).
        if (biased > 1023 || (biased == 1023 && mantissa != std::uint64_t{1} << 52)) {
            return {0};
        }
        if (biased >= 1012) {
            return {mantissa << (biased - 1012)};
        }
        const std::uint64_t shift = 1012 - biased;
        return {shift >= 54 ? 0 : ((mantissa >> (shift - 1)) + 1) >> 1};
    }
};

/// An unsigned 128-bit product, compared limb by limb; the same on host and device, with no extension type.
struct wide_product {
    std::uint64_t high = 0;
    std::uint64_t low = 0;

    /// a * b, all 128 bits.
    [[nodiscard]] static UNIPREFILL_API constexpr wide_product of(std::uint64_t a, std::uint64_t b) noexcept {
        constexpr std::uint64_t mask = 0xffffffffu;
        const std::uint64_t low_low = (a & mask) * (b & mask);
        const std::uint64_t high_low = (a >> 32) * (b & mask);
        const std::uint64_t low_high = (a & mask) * (b >> 32);
        const std::uint64_t middle = (low_low >> 32) + (high_low & mask) + (low_high & mask);
        return {(a >> 32) * (b >> 32) + (high_low >> 32) + (low_high >> 32) + (middle >> 32),
                (middle << 32) | (low_low & mask)};
    }
    [[nodiscard]] friend UNIPREFILL_API constexpr bool operator<(const wide_product& a,
                                                                 const wide_product& b) noexcept {
        return a.high != b.high ? a.high < b.high : a.low < b.low;
    }
};

/// part >= fraction * whole, exactly.
[[nodiscard]] UNIPREFILL_API constexpr bool at_least_fraction(std::uint64_t part, unit_fraction fraction,
                                                              std::uint64_t whole) noexcept {
    return !(wide_product::of(part, unit_fraction::one) < wide_product::of(whole, fraction.value));
}

/// part > fraction * whole, exactly.
[[nodiscard]] UNIPREFILL_API constexpr bool more_than_fraction(std::uint64_t part, unit_fraction fraction,
                                                               std::uint64_t whole) noexcept {
    return wide_product::of(whole, fraction.value) < wide_product::of(part, unit_fraction::one);
}

/// ceil(fraction * count), exactly.
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t ceil_fraction(unit_fraction fraction,
                                                                  std::int32_t count) noexcept {
    const wide_product product = wide_product::of(static_cast<std::uint64_t>(count), fraction.value);
    const std::uint64_t floor = (product.high << 1) | (product.low >> 63);
    const bool rest = (product.low << 1) != 0;
    return static_cast<std::int32_t>(floor + (rest ? 1 : 0));
}

UNIPREFILL_END_NAMESPACE
