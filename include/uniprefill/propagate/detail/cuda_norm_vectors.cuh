// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Vectors of 16 bytes as floats, and sums over a thread block.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/element.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Two floats as two elements of 16 bits in a word, the first in the lower half; round to nearest even.
template <class Element>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t pack_pair(float low, float high) {
    std::uint32_t word;
    if constexpr (std::is_same_v<Element, bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}
template <class Element>
__device__ UNIPREFILL_HIDDEN void unpack_pair(std::uint32_t word, float& low, float& high) {
    if constexpr (std::is_same_v<Element, bfloat16>) {
        low = __uint_as_float(word << 16);
        high = __uint_as_float(word & 0xffff0000u);
    } else {
        asm("{ .reg .b16 l, h;\n"
            "mov.b32 {l, h}, %2;\n"
            "cvt.f32.f16 %0, l;\n"
            "cvt.f32.f16 %1, h; }"
            : "=f"(low), "=f"(high)
            : "r"(word));
    }
}

/// A 16-byte vector of elements as floats, and back.
template <class Element>
inline constexpr int vector_elements = static_cast<int>(16 / sizeof(Element));

template <class Element>
__device__ UNIPREFILL_HIDDEN void unpack(const uint4& vector, float (&values)[vector_elements<Element>]) {
    const std::uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Element) == 4) {
            values[i] = __uint_as_float(words[i]);
        } else {
            unpack_pair<Element>(words[i], values[2 * i], values[2 * i + 1]);
        }
    }
}
template <class Element>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN uint4 pack(const float (&values)[vector_elements<Element>]) {
    std::uint32_t words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (sizeof(Element) == 4) {
            words[i] = __float_as_uint(values[i]);
        } else {
            words[i] = pack_pair<Element>(values[2 * i], values[2 * i + 1]);
        }
    }
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/// The weights that belong to one vector of elements, as they lie in memory.
template <class Element, class Weight>
struct vector_weights {
    static constexpr int words = vector_elements<Element> / vector_elements<Weight>;
    uint4 stored[words];

    __device__ UNIPREFILL_HIDDEN void load(const Weight* weight) {
#pragma unroll
        for (int i = 0; i < words; ++i) {
            stored[i] = __ldg(reinterpret_cast<const uint4*>(weight) + i);
        }
    }
    __device__ UNIPREFILL_HIDDEN void unpack_to(float (&values)[vector_elements<Element>]) const {
#pragma unroll
        for (int i = 0; i < words; ++i) {
            float some[vector_elements<Weight>];
            unpack<Weight>(stored[i], some);
#pragma unroll
            for (int e = 0; e < vector_elements<Weight>; ++e) {
                values[i * vector_elements<Weight> + e] = some[e];
            }
        }
    }
};

/// The sum of all threads' values, the same for all threads. One barrier; @p sums may be used again behind
/// another one.
__device__ UNIPREFILL_HIDDEN inline float sum_of_block(float value, float (&sums)[32]) {
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) {
        value += __shfl_xor_sync(~0u, value, apart);
    }
    if (threadIdx.x % 32 == 0) {
        sums[threadIdx.x / 32] = value;
    }
    __syncthreads();
    float total = 0;
    for (unsigned warp = 0; warp < blockDim.x / 32; ++warp) {
        total += sums[warp];
    }
    return total;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
