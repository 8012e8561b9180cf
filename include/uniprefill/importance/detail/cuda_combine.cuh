// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From one number for each (query row, slot) to fixed-point masses: first the softmax denominator of each
/// row, then the shares of each block. Every sum has an order that follows from the segment alone.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/detail/cuda_math.cuh>
#include <uniprefill/importance/detail/cuda_plan.cuh>
#include <uniprefill/importance/head_reduction.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

struct cuda_combine_task {
    limits bounds;
    batch_view batch;
    cuda_tiling tiling;
    cuda_buffers buffers;
    const float* sink_logits = nullptr; // [num_heads]
    mass_view out;
    head_mass_view per_head;
};

inline constexpr std::int32_t denominator_strands = 32;
inline constexpr std::int32_t denominator_batch = 16;
/// Where a running maximum starts: 2^(no_visible_keys - this) is 0.
inline constexpr float below_all_scores = -1.0e37f;
/// The denominator of rows that pad a KV head's: 2^(partial - this) is 0.
inline constexpr float of_no_row = 3.402823466e+38f;

/// The log2 of the softmax denominators of 32 query rows for each thread block and turn. Strand s of a row
/// adds slots s, s + 32, ... in order; then strand 0 adds the strands in order.
template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(denominator_rows* denominator_strands)
    denominator_kernel(const cuda_combine_task task) {
    __shared__ float tops[denominator_strands][denominator_rows];
    __shared__ float sums[denominator_strands][denominator_rows];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const cuda_buffers& buffers = task.buffers;
    const auto lane = static_cast<std::int32_t>(threadIdx.x % denominator_rows);
    const auto strand = static_cast<std::int32_t>(threadIdx.x / denominator_rows);
    const std::int64_t groups = buffers.totals->stats / denominator_rows;
    for (std::int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
        const std::int32_t segment =
            find_segment(buffers.first_stats, task.batch.num_segments, group * denominator_rows);
        const cuda_segment& what = buffers.segments[segment];
        if (what.num_observations == 0) {
            continue;
        }
        const auto row = static_cast<std::int32_t>(group * denominator_rows - what.first_stat) + lane;
        const std::int64_t step = std::int64_t{task.bounds.num_kv_heads} * what.lanes * denominator_strands;
        const float* partial =
            buffers.partials + what.first_partial + row + strand * (step / denominator_strands);
        std::int64_t left = (what.slots() - strand + denominator_strands - 1) / denominator_strands;
        const auto load = [&](float(&values)[denominator_batch]) {
#pragma unroll
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                values[i] = i < left ? *partial : no_visible_keys;
                partial += step;
            }
            left -= denominator_batch;
        };
        float top = below_all_scores;
        double sum = 0;
        float values[denominator_batch];
        load(values);
        for (bool more = true; more;) {
            float next[denominator_batch];
            more = left > 0;
            if (more) { // on their way while these are added
                load(next);
            }
            float larger_top = top;
#pragma unroll
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                larger_top = larger(larger_top, values[i]);
            }
            float parts[2] = {0, 0};
#pragma unroll
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                parts[i % 2] = add(parts[i % 2], exp2_of(add(values[i], -larger_top)));
                values[i] = next[i];
            }
            sum = __fma_rn(sum, static_cast<double>(exp2_of(add(top, -larger_top))),
                           static_cast<double>(add(parts[0], parts[1])));
            top = larger_top;
        }
        tops[strand][lane] = top;
        sums[strand][lane] = static_cast<float>(sum);
        __syncthreads();
        if (strand == 0) {
            const std::int32_t in_head = row % what.lanes;
            float sink = no_visible_keys;
            if (task.sink_logits != nullptr && in_head < what.query_rows) {
                const std::int32_t head =
                    row / what.lanes * task.bounds.group_heads() + in_head / what.num_observations;
                sink = multiply(task.sink_logits[head], log2_of_euler);
                if (is_non_finite(sink)) {
                    buffers.faulty[segment] = 1;
                    sink = no_visible_keys;
                }
            }
            float row_top = larger(sink, below_all_scores);
#pragma unroll 4
            for (std::int32_t s = 0; s < denominator_strands; ++s) {
                row_top = larger(row_top, tops[s][lane]);
            }
            float total = exp2_of(add(sink, -row_top));
#pragma unroll 4
            for (std::int32_t s = 0; s < denominator_strands; ++s) {
                total = multiply_add(sums[s][lane], exp2_of(add(tops[s][lane], -row_top)), total);
            }
            buffers.denominators[what.first_stat + row] =
                in_head < what.query_rows ? add(row_top, log2_of(total)) : of_no_row;
        }
        __syncthreads();
    }
}

