// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which part of the scores a thread block works out, and where the tiles of its part lie.
#pragma once

#include <uniprefill/importance/detail/plan_layout.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A stretch of tiles of one (segment, KV head, chunk of query rows).
struct cuda_run {
    std::int32_t segment = 0;
    std::int32_t kv_head = 0;
    std::int32_t first_row = 0; ///< query row of the KV head
    std::int32_t tile_begin = 0;
    std::int32_t tile_end = 0;
};

/// The runs of one thread block: an equal share of all work, in order.
class cuda_share {
  public:
    /// @param cta of @p ctas thread blocks
    UNIPREFILL_API cuda_share(const cuda_buffers& buffers, const cuda_tiling& tiling,
                              std::int32_t num_segments, std::uint32_t cta, std::uint32_t ctas) noexcept
        : buffers_(buffers)
        , chunk_rows_(tiling.chunk_rows)
        , num_segments_(num_segments) {
        const std::int64_t tiles = buffers.totals->tiles;
        next_ = tiles * cta / ctas;
        end_ = tiles * (cta + std::int64_t{1}) / ctas;
    }
    /// @return false once there are no more.
    [[nodiscard]] UNIPREFILL_API bool next(cuda_run& run) noexcept {
        while (next_ < end_) {
            run.segment = find_segment(buffers_.first_tiles, num_segments_, next_);
            const cuda_segment& what = buffers_.segments[run.segment];
            const std::int64_t local = next_ - what.first_tile;
            const std::int32_t cost = what.cost();
            const std::int32_t chunks = (what.lanes + chunk_rows_ - 1) / chunk_rows_;
            const auto unit = static_cast<std::int32_t>(local / cost);
            const std::int32_t begin = static_cast<std::int32_t>(local - std::int64_t{unit} * cost);
            const std::int64_t left = end_ - next_;
            const std::int32_t end = left < cost - begin ? begin + static_cast<std::int32_t>(left) : cost;
            next_ += end - begin;
            run.kv_head = unit / chunks;
            run.first_row = unit % chunks * chunk_rows_;
            run.tile_begin = begin > what.lead_tiles ? begin - what.lead_tiles : 0;
            run.tile_end = end < cost - what.trail_tiles ? end - what.lead_tiles : what.tiles();
            if (what.num_observations > 0 && run.tile_begin < run.tile_end) {
                return true;
            }
        }
        return false;
    }

  private:
    const cuda_buffers& buffers_;
    std::int64_t next_ = 0;
    std::int64_t end_ = 0;
    std::int32_t chunk_rows_;
    std::int32_t num_segments_;
};

/// Where a tile lies in its segment.
struct cuda_tile {
    bool own = false;
    std::int64_t first_key = 0; ///< counted from the request's first
    std::int32_t first_row = 0; ///< own tiles: counted from the segment's first
    std::int32_t num_keys = 0;
    std::int32_t first_slot = 0;

    [[nodiscard]] static UNIPREFILL_API cuda_tile at(const cuda_segment& what, std::int32_t tile,
                                                     std::int32_t tile_keys,
                                                     std::int32_t slot_keys) noexcept {
        cuda_tile made;
        made.own = tile >= what.context_tiles;
        const std::int64_t first = std::int64_t{made.own ? tile - what.context_tiles : tile} * tile_keys;
        const std::int64_t left = (made.own ? what.rows : what.context) - first;
        made.first_key = made.own ? what.context + first : first;
        made.first_row = static_cast<std::int32_t>(made.own ? first : 0);
        made.num_keys = static_cast<std::int32_t>(left < tile_keys ? left : tile_keys);
        made.first_slot = static_cast<std::int32_t>((made.own ? what.context_slots : 0) + first / slot_keys);
        return made;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
