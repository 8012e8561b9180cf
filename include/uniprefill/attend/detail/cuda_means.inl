// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/detail/scalar_math.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t average_threads = 256;

template <class T>
struct average_task {
    batch_view batch;
    head_rows<const T> rows[2]; ///< keys, values
    head_rows<T> means[2];
    std::int32_t block_rows;
    std::int32_t num_blocks; ///< rows of means that the step can use
    float share;
};

/// A block that has a place among means, if there is one.
struct averaged_block {
    std::int32_t first_row; ///< packed
    bool whole;             ///< false: nobody's place, or fewer than G rows
};

/// What a thread reads and writes at once.
template <class T>
struct average_part {
    static constexpr std::int32_t count = 16 / sizeof(T);
    T elements[count];
};
/// Place @p at of the means of a step. O(log segments).
[[nodiscard]] inline UNIPREFILL_API averaged_block place_of_mean(const batch_view& batch,
                                                                 std::int32_t block_rows,
                                                                 std::int32_t at) noexcept {
    const auto begin_of = [&](std::int32_t segment) {
        return clamped(batch.segment_begin(segment), 0, batch.num_rows);
    };
    std::int32_t least = 0; // the last segment whose blocks begin at or before it
    std::int32_t most = batch.num_segments - 1;
    while (least < most) {
        const std::int32_t middle = least + (most - least + 1) / 2;
        if (block_offset(middle, begin_of(middle), block_rows) <= at) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    const std::int32_t begin = begin_of(least);
    const std::int32_t end = clamped(batch.segment_end(least), begin, batch.num_rows);
    const auto block = static_cast<std::int32_t>(at - block_offset(least, begin, block_rows));
    return {begin + block * block_rows, block >= 0 && block < (end - begin) / block_rows};
}

/// One thread to 16 bytes of a mean: neighbours are those of a row.
template <class T>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(average_threads)
    average_kernel(const __grid_constant__ average_task<T> task) {
    using part_type = average_part<T>;
    constexpr std::int32_t elements = part_type::count;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t parts = task.means[0].head_dim / elements;
    const std::int32_t of_block = 2 * task.means[0].num_heads * parts;
    const std::int64_t all = std::int64_t{task.num_blocks} * of_block;
    for (std::int64_t index = std::int64_t{blockIdx.x} * average_threads + threadIdx.x; index < all;
         index += std::int64_t{gridDim.x} * average_threads) {
        const auto at = static_cast<std::int32_t>(index / of_block);
        const averaged_block place = place_of_mean(task.batch, task.block_rows, at);
        if (!place.whole) {
            continue;
        }
        const auto in_block = static_cast<std::int32_t>(index % of_block);
        const std::int32_t head = in_block / parts % task.means[0].num_heads;
        const bool is_keys = in_block / parts < task.means[0].num_heads;
        const head_rows<const T>& rows = task.rows[is_keys ? 0 : 1];
        const std::int32_t first = in_block % parts * elements;
        const T* from = rows.at(place.first_row, head) + first;
        float sums[elements] = {};
#pragma unroll 8
        for (std::int32_t row = 0; row < task.block_rows; ++row, from += rows.row_stride) {
            const auto one = bit_cast<part_type>(*reinterpret_cast<const uint4*>(from));
#pragma unroll
            for (std::int32_t i = 0; i < elements; ++i) {
                sums[i] = add(sums[i], to_float(one.elements[i]));
            }
        }
        part_type mean{};
#pragma unroll
        for (std::int32_t i = 0; i < elements; ++i) {
            mean.elements[i] = from_float<T>(multiply(sums[i], task.share));
        }
        *reinterpret_cast<uint4*>(task.means[is_keys ? 0 : 1].at(at, head) + first) = bit_cast<uint4>(mean);
    }
}

} // namespace detail

template <class T>
UNIPREFILL_HOST_API status average_blocks(const cuda_device& device, const head_rows<const T>& keys,
                                          const head_rows<const T>& values, const batch_view& batch,
                                          const limits& bounds, const block_means<T>& means,
                                          backend::cuda::stream stream) noexcept {
    static_assert(is_element_v<T>, "average_blocks: rows must be float, half or bfloat16");
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(detail::check_device_segments(batch, bounds));
    UNIPREFILL_TRY(detail::check_average(keys, values, batch, bounds, means));
    UNIPREFILL_TRY(
        detail::require_aligned(keys.data, keys.row_stride, keys.head_stride, 0, sizeof(T), "keys"));
    UNIPREFILL_TRY(
        detail::require_aligned(values.data, values.row_stride, values.head_stride, 0, sizeof(T), "values"));
    UNIPREFILL_TRY(detail::check_mean_alignment(means));
    UNIPREFILL_TRY(detail::require(bounds.head_dim * static_cast<std::int32_t>(sizeof(T)) % 16 == 0,
                                   status_code::not_supported, "limits.head_dim", "heads of whole 16 bytes",
                                   bounds.head_dim));
    if (batch.num_segments == 0 || batch.num_rows == 0) {
        return success();
    }
    detail::average_task<T> task;
    task.batch = batch;
    task.rows[0] = keys;
    task.rows[1] = values;
    task.means[0] = means.keys;
    task.means[1] = means.values;
    task.block_rows = bounds.block_rows;
    task.num_blocks = static_cast<std::int32_t>(block_means<T>::rows_of(batch, bounds.block_rows));
    task.share = detail::share_of_row(bounds.block_rows);
    const std::int64_t threads = std::int64_t{task.num_blocks} * 2 * bounds.num_kv_heads *
                                 (bounds.head_dim * static_cast<std::int32_t>(sizeof(T)) / 16);
    const std::int64_t wanted = (threads + detail::average_threads - 1) / detail::average_threads;
    const std::int64_t fitting = device.ctas(8);
    return detail::launch(device, detail::average_kernel<T>,
                          static_cast<unsigned>(wanted < fitting ? wanted : fitting), detail::average_threads,
                          0, stream, task);
}

UNIPREFILL_END_NAMESPACE
