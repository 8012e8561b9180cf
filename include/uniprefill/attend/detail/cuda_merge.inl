// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/scalar_math.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t merge_warps = 4;

template <class T>
struct merge_task {
    attention_state<T> parts[max_merged_states];
    head_rows<T> out;
    float* lse;
    std::int32_t count;
};

/// One warp to a (row, head): every lane reads all weights, and its own elements of every part before it
/// writes them, so `out` may be one of the parts.
template <class T>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(32 * merge_warps)
    merge_kernel(const __grid_constant__ merge_task<T> task) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int64_t all = std::int64_t{task.out.num_rows} * task.out.num_heads;
    for (std::int64_t at = std::int64_t{blockIdx.x} * merge_warps + threadIdx.x / 32; at < all;
         at += std::int64_t{gridDim.x} * merge_warps) {
        const std::int64_t row = at / task.out.num_heads;
        const std::int64_t head = at % task.out.num_heads;
        float largest = 0;
        std::int32_t last = -1;
        std::int32_t num_full = 0;
        for (std::int32_t i = 0; i < task.count; ++i) {
            const float one = task.parts[i].lse[at];
            if (!is_empty_state(one)) {
                largest = num_full == 0 || one > largest ? one : largest;
                last = i;
                ++num_full;
            }
        }
        float total = 0;
        for (std::int32_t i = 0; i < task.count && num_full > 1; ++i) {
            const float one = task.parts[i].lse[at];
            total = is_empty_state(one) ? total
                                        : add(total, exp2_of(multiply(add(one, -largest), log2_of_euler)));
        }
        const float of_last = num_full == 1 ? task.parts[last].lse[at] : 0;
        for (std::int32_t j = lane; j < task.out.head_dim; j += 32) {
            T result{};
            if (num_full == 1) {
                result = task.parts[last].out.at(row, head)[j];
            } else if (num_full > 1) {
                float sum = 0;
                for (std::int32_t i = 0; i < task.count; ++i) {
                    const float one = task.parts[i].lse[at];
                    if (!is_empty_state(one)) {
                        sum = multiply_add(exp2_of(multiply(add(one, -largest), log2_of_euler)),
                                           to_float(task.parts[i].out.at(row, head)[j]), sum);
                    }
                }
                result = from_float<T>(multiply(sum, reciprocal(total)));
            }
            task.out.at(row, head)[j] = result;
        }
        __syncwarp(); // lse may be that of a part
        if (lane == 0 && task.lse != nullptr) {
            task.lse[at] = num_full == 0   ? bit_cast<float>(std::uint32_t{0xff800000u})
                           : num_full == 1 ? of_last
                                           : add(largest, multiply(log2_of(total), 0.69314718055994530942f));
        }
    }
}

} // namespace detail

template <class T>
UNIPREFILL_HOST_API status merge_attention(const cuda_device& device, const attention_state<T>* parts,
                                           std::int32_t count, const head_rows<T>& out, float* lse,
                                           backend::cuda::stream stream) noexcept {
    static_assert(is_element_v<T>, "merge_attention: rows must be float, half or bfloat16");
    UNIPREFILL_TRY(detail::check_merge(parts, count, out));
    UNIPREFILL_TRY(detail::require(count <= max_merged_states, status_code::out_of_range, "count",
                                   "at most max_merged_states", count));
    if (out.num_rows == 0) {
        return success();
    }
    detail::merge_task<T> task{{}, out, lse, count};
    for (std::int32_t i = 0; i < count; ++i) {
        task.parts[i] = parts[i];
    }
    const std::int64_t wanted =
        (std::int64_t{out.num_rows} * out.num_heads + detail::merge_warps - 1) / detail::merge_warps;
    const std::int64_t fitting = device.ctas(16);
    return detail::launch(device, detail::merge_kernel<T>,
                          static_cast<unsigned>(wanted < fitting ? wanted : fitting),
                          32 * detail::merge_warps, 0, stream, task);
}

UNIPREFILL_END_NAMESPACE
