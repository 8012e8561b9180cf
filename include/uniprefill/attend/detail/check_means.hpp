// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What averages of blocks, and attention with them, refuse before anything is written.
#pragma once

#include <uniprefill/attend/means.hpp>
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

} // namespace detail

UNIPREFILL_END_NAMESPACE
