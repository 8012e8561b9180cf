// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/element.hpp>

#include <cuda_bf16.h>

namespace engine::cuda {

using uniprefill::bfloat16;

/// Eight bf16 numbers, moved at once.
struct alignas(16) bf16x8 {
    __nv_bfloat162 pairs[4];
};
static_assert(sizeof(bf16x8) == 16);

__device__ inline bf16x8 load8(const bfloat16* from) {
    return *reinterpret_cast<const bf16x8*>(from);
}
__device__ inline void store8(bfloat16* to, const bf16x8& values) {
    *reinterpret_cast<bf16x8*>(to) = values;
}
__device__ inline void widen(const bf16x8& values, float (&out)[8]) {
    for (int pair = 0; pair < 4; ++pair) {
        const float2 two = __bfloat1622float2(values.pairs[pair]);
        out[2 * pair] = two.x;
        out[2 * pair + 1] = two.y;
    }
}
__device__ inline bf16x8 narrow(const float (&values)[8]) {
    bf16x8 out;
    for (int pair = 0; pair < 4; ++pair) {
        out.pairs[pair] = __floats2bfloat162_rn(values[2 * pair], values[2 * pair + 1]);
    }
    return out;
}

/// The sum over a group of lanes, a power of two of them, in each of them. Other groups may be elsewhere.
__device__ inline float sum_of_lanes(float value, int lanes) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const unsigned group = (lanes == 32 ? 0xffffffffu : (1u << lanes) - 1) << (lane / lanes * lanes);
    for (int step = lanes / 2; step > 0; step /= 2) {
        value += __shfl_xor_sync(group, value, step);
    }
    return value;
}

__device__ inline float sigmoid(float x) {
    return 1.0f / (1.0f + __expf(-x));
}

} // namespace engine::cuda
