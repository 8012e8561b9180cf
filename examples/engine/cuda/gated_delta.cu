// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/gated_delta.hpp"

#include "engine/cuda/runtime.hpp"
#include "engine/cuda/tensor_cores.cuh"

#include <algorithm>
#include <string>

// With G the running sum of log decays inside a chunk, D[i,j] = exp(G[i] - G[j]) and C its last row:
//   A = strictly lower part of beta[i] * D[i,j] * k[i].k[j]     T = (I + A)^-1
//   W = T (beta exp(G) K)    U = T (beta V)    P = lower part of scale * D[i,j] * q[i].k[j]
//   V' = U - W S^T           O = scale * exp(G) * Q S^T + P V'  S = exp(G[C]) S + (V')^T (exp(G[C] - G) K)
// The first two lines need no state: one kernel does them for all chunks at once. The third is a chain over
// the chunks. All of it is computed transposed: what one product leaves in a warp's registers is what the
// next one takes as its left operand, so the state never leaves its warp, and warps of the chain meet only
// where keys arrive. What the first kernel hands to the second lies as the second's registers want it.
namespace engine::cuda {

namespace {

constexpr int chunk = gated_delta_call::chunk;
constexpr int head_dim = gated_delta_call::head_dim;
constexpr int tile_bytes = chunk * head_dim * 2;
constexpr int solve_warps = 4;
constexpr int solve_threads = solve_warps * 32;

/// What the first kernel leaves of a chunk and value head, in bytes. A group is 16 bytes for each lane of a
/// warp: two right operands, or four squares of V'.
constexpr int group_bytes = 32 * 16;
constexpr int w_bytes = 8 * 4 * group_bytes; // -W: [16 columns of k][16 rows]
constexpr int p_bytes = 10 * group_bytes;    // P: [16 rows][16 columns up to them]
constexpr int factor_bytes = 640;            // 64 of O, 64 of keys, one of the state, padding
constexpr int u_bytes = 8 * 4 * group_bytes; // U: [16 columns of v][16 rows]
constexpr int p_at = w_bytes;
constexpr int factors_at = p_at + p_bytes;
constexpr int u_at = factors_at + factor_bytes;
constexpr int record_bytes = u_at + u_bytes;
static_assert(record_bytes % 128 == 0);

/// A chunk of a request. Chunks are numbered through all requests, with a gap where a request doesn't fill
/// its last one, so that nobody has to count.
struct chunk_place {
    std::int32_t request;
    std::int32_t begin; ///< rows of the chunk
    std::int32_t end;
};

__device__ std::int32_t bounded(const std::int32_t* cu_seqlens, std::int32_t i, std::int32_t rows) {
    return min(max(cu_seqlens[i], 0), rows);
}
__device__ std::int32_t first_chunk_of(std::int32_t first_row, std::int32_t request) {
    return first_row / chunk + request;
}

__device__ chunk_place place_of(const gated_delta_call& call, std::int32_t number) {
    std::int32_t low = 0;
    std::int32_t high = call.requests;
    while (high - low > 1) { // the last request that begins at this chunk or before
        const std::int32_t middle = (low + high) / 2;
        const bool before = first_chunk_of(bounded(call.cu_seqlens, middle, call.rows), middle) <= number;
        (before ? low : high) = middle;
    }
    const std::int32_t first = bounded(call.cu_seqlens, low, call.rows);
    const std::int32_t last = bounded(call.cu_seqlens, low + 1, call.rows);
    const std::int32_t begin = first + (number - first_chunk_of(first, low)) * chunk;
    return {low, begin, min(begin + chunk, last)};
}

/// Where 16 bytes of a tile in shared memory lie: squares are read without two lanes meeting in a bank.
__device__ std::uint32_t tile_offset(int row, int piece) {
    return static_cast<std::uint32_t>(row * (head_dim * 2) + (piece ^ (row & 7)) * 16);
}

/// By so many threads, of which this is one.
template <int Threads>
__device__ void copy_tile(std::uint32_t to, const bfloat16* from, std::int64_t stride, std::int32_t begin,
                          std::int32_t end, int thread) {
    for (int i = thread; i < chunk * 16; i += Threads) {
        const int row = i / 16;
        const int piece = i % 16;
        const bool there = begin + row < end;
        const bfloat16* const source = from + (there ? begin + row : begin) * stride + piece * 8;
        copy16(to + tile_offset(row, piece), source, there);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// Without the state.

/// Shared memory of the first kernel. What is made of Q lies where Q was.
struct solve_memory {
    static constexpr int k_at = 0;
    static constexpr int v_at = tile_bytes;
    static constexpr int q_at = 2 * tile_bytes;
    static constexpr int a_at = q_at;                            // -A in bf16 [64][64]
    static constexpr int diagonal_at = a_at + chunk * chunk * 2; // squares on A's diagonal, float [4][16][16]
    static constexpr int inverse_at = diagonal_at + 4 * 256 * 4; // their inverses, bf16 [4][16][16]
    static constexpr int vectors_at = 3 * tile_bytes;            // float [4][64]
    static constexpr int bytes = vectors_at + 4 * chunk * 4;
    static_assert(inverse_at + 4 * 256 * 2 <= vectors_at);
};

/// Row and 16 bytes of a 64 x 64 matrix of bf16.
__device__ std::uint32_t a_offset(int row, int piece) {
    return static_cast<std::uint32_t>(row * (chunk * 2) + (piece ^ (row & 7)) * 16);
}

/// Running sums of the chunk's log decays, by the first warp: two numbers a lane.
__device__ float2 running_sums(float low, float high) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int step = 1; step < 32; step *= 2) {
        const float before_low = __shfl_up_sync(0xffffffffu, low, static_cast<unsigned>(step));
        const float before_high = __shfl_up_sync(0xffffffffu, high, static_cast<unsigned>(step));
        if (lane >= step) {
            low += before_low;
            high += before_high;
        }
    }
    return {low, high + __shfl_sync(0xffffffffu, low, 31)};
}

/// The inverse of I + A for one square on the diagonal, by forward substitution: a column a lane.
__device__ void invert_square(const float* a, bfloat16* inverse) {
    const int column = static_cast<int>(threadIdx.x) % 16;
    float x[16];
#pragma unroll
    for (int row = 0; row < 16; ++row) {
        x[row] = row == column ? 1.0f : 0.0f;
#pragma unroll
        for (int before = 0; before < row; ++before) {
            x[row] -= a[row * 16 + before] * x[before];
        }
    }
    if (threadIdx.x % 32 >= 16) return;
#pragma unroll
    for (int row = 0; row < 16; ++row) {
        inverse[row * 16 + column].bits = static_cast<std::uint16_t>(packed(x[row], 0.0f));
    }
}

__global__ void __launch_bounds__(solve_threads, 4)
    solve_kernel(const __grid_constant__ gated_delta_call call, std::byte* records, std::int32_t first) {
    extern __shared__ uint4 shared[];
    const std::int32_t local = static_cast<std::int32_t>(blockIdx.x) / call.v_heads;
    const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) % call.v_heads;
    const chunk_place at = place_of(call, first + local);
    if (at.begin >= at.end) return;
    std::byte* const memory = reinterpret_cast<std::byte*>(shared);
    std::byte* const record = records + (std::int64_t{local} * call.v_heads + head) * record_bytes;
    float* const sums = reinterpret_cast<float*>(memory + solve_memory::vectors_at);
    float* const betas = sums + chunk;
    float* const w_factors = betas + chunk; // of rows of K
    const std::uint32_t base = shared_address(memory);
    const std::uint32_t k_tile = base + solve_memory::k_at;
    const std::uint32_t q_tile = base + solve_memory::q_at;
    const std::uint32_t v_tile = base + solve_memory::v_at;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int t = lane % 4;

