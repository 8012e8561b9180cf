// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernel that moves rows of several tensors, and its launch. Nothing is checked here but sizes.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>
#include <uniprefill/propagate/detail/cuda_row_move.cuh>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The shape of the kernel: each thread has some words in flight before the first is written. More in flight
/// than it takes makes memory slower, as narrower blocks do. In order more blocks are better, as some of them
/// wait.
template <bool InOrder>
struct move_shape {
    static constexpr int threads = InOrder ? 256 : 512;
    static constexpr int words = InOrder ? 8 : 4;  ///< of a thread
    static constexpr int blocks = InOrder ? 3 : 2; ///< of a multiprocessor
    static constexpr int tile = threads * words;   ///< words
};
/// The same for both: a launch counts its tiles before it is known which it is.
inline constexpr int move_tile = move_shape<false>::tile;
static_assert(move_tile == move_shape<true>::tile);

/// Every word is read once, but keeping it out of the first-level cache is slower by 3 %. Not through the
/// read-only path: in place, the same memory is written.
__device__ UNIPREFILL_HIDDEN inline void load_word(uint4& word, const std::byte* address) {
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
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

/// Where a thread's words of a tile are.
template <bool InOrder>
struct tile_places {
    using shape = move_shape<InOrder>;
    std::uint32_t first_row;
    std::uint32_t first_word;       ///< from first_row on
    std::int32_t old[shape::words]; ///< each word's row as the map says; -1: beyond the kept rows

    __device__ UNIPREFILL_HIDDEN void look_up(const row_move& move, const moved_tensor& tensor,
                                              std::int32_t kept, std::uint32_t tile) {
        const tile_start start = start_of(tile, tensor.words, move_tile);
        first_row = static_cast<std::uint32_t>(start.row);
        first_word = start.word + threadIdx.x;
#pragma unroll
        for (int i = 0; i < shape::words; ++i) {
            const std::uint32_t row = first_row + place(tensor, i).rows_on;
            old[i] = row >= static_cast<std::uint32_t>(kept) ? -1
                     : move.kept_to_old == nullptr           ? static_cast<std::int32_t>(row)
                                                             : move.kept_to_old[row];
        }
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN word_place place(const moved_tensor& tensor, int i) const {
        return place_of(tensor, first_word + static_cast<std::uint32_t>(i * shape::threads));
    }
};

/// A thread's words of one tile.
template <bool InOrder, class Word>
class tile_words {
    using shape = move_shape<InOrder>;

  public:
    __device__ UNIPREFILL_HIDDEN tile_words(const row_move& move, const moved_tensor& tensor,
                                            const tile_places<InOrder>& at)
        : move_(move)
        , tensor_(tensor)
        , at_(at) {}

    __device__ UNIPREFILL_HIDDEN void load() {
        // Places are worked out anew in each loop: registers are scarcer than instructions.
        forget_origin(at_.first_word);
#pragma unroll
        for (int i = 0; i < shape::words; ++i) {
            const word_place place = at_.place(tensor_, i);
            const auto row = static_cast<std::int32_t>(at_.first_row + place.rows_on);
            std::int32_t& old = at_.old[i];
            if (old >= move_.num_rows || (tensor_.in_place && old == row)) {
                old = -1; // nothing to move
            }
            // Where nothing is to be moved, row 0 is read: there always is one.
            const std::int64_t from = old < 0 ? 0 : move_.scatters ? row : old;
            load_word(words_[i], tensor_.source + from * tensor_.source_stride + place.byte<Word>());
        }
    }
    /// Returns once all threads' words are there.
    __device__ UNIPREFILL_HIDDEN void wait() const {
        // The barrier takes a bit of every word, so that no load is outstanding behind it.
        std::uint32_t bits = 0;
#pragma unroll
        for (int i = 0; i < shape::words; ++i) {
            bits |= some_bits(words_[i]);
        }
        static_cast<void>(__syncthreads_or(static_cast<int>(bits)));
    }
    __device__ UNIPREFILL_HIDDEN void store() {
        forget_origin(at_.first_word);
#pragma unroll
        for (int i = 0; i < shape::words; ++i) {
            const word_place place = at_.place(tensor_, i);
            const std::int32_t old = at_.old[i];
            const std::int64_t to =
                move_.scatters ? std::int64_t{old} : std::int64_t{at_.first_row + place.rows_on};
            if (old >= 0) {
                *reinterpret_cast<Word*>(tensor_.destination + to * tensor_.destination_stride +
                                         place.byte<Word>()) = words_[i];
            }
        }
    }

  private:
    const row_move& move_;
    const moved_tensor& tensor_;
    tile_places<InOrder> at_;
    Word words_[shape::words];
};

/// Calls @p visit with a word of @p bytes bytes.
template <class Visit>
__device__ UNIPREFILL_HIDDEN void visit_word(std::int32_t bytes, const Visit& visit) {
    switch (bytes) {
    case 16:
        visit(uint4{});
        break;
    case 4:
        visit(std::uint32_t{});
        break;
    case 2:
        visit(std::uint16_t{});
        break;
    default:
        visit(std::uint8_t{});
        break;
    }
}

/// Which rows a move is about: [first, kept) in place, where those before stay, and [0, kept) out of place.
struct moved_rows {
    std::int32_t first = 0;
    std::int32_t kept = 0;
};

/// A piece of the move: a tile of one of its tensors, which are taken one after the other. All their tiles
/// are fewer than 2^31.
struct tile_of_move {
    std::int32_t tensor = 0;       ///< the move's count: there is no such piece
    std::uint32_t first_piece = 0; ///< the piece that the tensor's first tile is
    std::uint32_t first_tile = 0;  ///< tiles before it stay where they are
    std::uint32_t tile = 0;        ///< of the tensor
};
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline tile_of_move
find_tile(const row_move& move, const moved_rows& rows, std::uint32_t piece) {
    tile_of_move found;
    for (; found.tensor < move.count; ++found.tensor) {
        const moved_tensor& tensor = move.tensors[found.tensor];
        const auto tiles = static_cast<std::uint32_t>(tiles_of(rows.kept, tensor.words, move_tile));
        found.first_tile = !tensor.in_place          ? 0
                           : rows.first >= rows.kept ? tiles
                                                     : tile_with(rows.first, tensor.words, move_tile);
        const std::uint32_t beyond = found.first_piece + tiles - found.first_tile;
        if (piece < beyond) {
            break;
        }
        found.first_piece = beyond;
    }
    found.tile = piece - found.first_piece + found.first_tile;
    return found;
}

/// Moves rows out of place: pieces are spread over the thread blocks. While one is on its way, the next is
/// looked up.
__device__ UNIPREFILL_HIDDEN inline void move_in_any_order(const row_move& move, std::int32_t kept) {
    std::uint32_t piece = blockIdx.x;
    tile_of_move here;
    tile_places<false> at{};
    const auto look_up = [&] {
        here = find_tile(move, {0, kept}, piece);
        if (here.tensor < move.count) {
            at.look_up(move, move.tensors[here.tensor], kept, here.tile);
        }
    };
    look_up();
    while (here.tensor < move.count) {
        const moved_tensor& tensor = move.tensors[here.tensor];
        visit_word(tensor.word_bytes, [&](auto word) {
            tile_words<false, decltype(word)> held(move, tensor, at);
            held.load();
            piece += gridDim.x;
            look_up();
            held.store();
        });
    }
}

/// Pieces of the move that must be read before one of them is written. Called by all lanes of a warp.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t
pieces_before(const row_move& move, std::int32_t kept, const tile_of_move& here) {
    const moved_tensor& tensor = move.tensors[here.tensor];
    if (!tensor.in_place) {
        return 0;
    }
    constexpr std::int32_t words = move_tile;
    const std::int64_t beyond = start_of(std::int64_t{here.tile} + 1, tensor.words, words).row + 1;
    const std::int32_t end = beyond < kept ? static_cast<std::int32_t>(beyond) : kept;
    const std::int64_t tiles = tiles_of(rows_read_below(move.kept_to_old, end), tensor.words, words);
    const std::uint32_t needed = tiles < here.tile ? static_cast<std::uint32_t>(tiles) : here.tile;
    return here.first_piece + (needed > here.first_tile ? needed - here.first_tile : 0);
}

/// The first row that isn't where it goes, @p kept if all are. Each thread probes one row at a time. Called
/// by all threads.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t
first_moved_row(const std::int32_t* kept_to_old, std::int32_t kept) {
    moved_row_search search{static_cast<std::int32_t>(blockDim.x), 0, kept};
    while (!search.is_done()) {
        const std::int32_t row = search.probe(static_cast<std::int32_t>(threadIdx.x));
        const bool stays = row >= 0 && kept_to_old[row] == row;
        search.narrow(__syncthreads_count(stays ? 1 : 0));
    }
    return search.begin;
}

/// Moves rows of which some are in place: a thread block takes the next piece that nobody has.
__device__ UNIPREFILL_HIDDEN inline void move_in_order(const row_move& move, std::int32_t kept,
                                                       std::uint32_t& ticket) {
    const moved_rows rows{first_moved_row(move.kept_to_old, kept), kept};
    ordered_block turn(move.order, ticket);
    std::uint32_t piece = turn.first();
    for (;;) {
        const tile_of_move here = find_tile(move, rows, piece);
        if (here.tensor == move.count) {
            return;
        }
        const moved_tensor& tensor = move.tensors[here.tensor];
        tile_places<true> at;
        at.look_up(move, tensor, kept, here.tile);
        visit_word(tensor.word_bytes, [&](auto word) {
            tile_words<true, decltype(word)> held(move, tensor, at);
            held.load();
            std::uint32_t needed = 0;
            if (threadIdx.x < 32) { // while the tile is on its way
                needed = pieces_before(move, kept, here);
                turn.look(needed);
            }
            held.wait();
            turn.take_turn(piece, needed);
            held.store();
        });
        piece = turn.next();
    }
}

template <bool InOrder>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(move_shape<InOrder>::threads, move_shape<InOrder>::blocks)
    move_rows_kernel(const __grid_constant__ row_move move) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const std::int32_t kept = kept_rows(move.kept_count, move.num_kept);
    if constexpr (InOrder) {
        __shared__ std::uint32_t ticket;
        move_in_order(move, kept, ticket);
    } else {
        move_in_any_order(move, kept);
    }
}

/// Moves the tensors of @p move.
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status launch_move(const row_move& move, const cuda_device& device,
                                                     backend::cuda::stream stream) noexcept {
    std::int64_t tiles = 0;
    for (std::int32_t t = 0; t < move.count; ++t) {
        tiles += tiles_of(move.num_kept, move.tensors[t].words, move_tile);
    }
    if (tiles == 0) {
        return success();
    }
    if (tiles > INT32_MAX) {
        return failure(status_code::out_of_range, "tensors", "at most 2^31 tiles of 2048 words", tiles);
    }
    if (move.order == nullptr) {
        using shape = move_shape<false>;
        return launch(device, &move_rows_kernel<false>, grid_of_pieces(tiles, shape::blocks, device),
                      dim3(shape::threads), 0, stream, move);
    }
    using shape = move_shape<true>;
    UNIPREFILL_TRY(clear_order(move.order, device, stream));
    return launch(device, &move_rows_kernel<true>, grid_in_order(tiles, shape::blocks, device),
                  dim3(shape::threads), 0, stream, move);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
