// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What both score kernels share: where keys are, what a tile hides, and how scores in registers become one
/// number for each (query row, slot).
#pragma once

#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/detail/score_share.hpp>
#include <uniprefill/importance/detail/segment_plan.hpp>

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
    alignas(4) std::uint8_t suspicious[4]; ///< one for each warp that loaded keys
    std::uint32_t has_cuts;                ///< whether any of `cuts` isn't -1
    std::uint32_t forced[4];               ///< a bit for each key
    std::int16_t cuts[8]; ///< of each slot: its block's place among the segment's cut blocks, or -1

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN bool any_suspicious() const {
        return *reinterpret_cast<const std::uint32_t*>(suspicious) != 0;
    }
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
            const std::int32_t* const blocks = buffers.cut_blocks + what.first_cut;
            const std::int32_t found =
                find_last(what.num_cuts, block, [blocks](std::int32_t index) { return blocks[index]; });
            cut = blocks[found] == block ? found : -1;
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

/// Of a thread's scores, those of slot s are [s * SlotKeys / 2, (s + 1) * SlotKeys / 2): see matrix_step()
/// for the layout. Turns them into one number for each (query row, slot): log2 of the sum of 2^score.
///
/// Sums are taken as they are, without a reference: fp32 holds 2^-126 to 2^127. Where a sum is outside 2^-100
/// to 2^100, that is told, and scores have to be taken relative to the largest.
/// @tparam Keys keys of a tile, @tparam SlotKeys keys of a slot
template <int Keys, int SlotKeys>
struct UNIPREFILL_HIDDEN slot_sums {
    static constexpr int values = 2 * (Keys / SlotKeys); ///< index 2 * slot + (row is the upper one of two)
    static constexpr int per_lane = values < 4 ? 1 : values / 4;

    /// The index of the first of a lane's numbers; the others follow. See sum_over_quad().
    [[nodiscard]] static __device__ std::int32_t first_value(std::int32_t quad_lane) {
        return values == 2 ? quad_lane / 2 : quad_lane / 2 * (values / 2) + quad_lane % 2 * (values / 4);
    }

    /// @param factors of a lane's two rows
    /// @param numbers [per_lane] this lane's
    /// @return whether all sums of the warp are within range
    [[nodiscard]] static __device__ bool run(const float (&scores)[Keys / 2], const float (&factors)[2],
                                             std::int32_t quad_lane, float (&numbers)[per_lane]) {
        float sums[values];
#pragma unroll
        for (int slot = 0; slot < values / 2; ++slot) {
            constexpr int slot_scores = SlotKeys / 2;
            float parts[4];
#pragma unroll
            for (int i = 0; i < slot_scores; ++i) {
                const float x = multiply(scores[slot * slot_scores + i], factors[i % 4 / 2]);
                const float power = exp2_of(x);
                parts[i % 4] = i < 4 ? power : add(parts[i % 4], power);
            }
            sums[2 * slot] = add(parts[0], parts[1]);
            sums[2 * slot + 1] = add(parts[2], parts[3]);
        }
        sum_over_quad(sums, quad_lane);
        bool outside = false;
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            outside = outside || is_outside(sums[k]);
            numbers[k] = log2_of(sums[k]);
        }
        return !__any_sync(0xffffffffu, outside);
    }

    /// Which of a thread's scores count: bit 2 j + i of visible[r] stands for scores[4 j + 2 r + i].
    using visibility = std::uint32_t[2];

    /// The keys below @p seen.
    [[nodiscard]] static __device__ std::uint32_t first_keys(std::int32_t seen, std::int32_t quad_lane) {
        const std::int32_t beyond = min(max(seen % 8 - 2 * quad_lane, 0), 2);
        const std::int32_t count = seen / 8 * 2 + beyond;
        return count >= 32 ? 0xffffffffu : (1u << count) - 1u;
    }
    /// The forced keys of cut blocks, or all others.
    [[nodiscard]] static __device__ std::uint32_t marked_keys(const tile_notes& notes, bool forced,
                                                              std::int32_t quad_lane) {
        std::uint32_t bits = 0;
#pragma unroll
        for (int slot = 0; slot < values / 2; ++slot) {
            if (notes.cuts[slot] >= 0) {
#pragma unroll
                for (int j = slot * (SlotKeys / 8); j < (slot + 1) * (SlotKeys / 8); ++j) {
                    bits |= ((notes.forced[j / 4] >> (j % 4 * 8 + 2 * quad_lane)) & 3u) << (2 * j);
                }
            }
        }
        return forced ? bits : ~bits;
    }

    /// Only visible scores count, and they are taken relative to the largest of their (row, slot): any sum is
    /// within range.
    static __device__ void run_visible(const float (&scores)[Keys / 2], const float (&factors)[2],
                                       const visibility& visible, std::int32_t quad_lane,
                                       float (&numbers)[per_lane]) {
        const float minus_infinity = bit_cast<float>(0xff800000u);
        float tops[values];
        float sums[values];
#pragma unroll
        for (int v = 0; v < values; ++v) {
            float top = minus_infinity;
#pragma unroll
            for (int i = 0; i < SlotKeys / 4; ++i) {
                const int bit = v / 2 * (SlotKeys / 4) + i;
                const float x = multiply(scores[bit / 2 * 4 + v % 2 * 2 + bit % 2], factors[v % 2]);
                top = larger(top, (visible[v % 2] >> bit & 1u) != 0 ? x : minus_infinity);
            }
            top = larger(top, __shfl_xor_sync(0xffffffffu, top, 1));
            tops[v] = larger(top, __shfl_xor_sync(0xffffffffu, top, 2));
            sums[v] = 0;
#pragma unroll
            for (int i = 0; i < SlotKeys / 4; ++i) {
                const int bit = v / 2 * (SlotKeys / 4) + i;
                const float x = multiply(scores[bit / 2 * 4 + v % 2 * 2 + bit % 2], factors[v % 2]);
                const float power = exp2_of(add(x, -tops[v]));
                sums[v] = add(sums[v], (visible[v % 2] >> bit & 1u) != 0 ? power : 0.0f);
            }
        }
        sum_over_quad(sums, quad_lane);
#pragma unroll
        for (int k = 0; k < per_lane; ++k) {
            const float top = pick_in_quad(tops, k, quad_lane);
            numbers[k] = top == minus_infinity ? no_visible_keys : add(top, log2_of(sums[k]));
        }
    }

  private:
    [[nodiscard]] static __device__ bool is_outside(float sum) {
        constexpr std::uint32_t least = (127u - 100u) << 23;
        constexpr std::uint32_t most = (127u + 100u) << 23;
        return bit_cast<std::uint32_t>(sum) - least > most - least;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
