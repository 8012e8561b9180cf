// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/linear_rows.hpp"

#include "engine/cuda/bf16x8.cuh"
#include "engine/cuda/runtime.hpp"

namespace engine::cuda {

namespace {

constexpr int threads = 256;
constexpr int head_dim = 128;
constexpr int head_lanes = head_dim / 8;
constexpr int run_rows = 32; // that a thread block does one after the other, so that it reads them once

__global__ void __launch_bounds__(threads)
    convolution_kernel(const __grid_constant__ short_convolution_call call) {
    constexpr int taps = short_convolution_call::taps;
    const std::int32_t channel = static_cast<std::int32_t>(blockIdx.y * threads + threadIdx.x) * 8;
    if (channel >= call.channels) return; // whole heads
    const std::int32_t first = static_cast<std::int32_t>(blockIdx.x) * run_rows;
    const std::int32_t alive = min(call.cu_seqlens[call.requests], call.rows);
    if (first >= alive) return;
    float weights[taps][8];
    for (int tap = 0; tap < taps; ++tap) {
        for (int i = 0; i < 8; ++i) {
            weights[tap][i] = call.weights[std::int64_t{tap} * call.channels + channel + i];
        }
    }
    std::int32_t request = 0;
    while (request + 1 < call.requests && call.cu_seqlens[request + 1] <= first) {
        ++request;
    }
    float window[taps][8];
    const auto read = [&](std::int32_t row, float(&to)[8]) {
        widen(load8(call.in + row * call.in_stride + channel), to);
    };
    const std::int32_t begin = call.cu_seqlens[request];
    for (int tap = 0; tap < taps - 1; ++tap) {
        const std::int32_t row = first - (taps - 1) + tap;
        for (float& value : window[tap + 1]) {
            value = 0;
        }
        if (row >= begin) read(row, window[tap + 1]);
    }
    const bool unit = channel < call.unit_channels;
    const std::int32_t end = min(first + run_rows, alive);
    for (std::int32_t row = first; row < end; ++row) {
        bool begins = false;
        while (request + 1 < call.requests && call.cu_seqlens[request + 1] <= row) {
            ++request;
            begins = true;
        }
        float out[8];
        float squares = 0;
        float now[8];
        read(row, now);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float sum = 0;
#pragma unroll
            for (int tap = 0; tap < taps; ++tap) {
                window[tap][i] = tap + 1 < taps ? (begins ? 0.0f : window[tap + 1][i]) : now[i];
                sum += window[tap][i] * weights[tap][i];
            }
            out[i] = sum * sigmoid(sum);
            squares += out[i] * out[i];
        }
        if (unit) {
            const float scale = rsqrtf(sum_of_lanes(squares, head_lanes) + 1e-6f);
            for (float& value : out) {
                value *= scale;
            }
        }
        store8(call.out + std::int64_t{row} * call.channels + channel, narrow(out));
    }
}

__global__ void __launch_bounds__(threads)
    gates_kernel(const bfloat16* b_and_a, std::int64_t stride, const float* rate, const float* bias,
                 std::int64_t count, std::int32_t heads, float* beta, float* log_decay) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= count) return;
    const std::int64_t row = i / heads;
    const auto head = static_cast<std::int32_t>(i % heads);
    const float b = uniprefill::to_float(b_and_a[row * stride + head]);
    const float a = uniprefill::to_float(b_and_a[row * stride + heads + head]) + bias[head];
    beta[i] = sigmoid(b);
    log_decay[i] = -rate[head] * (a > 20.0f ? a : log1pf(expf(a)));
}

__global__ void __launch_bounds__(threads)
    gated_norm_kernel(bfloat16* x, const bfloat16* gate, std::int64_t gate_stride, const float* weight,
                      float epsilon, std::int32_t elements) {
    const std::int64_t row = blockIdx.x;
    for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x) * 8; at < elements; at += threads * 8) {
        bfloat16* const place = x + row * elements + at;
        float values[8];
        float gates[8];
        widen(load8(place), values);
        widen(load8(gate + row * gate_stride + at), gates);
        float squares = 0;
        for (const float value : values) {
            squares += value * value;
        }
        const float scale = rsqrtf(sum_of_lanes(squares, head_lanes) / head_dim + epsilon);
        for (int i = 0; i < 8; ++i) {
            values[i] *= scale * weight[at % head_dim + i] * gates[i] * sigmoid(gates[i]);
        }
        store8(place, narrow(values));
    }
}

unsigned blocks(std::int64_t count, std::int64_t each) {
    return static_cast<unsigned>((count + each - 1) / each);
}

void launched(const char* what) {
    check(cudaGetLastError(), what);
}

} // namespace

void short_convolution(const short_convolution_call& call, cudaStream_t on) {
    if (call.rows == 0 || call.requests == 0) return;
    const dim3 grid(blocks(call.rows, run_rows), blocks(call.channels, threads * 8));
    convolution_kernel<<<grid, threads, 0, on>>>(call);
    launched("convolution");
}

void delta_gates(const bfloat16* b_and_a, std::int64_t stride, const float* rate, const float* bias,
                 std::int32_t rows, std::int32_t heads, float* beta, float* log_decay, cudaStream_t on) {
    const std::int64_t count = std::int64_t{rows} * heads;
    if (count == 0) return;
    gates_kernel<<<blocks(count, threads), threads, 0, on>>>(b_and_a, stride, rate, bias, count, heads, beta,
                                                             log_decay);
    launched("gates");
}

void gated_norm(bfloat16* x, const bfloat16* gate, std::int64_t gate_stride, const float* weight,
                float epsilon, std::int32_t rows, std::int32_t heads, cudaStream_t on) {
    if (rows == 0) return;
    gated_norm_kernel<<<static_cast<unsigned>(rows), threads, 0, on>>>(x, gate, gate_stride, weight, epsilon,
                                                                       heads * head_dim);
    launched("norm");
}

} // namespace engine::cuda
