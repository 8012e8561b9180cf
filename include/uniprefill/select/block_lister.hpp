// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From masses by head to block lists: the same look that says which tokens matter says which blocks each
/// head reads.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// How lists are made.
template <class Rule = selection_rule>
struct list_options {
    /// How many of a head's heaviest blocks are listed. Where it counts rows (a budget, min_kept_rows,
    /// max_kept_rows): as many whole blocks as hold them, or, of max_kept_rows, as fit; min_kept_rows wins.
    Rule rule = Rule::top_p(0.99, mass_scope::all);
    /// Positions below it are read by every query: their blocks are listed whatever they weigh.
    std::int32_t sink = 64;
    /// Positions up to its own that a query reads whatever they weigh, in whole blocks: see
    /// block_lists::window.
    std::int32_t window = 256;
};

/// Checks every field: invalid_argument, naming it. O(1), thread-safe, deterministic.
template <class Rule>
[[nodiscard]] UNIPREFILL_HOST_API status validate(const list_options<Rule>& options) noexcept {
    UNIPREFILL_TRY(validate(options.rule));
    if (options.sink < 0) {
        return failure(status_code::invalid_argument, "options.sink", ">= 0", options.sink);
    }
    return options.window >= 0
               ? success()
               : failure(status_code::invalid_argument, "options.window", ">= 0", options.window);
}

/// Makes the block lists of a step; specialised for each backend: backend::host here, backend::cuda in
/// block_lister.cuh.
template <class Rule = selection_rule, class Backend = backend::host>
class block_lister;

/// On the host: single-threaded, exact, deterministic. O(blocks * log(blocks)) for each list; under
/// mass_scope::free O(rows + spans * log(rows)) more for each segment.
///
/// A head's blocks are ranked by its own mass, or by the sum over the query heads of its KV head, over the
/// rule's scope; the rule says how many of the heaviest are listed. Sinks are listed besides, and so are
/// blocks with forced rows where the scope leaves those out: nothing has weighed them. A list of which the
/// masses can't be trusted (a fault word, a negative or too large mass) or say nothing (a total of 0: the
/// segment wasn't scored) has every block. Each list follows from its own masses: packing and neighbours
/// can't change it, nor can compiler flags.
///
/// Thread-safe: the object is immutable; concurrent calls need workspaces and outputs of their own.
template <class Rule>
class block_lister<Rule, backend::host> {
    static_assert(is_selection_rule_v<Rule>,
                  "Rule: a trivially copyable type derived from uniprefill::rule_base expected, with "
                  "std::int32_t keep_count(const ranked_blocks&) const noexcept");

  public:
    /// Keeps @p bounds, which run() checks.
    explicit UNIPREFILL_HOST_API block_lister(const limits& bounds) noexcept
        : bounds_(bounds) {}

    /// Bytes of workspace that run() needs: 40 for each of ceil(max_rows / G) blocks, rounded up by piece.
    /// Pure; 0 where the limits are not valid.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Writes the lists of all segments.
    /// @param per_head  as importance writes it for @p batch: all query heads of this rank
    /// @param faults    [batch.num_segments] fault words, as mass_view has them
    /// @param out       made by block_lists::carve with the same limits, a list for each query head or for
    ///                  each KV head
    /// @param memory    workspace_bytes() bytes, only used during the call
    /// @return invalid_argument, out_of_range, not_supported, workspace_too_small or misaligned; nothing has
    ///         been written then.
    UNIPREFILL_HOST_API status run(const head_mass_view& per_head, const std::int64_t* faults,
                                   const batch_view& batch, const list_options<Rule>& options,
                                   block_lists& out, workspace memory,
                                   host_stream stream = {}) const noexcept;

  private:
    limits bounds_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/host_block_lister.inl>
