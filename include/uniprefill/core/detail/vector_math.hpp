// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// exp2, log2 and the logit soft-cap on vectors. Our own, so that every lane of every vector gets the same
/// bits whatever the compiler's vector math library is, and so that -ffast-math has nothing to simplify.
#pragma once

#include <uniprefill/core/detail/vectors.hpp>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr float log2_of_e = 1.44269504088896340736f;
/// What stands where no key is visible: a score, or the log2 of a sum of none. Adding a log2 to it, or taking
/// 2 to its difference from a score, needs no special case: the first changes nothing, the second is nothing
/// beside the row's own 1.
inline constexpr float no_keys = -3.402823466e+38f;

template <std::int32_t Build>
struct UNIPREFILL_HIDDEN vector_math : lanes<Build> {
    using base = lanes<Build>;
    using base::splat;
    using typename base::floats;
    using typename base::ints;

    /// 2^x for x <= 0; 2^-125 stands for everything below it, NaN included. Exactly 1 at 0. Relative error at
    /// most 1.5e-7: a minimax polynomial of degree 6 in the fraction (2e-9) and the rounding of its Horner
    /// form.
    static floats exp2_of_negative(floats x) noexcept {
        x = base::larger(x, splat(-125.0f));
        const ints whole = base::to_ints(x - splat(0.5f)); // towards zero: the nearest integer of x <= 0
        const floats f = x - base::to_floats(whole);       // [-1/2, 1/2]
        floats y = splat(0x1.41fbbcp-13f);
        y = y * f + splat(0x1.5f3e52p-10f);
        y = y * f + splat(0x1.3b2d4cp-7f);
        y = y * f + splat(0x1.c6aee8p-5f);
        y = y * f + splat(0x1.ebfbdcp-3f);
        y = y * f + splat(0x1.62e430p-1f);
        y = y * f + splat(1.0f);
        return base::from_bits(base::bits(y) + (whole << 23));
    }

    /// log2(x) for normal x >= 1/2. Absolute error at most 1e-7 plus half a unit in the last place.
    static floats log2_of_positive(floats x) noexcept {
        // x = 2^whole * m with m in [sqrt(1/2), sqrt(2)): the subtraction moves the exponent's step there.
        const ints shifted = base::bits(x) - splat(0x3f3504f3);
        const ints whole = shifted >> 23;
        const floats m = base::from_bits((shifted & splat(0x007fffff)) + splat(0x3f3504f3));
        // log2(m) = 2/ln2 * artanh(s), s = (m - 1) / (m + 1), |s| <= 0.172: five terms leave 2e-9.
        const floats s = (m - splat(1.0f)) / (m + splat(1.0f));
        const floats z = s * s;
        floats series = splat(2.0f / 9.0f * log2_of_e);
        series = series * z + splat(2.0f / 7.0f * log2_of_e);
        series = series * z + splat(2.0f / 5.0f * log2_of_e);
        series = series * z + splat(2.0f / 3.0f * log2_of_e);
        series = series * z + splat(2.0f * log2_of_e);
        return base::to_floats(whole) + series * s;
    }

    /// tanh(x). Relative error about 3e-7.
    static floats tanh(floats x) noexcept {
        const ints sign = base::bits(x) & splat(std::int32_t{-0x7fffffff - 1});
        const floats size = base::from_bits(base::bits(x) & splat(0x7fffffff));
        // Below 0.3 the quotient would cancel: the odd series up to x^9 leaves 5e-8 there.
        const floats z = size * size;
        floats series = splat(62.0f / 2835.0f);
        series = series * z + splat(-17.0f / 315.0f);
        series = series * z + splat(2.0f / 15.0f);
        series = series * z + splat(-1.0f / 3.0f);
        const floats near_zero = size + size * z * series;
        const floats e = exp2_of_negative(size * splat(-2.0f * log2_of_e));
        const floats elsewhere = (splat(1.0f) - e) / (splat(1.0f) + e);
        const floats magnitude = base::select(size > splat(0.3f), elsewhere, near_zero);
        return base::from_bits(base::bits(magnitude) | sign);
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
