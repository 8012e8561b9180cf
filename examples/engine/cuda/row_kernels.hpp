// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/element.hpp>

#include <cuda_runtime.h>

#include <cstdint>

/// Operations on rows in device memory, one launch each, on the caller's stream; nothing waits. Row sizes are
/// multiples of 8 elements and rows start at multiples of 16 bytes. A row's result depends on that row alone.
namespace engine::cuda {

using uniprefill::bfloat16;

/// Row i of @p out is row tokens[i] of a dense table [vocab, hidden]; zeros for an id outside it.
void embed(const bfloat16* table, std::int32_t vocab, const std::int32_t* tokens, std::int32_t rows,
           std::int32_t hidden, float* out, cudaStream_t on);

/// out = x / sqrt(mean(x^2) + epsilon) * weight.
/// @param ends  null: row i of x. Otherwise row ends[i] - 1: the last one of each of `rows` requests
void rms_norm(const float* x, const float* weight, float epsilon, std::int32_t rows, std::int32_t hidden,
              const std::int32_t* ends, bfloat16* out, cudaStream_t on);

/// Cosine and sine by (position, pair): the angle is position * base^(-2 * pair / dims), in double.
void make_rope_table(std::int32_t positions, std::int32_t dims, double base, float2* out, cudaStream_t on);

/// What is done to q, k and v of the rows that enter a layer.
struct rope_call {
    bfloat16* qkv = nullptr; // [rows, q | k | v]; q is rotated in place
    std::int32_t rows = 0;
    std::int32_t q_elements = 0;
    std::int32_t kv_elements = 0;
    std::int32_t head_dim = 0;
    std::int32_t rope_dims = 0;              ///< first dimensions of each head, a multiple of 8
    const std::int32_t* positions = nullptr; // [rows]
    const float2* table = nullptr;           // [table_positions, rope_dims / 2]
    std::int32_t table_positions = 0;        ///< positions beyond count as the last
    bfloat16* k_cache = nullptr;             // [capacity, kv_elements]
    bfloat16* v_cache = nullptr;
    std::int32_t capacity = 0;                ///< rows beyond it are not written
    const std::int32_t* cached_len = nullptr; ///< [1] where the first row goes
    const std::int32_t* alive = nullptr;      ///< [1] rows that there really are
    std::int32_t* entered = nullptr;          ///< [1] gets what `alive` says
    bool keys_in_place = false;               ///< k is rotated in place as well
};
/// Rotates pairs (x0, x1), (x2, x3), ... of q and k by their rows' positions; k and v go to the cache.
void rope_and_store(const rope_call& call, cudaStream_t on);

/// out = gate * sigmoid(gate) * up; rows of @p gate_up hold gate and up side by side.
void swiglu(const bfloat16* gate_up, std::int32_t rows, std::int32_t columns, bfloat16* out, cudaStream_t on);

/// The first index of the largest logit of each row; -1 where one isn't finite.
void argmax(const float* logits, std::int32_t rows, std::int32_t vocab, std::int32_t* out, cudaStream_t on);

/// lengths[l] += entered[l].
void add_lengths(const std::int32_t* entered, std::int32_t layers, std::int32_t* lengths, cudaStream_t on);

/// Numbers near a normal distribution of this deviation, the same for the same seed.
void fill_random(bfloat16* out, std::int64_t count, std::uint64_t seed, float deviation, cudaStream_t on);
void fill(float* out, std::int64_t count, float value, cudaStream_t on);

} // namespace engine::cuda
