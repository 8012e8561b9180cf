// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Gather, residual add and RMSNorm by loads and stores of threads: any device, rows of up to 64 KiB.
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
    device_reader reader(move.order); // warp 0
    if constexpr (InOrder) {
        row = first_ticket(*move.order, ticket);
    }
    for (std::uint32_t parity = 1; row < static_cast<std::uint32_t>(kept); parity ^= 1u) {
        std::uint32_t next = row + gridDim.x;
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
                static_cast<void>(reader.look(needed)); // so that there is less to wait for afterwards
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
            next = take_turn(*move.order, reader, row, needed);
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
        if constexpr (InOrder) {
            next = pass_ticket(next, ticket);
        }
        row = next;
    }
}

/// Launches it for rows of @p move.vectors vectors.
template <int Vectors, class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm_of_vectors(const norm_move<Weight>& move,
                                                                const cuda_device& device,
                                                                backend::cuda::stream stream) noexcept {
    const std::int32_t threads = (move.vectors + 32 * Vectors - 1) / (32 * Vectors) * 32;
    // Registers allow for 1024 threads of a multiprocessor.
    const std::int32_t fit = device.ctas(threads > 32 ? 1024 / threads : 32);
    const dim3 grid(static_cast<unsigned>(move.num_kept < fit ? move.num_kept : fit));
    const dim3 block(static_cast<unsigned>(threads));
    return move.order == nullptr ? launch(device, &add_norm_kernel<Element, Weight, Vectors, false>, grid,
                                          block, 0, stream, move)
                                 : launch(device, &add_norm_kernel<Element, Weight, Vectors, true>, grid,
                                          block, 0, stream, move);
}

inline constexpr std::int32_t longest_norm_row = 65536; // bytes

template <class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm_in_registers(const norm_move<Weight>& move,
                                                                  const cuda_device& device,
                                                                  backend::cuda::stream stream) noexcept {
    // Fewer vectors of a thread are faster in place, but a block has 1024 threads at most.
    return move.vectors <= 2 * 1024 ? launch_norm_of_vectors<2, Element>(move, device, stream)
                                    : launch_norm_of_vectors<4, Element>(move, device, stream);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
