// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How a device cuts the rows of tensors into tiles, and which rows of a tensor must have been read before
/// some may be overwritten in place. The arithmetic is the same on host and device, so that it is tested on
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

/// One tensor of a move. A row is a number of words, each moved by one instruction.
struct moved_tensor {
    const std::byte* source = nullptr;
    std::byte* destination = nullptr;
    std::int64_t source_stride = 0;      ///< bytes
    std::int64_t destination_stride = 0; ///< bytes
    std::int32_t words = 0;              ///< of a row, at most max_row_words
    std::int32_t word_bytes = 0;         ///< 16, 4, 2 or 1
    row_divider by_words{};
    bool in_place = false;
};

inline constexpr std::int64_t max_row_words = std::int64_t{1} << 30;

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
    return made;
}

/// Tiles of @p tile_words words that @p rows rows of a tensor make, counted row after row.
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t tiles_of(std::int64_t rows, std::int32_t words,
                                                             std::int32_t tile_words) noexcept {
    return (rows * words + tile_words - 1) / tile_words;
}

/// The tile that row @p row begins in.
[[nodiscard]] UNIPREFILL_API constexpr std::uint32_t tile_with(std::int64_t row, std::int32_t words,
                                                               std::int32_t tile_words) noexcept {
    return static_cast<std::uint32_t>(row * words / tile_words);
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

/// Finds the first row of a map that isn't where it goes. Since the map ascends, those before it are where
/// they go, and none behind it is: the rows in question are cut into pieces, all probed at their last rows at
/// once, and the search goes on in the first piece whose last row is moved.
struct moved_row_search {
    std::int32_t probes; ///< at once, 2 or more
    std::int32_t begin;  ///< rows before it stay
    std::int32_t end;    ///< it is moved, or there is none

    [[nodiscard]] UNIPREFILL_API constexpr bool is_done() const noexcept { return begin >= end; }
    /// The row of probe @p index, 0..probes - 1; -1: it has none.
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t probe(std::int32_t index) const noexcept {
        const std::int64_t first = begin + std::int64_t{index} * piece();
        const std::int64_t last = first + piece() - 1;
        return first >= end ? -1 : static_cast<std::int32_t>(last < end ? last : end - 1);
    }
    /// @param whole of how many probes the rows stay
    UNIPREFILL_API constexpr void narrow(std::int32_t whole) noexcept {
        const std::int32_t rows = piece();
        const std::int64_t first = begin + std::int64_t{whole} * rows;
        if (first >= end) {
            begin = end;
            return;
        }
        begin = static_cast<std::int32_t>(first);
        end = end - begin < rows ? end - 1 : begin + rows - 1;
    }

  private:
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t piece() const noexcept {
        return static_cast<std::int32_t>((std::int64_t{end} - begin + probes - 1) / probes);
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
