// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What listers by query block refuse before anything is written.
#pragma once

#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/check_attention.hpp>
#include <uniprefill/select/query_sampling.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether limits and sampling are good and agree with the policy's constants.
template <class Policy>
[[nodiscard]] UNIPREFILL_HOST_API status check_query_sampling(const limits& bounds,
                                                              const query_sampling& sampling) noexcept {
    using block_rows = typename Policy::block_rows;
    using head_dim = typename Policy::head_dim;
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(require(block_rows(bounds.block_rows).value() == bounds.block_rows, invalid,
                           "limits.block_rows (G)", "the policy's G", bounds.block_rows));
    UNIPREFILL_TRY(require(head_dim(bounds.head_dim).value() == bounds.head_dim, invalid, "limits.head_dim",
                           "the policy's D", bounds.head_dim));
    UNIPREFILL_TRY(
        require(sampling.query_rows >= 1, invalid, "sampling.query_rows", ">= 1", sampling.query_rows));
    UNIPREFILL_TRY(require(sampling.sample >= 1, invalid, "sampling.sample", ">= 1", sampling.sample));
    const std::int64_t rows =
        (std::int64_t{sampling.query_rows - 1} / sampling.sample + 1) * bounds.group_heads();
    return require(rows <= 1 << 20, invalid, "sampling.sample",
                   "at most 2^20 sampled rows and heads of a query block", rows);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_query_lists(const block_lists& out,
                                                                  const limits& bounds,
                                                                  const query_sampling& sampling,
                                                                  memory_space space) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(require(out.space == space, status_code::not_supported, "out.space",
                           space == memory_space::host ? "host memory" : "device memory",
                           static_cast<std::int32_t>(out.space)));
    UNIPREFILL_TRY(require(out.block_rows == bounds.block_rows, invalid, "out.block_rows",
                           "lists carved with the lister's limits", out.block_rows));
    UNIPREFILL_TRY(require(out.num_heads == bounds.num_heads || out.num_heads == bounds.num_kv_heads, invalid,
                           "out.num_heads", "limits.num_heads or limits.num_kv_heads", out.num_heads));
    UNIPREFILL_TRY(require(out.query_rows == sampling.query_rows, invalid, "out.query_rows",
                           "sampling.query_rows", out.query_rows));
    UNIPREFILL_TRY(require(out.max_query_blocks >= block_lists::most_query_blocks(bounds, out.query_rows),
                           status_code::out_of_range, "out.max_query_blocks",
                           "lists carved with limits as large as the lister's", out.max_query_blocks));
    UNIPREFILL_TRY(require(out.capacity >= 0, invalid, "out.capacity", ">= 0", out.capacity));
    return require(out.offsets != nullptr && (out.blocks != nullptr || out.capacity == 0), invalid, "out",
                   "lists made by block_lists::carve on enough memory", 0);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
