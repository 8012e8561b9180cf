// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From the scores of 16 query rows and one tile of keys, in the registers of a warp, to numbers in memory:
/// scale, soft-cap, what rows see, what forced boundaries cut.
#pragma once

#include <uniprefill/importance/detail/cuda_score.cuh>
#include <uniprefill/importance/detail/scalar_math.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a warp knows of the (segment, KV head, chunk of query rows) that it works on.
template <class Task, std::int32_t TileKeys, std::int32_t G, bool Softcap>
class UNIPREFILL_HIDDEN score_finisher {
    static constexpr std::int32_t slot_keys = G < TileKeys ? G : TileKeys;
    static constexpr std::int32_t slots = TileKeys / slot_keys;
    using sums = slot_sums<TileKeys, slot_keys>;

  public:
    using scores =
        float[TileKeys / 2]; ///< [4 j + i]: key 8 j + 2 (lane mod 4) + i mod 2, row lane / 4 + 8 (i / 2)

    /// @param what must outlive this
    __device__ score_finisher(const Task& task, const cuda_segment& what, const cuda_run& now)
        : task_(task)
        , what_(what)
        , now_(now)
        , stride_(std::int64_t{task.bounds.num_kv_heads} * what.lanes)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32)) {
        partials_ = task.buffers.partials + what.first_partial + std::int64_t{now.kv_head} * what.lanes +
                    now.first_row + lane_ / 4;
        const std::int32_t first = sums::first_value(lane_ % 4);
        lane_partials_ = partials_ + first / 2 * stride_ + first % 2 * 8;
        const std::int32_t seen =
            observation_row(task.buffers, what, now.segment, task.bounds.num_observations, 0) + 1;
        full_context_ = static_cast<std::int32_t>(what.context / TileKeys);
        full_own_ = what.context_tiles + (seen < what.rows ? seen : what.rows) / TileKeys;
    }

    /// What is known of a tile before its scores are.
    struct place {
        float* numbers;         ///< of the lane's first number, for the chunk's first row
        const tile_notes* cuts; ///< null where no forced boundary cuts a block of the tile
        std::int32_t tile;
        bool suspicious; ///< a score might be NaN or infinite
        bool plain;      ///< every key counts for every row, as nearly always
    };
    [[nodiscard]] __device__ place place_of(std::int32_t tile, bool suspicious,
                                            const tile_notes* cuts) const {
        const bool own = tile >= what_.context_tiles;
        const std::int32_t slot =
            own ? what_.context_slots + (tile - what_.context_tiles) * slots : tile * slots;
        return {lane_partials_ + slot * stride_, cuts, tile, suspicious,
                cuts == nullptr && tile < (own ? full_own_ : full_context_)};
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
#pragma unroll
                    for (std::int32_t k = 0; k < sums::per_lane; ++k) {
                        at.numbers[k / 2 * stride_ + k % 2 * 8 + row] = numbers[k];
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
            task_.buffers.faulty[now_.segment] = 1;
        }
    }

    /// Tiles of which rows don't see every key, or that have blocks which forced boundaries cut, and sums
    /// that are out of range.
    __device__ void finish_carefully(const scores& values, const cuda_tile& tile, std::int32_t row,
                                     const float (&factors)[2], const tile_notes* cuts) const {
        typename sums::visibility seen;
#pragma unroll
        for (std::int32_t i = 0; i < 2; ++i) {
            seen[i] = sums::first_keys(seen_by(now_.first_row + row + lane_ / 4 + 8 * i, tile), lane_ % 4);
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
                    partials_[at * stride_ + row + (first + k) % 2 * 8] = numbers[k];
                }
            }
        }
    }

    /// How many keys of a tile a query row sees: those up to its own row.
    [[nodiscard]] __device__ std::int32_t seen_by(std::int32_t row, const cuda_tile& tile) const {
        if (!tile.own) {
            return tile.num_keys;
        }
        const std::int32_t observed = observation_row(
            task_.buffers, what_, now_.segment, task_.bounds.num_observations, row % what_.num_observations);
        const std::int32_t seen = observed + 1 - tile.first_row;
        return seen < 0 ? 0 : seen < tile.num_keys ? seen : tile.num_keys;
    }

    const Task& task_;
    const cuda_segment& what_;
    cuda_run now_;
    std::int64_t stride_;  ///< from slot to slot
    float* partials_;      ///< of slot 0 and the lane's first row
    float* lane_partials_; ///< where the lane's first number goes, see slot_sums
    std::int32_t full_context_;
    std::int32_t full_own_;
    std::int32_t lane_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
