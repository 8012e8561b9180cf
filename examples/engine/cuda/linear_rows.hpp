// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/element.hpp>

#include <cuda_runtime.h>

#include <cstdint>

/// What a gated delta rule layer does to rows before and after the rule, as Qwen3-Next has it: one launch
/// each, on the caller's stream; nothing waits. Heads have 128 dimensions; rows start at multiples of 16
/// bytes.
namespace engine::cuda {

using uniprefill::bfloat16;

/// A causal convolution over four rows for each channel, then SiLU; the first channels are heads that become
/// vectors of length 1. Rows that were dropped are not there for it: it runs over its request's rows as they
/// are.
struct short_convolution_call {
    static constexpr std::int32_t taps = 4;

    const bfloat16* in = nullptr; // [rows, channels]
    std::int64_t in_stride = 0;
    const float* weights = nullptr;           // [taps, channels], the row's own last
    std::int32_t channels = 0;                ///< a multiple of 128
    std::int32_t unit_channels = 0;           ///< of heads that are normalised, a multiple of 128
    const std::int32_t* cu_seqlens = nullptr; // [requests + 1]
    std::int32_t requests = 0;
    std::int32_t rows = 0;   ///< an upper bound
    bfloat16* out = nullptr; // [rows, channels]
};
void short_convolution(const short_convolution_call& call, cudaStream_t on);

/// beta = sigmoid(b), log_decay = -rate * log(1 + exp(a + bias)); both [rows, heads].
/// @param b_and_a  b of all heads and a of all heads side by side, @p stride elements from row to row
/// @param rate, bias  [heads]
void delta_gates(const bfloat16* b_and_a, std::int64_t stride, const float* rate, const float* bias,
                 std::int32_t rows, std::int32_t heads, float* beta, float* log_decay, cudaStream_t on);

/// x = x / sqrt(mean(x^2) + epsilon) * weight * silu(gate), head by head, in place.
/// @param x       [rows, heads, 128], dense
/// @param weight  [128], the same for all heads
void gated_norm(bfloat16* x, const bfloat16* gate, std::int64_t gate_stride, const float* weight,
                float epsilon, std::int32_t rows, std::int32_t heads, cudaStream_t on);

} // namespace engine::cuda
