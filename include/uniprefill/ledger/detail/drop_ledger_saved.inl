// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <cstring>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The checksum of a buffer of whole words.
[[nodiscard]] inline UNIPREFILL_HOST_API std::uint64_t checksum(const std::byte* buffer,
                                                                std::uint64_t bytes) noexcept {
    constexpr std::uint64_t own_word = offsetof(saved_header, checksum) / sizeof(std::uint64_t);
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < bytes / sizeof(std::uint64_t); ++i) {
        std::uint64_t word = 0;
        if (i != own_word) {
            std::memcpy(&word, buffer + i * sizeof word, sizeof word);
        }
        sum += checksum_part(word, i);
    }
    return sum;
}

} // namespace detail

inline status drop_ledger<backend::host>::saved_bytes(std::int32_t request,
                                                      std::size_t& bytes) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    return saved_prefix_bytes(request, record(request).header->committed.num_tokens, bytes);
}

inline status drop_ledger<backend::host>::saved_prefix_bytes(std::int32_t request, std::int32_t num_tokens,
                                                             std::size_t& bytes) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    UNIPREFILL_TRY(check_rollback(request, num_tokens));
    const std::int32_t stored = record(request).header->committed.dense_from;
    bytes = detail::saved_layout::of(bounds_.num_layers, bounds_.num_sets, bounds_.relation,
                                     stored < num_tokens ? stored : num_tokens)
                .size();
    return success();
}

inline status drop_ledger<backend::host>::save(std::int32_t request, void* buffer, std::size_t bytes,
                                               stream on) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    return save_prefix(request, record(request).header->committed.num_tokens, buffer, bytes, on);
}

inline status drop_ledger<backend::host>::save_prefix(std::int32_t request, std::int32_t num_tokens,
                                                      void* buffer, std::size_t bytes,
                                                      stream) const noexcept {
    UNIPREFILL_TRY(check_closed(request));
    UNIPREFILL_TRY(check_rollback(request, num_tokens));
    if (buffer == nullptr) {
        return failure(status_code::invalid_argument, "buffer", "an address, not a null pointer", 0)
            .at_request(request);
    }
    const detail::request_record state = record(request);
    saved_header header;
    header.num_tokens = num_tokens;
    header.dense_from = state.header->committed.dense_from;
    header.dense_from = header.dense_from < num_tokens ? header.dense_from : num_tokens;
    header.num_layers = bounds_.num_layers;
    header.num_sets = bounds_.num_sets;
    header.relation = static_cast<std::int32_t>(bounds_.relation);
    const auto layout =
        detail::saved_layout::of(bounds_.num_layers, bounds_.num_sets, bounds_.relation, header.dense_from);
    header.bytes = layout.bytes;
    if (bytes < layout.bytes) {
        return failure(status_code::workspace_too_small, "bytes", "at least the bytes to be saved", bytes)
            .at_request(request);
    }
    auto* const out = static_cast<std::byte*>(buffer);
    const auto put = [out](std::uint64_t at, auto value) { std::memcpy(out + at, &value, sizeof value); };
    std::memset(out, 0, static_cast<std::size_t>(layout.planes));
    put(0, header);
    for (std::int32_t layer = 0; layer < bounds_.num_layers; ++layer) {
        put(layout.layer_sets + sizeof(std::int32_t) * static_cast<std::uint64_t>(layer),
            layer_sets()[layer]);
    }
    for (std::int32_t set = 0; set < bounds_.num_sets; ++set) {
        put(layout.below + sizeof(std::int32_t) * static_cast<std::uint64_t>(set),
            state.rows_below(set, header.dense_from));
    }
    std::uint64_t at = layout.planes;
    for (std::int32_t p = 0; p < state.sets.num_planes; ++p) {
        for (std::int64_t w = 0; w < detail::end_word(header.dense_from); ++w, at += sizeof(std::uint64_t)) {
            put(at, state.sets.plane(p, w) & detail::range_mask(w, 0, header.dense_from));
        }
    }
    header.checksum = detail::checksum(out, layout.bytes);
    put(0, header);
    return success();
}

