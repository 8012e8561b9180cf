// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What both bodies of attention on CUDA share: their parameters, the plan, and the arithmetic of a softmax
/// whose bits don't depend on how keys are cut into tiles.
#pragma once

#include <uniprefill/attend/detail/attend_work.hpp>
#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What the plan kernel leaves for the attention kernel.
struct attend_plan {
    std::int32_t* first_item = nullptr; // [num_segments + 1] items of the segments before
    std::int32_t* next_item = nullptr;  // [1] that no thread block has taken yet

    [[nodiscard]] static UNIPREFILL_HOST_API attend_plan carve(workspace& memory,
                                                               std::int32_t max_segments) noexcept {
        attend_plan made;
        made.first_item = memory.take<std::int32_t>(std::int64_t{max_segments} + 1);
        made.next_item = memory.take<std::int32_t>(1);
        return made;
    }
};

/// How scores become exponents of 2.
struct attend_scores {
    float factor = 0;  ///< scores to log2 units; with a soft-cap, scores to its argument
    float softcap = 0; ///< the soft-cap in log2 units; 0: none
    const float* sink_logits = nullptr;

    template <std::int32_t D>
    [[nodiscard]] static UNIPREFILL_HOST_API attend_scores of(const attention_params& params) noexcept {
        const float scale = params.scale > 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(D));
        return {params.softcap > 0 ? scale / params.softcap : scale * log2_of_euler,
                params.softcap * log2_of_euler, params.sink_logits};
    }
};

template <class T, class Cache>
struct attend_task {
    attend_step step;
    attend_plan plan;
    attend_scores scores;
    head_rows<const T> queries;
    head_rows<const T> keys;
    head_rows<const T> values;
    head_rows<const T> mean_keys; ///< by block; read by kernels with means alone
    head_rows<const T> mean_values;
    Cache cached_keys;
    Cache cached_values;
    head_rows<T> out;
    float* lse = nullptr;
};

inline constexpr std::int32_t attend_plan_threads = 1024;

/// Counts items, one thread block. O(segments).
template <class = void>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(attend_plan_threads)
    attend_plan_kernel(const attend_step step, const attend_plan plan) {
    __shared__ std::int32_t of_warps[32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t segments = step.batch.num_segments;
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x / 32);
    if (threadIdx.x == 0) {
        *plan.next_item = 0;
        plan.first_item[0] = 0;
    }
    std::int32_t before = 0;
    for (std::int32_t begin = 0; begin < segments; begin += attend_plan_threads) {
        const std::int32_t segment = begin + static_cast<std::int32_t>(threadIdx.x);
        std::int32_t sum = segment < segments ? tiles_of(step, segment) * step.units : 0;
        for (std::int32_t distance = 1; distance < 32; distance *= 2) {
            const std::int32_t other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
            sum += lane >= distance ? other : 0;
        }
        if (lane == 31) {
            of_warps[warp] = sum;
        }
        __syncthreads();
        std::int32_t all = 0;
        for (std::int32_t i = 0; i < 32; ++i) {
            sum += i < warp ? of_warps[i] : 0;
            all += of_warps[i];
        }
        if (segment < segments) {
            plan.first_item[segment + 1] = before + sum;
        }
        before += all;
        __syncthreads();
    }
}

/// Item @p index of the step. O(log segments).
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline attend_item
find_item(const attend_step& step, const attend_plan& plan, std::int32_t index) {
    const std::int32_t segment = first_row_at(plan.first_item, 1, step.batch.num_segments + 1, index + 1) - 1;
    return item_of(step, segment, index - plan.first_item[segment]);
}

/// Reads a list 32 entries at a time, one a lane: all lanes of a warp ask for the same entry.
class warp_list {
  public:
    __device__ UNIPREFILL_HIDDEN warp_list(const std::int32_t* entries, std::int32_t count)
        : entries_(entries)
        , count_(count) {}
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int32_t operator()(std::int32_t entry) {
        if (entry / 32 != held_) {
            held_ = entry / 32;
            const std::int32_t mine = held_ * 32 + static_cast<std::int32_t>(threadIdx.x % 32);
            mine_ = mine < count_ ? entries_[mine] : 0;
        }
        return __shfl_sync(0xffffffffu, mine_, entry % 32);
    }

  private:
    const std::int32_t* entries_;
    std::int32_t count_;
    std::int32_t held_ = -1;
    std::int32_t mine_ = 0;
};

/// Exponents of 2 are rounded to multiples of 2^-13 and their references are integers, so that taking another
/// reference is exact: probabilities, their sums and outputs are scaled by powers of 2, and no bit of a row
/// depends on when its maximum was found, so on how keys are cut into tiles. 2^-13 is 1/20 of what rounding
/// a probability to 16 bits loses. Exact within 512 of 0; beyond, coarser, as floats are.
inline constexpr float exponent_grid = 1536.0f;  ///< 1.5 * 2^10: its last place is 2^-13
inline constexpr float nothing_read = -INFINITY; ///< the score of a key that a row doesn't read

