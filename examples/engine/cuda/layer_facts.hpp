// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <vector>

namespace engine::cuda {

/// What one layer of a prompt did, where a session counts.
struct layer_facts {
    std::int32_t rows_in = 0;
    std::int32_t rows_kept = 0;
    std::int64_t pairs = 0;                ///< (query, key) pairs that attention scored, mean over heads
    std::int64_t estimator_pairs = 0;      ///< that the estimator scored, of one head
    std::vector<std::int32_t> kept_to_old; ///< where a session records, at selecting layers: by row on entry
};

} // namespace engine::cuda
