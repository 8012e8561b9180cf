// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/row_kernels.hpp"

#include "engine/cuda/runtime.hpp"

#include <cuda_bf16.h>

namespace engine::cuda {

namespace {

constexpr int threads = 256;

/// Eight bf16 numbers, moved at once.
struct alignas(16) bf16x8 {
    __nv_bfloat162 pairs[4];
};
static_assert(sizeof(bf16x8) == 16);

__device__ bf16x8 load8(const bfloat16* from) {
    return *reinterpret_cast<const bf16x8*>(from);
}
__device__ void store8(bfloat16* to, const bf16x8& values) {
    *reinterpret_cast<bf16x8*>(to) = values;
}

/// The sum over a thread block, in every thread.
__device__ float sum_of_block(float value) {
    __shared__ float warps[threads / 32];
    for (int lane = 16; lane > 0; lane /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, lane);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0;
    for (int warp = 0; warp < threads / 32; ++warp) {
        sum += warps[warp];
    }
    return sum;
}

__global__ void __launch_bounds__(threads)
    embed_kernel(const bfloat16* table, std::int32_t vocab, const std::int32_t* tokens, std::int32_t hidden,
                 float* out) {
    const std::int64_t row = blockIdx.x;
    const std::int32_t token = tokens[row];
    const bool known = token >= 0 && token < vocab;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x) * 8; i < hidden; i += threads * 8) {
        float4 low{};
        float4 high{};
        if (known) {
            const bf16x8 values = load8(table + std::int64_t{token} * hidden + i);
            const float2 a = __bfloat1622float2(values.pairs[0]);
            const float2 b = __bfloat1622float2(values.pairs[1]);
            const float2 c = __bfloat1622float2(values.pairs[2]);
            const float2 d = __bfloat1622float2(values.pairs[3]);
            low = {a.x, a.y, b.x, b.y};
            high = {c.x, c.y, d.x, d.y};
        }
        float4* const to = reinterpret_cast<float4*>(out + row * hidden + i);
        to[0] = low;
        to[1] = high;
    }
}

__global__ void __launch_bounds__(threads)
    rms_norm_kernel(const float* x, const float* weight, float epsilon, std::int32_t hidden,
                    const std::int32_t* ends, bfloat16* out) {
    const std::int64_t row = blockIdx.x;
    const std::int64_t from = ends == nullptr ? row : max(ends[row] - 1, 0);
    const float* const in = x + from * hidden;
    float squares = 0;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x) * 4; i < hidden; i += threads * 4) {
        const float4 v = *reinterpret_cast<const float4*>(in + i);
        squares += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    const float scale = 1.0f / sqrtf(sum_of_block(squares) / static_cast<float>(hidden) + epsilon);
    // The row is read again: it is in the first-level cache.
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x) * 8; i < hidden; i += threads * 8) {
        bf16x8 values;
        for (int half = 0; half < 2; ++half) {
            const float4 v = *reinterpret_cast<const float4*>(in + i + half * 4);
            const float4 w = *reinterpret_cast<const float4*>(weight + i + half * 4);
            values.pairs[half * 2] = __floats2bfloat162_rn(v.x * scale * w.x, v.y * scale * w.y);
            values.pairs[half * 2 + 1] = __floats2bfloat162_rn(v.z * scale * w.z, v.w * scale * w.w);
        }
        store8(out + row * hidden + i, values);
    }
}

__global__ void __launch_bounds__(threads)
    rope_table_kernel(std::int32_t positions, std::int32_t pairs, double log_base, float2* out) {
    const std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    if (i >= std::int64_t{positions} * pairs) return;
    const auto position = static_cast<double>(i / pairs);
    const auto pair = static_cast<double>(i % pairs);
    const double angle = position * exp(-log_base * pair / static_cast<double>(pairs));
    double sine = 0;
    double cosine = 0;
    sincos(angle, &sine, &cosine);
    out[i] = {static_cast<float>(cosine), static_cast<float>(sine)};
}