    const std::int64_t k_head = head / (call.v_heads / call.k_heads);
    copy_tile<solve_threads>(q_tile, call.q + k_head * head_dim, call.q_stride, at.begin, at.end,
                             static_cast<int>(threadIdx.x));
    copy_tile<solve_threads>(k_tile, call.k + k_head * head_dim, call.k_stride, at.begin, at.end,
                             static_cast<int>(threadIdx.x));
    end_batch();
    copy_tile<solve_threads>(v_tile, call.v + std::int64_t{head} * head_dim, call.v_stride, at.begin, at.end,
                             static_cast<int>(threadIdx.x));
    end_batch();
    if (warp == 0) {
        float decays[2];
        for (int half = 0; half < 2; ++half) {
            const int i = lane + half * 32;
            const bool there = at.begin + i < at.end;
            const std::int64_t cell = std::int64_t{at.begin + i} * call.v_heads + head;
            decays[half] = there ? call.log_decay[cell] : 0.0f;
            betas[i] = there ? call.beta[cell] : 0.0f;
        }
        const float2 total = running_sums(decays[0], decays[1]);
        const float last = __shfl_sync(0xffffffffu, total.y, 31);
        float* const factors = reinterpret_cast<float*>(record + factors_at);
        for (int half = 0; half < 2; ++half) {
            const int i = lane + half * 32;
            const float sum = half == 0 ? total.x : total.y;
            sums[i] = sum;
            w_factors[i] = -betas[i] * expf(sum);
            factors[i] = call.scale * expf(sum);
            factors[chunk + i] = expf(last - sum);
        }
        if (lane == 0) factors[2 * chunk] = expf(last);
    }
    wait_for_batches<1>();
    __syncthreads();

