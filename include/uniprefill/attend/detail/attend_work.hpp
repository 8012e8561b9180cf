// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How attention is cut into pieces: which query rows a thread block takes, and what each of them reads.
/// Plain functions of host and device.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/detail/segment_keys.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A step as the kernels of attention know it. Keys of a segment are counted from its request's first: cached
/// ones, then the request's rows. A *unit* is a list of a segment, or the lack of one: the query heads that
/// read the same keys. Of a unit, (query row, head) pairs are packed row after row. With lists by query
/// block, it is those of all its query blocks, and each of them begins a tile.
struct attend_step {
    batch_view batch;
    const std::int32_t* kept_to_old = nullptr; // [kept rows] null: every row is kept
    const std::int32_t* cu_kept = nullptr;     // [num_segments + 1] first kept row; null: as the batch's rows
    block_lists lists;
    std::int32_t units = 0;
    std::int32_t unit_heads = 0; ///< query heads of a unit
    std::int32_t kv_units = 0;   ///< units of a KV head
    std::int32_t window = 0;     ///< the model's
    const std::int32_t* cached_positions = nullptr;
    std::int64_t cached_positions_stride = 0;
    std::int32_t kept_bound = 0;          ///< rows that queries and outputs have
    std::int32_t tile_rows = 0;           ///< packed rows of an item
    std::int32_t key_bytes = 0;           ///< of a key and its value together
    std::int32_t query_rows = INT32_MAX;  ///< of a query block: without them, one that holds all
    std::int32_t block_tiles = INT32_MAX; ///< tiles of a whole query block

    /// Says where lists by query block cut. unit_heads and tile_rows are set.
    UNIPREFILL_API void cut_by(const block_lists& which) noexcept {
        lists = which;
        if (which.offsets != nullptr && which.query_rows > 0) {
            query_rows = which.query_rows;
            const std::int64_t tiles = (std::int64_t{query_rows} * unit_heads + tile_rows - 1) / tile_rows;
            block_tiles = tiles < INT32_MAX ? static_cast<std::int32_t>(tiles) : INT32_MAX;
        }
    }
};

/// What a thread block does at a time: tile_rows packed rows of one unit of one segment.
struct attend_item {
    std::int32_t segment;
    std::int32_t request;
    std::int32_t unit;
    std::int32_t first_row; ///< of the unit's packed rows
    std::int32_t num_rows;  ///< of them, in this item
    std::int32_t kept_begin;
    std::int32_t segment_begin;
    std::int32_t segment_rows;
    std::int32_t request_begin;
    std::int32_t cached;
    std::int32_t context; ///< keys before the segment's first row
    std::int32_t list_entries;
    std::int64_t list_begin;
    bool has_list; ///< else it reads everything
};

/// What one query row reads: keys in [first, end); those before `window` only if they are context or listed.
struct row_reach {
    std::int32_t first;
    std::int32_t end;
    std::int32_t window;
};

/// The same for all rows of an item, as bounds.
struct item_reach {
    row_reach least;
    row_reach most;
};

/// Tiles of packed rows of each unit of a segment.
[[nodiscard]] inline UNIPREFILL_API std::int32_t tiles_of(const attend_step& step,
                                                          std::int32_t segment) noexcept {
    const kept_range kept = kept_of(step, segment);
    const std::int32_t queries = kept.end - kept.begin;
    const std::int32_t blocks = queries / step.query_rows; // whole ones
    const std::int64_t rows = (queries - std::int64_t{blocks} * step.query_rows) * step.unit_heads;
    return blocks * step.block_tiles +
           static_cast<std::int32_t>((rows + step.tile_rows - 1) / step.tile_rows);
}

/// Keys and values of some units stay in the level-2 cache together if they are no more than this.
inline constexpr std::int64_t attend_cached_bytes = std::int64_t{24} << 20;

