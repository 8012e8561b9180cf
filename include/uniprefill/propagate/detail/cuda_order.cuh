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

/// Operations on words that warps share. Called by all lanes of a warp, which get the same result. On the
/// host they are never called.
struct device_words {
    static constexpr std::uint32_t at_once = 64; ///< groups

    static UNIPREFILL_API std::uint32_t load([[maybe_unused]] const std::uint32_t* word) noexcept {
        std::uint32_t value = 0;
#if defined(__CUDA_ARCH__)
        asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
        value = __shfl_sync(~0u, value, 0); // lanes may have seen different ones
#endif
        return value;
    }
    static UNIPREFILL_API void flip([[maybe_unused]] std::uint32_t* word,
                                    [[maybe_unused]] std::uint32_t bits) noexcept {
#if defined(__CUDA_ARCH__)
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            asm volatile("red.release.gpu.global.xor.b32 [%0], %1;" ::"l"(word), "r"(bits) : "memory");
        }
#endif
    }
    static UNIPREFILL_API void raise([[maybe_unused]] std::uint32_t* word,
                                     [[maybe_unused]] std::uint32_t value) noexcept {
#if defined(__CUDA_ARCH__)
        __syncwarp();
        if (threadIdx.x % 32 == 0) {
            asm volatile("red.release.gpu.global.max.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
        }
#endif
    }
    /// Each lane looks at two of the groups.
    static UNIPREFILL_API std::uint32_t count_whole([[maybe_unused]] const std::uint32_t* read,
                                                    [[maybe_unused]] std::uint32_t group) noexcept {
        std::uint32_t count = 0;
#if defined(__CUDA_ARCH__)
        const std::uint32_t first = group + threadIdx.x % 32;
        const std::uint32_t second = first + 32;
        const std::uint32_t low = load_relaxed(&read[first % piece_order::ring]);
        const std::uint32_t high = load_relaxed(&read[second % piece_order::ring]);
        const std::uint32_t not_low = ~__ballot_sync(~0u, low == piece_order::whole(first));
        const std::uint32_t not_high = ~__ballot_sync(~0u, high == piece_order::whole(second));
        count = not_low != 0    ? static_cast<std::uint32_t>(__ffs(static_cast<int>(not_low)) - 1)
                : not_high != 0 ? static_cast<std::uint32_t>(__ffs(static_cast<int>(not_high)) + 31)
                                : at_once;
        if (count != 0) {
            asm volatile("fence.acq_rel.gpu;" ::: "memory");
            __syncwarp(); // what one lane has seen, all pass on
        }
#endif
        return count;
    }
    static UNIPREFILL_API void pause() noexcept {
#if defined(__CUDA_ARCH__)
        asm volatile("nanosleep.u32 64;" ::: "memory");
#endif
    }

  private:
    static UNIPREFILL_API std::uint32_t load_relaxed([[maybe_unused]] const std::uint32_t* word) noexcept {
        std::uint32_t value = 0;
#if defined(__CUDA_ARCH__)
        asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
#endif
        return value;
    }
};
using device_reader = piece_reader<device_words>;

/// Clears what a move in place needs.
template <class Word = uint4>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(1024) clear_order_kernel(piece_order* order) {
    static_assert(sizeof(piece_order) % sizeof(Word) == 0);
    wait_for_previous_kernel();
    let_next_kernel_start();
    constexpr std::uint32_t words = sizeof(piece_order) / sizeof(Word);
    for (std::uint32_t word = threadIdx.x; word < words; word += blockDim.x) {
        reinterpret_cast<Word*>(order)[word] = Word{};
    }
}

template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status clear_order(piece_order* order, const cuda_device& device,
                                                     backend::cuda::stream stream) noexcept {
    return launch(device, &clear_order_kernel<uint4>, dim3(1), dim3(1024), 0, stream, order);
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

/// A thread block as a worker that moves pieces in order: first(), then for each piece look() while it is on
/// its way, a barrier once it is there, take_turn(), next(). Warp 0 deals with other blocks.
class ordered_block {
  public:
    /// Called by all threads, as are all but look(). @param ticket in shared memory, for this alone
    __device__ UNIPREFILL_HIDDEN ordered_block(piece_order* order, std::uint32_t& ticket)
        : order_(order)
        , reader_(order)
        , ticket_(ticket) {}

    /// The first piece.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t first() {
        draw();
        return next();
    }
    /// Looks whether all pieces below @p needed are read, so that there is less to wait for afterwards.
    /// Called by warp 0.
    __device__ UNIPREFILL_HIDDEN void look(std::uint32_t needed) { static_cast<void>(reader_.look(needed)); }
    /// Behind a barrier that follows the block's last read of @p piece: says that it is read, and returns
    /// when it may be written. @param needed all pieces below must have been read; only what warp 0 says
    /// counts
    __device__ UNIPREFILL_HIDDEN void take_turn(std::uint32_t piece, std::uint32_t needed) {
        if (threadIdx.x < 32) {
            reader_.tell(piece);
            reader_.wait(needed);
            draw(); // only now: who holds a ticket without reading its piece makes all above wait
        }
        __syncthreads();
    }
    /// The next piece.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t next() {
        if (threadIdx.x == 0) {
            ticket_ = drawn_;
        }
        __syncthreads();
        return ticket_; // written again only behind the barriers of that piece
    }

  private:
    __device__ UNIPREFILL_HIDDEN void draw() {
        if (threadIdx.x == 0) {
            drawn_ = atomicAdd(&order_->next_ticket, 1u);
        }
    }

    piece_order* order_;
    device_reader reader_; ///< warp 0
    std::uint32_t& ticket_;
    std::uint32_t drawn_ = 0; ///< thread 0
};

/// Thread blocks that move @p pieces in order: @p blocks of a multiprocessor, not more than there are pieces.
[[nodiscard]] inline UNIPREFILL_HOST_API dim3 grid_in_order(std::int64_t pieces, std::int32_t blocks,
                                                            const cuda_device& device) noexcept {
    const std::int32_t fit = device.ctas(blocks);
    return dim3(static_cast<unsigned>(pieces < fit ? pieces : fit));
}
/// The same in any order. Where pieces are few, one block for each: that costs less than some blocks with a
/// piece more than others.
[[nodiscard]] inline UNIPREFILL_HOST_API dim3 grid_of_pieces(std::int64_t pieces, std::int32_t blocks,
                                                             const cuda_device& device) noexcept {
    constexpr std::int32_t few = 32;
    return grid_in_order(pieces, pieces <= device.ctas(few) ? few : blocks, device);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
