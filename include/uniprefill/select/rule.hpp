// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Selection rules: how many of a segment's heaviest blocks go on. The one that ships covers top-p, fixed
/// ratio, fixed budget and max-fraction; a rule of your own is a struct with one function.
///
/// A validate() returns the first field that is wrong (invalid_argument). O(1), thread-safe, deterministic.
#pragma once

#include <uniprefill/core/status.hpp>
#include <uniprefill/select/ranked_blocks.hpp>

#include <cstdint>
#include <type_traits>
#include <utility>

UNIPREFILL_BEGIN_NAMESPACE

/// Which rows a block's mass counts, and so what p is a share of.
enum class mass_scope : std::int32_t {
    free, ///< rows that may be dropped; blocks whose rows are all forced are no candidates
    all,  ///< every row, forced ones included; every block is a candidate (as published)
};

/// Which of two blocks of equal mass ranks first.
enum class tie_order : std::int32_t { lower_block_first, higher_block_first };

/// What top-p does where a running sum meets p * total exactly.
enum class crossing : std::int32_t {
    minimal,   ///< the fewest blocks whose sum is >= p * total
    published, ///< a block stays while the sum before it is <= p * total: one block more where they are equal
};

/// How many of the ranked blocks stay.
enum class rule_kind : std::int32_t {
    top_p,        ///< the heaviest blocks that hold p of the mass
    fixed_ratio,  ///< ceil(p * candidate blocks) blocks
    fixed_budget, ///< budget_rows rows of every segment
    max_fraction, ///< blocks that weigh at least p of the heaviest
};

/// What every rule has. A rule of your own derives from it and adds keep_count():
/// @code
/// struct top_k : uniprefill::rule_base {
///     std::int32_t k = 8;
///     std::int32_t keep_count(const uniprefill::ranked_blocks&) const noexcept { return k; }
/// };
/// uniprefill::block_selector<top_k> selector{limits};
/// @endcode
/// * `keep_count(ranked)` says how many of the ranked blocks stay; it is asked once for a segment, only where
///   there is something to decide, and its answer is clamped to 0..ranked.count. It must depend on its
///   arguments alone and should use integers (unit_fraction, ranked_blocks), so that compiler flags can't
///   change what is kept.
/// * `exact_rows()` may be hidden by one that returns more than 0: each segment then keeps that many rows.
/// * `status validate(const top_k&)` beside the struct is found and called before anything is written;
///   without one, only this base is checked.
/// A rule is copied to where the selection runs, so it must be trivially copyable.
struct rule_base {
    mass_scope scope = mass_scope::free;
    tie_order ties = tie_order::lower_block_first;
    /// Rows that a segment keeps at least, forced ones included: further blocks by rank, the last one cut.
    std::int32_t min_kept_rows = 0;
    /// Rows that a segment keeps at most: fewer blocks by rank, the last one cut. Forced rows stay even
    /// beyond.
    std::int32_t max_kept_rows = INT32_MAX;

    /// Rows that each segment keeps exactly; 0: as many as keep_count() gives.
    [[nodiscard]] UNIPREFILL_API std::int32_t exact_rows() const noexcept { return 0; }
};

/// The rule that ships; plain data, one for each request.
struct selection_rule : rule_base {
    rule_kind kind = rule_kind::top_p;
    uniprefill::crossing crossing = uniprefill::crossing::minimal;
    unit_fraction p{};            ///< share, ratio or fraction in (0, 1]
    std::int32_t budget_rows = 0; ///< rows of a segment (fixed_budget only)

    /// The fewest blocks that hold @p p of the mass (UniPrefill, arXiv 2605.06221, equation of k*). p = 1
    /// keeps every row.
    [[nodiscard]] static UNIPREFILL_API selection_rule top_p(double p = 0.98,
                                                             mass_scope scope = mass_scope::free) noexcept {
        selection_rule rule;
        rule.scope = scope;
        rule.p = unit_fraction::from(p);
        return rule;
    }
    /// Top-p as the released implementation decides it: forced rows count, later blocks win ties, and a block
    /// stays while the sum before it is <= p * total. The same mask as that rule has in exact arithmetic for
    /// the same block scores, p < 1.
    [[nodiscard]] static UNIPREFILL_API selection_rule published_top_p(double p = 0.99) noexcept {
        selection_rule rule = top_p(p, mass_scope::all);
        rule.ties = tie_order::higher_block_first;
        rule.crossing = uniprefill::crossing::published;
        return rule;
    }
    /// ceil(@p ratio * candidate blocks) whole blocks.
    [[nodiscard]] static UNIPREFILL_API selection_rule fixed_ratio(double ratio) noexcept {
        selection_rule rule = top_p(ratio);
        rule.kind = rule_kind::fixed_ratio;
        return rule;
    }
    /// Exactly @p rows rows of every segment that has as many: forced ones first, then whole blocks by rank,
    /// of the last one the first free rows. The shape after the layer is known beforehand.
    [[nodiscard]] static UNIPREFILL_API selection_rule fixed_budget(std::int32_t rows) noexcept {
        selection_rule rule;
        rule.kind = rule_kind::fixed_budget;
        rule.budget_rows = rows;
        return rule;
    }
    /// Blocks that weigh at least @p fraction of the heaviest.
    [[nodiscard]] static UNIPREFILL_API selection_rule max_fraction(double fraction) noexcept {
        selection_rule rule = top_p(fraction);
        rule.kind = rule_kind::max_fraction;
        return rule;
    }