inline status drop_ledger<backend::host>::restore(std::int32_t request, const void* buffer, std::size_t bytes,
                                                  stream) noexcept {
    UNIPREFILL_TRY(check_closed(request));
    const auto bad = [request](const char* argument, const char* expected, auto came) {
        return failure(status_code::invalid_argument, argument, expected, came).at_request(request);
    };
    const detail::request_record state = record(request);
    if (state.header->committed.num_tokens != 0) {
        return failure(status_code::wrong_state, "request", "a request without positions",
                       state.header->committed.num_tokens)
            .at_request(request);
    }
    if (buffer == nullptr) {
        return bad("buffer", "an address, not a null pointer", 0);
    }
    const auto* const in = static_cast<const std::byte*>(buffer);
    saved_header header;
    if (bytes < sizeof header) {
        return bad("bytes", "at least those of a saved_header", bytes);
    }
    std::memcpy(&header, in, sizeof header);
    if (header.magic != saved_header::magic_number) {
        return bad("saved.magic", "a request saved on a machine of this byte order", header.magic);
    }
    if (header.version != saved_request_version) {
        return failure(status_code::not_supported, "saved.version", "saved_request_version", header.version)
            .at_request(request);
    }
    if (header.bytes != bytes || bytes % sizeof(std::uint64_t) != 0) {
        return bad("bytes", "the bytes that save() wrote", bytes);
    }
    if (detail::checksum(in, bytes) != header.checksum) {
        return bad("saved.checksum", "that of the buffer as it was saved", header.checksum);
    }
    // Undamaged; from here on it may be foreign, or forged.
    if (header.num_layers != bounds_.num_layers) {
        return bad("saved.num_layers", "the layers of this ledger", header.num_layers);
    }
    if (header.num_sets != bounds_.num_sets) {
        return bad("saved.num_sets", "the sets of this ledger", header.num_sets);
    }
    if (header.relation != static_cast<std::int32_t>(bounds_.relation)) {
        return bad("saved.relation", "the relation of this ledger's sets", header.relation);
    }
    if (header.num_tokens < 0 || header.num_tokens > bounds_.max_tokens) {
        return failure(status_code::capacity_exceeded, "saved.num_tokens", "0..max_tokens", header.num_tokens)
            .at_request(request);
    }
    if (header.dense_from < 0 || header.dense_from > header.num_tokens) {
        return bad("saved.dense_from", "0..saved.num_tokens", header.dense_from);
    }
    const auto layout =
        detail::saved_layout::of(bounds_.num_layers, bounds_.num_sets, bounds_.relation, header.dense_from);
    if (layout.bytes != bytes) {
        return bad("saved.bytes", "the bytes of so many positions", header.bytes);
    }
    for (std::int32_t layer = 0; layer < bounds_.num_layers; ++layer) {
        std::int32_t set = 0;
        std::memcpy(&set, in + layout.layer_sets + sizeof set * static_cast<std::size_t>(layer), sizeof set);
        if (set != layer_sets()[layer]) {
            return bad("saved.layer_sets", "the set of each layer of this ledger", set).at_layer(layer);
        }
    }
    // The request's own memory is all 0, so the planes can be judged there and taken back.
    const std::size_t plane_bytes =
        sizeof(std::uint64_t) * static_cast<std::size_t>(detail::end_word(header.dense_from));
    for (std::int32_t p = 0; p < state.sets.num_planes && plane_bytes != 0; ++p) {
        std::memcpy(&state.sets.plane(p, 0), in + layout.planes + static_cast<std::size_t>(p) * plane_bytes,
                    plane_bytes);
    }
    const bool well_formed = state.sets.well_formed(header.dense_from);
    std::int32_t wrong_set = -1;
    for (std::int32_t set = 0; well_formed && wrong_set < 0 && set < bounds_.num_sets; ++set) {
        std::int32_t below = 0;
        std::memcpy(&below, in + layout.below + sizeof below * static_cast<std::size_t>(set), sizeof below);
        const std::int32_t counted =
            set == 0 ? header.dense_from : state.sets.recount(set, 0, header.dense_from, 0);
        wrong_set = below == counted ? -1 : set;
    }
    if (!well_formed || wrong_set >= 0) {
        for (std::int32_t p = 0; p < state.sets.num_planes && plane_bytes != 0; ++p) {
            std::memset(&state.sets.plane(p, 0), 0, plane_bytes);
        }
        state.sets.clear(0, header.dense_from);
        return well_formed ? bad("saved.below", "the positions of each set that the planes hold", wrong_set)
                           : bad("saved.planes", "sets of this ledger, and nothing behind dense_from", 0);
    }
    std::memcpy(state.committed_below, in + layout.below,
                sizeof(std::int32_t) * static_cast<std::size_t>(bounds_.num_sets));
    state.copy_below(state.staged_below, state.committed_below);
    state.header->committed = {header.num_tokens, header.dense_from};
    state.header->staged = state.header->committed;
    return success();
}

UNIPREFILL_END_NAMESPACE