/// Item @p index of a segment, counted from 0. Units whose keys fit the level-2 cache together take turns,
/// and the last rows, which read most, come first.
[[nodiscard]] inline UNIPREFILL_API attend_item item_of(const attend_step& step, std::int32_t segment,
                                                        std::int32_t index) noexcept {
    const segment_keys keys = segment_keys_of(step.batch, segment);
    attend_item made{};
    made.segment = segment;
    made.request = keys.request;
    made.request_begin = keys.request_begin;
    made.segment_begin = keys.begin;
    made.segment_rows = keys.rows;
    made.cached = keys.cached;
    made.context = keys.context;
    const kept_range kept = kept_of(step, segment);
    made.kept_begin = kept.begin;

    const std::int32_t tiles = tiles_of(step, segment);
    const std::int64_t bytes = std::int64_t{made.context + made.segment_rows} * step.key_bytes;
    const std::int64_t fitting = bytes > 0 ? attend_cached_bytes / bytes : 1;
    const std::int64_t together = (fitting > 1 ? fitting : 1) * step.kv_units;
    const std::int32_t section = together < step.units ? static_cast<std::int32_t>(together) : step.units;
    const std::int32_t before = index / (tiles * section) * section;
    const std::int32_t left = step.units - before;
    const std::int32_t taking_turns = left < section ? left : section;
    const std::int32_t within = index - before * tiles;
    made.unit = before + within % taking_turns;
    const std::int32_t tile = tiles - 1 - within / taking_turns;
    const std::int32_t block = tile / step.block_tiles;
    const std::int64_t block_begin = std::int64_t{block} * step.query_rows;
    const std::int64_t block_left = kept.end - kept.begin - block_begin;
    const std::int64_t block_rows = block_left < step.query_rows ? block_left : step.query_rows;
    const std::int32_t before_tile = (tile - block * step.block_tiles) * step.tile_rows;
    made.first_row = static_cast<std::int32_t>(block_begin * step.unit_heads) + before_tile;
    const std::int64_t rows_left = block_rows * step.unit_heads - before_tile;
    made.num_rows = rows_left < step.tile_rows ? static_cast<std::int32_t>(rows_left) : step.tile_rows;

    if (step.lists.offsets != nullptr) {
        const std::int64_t place =
            block_lists::query_block_place(segment, kept.begin, step.query_rows) + block;
        const std::int64_t list = place * step.units + made.unit;
        const std::int64_t begin = step.lists.offsets[list];
        const std::int64_t end = step.lists.place_of(step.lists.offsets[list + 1]);
        const std::int64_t capacity = step.lists.capacity;
        made.has_list = begin >= 0 || step.lists.query_rows == 0;
        made.list_begin = begin < 0 ? 0 : begin > capacity ? capacity : begin;
        const std::int64_t entries = (end > capacity ? capacity : end) - made.list_begin;
        made.list_entries = entries > 0 && made.has_list ? static_cast<std::int32_t>(entries) : 0;
    }
    return made;
}

/// Where row @p row of an item is.
struct item_row {
    std::int32_t kept; ///< among queries and outputs
    std::int32_t head; ///< query head
};
[[nodiscard]] inline UNIPREFILL_API item_row row_of(const attend_step& step, const attend_item& item,
                                                    std::int32_t row) noexcept {
    const std::int32_t packed = item.first_row + row;
    return {item.kept_begin + packed / step.unit_heads,
            item.unit * step.unit_heads + packed % step.unit_heads};
}

/// What row @p row of an item reads; nothing where the row map makes no sense. O(log window).
[[nodiscard]] inline UNIPREFILL_API row_reach reach_of(const attend_step& step, const attend_item& item,
                                                       std::int32_t row) noexcept {
    constexpr std::int32_t never = INT32_MAX;
    const std::int32_t kept = row_of(step, item, row).kept;
    const std::int32_t packed_row = step.kept_to_old != nullptr ? step.kept_to_old[kept] : kept;
    if (packed_row < item.segment_begin || packed_row - item.segment_begin >= item.segment_rows) {
        return {0, 0, never};
    }
    const std::int32_t in_segment = packed_row - item.segment_begin;
    const std::int32_t* positions = step.batch.positions;
    const std::int32_t position = positions[packed_row];
    row_reach made{0, item.context + in_segment + 1, 0};
    if (step.window > 0) {
        const std::int32_t* const held =
            step.cached_positions != nullptr
                ? step.cached_positions + item.request * step.cached_positions_stride
                : nullptr;
        made.first = first_key_at(held, item.cached, positions, item.request_begin, packed_row,
                                  position - step.window + 1);
    }
    if (item.has_list) {
        made.window = never;
        if (step.lists.window > 0) {
            const std::int32_t least = position - step.lists.window + 1;
            const std::int32_t from =
                bracketed_row_at(positions, item.segment_begin, packed_row, least) - item.segment_begin;
            made.window = item.context + from / step.lists.block_rows * step.lists.block_rows;
        }
    }
    return made;
}

