// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The shares that query rows give to blocks, summed in fixed point, as the threads of the device do it.
#pragma once

#include <uniprefill/core/detail/any_team.hpp>
#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/importance/detail/combine_task.hpp>
#include <uniprefill/importance/detail/segment_plan.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t mass_warps = 8;
inline constexpr std::int32_t mass_batch = 8; ///< blocks between two barriers

/// The fault word of a segment; 0 for one beyond those of the batch.
[[nodiscard]] inline UNIPREFILL_API std::int64_t fault_of(const cuda_combine_task& task,
                                                          std::int32_t segment) noexcept {
    if (segment >= task.batch.num_segments) {
        return 0;
    }
    const cuda_segment& what = task.buffers.segments[segment];
    return what.has_fault != 0                 ? fault_word(what.fault)
           : task.buffers.faulty[segment] != 0 ? fault_word(mass_fault::non_finite)
                                               : 0;
}

/// The masses of own blocks: a thread block takes neighbouring blocks one after another, its warps share the
/// KV heads. Zeros for blocks of segments that aren't scored or can't be trusted, and for places that no
/// block has.
///
/// Each warp has an adder. For a batch of blocks, all warps enter() it and add_blocks(); once all are there,
/// each of 2 * mass_batch threads or more calls store().
/// @tparam ByHead whether each head's mass is needed, and not only the sum of all
/// @tparam Lanes of a warp, which look at each other's registers: `size`, `rank()`, `first(bool)`: the lowest
/// lane for which it is true, or -1, and `sum(number)` of numbers from 0 to 2^61 in all; both are the same in
/// each
template <class HeadReduction, bool ByHead, class Lanes>
class UNIPREFILL_HIDDEN mass_adder {
  public:
    /// Of each block of a batch: free and forced mass of each warp's heads.
    using warp_masses = std::int64_t[mass_batch][2][mass_warps];

    UNIPREFILL_API mass_adder(const cuda_combine_task& task, const Lanes& team, std::int32_t warp) noexcept
        : task_(task)
        , team_(team)
        , warp_(warp)
        , one_(bit_cast<float>((127 + task.out.format.fraction_bits) << 23)) {
        const std::int32_t kv_heads = task.bounds.num_kv_heads;
        turns_ = kv_heads < mass_warps ? mass_warps / kv_heads : 1;
        first_head_ = turns_ > 1 ? warp_ % kv_heads : warp_;
        turn_ = turns_ == 1 ? 0 : warp_ < turns_ * kv_heads ? warp_ / kv_heads : mass_batch;
    }

    /// Begins a batch at block @p first of the output.
    /// @return how many blocks it has, all of the same segment and before block @p end
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API std::int32_t enter(std::int64_t first, std::int64_t end) noexcept {
        enter_segment_of(first);
        std::int64_t left = end - first;
        left = next_out_block_ - first < left ? next_out_block_ - first : left;
        return static_cast<std::int32_t>(left < mass_batch ? left : mass_batch);
    }
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void add_blocks(std::int64_t first, std::int32_t count, warp_masses& of_warps) noexcept {
        for (std::int32_t i = turn_; i < count; i += turns_) {
            std::int64_t masses[2] = {0, 0};
            add_block(first + i, masses);
            if (team_.rank() == 0) {
                of_warps[i][0][warp_] = masses[0];
                of_warps[i][1][warp_] = masses[1];
            }
        }
    }
    UNIPREFILL_API void store(std::int64_t first, std::int32_t count, const warp_masses& of_warps,
                              std::int32_t thread) const noexcept {
        if (thread < 2 * count) {
            const std::int32_t warps = turns_ > 1 ? task_.bounds.num_kv_heads : mass_warps;
            const std::int64_t* const masses = of_warps[thread / 2][thread % 2] + thread / 2 % turns_ * warps;
            std::int64_t all = 0;
            for (std::int32_t w = 0; w < warps; ++w) {
                all = HeadReduction::combine(all, masses[w]);
            }
            std::int64_t* const out = thread % 2 == 0 ? task_.out.free : task_.out.forced;
            out[first + thread / 2] = all;
        }
    }

