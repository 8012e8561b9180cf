// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Single-precision arithmetic. On the device by its instructions, so that -use_fast_math and contraction
/// have nothing to change; elsewhere by the C++ functions, which round some results differently and keep
/// subnormal numbers: there it serves tests.
#pragma once

#include <uniprefill/core/element.hpp>

#include <cmath>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr float log2_of_euler = 1.44269504088896340736f;
/// What a partial holds where no key is visible.
inline constexpr float no_visible_keys = -3.402823466e+38f;

[[nodiscard]] inline UNIPREFILL_API float multiply(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    float product;
    asm("mul.rn.ftz.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
#else
    return a * b;
#endif
}
[[nodiscard]] inline UNIPREFILL_API float add(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    float sum;
    asm("add.rn.ftz.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
#else
    return a + b;
#endif
}
/// a * b + c, rounded once.
[[nodiscard]] inline UNIPREFILL_API float multiply_add(float a, float b, float c) noexcept {
#if defined(__CUDA_ARCH__)
    float sum;
    asm("fma.rn.ftz.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
#else
    return std::fma(a, b, c);
#endif
}
[[nodiscard]] inline UNIPREFILL_API float larger(float a, float b) noexcept {
#if defined(__CUDA_ARCH__)
    float result;
    asm("max.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a > b ? a : b;
#endif
}
/// x without its sign.
[[nodiscard]] inline UNIPREFILL_API float size_of(float x) noexcept {
#if defined(__CUDA_ARCH__)
    float size;
    asm("abs.ftz.f32 %0, %1;" : "=f"(size) : "f"(x));
    return size;
#else
    return std::fabs(x);
#endif
}
/// 2^x, relative error at most 2^-22; 0 below 2^-126.
[[nodiscard]] inline UNIPREFILL_API float exp2_of(float x) noexcept {
#if defined(__CUDA_ARCH__)
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#else
    return std::exp2(x);
#endif
}
/// log2(x), absolute error at most 2^-22 within [1/2, 2], relative 2^-22 elsewhere.
[[nodiscard]] inline UNIPREFILL_API float log2_of(float x) noexcept {
#if defined(__CUDA_ARCH__)
    float logarithm;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(x));
    return logarithm;
#else
    return std::log2(x);
#endif
}
[[nodiscard]] inline UNIPREFILL_API float reciprocal(float x) noexcept {
#if defined(__CUDA_ARCH__)
    float result;
    asm("rcp.rn.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
#else
    return 1.0f / x;
#endif
}

/// a * b + c in double precision, rounded once.
[[nodiscard]] inline UNIPREFILL_API double multiply_add(double a, double b, double c) noexcept {
#if defined(__CUDA_ARCH__)
    return __fma_rn(a, b, c);
#else
    return std::fma(a, b, c);
#endif
}
/// The integer next to @p x towards zero. Beyond the integers, where only the device has a result, that is
/// the outermost one; nothing to rely on for NaN.
[[nodiscard]] inline UNIPREFILL_API std::int64_t truncate(float x) noexcept {
#if defined(__CUDA_ARCH__)
    return __float2ll_rz(x);
#else
    return static_cast<std::int64_t>(x);
#endif
}

/// On the device they start as what registers hold: arrays of them cost nothing where they aren't all filled.
struct four_floats {
#if defined(__CUDA_ARCH__)
    UNIPREFILL_API four_floats() noexcept {}
#else
    UNIPREFILL_API four_floats() noexcept
        : four_floats(0, 0, 0, 0) {}
#endif
    UNIPREFILL_API four_floats(float first, float second, float third, float fourth) noexcept
        : x(first)
        , y(second)
        , z(third)
        , w(fourth) {}

    float x, y, z, w;
};
/// The four numbers at @p from, which is a multiple of 16 bytes.
[[nodiscard]] inline UNIPREFILL_API four_floats load_four(const float* from) noexcept {
#if defined(__CUDA_ARCH__)
    const float4 loaded = *reinterpret_cast<const float4*>(from);
    return {loaded.x, loaded.y, loaded.z, loaded.w};
#else
    return {from[0], from[1], from[2], from[3]};
#endif
}

/// tanh(x) from one exponential and one division.
[[nodiscard]] inline UNIPREFILL_API float tanh_of(float x) noexcept {
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
