// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the estimator refuses before it writes anything.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/attention_params.hpp>

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

/// Whether the limits are good and agree with the policy's constants.
template <class Policy>
[[nodiscard]] UNIPREFILL_HOST_API status check_bounds(const limits& bounds) noexcept {
    using block_rows = typename Policy::block_rows;
    using num_observations = typename Policy::num_observations;
    using head_dim = typename Policy::head_dim;
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(require(block_rows(bounds.block_rows).value() == bounds.block_rows, invalid,
                           "limits.block_rows (G)", "the policy's G", bounds.block_rows));
    UNIPREFILL_TRY(require(num_observations(bounds.num_observations).value() == bounds.num_observations,
                           invalid, "limits.num_observations (n)", "the policy's n",
                           bounds.num_observations));
    return require(head_dim(bounds.head_dim).value() == bounds.head_dim, invalid, "limits.head_dim",
                   "the policy's D", bounds.head_dim);
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

/// @param blocks entries that the step's blocks may use
[[nodiscard]] inline UNIPREFILL_HOST_API status check_outputs(const mass_view& out,
                                                              const head_mass_view& per_head,
                                                              memory_space space, std::int32_t num_segments,
                                                              std::int64_t blocks,
                                                              const limits& bounds) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(out.space == space, status_code::not_supported, "out.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(out.space)));
    UNIPREFILL_TRY(require(out.format.fraction_bits == mass_format::of(bounds).fraction_bits, invalid,
                           "out.format", "mass_format::of(limits)", out.format.fraction_bits));
    UNIPREFILL_TRY(require(out.num_segments >= num_segments, status_code::out_of_range, "out.num_segments",
                           ">= batch.num_segments", out.num_segments));
    UNIPREFILL_TRY(require(out.num_blocks >= blocks, status_code::out_of_range, "out.num_blocks",
                           "all blocks of the batch", out.num_blocks));
    if (out.num_blocks > 0) { // what lies beyond the batch is written too
        UNIPREFILL_TRY(require_pointer(out.free, "out.free"));
        UNIPREFILL_TRY(require_pointer(out.forced, "out.forced"));
    }
    if (out.num_segments > 0) {
        UNIPREFILL_TRY(require_pointer(out.faults, "out.faults"));
    }
    if (per_head.free == nullptr) {
        return success();
    }
    UNIPREFILL_TRY(require_pointer(per_head.forced, "per_head.forced"));
    UNIPREFILL_TRY(require(per_head.num_heads == bounds.num_heads, invalid, "per_head.num_heads",
                           "limits.num_heads", per_head.num_heads));
    return require(per_head.head_stride >= blocks, status_code::out_of_range, "per_head.head_stride",
                   "all blocks of the batch", per_head.head_stride);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