/// The blocks [from, to) of its segment that a row meets by their means unless they are listed.
struct mean_range {
    std::int32_t from;
    std::int32_t to;
};
template <std::int32_t G>
[[nodiscard]] UNIPREFILL_API mean_range means_of(const row_reach& reach, std::int32_t context) noexcept {
    const std::int32_t unseen = reach.first - context;
    const std::int32_t own = reach.end - 1;
    const std::int32_t before = (reach.window < own ? reach.window : own) - context;
    return {unseen > 0 ? (unseen + G - 1) / G : 0, before > 0 ? before / G : 0};
}

/// What tiles have beside where some of them are of means: consecutive blocks take the places of keys, and
/// every row is masked.
template <std::int32_t TileKeys, bool Means>
struct tile_means {
    static constexpr bool of_means = false;
};
template <std::int32_t TileKeys>
struct tile_means<TileKeys, true> {
    static constexpr std::int32_t words = (TileKeys + 31) / 32;
    bool of_means;
    std::uint32_t skipped[words]; ///< bit i of all: the tile's block i isn't listed
};

/// Keys that are multiplied together: slots of consecutive keys, each inside one block.
template <std::int32_t TileKeys, std::int32_t G, bool Means = false>
struct key_tile : tile_means<TileKeys, Means> {
    static constexpr std::int32_t largest_slot = TileKeys < 64 ? TileKeys : 64;
    static constexpr std::int32_t slot_keys = G < largest_slot ? G : largest_slot;
    static constexpr std::int32_t slots = TileKeys / slot_keys;
    std::int32_t first[slots];
    std::int32_t end[slots]; ///< == first: an empty slot
    std::uint32_t unlisted;  ///< bit i: slot i is read by rows whose window has begun, alone
    bool masked;             ///< some row doesn't read some key
};

/// Where a walk is among means.
template <bool Means>
struct mean_place {};
template <>
struct mean_place<true> {
    std::int32_t block = 0; ///< the next tile's first
    std::int32_t end = 0;   ///< no row meets this block, or a later one
    std::int32_t entry = 0; ///< of the list
};

/// Walks through the keys that rows of an item read, tile by tile, ascending; then, with means, through those
/// of blocks. What is in a tile's slot doesn't depend on which rows the item has, apart from slots that none
/// of its rows reads.
/// @tparam List gives entry i of the item's list by operator()
template <std::int32_t TileKeys, std::int32_t G, class List, bool Means = false>
class key_walk {
  public:
    using tile = key_tile<TileKeys, G, Means>;

    /// @param has_means read where Means says that there may be some
    UNIPREFILL_API key_walk(const attend_item& item, const item_reach& reach, bool has_lists, List list,
                            bool has_means = false) noexcept
        : list_(list)
        , reach_(reach)
        , context_(item.context)
        , keys_end_(item.context + item.segment_rows)
        , entries_(item.list_entries)
        , context_key_(reach.least.first / TileKeys * TileKeys)
        , has_lists_(has_lists) {
        const std::int32_t seen = reach.least.first - context_;
        first_block_ = seen > 0 ? seen / G : 0;
        const std::int32_t window = reach.least.window - context_;
        if (reach.least.window >= reach.most.end) {
            window_block_ = INT32_MAX;
        } else {
            window_block_ = window > 0 ? window / G : 0;
        }
        block_ = window_block_ > first_block_ ? window_block_ : first_block_;
        in_block_ = G;
        if constexpr (Means) {
            // Tiles begin at multiples of their size, whatever rows see.
            means_.block = first_block_ / TileKeys * TileKeys;
            means_.end = has_lists && has_means ? means_of<G>(reach.most, context_).to : 0;
        } else {
            static_cast<void>(has_means);
        }
    }

    /// The next tile; false: there is none.
    UNIPREFILL_API bool next(tile& out) noexcept {
        constexpr std::int32_t slot_keys = tile::slot_keys;
        out.unlisted = 0;
        out.masked = false;
        if constexpr (Means) {
            out.of_means = false;
        }
        if (context_key_ < context_ && context_key_ < reach_.most.end) {
            for (std::int32_t i = 0; i < tile::slots; ++i) {
                const std::int32_t first = context_key_ + i * slot_keys;
                const std::int32_t end = first + slot_keys;
                set(out, i, first < context_ ? first : context_, end < context_ ? end : context_, false);
            }
            context_key_ += TileKeys;
            return true;
        }
        bool any = false;
#if defined(__CUDA_ARCH__)
#    pragma unroll
#endif
        for (std::int32_t i = 0; i < tile::slots; ++i) {
            const bool is_through = in_block_ >= G || context_ + now_ * G + in_block_ >= reach_.most.end;
            if (is_through && !next_block()) {
                set(out, i, 0, 0, false);
                continue;
            }
            any = true;
            const std::int32_t first = context_ + now_ * G + in_block_;
            const std::int32_t end = first + slot_keys;
            set(out, i, first < keys_end_ ? first : keys_end_, end < keys_end_ ? end : keys_end_,
                now_unlisted_);
            in_block_ += slot_keys;
        }
        if constexpr (Means) {
            return any || next_means(out);
        } else {
            return any;
        }
    }

