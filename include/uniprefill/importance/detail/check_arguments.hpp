// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the estimator refuses before it writes anything.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/check_keys.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/mass.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

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
