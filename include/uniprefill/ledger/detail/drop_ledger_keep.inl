// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

inline status drop_ledger<backend::host>::check_kept(std::int32_t request, std::int32_t layer,
                                                     const std::int32_t* positions,
                                                     std::int32_t count) const noexcept {
    const auto bad = [request, layer](const char* argument, const char* expected, std::int64_t came) {
        return failure(status_code::invalid_argument, argument, expected, came)
            .at_request(request)
            .at_layer(layer);
    };
    const std::int32_t set = layer_sets()[layer];
    if (set == 0) {
        return bad("layer", "a layer that doesn't hold everything (set 0)", layer);
    }
    if (count < 0 || (count > 0 && positions == nullptr)) {
        return bad("positions", "an array of count positions", count);
    }
    const detail::request_record state = record(request);
    const bool nested = bounds_.relation == set_relation::nested && set + 1 < bounds_.num_sets;
    std::int32_t in_next_set = 0;
    std::int32_t previous = -1;
    for (std::int32_t i = 0; i < count; ++i) {
        const std::int32_t position = positions[i];
        if (position <= previous || position >= state.header->committed.num_tokens ||
            !state.holds(set, position)) {
            return bad("positions", "ascending positions that the layer holds", position);
        }
        in_next_set += nested && state.holds(set + 1, position) ? 1 : 0;
        previous = position;
    }
    return !nested || in_next_set == state.length(set + 1)
               ? success()
               : bad("positions", "every position that the next nested set holds", in_next_set);
}

template <class Index>
inline status drop_ledger<backend::host>::keep_only(std::int32_t request, std::int32_t layer,
                                                    const std::int32_t* positions, std::int32_t count,
                                                    Index* from_rows, stream) noexcept {
    static_assert(std::is_same_v<Index, std::int32_t> || std::is_same_v<Index, std::int64_t>,
                  "indices are int32 or int64");
    UNIPREFILL_TRY(check_closed(request).at_layer(layer));
    UNIPREFILL_TRY(check_layer(layer).at_request(request));
    UNIPREFILL_TRY(check_kept(request, layer, positions, count));
    const std::int32_t set = layer_sets()[layer];
    const detail::request_record state = record(request);
    for (std::int32_t i = 0; from_rows != nullptr && i < count; ++i) {
        from_rows[i] = state.rows_below(set, positions[i]);
    }
    if (count == state.length(set)) {
        return success();
    }
    // What lies behind the last position given up stays dense, and isn't stored.
    detail::request_extent& extent = state.header->committed;
    std::int32_t stored = count;
    std::int32_t end = extent.num_tokens;
    while (end > extent.dense_from && stored > 0 && positions[stored - 1] == end - 1) {
        --end;
        --stored;
    }
    state.sets.fill(extent.dense_from, end);
    for (std::int32_t other = 1; other < bounds_.num_sets; ++other) {
        if (other == set) {
            state.sets.keep(set, 0, end, positions, stored);
            state.committed_below[set] = state.sets.recount(set, 0, end, 0);
        } else {
            state.committed_below[other] =
                state.sets.recount(other, extent.dense_from, end, state.committed_below[other]);
        }
    }
    state.committed_below[0] = end;
    extent.dense_from = end;
    state.copy_below(state.staged_below, state.committed_below);
    state.header->staged = extent;
    return success();
}

UNIPREFILL_END_NAMESPACE