  private:
    UNIPREFILL_API void set(tile& out, std::int32_t i, std::int32_t first, std::int32_t end,
                            bool unlisted) noexcept {
        out.first[i] = first;
        out.end[i] = end;
        out.unlisted |= unlisted ? std::uint32_t{1} << i : 0;
        out.masked = out.masked || end - first < tile::slot_keys || end > reach_.least.end ||
                     first < reach_.most.first || (unlisted && first < reach_.most.window);
    }
    /// The next tile of means in which some block isn't listed.
    UNIPREFILL_API bool next_means(tile& out) noexcept {
        constexpr std::int32_t slot_keys = tile::slot_keys;
        while (means_.block < means_.end) {
            const std::int32_t first = means_.block;
            means_.block += TileKeys;
            for (std::int32_t i = 0; i < tile::words; ++i) {
                const std::int32_t left = means_.end - first - 32 * i;
                out.skipped[i] = left >= 32 ? ~std::uint32_t{0}
                                 : left > 0 ? (std::uint32_t{1} << left) - 1
                                            : 0;
            }
            for (; means_.entry < entries_; ++means_.entry) {
                const std::int32_t block = list_(means_.entry);
                if (block >= means_.block) {
                    break;
                }
                // All of them, so that they stay in registers.
                for (std::int32_t i = 0; i < tile::words; ++i) {
                    const bool here = block >= first && (block - first) / 32 == i;
                    out.skipped[i] &= here ? ~(std::uint32_t{1} << (block - first) % 32) : ~std::uint32_t{0};
                }
            }
            std::uint32_t any = 0;
            for (std::int32_t i = 0; i < tile::words; ++i) {
                any |= out.skipped[i];
            }
            if (any == 0) {
                continue;
            }
            for (std::int32_t i = 0; i < tile::slots; ++i) {
                const std::int32_t begin = first + i * slot_keys;
                const std::int32_t end = begin + slot_keys;
                out.first[i] = begin < means_.end ? begin : means_.end;
                out.end[i] = end < means_.end ? end : means_.end;
            }
            out.unlisted = 0;
            out.masked = true;
            out.of_means = true;
            return true;
        }
        return false;
    }
    /// Listed blocks before any row's window, then all blocks from there on.
    UNIPREFILL_API bool next_block() noexcept {
        while (entry_ < entries_) {
            const std::int32_t block = list_(entry_);
            if (block >= window_block_) {
                break;
            }
            ++entry_;
            if (block < first_block_) {
                continue;
            }
            if (block > (keys_end_ - context_ - 1) / G || context_ + block * G >= reach_.most.end) {
                entry_ = entries_; // entries ascend: the rest lies behind the rows as well
            } else {
                now_ = block;
                now_unlisted_ = false;
                in_block_ = 0;
                return true;
            }
        }
        if (window_block_ == INT32_MAX || context_ + block_ * G >= reach_.most.end) {
            return false;
        }
        while (entry_ < entries_ && list_(entry_) < block_) {
            ++entry_;
        }
        now_unlisted_ = has_lists_ && !(entry_ < entries_ && list_(entry_) == block_);
        now_ = block_++;
        in_block_ = 0;
        return true;
    }

    List list_;
    item_reach reach_;
    std::int32_t context_;
    std::int32_t keys_end_;
    std::int32_t entries_;
    std::int32_t entry_ = 0;
    std::int32_t context_key_;
    std::int32_t first_block_;
    std::int32_t window_block_;
    std::int32_t block_; ///< next of those that are read for their place
    std::int32_t now_ = 0;
    std::int32_t in_block_; ///< keys of `now_` that earlier slots have
    bool now_unlisted_ = false;
    bool has_lists_;
    mean_place<Means> means_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
