// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What both score kernels share: where keys are, which part of the work a thread block does, what a tile
/// hides, and how scores in registers become one number for each (query row, slot).
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/detail/cuda_math.cuh>
#include <uniprefill/importance/detail/cuda_plan.cuh>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a score kernel reads. @tparam Q element of queries, @tparam T element of keys
template <class Q, class T, class Cache>
struct cuda_score_task {
    limits bounds;
    batch_view batch;
    cuda_tiling tiling;
    cuda_buffers buffers;
    head_rows<const Q> queries;
    head_rows<const T> keys;
    Cache cached;
    const float* key_scales = nullptr; // [num_kv_heads] FP8 only
    float query_factor = 1;            ///< turns q.k into units of log2, or into x / cap
    float softcap = 0;                 ///< 0: none

    /// The address of a key, counted from the request's first.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN const T* key(const cuda_segment& what, std::int64_t index,
                                                            std::int32_t kv_head) const {
        return index < what.cached ? cached.row(what.request, static_cast<std::int32_t>(index), kv_head)
                                   : keys.at(what.request_row + index - what.cached, kv_head);
    }
};

/// A stretch of tiles of one (segment, KV head, chunk of query rows).
struct cuda_run {
    std::int32_t segment = 0;
    std::int32_t kv_head = 0;
    std::int32_t first_row = 0; ///< query row of the KV head
    std::int32_t tile_begin = 0;
    std::int32_t tile_end = 0;
};

