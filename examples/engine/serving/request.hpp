// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

/// What a client asks for.
struct serving_request {
    std::vector<std::int32_t> prompt;
    std::int32_t new_tokens = 0; ///< at most so many are generated, greedily
};

/// A request that was swapped out: its part of the ledger, and its keys and values layer by layer.
struct swapped_request {
    std::vector<std::byte> ledger;
    std::vector<float> rows; ///< layer after layer, keys before values
    bool empty() const { return ledger.empty(); }
};

/// Where a request stands. All that it has yet to compute follows from two numbers: the tokens that it has,
/// and how many of them the ledger knows.
struct request_state {
    std::int32_t id = 0;              ///< in order of arrival: the lower goes first
    std::vector<std::int32_t> tokens; ///< the prompt, and what was generated
    std::int32_t prompt = 0;          ///< tokens of it
    std::int32_t new_tokens = 0;      ///< asked for
    std::vector<std::int32_t> span_ends;
    std::int32_t slot = -1;    ///< in the ledger and the KV store while it runs
    std::int32_t computed = 0; ///< positions that the ledger knows
    swapped_request swapped;
    bool finished = false;

    // For the statistics.
    std::int32_t preemptions = 0;
    std::int32_t computed_before = 0; ///< the last preemption
    std::int32_t reused = 0;          ///< positions that the prefix cache had, at the first start
    std::int32_t dropped = 0;         ///< prompt tokens that the last layer doesn't hold
    std::int64_t pages = 0;           ///< when the prompt ended, in all layers
    std::int64_t dense_pages = 0;     ///< those that a cache without drops would have had then

    std::int32_t num_tokens() const { return static_cast<std::int32_t>(tokens.size()); }
    std::int32_t generated() const { return num_tokens() - prompt; }
};

} // namespace engine
