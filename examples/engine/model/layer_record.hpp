// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/uniprefill.hpp>

#include <cstdint>
#include <vector>

namespace engine {

/// What one layer did in a step.
struct layer_record {
    std::int64_t rows_in = 0;   ///< rows whose keys were written
    std::int64_t rows_kept = 0; ///< rows that entered output projection and MLP
    std::int64_t pairs = 0;     ///< (query, key) pairs that attention scored, mean over heads
    double seconds = 0;
    bool selected = false;                             ///< whether a decision was taken, and then:
    std::vector<uniprefill::segment_outcome> outcomes; // [num_segments]
    std::int64_t estimator_pairs = 0; ///< (query, key) pairs that the estimator scored, of one head
    /// Blocks of the first request, span after span.
    std::vector<double> block_mass;                 ///< share of all mass, forced rows included
    std::vector<std::int32_t> block_first_position; ///< original position of the first row
    std::vector<bool> block_kept;                   ///< every row of it goes on
    std::vector<bool> block_forced;                 ///< no row of it could have been dropped
};

} // namespace engine
