// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What listers by query block are told beforehand.
#pragma once

#include <uniprefill/core/extent.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What is settled at compile time. Replace it by any struct with the same members.
/// @tparam G rows of a block of keys, 8..256, or `dynamic`: limits.block_rows
/// @tparam D elements of a head, or `dynamic`: limits.head_dim. The CUDA backend needs both constant.
template <std::int32_t G = 64, std::int32_t D = dynamic, class Rule = selection_rule>
struct query_list_policy {
    static_assert(G == dynamic || (G >= 8 && G <= 256), "query_list_policy: G must be 8..256 or dynamic");
    static_assert(D == dynamic || (D >= 1 && D <= 256), "query_list_policy: D must be 1..256 or dynamic");
    static_assert(is_selection_rule_v<Rule>,
                  "Rule: a trivially copyable type derived from uniprefill::rule_base expected, with "
                  "std::int32_t keep_count(const ranked_blocks&) const noexcept");
    using block_rows = extent<G>;
    using head_dim = extent<D>;
    using rule = Rule;
};

/// Which rows are looked at. Known beforehand, as workspaces follow from it.
struct query_sampling {
    std::int32_t query_rows = 64; ///< kept rows of a query block, >= 1: block_lists::query_rows
    /// Every how many of them is scored, counted back from the query block's last row, >= 1. What rows in
    /// between look at nearby, a window of at least as many positions covers.
    std::int32_t sample = 8;
};

UNIPREFILL_END_NAMESPACE
