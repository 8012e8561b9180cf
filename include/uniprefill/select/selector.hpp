// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From block masses to a keep set.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstddef>

UNIPREFILL_BEGIN_NAMESPACE

/// Decides which rows of each segment of a step go on.
///
/// A segment's blocks are ranked by their mass over the rule's scope (ties by the rule, lower block first by
/// default); the rule says how many of the heaviest stay. Kept are the rows of those blocks, and every forced
/// row. Each segment is decided on its own, from its own masses: packing and neighbours can't change it.
///
/// Kept whole, with a reason in the outcome: decode and verify rows (not_prefill), requests whose `enabled`
/// is 0 (switched_off), segments with fewer rows than min_length or with forced rows only (short_segment),
/// and segments that can't be trusted: a fault word, a total of 0 (zero_mass), a negative mass or a total of
/// 2^63 or more (overflow). Where the rule decides, a segment that keeps every row says `everything`. A
/// segment with rows always keeps at least one.
///
/// **Exact rows** (fixed_budget, B): each prefill or chunk segment of a request that is switched on gets B
/// places in `kept_bound`, whatever its length, so shapes don't depend on data; other segments get a place
/// for each of their rows. `kept_bound` is at most limits.max_rows. Kept rows are packed without gaps and the
/// rest of kept_to_old is -1. A segment that may not be thinned (short, or a fault) but has more than B rows,
/// or one with more than B forced rows, keeps B rows all the same: forced ones first (of too many the
/// latest), then the latest. Its reason is rerun_dense, its output is void, and its rows follow the row maps
/// alone.
///
/// Bits of keep_bits are set exactly for the blocks of which every row stays. segment_outcome::cut_block
/// counts within its segment. Masses of an outcome are 0 where the rule didn't decide.
///
/// No floating point takes part: for given masses the keep set is the same under any compiler flags.
/// Thread-safe: the object is immutable; concurrent calls need workspaces and outputs of their own.
/// @tparam Rule selection_rule, or a type of your own (see rule_base)
/// @tparam Backend where it runs
template <class Rule = selection_rule, class Backend = backend::host>
class block_selector;

/// On the host: single-threaded, exact, deterministic. O(rows + spans * log(rows) + blocks * log(blocks)) for
/// each segment.
template <class Rule>
class block_selector<Rule, backend::host> {
    static_assert(is_selection_rule_v<Rule>,
                  "Rule: a trivially copyable type derived from uniprefill::rule_base expected, with "
                  "std::int32_t keep_count(const ranked_blocks&) const noexcept");

  public:
    /// Keeps @p bounds, which run() checks.
    explicit UNIPREFILL_HOST_API block_selector(const limits& bounds) noexcept
        : bounds_(bounds) {}

    /// Bytes of workspace that run() needs: 24 for each of ceil(max_rows / G) blocks, rounded up by piece.
    /// Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Fills every array of @p out, its counts and `kept_bound`.
    /// @param masses as importance writes them for @p batch, reduced over heads and ranks
    /// @param batch the step; checked in full
    /// @param rules [num_requests] the rule of each request
    /// @param out made by selection::carve with the same limits
    /// @param memory workspace_bytes() bytes, only used during the call
    /// @return invalid_argument, out_of_range, not_supported, workspace_too_small or misaligned; nothing has
    ///         been written then.
    UNIPREFILL_HOST_API status run(const mass_view& masses, const batch_view& batch, const Rule* rules,
                                   selection& out, workspace memory, host_stream stream) const noexcept;

  private:
    limits bounds_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/host_selector.inl>