    // K K^T and Q K^T of this warp's 16 rows, up to the diagonal.
    float kk[8][4] = {};
    float qk[8][4] = {};
#pragma unroll
    for (int step = 0; step < head_dim / 16; ++step) {
        std::uint32_t k_rows[4];
        std::uint32_t q_rows[4];
        const std::uint32_t mine = tile_offset(16 * warp + lane % 16, 2 * step + lane / 16);
        load_squares(k_rows, k_tile + mine);
        load_squares(q_rows, q_tile + mine);
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            if (pair > warp) break;
            std::uint32_t keys[4];
            load_squares(keys,
                         k_tile + tile_offset(16 * pair + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
            multiply_add(kk[2 * pair], k_rows, keys[0], keys[1]);
            multiply_add(kk[2 * pair + 1], k_rows, keys[2], keys[3]);
            multiply_add(qk[2 * pair], q_rows, keys[0], keys[1]);
            multiply_add(qk[2 * pair + 1], q_rows, keys[2], keys[3]);
        }
    }
    __syncthreads(); // Q has been read

    float* const diagonal = reinterpret_cast<float*>(memory + solve_memory::diagonal_at) + warp * 256;
    const float my_sum[2] = {sums[16 * warp + g], sums[16 * warp + g + 8]};
    const float my_beta[2] = {betas[16 * warp + g], betas[16 * warp + g + 8]};
#pragma unroll
    for (int tile = 0; tile < 8; ++tile) {
        if (tile > 2 * warp + 1) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = 16 * warp + g + 8 * half;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int column = 8 * tile + 2 * t + i;
                const int cell = 2 * half + i;
                // Not asked of pairs above the diagonal: there it could overflow.
                const float decay = column <= row ? __expf(my_sum[half] - sums[column]) : 0.0f;
                kk[tile][cell] = column < row ? kk[tile][cell] * decay * my_beta[half] : 0.0f;
                qk[tile][cell] = column <= row ? qk[tile][cell] * decay * call.scale : 0.0f;
                if (tile >= 2 * warp) diagonal[(row % 16) * 16 + column % 16] = kk[tile][cell];
            }
            if (tile < 2 * warp) {
                *reinterpret_cast<std::uint32_t*>(memory + solve_memory::a_at + a_offset(row, tile) + 4 * t) =
                    packed(-kk[tile][2 * half], -kk[tile][2 * half + 1]);
            }
        }
    }
    uint4* const p_out = reinterpret_cast<uint4*>(record + p_at) + warp * (warp + 1) / 2 * 32 + lane;
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
        if (pair > warp) break;
        p_out[pair * 32] = {
            packed(qk[2 * pair][0], qk[2 * pair][1]), packed(qk[2 * pair + 1][0], qk[2 * pair + 1][1]),
            packed(qk[2 * pair][2], qk[2 * pair][3]), packed(qk[2 * pair + 1][2], qk[2 * pair + 1][3])};
    }
    __syncwarp();
    invert_square(diagonal, reinterpret_cast<bfloat16*>(memory + solve_memory::inverse_at) + warp * 256);
    wait_for_batches<0>(); // V
    __syncthreads();

    // (I + A) X = R by blocks of 16 rows, transposed, for 16 columns of R at a time: X[a] = T[a,a] (R[a] -
    // sum over c < a of A[a,c] X[c]).
    std::uint32_t below[6][4]; // -A[a,c] at a * (a - 1) / 2 + c
    std::uint32_t inverses[4][4];
