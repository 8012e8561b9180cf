// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What both backends ask of masses and outputs.
#pragma once

#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/selection.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// @p blocks entries for @p segments segments must be there, in @p space.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_masses(const mass_view& masses, std::int32_t segments,
                                                             std::int64_t blocks,
                                                             memory_space space) noexcept {
    if (masses.space != space) {
        return failure(status_code::not_supported, "masses.space",
                       space == memory_space::host ? "host memory" : "device memory",
                       static_cast<std::int32_t>(masses.space));
    }
    if (segments == 0) {
        return success();
    }
    if (masses.free == nullptr || masses.forced == nullptr || masses.faults == nullptr) {
        return failure(status_code::invalid_argument,
                       masses.free == nullptr     ? "masses.free"
                       : masses.forced == nullptr ? "masses.forced"
                                                  : "masses.faults",
                       "an array, not a null pointer", 0);
    }
    if (masses.num_segments < segments) {
        return failure(status_code::out_of_range, "masses.num_segments", "at least batch.num_segments",
                       masses.num_segments);
    }
    return masses.num_blocks >= blocks ? success()
                                       : failure(status_code::out_of_range, "masses.num_blocks",
                                                 "the blocks of all segments", masses.num_blocks);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_output(const selection& out, const limits& bounds,
                                                             memory_space space) noexcept {
    if (out.space != space) {
        return failure(status_code::not_supported, "out.space",
                       space == memory_space::host ? "host memory" : "device memory",
                       static_cast<std::int32_t>(out.space));
    }
    if (out.block_rows != bounds.block_rows) {
        return failure(status_code::invalid_argument, "out.block_rows",
                       "a selection carved with the selector's limits", out.block_rows);
    }
    if (!out.holds(bounds)) {
        return failure(status_code::out_of_range, "out",
                       "a selection carved with limits as large as the selector's", out.max_rows);
    }
    const bool rows_missing =
        bounds.max_rows > 0 && (out.kept_to_old == nullptr || out.old_to_kept == nullptr);
    return !rows_missing && out.keep_bits != nullptr && out.cu_seqlens != nullptr &&
                   out.cu_segments != nullptr && out.outcomes != nullptr
               ? success()
               : failure(status_code::invalid_argument, "out",
                         "a selection made by selection::carve on enough memory", 0);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_lists(const block_lists& out, const limits& bounds,
                                                            memory_space space) noexcept {
    if (out.space != space) {
        return failure(status_code::not_supported, "out.space",
                       space == memory_space::host ? "host memory" : "device memory",
                       static_cast<std::int32_t>(out.space));
    }
    if (out.block_rows != bounds.block_rows) {
        return failure(status_code::invalid_argument, "out.block_rows",
                       "lists carved with the lister's limits", out.block_rows);
    }
    if (out.num_heads != bounds.num_heads && out.num_heads != bounds.num_kv_heads) {
        return failure(status_code::invalid_argument, "out.num_heads",
                       "limits.num_heads or limits.num_kv_heads", out.num_heads);
    }
    if (out.query_rows != 0) {
        return failure(status_code::invalid_argument, "out.query_rows", "0, lists of segments",
                       out.query_rows);
    }
    if (out.max_segments < bounds.max_segments) {
        return failure(status_code::out_of_range, "out.max_segments",
                       "lists carved with limits as large as the lister's", out.max_segments);
    }
    if (out.capacity < block_lists::most_blocks(bounds, out.num_heads)) {
        return failure(status_code::out_of_range, "out.capacity",
                       "lists carved with limits as large as the lister's", out.capacity);
    }
    return out.offsets != nullptr && out.blocks != nullptr
               ? success()
               : failure(status_code::invalid_argument, "out",
                         "lists made by block_lists::carve on enough memory", 0);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_head_masses(const head_mass_view& masses,
                                                                  const limits& bounds,
                                                                  std::int64_t blocks) noexcept {
    if (masses.free == nullptr || masses.forced == nullptr) {
        return failure(status_code::invalid_argument,
                       masses.free == nullptr ? "per_head.free" : "per_head.forced",
                       "an array, not a null pointer", 0);
    }
    if (masses.num_heads != bounds.num_heads) {
        return failure(status_code::invalid_argument, "per_head.num_heads", "limits.num_heads",
                       masses.num_heads);
    }
    return masses.head_stride >= blocks ? success()
                                        : failure(status_code::out_of_range, "per_head.head_stride",
                                                  "the blocks of all segments", masses.head_stride);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
