// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/element.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

/// The gated delta rule (Yang et al., arXiv 2412.06464, eq. 10), in chunks as DeltaNet has them (Yang et al.,
/// arXiv 2406.06484, section 3.2): linear attention over whatever rows there are. Heads of 128 dimensions;
/// query head h / (v_heads / k_heads) is that of value head h. For each request and value head, row by row:
/// @code
///   S  = exp(log_decay) * S
///   S += beta * (v - S k) k^T
///   o  = scale * S q
/// @endcode
namespace engine::cuda {

using uniprefill::bfloat16;

struct gated_delta_call {
    static constexpr std::int32_t head_dim = 128;
    static constexpr std::int32_t chunk = 64;

    const bfloat16* q = nullptr; // [rows, k_heads, 128], heads side by side
    const bfloat16* k = nullptr; // [rows, k_heads, 128], of norm 1 or less
    const bfloat16* v = nullptr; // [rows, v_heads, 128]
    std::int64_t q_stride = 0;   ///< elements from row to row, a multiple of 8; arrays start at 16 bytes
    std::int64_t k_stride = 0;
    std::int64_t v_stride = 0;
    const float* log_decay = nullptr; // [rows, v_heads], 0 or less
    const float* beta = nullptr;      // [rows, v_heads], 0 to 1
    std::int32_t k_heads = 0;
    std::int32_t v_heads = 0;                 ///< a multiple of k_heads
    const std::int32_t* cu_seqlens = nullptr; // [requests + 1]
    std::int32_t requests = 0;
    std::int32_t rows = 0;        ///< an upper bound: the last of cu_seqlens says how many there are
    float scale = 0.08838834764f; ///< of q: 1 / sqrt(128)
    float* state = nullptr;       // [requests, v_heads, 128 of v, 128 of k]
    bool from_zero = true;        ///< states are written, not read
    bfloat16* out = nullptr;      // [rows, v_heads, 128]; rows beyond those that there are aren't written
    std::int64_t out_stride = 0;
    std::int32_t state_columns = 32; ///< of v in one thread block, 32 or 64
};

/// Bytes of working memory: for all chunks at once, or for as many as @p most bytes hold, at least one.
std::size_t gated_delta_bytes(std::int32_t rows, std::int32_t requests, std::int32_t v_heads,
                              std::size_t most = std::size_t{1} << 30);

/// Two launches for each stretch of chunks that @p memory holds; nothing waits, calls can be captured.
/// Deterministic: a request's bits don't depend on the others nor on the working memory. Products are of bf16
/// numbers, sums and the state fp32.
void gated_delta(const gated_delta_call& call, void* memory, std::size_t bytes, cudaStream_t on);

} // namespace engine::cuda
