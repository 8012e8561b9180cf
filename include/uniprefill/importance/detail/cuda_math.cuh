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
