// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/attend/detail/check_means.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

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
