// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From the scores of 16 query rows and one tile of keys, in the registers of a warp, to numbers in memory:
/// scale, soft-cap, what rows see, what forced boundaries cut.
#pragma once

#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/importance/detail/cuda_score.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What all tiles of a run have in common, for shared memory: a thread's registers are full of scores, and
/// what the compiler puts into local memory instead takes the way to the second-level cache and back.
struct score_run {
    cuda_run now;
    std::int32_t full_context; ///< the first context tile that has keys of which none is there
    std::int32_t full_own;     ///< the first own tile that has keys that not every row sees
    std::int32_t own_slots_at; ///< added to an own tile's first slot
    std::int64_t first_number; ///< among all partials: of slot 0 and the first query row
    std::int64_t stride;       ///< from slot to slot

    template <std::int32_t TileKeys, std::int32_t Slots, class Task>
    [[nodiscard]] static __device__ UNIPREFILL_HIDDEN score_run of(const Task& task, const cuda_segment& what,
                                                                   const cuda_run& now) {
        score_run made;
        made.now = now;
        const std::int32_t seen =
            observation_row(task.buffers, what, now.segment, task.bounds.num_observations, 0) + 1;
        made.full_context = static_cast<std::int32_t>(what.context / TileKeys);
        made.full_own = what.context_tiles + (seen < what.rows ? seen : what.rows) / TileKeys;
        made.own_slots_at = what.context_slots - what.context_tiles * Slots;
        made.first_number = what.first_partial + std::int64_t{now.kv_head} * what.lanes + now.first_row;
        made.stride = std::int64_t{task.bounds.num_kv_heads} * what.lanes;
        return made;
    }
};

/// What a warp knows of the (segment, KV head, chunk of query rows) that it works on.
template <class Task, std::int32_t TileKeys, std::int32_t G, bool Softcap>
class UNIPREFILL_HIDDEN score_finisher {
    static constexpr std::int32_t slot_keys = G < TileKeys ? G : TileKeys;
    static constexpr std::int32_t slots = TileKeys / slot_keys;
    using sums = slot_sums<TileKeys, slot_keys>;

  public:
    using scores =
        float[TileKeys / 2]; ///< [4 j + i]: key 8 j + 2 (lane mod 4) + i mod 2, row lane / 4 + 8 (i / 2)

