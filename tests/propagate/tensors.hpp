// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Tensors, keep sets and steps for the tests of propagate, with a plain retelling of what moving rows does.

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace propagate_test {

namespace up = uniprefill;

/// Rows of bytes with a gap between them; every byte counts, gaps too.
struct tensor {
    std::vector<unsigned char> bytes;
    std::int64_t stride = 0;
    std::int64_t row_bytes = 0;
    std::int32_t rows = 0;

    tensor(std::int32_t num_rows, std::int64_t bytes_of_row, std::int64_t row_stride, std::uint64_t seed)
        : bytes(static_cast<std::size_t>(num_rows * row_stride))
        , stride(row_stride)
        , row_bytes(bytes_of_row)
        , rows(num_rows) {
        // Eight bytes at a time (splitmix64): tests draw gigabytes.
        for (std::size_t byte = 0; byte < bytes.size(); byte += sizeof(seed)) {
            seed += 0x9e3779b97f4a7c15u;
            std::uint64_t drawn = (seed ^ (seed >> 30)) * 0xbf58476d1ce4e5b9u;
            drawn = (drawn ^ (drawn >> 27)) * 0x94d049bb133111ebu;
            drawn ^= drawn >> 31;
            std::memcpy(&bytes[byte], &drawn, std::min(sizeof(drawn), bytes.size() - byte));
        }
    }
    up::byte_rows view() { return {bytes.data(), stride, row_bytes, rows}; }
    std::vector<unsigned char> row(std::int32_t index) const {
        const auto begin = bytes.begin() + index * stride;
        return {begin, begin + row_bytes};
    }
    void set_row(std::int32_t index, const std::vector<unsigned char>& values) {
        std::copy(values.begin(), values.end(), bytes.begin() + index * stride);
    }
};

/// A selection over given requests (one segment each) that keeps given rows.
struct keep_set {
    std::vector<std::int32_t> kept_to_old;
    std::vector<std::int32_t> old_to_kept;
    std::vector<std::int32_t> cu_seqlens;
    up::selection view;

    /// @p padding entries of -1 follow the kept rows, as under a fixed budget.
    keep_set(const std::vector<bool>& keeps, const std::vector<std::int32_t>& cu_before,
             std::int32_t padding = 0) {
        std::size_t request = 0;
        for (std::size_t row = 0; row <= keeps.size(); ++row) {
            while (request < cu_before.size() && cu_before[request] == static_cast<std::int32_t>(row)) {
                cu_seqlens.push_back(static_cast<std::int32_t>(kept_to_old.size()));
                ++request;
            }
            if (row < keeps.size()) {
                old_to_kept.push_back(keeps[row] ? static_cast<std::int32_t>(kept_to_old.size()) : -1);
                if (keeps[row]) {
                    kept_to_old.push_back(static_cast<std::int32_t>(row));
                }
            }
        }
        kept_to_old.insert(kept_to_old.end(), static_cast<std::size_t>(padding), -1);
        view.identity = false;
        view.num_requests = view.num_segments = static_cast<std::int32_t>(cu_before.size()) - 1;
        view.num_rows = static_cast<std::int32_t>(keeps.size());
        view.kept_bound = static_cast<std::int32_t>(kept_to_old.size());
        view.kept_to_old = kept_to_old.data();
        view.old_to_kept = old_to_kept.data();
        view.cu_seqlens = cu_seqlens.data();
        view.cu_segments = cu_seqlens.data();
    }
    keep_set(const keep_set&) = delete;
    keep_set& operator=(const keep_set&) = delete;

    std::int32_t kept() const { return cu_seqlens.back(); }
};

/// Rows that stay, in runs as blocks make them, or one by one.
inline std::vector<bool> random_keeps(std::mt19937& random, std::int32_t rows) {
    std::vector<bool> keeps(static_cast<std::size_t>(rows));
    const auto run = random() % 2 == 0 ? 1 : 1 + random() % 64;
    const auto share = random() % 11; // of ten: none to all
    bool stays = false;
    for (std::size_t row = 0; row < keeps.size(); ++row) {
        if (row % run == 0) {
            stays = random() % 10 < share;
        }
        keeps[row] = stays;
    }
    return keeps;
}

} // namespace propagate_test
