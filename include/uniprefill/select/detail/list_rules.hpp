// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How many of its ranked blocks a list has, for host and device.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/any_team.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Of @p count ranked blocks, of which the rule itself wants @p wanted: in whole blocks, within its bounds on
/// rows. A rule of exact rows wants what holds those.
UNIPREFILL_ANY_TEAM
template <class Rule>
[[nodiscard]] UNIPREFILL_API std::int32_t
bounded_blocks(const Rule& rule, std::int32_t wanted, std::int32_t count, std::int32_t block_rows) noexcept {
    if (rule.exact_rows() > 0) {
        const std::int32_t exact = num_blocks(rule.exact_rows(), block_rows);
        return exact < count ? exact : count;
    }
    const std::int32_t least = num_blocks(rule.min_kept_rows, block_rows);
    const std::int32_t fit = rule.max_kept_rows / block_rows;
    const std::int32_t most = fit > least ? fit : least;
    wanted = wanted < least ? least : wanted;
    wanted = wanted > most ? most : wanted;
    return wanted < 0 ? 0 : wanted > count ? count : wanted;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
