// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Decisions in the oracle's words: rules, reasons and kept rows by segment.

#include "oracle/oracle.hpp"
#include "property/memory.hpp"
#include "property/random.hpp"

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/select/selector.hpp>

#include <vector>

namespace property {

namespace up = uniprefill;

/// A rule with its twin.
struct rule_pair {
    up::selection_rule ours;
    oracle::rule theirs;
};

/// A random rule for segments of about @p rows rows.
rule_pair random_rule(random_numbers& numbers, int rows);
rule_pair top_p_rule(double p, oracle::scope over);

oracle::kept_because in_oracle_words(up::keep_reason reason);

/// The reason that a fault word stands for, `selected` for none.
oracle::kept_because fault_of(std::int64_t word);

/// The oracle's view of one segment and its masses, exact.
oracle::selection_problem selection_problem_of(const up::batch_view& batch, const up::mass_view& masses,
                                               int segment, int block_rows);

/// What was kept, by segment: a copy that outlives the workspace.
struct kept_segment {
    std::vector<bool> keep; // [rows]
    up::segment_outcome outcome;
};

bool operator==(const kept_segment& a, const kept_segment& b);

/// Runs the selector and checks that the arrays of the selection agree with each other.
std::vector<kept_segment> decide(const up::limits& bounds, const up::mass_view& masses,
                                 const up::batch_view& batch, const std::vector<up::selection_rule>& rules);

/// Checks that row maps, offsets, bits and outcomes of a selection say the same, and copies what was kept.
std::vector<kept_segment> consistent(const up::selection& decided, const up::batch_view& batch);

} // namespace property