  private:
    /// Loads what all blocks of a segment have in common.
    /// @param block of the output
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void enter_segment_of(std::int64_t block) noexcept {
        if (block < next_out_block_) {
            return;
        }
        next_out_block_ = INT64_MAX;
        if (task_.batch.num_segments == 0) {
            return;
        }
        const cuda_segment* const segments = task_.buffers.segments;
        const std::int32_t begin = find_last(task_.batch.num_segments, block, [segments](std::int32_t index) {
            return segments[index].out_block;
        });
        what_ = task_.buffers.segments + begin;
        if (begin + 1 < task_.batch.num_segments) {
            next_out_block_ = task_.buffers.segments[begin + 1].out_block;
        }
        first_out_block_ = what_->out_block;
        const bool scored = what_->num_observations > 0 && task_.buffers.faulty[begin] == 0;
        own_blocks_ = scored ? num_blocks(what_->rows, task_.tiling.block_rows) : 0;
        lanes_ = what_->lanes;
        const std::int64_t stride = std::int64_t{task_.bounds.num_kv_heads} * lanes_;
        own_partials_ = task_.buffers.partials + what_->first_partial + what_->context_slots * stride;
        denominators_ = task_.buffers.denominators + what_->first_stat;
        const std::int32_t lane = team_.rank();
        cut_of_lane_ = lane < what_->num_cuts ? task_.buffers.cut_blocks[what_->first_cut + lane] : -1;
        more_cuts_ = what_->num_cuts > Lanes::size;
        sink_end_ = what_->sink_rows;
        tail_begin_ = what_->rows - what_->tail_rows;
        has_spans_ = what_->first_span != what_->end_span;
    }