/// Four pairs rotated; @p angles are their (cosine, sine).
__device__ bf16x8 rotated(const bf16x8& values, const float2* angles) {
    bf16x8 out;
    for (int i = 0; i < 4; ++i) {
        const float2 v = __bfloat1622float2(values.pairs[i]);
        const float2 a = angles[i];
        out.pairs[i] = __floats2bfloat162_rn(v.x * a.x - v.y * a.y, v.x * a.y + v.y * a.x);
    }
    return out;
}

__global__ void __launch_bounds__(threads) rope_kernel(const __grid_constant__ rope_call call) {
    const std::int64_t row = blockIdx.x;
    const std::int32_t alive = *call.alive;
    if (row == 0 && threadIdx.x == 0) *call.entered = alive;
    if (row >= alive) return; // padding
    const std::int64_t elements = call.q_elements + 2 * std::int64_t{call.kv_elements};
    bfloat16* const qkv = call.qkv + row * elements;
    const std::int64_t slot = *call.cached_len + row;
    const bool stored = slot >= 0 && slot < call.capacity;
    const std::int32_t position = min(max(call.positions[row], 0), call.table_positions - 1);
    const float2* const angles = call.table + std::int64_t{position} * (call.rope_dims / 2);
    const std::int32_t rotated_elements = call.q_elements + call.kv_elements;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x) * 8; i < elements; i += threads * 8) {
        bf16x8 values = load8(qkv + i);
        const std::int32_t dim = i % call.head_dim;
        if (i < rotated_elements && dim < call.rope_dims) values = rotated(values, angles + dim / 2);
        if (i < call.q_elements || (call.keys_in_place && i < rotated_elements)) store8(qkv + i, values);
        if (i >= call.q_elements && stored) {
            bfloat16* const cache = i < rotated_elements ? call.k_cache : call.v_cache;
            const std::int32_t at = i - (i < rotated_elements ? call.q_elements : rotated_elements);
            store8(cache + slot * call.kv_elements + at, values);
        }
    }
}

__device__ float silu(float x) {
    return x / (1.0f + __expf(-x));
}

__global__ void __launch_bounds__(threads)
    swiglu_kernel(const bfloat16* gate_up, std::int32_t columns, bfloat16* out) {
    const std::int64_t row = blockIdx.x;
    const bfloat16* const gates = gate_up + row * 2 * columns;
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x) * 8; i < columns; i += threads * 8) {
        const bf16x8 gate = load8(gates + i);
        const bf16x8 up = load8(gates + columns + i);
        bf16x8 values;
        for (int pair = 0; pair < 4; ++pair) {
            const float2 g = __bfloat1622float2(gate.pairs[pair]);
            const float2 u = __bfloat1622float2(up.pairs[pair]);
            values.pairs[pair] = __floats2bfloat162_rn(silu(g.x) * u.x, silu(g.y) * u.y);
        }
        store8(out + row * columns + i, values);
    }
}

/// One of two candidates: the larger logit, the lower index where they are equal.
struct candidate {
    float logit;
    std::int32_t index;
};
__device__ candidate better(candidate a, candidate b) {
    return b.logit > a.logit || (b.logit == a.logit && b.index < a.index) ? b : a;
}

__global__ void __launch_bounds__(threads)
    argmax_kernel(const float* logits, std::int32_t vocab, std::int32_t* out) {
    __shared__ candidate warps[threads / 32];
    __shared__ int broken;
    if (threadIdx.x == 0) broken = 0;
    __syncthreads();
    const float* const row = logits + std::int64_t{blockIdx.x} * vocab;
    candidate best{-INFINITY, vocab};
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < vocab; i += threads) {
        if (!isfinite(row[i])) broken = 1; // whoever writes, writes the same
        best = better(best, {row[i], i});
    }
    for (int lane = 16; lane > 0; lane /= 2) {
        const candidate other{__shfl_xor_sync(0xffffffffu, best.logit, lane),
                              __shfl_xor_sync(0xffffffffu, best.index, lane)};
        best = better(best, other);
    }
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x == 0) {
        for (int warp = 1; warp < threads / 32; ++warp) {
            best = better(best, warps[warp]);
        }
        out[blockIdx.x] = broken != 0 ? -1 : best.index;
    }
}

