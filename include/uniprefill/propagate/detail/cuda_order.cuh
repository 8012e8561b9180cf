// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The order of pieces (piece_order.hpp) in device memory.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/piece_order.hpp>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The scratch of a move in place: rows that go in bulk and rows that go word by word are counted apart.
struct move_orders {
    piece_order bulk;
    piece_order words;
};
static_assert(sizeof(move_orders) % 16 == 0);

/// Atomic operations on words that thread blocks share. On the host they are never called.
struct device_words {
    static UNIPREFILL_API std::uint32_t load([[maybe_unused]] const std::uint32_t* word) noexcept {
        std::uint32_t value = 0;
#if defined(__CUDA_ARCH__)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
#endif
        return value;
    }
    static UNIPREFILL_API std::uint32_t flip([[maybe_unused]] std::uint32_t* word,
                                             [[maybe_unused]] std::uint32_t bits) noexcept {
        std::uint32_t before = 0;
#if defined(__CUDA_ARCH__)
        asm volatile("atom.release.gpu.global.xor.b32 %0, [%1], %2;"
                     : "=r"(before)
                     : "l"(word), "r"(bits)
                     : "memory");
#endif
        return before;
    }
    static UNIPREFILL_API void raise([[maybe_unused]] std::uint32_t* word,
                                     [[maybe_unused]] std::uint32_t value) noexcept {
#if defined(__CUDA_ARCH__)
        asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
#endif
    }
    static UNIPREFILL_API void fence() noexcept {
#if defined(__CUDA_ARCH__)
        asm volatile("fence.sc.gpu;" ::: "memory");
#endif
    }
    static UNIPREFILL_API void pause() noexcept {
#if defined(__CUDA_ARCH__)
        asm volatile("nanosleep.u32 64;" ::: "memory");
#endif
    }
};
using device_reader = piece_reader<device_words>;

/// Clears what a move in place needs.
template <class Word = uint4>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(1024) clear_orders_kernel(move_orders* orders) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    constexpr std::uint32_t words = sizeof(move_orders) / sizeof(Word);
    for (std::uint32_t word = threadIdx.x; word < words; word += blockDim.x) {
        reinterpret_cast<Word*>(orders)[word] = Word{};
    }
}

[[nodiscard]] inline UNIPREFILL_HOST_API status clear_orders(move_orders* orders, const cuda_device& device,
                                                             backend::cuda::stream stream) noexcept {
    return launch(device, &clear_orders_kernel<uint4>, dim3(1), dim3(1024), 0, stream, orders);
}

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t draw_ticket(piece_order& order) {
    return atomicAdd(&order.next_ticket, 1u);
}

/// An upper bound of how many of the first rows of @p kept_to_old are read from below row @p end, where the
/// map ascends; all lanes of a warp get it. @p end is at most the number of kept rows.
__device__ UNIPREFILL_HIDDEN inline std::int32_t rows_read_below(const std::int32_t* kept_to_old,
                                                                 std::int32_t end) {
    const std::int32_t row = probe_row(static_cast<std::int32_t>(threadIdx.x % 32), end);
    const bool above = row < end && kept_to_old[row] >= end;
    const std::uint32_t found = __ballot_sync(~0u, above);
    return rows_by_probes(found == 0 ? 32 : __ffs(static_cast<int>(found)) - 1, end);
}

/// What thread 0 lets its block know, in shared memory. Two of them in turn, so that one barrier a piece is
/// enough: nobody writes one before everybody has met the barrier behind which the other was written.
struct turn_notice {
    std::uint32_t next_ticket;
    std::uint32_t may_write; ///< nobody has to wait
};

/// The first ticket of a thread block. Called by all threads.
__device__ UNIPREFILL_HIDDEN inline std::uint32_t first_ticket(piece_order& order, turn_notice& notice) {
    if (threadIdx.x == 0) {
        notice.next_ticket = draw_ticket(order);
    }
    __syncthreads();
    return notice.next_ticket;
}

/// Before the barrier behind which the piece is read: looks whether the block will have to wait, and lets it
/// know. Called by thread 0.
__device__ UNIPREFILL_HIDDEN inline void look_ahead(device_reader& reader, std::uint32_t needed,
                                                    std::uint32_t next_ticket, turn_notice& notice) {
    notice.next_ticket = next_ticket;
    notice.may_write = reader.look(needed) ? 1u : 0u;
}

/// Behind that barrier: says that the piece is read, and returns when it may be written. Called by all
/// threads.
__device__ UNIPREFILL_HIDDEN inline void take_turn(device_reader& reader, std::uint32_t piece,
                                                   std::uint32_t needed, const turn_notice& notice) {
    if (threadIdx.x == 0) {
        reader.tell(piece);
        reader.wait(needed);
    }
    if (notice.may_write == 0) {
        __syncthreads();
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
