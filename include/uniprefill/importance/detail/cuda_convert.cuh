// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Elements of a cache that has another type than the queries, 16 bytes of the result at a time.
#pragma once

#include <uniprefill/core/element.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Two e4m3 numbers, in the low 16 bits of @p pair, as two numbers of 16 bits: exact, NaN stays NaN. Exponent
/// and mantissa are moved into place, where they mean the number divided by a power of two (of the exponents'
/// biases), which one multiplication undoes, subnormal numbers included.
template <class To>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t widen_e4m3(std::uint32_t pair) {
    static_assert(std::is_same_v<To, half> || std::is_same_v<To, bfloat16>, "widen_e4m3: 16 bits expected");
    const std::uint32_t apart = __byte_perm(pair, 0, 0x4140); // a byte in each half
    const std::uint32_t sign = (apart & 0x00800080u) << 8;
    const std::uint32_t magnitude = apart & 0x007f007fu;
    const std::uint32_t nan = ((magnitude + 0x00010001u) & 0x00800080u) * 0xffu; // bits 7 to 14
    std::uint32_t wide = 0;
    if constexpr (std::is_same_v<To, half>) {
        asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(wide) : "r"(magnitude << 7), "r"(0x5c005c00u)); // 2^8
    } else {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;"
            : "=r"(wide)
            : "r"(magnitude << 4), "r"(0x7b807b80u), "r"(0u)); // 2^120
    }
    return wide | sign | nan;
}

/// From elements of type From, as loaded, to 16 bytes of elements of type To.
template <class From, class To>
struct UNIPREFILL_HIDDEN converted_piece {
    static constexpr std::int32_t elements = 16 / static_cast<std::int32_t>(sizeof(To));
    static constexpr std::int32_t bytes = elements * static_cast<std::int32_t>(sizeof(From));
    static constexpr std::int32_t words = bytes / 4;

    /// @param from at a multiple of the piece's bytes, or of 16
    static __device__ void load(std::uint32_t* raw, const From* from) {
        if constexpr (bytes == 4) {
            raw[0] = *reinterpret_cast<const std::uint32_t*>(from);
        } else if constexpr (bytes == 8) {
            const uint2 loaded = *reinterpret_cast<const uint2*>(from);
            raw[0] = loaded.x;
            raw[1] = loaded.y;
        } else {
#pragma unroll
            for (std::int32_t i = 0; i < bytes / 16; ++i) {
                const uint4 loaded = reinterpret_cast<const uint4*>(from)[i];
                raw[4 * i] = loaded.x;
                raw[4 * i + 1] = loaded.y;
                raw[4 * i + 2] = loaded.z;
                raw[4 * i + 3] = loaded.w;
            }
        }
    }
    [[nodiscard]] static __device__ uint4 convert(const std::uint32_t* raw) {
        std::uint32_t out[4];
#pragma unroll
        for (std::int32_t i = 0; i < 4; ++i) {
            if constexpr (std::is_same_v<From, float8_e4m3> && sizeof(To) == 2) {
                out[i] = widen_e4m3<To>(raw[i / 2] >> (i % 2 * 16));
            } else if constexpr (sizeof(To) == 2) {
                const To low = from_float<To>(element(raw, 2 * i));
                const To high = from_float<To>(element(raw, 2 * i + 1));
                out[i] = low.bits | static_cast<std::uint32_t>(high.bits) << 16;
            } else {
                out[i] = bit_cast<std::uint32_t>(element(raw, i));
            }
        }
        return make_uint4(out[0], out[1], out[2], out[3]);
    }

  private:
    [[nodiscard]] static __device__ float element(const std::uint32_t* raw, std::int32_t index) {
        if constexpr (std::is_same_v<From, float>) {
            return bit_cast<float>(raw[index]);
        } else if constexpr (std::is_same_v<From, float8_e4m3>) {
            const std::uint32_t pair = raw[index / 4] >> (index % 4 * 8) & 0xffu;
            return to_float(half{static_cast<std::uint16_t>(widen_e4m3<half>(pair))});
        } else {
            return to_float(From{static_cast<std::uint16_t>(raw[index / 2] >> (index % 2 * 16))});
        }
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
