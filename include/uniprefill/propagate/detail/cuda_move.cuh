// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernel that moves rows of several tensors, and its launch. Nothing is checked here but sizes.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_move_bulk.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>
#include <uniprefill/propagate/detail/cuda_row_move.cuh>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The shape of the loops over words: each thread has some words of 16 bytes in flight before the first is
/// written. In order more blocks are better, as some of them wait.
template <bool InOrder>
struct move_shape {
    static constexpr int threads = InOrder ? 256 : 512;
    static constexpr int words = InOrder ? 8 : 4;  ///< of a thread
    static constexpr int blocks = InOrder ? 3 : 2; ///< of a multiprocessor
    static constexpr int tile = threads * words;   ///< words
};
static_assert(move_shape<false>::threads >= 32 * bulk_warps && move_shape<true>::threads >= 32 * bulk_warps);

/// Whole rows are read once, so the first-level cache would only be filled for nothing. Not through the
/// read-only path: in place, the same memory is written.
__device__ UNIPREFILL_HIDDEN inline void load_word(uint4& word, const std::byte* address) {
    asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.x), "=r"(word.y), "=r"(word.z), "=r"(word.w)
                 : "l"(address)
                 : "memory");
}
template <class Word>
__device__ UNIPREFILL_HIDDEN void load_word(Word& word, const std::byte* address) {
    word = *reinterpret_cast<const Word*>(address);
}
__device__ UNIPREFILL_HIDDEN inline std::uint32_t some_bits(const uint4& word) {
    return word.x;
}
template <class Word>
__device__ UNIPREFILL_HIDDEN std::uint32_t some_bits(const Word& word) {
    return static_cast<std::uint32_t>(word);
}

/// A word of a tile.
struct word_place {
    std::uint32_t rows_on; ///< after the tile's first row
    std::uint32_t word;    ///< of its row
    template <class Word>
    __device__ UNIPREFILL_HIDDEN std::int64_t byte() const {
        return std::int64_t{word} * static_cast<std::int64_t>(sizeof(Word));
    }
};
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline word_place place_of(const moved_tensor& tensor,
                                                                      std::uint32_t word) {
    const std::uint32_t rows_on = tensor.by_words.quotient(word);
    return {rows_on, word - rows_on * static_cast<std::uint32_t>(tensor.words)};
}
/// Keeps the compiler from holding what it worked out of @p value.
__device__ UNIPREFILL_HIDDEN inline void forget_origin(std::uint32_t& value) {
    asm volatile("" : "+r"(value));
}

/// What a thread block knows of the order of pieces.
struct move_turn {
    device_reader reader;          ///< warp 0
    std::uint32_t first_piece = 0; ///< the piece that the tensor's first tile is
    std::uint32_t next_ticket = 0; ///< thread 0: drawn when the tile could be written
};

