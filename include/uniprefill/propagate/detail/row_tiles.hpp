// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How a device cuts the rows of tensors into pieces, and which pieces of a tensor must have been read before
/// one may be overwritten in place. The arithmetic is the same on host and device, so that it is tested on
/// either.
#pragma once

#include <uniprefill/core/rows.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Division of numbers below 2^31 by one divisor: a multiplication and a shift (Granlund and Montgomery,
/// "Division by invariant integers using multiplication", 1994, section 4).
struct row_divider {
    std::uint32_t factor = 1;
    std::uint32_t shift = 0;

    /// @param divisor 1..2^31
    [[nodiscard]] static UNIPREFILL_HOST_API row_divider by(std::uint32_t divisor) noexcept {
        row_divider made;
        while ((std::uint64_t{1} << made.shift) < divisor) {
            ++made.shift;
        }
        const std::uint64_t excess = (std::uint64_t{1} << made.shift) - divisor;
        made.factor = static_cast<std::uint32_t>((excess << 32) / divisor + 1);
        return made;
    }
    [[nodiscard]] UNIPREFILL_API std::uint32_t quotient(std::uint32_t number) const noexcept {
        const auto high = static_cast<std::uint32_t>((static_cast<std::uint64_t>(number) * factor) >> 32);
        return (high + number) >> shift;
    }
};

/// One tensor of a move. A row is a number of words, each moved by one instruction; or it goes in bulk.
struct moved_tensor {
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::int64_t source_stride = 0;      ///< bytes
    std::int64_t destination_stride = 0; ///< bytes
    std::int32_t words = 0;              ///< of a row, at most max_row_words
    std::int32_t word_bytes = 0;         ///< 16, 4, 2 or 1
    row_divider by_words{};
    bool in_place = false;
    // A piece that goes in bulk is some rows, or a part of one.
    std::int32_t rows_at_once = 0; ///< 1..32
    std::int32_t parts = 0;        ///< of a row; 1 where several go at once
    std::int32_t part_bytes = 0;   ///< of each part of a row but the last, which may be shorter
};

inline constexpr std::int64_t max_row_words = std::int64_t{1} << 30;

/// Bytes of a piece that goes in bulk, at most.
inline constexpr std::int32_t bulk_piece_bytes = 8192;
/// Rows that are shorter take more copies than it is worth.
inline constexpr std::int64_t least_bulk_row_bytes = 512;

/// The largest word that addresses, strides and the row are multiples of.
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t word_bytes_of(const byte_rows& source,
                                                                    const byte_rows& destination) noexcept {
    const auto bits = reinterpret_cast<std::uintptr_t>(source.data) |
                      reinterpret_cast<std::uintptr_t>(destination.data) |
                      static_cast<std::uintptr_t>(source.row_stride_bytes) |
                      static_cast<std::uintptr_t>(destination.row_stride_bytes) |
                      static_cast<std::uintptr_t>(source.row_bytes);
    return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : bits % 2 == 0 ? 2 : 1;
}

[[nodiscard]] inline UNIPREFILL_HOST_API moved_tensor moved(const byte_rows& source,
                                                            const byte_rows& destination) noexcept {
    moved_tensor made;
    made.source = static_cast<const std::byte*>(source.data);
    made.destination = static_cast<std::byte*>(destination.data);
    made.source_stride = source.row_stride_bytes;
    made.destination_stride = destination.row_stride_bytes;
    made.word_bytes = word_bytes_of(source, destination);
    made.words = static_cast<std::int32_t>(source.row_bytes / made.word_bytes);
    made.by_words = row_divider::by(static_cast<std::uint32_t>(made.words));
    made.in_place = source.data == destination.data;
    if (source.row_bytes >= least_bulk_row_bytes) {
        const std::int64_t parts = (source.row_bytes + bulk_piece_bytes - 1) / bulk_piece_bytes;
        made.parts = static_cast<std::int32_t>(parts);
        made.part_bytes = static_cast<std::int32_t>((source.row_bytes / 16 + parts - 1) / parts * 16);
        made.rows_at_once = parts > 1 ? 1 : static_cast<std::int32_t>(bulk_piece_bytes / source.row_bytes);
    }
    return made;
}

/// Whether the tensor can go in bulk.
[[nodiscard]] inline UNIPREFILL_HOST_API bool suits_bulk(const moved_tensor& tensor) noexcept {
    return tensor.word_bytes == 16 && tensor.rows_at_once > 0;
}

/// Pieces that @p rows rows of a tensor make in bulk.
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t bulk_pieces(std::int32_t rows, std::int32_t rows_at_once,
                                                                std::int32_t parts) noexcept {
    const auto at_once = static_cast<std::uint32_t>(rows_at_once);
    return std::int64_t{(static_cast<std::uint32_t>(rows) + at_once - 1) / at_once} * parts;
}

/// A piece that goes in bulk.
struct bulk_piece {
    std::int32_t row = 0;  ///< the first
    std::int64_t byte = 0; ///< of each row, the first that goes
    std::int32_t bytes = 0;
};

[[nodiscard]] UNIPREFILL_API constexpr bulk_piece piece_of(const moved_tensor& tensor,
                                                           std::uint32_t piece) noexcept {
    const auto parts = static_cast<std::uint32_t>(tensor.parts);
    const std::uint32_t rows = piece / parts;
    const std::int64_t byte = std::int64_t{piece - rows * parts} * tensor.part_bytes;
    const std::int64_t left = std::int64_t{tensor.words} * tensor.word_bytes - byte;
    return {static_cast<std::int32_t>(rows) * tensor.rows_at_once, byte,
            left < tensor.part_bytes ? static_cast<std::int32_t>(left) : tensor.part_bytes};
}

/// Tiles of @p tile_words words that @p rows rows of a tensor make, counted row after row.
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t tiles_of(std::int64_t rows, std::int32_t words,
                                                             std::int32_t tile_words) noexcept {
    return (rows * words + tile_words - 1) / tile_words;
}

/// Where a tile begins.
struct tile_start {
    std::int64_t row = 0;
    std::uint32_t word = 0; ///< within the row
};

[[nodiscard]] UNIPREFILL_API constexpr tile_start start_of(std::int64_t tile, std::int32_t words,
                                                           std::int32_t tile_words) noexcept {
    const std::int64_t first = tile * tile_words;
    const std::int64_t row = first / words;
    return {row, static_cast<std::uint32_t>(first - row * words)};
}

/// In place, the rows below @p end may be overwritten once every row that is read from below @p end has been
/// read: the first rows of the map, since it ascends. How many these are is found by probing the map at 32
/// places in turn, all at once; this is the place of probe @p index, 0..31.
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t probe_row(std::int32_t index, std::int32_t end) noexcept {
    return static_cast<std::int32_t>(static_cast<std::int64_t>(end) * index / 32);
}

/// What the probes say: @p first is the lowest of which the map's entry is @p end or more, 32 if there is
/// none.
/// @return at least as many rows as are read from below @p end
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t rows_by_probes(std::int32_t first,
                                                                   std::int32_t end) noexcept {
    return first < 32 ? probe_row(first, end) : end;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
