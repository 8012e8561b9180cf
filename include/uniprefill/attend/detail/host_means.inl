// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_keys.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Means of keys, or of values, of a step within @p bounds.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_mean_rows(const head_rows<T>& rows, const batch_view& batch,
                                                         const limits& bounds,
                                                         const char* argument) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    const std::int64_t blocks = block_means<T>::rows_of(batch, bounds.block_rows);
    UNIPREFILL_TRY(require(rows.num_heads == bounds.num_kv_heads, invalid, argument,
                           "limits.num_kv_heads heads", rows.num_heads));
    UNIPREFILL_TRY(require(rows.head_dim == bounds.head_dim, invalid, argument,
                           "limits.head_dim elements of a head", rows.head_dim));
    UNIPREFILL_TRY(require(rows.num_rows >= blocks, invalid, argument,
                           "at least block_means::rows_of(batch, G) rows", rows.num_rows));
    return blocks > 0 ? require_pointer(rows.data, argument) : success();
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_means(const block_means<T>& means, const batch_view& batch,
                                                     const limits& bounds) noexcept {
    UNIPREFILL_TRY(check_mean_rows(means.keys, batch, bounds, "means.keys"));
    return check_mean_rows(means.values, batch, bounds, "means.values");
}

/// Rows that copies of 16 bytes can read and write.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_mean_alignment(const block_means<T>& means) noexcept {
    UNIPREFILL_TRY(require_aligned(means.keys.data, means.keys.row_stride, means.keys.head_stride, 0,
                                   sizeof(T), "means.keys"));
    return require_aligned(means.values.data, means.values.row_stride, means.values.head_stride, 0, sizeof(T),
                           "means.values");
}

/// What average_blocks() reads, and where it writes; @p batch is good.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_average(const head_rows<const T>& keys,
                                                       const head_rows<const T>& values,
                                                       const batch_view& batch, const limits& bounds,
                                                       const block_means<T>& means) noexcept {
    UNIPREFILL_TRY(check_rows(keys, bounds.num_kv_heads, bounds.head_dim, batch.num_rows, "keys",
                              "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(check_rows(values, bounds.num_kv_heads, bounds.head_dim, batch.num_rows, "values",
                              "limits.num_kv_heads heads"));
    return check_means(means, batch, bounds);
}

template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr head_rows<const T> read_only(const head_rows<T>& rows) noexcept {
    return {rows.data, rows.row_stride, rows.head_stride, rows.num_rows, rows.num_heads, rows.head_dim};
}

/// What a sum of G rows is multiplied by.
[[nodiscard]] UNIPREFILL_API inline float share_of_row(std::int32_t block_rows) noexcept {
    return static_cast<float>(1.0 / static_cast<double>(block_rows));
}

/// The mean of @p count rows of one head from row @p first on.
template <std::int32_t Build, class T>
UNIPREFILL_HOST_API void average_rows(const head_rows<const T>& rows, std::int64_t first, std::int32_t count,
                                      std::int32_t head, T* to) noexcept {
    float sums[256] = {}; // the longest head
    for (std::int32_t row = 0; row < count; ++row) {
        const T* from = rows.at(first + row, head);
        for (std::int32_t i = 0; i < rows.head_dim; ++i) {
            sums[i] += to_float(from[i]);
        }
    }
    const float share = share_of_row(count);
    for (std::int32_t i = 0; i < rows.head_dim; ++i) {
        to[i] = from_float<T>(sums[i] * share);
    }
}

} // namespace detail

template <class T, std::int32_t Build>
UNIPREFILL_HOST_API status average_blocks(const head_rows<const T>& keys, const head_rows<const T>& values,
                                          const batch_view& batch, const limits& bounds,
                                          const block_means<T>& means, host_stream) noexcept {
    static_assert(is_element_v<T>, "average_blocks: rows must be float, half or bfloat16");
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(validate(batch, bounds));
    UNIPREFILL_TRY(detail::check_average(keys, values, batch, bounds, means));
    const std::int32_t block_rows = bounds.block_rows;
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        const std::int32_t first = batch.segment_begin(segment);
        const std::int32_t blocks = (batch.segment_end(segment) - first) / block_rows;
        const std::int64_t at = block_offset(segment, first, block_rows);
#if defined(_OPENMP)
#    pragma omp parallel for schedule(static) if (blocks > 8)
#endif
        for (std::int32_t block = 0; block < blocks; ++block) {
            const std::int64_t row = std::int64_t{first} + std::int64_t{block} * block_rows;
            for (std::int32_t head = 0; head < bounds.num_kv_heads; ++head) {
                detail::average_rows<Build>(keys, row, block_rows, head, means.keys.at(at + block, head));
                detail::average_rows<Build>(values, row, block_rows, head, means.values.at(at + block, head));
            }
        }
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
