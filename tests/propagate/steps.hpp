// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Steps for the tests of lineages, and what all of these ask.

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

namespace propagate_test {

namespace up = uniprefill;

/// Requests of less than @p longest rows with gaps in their positions, and limits that fit.
struct packed_step {
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu_seqlens{0};
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> segment_request;
    up::limits bounds;

    packed_step(std::mt19937& random, std::int32_t requests, std::uint32_t longest = 80) {
        for (std::int32_t r = 0; r < requests; ++r) {
            tags.push_back(up::request_tag::prefill);
            segment_request.push_back(r);
            auto position = static_cast<std::int32_t>(random() % 5);
            for (auto rows = random() % longest; rows > 0; --rows) {
                positions.push_back(position);
                position += 1 + static_cast<std::int32_t>(random() % 3);
            }
            cu_seqlens.push_back(static_cast<std::int32_t>(positions.size()));
        }
        bounds.max_requests = bounds.max_segments = requests > 0 ? requests : 1;
        bounds.max_rows = rows();
    }
    [[nodiscard]] std::int32_t rows() const { return static_cast<std::int32_t>(positions.size()); }
    [[nodiscard]] up::batch_view view(bool with_segments) const {
        up::batch_view batch;
        batch.num_requests = batch.num_segments = static_cast<std::int32_t>(tags.size());
        batch.num_rows = rows();
        batch.tags = tags.data();
        batch.cu_seqlens = cu_seqlens.data();
        batch.positions = positions.data();
        if (with_segments) {
            batch.cu_segments = cu_seqlens.data();
            batch.segment_request = segment_request.data();
        }
        return batch;
    }
};

/// Aligned memory of the host for a lineage's state.
struct lineage_memory {
    std::vector<unsigned char> bytes;
    up::workspace memory;
    explicit lineage_memory(std::size_t size)
        : bytes(size + up::workspace::alignment, 0xab) {
        const auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
        memory = {bytes.data() + (up::workspace::alignment - address % up::workspace::alignment), size};
    }
};

inline std::vector<std::int32_t> offsets_of(const up::batch_view& batch) {
    return {batch.cu_seqlens, batch.cu_seqlens + batch.num_requests + 1};
}

/// Something wrong with a selection, and the argument that is named for it.
struct spoiled_selection {
    const char* argument;
    std::function<void(up::selection&)> spoil;
};
/// What lineages refuse. @p other the memory that isn't theirs
inline std::vector<spoiled_selection> spoiled_selections(up::memory_space other) {
    return {
        {"decided.space", [other](up::selection& s) { s.space = other; }},
        {"decided.num_rows", [](up::selection& s) { ++s.num_rows; }},
        {"decided.num_segments", [](up::selection& s) { ++s.num_segments; }},
        {"decided.num_segments", [](up::selection& s) { --s.num_requests; }},
        {"decided", [](up::selection& s) { s.cu_seqlens = nullptr; }},
        {"decided", [](up::selection& s) { s.cu_segments = nullptr; }},
        {"decided", [](up::selection& s) { s.kept_to_old = nullptr; }},
    };
}

/// What a layer does to a row of 8 bytes, so that rows which missed a layer are told apart.
UNIPREFILL_API constexpr std::uint64_t layer_of(std::uint64_t value, std::int32_t layer) {
    return 3 * value + static_cast<std::uint64_t>(layer);
}

} // namespace propagate_test
