// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Element types: float, and 16-bit storage types that need no CUDA header and have the same bits as CUDA's.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>
#include <cstring>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

/// IEEE 754 binary16 as stored. Arithmetic is done in float, through to_float() and from_float().
struct half {
    std::uint16_t bits;
};

/// The upper 16 bits of an IEEE 754 binary32, as stored.
struct bfloat16 {
    std::uint16_t bits;
};

/// FP8 in the e4m3 format of NVIDIA, AMD and the OCP specification (no infinities, NaN is 0x7f or 0xff), as
/// stored. Keys only, and only for the CUDA backend.
struct float8_e4m3 {
    std::uint8_t bits;
};

static_assert(sizeof(float8_e4m3) == 1);
static_assert(sizeof(half) == 2 && std::is_trivially_copyable_v<half>);
static_assert(sizeof(bfloat16) == 2 && std::is_trivially_copyable_v<bfloat16>);

/// Names an element type at run time, for code that reads tensors from files or other engines.
enum class element_type : std::int32_t { f32, f16, bf16 };

/// True for the types that the library computes with.
template <class Element>
inline constexpr bool is_element_v =
    std::is_same_v<Element, float> || std::is_same_v<Element, half> || std::is_same_v<Element, bfloat16>;

/// Reads the bits of one trivially copyable type as another of the same size (C++20's std::bit_cast).
/// `bit_cast<__half>(h)` is how a storage type becomes CUDA's, and back.
template <class To, class From>
[[nodiscard]] UNIPREFILL_API inline To bit_cast(const From& from) noexcept {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs types of the same size");
    static_assert(std::is_trivially_copyable_v<To> && std::is_trivially_copyable_v<From>);
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

/// True for NaN and both infinities, told by the exponent's bits so that -ffast-math can't remove the test.
[[nodiscard]] UNIPREFILL_API inline bool is_non_finite(float value) noexcept {
    return (bit_cast<std::uint32_t>(value) & 0x7f800000u) == 0x7f800000u;
}

/// The value itself, so that code can be written for any element type.
[[nodiscard]] UNIPREFILL_API inline float to_float(float value) noexcept {
    return value;
}

/// Exact for every value.
[[nodiscard]] UNIPREFILL_API inline float to_float(bfloat16 value) noexcept {
    return bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Exact for every value; NaN stays NaN. Integer operations and selects only, so that loops vectorise.
[[nodiscard]] UNIPREFILL_API inline float to_float(half value) noexcept {
    const std::uint32_t sign = (static_cast<std::uint32_t>(value.bits) & 0x8000u) << 16;
    const std::uint32_t magnitude = static_cast<std::uint32_t>(value.bits) & 0x7fffu;
    // Normal numbers: move exponent and mantissa in place and rebias (127 - 15).
    const std::uint32_t normal = (magnitude << 13) + (112u << 23);
    const std::uint32_t special = normal + (112u << 23); // Inf and NaN: the exponent becomes 255
    // Subnormals: magnitude * 2^-24, exact in float.
    const std::uint32_t subnormal =
        bit_cast<std::uint32_t>(static_cast<float>(magnitude) * 5.9604644775390625e-8f);
    const std::uint32_t bits = magnitude >= 0x7c00u ? special : magnitude >= 0x0400u ? normal : subnormal;
    return bit_cast<float>(sign | bits);
}

/// Conversion from float, round to nearest even; NaN stays NaN.
template <class Element>
[[nodiscard]] UNIPREFILL_API inline Element from_float(float value) noexcept {
    static_assert(is_element_v<Element>, "from_float: Element must be float, half or bfloat16");
    const std::uint32_t bits = bit_cast<std::uint32_t>(value);
    if constexpr (std::is_same_v<Element, float>) {
        return value;
    } else if constexpr (std::is_same_v<Element, bfloat16>) {
        const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
        const std::uint32_t rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
        return {static_cast<std::uint16_t>(is_nan ? ((bits >> 16) | 0x0040u) : (rounded >> 16))};
    } else {
        const std::uint32_t sign = (bits >> 16) & 0x8000u;
        const std::uint32_t magnitude = bits & 0x7fffffffu;
        if (magnitude > 0x7f800000u) {
            return {static_cast<std::uint16_t>(sign | 0x7e00u)};
        }
        if (magnitude >= 0x477ff000u) { // rounds to 65536 or more
            return {static_cast<std::uint16_t>(sign | 0x7c00u)};
        }
        if (magnitude < 0x38800000u) { // below 2^-14: a subnormal half, a multiple of 2^-24
            // Adding 0.5 puts the last kept bit at the float's last place, so the hardware rounds to even.
            const float shifted = bit_cast<float>(magnitude) + 0.5f;
            return {static_cast<std::uint16_t>(sign | (bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
        }
        const std::uint32_t rebiased = magnitude - (112u << 23);
        const std::uint32_t rounded = rebiased + 0x0fffu + ((rebiased >> 13) & 1u);
        return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
    }
}

UNIPREFILL_END_NAMESPACE
