// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What a drop ledger is sized from.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// How the stored sets of a request relate to each other.
enum class set_relation : std::int32_t {
    nested,      ///< each set lies within the set before it (`cumulative` propagation): ceil(log2(sets)) bits
                 ///< for a position
    independent, ///< any subset of the positions (`revive`, head policies): sets - 1 bits for a position
};

/// The upper bounds of a drop ledger. Memory is monotone in each extent.
struct ledger_limits {
    std::int32_t max_requests = 1; ///< requests alive at once: slots 0 to max_requests - 1
    std::int32_t max_tokens = 0;   ///< positions of one request, prompt and output together
    std::int32_t num_layers = 1;   ///< layers that cache keys
    /// Stored sets of a request: set 0, which holds every position, and one for each group of layers that
    /// the same rows enter (layer_sets.hpp counts them).
    std::int32_t num_sets = 1;
    set_relation relation = set_relation::nested;
};

/// Checks every field. O(1), pure (safe on any thread, exact).
/// @return the first field that is refused, or ok
[[nodiscard]] inline UNIPREFILL_HOST_API status validate(const ledger_limits& l) noexcept {
    const auto require = [](bool good, const char* argument, const char* expected, std::int64_t came) {
        return good ? success() : failure(status_code::invalid_argument, argument, expected, came);
    };
    UNIPREFILL_TRY(require(l.max_requests >= 1, "ledger_limits.max_requests", ">= 1", l.max_requests));
    UNIPREFILL_TRY(require(l.max_tokens >= 0 && l.max_tokens <= 1 << 30, "ledger_limits.max_tokens",
                           "0..2^30", l.max_tokens));
    UNIPREFILL_TRY(require(l.num_layers >= 1, "ledger_limits.num_layers", ">= 1", l.num_layers));
    UNIPREFILL_TRY(require(l.num_sets >= 1 && l.num_sets - 1 <= l.num_layers, "ledger_limits.num_sets",
                           "1..num_layers + 1", l.num_sets));
    return require(l.relation == set_relation::nested || l.relation == set_relation::independent,
                   "ledger_limits.relation", "nested or independent", static_cast<std::int32_t>(l.relation));
}

UNIPREFILL_END_NAMESPACE