/// The runs of one thread block: an equal share of all tiles, in order.
class cuda_share {
  public:
    __device__ UNIPREFILL_HIDDEN cuda_share(const cuda_buffers& buffers, const cuda_tiling& tiling,
                                            std::int32_t num_segments)
        : buffers_(buffers)
        , chunk_rows_(tiling.chunk_rows)
        , num_segments_(num_segments) {
        const std::int64_t tiles = buffers.totals->tiles;
        next_ = tiles * blockIdx.x / gridDim.x;
        end_ = tiles * (blockIdx.x + std::int64_t{1}) / gridDim.x;
    }
    /// @return false once there are no more.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool next(cuda_run& run) {
        while (next_ < end_) {
            run.segment = find_segment(buffers_.first_tiles, num_segments_, next_);
            const cuda_segment& what = buffers_.segments[run.segment];
            const std::int64_t local = next_ - what.first_tile;
            const std::int32_t tiles = what.tiles();
            const std::int32_t chunks = (what.lanes + chunk_rows_ - 1) / chunk_rows_;
            const auto unit = static_cast<std::int32_t>(local / tiles);
            run.kv_head = unit / chunks;
            run.first_row = unit % chunks * chunk_rows_;
            run.tile_begin = static_cast<std::int32_t>(local % tiles);
            const std::int64_t left = end_ - next_;
            run.tile_end =
                left < tiles - run.tile_begin ? run.tile_begin + static_cast<std::int32_t>(left) : tiles;
            next_ += run.tile_end - run.tile_begin;
            if (what.num_observations > 0) {
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

    [[nodiscard]] static __device__ UNIPREFILL_HIDDEN cuda_tile at(const cuda_segment& what,
                                                                   std::int32_t tile, std::int32_t tile_keys,
                                                                   std::int32_t slot_keys) {
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

/// Elements that could make a score NaN or infinite, 32 bits at a time: NaN and infinity themselves, and for
/// bfloat16 and float numbers so large (2^59) that a product of 256 of them might overflow. Where one is
/// seen, scores are judged one by one.
template <class T>
class suspicious_elements {
  public:
    __device__ UNIPREFILL_HIDDEN void look_at(std::uint32_t word) {
        if constexpr (std::is_same_v<T, float8_e4m3>) {
            largest_ |= ((word & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
        } else if constexpr (std::is_same_v<T, float>) {
            largest_ = max(largest_, word & 0x7fffffffu);
        } else {
            largest_ = __vmaxu2(largest_, word & 0x7fff7fffu);
        }
    }
    __device__ UNIPREFILL_HIDDEN void look_at(const uint4& words) {
        look_at(words.x);
        look_at(words.y);
        look_at(words.z);
        look_at(words.w);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool found() const {
        if constexpr (std::is_same_v<T, float8_e4m3>) {
            return largest_ != 0;
        } else if constexpr (std::is_same_v<T, float>) {
            return largest_ >= (127u + 59u) << 23;
        } else {
            constexpr std::uint32_t limit = std::is_same_v<T, bfloat16> ? (127u + 59u) << 7 : 0x7c00u;
            return (largest_ & 0xffffu) >= limit || (largest_ >> 16) >= limit;
        }
    }

  private:
    std::uint32_t largest_ = 0;
};

/// What a tile hides, as consumers of its scores read it from shared memory.
struct tile_notes {
    std::uint8_t suspicious[4]; ///< one for each warp that loaded keys
    std::uint32_t has_cuts;     ///< whether any of `cuts` isn't -1
    std::uint32_t forced[4];    ///< a bit for each key
    std::int16_t cuts[8];       ///< of each slot: its block's place among the segment's cut blocks, or -1
};

/// Copies a segment to shared memory; every one of at least 32 threads helps.
__device__ UNIPREFILL_HIDDEN inline void copy_segment(cuda_segment& to, const cuda_segment& from,
                                                      std::int32_t thread) {
    static_assert(sizeof(cuda_segment) % 8 == 0 && sizeof(cuda_segment) / 8 <= 32);
    if (thread < static_cast<std::int32_t>(sizeof(cuda_segment) / 8)) {
        reinterpret_cast<std::uint64_t*>(&to)[thread] = reinterpret_cast<const std::uint64_t*>(&from)[thread];
    }
}
/// Notes which keys of an own tile are forced, and which of its slots belong to cut blocks. Called by whole
/// warps, of which those with a thread below @p Threads take part.
template <std::int32_t TileKeys, std::int32_t G, std::int32_t Threads>
__device__ UNIPREFILL_HIDDEN inline void note_cuts(const batch_view& batch, const cuda_buffers& buffers,
                                                   const cuda_segment& what, const cuda_tile& at,
                                                   std::int32_t thread, tile_notes& notes) {
    static_assert(Threads % 32 == 0 && TileKeys % Threads == 0);
    constexpr std::int32_t slot_keys = G < TileKeys ? G : TileKeys;
    if (thread < Threads) {
#pragma unroll
        for (std::int32_t key = thread; key < TileKeys; key += Threads) {
            const bool forced = key < at.num_keys && is_forced(batch, what, at.first_row + key);
            const std::uint32_t word = __ballot_sync(0xffffffffu, forced);
            if (thread % 32 == 0) {
                notes.forced[key / 32] = word;
            }
        }
    }
    if (thread < 32) {
        std::int32_t cut = -1;
        if (thread < TileKeys / slot_keys) {
            const std::int32_t block = (at.first_row + thread * slot_keys) / G;
            for (std::int32_t i = 0; i < what.num_cuts; ++i) {
                cut = buffers.cut_blocks[what.first_cut + i] == block ? i : cut;
            }
            notes.cuts[thread] = static_cast<std::int16_t>(cut);
        }
        const bool has_cuts = __any_sync(0xffffffffu, cut >= 0);
        if (thread == 0) {
            notes.has_cuts = has_cuts ? 1u : 0u;
        }
    }
}

/// Sums over the four lanes that share query rows. Afterwards lane q has the values of index
/// (q / 2) * Values / 2 + (q mod 2) * Values / 4 + k in values[k]; with two values lanes 2 i and 2 i + 1 both
/// have number i.
template <int Values>
__device__ UNIPREFILL_HIDDEN inline void sum_over_quad(float (&values)[Values], std::int32_t quad_lane) {
    constexpr std::uint32_t everyone = 0xffffffffu;
    constexpr int half_values = Values / 2;
#pragma unroll
    for (int i = 0; i < half_values; ++i) {
        const float sent = (quad_lane & 2) != 0 ? values[i] : values[i + half_values];
        const float kept = (quad_lane & 2) != 0 ? values[i + half_values] : values[i];
        values[i] = add(kept, __shfl_xor_sync(everyone, sent, 2));
    }
    if constexpr (Values == 2) {
        values[0] = add(values[0], __shfl_xor_sync(everyone, values[0], 1));
    } else {
        constexpr int quarter = Values / 4;
#pragma unroll
        for (int i = 0; i < quarter; ++i) {
            const float sent = (quad_lane & 1) != 0 ? values[i] : values[i + quarter];
            const float kept = (quad_lane & 1) != 0 ? values[i + quarter] : values[i];
            values[i] = add(kept, __shfl_xor_sync(everyone, sent, 1));
        }
    }
}

/// The same distribution of values that all four lanes have.
template <int Values>
__device__ UNIPREFILL_HIDDEN inline float pick_in_quad(const float (&values)[Values], int k,
                                                       std::int32_t quad_lane) {
    if constexpr (Values == 2) {
        return (quad_lane & 2) != 0 ? values[1] : values[0];
    } else {
        constexpr int quarter = Values / 4;
        const float low = (quad_lane & 1) != 0 ? values[k + quarter] : values[k];
        const float high = (quad_lane & 1) != 0 ? values[k + 3 * quarter] : values[k + 2 * quarter];
        return (quad_lane & 2) != 0 ? high : low;
    }
}

/// Of a thread's scores, those of slot s are sums[Keys / 8 * ...]: see matrix_step() for the layout. Turns
/// them into one number for each (query row, slot): log2 of the sum of 2^score.
///
/// Sums are taken as they are, without a reference: fp32 holds 2^-126 to 2^127. Where a sum is outside 2^-100
/// to 2^100, that (query row, slot) alone is done again relative to its largest score.
/// @tparam Keys keys of a tile, @tparam SlotKeys keys of a slot
template <int Keys, int SlotKeys>
struct UNIPREFILL_HIDDEN slot_sums {
    static constexpr int slots = Keys / SlotKeys;
    static constexpr int values = 2 * slots; ///< index 2 * slot + (row is the upper one of the thread's two)
    static constexpr int per_lane = values < 4 ? 1 : values / 4;

    /// Which of a thread's scores count: bit 2 j + i of visible[r] stands for scores[4 j + 2 r + i].
    using visibility = std::uint32_t[2];

    /// The keys below @p seen.
    [[nodiscard]] static __device__ std::uint32_t first_keys(std::int32_t seen, std::int32_t quad_lane) {
        const std::int32_t beyond = min(max(seen % 8 - 2 * quad_lane, 0), 2);
        const std::int32_t count = seen / 8 * 2 + beyond;
        return count >= 32 ? 0xffffffffu : (1u << count) - 1u;
    }
    /// The keys whose bit is set in @p words.
    [[nodiscard]] static __device__ std::uint32_t marked_keys(const std::uint32_t (&words)[(Keys + 31) / 32],
                                                              std::int32_t quad_lane) {
        std::uint32_t bits = 0;
#pragma unroll
        for (int j = 0; j < Keys / 8; ++j) {
            bits |= ((words[j / 4] >> (j % 4 * 8 + 2 * quad_lane)) & 3u) << (2 * j);
        }
        return bits;
    }
    /// A visible score in units of log2, masked_score for another.
    [[nodiscard]] static __device__ float masked(float score, float factor, std::uint32_t visible, int bit) {
        const float x = multiply(score, factor);
        return (visible & (1u << bit)) != 0 ? x : masked_score;
    }

    /// @param polynomial of every 8 exponentials, so many run on the multiply-add units
    template <int Polynomial>
    static __device__ void sum_all(const float (&scores)[Keys / 2], const float (&factors)[2],
                                   float (&sums)[values]) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
            float parts[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = slot * (SlotKeys / 8); j < (slot + 1) * (SlotKeys / 8); ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = multiply(scores[4 * j + i], factors[i / 2]);
                    const bool on_multiply_add_units = (4 * j + i) % 8 < Polynomial;
                    parts[i] = add(parts[i], on_multiply_add_units ? exp2_by_polynomial(x) : exp2_of(x));
                }
            }
            sums[2 * slot] = add(parts[0], parts[1]);
            sums[2 * slot + 1] = add(parts[2], parts[3]);
        }
    }

    /// Relative to @p tops (as they are where those are 0). Where nothing is visible a relative sum means
    /// nothing.
    static __device__ void sum_visible(const float (&scores)[Keys / 2], const float (&factors)[2],
                                       const visibility& visible, const float (&tops)[values],
                                       float (&sums)[values]) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
            float parts[4] = {0, 0, 0, 0};
#pragma unroll
            for (int j = slot * (SlotKeys / 8); j < (slot + 1) * (SlotKeys / 8); ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const float x = masked(scores[4 * j + i], factors[i / 2], visible[i / 2], 2 * j + i % 2);
                    parts[i] = add(parts[i], exp2_of(add(x, -tops[2 * slot + i / 2])));
                }
            }
            sums[2 * slot] = add(parts[0], parts[1]);
            sums[2 * slot + 1] = add(parts[2], parts[3]);
        }
    }

    /// The largest visible score of each (row, slot), the same in all four lanes.
    static __device__ void find_tops(const float (&scores)[Keys / 2], const float (&factors)[2],
                                     const visibility& visible, float (&tops)[values]) {
#pragma unroll
        for (int slot = 0; slot < slots; ++slot) {
            tops[2 * slot] = tops[2 * slot + 1] = masked_score;
#pragma unroll
            for (int j = slot * (SlotKeys / 8); j < (slot + 1) * (SlotKeys / 8); ++j) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    float& top = tops[2 * slot + i / 2];
                    top =
                        larger(top, masked(scores[4 * j + i], factors[i / 2], visible[i / 2], 2 * j + i % 2));
                }
            }
        }
#pragma unroll
        for (int v = 0; v < values; ++v) {
            tops[v] = larger(tops[v], __shfl_xor_sync(0xffffffffu, tops[v], 1));
            tops[v] = larger(tops[v], __shfl_xor_sync(0xffffffffu, tops[v], 2));
        }
    }

    [[nodiscard]] static __device__ bool is_outside(float sum) {
        constexpr std::uint32_t least = (127u - 100u) << 23;
        constexpr std::uint32_t most = (127u + 100u) << 23;
        return bit_cast<std::uint32_t>(sum) - least > most - least;
    }

    /// Every score counts. @param partials [per_lane] this lane's numbers, see sum_over_quad()
    /// @return whether all lanes' sums are within range; if not, partials hold this lane's sums, and
    /// run_relative() is next
    template <int Polynomial>
    [[nodiscard]] static __device__ bool run_all(const float (&scores)[Keys / 2], const float (&factors)[2],
                                                 std::int32_t quad_lane, float (&partials)[per_lane]) {
        float sums[values];
        sum_all<Polynomial>(scores, factors, sums);
        sum_over_quad(sums, quad_lane);
        bool outside = false;
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            outside = outside || is_outside(sums[k]);
            partials[k] = sums[k];
        }
        if (__any_sync(0xffffffffu, outside)) {
            return false;
        }
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            partials[k] = log2_of(partials[k]);
        }
        return true;
    }

    /// The visible scores count.
    static __device__ void run_visible(const float (&scores)[Keys / 2], const float (&factors)[2],
                                       const visibility& visible, std::int32_t quad_lane,
                                       float (&partials)[per_lane]) {
        constexpr float as_they_are[values] = {};
        float sums[values];
        float counts[values];
        sum_visible(scores, factors, visible, as_they_are, sums);
#pragma unroll
        for (int v = 0; v < values; ++v) {
            constexpr int slot_bits = SlotKeys / 4;
            constexpr std::uint32_t first_slot =
                slot_bits >= 32 ? 0xffffffffu : (1u << (slot_bits % 32)) - 1u;
            counts[v] = static_cast<float>(__popc(visible[v % 2] & (first_slot << (v / 2 * slot_bits % 32))));
        }
        sum_over_quad(sums, quad_lane);
        sum_over_quad(counts, quad_lane);
        bool outside = false;
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            partials[k] = counts[k] > 0.0f ? sums[k] : 1.0f;
            outside = outside || is_outside(partials[k]);
        }
        if (__any_sync(0xffffffffu, outside)) {
            run_relative(scores, factors, visible, quad_lane, partials);
        } else {
#pragma unroll
            for (int k = 0; k < per_lane; ++k) {
                partials[k] = log2_of(partials[k]);
            }
        }
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            partials[k] = counts[k] > 0.0f ? partials[k] : no_visible_keys;
        }
    }

    /// Replaces sums by their log2, those that are out of range by ones relative to the largest visible score
    /// of their (row, slot).
    static __device__ void run_relative(const float (&scores)[Keys / 2], const float (&factors)[2],
                                        const visibility& visible, std::int32_t quad_lane,
                                        float (&partials)[per_lane]) {
        float tops[values];
        float sums[values];
        find_tops(scores, factors, visible, tops);
        sum_visible(scores, factors, visible, tops, sums);
        sum_over_quad(sums, quad_lane);
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            const float relative = add(pick_in_quad(tops, k, quad_lane), log2_of(sums[k]));
            partials[k] = is_outside(partials[k]) ? relative : log2_of(partials[k]);
        }
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
