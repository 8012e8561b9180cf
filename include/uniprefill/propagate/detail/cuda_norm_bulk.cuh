// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Gather, residual add and RMSNorm with bulk copies: each thread block has one row of both tensors in shared
/// memory, where the results replace it. Many small blocks keep the memory busy.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_bulk.cuh>
#include <uniprefill/propagate/detail/cuda_norm_move.cuh>
#include <uniprefill/propagate/detail/cuda_norm_vectors.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The kernel's shape.
struct bulk_norm_shape {
    static constexpr std::int32_t vectors = 4;    ///< of a thread
    static constexpr std::int32_t threads = 384;  ///< at most
    static constexpr std::int32_t at_once = 1536; ///< threads of a multiprocessor
    /// Rows of both tensors and what the kernel keeps beside them fit what every kernel may have.
    static constexpr std::int32_t longest_row = 24064; // bytes
    static constexpr std::int32_t beside = 1536;       // bytes, with what the device keeps for itself
    static constexpr std::int32_t shared = 224 * 1024; // bytes of a multiprocessor
};
static_assert(bulk_norm_shape::longest_row <= 16 * bulk_norm_shape::vectors * bulk_norm_shape::threads);

/// Gathers, adds and normalises; a thread block takes one row at a time. In order, rows are pieces (see
/// piece_order).
template <class Element, class Weight, bool InOrder>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(bulk_norm_shape::threads,
                                                    bulk_norm_shape::at_once / bulk_norm_shape::threads)
    add_norm_bulk_kernel(const __grid_constant__ norm_move<Weight> move) {
    extern __shared__ uint4 norm_rows[]; // hidden and residual, later normalised and sum
    __shared__ float row_sums[32];
    __shared__ std::uint32_t ticket;
    __shared__ bulk_arrival arrival;
    uint4* const hidden = norm_rows;
    uint4* const residual = norm_rows + move.vectors;
    const auto bytes = static_cast<std::uint32_t>(move.vectors) * 16;
    if (threadIdx.x == 0) {
        arrival.start();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const std::int32_t kept = kept_rows(move.kept_count, move.num_kept);
    device_reader reader(move.order); // warp 0
    std::uint32_t row = blockIdx.x;
    if constexpr (InOrder) {
        row = first_ticket(*move.order, ticket);
    }
    for (std::uint32_t turn = 0; row < static_cast<std::uint32_t>(kept);) {
        const std::int64_t old =
            move.kept_to_old != nullptr ? move.kept_to_old[row] : static_cast<std::int32_t>(row);
        const bool inside = old >= 0 && old < move.num_rows;
        // Of a row that isn't there nothing is worked out: thread 0 may still be storing the row before.
        const auto vectors = inside ? static_cast<std::uint32_t>(move.vectors) : 0;
        std::uint32_t next = row + gridDim.x;
        std::uint32_t needed = 0;
        if (threadIdx.x == 0 && inside) {
            arrival.expect(2 * bytes);
            arrival.load(reinterpret_cast<std::byte*>(hidden), move.hidden + old * move.hidden_stride, bytes);
            arrival.load(reinterpret_cast<std::byte*>(residual), move.residual + old * move.residual_stride,
                         bytes);
        }
        if constexpr (InOrder) {
            if (threadIdx.x < 32) {
                needed = rows_before(move, row);
                static_cast<void>(reader.look(needed)); // so that there is less to wait for afterwards
            }
        }
        if (inside) {
            arrival.wait(turn++);
            if constexpr (!copies_in_bulk()) {
                __syncthreads(); // thread 0 copied
            }
        }
        if constexpr (InOrder) {
            if (threadIdx.x < 32) {
                __syncwarp();
                reader.tell(row);
            }
        }
        float squares = 0;
#pragma unroll 2
        for (std::uint32_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
            float sums[vector_elements<Element>];
            float others[vector_elements<Element>];
            unpack<Element>(hidden[vector], sums);
            unpack<Element>(residual[vector], others);
#pragma unroll
            for (int e = 0; e < vector_elements<Element>; ++e) {
                sums[e] += others[e];
            }
            const uint4 sum = pack<Element>(sums);
            residual[vector] = sum;
            unpack<Element>(sum, sums); // what the next layer will read
#pragma unroll
            for (int e = 0; e < vector_elements<Element>; ++e) {
                squares = fmaf(sums[e], sums[e], squares);
            }
        }
        const float total = sum_of_block(squares, row_sums);
        const float scale = rsqrtf(fmaf(total, move.share, move.epsilon));
#pragma unroll 2
        for (std::uint32_t vector = threadIdx.x; vector < vectors; vector += blockDim.x) {
            vector_weights<Element, Weight> weights;
            weights.load(move.weight + vector * vector_elements<Element>);
            float values[vector_elements<Element>];
            float factors[vector_elements<Element>];
            unpack<Element>(residual[vector], values);
            weights.unpack_to(factors);
#pragma unroll
            for (int e = 0; e < vector_elements<Element>; ++e) {
                values[e] = values[e] * scale * (move.weight_offset + factors[e]);
            }
            hidden[vector] = pack<Element>(values);
        }
        bulk_arrival::fence_shared();
        __syncthreads();
        if constexpr (InOrder) {
            if (threadIdx.x < 32) {
                reader.wait(needed);
            }
        }
        if (threadIdx.x == 0) {
            if constexpr (InOrder) {
                bulk_arrival::fence_global();
            }
            if (inside) {
                bulk_arrival::store(move.out_residual + row * move.out_residual_stride,
                                    reinterpret_cast<const std::byte*>(residual), bytes);
                bulk_arrival::store(move.out_hidden + row * move.out_hidden_stride,
                                    reinterpret_cast<const std::byte*>(hidden), bytes);
            }
            if constexpr (InOrder) {
                next = draw_ticket(*move.order);
            }
            bulk_arrival::wait_for_stores_to_read();
        }
        if constexpr (InOrder) {
            next = pass_ticket(next, ticket);
        }
        row = next;
    }
    bulk_arrival::wait_for_stores();
}

/// Whether it can do rows of @p bytes bytes on @p device.
[[nodiscard]] inline UNIPREFILL_HOST_API bool norms_in_bulk(const cuda_device& device,
                                                            std::int64_t bytes) noexcept {
    return has_bulk_copies(device) && bytes <= bulk_norm_shape::longest_row;
}

template <class Element, class Weight>
[[nodiscard]] UNIPREFILL_HOST_API status launch_norm_in_bulk(const norm_move<Weight>& move,
                                                             const cuda_device& device,
                                                             backend::cuda::stream stream) noexcept {
    using shape = bulk_norm_shape;
    const std::int32_t threads = (move.vectors + 32 * shape::vectors - 1) / (32 * shape::vectors) * 32;
    const std::int32_t bytes = 2 * 16 * move.vectors;
    const std::int32_t by_memory = shape::shared / (bytes + shape::beside);
    const std::int32_t by_threads = shape::at_once / threads;
    const std::int32_t most = by_memory < by_threads ? by_memory : by_threads;
    const std::int32_t fit = device.ctas(most < 32 ? most : 32);
    const dim3 grid(static_cast<unsigned>(move.num_kept < fit ? move.num_kept : fit));
    const dim3 block(static_cast<unsigned>(threads));
    const auto shared = static_cast<std::size_t>(bytes);
    return move.order == nullptr ? launch(device, &add_norm_bulk_kernel<Element, Weight, false>, grid, block,
                                          shared, stream, move)
                                 : launch(device, &add_norm_bulk_kernel<Element, Weight, true>, grid, block,
                                          shared, stream, move);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
