// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What rooms that read queries and keys refuse before they write anything.
#pragma once

#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] UNIPREFILL_HOST_API constexpr status require(bool good, status_code code, const char* argument,
                                                           const char* expected, std::int64_t came) noexcept {
    return good ? success() : failure(code, argument, expected, came);
}

[[nodiscard]] UNIPREFILL_HOST_API constexpr status require_pointer(const void* pointer,
                                                                   const char* argument) noexcept {
    return require(pointer != nullptr, status_code::invalid_argument, argument,
                   "an array, not a null pointer", 0);
}

template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_rows(const head_rows<const T>& rows, std::int32_t num_heads,
                                                    std::int32_t head_dim, std::int32_t num_rows,
                                                    const char* argument, const char* head_limit) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(rows.num_heads == num_heads, invalid, argument, head_limit, rows.num_heads));
    UNIPREFILL_TRY(require(rows.head_dim == head_dim, invalid, argument, "limits.head_dim elements of a head",
                           rows.head_dim));
    UNIPREFILL_TRY(
        require(rows.num_rows >= num_rows, invalid, argument, "at least batch.num_rows rows", rows.num_rows));
    return num_rows > 0 ? require_pointer(rows.data, argument) : success();
}

/// Views that know their arrays are asked for them; a caller's own view is taken at its word.
template <class Cache>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const Cache&) noexcept {
    return success();
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const no_cache<T>&) noexcept {
    return failure(status_code::invalid_argument, "keys.cached", "a cache, as cached_lens are not all 0", 0);
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const contiguous_cache<T>& cache) noexcept {
    return require_pointer(cache.data, "keys.cached.data");
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const page_table_cache<T>& cache) noexcept {
    UNIPREFILL_TRY(require(cache.page_tokens >= 1, status_code::invalid_argument, "keys.cached.page_tokens",
                           ">= 1", cache.page_tokens));
    UNIPREFILL_TRY(require_pointer(cache.data, "keys.cached.data"));
    return require_pointer(cache.table, "keys.cached.table");
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const csr_page_cache<T>& cache) noexcept {
    UNIPREFILL_TRY(require(cache.page_tokens >= 1, status_code::invalid_argument, "keys.cached.page_tokens",
                           ">= 1", cache.page_tokens));
    UNIPREFILL_TRY(require_pointer(cache.data, "keys.cached.data"));
    UNIPREFILL_TRY(require_pointer(cache.indptr, "keys.cached.indptr"));
    return require_pointer(cache.indices, "keys.cached.indices");
}
template <class T, class Index>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status
check_cache(const token_slot_cache<T, Index>& cache) noexcept {
    UNIPREFILL_TRY(require_pointer(cache.data, "keys.cached.data"));
    return require_pointer(cache.slots, "keys.cached.slots");
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API constexpr status check_cache(const page_pointer_cache<T>& cache) noexcept {
    UNIPREFILL_TRY(require(cache.page_tokens >= 1, status_code::invalid_argument, "keys.cached.page_tokens",
                           ">= 1", cache.page_tokens));
    return require_pointer(cache.pages, "keys.cached.pages");
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_params(const attention_params& params) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    if (is_non_finite(params.scale) || params.scale < 0) {
        return failure(invalid, "params.scale", "finite and >= 0", params.scale);
    }
    return !is_non_finite(params.softcap) && params.softcap >= 0
               ? success()
               : failure(invalid, "params.softcap", "finite and >= 0", params.softcap);
}

/// Rows that 16-byte copies can read.
[[nodiscard]] inline UNIPREFILL_HOST_API status require_aligned(const void* data, std::int64_t a,
                                                                std::int64_t b, std::int64_t c,
                                                                std::size_t element,
                                                                const char* argument) noexcept {
    const auto bytes = static_cast<std::int64_t>(element);
    const bool good = reinterpret_cast<std::uintptr_t>(data) % 16 == 0 && a * bytes % 16 == 0 &&
                      b * bytes % 16 == 0 && c * bytes % 16 == 0;
    return require(good, status_code::misaligned, argument, "rows that start at multiples of 16 bytes", 1);
}
template <class Cache>
[[nodiscard]] UNIPREFILL_HOST_API status check_cache_alignment(const Cache&) noexcept {
    return success();
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_cache_alignment(const contiguous_cache<T>& cache) noexcept {
    return require_aligned(cache.data, cache.request_stride, cache.token_stride, cache.head_stride, sizeof(T),
                           "keys.cached");
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_cache_alignment(const page_table_cache<T>& cache) noexcept {
    return require_aligned(cache.data, cache.page_stride, cache.token_stride, cache.head_stride, sizeof(T),
                           "keys.cached");
}
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_cache_alignment(const csr_page_cache<T>& cache) noexcept {
    return require_aligned(cache.data, cache.page_stride, cache.token_stride, cache.head_stride, sizeof(T),
                           "keys.cached");
}
template <class T, class Index>
[[nodiscard]] UNIPREFILL_HOST_API status
check_cache_alignment(const token_slot_cache<T, Index>& cache) noexcept {
    return require_aligned(cache.data, cache.token_stride, cache.head_stride, 0, sizeof(T), "keys.cached");
}
/// Addresses of pages are in an array that the host can't read.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_cache_alignment(const page_pointer_cache<T>& cache) noexcept {
    UNIPREFILL_TRY(require(cache.byte_offset % 16 == 0, status_code::misaligned, "keys.cached.byte_offset",
                           "a multiple of 16", cache.byte_offset));
    return require_aligned(nullptr, cache.token_stride, cache.head_stride, 0, sizeof(T), "keys.cached");
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
