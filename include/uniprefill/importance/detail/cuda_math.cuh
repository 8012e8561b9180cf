// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Single-precision arithmetic by its instructions, so that -use_fast_math and contraction have nothing to
/// change.
#pragma once

#include <uniprefill/core/element.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr float log2_of_euler = 1.44269504088896340736f;
/// What a partial holds where no key is visible.
inline constexpr float no_visible_keys = -3.402823466e+38f;

__device__ UNIPREFILL_HIDDEN inline float multiply(float a, float b) {
    float product;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
__device__ UNIPREFILL_HIDDEN inline float add(float a, float b) {
    float sum;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
/// a * b + c, rounded once.
__device__ UNIPREFILL_HIDDEN inline float multiply_add(float a, float b, float c) {
    float sum;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}
__device__ UNIPREFILL_HIDDEN inline float larger(float a, float b) {
    float result;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
__device__ UNIPREFILL_HIDDEN inline float smaller(float a, float b) {
    float result;
    asm("min.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
/// 2^x, relative error at most 2^-22; 0 below 2^-126.
__device__ UNIPREFILL_HIDDEN inline float exp2_of(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
}
/// log2(x), absolute error at most 2^-22 within [1/2, 2], relative 2^-22 elsewhere.
__device__ UNIPREFILL_HIDDEN inline float log2_of(float x) {
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
}
__device__ UNIPREFILL_HIDDEN inline float reciprocal(float x) {
    float result;
    asm("rcp.rn.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

/// 2^x on the multiply-add units, for x in [-125, 127]; what lies outside is brought to the edge. The nearest
/// integer of x goes into the exponent, the rest into a minimax polynomial of degree 5 (relative error 1.9e-7
/// on
/// [-1/2, 1/2]). Relieves the special-function unit, which would otherwise be as busy as the tensor cores.
__device__ UNIPREFILL_HIDDEN inline float exp2_by_polynomial(float x) {
    constexpr float round_to_integer =
        12582912.0f; // 1.5 * 2^23: adding it leaves the integer in the low bits
    x = smaller(larger(x, -125.0f), 127.0f);
    const float shifted = add(x, round_to_integer);
    const float fraction = add(x, -add(shifted, -round_to_integer));
    float y = multiply_add(fraction, 0x1.5bba14p-10f, 0x1.3cea88p-7f);
    y = multiply_add(y, fraction, 0x1.c6b752p-5f);
    y = multiply_add(y, fraction, 0x1.ebf9bcp-3f);
    y = multiply_add(y, fraction, 0x1.62e42ap-1f);
    y = multiply_add(y, fraction, 1.0f);
    return bit_cast<float>(bit_cast<std::int32_t>(y) + (bit_cast<std::int32_t>(shifted) << 23));
}

/// tanh(x) from one exponential and one division.
__device__ UNIPREFILL_HIDDEN inline float tanh_of(float x) {
    const float size = bit_cast<float>(bit_cast<std::uint32_t>(x) & 0x7fffffffu);
    // Below 0.3 the quotient would cancel: the odd series up to x^9 leaves 5e-8 there.
    const float z = multiply(size, size);
    float series = multiply_add(z, 62.0f / 2835.0f, -17.0f / 315.0f);
    series = multiply_add(series, z, 2.0f / 15.0f);
    series = multiply_add(series, z, -1.0f / 3.0f);
    const float near_zero = multiply_add(multiply(size, z), series, size);
    const float e = exp2_of(multiply(size, -2.88539008177792681472f)); // 2 / ln 2
    const float elsewhere = multiply(add(1.0f, -e), reciprocal(add(1.0f, e)));
    const float magnitude = size > 0.3f ? elsewhere : near_zero;
    return bit_cast<float>(bit_cast<std::uint32_t>(magnitude) | (bit_cast<std::uint32_t>(x) & 0x80000000u));
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
