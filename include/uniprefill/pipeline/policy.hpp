// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the facade is told: which layers select, by which rule, and what becomes of dropped rows.
#pragma once

#include <uniprefill/core/metrics.hpp>
#include <uniprefill/importance/importance.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Compile-time choices of the facade. Replace it by a struct with the same members to change one.
/// @tparam G rows of a block, or `dynamic` to take limits::block_rows
/// @tparam N observation queries, or `dynamic` to take limits::num_observations
/// @tparam D elements of a head, or `dynamic` to take limits::head_dim. On CUDA devices all three are
/// constants.
template <std::int32_t G = 64, std::int32_t N = 128, std::int32_t D = dynamic>
struct default_policy {
    using estimator = estimator_policy<G, N, head_sum, D>;
    using rule = selection_rule;
};

/// What becomes of a dropped row.
enum class propagation : std::int32_t {
    cumulative, ///< it never returns (the released code)
    revive, ///< its hidden state is frozen and re-enters at the next selecting layer (the paper's equations)
};

/// One selecting layer. Arrays of these belong to the caller, ascend by layer and outlive the facade.
template <class Rule>
struct selecting_layer {
    std::int32_t layer = 0;
    Rule rule{}; ///< for every request, unless
    /// Rules by the step's order, in the backend's memory, that decide() reads; null: `rule` for all.
    const Rule* per_request = nullptr; // [num_requests]
};

/// Run-time choices of the facade.
template <class Rule>
struct sparsifier_options {
    const selecting_layer<Rule>* layers = nullptr; // [num_selecting]
    std::int32_t num_selecting = 0;
    propagation mode = propagation::cumulative;
    metrics_observer observer{}; ///< host backend only
};

UNIPREFILL_END_NAMESPACE