template <bool Softcap>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline float on_grid(float score, const attend_scores& how) {
    if constexpr (Softcap) {
        const float capped = multiply(how.softcap, tanh_of(multiply(score, how.factor)));
        return score == nothing_read ? nothing_read : add(capped, exponent_grid);
    } else {
        return multiply_add(score, how.factor, exponent_grid);
    }
}

/// log2 of G: how much the score of a block's mean is raised. An integer, so that sums stay exact.
template <std::int32_t G>
inline constexpr float mean_weight = G == 16    ? 4.0f
                                     : G == 32  ? 5.0f
                                     : G == 64  ? 6.0f
                                     : G == 128 ? 7.0f
                                                : 8.0f;

/// An exponent of a tile whose keys weigh 2^weight each; without means they weigh 1.
template <bool Means>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline float weighed(float exponent, float weight) {
    if constexpr (Means) {
        return add(exponent, weight);
    } else {
        return exponent;
    }
}

/// Row of block 0 of an item's segment among the means.
template <std::int32_t G>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t first_mean_of(const attend_item& item) {
    return static_cast<std::int32_t>(block_offset(item.segment, item.segment_begin, G));
}

/// One row's running softmax, whose probabilities are rounded to @p T.
template <class T>
struct softmax_row {
    /// Probabilities are 2^headroom times as large as they are against the reference: fp16 holds only those
    /// from 2^-14 on with all its bits, and which bits there are must not depend on the reference.
    static constexpr float headroom = std::is_same_v<T, half> ? 15.0f : 0.0f;

    float reference = nothing_read; ///< an integer, at least every exponent so far
    float sum = 0;                  ///< of 2^(exponent - reference + headroom)

    /// Takes in the largest exponent (on_grid()) of a tile. @return what sums so far are multiplied by
    __device__ UNIPREFILL_HIDDEN float raise(float largest_on_grid) {
        float next;
        asm("cvt.rpi.ftz.f32.f32 %0, %1;" : "=f"(next) : "f"(add(largest_on_grid, -exponent_grid)));
        next = larger(reference, next);
        const float factor = power_of_two(add(reference, -next));
        reference = next;
        sum = multiply(sum, factor);
        return factor;
    }
    /// What on_grid() is lessened by.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN float subtrahend() const {
        return add(exponent_grid - headroom, reference == nothing_read ? 0.0f : reference);
    }
    /// 2^x for an integer x <= 0, exactly; 0 below 2^-126, 1 where x isn't a number: before the first key.
    [[nodiscard]] static __device__ UNIPREFILL_HIDDEN float power_of_two(float x) {
        const float kept = x >= -126.0f ? x : x < -126.0f ? -127.0f : 0.0f;
        return __int_as_float((static_cast<std::int32_t>(kept) + 127) << 23);
    }
};

/// What two states are multiplied by before they are added.
struct state_factors {
    float first;
    float second;
};
/// Adds the softmax of other keys of the row to @p row. Exact but for the sum: factors are powers of 2.
template <class T>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline state_factors combine(softmax_row<T>& row,
                                                                        const softmax_row<T>& more) {
    const float reference = larger(row.reference, more.reference);
    const state_factors made{softmax_row<T>::power_of_two(add(row.reference, -reference)),
                             softmax_row<T>::power_of_two(add(more.reference, -reference))};
    row.sum = add(multiply(row.sum, made.first), multiply(more.sum, made.second));
    row.reference = reference;
    return made;
}

/// Two floats as a word of two T, rounded to nearest.
template <class T>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t rounded_pair(float low, float high) {
    std::uint32_t word;
    if constexpr (std::is_same_v<T, bfloat16>) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    } else {
        static_assert(std::is_same_v<T, half>, "elements of 16 bits");
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    }
    return word;
}

/// A row's end: what its output is multiplied by, and its log-sum-exp.
struct row_end {
    float factor;
    float lse;
};
template <class T>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline row_end
finish_row(softmax_row<T> row, const attend_scores& how, std::int32_t head) {
    float sink = 0;
    float factor = 1;
    if (how.sink_logits != nullptr) {
        const float exponent = add(multiply(how.sink_logits[head], log2_of_euler), exponent_grid);
        factor = row.raise(exponent);
        sink = exp2_of(add(exponent, -row.subtrahend()));
    }
    const float sum = add(row.sum, sink);
    if (sum == 0) {
        return {0, nothing_read};
    }
    return {multiply(factor, reciprocal(sum)),
            multiply(add(add(row.reference, -row.headroom), log2_of(sum)), 0.69314718055994530942f)};
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