#pragma unroll
    for (int a = 0; a < 4; ++a) {
        const int row = lane / 16 * 8 + lane % 8;
        load_squares(inverses[a], base + solve_memory::inverse_at +
                                      static_cast<std::uint32_t>(a * 512 + row * 32 + lane / 8 % 2 * 16));
#pragma unroll
        for (int c = 0; c < a; ++c) {
            load_squares(below[a * (a - 1) / 2 + c],
                         base + solve_memory::a_at + a_offset(16 * a + row, 2 * c + lane / 8 % 2));
        }
    }
#pragma unroll 1
    for (int columns = warp; columns < 16; columns += solve_warps) {
        const bool of_keys = columns < 8;
        const std::uint32_t tile = of_keys ? k_tile : v_tile;
        const float* const factors = of_keys ? w_factors : betas;
        std::uint32_t solved[4][4];
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            std::uint32_t words[4];
            load_transposed(words, tile + tile_offset(16 * a + lane / 16 * 8 + lane % 8,
                                                      2 * (columns % 8) + lane / 8 % 2));
            float right[2][4];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float2 low = unpacked(words[2 * half]);
                const float2 high = unpacked(words[2 * half + 1]);
                const float2 factor = *reinterpret_cast<const float2*>(factors + 16 * a + 8 * half + 2 * t);
                right[half][0] = low.x * factor.x;
                right[half][1] = low.y * factor.y;
                right[half][2] = high.x * factor.x;
                right[half][3] = high.y * factor.y;
            }
#pragma unroll
            for (int c = 0; c < a; ++c) {
                const std::uint32_t(&block)[4] = below[a * (a - 1) / 2 + c];
                multiply_add(right[0], solved[c], block[0], block[1]);
                multiply_add(right[1], solved[c], block[2], block[3]);
            }
            const std::uint32_t rounded[4] = {
                packed(right[0][0], right[0][1]), packed(right[0][2], right[0][3]),
                packed(right[1][0], right[1][1]), packed(right[1][2], right[1][3])};
            float sum[2][4] = {};
            multiply_add(sum[0], rounded, inverses[a][0], inverses[a][1]);
            multiply_add(sum[1], rounded, inverses[a][2], inverses[a][3]);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                solved[a][2 * half] = packed(sum[half][0], sum[half][1]);
                solved[a][2 * half + 1] = packed(sum[half][2], sum[half][3]);
            }
        }
        uint4* const out =
            reinterpret_cast<uint4*>(record + (of_keys ? 0 : u_at)) + (columns % 8) * 4 * 32 + lane;
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            if (of_keys) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    solved[a][i] = transposed(solved[a][i]);
                }
            }
            out[a * 32] = {solved[a][0], solved[a][1], solved[a][2], solved[a][3]};
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The chain. A warp holds 16 rows of the state: 16 columns of v by all of k. As many warps again do nothing
// but send for what comes next: with one computing warp for each scheduler, addresses would cost as much as
// products.

template <int Warps>
struct chain_stage {
    static constexpr int u_in = u_at; // W, P and factors lie as in the record
    static constexpr int q_in = u_in + Warps * 4 * group_bytes;
    static constexpr int k_in = q_in + tile_bytes;
    static constexpr int bytes = k_in + tile_bytes;
};