/// Moves one tile of a tensor.
template <bool InOrder, class Word>
__device__ UNIPREFILL_HIDDEN void move_tile(const row_move& move, const moved_tensor& tensor,
                                            std::int32_t kept, std::int64_t tile, move_turn& turn) {
    using Shape = move_shape<InOrder>;
    const tile_start start = start_of(tile, tensor.words, Shape::tile);
    const auto first_row = static_cast<std::uint32_t>(start.row);
    std::uint32_t first_word = start.word + threadIdx.x; // from first_row on
    std::int32_t olds[Shape::words];                     // -1: nothing to move
#pragma unroll
    for (int i = 0; i < Shape::words; ++i) {
        const std::uint32_t row =
            first_row + tensor.by_words.quotient(first_word + static_cast<std::uint32_t>(i * Shape::threads));
        olds[i] = row >= static_cast<std::uint32_t>(kept) ? -1
                  : move.kept_to_old == nullptr           ? static_cast<std::int32_t>(row)
                                                          : move.kept_to_old[row];
    }
    // Rows and places are worked out anew in each loop: registers are scarcer than instructions.
    forget_origin(first_word);
    Word words[Shape::words];
#pragma unroll
    for (int i = 0; i < Shape::words; ++i) {
        const word_place place =
            place_of(tensor, first_word + static_cast<std::uint32_t>(i * Shape::threads));
        const std::uint32_t row = first_row + place.rows_on;
        if (olds[i] >= move.num_rows || (tensor.in_place && olds[i] == static_cast<std::int32_t>(row))) {
            olds[i] = -1;
        }
        // Where nothing is to be moved, row 0 is read: there always is one.
        const std::int64_t from = olds[i] < 0 ? 0 : move.scatters ? std::int64_t{row} : std::int64_t{olds[i]};
        load_word(words[i], tensor.source + from * tensor.source_stride + place.byte<Word>());
    }
    if constexpr (InOrder) {
        // What has to be read before this tile is written; found while the tile is on its way.
        const std::uint32_t piece = turn.first_piece + static_cast<std::uint32_t>(tile);
        std::uint32_t needed = 0;
        if (threadIdx.x < 32) {
            if (tensor.in_place) {
                const std::int64_t beyond = start_of(tile + 1, tensor.words, Shape::tile).row + 1;
                const std::int32_t end = beyond < kept ? static_cast<std::int32_t>(beyond) : kept;
                const std::int64_t tiles =
                    tiles_of(rows_read_below(move.kept_to_old, end), tensor.words, Shape::tile);
                needed = turn.first_piece + static_cast<std::uint32_t>(tiles < tile ? tiles : tile);
            }
            static_cast<void>(turn.reader.look(needed)); // so that there is less to wait for afterwards
        }
        // The barrier takes a bit of every word, so that no load is outstanding behind it.
        std::uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < Shape::words; ++i) {
            bits |= some_bits(words[i]);
        }
        static_cast<void>(__syncthreads_or(static_cast<int>(bits)));
        turn.next_ticket = take_turn(move.orders->words, turn.reader, piece, needed);
    }
    forget_origin(first_word);
#pragma unroll
    for (int i = 0; i < Shape::words; ++i) {
        const word_place place =
            place_of(tensor, first_word + static_cast<std::uint32_t>(i * Shape::threads));
        const std::int64_t to =
            move.scatters ? std::int64_t{olds[i]} : std::int64_t{first_row + place.rows_on};
        if (olds[i] >= 0) {
            *reinterpret_cast<Word*>(tensor.destination + to * tensor.destination_stride +
                                     place.byte<Word>()) = words[i];
        }
    }
}

/// Moves the tensors that don't go in bulk, tile after tile of one after the other, spread over the thread
/// blocks. In order, a thread block takes the next tile that nobody has. Called by all threads.
template <bool InOrder>
__device__ UNIPREFILL_HIDDEN void move_by_words(const row_move& move, std::int32_t kept,
                                                std::uint32_t& ticket) {
    piece_order* const order = InOrder ? &move.orders->words : nullptr;
    move_turn turn{device_reader(order)};
    std::int64_t piece = blockIdx.x;
    if constexpr (InOrder) {
        piece = first_ticket(*order, ticket);
    }
    for (;;) {
        std::int64_t first = 0;
        std::int32_t t = move.bulk_count;
        for (; t < move.count; ++t) {
            const std::int64_t beyond =
                first + tiles_of(kept, move.tensors[t].words, move_shape<InOrder>::tile);
            if (piece < beyond) {
                break;
            }
            first = beyond;
        }
        if (t == move.count) {
            return;
        }
        if constexpr (InOrder) {
            turn.first_piece = static_cast<std::uint32_t>(first);
        }
        const moved_tensor& tensor = move.tensors[t];
        switch (tensor.word_bytes) {
        case 16:
            move_tile<InOrder, uint4>(move, tensor, kept, piece - first, turn);
            break;
        case 4:
            move_tile<InOrder, std::uint32_t>(move, tensor, kept, piece - first, turn);
            break;
        case 2:
            move_tile<InOrder, std::uint16_t>(move, tensor, kept, piece - first, turn);
            break;
        default:
            move_tile<InOrder, std::uint8_t>(move, tensor, kept, piece - first, turn);
            break;
        }
        if constexpr (InOrder) {
            piece = pass_ticket(turn.next_ticket, ticket);
        } else {
            piece += gridDim.x;
        }
    }
}

