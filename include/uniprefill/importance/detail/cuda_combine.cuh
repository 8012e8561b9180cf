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
        float top = below_all_scores;
        double sum = 0;
        for (std::int64_t left = (what.slots() - strand + denominator_strands - 1) / denominator_strands;
             left > 0; left -= denominator_batch) {
            float values[denominator_batch];
#pragma unroll
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                values[i] = i < left ? *partial : no_visible_keys;
                partial += step;
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
            buffers.denominators[what.first_stat + row] = add(row_top, log2_of(total));
        }
        __syncthreads();
    }
}

inline constexpr std::int32_t mass_warps = 8;
inline constexpr std::int32_t mass_batch = 8; ///< blocks between two barriers

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
/// heads. Zeros for blocks of segments that aren't scored or can't be trusted, and for places that no block
/// has.
/// @tparam N observation rows of most segments
template <class HeadReduction, std::int32_t N>
class UNIPREFILL_HIDDEN mass_adder {
  public:
    __device__ explicit mass_adder(const cuda_combine_task& task)
        : task_(task)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32))
        , one_(bit_cast<float>((127 + task.out.format.fraction_bits) << 23)) {}

    /// @param shared_masses of each block of a batch and each warp
    __device__ void run(std::int64_t (&shared_masses)[mass_batch][2][mass_warps],
                        std::int32_t* shared_kinds) {
        const std::int64_t blocks = task_.out.num_blocks;
        const std::int64_t end = blocks * (blockIdx.x + std::int64_t{1}) / gridDim.x;
        for (std::int64_t first = blocks * blockIdx.x / gridDim.x; first < end; first += mass_batch) {
            const auto count = static_cast<std::int32_t>(end - first < mass_batch ? end - first : mass_batch);
            for (std::int32_t i = 0; i < count; ++i) {
                std::int64_t masses[2] = {0, 0};
                const std::int64_t own = find(first + i);
                if (own >= 0) {
                    add_block(first + i, own, masses, shared_kinds);
                } else {
                    clear_heads(first + i);
                }
                if (lane_ == 0) {
                    shared_masses[i][0][warp_] = masses[0];
                    shared_masses[i][1][warp_] = masses[1];
                }
            }
            __syncthreads();
            const auto thread = static_cast<std::int32_t>(threadIdx.x);
            if (thread < 2 * count) {
                std::int64_t all = 0;
                for (const std::int64_t mass : shared_masses[thread / 2][thread % 2]) {
                    all = HeadReduction::combine(all, mass);
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
            observations_ = what_->num_observations;
            stride_ = std::int64_t{task_.bounds.num_kv_heads} * lanes_;
            own_partials_ = task_.buffers.partials + what_->first_partial + what_->context_slots * stride_;
            denominators_ = task_.buffers.denominators + what_->first_stat;
        }
        const std::int64_t own = block - first_out_block_;
        return own >= 0 && own < own_blocks_ ? own : -1;
    }

    __device__ void clear_heads(std::int64_t block) {
        if (task_.per_head.free != nullptr && block < task_.per_head.head_stride) {
            for (std::int32_t head = static_cast<std::int32_t>(threadIdx.x); head < task_.per_head.num_heads;
                 head += mass_warps * 32) {
                task_.per_head.free[head * task_.per_head.head_stride + block] = 0;
                task_.per_head.forced[head * task_.per_head.head_stride + block] = 0;
            }
        }
    }

    /// Which kinds of rows the own block has: bit 0 free ones, bit 1 forced ones.
    __device__ std::int32_t kinds_of(std::int64_t own, std::int32_t* shared_kinds) const {
        const std::int32_t begin = static_cast<std::int32_t>(own) * task_.tiling.block_rows;
        const std::int32_t end =
            begin + task_.tiling.block_rows < what_->rows ? begin + task_.tiling.block_rows : what_->rows;
        if (what_->first_span == what_->end_span) {
            const std::int32_t free_begin = max(begin, what_->sink_rows);
            const std::int32_t free_end = min(end, what_->rows - what_->tail_rows);
            const std::int32_t free_rows = max(free_end - free_begin, 0);
            return (free_rows > 0 ? 1 : 0) | (free_rows < end - begin ? 2 : 0);
        }
        std::int32_t kinds = 0;
        for (std::int32_t row = begin + static_cast<std::int32_t>(threadIdx.x); row < end;
             row += mass_warps * 32) {
            kinds |= is_forced(task_.batch, *what_, row) ? 2 : 1;
        }
        kinds = static_cast<std::int32_t>(__reduce_or_sync(0xffffffffu, static_cast<unsigned>(kinds)));
        if (lane_ == 0) {
            shared_kinds[warp_] = kinds;
        }
        __syncthreads();
        kinds = 0;
        for (std::int32_t w = 0; w < mass_warps; ++w) {
            kinds |= shared_kinds[w];
        }
        __syncthreads();
        return kinds;
    }

    __device__ std::int64_t share(const float* partials, const float* denominators, std::int32_t row) const {
        return __float2ll_rz(multiply(exp2_of(add(partials[row], -denominators[row])), one_));
    }
    /// This lane's part of a head's mass in one slot.
    __device__ std::int64_t part_of(const float* partials, const float* denominators) const {
        std::int64_t mass = 0;
        if (N % 32 == 0 && observations_ == N) {
#pragma unroll
            for (std::int32_t i = 0; i < N / 32; ++i) {
                mass += share(partials, denominators, lane_ + i * 32);
            }
        } else {
            for (std::int32_t row = lane_; row < observations_; row += 32) {
                mass += share(partials, denominators, row);
            }
        }
        return mass;
    }

    __device__ void add_block(std::int64_t block, std::int64_t own, std::int64_t (&masses)[2],
                              std::int32_t* shared_kinds) {
        const std::int32_t parts = task_.tiling.slots_of_a_block();
        const float* const main_slot = own_partials_ + own * parts * stride_;
        const float* cut_slot = nullptr;
        for (std::int32_t cut = 0; cut < what_->num_cuts; ++cut) {
            if (task_.buffers.cut_blocks[what_->first_cut + cut] == own) {
                cut_slot = own_partials_ + (what_->own_slots + std::int64_t{cut} * parts) * stride_;
            }
        }
        const std::int64_t left = what_->own_slots - own * parts;
        const auto used_parts = static_cast<std::int32_t>(left < parts ? left : parts);
        // A block that nothing cuts is of one kind.
        const bool all_forced = cut_slot == nullptr && kinds_of(own, shared_kinds) == 2;
        const std::int32_t group = task_.bounds.group_heads();
        const bool by_head = !std::is_same_v<HeadReduction, head_sum> || task_.per_head.free != nullptr;
        std::int32_t kv_head = warp_ / group;
        std::int32_t in_group = warp_ % group;
#pragma unroll 1
        for (std::int32_t head = warp_; head < task_.bounds.num_heads; head += mass_warps) {
            const std::int32_t first = kv_head * lanes_ + in_group * observations_;
            in_group += mass_warps;
            while (in_group >= group) {
                in_group -= group;
                ++kv_head;
            }
            std::int64_t mass = part_of(main_slot + first, denominators_ + first);
            for (std::int32_t part = 1; part < used_parts; ++part) {
                mass += part_of(main_slot + part * stride_ + first, denominators_ + first);
            }
            std::int64_t cut = 0;
            for (std::int32_t part = 0; cut_slot != nullptr && part < used_parts; ++part) {
                cut += part_of(cut_slot + part * stride_ + first, denominators_ + first);
            }
            if (by_head) {
                mass = sum_over_warp(mass);
                cut = sum_over_warp(cut);
                if (task_.per_head.free != nullptr && lane_ == 0) {
                    task_.per_head.free[head * task_.per_head.head_stride + block] = all_forced ? 0 : mass;
                    task_.per_head.forced[head * task_.per_head.head_stride + block] =
                        all_forced ? mass : cut;
                }
            }
            masses[0] = HeadReduction::combine(masses[0], mass);
            masses[1] = HeadReduction::combine(masses[1], cut);
        }
        if (!by_head) {
            masses[0] = sum_over_warp(masses[0]);
            masses[1] = cut_slot != nullptr ? sum_over_warp(masses[1]) : 0;
        }
        if (all_forced) {
            masses[1] = masses[0];
            masses[0] = 0;
        }
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
    std::int32_t observations_ = 0;
    std::int32_t lane_;
    std::int32_t warp_;
    float one_; ///< a probability of 1 in fixed point
};

template <class HeadReduction, std::int32_t N>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(mass_warps * 32, 3)
    mass_kernel(const __grid_constant__ cuda_combine_task task) {
    __shared__ std::int64_t masses[mass_batch][2][mass_warps];
    __shared__ std::int32_t kinds[mass_warps];
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
    mass_adder<HeadReduction, N>(task).run(masses, kinds);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