template <int Warps, int Stages>
__global__ void __launch_bounds__(Warps * 64, 1)
    chain_kernel(const __grid_constant__ gated_delta_call call, const std::byte* records, std::int32_t first,
                 std::int32_t count) {
    using stage = chain_stage<Warps>;
    constexpr int slices = 8 / Warps;
    extern __shared__ uint4 shared[];
    const std::int32_t head = static_cast<std::int32_t>(blockIdx.x) / slices;
    const std::int32_t slice = static_cast<std::int32_t>(blockIdx.x) % slices;
    const auto request = static_cast<std::int32_t>(blockIdx.y);
    const std::int32_t begin = bounded(call.cu_seqlens, request, call.rows);
    const std::int32_t end = bounded(call.cu_seqlens, request + 1, call.rows);
    const std::int32_t all_from = first_chunk_of(begin, request);
    const std::int32_t all_to = all_from + max(end - begin + chunk - 1, 0) / chunk;
    const std::int32_t from = max(all_from, first);
    const std::int32_t to = min(all_to, first + count);
    const bool empty = begin >= end;
    if (from >= to && !(empty && first == 0 && call.from_zero)) return;

    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const bool copies = warp >= Warps;
    const int copier = static_cast<int>(threadIdx.x) - Warps * 32;
    const std::int32_t v_column = (slice * Warps + warp) * 16; // of the head
    float* const state =
        call.state + ((std::int64_t{request} * call.v_heads + head) * head_dim + v_column + g) * head_dim +
        2 * t;
    float s[16][4];
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
        float2 low{};
        float2 high{};
        if (!copies && (from != all_from || !call.from_zero)) {
            low = *reinterpret_cast<const float2*>(state + tile * 8);
            high = *reinterpret_cast<const float2*>(state + 8 * head_dim + tile * 8);
        }
        s[tile][0] = low.x;
        s[tile][1] = low.y;
        s[tile][2] = high.x;
        s[tile][3] = high.y;
    }

    std::byte* const memory = reinterpret_cast<std::byte*>(shared);
    const std::int64_t k_head = head / (call.v_heads / call.k_heads);
    const auto fetch = [&](std::int32_t number) {
        const std::uint32_t in =
            shared_address(memory) + static_cast<std::uint32_t>((number - from) % Stages * stage::bytes);
        const std::byte* const record =
            records + (std::int64_t{number - first} * call.v_heads + head) * record_bytes;
        constexpr int shared_pieces = u_at / 16;
        constexpr int own_pieces = Warps * 4 * group_bytes / 16;
        for (int i = copier; i < shared_pieces + own_pieces; i += Warps * 32) {
            const int skipped = i < shared_pieces ? 0 : slice * own_pieces;
            copy16(in + static_cast<std::uint32_t>(i * 16), record + (i + skipped) * 16);
        }
        const std::int32_t row = begin + (number - all_from) * chunk;
        copy_tile<Warps * 32>(in + stage::q_in, call.q + k_head * head_dim, call.q_stride, row, end, copier);
        copy_tile<Warps * 32>(in + stage::k_in, call.k + k_head * head_dim, call.k_stride, row, end, copier);
    };
    for (int ahead = 0; copies && ahead < Stages - 1; ++ahead) {
        if (from + ahead < to) fetch(from + ahead);
        end_batch();
    }

