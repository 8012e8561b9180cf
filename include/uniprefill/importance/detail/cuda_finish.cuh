// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From the scores of 16 query rows and one tile of keys, in the registers of a warp, to numbers in memory:
/// scale, soft-cap, what rows see, what forced boundaries cut.
#pragma once

#include <uniprefill/importance/detail/cuda_math.cuh>
#include <uniprefill/importance/detail/cuda_score.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a warp knows of the (segment, KV head, chunk of query rows) that it works on.
/// @tparam Polynomial of every 8 exponentials, so many run on the multiply-add units
template <class Task, std::int32_t TileKeys, std::int32_t G, bool Softcap, int Polynomial>
class UNIPREFILL_HIDDEN score_finisher {
    static constexpr std::int32_t slot_keys = G < TileKeys ? G : TileKeys;
    using sums = slot_sums<TileKeys, slot_keys>;

  public:
    using scores =
        float[TileKeys / 2]; ///< [4 j + i]: key 8 j + 2 (lane mod 4) + i mod 2, row lane / 4 + 8 (i / 2)

    /// @param what must outlive this
    __device__ score_finisher(const Task& task, const cuda_segment& what, const cuda_run& now)
        : task_(task)
        , what_(what)
        , now_(now)
        , partials_(task.buffers.partials + what.first_partial + std::int64_t{now.kv_head} * what.lanes +
                    now.first_row)
        , stride_(std::int64_t{task.bounds.num_kv_heads} * what.lanes)
        , first_observation_(
              observation_row(task.buffers, what, now.segment, task.bounds.num_observations, 0))
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32)) {}

    /// Whether some query row may not see some key of a tile, or keys are missing.
    [[nodiscard]] __device__ bool hides(const cuda_tile& tile) const {
        return tile.num_keys < TileKeys ||
               (tile.own && first_observation_ + 1 < tile.first_row + tile.num_keys);
    }

    /// @param row the first of the warp's query rows, counted from the chunk's first
    /// @param factors turn the scores of a lane's two rows into units of log2, or into x / cap
    /// @param cuts null where no forced boundary cuts a block of the tile
    __device__ void finish(scores& values, const cuda_tile& tile, std::int32_t row, float (&factors)[2],
                           bool suspicious, bool hides, const tile_notes* cuts) const {
        row += lane_ / 4;
        if (suspicious) {
            judge(values, tile.num_keys);
        }
        if constexpr (Softcap) {
            const float cap = multiply(task_.softcap, log2_of_euler);
#pragma unroll
            for (std::int32_t i = 0; i < TileKeys / 2; ++i) {
                values[i] = multiply(tanh_of(multiply(values[i], factors[i / 2 % 2])), cap);
            }
            factors[0] = factors[1] = 1.0f;
        }
        const std::int32_t quad_lane = lane_ % 4;
        float numbers[sums::per_lane];
        if (!hides && cuts == nullptr) {
            if (!sums::template run_all<Polynomial>(values, factors, quad_lane, numbers)) {
                constexpr typename sums::visibility everything = {0xffffffffu, 0xffffffffu};
                sums::run_relative(values, factors, everything, quad_lane, numbers);
            }
            store(numbers, tile, row, nullptr);
            return;
        }
        std::uint32_t seen[2];
#pragma unroll
        for (std::int32_t i = 0; i < 2; ++i) {
            seen[i] =
                sums::first_keys(hides ? seen_by(now_.first_row + row + 8 * i, tile) : TileKeys, quad_lane);
        }
        // First the free keys of cut blocks with everything else, then their forced ones.
#pragma unroll 1
        for (std::int32_t pass = 0; pass < (cuts != nullptr ? 2 : 1); ++pass) {
            typename sums::visibility visible = {seen[0], seen[1]};
            if (cuts != nullptr) {
                std::uint32_t words[(TileKeys + 31) / 32];
#pragma unroll
                for (std::int32_t w = 0; w < (TileKeys + 31) / 32; ++w) {
                    words[w] = pass_word(*cuts, w, pass);
                }
                const std::uint32_t marked = sums::marked_keys(words, quad_lane);
                visible[0] &= marked;
                visible[1] &= marked;
            }
            sums::run_visible(values, factors, visible, quad_lane, numbers);
            store(numbers, tile, row, pass == 1 ? cuts : nullptr);
        }
    }

  private:
    /// Raises the segment's flag where a score, visible or not, is NaN or infinite.
    __device__ void judge(const scores& values, std::int32_t num_keys) const {
        bool bad = false;
#pragma unroll
        for (std::int32_t i = 0; i < TileKeys / 2; ++i) {
            const std::int32_t key = 8 * (i / 4) + 2 * (lane_ % 4) + (i & 1);
            bad = bad || (key < num_keys && is_non_finite(values[i]));
        }
        if (bad) {
            task_.buffers.faulty[now_.segment] = 1;
        }
    }

    /// @param cuts for the forced parts of cut blocks, which have slots of their own; else null
    __device__ void store(const float (&numbers)[sums::per_lane], const cuda_tile& tile, std::int32_t row,
                          const tile_notes* cuts) const {
        const std::int32_t quad_lane = lane_ % 4;
#pragma unroll
        for (std::int32_t k = 0; k < sums::per_lane; ++k) {
            const std::int32_t index = sums::values == 2 ? quad_lane / 2
                                                         : quad_lane / 2 * (sums::values / 2) +
                                                               quad_lane % 2 * (sums::values / 4) + k;
            const std::int32_t slot = index / 2;
            bool stored = slot * slot_keys < tile.num_keys && (sums::values > 2 || quad_lane % 2 == 0);
            std::int64_t at = tile.first_slot + slot;
            if (cuts != nullptr) {
                const std::int32_t cut = cuts->cuts[slot];
                constexpr std::int32_t parts = G / slot_keys;
                stored = stored && cut >= 0;
                at = std::int64_t{what_.context_slots} + what_.own_slots + std::int64_t{cut} * parts +
                     (tile.first_row / slot_keys + slot) % parts;
            }
            if (stored) {
                partials_[at * stride_ + row + 8 * (index % 2)] = numbers[k];
            }
        }
    }

    [[nodiscard]] static __device__ std::uint32_t pass_word(const tile_notes& notes, std::int32_t word,
                                                            std::int32_t pass) {
        std::uint32_t of_cut_blocks = 0;
#pragma unroll
        for (std::int32_t slot = 0; slot < TileKeys / slot_keys; ++slot) {
            if (notes.cuts[slot] >= 0) {
                const std::int32_t begin = slot * slot_keys - word * 32;
                const std::int32_t end = begin + slot_keys;
                if (begin < 32 && end > 0) {
                    const std::uint32_t low = begin > 0 ? 0xffffffffu << begin : 0xffffffffu;
                    const std::uint32_t high = end < 32 ? ~(0xffffffffu << end) : 0xffffffffu;
                    of_cut_blocks |= low & high;
                }
            }
        }
        const std::uint32_t forced = notes.forced[word] & of_cut_blocks;
        return pass == 0 ? ~forced : forced;
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
    float* partials_;     ///< of slot 0 and the chunk's first row
    std::int64_t stride_; ///< from slot to slot
    std::int32_t first_observation_;
    std::int32_t lane_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
