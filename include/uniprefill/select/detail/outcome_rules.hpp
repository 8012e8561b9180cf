// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The arithmetic of a decision that does not depend on how blocks are ranked, for host and device.
#pragma once

#include <uniprefill/core/selection.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The reason that a fault word stands for; `selected` for none. Of several faults the first lane's is told.
[[nodiscard]] inline UNIPREFILL_API keep_reason reason_of_fault(std::int64_t word) noexcept {
    constexpr keep_reason lanes[4] = {keep_reason::non_finite, keep_reason::unscored, keep_reason::overflow,
                                      keep_reason::rank};
    const auto bits = static_cast<std::uint64_t>(word);
    for (std::int32_t lane = 0; lane < 4; ++lane) {
        if (((bits >> (16 * lane)) & 0xffffu) != 0) {
            return lanes[lane];
        }
    }
    return keep_reason::selected;
}

/// ceil(mass * part / whole) for 0 <= part <= whole, without a wider type.
[[nodiscard]] inline UNIPREFILL_API std::int64_t share_rounded_up(std::int64_t mass, std::int32_t part,
                                                                  std::int32_t whole) noexcept {
    return mass / whole * part + (mass % whole * part + whole - 1) / whole;
}

/// Free rows that stay, of @p rows rows with @p forced forced ones, where the rule's blocks hold @p wanted
/// free rows: within the rule's bounds on kept rows.
template <class Rule>
[[nodiscard]] UNIPREFILL_API std::int32_t
free_rows_to_keep(const Rule& rule, std::int32_t rows, std::int32_t forced, std::int32_t wanted) noexcept {
    const std::int32_t free_rows = rows - forced;
    // At least one row of a segment stays, whatever a rule says: nothing downstream expects an empty one.
    std::int32_t least = (rule.min_kept_rows > 0 ? rule.min_kept_rows : 1) - forced;
    std::int32_t most = rule.max_kept_rows - forced;
    if (rule.exact_rows() > 0) {
        wanted = least = most = rule.exact_rows() - forced;
    }
    wanted = wanted < least ? least : wanted;
    wanted = wanted > most ? most : wanted;
    return wanted < 0 ? 0 : wanted > free_rows ? free_rows : wanted;
}

/// Whether a segment that can't be thinned as its rule says has to give rows up all the same.
template <class Rule>
[[nodiscard]] UNIPREFILL_API bool must_run_dense_again(const Rule& rule, std::int32_t rows,
                                                       std::int32_t forced, keep_reason reason) noexcept {
    return rule.exact_rows() > 0 && rows > rule.exact_rows() &&
           (reason != keep_reason::selected || forced > rule.exact_rows());
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