    /// @param what and @param run must outlive this
    __device__ score_finisher(const Task& task, const cuda_segment& what, const score_run& run)
        : task_(task)
        , what_(what)
        , run_(run)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32)) {}

    /// The run @p now of segment @p what, to be shared.
    [[nodiscard]] static __device__ score_run share(const Task& task, const cuda_segment& what,
                                                    const cuda_run& now) {
        return score_run::of<TileKeys, slots>(task, what, now);
    }

    /// What is known of a tile before its scores are.
    struct place {
        const tile_notes* cuts; ///< null where no forced boundary cuts a block of the tile
        std::int32_t tile;
        std::int32_t first_slot;
        bool suspicious; ///< a score might be NaN or infinite
        bool plain;      ///< every key counts for every row, as nearly always
    };
    [[nodiscard]] __device__ place place_of(std::int32_t tile, bool suspicious,
                                            const tile_notes* cuts) const {
        const bool own = tile >= what_.context_tiles;
        return {cuts, tile, tile * slots + (own ? run_.own_slots_at : 0), suspicious,
                cuts == nullptr && tile < (own ? run_.full_own : run_.full_context)};
    }

    /// Stores one number for each (query row, slot) of a tile.
    /// @param row the first of the warp's query rows, counted from the chunk's first
    /// @param factors turn the scores of a lane's two rows into units of log2, or into x / cap
    __device__ void finish(scores& values, const place& at, std::int32_t row,
                           const float (&factors)[2]) const {
        if (at.suspicious) {
            judge(values);
        }
        float own_factors[2] = {factors[0], factors[1]};
        if constexpr (Softcap) {
            const float cap = multiply(task_.softcap, log2_of_euler);
#pragma unroll
            for (std::int32_t i = 0; i < TileKeys / 2; ++i) {
                values[i] = multiply(tanh_of(multiply(values[i], factors[i / 2 % 2])), cap);
            }
            own_factors[0] = own_factors[1] = 1;
        }
        if (at.plain) {
            float numbers[sums::per_lane];
            if (sums::run(values, own_factors, lane_ % 4, numbers)) {
                if (sums::values > 2 || lane_ % 2 == 0) {
                    const std::int32_t first = sums::first_value(lane_ % 4);
                    float* const to = task_.buffers.partials + run_.first_number +
                                      (at.first_slot + first / 2) * run_.stride +
                                      (row + lane_ / 4 + first % 2 * 8);
#pragma unroll
                    for (std::int32_t k = 0; k < sums::per_lane; ++k) {
                        to[k / 2 * run_.stride + k % 2 * 8] = numbers[k];
                    }
                }
                return;
            }
        }
        finish_carefully(values, cuda_tile::at(what_, at.tile, TileKeys, slot_keys), row, own_factors,
                         at.cuts);
    }

  private:
    /// Raises the segment's flag where a score, visible or not, is NaN or infinite. Keys that the tile lacks
    /// are zeros.
    __device__ void judge(const scores& values) const {
        float sum = 0;
#pragma unroll
        for (std::int32_t i = 0; i < TileKeys / 2; ++i) {
            sum = multiply_add(values[i], 0.0f, sum);
        }
        if (is_non_finite(sum)) {
            task_.buffers.faulty[run_.now.segment] = 1;
        }
    }

    /// Tiles of which rows don't see every key, or that have blocks which forced boundaries cut, and sums
    /// that are out of range.
    __device__ void finish_carefully(const scores& values, const cuda_tile& tile, std::int32_t row,
                                     const float (&factors)[2], const tile_notes* cuts) const {
        typename sums::visibility seen;
#pragma unroll
        for (std::int32_t i = 0; i < 2; ++i) {
            seen[i] =
                sums::first_keys(seen_by(run_.now.first_row + row + lane_ / 4 + 8 * i, tile), lane_ % 4);
        }
        // First the free keys of cut blocks with everything else, then their forced ones.
#pragma unroll 1
        for (std::int32_t pass = 0; pass < (cuts != nullptr ? 2 : 1); ++pass) {
            typename sums::visibility visible = {seen[0], seen[1]};
            if (cuts != nullptr) {
                const std::uint32_t marked = sums::marked_keys(*cuts, pass != 0, lane_ % 4);
                visible[0] &= marked;
                visible[1] &= marked;
            }
            float numbers[sums::per_lane];
            sums::run_visible(values, factors, visible, lane_ % 4, numbers);
            const std::int32_t first = sums::first_value(lane_ % 4);
#pragma unroll
            for (std::int32_t k = 0; k < sums::per_lane; ++k) {
                const std::int32_t slot = first / 2 + k / 2;
                bool stored = slot * slot_keys < tile.num_keys && (sums::values > 2 || lane_ % 2 == 0);
                std::int64_t at = tile.first_slot + slot;
                if (pass != 0) { // forced parts have slots of their own
                    constexpr std::int32_t parts = G / slot_keys;
                    const std::int32_t cut = cuts->cuts[slot];
                    stored = stored && cut >= 0;
                    at = std::int64_t{what_.context_slots} + what_.own_slots + std::int64_t{cut} * parts +
                         (tile.first_row / slot_keys + slot) % parts;
                }
                if (stored) {
                    task_.buffers.partials[run_.first_number + at * run_.stride + row + lane_ / 4 +
                                           (first + k) % 2 * 8] = numbers[k];
                }
            }
        }
    }

    /// How many keys of a tile a query row sees: those up to its own row.
    [[nodiscard]] __device__ std::int32_t seen_by(std::int32_t row, const cuda_tile& tile) const {
        if (!tile.own) {
            return tile.num_keys;
        }
        const std::int32_t observed =
            observation_row(task_.buffers, what_, run_.now.segment, task_.bounds.num_observations,
                            row % what_.num_observations);
        const std::int32_t seen = observed + 1 - tile.first_row;
        return seen < 0 ? 0 : seen < tile.num_keys ? seen : tile.num_keys;
    }

    const Task& task_;
    const cuda_segment& what_;
    const score_run& run_;
    std::int32_t lane_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
