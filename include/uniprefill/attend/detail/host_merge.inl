// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_keys.hpp>

#include <cmath>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_merge(const attention_state<T>* parts, std::int32_t count,
                                                     const head_rows<T>& out) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(count >= 0, invalid, "count", ">= 0", count));
    UNIPREFILL_TRY(require(out.num_rows >= 0, invalid, "out", "0 or more rows", out.num_rows));
    UNIPREFILL_TRY(require(out.num_heads >= 1, invalid, "out", "1 or more heads", out.num_heads));
    UNIPREFILL_TRY(require(out.head_dim >= 1 && out.head_dim <= 256, invalid, "out",
                           "1..256 elements of a head", out.head_dim));
    if (out.num_rows == 0) {
        return success();
    }
    UNIPREFILL_TRY(require_pointer(out.data, "out"));
    if (count > 0) {
        UNIPREFILL_TRY(require_pointer(parts, "parts"));
    }
    for (std::int32_t i = 0; i < count; ++i) {
        const attention_state<T>& part = parts[i];
        UNIPREFILL_TRY(require(part.out.num_rows >= out.num_rows, invalid, "parts.out",
                               "at least out.num_rows rows", part.out.num_rows)
                           .at_request(i));
        UNIPREFILL_TRY(require(part.out.num_heads == out.num_heads, invalid, "parts.out",
                               "out.num_heads heads", part.out.num_heads)
                           .at_request(i));
        UNIPREFILL_TRY(require(part.out.head_dim == out.head_dim, invalid, "parts.out",
                               "out.head_dim elements of a head", part.out.head_dim)
                           .at_request(i));
        UNIPREFILL_TRY(require_pointer(part.out.data, "parts.out").at_request(i));
        UNIPREFILL_TRY(require_pointer(part.lse, "parts.lse").at_request(i));
    }
    return success();
}

/// Whether a state has read nothing, told by the bits of its lse.
[[nodiscard]] inline UNIPREFILL_API bool is_empty_state(float lse) noexcept {
    return bit_cast<std::uint32_t>(lse) == 0xff800000u;
}

/// One row of one head.
template <std::int32_t Build, class T>
UNIPREFILL_HOST_API void merge_row(const attention_state<T>* parts, std::int32_t count,
                                   const head_rows<T>& out, float* lse, std::int32_t row,
                                   std::int32_t head) noexcept {
    const std::int64_t at = std::int64_t{row} * out.num_heads + head;
    double largest = 0;
    std::int32_t last = -1;
    std::int32_t num_full = 0;
    for (std::int32_t i = 0; i < count; ++i) {
        if (const float one = parts[i].lse[at]; !is_empty_state(one)) {
            largest = num_full == 0 || one > largest ? one : largest;
            last = i;
            ++num_full;
        }
    }
    T* to = out.at(row, head);
    if (num_full <= 1) { // nothing to add up
        for (std::int32_t j = 0; j < out.head_dim; ++j) {
            to[j] = num_full == 0 ? from_float<T>(0) : parts[last].out.at(row, head)[j];
        }
        if (lse != nullptr) {
            lse[at] = num_full == 0 ? bit_cast<float>(std::uint32_t{0xff800000u}) : parts[last].lse[at];
        }
        return;
    }
    double total = 0;
    double sums[256] = {};
    for (std::int32_t i = 0; i < count; ++i) {
        if (const float one = parts[i].lse[at]; !is_empty_state(one)) {
            const double weight = std::exp(one - largest);
            const T* from = parts[i].out.at(row, head);
            total += weight;
            for (std::int32_t j = 0; j < out.head_dim; ++j) {
                sums[j] += weight * static_cast<double>(to_float(from[j]));
            }
        }
    }
    for (std::int32_t j = 0; j < out.head_dim; ++j) {
        to[j] = from_float<T>(static_cast<float>(sums[j] / total));
    }
    if (lse != nullptr) {
        lse[at] = static_cast<float>(largest + std::log(total));
    }
}

} // namespace detail

template <class T, std::int32_t Build>
UNIPREFILL_HOST_API status merge_attention(const attention_state<T>* parts, std::int32_t count,
                                           const head_rows<T>& out, float* lse, host_stream) noexcept {
    static_assert(is_element_v<T>, "merge_attention: rows must be float, half or bfloat16");
    UNIPREFILL_TRY(detail::check_merge(parts, count, out));
#if defined(_OPENMP)
#    pragma omp parallel for schedule(static) if (std::int64_t{out.num_rows} * out.num_heads > 4096)
#endif
    for (std::int32_t row = 0; row < out.num_rows; ++row) {
        for (std::int32_t head = 0; head < out.num_heads; ++head) {
            detail::merge_row<Build>(parts, count, out, lse, row, head);
        }
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
