// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The softmax denominators of query rows.
#pragma once

#include <uniprefill/importance/detail/cuda_combine.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t denominator_threads = 1024;
inline constexpr std::int32_t denominator_warps = denominator_threads / 32;
inline constexpr std::int32_t denominator_batch = 8; ///< slots that a thread loads at once
/// A warp sums the denominators of segments of up to this many slots by itself.
inline constexpr std::int32_t denominator_few_slots = 256;

/// A sum of powers of 2, as sum * 2^top.
struct scaled_sum {
    /// Where tops start: 2^(no_visible_keys - this) is 0.
    static constexpr float below_all_scores = -1.0e37f;

    float top = below_all_scores;
    float sum = 0;

    /// Commutes, bit for bit.
    [[nodiscard]] friend __device__ UNIPREFILL_HIDDEN scaled_sum operator+(const scaled_sum& a,
                                                                           const scaled_sum& b) {
        const float top = larger(a.top, b.top);
        return {top,
                add(multiply(a.sum, exp2_of(add(a.top, -top))), multiply(b.sum, exp2_of(add(b.top, -top))))};
    }
};

/// What one strand has of 4 neighbouring rows.
class UNIPREFILL_HIDDEN strand_sums {
  public:
    using batch = float4[denominator_batch];

    __device__ void add_batch(const batch& values) {
        add_row<0>(values, [](const float4& of_rows) { return of_rows.x; });
        add_row<1>(values, [](const float4& of_rows) { return of_rows.y; });
        add_row<2>(values, [](const float4& of_rows) { return of_rows.z; });
        add_row<3>(values, [](const float4& of_rows) { return of_rows.w; });
    }
    [[nodiscard]] __device__ scaled_sum of_row(std::int32_t row) const {
        return {tops_[row], static_cast<float>(sums_[row])};
    }

  private:
    template <std::int32_t Row, class Pick>
    __device__ void add_row(const batch& values, Pick pick) {
        float top = tops_[Row];
#pragma unroll
        for (std::int32_t i = 0; i < denominator_batch; ++i) {
            top = larger(top, pick(values[i]));
        }
        float sum = 0;
#pragma unroll
        for (std::int32_t i = 0; i < denominator_batch; ++i) {
            sum = add(sum, exp2_of(add(pick(values[i]), -top)));
        }
        sums_[Row] = __fma_rn(sums_[Row], static_cast<double>(exp2_of(add(tops_[Row], -top))),
                              static_cast<double>(sum));
        tops_[Row] = top;
    }

    float tops_[4] = {scaled_sum::below_all_scores, scaled_sum::below_all_scores,
                      scaled_sum::below_all_scores, scaled_sum::below_all_scores};
    double sums_[4] = {0, 0, 0, 0};
};

/// The log2 of softmax denominators, of groups of 32 query rows. A thread takes 4 rows, and of their slots
/// those of one strand, in order; then strands are added in an order that follows from their number. That is
/// the 4 of a warp where there are few slots, else the 128 of a thread block.
class UNIPREFILL_HIDDEN denominator_adder {
    static constexpr std::int32_t row_threads = denominator_rows / 4;
    static constexpr std::int32_t warp_strands = 32 / row_threads;

  public:
    using warp_sums = scaled_sum[denominator_warps][denominator_rows];