/// Moves rows. Where all tensors go in bulk, a thread block is a few warps; otherwise these warps come to the
/// others' work later.
template <bool InOrder>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(move_shape<InOrder>::threads, move_shape<InOrder>::blocks)
    move_rows_kernel(const __grid_constant__ row_move move) {
    extern __shared__ uint4 moved_stages[];
    __shared__ bulk_arrival arrivals[bulk_warps];
    __shared__ std::uint32_t ticket;
    const std::uint32_t warp = threadIdx.x / 32;
    const bool in_bulk = warp < bulk_warps && move.bulk_count > 0;
    if (in_bulk && threadIdx.x % 32 == 0) {
        arrivals[warp].start();
    }
    __syncwarp();
    wait_for_previous_kernel();
    let_next_kernel_start();
    const std::int32_t kept = kept_rows(move.kept_count, move.num_kept);
    if (in_bulk) {
        move_in_bulk<InOrder>(move, kept, blockIdx.x * bulk_warps + warp, gridDim.x * bulk_warps,
                              reinterpret_cast<std::byte*>(moved_stages) + warp * bulk_piece_bytes,
                              arrivals[warp]);
    }
    if (move.count > move.bulk_count) {
        move_by_words<InOrder>(move, kept, ticket);
    }
}

/// Moves the tensors of @p move.
[[nodiscard]] inline UNIPREFILL_HOST_API status launch_move(const row_move& move, const cuda_device& device,
                                                            backend::cuda::stream stream) noexcept {
    const bool in_order = move.orders != nullptr;
    std::int64_t pieces = 0; // in bulk
    std::int64_t tiles = 0;
    for (std::int32_t t = 0; t < move.count; ++t) {
        const moved_tensor& tensor = move.tensors[t];
        if (t < move.bulk_count) {
            pieces += bulk_pieces(move.num_kept, tensor.rows_at_once, tensor.parts);
        } else {
            tiles += tiles_of(move.num_kept, tensor.words, move_shape<false>::tile);
        }
    }
    static_assert(move_shape<false>::tile == move_shape<true>::tile);
    if (pieces + tiles == 0) {
        return success();
    }
    if (pieces > INT32_MAX || tiles > INT32_MAX) {
        return failure(status_code::out_of_range, "tensors", "at most 2^31 pieces of 8 to 32 KiB",
                       pieces + tiles);
    }
    const std::int64_t wanted = (pieces + bulk_warps - 1) / bulk_warps;
    const std::int64_t blocks = wanted > tiles ? wanted : tiles;
    const std::int32_t fit = device.ctas(tiles == 0 ? bulk_blocks
                                         : in_order ? move_shape<true>::blocks
                                                    : move_shape<false>::blocks);
    const dim3 grid(static_cast<unsigned>(blocks < fit ? blocks : fit));
    const std::size_t shared = pieces > 0 ? std::size_t{bulk_warps} * bulk_piece_bytes : 0;
    if (!in_order) {
        const dim3 block(tiles == 0 ? 32 * bulk_warps : move_shape<false>::threads);
        return launch(device, &move_rows_kernel<false>, grid, block, shared, stream, move);
    }
    UNIPREFILL_TRY(clear_orders(move.orders, device, stream));
    const dim3 block(tiles == 0 ? 32 * bulk_warps : move_shape<true>::threads);
    return launch(device, &move_rows_kernel<true>, grid, block, shared, stream, move);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