#pragma unroll 1
    for (std::int32_t number = from; number < to; ++number) {
        if (copies) wait_for_batches<Stages - 2>();
        __syncthreads(); // this chunk is here, and all are done with the one before
        if (copies) {
            if (number + Stages - 1 < to) fetch(number + Stages - 1);
            end_batch();
            continue;
        }
        const std::byte* const in = memory + (number - from) % Stages * stage::bytes;
        const std::uint32_t q_tile = shared_address(in) + stage::q_in;
        const std::uint32_t k_tile = shared_address(in) + stage::k_in;
        const uint4* const w = reinterpret_cast<const uint4*>(in) + lane;
        const uint4* const p = reinterpret_cast<const uint4*>(in + p_at) + lane;
        const uint4* const u = reinterpret_cast<const uint4*>(in + stage::u_in) + warp * 4 * 32 + lane;
        const float* const factors = reinterpret_cast<const float*>(in + factors_at);

        float v[8][4]; // V', transposed
        float o[8][4] = {};
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
            const uint4 words = u[pair * 32];
            const std::uint32_t four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float2 two = unpacked(four[i]);
                v[2 * pair + i / 2][i % 2 * 2] = two.x;
                v[2 * pair + i / 2][i % 2 * 2 + 1] = two.y;
            }
        }
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const std::uint32_t rounded[4] = {packed(s[2 * step][0], s[2 * step][1]),
                                              packed(s[2 * step][2], s[2 * step][3]),
                                              packed(s[2 * step + 1][0], s[2 * step + 1][1]),
                                              packed(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const uint4 rows = w[(step * 4 + pair) * 32];
                multiply_add(v[2 * pair], rounded, rows.x, rows.y);
                multiply_add(v[2 * pair + 1], rounded, rows.z, rows.w);
                std::uint32_t queries[4];
                load_squares(queries, q_tile + tile_offset(16 * pair + lane / 16 * 8 + lane % 8,
                                                           2 * step + lane / 8 % 2));
                multiply_add(o[2 * pair], rounded, queries[0], queries[1]);
                multiply_add(o[2 * pair + 1], rounded, queries[2], queries[3]);
            }
        }
        std::uint32_t seen[4][4];  // V' as this chunk's queries see it
        std::uint32_t later[4][4]; // and as the chunk's end does
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const float2 of_o = *reinterpret_cast<const float2*>(factors + 8 * tile + 2 * t);
            const float2 of_k = *reinterpret_cast<const float2*>(factors + chunk + 8 * tile + 2 * t);
            o[tile][0] *= of_o.x;
            o[tile][1] *= of_o.y;
            o[tile][2] *= of_o.x;
            o[tile][3] *= of_o.y;
            const int place = tile % 2 * 2;
            seen[tile / 2][place] = packed(v[tile][0], v[tile][1]);
            seen[tile / 2][place + 1] = packed(v[tile][2], v[tile][3]);
            later[tile / 2][place] = packed(v[tile][0] * of_k.x, v[tile][1] * of_k.y);
            later[tile / 2][place + 1] = packed(v[tile][2] * of_k.x, v[tile][3] * of_k.y);
        }
#pragma unroll
        for (int pair = 0; pair < 4; ++pair) {
#pragma unroll
            for (int step = 0; step <= pair; ++step) {
                const uint4 rows = p[(pair * (pair + 1) / 2 + step) * 32];
                multiply_add(o[2 * pair], seen[step], rows.x, rows.y);
                multiply_add(o[2 * pair + 1], seen[step], rows.z, rows.w);
            }
        }
        const float of_state = factors[2 * chunk];
#pragma unroll
        for (int tile = 0; tile < 16; ++tile) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                s[tile][i] *= of_state;
            }
        }
#pragma unroll
        for (int step = 0; step < 4; ++step) {
#pragma unroll
            for (int pair = 0; pair < 8; ++pair) {
                std::uint32_t keys[4];
                load_transposed(keys, k_tile + tile_offset(16 * step + lane / 8 % 2 * 8 + lane % 8,
                                                           2 * pair + lane / 16));
                multiply_add(s[2 * pair], later[step], keys[0], keys[1]);
                multiply_add(s[2 * pair + 1], later[step], keys[2], keys[3]);
            }
        }
        // Rows of O: a lane has columns 2t of two squares, and writes four columns that lie side by side.
        const std::int32_t row = begin + (number - all_from) * chunk + g;
        bfloat16* const out = call.out + std::int64_t{head} * head_dim + v_column + t % 2 * 8 + t / 2 * 4;
#pragma unroll
        for (int tile = 0; tile < 8; ++tile) {
            const std::uint32_t low = transposed(packed(o[tile][0], o[tile][1]));
            const std::uint32_t high = transposed(packed(o[tile][2], o[tile][3]));
            const std::uint32_t came = __shfl_xor_sync(0xffffffffu, t % 2 == 0 ? high : low, 1);
            const uint2 words = t % 2 == 0 ? uint2{low, came} : uint2{came, high};
            if (row + 8 * tile < end) {
                *reinterpret_cast<uint2*>(out + (row + 8 * tile) * call.out_stride) = words;
            }
        }
    }

    if (copies) return;
