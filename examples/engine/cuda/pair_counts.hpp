// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace engine::cuda {

/// Query rows of one layer of one request, and what they read. Arrays are in device memory.
struct pair_count_call {
    std::int32_t rows = 0;                     ///< an upper bound of the query rows
    const std::int32_t* alive = nullptr;       ///< [1] query rows that there really are
    const std::int32_t* kept_to_old = nullptr; // [rows] their rows among the keys; null: row i is key i
    const std::int32_t* positions = nullptr;   // of the keys, rising in each segment
    const std::int32_t* bounds = nullptr;      // [segments + 1] where segments of keys begin
    std::int32_t segments = 1;
    /// Block lists as uniprefill::block_lists has them; null offsets: every key before a query is read.
    const std::int64_t* offsets = nullptr; // [segments * heads + 1]
    const std::int32_t* blocks = nullptr;
    std::int32_t heads = 1; ///< lists of a segment
    std::int32_t block_rows = 0;
    bool means = false;      ///< each block that a query sees whole and doesn't read is one key more
    std::int32_t window = 0; ///< positions; without lists, those that a query sees, 0: all before it
};

/// What is counted of a layer.
struct pair_count {
    unsigned long long pairs = 0; ///< (query, key) pairs, over all lists of a segment
    long long queries = 0;
};

/// Adds the pairs to out->pairs and writes out->queries: one launch, which nobody waits for. Exact.
void count_pairs(const pair_count_call& call, pair_count* out, cudaStream_t on);

} // namespace engine::cuda
