// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Query rows that are worked on together on the host, and which keys of a tile they read.
#pragma once

#include <uniprefill/attend/detail/attention_kernels.hpp>
#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Up to attention_lanes query rows of one request that read one KV head and share a list, if there are
/// lists. Keys are counted from the request's first, cached ones first. From lane to lane `from`, `window`,
/// `to`, `mean_from` and `mean_to` don't fall.
struct UNIPREFILL_HIDDEN attention_unit {
    std::int32_t request = 0;
    std::int32_t kv_head = 0;
    std::int32_t lanes = 0;
    std::int64_t cached = 0;    ///< keys in the cache; key `cached` is the packed row
    std::int64_t first_row = 0; ///< first_row

    const std::int32_t* list = nullptr;   // [num_listed] blocks, ascending
    std::int64_t num_listed = 0;          ///< 0 where there is no list
    std::int64_t first_listed = no_lists; ///< key with which block 0 begins: all before it are read
    std::int32_t block_rows = 1;
    std::int64_t first_mean = 0; ///< row of block 0 among the means

    std::int64_t from[attention_lanes] = {};   ///< the first key that a lane sees,
    std::int64_t window[attention_lanes] = {}; ///< the first that it reads of blocks that aren't listed,
    std::int64_t to[attention_lanes] = {};     ///< and one past the last
    std::int32_t row[attention_lanes] = {};    ///< of the queries
    std::int32_t head[attention_lanes] = {};   ///< of the queries
    // With means: [mean_from, mean_to) are the blocks that a lane sees whole and skips unless they are
    // listed.
    std::int64_t mean_from[attention_lanes] = {};
    std::int64_t mean_to[attention_lanes] = {};

    static constexpr std::int64_t no_lists = INT64_MAX;
};

/// Keys [begin, end) of a tile's arrays: what a lane reads of them begins with its `from`, or `window`.
struct UNIPREFILL_HIDDEN tile_piece {
    std::int32_t begin = 0;
    std::int32_t end = 0;
    bool windowed = false;
};

/// The keys of a tile that any lane may read, packed.
struct UNIPREFILL_HIDDEN attention_tile {
    std::int64_t first = 0; ///< key
    std::int32_t num_keys = 0;
    std::int32_t num_pieces = 0;
    std::int32_t numbers[attention_tile_keys]; // [num_keys] keys, counted from `first`
    tile_piece pieces[attention_tile_keys];    // [num_pieces]

    /// Empties it. @param begin its first key
    void start(std::int64_t begin) noexcept {
        first = begin;
        num_keys = 0;
        num_pieces = 0;
    }
    void add(std::int64_t begin, std::int64_t end, bool windowed) noexcept {
        if (num_pieces == 0 || pieces[num_pieces - 1].windowed != windowed) {
            pieces[num_pieces++] = {num_keys, num_keys, windowed};
        }
        for (std::int64_t key = begin; key < end; ++key) {
            numbers[num_keys++] = static_cast<std::int32_t>(key - first);
        }
        pieces[num_pieces - 1].end = num_keys;
    }
};

/// A unit's list, asked for blocks in ascending order.
class UNIPREFILL_HIDDEN unit_list {
  public:
    explicit unit_list(const attention_unit& unit) noexcept
        : unit_(unit) {}
    [[nodiscard]] bool names(std::int64_t block) noexcept {
        while (next_ < unit_.num_listed && unit_.list[next_] < block) {
            ++next_;
        }
        return next_ < unit_.num_listed && unit_.list[next_] == block;
    }

  private:
    const attention_unit& unit_;
    std::int64_t next_ = 0;
};

/// Walks through a unit's tiles, in ascending order.
class UNIPREFILL_HIDDEN tile_walk {
  public:
    explicit tile_walk(const attention_unit& unit) noexcept
        : unit_(unit)
        , listed_(unit)
        , next_(unit.from[0] / attention_tile_keys * attention_tile_keys)
        , end_(unit.to[unit.lanes - 1]) {}

    /// Fills @p tile with the next that any lane may read something of. @return false where there is none.
    [[nodiscard]] bool next(attention_tile& tile) noexcept {
        while (next_ < end_) {
            tile.start(next_);
            next_ += attention_tile_keys;
            fill(tile);
            if (tile.num_keys > 0) {
                return true;
            }
        }
        return false;
    }

  private:
    void fill(attention_tile& tile) noexcept {
        const std::int64_t end = next_ < end_ ? next_ : end_;
        std::int64_t key = tile.first > unit_.from[0] ? tile.first : unit_.from[0];
        if (key < unit_.first_listed && key < end) {
            const std::int64_t stop = end < unit_.first_listed ? end : unit_.first_listed;
            tile.add(key, stop, false);
            key = stop;
        }
        while (key < end) {
            const std::int64_t block = (key - unit_.first_listed) / unit_.block_rows;
            const std::int64_t after = unit_.first_listed + (block + 1) * unit_.block_rows;
            const std::int64_t stop = end < after ? end : after;
            if (listed_.names(block)) {
                tile.add(key, stop, false);
            } else if (stop > unit_.window[0]) {
                tile.add(key > unit_.window[0] ? key : unit_.window[0], stop, true);
            }
            key = stop;
        }
    }

    const attention_unit& unit_;
    unit_list listed_;
    std::int64_t next_;
    std::int64_t end_;
};

/// Walks through tiles of blocks for which any lane takes their means, in ascending order: `first` and
/// `numbers` of a tile count blocks.
class UNIPREFILL_HIDDEN mean_walk {
  public:
    explicit mean_walk(const attention_unit& unit) noexcept
        : listed_(unit)
        , next_(unit.mean_from[0] / attention_tile_keys * attention_tile_keys)
        , end_(unit.mean_to[unit.lanes - 1]) {}

    /// Fills @p tile with the next that has a block. @return false where there is none.
    [[nodiscard]] bool next(attention_tile& tile) noexcept {
        while (next_ < end_) {
            tile.start(next_);
            next_ += attention_tile_keys;
            const std::int64_t end = next_ < end_ ? next_ : end_;
            for (std::int64_t block = tile.first; block < end; ++block) {
                if (!listed_.names(block)) {
                    tile.add(block, block + 1, false);
                }
            }
            if (tile.num_keys > 0) {
                return true;
            }
        }
        return false;
    }

  private:
    unit_list listed_;
    std::int64_t next_;
    std::int64_t end_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