#pragma unroll
    for (int tile = 0; tile < 16; ++tile) {
        *reinterpret_cast<float2*>(state + tile * 8) = {s[tile][0], s[tile][1]};
        *reinterpret_cast<float2*>(state + 8 * head_dim + tile * 8) = {s[tile][2], s[tile][3]};
    }
}

void launched(const char* what) {
    check(cudaGetLastError(), what);
}

template <class Kernel>
void allow(const Kernel& kernel, int bytes) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), "shared memory");
}

template <int Warps, int Stages>
void run_chain(const gated_delta_call& call, const std::byte* records, std::int32_t first, std::int32_t count,
               cudaStream_t on) {
    constexpr int bytes = Stages * chain_stage<Warps>::bytes;
    allow(chain_kernel<Warps, Stages>, bytes);
    const dim3 grid(static_cast<unsigned>(call.v_heads * (8 / Warps)), static_cast<unsigned>(call.requests));
    chain_kernel<Warps, Stages><<<grid, Warps * 64, bytes, on>>>(call, records, first, count);
    launched("gated delta rule");
}

template <int Warps>
void run_chain(const gated_delta_call& call, const std::byte* records, std::int32_t first, std::int32_t count,
               int shared_bytes, cudaStream_t on) {
    if (shared_bytes >= 3 * chain_stage<Warps>::bytes) {
        run_chain<Warps, 3>(call, records, first, count, on);
    } else {
        run_chain<Warps, 2>(call, records, first, count, on);
    }
}

std::int64_t chunks_of(std::int32_t rows, std::int32_t requests) {
    return std::int64_t{rows} / chunk + requests;
}

} // namespace

std::size_t gated_delta_bytes(std::int32_t rows, std::int32_t requests, std::int32_t v_heads,
                              std::size_t most) {
    const std::size_t of_chunk = static_cast<std::size_t>(v_heads) * record_bytes;
    const auto chunks = static_cast<std::size_t>(chunks_of(rows, requests));
    return std::max<std::size_t>(std::min(chunks, most / std::max<std::size_t>(of_chunk, 1)), 1) * of_chunk;
}

void gated_delta(const gated_delta_call& call, void* memory, std::size_t bytes, cudaStream_t on) {
    if (call.requests == 0 || call.v_heads == 0) return;
    if (call.k_heads < 1 || call.v_heads % call.k_heads != 0) {
        throw error("gated delta rule", "a multiple of the key heads",
                    std::to_string(call.v_heads) + " value heads for " + std::to_string(call.k_heads));
    }
    if (call.state_columns != 32 && call.state_columns != 64) {
        throw error("gated delta rule, state columns", "32 or 64", std::to_string(call.state_columns));
    }
    const std::int64_t chunks = chunks_of(call.rows, call.requests);
    const auto stretch =
        static_cast<std::int64_t>(bytes / (static_cast<std::size_t>(call.v_heads) * record_bytes));
    if (stretch < 1)
        throw error("gated delta rule", "memory for one chunk", std::to_string(bytes) + " bytes");
    int device = 0;
    int shared_bytes = 0;
    check(cudaGetDevice(&device), "device");
    check(cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), "device");
    if (shared_bytes < 2 * chain_stage<4>::bytes) {
        throw error("gated delta rule", "a device with 128 KiB of shared memory for a thread block",
                    std::to_string(shared_bytes) + " bytes");
    }
    allow(solve_kernel, solve_memory::bytes);
    auto* const records = static_cast<std::byte*>(memory);
    for (std::int64_t first = 0; first < chunks; first += stretch) {
        const auto from = static_cast<std::int32_t>(first);
        const auto count = static_cast<std::int32_t>(std::min(stretch, chunks - first));
        solve_kernel<<<static_cast<unsigned>(count * call.v_heads), solve_threads, solve_memory::bytes, on>>>(
            call, records, from);
        launched("gated delta rule");
        if (call.state_columns == 32) {
            run_chain<2>(call, records, from, count, shared_bytes, on);
        } else {
            run_chain<4>(call, records, from, count, shared_bytes, on);
        }
    }
}

} // namespace engine::cuda