    __device__ denominator_adder(const cuda_combine_task& task, warp_sums& of_warps)
        : task_(task)
        , of_warps_(of_warps)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32)) {}

    /// A thread block takes as many neighbouring groups at once as leave none of the others idle.
    __device__ void run() {
        const std::int64_t groups = task_.buffers.totals->stats / denominator_rows;
        const std::int64_t share = (groups + gridDim.x - 1) / gridDim.x;
        const auto at_once = static_cast<std::int32_t>(share < denominator_warps ? share : denominator_warps);
        for (std::int64_t first = std::int64_t{blockIdx.x} * at_once; first < groups;
             first += std::int64_t{gridDim.x} * at_once) {
            const bool has_one = warp_ < at_once && first + warp_ < groups;
            bool is_long = false;
            if (has_one) {
                enter(first + warp_);
                is_long = what_->num_observations > 0 && what_->slots() > denominator_few_slots;
                if (what_->num_observations > 0 && !is_long) {
                    add_alone();
                }
            }
            if (__syncthreads_or(is_long ? 1 : 0) == 0) {
                continue;
            }
            for (std::int32_t i = 0; i < at_once && first + i < groups; ++i) {
                enter(first + i);
                if (what_->num_observations > 0 && what_->slots() > denominator_few_slots) {
                    add_together();
                }
            }
        }
    }

  private:
    __device__ void enter(std::int64_t group) {
        segment_ =
            find_segment(task_.buffers.first_stats, task_.batch.num_segments, group * denominator_rows);
        what_ = task_.buffers.segments + segment_;
        first_row_ = static_cast<std::int32_t>(group * denominator_rows - what_->first_stat);
    }

    __device__ void add_alone() {
        const strand_sums mine = add_strand(lane_ / row_threads, warp_strands);
#pragma unroll
        for (std::int32_t row = 0; row < 4; ++row) {
            const scaled_sum sum = add_strands_of_warp(mine.of_row(row));
            if (lane_ < row_threads) {
                finish(first_row_ + lane_ * 4 + row, sum);
            }
        }
    }
    __device__ void add_together() {
        const strand_sums mine = add_strand(static_cast<std::int32_t>(threadIdx.x) / row_threads,
                                            warp_strands * denominator_warps);
#pragma unroll
        for (std::int32_t row = 0; row < 4; ++row) {
            const scaled_sum sum = add_strands_of_warp(mine.of_row(row));
            if (lane_ < row_threads) {
                of_warps_[warp_][lane_ * 4 + row] = sum;
            }
        }
        __syncthreads();
        if (warp_ == 0) {
            scaled_sum all;
#pragma unroll 8
            for (std::int32_t w = 0; w < denominator_warps; ++w) {
                all.top = larger(all.top, of_warps_[w][lane_].top);
            }
#pragma unroll 8
            for (std::int32_t w = 0; w < denominator_warps; ++w) {
                const scaled_sum of_warp = of_warps_[w][lane_];
                all.sum = multiply_add(of_warp.sum, exp2_of(add(of_warp.top, -all.top)), all.sum);
            }
            finish(first_row_ + lane_, all);
        }
        __syncthreads();
    }

    [[nodiscard]] __device__ strand_sums add_strand(std::int32_t strand, std::int32_t strands) const {
        const std::int64_t slot_floats = std::int64_t{task_.bounds.num_kv_heads} * what_->lanes;
        const float* partial = task_.buffers.partials + what_->first_partial + first_row_ +
                               lane_ % row_threads * 4 + strand * slot_floats;
        const std::int64_t step = strands * slot_floats;
        auto left = static_cast<std::int32_t>((what_->slots() - strand + strands - 1) / strands);
        strand_sums sums;
        for (; left > 0; left -= denominator_batch) {
            strand_sums::batch values;
#pragma unroll
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                values[i] = i < left
                                ? *reinterpret_cast<const float4*>(partial)
                                : float4{no_visible_keys, no_visible_keys, no_visible_keys, no_visible_keys};
                partial += step;
            }
            sums.add_batch(values);
        }
        return sums;
    }
    [[nodiscard]] static __device__ scaled_sum add_strands_of_warp(scaled_sum sum) {
#pragma unroll
        for (std::int32_t distance = row_threads; distance < 32; distance *= 2) {
            sum = sum + scaled_sum{__shfl_xor_sync(0xffffffffu, sum.top, distance),
                                   __shfl_xor_sync(0xffffffffu, sum.sum, distance)};
        }
        return sum;
    }

    /// @param row of the segment's, among those of all KV heads
    __device__ void finish(std::int32_t row, const scaled_sum& sum) const {
        const std::int32_t in_head = row % what_->lanes;
        float& denominator = task_.buffers.denominators[what_->first_stat + row];
        if (in_head >= what_->query_rows) {
            denominator = of_no_row;
            return;
        }
        scaled_sum sink{no_visible_keys, 1};
        if (task_.sink_logits != nullptr) {
            const std::int32_t head =
                row / what_->lanes * task_.bounds.group_heads() + in_head / what_->num_observations;
            sink.top = multiply(task_.sink_logits[head], log2_of_euler);
            if (is_non_finite(sink.top)) {
                task_.buffers.faulty[segment_] = 1;
                sink.top = no_visible_keys;
            }
        }
        const scaled_sum all = sum + sink;
        denominator = add(all.top, log2_of(all.sum));
    }

    const cuda_combine_task& task_;
    warp_sums& of_warps_;
    const cuda_segment* what_ = nullptr;
    std::int32_t segment_ = 0;
    std::int32_t first_row_ = 0; ///< of the group
    std::int32_t lane_;
    std::int32_t warp_;
};

template <class = void>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(denominator_threads)
    denominator_kernel(const __grid_constant__ cuda_combine_task task) {
    __shared__ denominator_adder::warp_sums of_warps;
    let_next_kernel_start();
    wait_for_previous_kernel();
    denominator_adder(task, of_warps).run();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
