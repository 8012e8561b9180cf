// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernel that gathers, adds and normalises rows of up to 64 KiB, and its launch.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_move.cuh>
#include <uniprefill/propagate/detail/cuda_norm_move.cuh>
#include <uniprefill/propagate/detail/cuda_norm_vectors.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Gathers, adds and normalises; a thread block takes one row at a time, and holds it in registers. In order,
/// rows are pieces (see piece_order).
/// @tparam Vectors of a thread, 16 bytes each
template <class Element, class Weight, int Vectors, bool InOrder>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(1024)
    add_norm_kernel(const __grid_constant__ norm_move<Weight> move) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    __shared__ float row_sums[2][32];
    __shared__ std::uint32_t ticket;
    const std::int32_t kept = kept_rows(move.kept_count, move.num_kept);
    std::uint32_t row = blockIdx.x;
    ordered_block turn(move.order, ticket);
    if constexpr (InOrder) {
        row = turn.first();
    }
    for (std::uint32_t parity = 1; row < static_cast<std::uint32_t>(kept); parity ^= 1u) {
        const std::int64_t old =
            move.kept_to_old != nullptr ? move.kept_to_old[row] : static_cast<std::int32_t>(row);
        const bool inside = old >= 0 && old < move.num_rows;
        const std::int64_t from = inside ? old : 0; // there always is a row 0
        uint4 vectors[Vectors];
        uint4 residuals[Vectors];
#pragma unroll
        for (int i = 0; i < Vectors; ++i) {
            const std::int32_t vector = static_cast<std::int32_t>(threadIdx.x + i * blockDim.x);
            // The last vectors of a row may be fewer than threads: these read the first one, and leave it
            // out.
            const std::int64_t byte = vector < move.vectors ? std::int64_t{vector} * 16 : 0;
            load_word(vectors[i], move.hidden + from * move.hidden_stride + byte);
            load_word(residuals[i], move.residual + from * move.residual_stride + byte);
        }
        std::uint32_t needed = 0;
        if constexpr (InOrder) {
            if (threadIdx.x < 32) {
                needed = rows_before(move, row);
                turn.look(needed);
            }
        }
        float squares = 0;
#pragma unroll
        for (int i = 0; i < Vectors; ++i) {
            float sums[vector_elements<Element>];
            float others[vector_elements<Element>];
            unpack<Element>(vectors[i], sums);
            unpack<Element>(residuals[i], others);
#pragma unroll
            for (int e = 0; e < vector_elements<Element>; ++e) {
                sums[e] += others[e];
            }
            vectors[i] = pack<Element>(sums);
            unpack<Element>(vectors[i], sums); // what the next layer will read
            if (static_cast<std::int32_t>(threadIdx.x + i * blockDim.x) < move.vectors) {
#pragma unroll
                for (int e = 0; e < vector_elements<Element>; ++e) {
                    squares = fmaf(sums[e], sums[e], squares);
                }
            }
        }
        vector_weights<Element, Weight> weights[Vectors]; // on their way during the reduction
#pragma unroll
        for (int i = 0; i < Vectors; ++i) {
            const std::int32_t vector = static_cast<std::int32_t>(threadIdx.x + i * blockDim.x);
            weights[i].load(move.weight + (vector < move.vectors ? vector : 0) * vector_elements<Element>);
        }
        // Every thread needed its part of the row for this, so the row is read.
        const float total = sum_of_block(squares, row_sums[parity]);
        const float scale = rsqrtf(fmaf(total, move.share, move.epsilon));
        if constexpr (InOrder) {
            turn.take_turn(row, needed);
        }
        if (inside) {
#pragma unroll
            for (int i = 0; i < Vectors; ++i) {
                const std::int32_t vector = static_cast<std::int32_t>(threadIdx.x + i * blockDim.x);
                if (vector < move.vectors) {
                    const std::int64_t byte = std::int64_t{vector} * 16;
                    float values[vector_elements<Element>];
                    float factors[vector_elements<Element>];
                    unpack<Element>(vectors[i], values);
                    weights[i].unpack_to(factors);
#pragma unroll
                    for (int e = 0; e < vector_elements<Element>; ++e) {
                        values[e] = values[e] * scale * (move.weight_offset + factors[e]);
                    }
                    *reinterpret_cast<uint4*>(move.out_residual + row * move.out_residual_stride + byte) =
                        vectors[i];
                    *reinterpret_cast<uint4*>(move.out_hidden + row * move.out_hidden_stride + byte) =
                        pack<Element>(values);
                }
            }
        }
        row = InOrder ? turn.next() : row + gridDim.x;
    }
}

/// Threads of a multiprocessor that keep the memory busy: more in flight than it takes makes it slower. In
/// order some of them wait.
template <bool InOrder>
inline constexpr std::int32_t norm_threads = InOrder ? 1536 : 768;

template <int Vectors, bool InOrder, class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm_of(const norm_move<Weight>& move,
                                                        const cuda_device& device,
                                                        backend::cuda::stream stream) noexcept {
    const std::int32_t threads = (move.vectors + 32 * Vectors - 1) / (32 * Vectors) * 32;
    const std::int32_t most = (norm_threads<InOrder> + threads - 1) / threads;
    const std::int32_t blocks = most < 32 ? most : 32;
    const dim3 grid = InOrder ? grid_in_order(move.num_kept, blocks, device)
                              : grid_of_pieces(move.num_kept, blocks, device);
    return launch(device, &add_norm_kernel<Element, Weight, Vectors, InOrder>, grid,
                  dim3(static_cast<unsigned>(threads)), 0, stream, move);
}

template <int Vectors, class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm_of(const norm_move<Weight>& move,
                                                        const cuda_device& device,
                                                        backend::cuda::stream stream) noexcept {
    return move.order == nullptr ? launch_norm_of<Vectors, false, Element>(move, device, stream)
                                 : launch_norm_of<Vectors, true, Element>(move, device, stream);
}

inline constexpr std::int32_t longest_norm_row = 65536; // bytes

template <class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm(const norm_move<Weight>& move, const cuda_device& device,
                                                     backend::cuda::stream stream) noexcept {
    // As few vectors of a thread as a block of at most 1024 threads allows. In and out of place the same, or
    // sums would differ.
    return move.vectors <= 2 * 1024 ? launch_norm_of<2, Element>(move, device, stream)
                                    : launch_norm_of<4, Element>(move, device, stream);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