    /// Rows that each segment keeps exactly; 0 for all kinds but fixed_budget.
    [[nodiscard]] UNIPREFILL_API std::int32_t exact_rows() const noexcept {
        return kind == rule_kind::fixed_budget ? budget_rows : 0;
    }
    /// How many of the ranked blocks stay, exactly. O(log blocks).
    [[nodiscard]] UNIPREFILL_API std::int32_t keep_count(const ranked_blocks& ranked) const noexcept {
        switch (kind) {
        case rule_kind::fixed_ratio:
            return ceil_fraction(p, ranked.count);
        case rule_kind::max_fraction:
            return ranked.blocks_within(p);
        case rule_kind::fixed_budget:
            return ranked.count;
        case rule_kind::top_p:
            break;
        }
        if (p.value == unit_fraction::one) {
            return ranked.count; // blocks without any mass too
        }
        // The block at rank k stays while sums[k - 1] <= p * total, so the first excess ends the list.
        return crossing == uniprefill::crossing::minimal ? ranked.blocks_holding(p)
                                                         : ranked.blocks_exceeding(p);
    }
};

static_assert(std::is_trivially_copyable_v<selection_rule>);

/// Checks what every rule has.
[[nodiscard]] inline UNIPREFILL_API status validate(const rule_base& rule) noexcept {
    if (rule.scope != mass_scope::free && rule.scope != mass_scope::all) {
        return failure(status_code::invalid_argument, "rule.scope", "free or all",
                       static_cast<std::int32_t>(rule.scope));
    }
    if (rule.ties != tie_order::lower_block_first && rule.ties != tie_order::higher_block_first) {
        return failure(status_code::invalid_argument, "rule.ties", "lower_block_first or higher_block_first",
                       static_cast<std::int32_t>(rule.ties));
    }
    if (rule.min_kept_rows < 0) {
        return failure(status_code::invalid_argument, "rule.min_kept_rows", ">= 0", rule.min_kept_rows);
    }
    if (rule.max_kept_rows < 1 || rule.max_kept_rows < rule.min_kept_rows) {
        return failure(status_code::invalid_argument, "rule.max_kept_rows", ">= 1 and >= min_kept_rows",
                       rule.max_kept_rows);
    }
    return success();
}

/// Checks every field that the rule's kind uses.
[[nodiscard]] inline UNIPREFILL_API status validate(const selection_rule& rule) noexcept {
    UNIPREFILL_TRY(validate(static_cast<const rule_base&>(rule)));
    switch (rule.kind) {
    case rule_kind::top_p:
    case rule_kind::fixed_ratio:
    case rule_kind::max_fraction:
        if (rule.p.value == 0 || rule.p.value > unit_fraction::one) {
            return failure(status_code::invalid_argument, "rule.p",
                           "(0, 1] (NaN and numbers outside are stored as 0)",
                           static_cast<double>(rule.p.value) / static_cast<double>(unit_fraction::one));
        }
        break;
    case rule_kind::fixed_budget:
        if (rule.budget_rows < 1) {
            return failure(status_code::invalid_argument, "rule.budget_rows", ">= 1", rule.budget_rows);
        }
        if (rule.budget_rows < rule.min_kept_rows || rule.budget_rows > rule.max_kept_rows) {
            return failure(status_code::invalid_argument, "rule.budget_rows", "min_kept_rows..max_kept_rows",
                           rule.budget_rows);
        }
        break;
    default:
        return failure(status_code::invalid_argument, "rule.kind",
                       "top_p, fixed_ratio, fixed_budget or max_fraction",
                       static_cast<std::int32_t>(rule.kind));
    }
    if (rule.crossing != crossing::minimal && rule.crossing != crossing::published) {
        return failure(status_code::invalid_argument, "rule.crossing", "minimal or published",
                       static_cast<std::int32_t>(rule.crossing));
    }
    return success();
}

namespace detail {

template <class Rule, class = void>
struct has_keep_count : std::false_type {};
template <class Rule>
struct has_keep_count<
    Rule, std::void_t<decltype(std::declval<const Rule&>().keep_count(std::declval<const ranked_blocks&>()))>>
    : std::is_convertible<decltype(std::declval<const Rule&>().keep_count(
                              std::declval<const ranked_blocks&>())),
                          std::int32_t> {};

} // namespace detail

/// True for types that block_selector accepts as a rule.
template <class Rule>
inline constexpr bool is_selection_rule_v = std::is_base_of_v<rule_base, Rule>&&
    std::is_trivially_copyable_v<Rule>&& detail::has_keep_count<Rule>::value;

UNIPREFILL_END_NAMESPACE
