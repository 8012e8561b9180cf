// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/batch.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <vector>

namespace engine {

/// Whether a segment of a host batch is looked at at all: a prompt's, not switched off, not too short.
inline bool may_look_at(const uniprefill::batch_view& batch, std::int32_t segment) {
    const std::int32_t request = batch.request_of(segment);
    const uniprefill::request_options options = batch.options_of(request);
    return batch.is_prefill(request) && options.enabled != 0 &&
           batch.segment_end(segment) - batch.segment_begin(segment) >= options.min_length;
}

/// (query, key) pairs of one head that a look at a segment of a host batch scores: its last @p observations
/// rows, each with every key up to its own. 0 where none of its rows could be dropped.
/// @param context  keys of its request that the layer holds, less the request's first row in the batch
inline std::int64_t pairs_of_look(const uniprefill::batch_view& batch, std::int32_t segment,
                                  std::int64_t context, std::int32_t observations) {
    const std::int32_t begin = batch.segment_begin(segment), end = batch.segment_end(segment);
    if (!may_look_at(batch, segment)) return 0;
    std::int32_t first_free = begin;
    while (first_free < end && uniprefill::is_forced_row(batch, segment, first_free)) {
        ++first_free;
    }
    if (first_free == end) return 0;
    std::int64_t pairs = 0;
    for (std::int32_t row = std::max(begin, end - observations); row < end; ++row) {
        pairs += context + row + 1;
    }
    return pairs;
}

/// The same of all spans of one prompt that is read at once, whose rows up to the sink are all there.
/// @param bounds  rows that spans begin with, of those that entered the layer; then the last one's end
inline std::int64_t pairs_of_look(std::vector<std::int32_t> bounds,
                                  const uniprefill::request_options& options, std::int32_t observations) {
    const std::int32_t rows = bounds.back();
    // Of positions only those up to the sink matter, and these are the rows' own numbers.
    std::vector<std::int32_t> positions(static_cast<std::size_t>(rows));
    std::iota(positions.begin(), positions.end(), 0);
    const std::int32_t cu_seqlens[] = {0, rows};
    const std::vector<std::int32_t> requests(bounds.size() - 1, 0);
    const uniprefill::request_tag tag = uniprefill::request_tag::prefill;
    uniprefill::batch_view batch;
    batch.num_requests = 1;
    batch.num_segments = static_cast<std::int32_t>(requests.size());
    batch.num_rows = rows;
    batch.tags = &tag;
    batch.cu_seqlens = cu_seqlens;
    batch.cu_segments = bounds.data();
    batch.segment_request = requests.data();
    batch.positions = positions.data();
    batch.options = &options;
    std::int64_t pairs = 0;
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        pairs += pairs_of_look(batch, segment, 0, observations);
    }
    return pairs;
}

} // namespace engine