    /// This warp's heads of a block; the result is in all lanes.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void add_block(std::int64_t block, std::int64_t (&masses)[2]) noexcept {
        const std::int64_t from_first = block - first_out_block_;
        const bool scored = from_first >= 0 && from_first < own_blocks_;
        const auto own = static_cast<std::int32_t>(scored ? from_first : 0);
        const std::int64_t stride = std::int64_t{task_.bounds.num_kv_heads} * lanes_;
        std::int32_t parts = task_.tiling.slots_of_a_block();
        const float* const main_slot = own_partials_ + std::int64_t{own} * parts * stride;
        const float* cut_slot = nullptr;
        bool all_forced = false;
        if (scored) {
            const std::int32_t cut = find_cut(own);
            if (cut >= 0) {
                cut_slot = own_partials_ + (what_->own_slots + std::int64_t{cut} * parts) * stride;
            } else { // a block that nothing cuts is of one kind
                const std::int32_t row = own * task_.tiling.block_rows;
                all_forced = row < sink_end_ || row >= tail_begin_ ||
                             (has_spans_ && is_forced(task_.batch, *what_, row));
            }
            if (parts > 1) { // the last block may have fewer
                const std::int32_t left = what_->own_slots - own * parts;
                parts = left < parts ? left : parts;
            }
        }
        const std::int32_t group = task_.bounds.group_heads();
        for (std::int32_t kv_head = first_head_; kv_head < task_.bounds.num_kv_heads; kv_head += mass_warps) {
            if constexpr (ByHead) {
                for (std::int32_t head = 0; head < group; ++head) {
                    std::int64_t one[2] = {0, 0};
                    if (scored) {
                        const std::int32_t rows = what_->num_observations;
                        add_rows(main_slot, cut_slot, parts, kv_head * lanes_ + head * rows, rows, one);
                        settle(cut_slot != nullptr, all_forced, one);
                    }
                    const std::int64_t at =
                        (std::int64_t{kv_head} * group + head) * task_.per_head.head_stride + block;
                    if (task_.per_head.free != nullptr && block < task_.per_head.head_stride &&
                        team_.rank() == 0) {
                        task_.per_head.free[at] = one[0];
                        task_.per_head.forced[at] = one[1];
                    }
                    masses[0] = HeadReduction::combine(masses[0], one[0]);
                    masses[1] = HeadReduction::combine(masses[1], one[1]);
                }
            } else if (scored) {
                add_rows(main_slot, cut_slot, parts, kv_head * lanes_, lanes_, masses);
            }
        }
        if constexpr (!ByHead) {
            settle(cut_slot != nullptr, all_forced, masses);
        }
    }

    /// Sums over the warp, and says what kind of rows they are of.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void settle(bool is_cut, bool all_forced, std::int64_t (&masses)[2]) const noexcept {
        const std::int64_t mass = team_.sum(masses[0]);
        masses[1] = is_cut ? team_.sum(masses[1]) : all_forced ? mass : 0;
        masses[0] = all_forced ? 0 : mass;
    }

    /// Adds this lane's part of what @p count rows give to the slots of a block.
    /// @param first the first of the rows, among those of all KV heads
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API void add_rows(const float* main_slot, const float* cut_slot, std::int32_t parts,
                                 std::int32_t first, std::int32_t count,
                                 std::int64_t (&masses)[2]) const noexcept {
        UNIPREFILL_ONE_COPY
        for (const float* slot = main_slot; slot != nullptr; slot = slot == main_slot ? cut_slot : nullptr) {
            std::int64_t mass = 0;
            UNIPREFILL_ONE_COPY
            for (std::int32_t part = 0; part < parts; ++part) {
                const std::int64_t stride = std::int64_t{task_.bounds.num_kv_heads} * lanes_;
                mass += mass_of(slot + part * stride + first, denominators_ + first, count);
            }
            masses[slot == main_slot ? 0 : 1] += mass;
        }
    }
    [[nodiscard]] UNIPREFILL_API std::int64_t share(float partial, float denominator) const noexcept {
        return truncate(multiply(exp2_of(add(partial, -denominator)), one_));
    }
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API std::int64_t mass_of(const float* partials, const float* denominators,
                                                      std::int32_t count) const noexcept {
        const std::int32_t lane = team_.rank();
        std::int64_t mass = 0;
        if (ByHead && count % 4 != 0) { // such rows start anywhere
            for (std::int32_t row = lane; row < count; row += Lanes::size) {
                mass += share(partials[row], denominators[row]);
            }
            return mass;
        }
        constexpr std::int32_t at_once = 4;
        constexpr std::int32_t step = 4 * Lanes::size;
        partials += 4 * lane;
        denominators += 4 * lane;
        count -= 4 * lane;
        UNIPREFILL_ONE_COPY
        for (; count > 0; count -= step * at_once) {
            four_floats sums[at_once];
            UNIPREFILL_UNROLL
            for (std::int32_t i = 0; i < at_once; ++i) {
                if (step * i < count) {
                    sums[i] = load_four(partials + step * i);
                }
            }
            UNIPREFILL_UNROLL
            for (std::int32_t i = 0; i < at_once; ++i) {
                if (step * i < count) {
                    const four_floats all = load_four(denominators + step * i);
                    mass += share(sums[i].x, all.x) + share(sums[i].y, all.y);
                    mass += share(sums[i].z, all.z) + share(sums[i].w, all.w);
                }
            }
            partials += step * at_once;
            denominators += step * at_once;
        }
        return mass;
    }

    /// The place of an own block among those that a forced boundary cuts, -1 where none does.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API std::int32_t find_cut(std::int32_t own) const noexcept {
        std::int32_t found = team_.first(cut_of_lane_ == own);
        for (std::int32_t first = Lanes::size; more_cuts_ && first < what_->num_cuts; first += Lanes::size) {
            const std::int32_t cut = first + team_.rank();
            const bool is_it =
                cut < what_->num_cuts && task_.buffers.cut_blocks[what_->first_cut + cut] == own;
            const std::int32_t lane = team_.first(is_it);
            found = lane >= 0 ? first + lane : found;
        }
        return found;
    }

    const cuda_combine_task& task_;
    const cuda_segment* what_ = nullptr;
    const float* own_partials_ = nullptr;
    const float* denominators_ = nullptr;
    std::int64_t first_out_block_ = 0;
    std::int64_t next_out_block_ = 0; ///< of the next segment
    std::int32_t own_blocks_ = 0;     ///< 0 where nothing is scored
    std::int32_t lanes_ = 0;
    std::int32_t cut_of_lane_ = -1; ///< one of the first blocks that are cut
    std::int32_t sink_end_ = 0;     ///< own rows before it are forced,
    std::int32_t tail_begin_ = 0;   ///< and from here on
    Lanes team_;
    std::int32_t warp_;
    std::int32_t turns_;      ///< where there are few KV heads, warps take turns with blocks,
    std::int32_t turn_;       ///< of every turns_ blocks this one
    std::int32_t first_head_; ///< of this warp's KV heads
    float one_;               ///< a probability of 1 in fixed point
    bool more_cuts_ = false;
    bool has_spans_ = false; ///< rows between sink and tail may be forced, too
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