__global__ void add_lengths_kernel(const std::int32_t* entered, std::int32_t layers, std::int32_t* lengths) {
    const auto layer = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
    if (layer < layers) lengths[layer] += entered[layer];
}

__device__ std::uint64_t mixed(std::uint64_t x) { // the finaliser of SplitMix64 (Steele et al. 2014)
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

__global__ void fill_random_kernel(bfloat16* out, std::int64_t count, std::uint64_t seed, float deviation) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        const std::uint64_t bits = mixed(mixed(seed) ^ static_cast<std::uint64_t>(i));
        float sum = 0; // of four uniform numbers: variance 4 / 12
        for (int part = 0; part < 4; ++part) {
            sum += static_cast<float>((bits >> (16 * part)) & 0xffffu) * (1.0f / 65536.0f) - 0.5f;
        }
        const __nv_bfloat16 value = __float2bfloat16_rn(sum * 1.7320508f * deviation);
        out[i] = uniprefill::bit_cast<bfloat16>(value);
    }
}

__global__ void fill_kernel(float* out, std::int64_t count, float value) {
    const std::int64_t step = std::int64_t{gridDim.x} * blockDim.x;
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
        out[i] = value;
    }
}

unsigned blocks(std::int64_t count) {
    return static_cast<unsigned>(count);
}

constexpr unsigned filling_blocks = 2048;

void launched(const char* what) {
    check(cudaGetLastError(), what);
}

} // namespace

void embed(const bfloat16* table, std::int32_t vocab, const std::int32_t* tokens, std::int32_t rows,
           std::int32_t hidden, float* out, cudaStream_t on) {
    if (rows == 0) return;
    embed_kernel<<<blocks(rows), threads, 0, on>>>(table, vocab, tokens, hidden, out);
    launched("embed");
}

void rms_norm(const float* x, const float* weight, float epsilon, std::int32_t rows, std::int32_t hidden,
              const std::int32_t* ends, bfloat16* out, cudaStream_t on) {
    if (rows == 0) return;
    rms_norm_kernel<<<blocks(rows), threads, 0, on>>>(x, weight, epsilon, hidden, ends, out);
    launched("norm");
}

void make_rope_table(std::int32_t positions, std::int32_t dims, double base, float2* out, cudaStream_t on) {
    const std::int32_t pairs = dims / 2;
    const std::int64_t count = std::int64_t{positions} * pairs;
    if (count == 0) return;
    rope_table_kernel<<<blocks((count + threads - 1) / threads), threads, 0, on>>>(positions, pairs,
                                                                                   log(base), out);
    launched("table of angles");
}

void rope_and_store(const rope_call& call, cudaStream_t on) {
    if (call.rows == 0) return;
    rope_kernel<<<blocks(call.rows), threads, 0, on>>>(call);
    launched("rope");
}

void swiglu(const bfloat16* gate_up, std::int32_t rows, std::int32_t columns, bfloat16* out,
            cudaStream_t on) {
    if (rows == 0) return;
    swiglu_kernel<<<blocks(rows), threads, 0, on>>>(gate_up, columns, out);
    launched("swiglu");
}

void argmax(const float* logits, std::int32_t rows, std::int32_t vocab, std::int32_t* out, cudaStream_t on) {
    if (rows == 0) return;
    argmax_kernel<<<blocks(rows), threads, 0, on>>>(logits, vocab, out);
    launched("argmax");
}

void add_lengths(const std::int32_t* entered, std::int32_t layers, std::int32_t* lengths, cudaStream_t on) {
    add_lengths_kernel<<<blocks((layers + threads - 1) / threads), threads, 0, on>>>(entered, layers,
                                                                                     lengths);
    launched("lengths");
}

void fill_random(bfloat16* out, std::int64_t count, std::uint64_t seed, float deviation, cudaStream_t on) {
    fill_random_kernel<<<filling_blocks, threads, 0, on>>>(out, count, seed, deviation);
    launched("random numbers");
}

void fill(float* out, std::int64_t count, float value, cudaStream_t on) {
    fill_kernel<<<filling_blocks, threads, 0, on>>>(out, count, value);
    launched("fill");
}

} // namespace engine::cuda