inline constexpr std::int32_t mass_warps = 8;
inline constexpr std::int32_t mass_batch = 8; ///< blocks between two barriers
inline constexpr std::int32_t mass_ctas = 4;  ///< of a multiprocessor at once

/// The sum over a warp of numbers from 0 to 2^57, three sums of 20 or fewer bits each.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int64_t sum_over_warp(std::int64_t number) {
    constexpr std::uint32_t everyone = 0xffffffffu;
    const auto bits = static_cast<std::uint64_t>(number);
    const std::uint64_t low = __reduce_add_sync(everyone, static_cast<unsigned>(bits) & 0xfffffu);
    const std::uint64_t middle = __reduce_add_sync(everyone, static_cast<unsigned>(bits >> 20) & 0xfffffu);
    const std::uint64_t high = __reduce_add_sync(everyone, static_cast<unsigned>(bits >> 40));
    return static_cast<std::int64_t>(low + (middle << 20) + (high << 40));
}

/// The masses of own blocks: a thread block takes neighbouring blocks one after another, its warps share the
/// KV heads. Zeros for blocks of segments that aren't scored or can't be trusted, and for places that no
/// block has.
/// @tparam ByHead whether each head's mass is needed, and not only the sum of all
template <class HeadReduction, bool ByHead>
class UNIPREFILL_HIDDEN mass_adder {
  public:
    __device__ explicit mass_adder(const cuda_combine_task& task)
        : task_(task)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32))
        , one_(bit_cast<float>((127 + task.out.format.fraction_bits) << 23)) {
        const std::int32_t kv_heads = task.bounds.num_kv_heads;
        turns_ = kv_heads < mass_warps ? mass_warps / kv_heads : 1;
        first_head_ = turns_ > 1 ? warp_ % kv_heads : warp_;
        turn_ = turns_ == 1 ? 0 : warp_ < turns_ * kv_heads ? warp_ / kv_heads : mass_batch;
    }

    /// @param shared_masses of each block of a batch and each warp
    __device__ void run(std::int64_t (&shared_masses)[mass_batch][2][mass_warps]) {
        const std::int64_t blocks = task_.out.num_blocks;
        const std::int64_t end = blocks * (blockIdx.x + std::int64_t{1}) / gridDim.x;
        for (std::int64_t first = blocks * blockIdx.x / gridDim.x; first < end; first += mass_batch) {
            const auto count = static_cast<std::int32_t>(end - first < mass_batch ? end - first : mass_batch);
            for (std::int32_t i = turn_; i < count; i += turns_) {
                std::int64_t masses[2] = {0, 0};
                add_block(first + i, masses);
                if (lane_ == 0) {
                    shared_masses[i][0][warp_] = masses[0];
                    shared_masses[i][1][warp_] = masses[1];
                }
            }
            __syncthreads();
            const auto thread = static_cast<std::int32_t>(threadIdx.x);
            if (thread < 2 * count) {
                const std::int32_t warps = turns_ > 1 ? task_.bounds.num_kv_heads : mass_warps;
                const std::int64_t* const masses =
                    shared_masses[thread / 2][thread % 2] + thread / 2 % turns_ * warps;
                std::int64_t all = 0;
                for (std::int32_t w = 0; w < warps; ++w) {
                    all = HeadReduction::combine(all, masses[w]);
                }
                (thread % 2 == 0 ? task_.out.free : task_.out.forced)[first + thread / 2] = all;
            }
            __syncthreads();
        }
    }

  private:
    /// The place among its segment's own blocks of the one at @p block of the output, -1 where there is none
    /// to score.
    __device__ std::int64_t find(std::int64_t block) {
        if (task_.batch.num_segments == 0) {
            return -1;
        }
        if (block >= next_out_block_ || what_ == nullptr) {
            std::int32_t begin = 0;
            std::int32_t end = task_.batch.num_segments;
            while (end - begin > 1) {
                const std::int32_t middle = begin + (end - begin) / 2;
                if (task_.buffers.segments[middle].out_block <= block) {
                    begin = middle;
                } else {
                    end = middle;
                }
            }
            what_ = task_.buffers.segments + begin;
            next_out_block_ = begin + 1 < task_.batch.num_segments
                                  ? task_.buffers.segments[begin + 1].out_block
                                  : INT64_MAX;
            first_out_block_ = what_->out_block;
            own_blocks_ = what_->num_observations > 0 && task_.buffers.faulty[begin] == 0
                              ? num_blocks(what_->rows, task_.tiling.block_rows)
                              : 0;
            lanes_ = what_->lanes;
            stride_ = std::int64_t{task_.bounds.num_kv_heads} * lanes_;
            own_partials_ = task_.buffers.partials + what_->first_partial + what_->context_slots * stride_;
            denominators_ = task_.buffers.denominators + what_->first_stat;
            num_cuts_ = what_->num_cuts;
            cut_of_lane_ = lane_ < num_cuts_ ? task_.buffers.cut_blocks[what_->first_cut + lane_] : -1;
            sink_end_ = what_->sink_rows;
            tail_begin_ = what_->rows - what_->tail_rows;
            has_spans_ = what_->first_span != what_->end_span;
        }
        const std::int64_t own = block - first_out_block_;
        return own >= 0 && own < own_blocks_ ? own : -1;
    }

    /// This warp's heads of a block; the result is in all lanes.
    __device__ void add_block(std::int64_t block, std::int64_t (&masses)[2]) {
        const std::int64_t own = find(block);
        const float* main_slot = nullptr;
        const float* cut_slot = nullptr;
        std::int32_t parts = 0;
        bool all_forced = false;
        if (own >= 0) {
            parts = task_.tiling.slots_of_a_block();
            main_slot = own_partials_ + own * parts * stride_;
            if (!ByHead && own + turns_ < own_blocks_ && lane_ * 32 < lanes_) { // the next one is on its way
                prefetch(main_slot + turns_ * parts * stride_ + first_head_ * lanes_ + lane_ * 32);
            }
            const std::int32_t cut = find_cut(static_cast<std::int32_t>(own));
            if (cut >= 0) {
                cut_slot = own_partials_ + (what_->own_slots + std::int64_t{cut} * parts) * stride_;
            } else { // a block that nothing cuts is of one kind
                const auto row = static_cast<std::int32_t>(own) * task_.tiling.block_rows;
                all_forced = row < sink_end_ || row >= tail_begin_ ||
                             (has_spans_ && is_forced(task_.batch, *what_, row));
            }
            const std::int64_t left = what_->own_slots - own * parts;
            parts = static_cast<std::int32_t>(left < parts ? left : parts);
        }
        const std::int32_t group = task_.bounds.group_heads();
        for (std::int32_t kv_head = first_head_; kv_head < task_.bounds.num_kv_heads; kv_head += mass_warps) {
            if constexpr (ByHead) {
                for (std::int32_t head = 0; head < group; ++head) {
                    std::int64_t one[2] = {0, 0};
                    if (own >= 0) {
                        const std::int32_t rows = what_->num_observations;
                        add_rows(main_slot, cut_slot, parts, kv_head * lanes_ + head * rows, rows, one);
                        settle(all_forced, one);
                    }
                    const std::int64_t at =
                        (std::int64_t{kv_head} * group + head) * task_.per_head.head_stride + block;
                    if (task_.per_head.free != nullptr && block < task_.per_head.head_stride && lane_ == 0) {
                        task_.per_head.free[at] = one[0];
                        task_.per_head.forced[at] = one[1];
                    }
                    masses[0] = HeadReduction::combine(masses[0], one[0]);
                    masses[1] = HeadReduction::combine(masses[1], one[1]);
                }
            } else if (own >= 0) {
                add_rows(main_slot, cut_slot, parts, kv_head * lanes_, lanes_, masses);
            }
        }
        if constexpr (!ByHead) {
            settle(all_forced, masses);
        }
    }

    /// Sums over the warp, and says what kind of rows they are of.
    static __device__ void settle(bool all_forced, std::int64_t (&masses)[2]) {
        const std::int64_t mass = sum_over_warp(masses[0]);
        const std::int64_t cut = sum_over_warp(masses[1]);
        masses[0] = all_forced ? 0 : mass;
        masses[1] = all_forced ? mass : cut;
    }

    /// Adds this lane's part of what @p count rows give to the slots of a block.
    /// @param first the first of the rows, among those of all KV heads
    __device__ void add_rows(const float* main_slot, const float* cut_slot, std::int32_t parts,
                             std::int32_t first, std::int32_t count, std::int64_t (&masses)[2]) const {
        for (std::int32_t part = 0; part < parts; ++part) {
            masses[0] += mass_of(main_slot + part * stride_ + first, denominators_ + first, count);
            if (cut_slot != nullptr) {
                masses[1] += mass_of(cut_slot + part * stride_ + first, denominators_ + first, count);
            }
        }
    }
    [[nodiscard]] __device__ std::int64_t share(float partial, float denominator) const {
        return __float2ll_rz(multiply(exp2_of(add(partial, -denominator)), one_));
    }
    [[nodiscard]] __device__ std::int64_t mass_of(const float* partials, const float* denominators,
                                                  std::int32_t count) const {
        std::int64_t mass = 0;
        if (ByHead && count % 4 != 0) { // such rows start anywhere
            for (std::int32_t row = lane_; row < count; row += 32) {
                mass += share(partials[row], denominators[row]);
            }
            return mass;
        }
        constexpr std::int32_t at_once = 2;
#pragma unroll 1
        for (std::int32_t row = 4 * lane_; row < count; row += 128 * at_once) {
            float4 sums[at_once];
            float4 all[at_once];
#pragma unroll
            for (std::int32_t i = 0; i < at_once; ++i) {
                if (row + 128 * i < count) {
                    sums[i] = *reinterpret_cast<const float4*>(partials + row + 128 * i);
                    all[i] = *reinterpret_cast<const float4*>(denominators + row + 128 * i);
                }
            }
#pragma unroll
            for (std::int32_t i = 0; i < at_once; ++i) {
                if (row + 128 * i < count) {
                    mass += share(sums[i].x, all[i].x) + share(sums[i].y, all[i].y);
                    mass += share(sums[i].z, all[i].z) + share(sums[i].w, all[i].w);
                }
            }
        }
        return mass;
    }

    static __device__ void prefetch(const float* line) {
        asm volatile("prefetch.global.L1 [%0];" ::"l"(line));
    }

    /// The place of an own block among those that a forced boundary cuts, -1 where none does.
    [[nodiscard]] __device__ std::int32_t find_cut(std::int32_t own) const {
        std::uint32_t lanes = __ballot_sync(0xffffffffu, cut_of_lane_ == own);
        std::int32_t found = lanes != 0 ? __ffs(static_cast<int>(lanes)) - 1 : -1;
        for (std::int32_t first = 32; first < num_cuts_; first += 32) {
            const std::int32_t cut = first + lane_;
            const bool is_it = cut < num_cuts_ && task_.buffers.cut_blocks[what_->first_cut + cut] == own;
            lanes = __ballot_sync(0xffffffffu, is_it);
            found = lanes != 0 ? first + __ffs(static_cast<int>(lanes)) - 1 : found;
        }
        return found;
    }

    const cuda_combine_task& task_;
    const cuda_segment* what_ = nullptr; ///< the segment of the block before
    const float* own_partials_ = nullptr;
    const float* denominators_ = nullptr;
    std::int64_t stride_ = 0;
    std::int64_t first_out_block_ = 0;
    std::int64_t next_out_block_ = 0; ///< of the next segment
    std::int32_t own_blocks_ = 0;     ///< 0 where nothing is scored
    std::int32_t lanes_ = 0;
    std::int32_t num_cuts_ = 0;
    std::int32_t cut_of_lane_ = -1; ///< one of the first 32 blocks that are cut
    std::int32_t sink_end_ = 0;     ///< own rows before it are forced,
    std::int32_t tail_begin_ = 0;   ///< and from here on
    bool has_spans_ = false;        ///< others may be, too
    std::int32_t lane_;
    std::int32_t warp_;
    std::int32_t turns_;      ///< where there are few KV heads, warps take turns with blocks,
    std::int32_t turn_;       ///< of every turns_ blocks this one
    std::int32_t first_head_; ///< of this warp's KV heads
    float one_;               ///< a probability of 1 in fixed point
};

template <class HeadReduction, bool ByHead>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(mass_warps * 32, mass_ctas)
    mass_kernel(const __grid_constant__ cuda_combine_task task) {
    __shared__ std::int64_t masses[mass_batch][2][mass_warps];
    let_next_kernel_start();
    wait_for_previous_kernel();
    for (auto s = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); s < task.out.num_segments;
         s += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        std::int64_t word = 0;
        if (s < task.batch.num_segments) {
            const cuda_segment& what = task.buffers.segments[s];
            word = what.has_fault != 0           ? fault_word(what.fault)
                   : task.buffers.faulty[s] != 0 ? fault_word(mass_fault::non_finite)
                                                 : 0;
        }
        task.out.faults[s] = word;
    }
    mass_adder<HeadReduction, ByHead>(task).run(masses);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
