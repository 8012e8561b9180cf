// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Moving long rows in bulk: each of a few warps of a thread block has one piece of its own in shared memory.
/// What keeps the memory busy is that there are many of them, so nothing has to be loaded ahead.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_bulk.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>
#include <uniprefill/propagate/detail/cuda_row_move.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Warps of a thread block that move in bulk, and blocks of a multiprocessor: 160 KiB on their way.
inline constexpr int bulk_warps = 4;
inline constexpr int bulk_blocks = 5;

/// The tensor that a piece belongs to, and the tensor's first piece.
struct piece_owner {
    std::int32_t tensor = 0;
    std::uint32_t first_piece = 0;
};
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline piece_owner
bulk_owner(const row_move& move, std::int32_t kept, std::uint32_t piece) {
    piece_owner owner;
    for (; owner.tensor < move.bulk_count; ++owner.tensor) {
        const moved_tensor& tensor = move.tensors[owner.tensor];
        const auto beyond = owner.first_piece +
                            static_cast<std::uint32_t>(bulk_pieces(kept, tensor.rows_at_once, tensor.parts));
        if (piece < beyond) {
            break;
        }
        owner.first_piece = beyond;
    }
    return owner;
}

/// Pieces of the move that must be read before piece @p local of a tensor in place may be written. Called by
/// all lanes of a warp.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t
bulk_pieces_before(const row_move& move, const moved_tensor& tensor, std::int32_t kept,
                   const bulk_piece& piece, std::uint32_t local) {
    const std::int32_t beyond = piece.row + tensor.rows_at_once;
    const std::int32_t rows = rows_read_below(move.kept_to_old, beyond < kept ? beyond : kept);
    const auto before = static_cast<std::uint32_t>(bulk_pieces(rows, tensor.rows_at_once, tensor.parts));
    return before < local ? before : local;
}

/// Moves pieces of the tensors that go in bulk until none is left. Called by all lanes of a warp.
/// @param stage bulk_piece_bytes of shared memory
template <bool InOrder>
__device__ UNIPREFILL_HIDDEN void move_in_bulk(const row_move& move, std::int32_t kept, std::uint32_t worker,
                                               std::uint32_t workers, std::byte* stage,
                                               bulk_arrival& arrival) {
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    device_reader reader(InOrder ? &move.orders->bulk : nullptr);
    std::uint32_t turn = 0;
    std::uint32_t piece = worker;
    if constexpr (InOrder) {
        piece = __shfl_sync(~0u, lane == 0 ? draw_ticket(move.orders->bulk) : 0, 0);
    }
    for (;;) {
        const piece_owner owner = bulk_owner(move, kept, piece);
        if (owner.tensor == move.bulk_count) {
            break;
        }
        const moved_tensor& tensor = move.tensors[owner.tensor];
        const std::uint32_t local = piece - owner.first_piece;
        const bulk_piece what = piece_of(tensor, local);
        // Each lane moves a row of its own.
        const std::int32_t row = what.row + lane;
        std::int32_t old = -1; // nothing to move
        if (lane < tensor.rows_at_once && row < kept) {
            old = move.kept_to_old == nullptr ? row : move.kept_to_old[row];
        }
        if (old >= move.num_rows || (tensor.in_place && old == row)) {
            old = -1;
        }
        const auto bytes = static_cast<std::uint32_t>(what.bytes);
        std::byte* const mine = stage + static_cast<std::uint32_t>(lane) * bytes;
        const std::uint32_t moved = __ballot_sync(~0u, old >= 0);
        if (lane == 0 && moved != 0) {
            arrival.expect(static_cast<std::uint32_t>(__popc(moved)) * bytes);
        }
        __syncwarp();
        if (old >= 0) {
            arrival.load(mine,
                         tensor.source + std::int64_t{move.scatters ? row : old} * tensor.source_stride +
                             what.byte,
                         bytes);
        }
        // While it is on its way: what must be read before it is written.
        std::uint32_t needed = 0;
        if constexpr (InOrder) {
            if (tensor.in_place) {
                needed = owner.first_piece + bulk_pieces_before(move, tensor, kept, what, local);
            }
            static_cast<void>(reader.look(needed)); // so that there is less to wait for afterwards
        }
        if (moved != 0) {
            arrival.wait(turn++);
        }
        if constexpr (InOrder) {
            __syncwarp();
            reader.tell(piece);
            reader.wait(needed);
            __syncwarp();
        }
        if (old >= 0) {
            if constexpr (InOrder) {
                bulk_arrival::fence_global();
            }
            bulk_arrival::store(tensor.destination +
                                    std::int64_t{move.scatters ? old : row} * tensor.destination_stride +
                                    what.byte,
                                mine, bytes);
        }
        // Drawn only now: who holds a ticket without reading its piece makes all above wait.
        std::uint32_t next = piece + workers;
        if constexpr (InOrder) {
            next = lane == 0 ? draw_ticket(move.orders->bulk) : 0;
        }
        bulk_arrival::wait_for_stores_to_read();
        __syncwarp();
        piece = InOrder ? __shfl_sync(~0u, next, 0) : next;
    }
    bulk_arrival::wait_for_stores();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
