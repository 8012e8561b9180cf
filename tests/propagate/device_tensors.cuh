// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Tensors and keep sets in device memory, beside those of tensors.hpp.

#include "support/catch.hpp"
#include "support/cuda.cuh"
#include "support/scale.hpp"

#include "tensors.hpp"

#include <uniprefill/propagate/compaction.cuh>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace propagate_test {

using uniprefill_test::spread_cases;

inline void check_ok(const up::status& result) {
    INFO(result.argument << ": expected " << result.expected << ", came " << result.came);
    REQUIRE(result.ok());
}

inline up::cuda_device current_device(std::int32_t max_ctas = 0) {
    up::cuda_device device;
    check_ok(up::cuda_device::current(device));
    device.max_ctas = max_ctas;
    return device;
}

/// A copy of a tensor. Its bytes begin @p offset bytes after an aligned address; bytes before and behind them
/// must stay as they are.
class device_tensor {
  public:
    explicit device_tensor(const tensor& values, std::size_t offset = 0)
        : offset_(offset)
        , stride_(values.stride)
        , row_bytes_(values.row_bytes)
        , rows_(values.rows)
        , memory_(offset + values.bytes.size() + guard) {
        set(values.bytes);
    }
    void set(const std::vector<unsigned char>& bytes) {
        std::vector<unsigned char> all(memory_.size(), guard_byte);
        std::copy(bytes.begin(), bytes.end(), all.begin() + static_cast<std::ptrdiff_t>(offset_));
        memory_.set(all);
    }
    [[nodiscard]] up::byte_rows view() const {
        return {memory_.data() + offset_, stride_, row_bytes_, rows_};
    }
    /// The bytes, once everything launched has run; fails the test where a byte around them has changed.
    [[nodiscard]] std::vector<unsigned char> bytes() const {
        const std::vector<unsigned char> all = memory_.get();
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(offset_);
        const auto end = all.end() - static_cast<std::ptrdiff_t>(guard);
        const auto changed = [](unsigned char byte) { return byte != guard_byte; };
        REQUIRE(std::none_of(all.begin(), begin, changed));
        REQUIRE(std::none_of(end, all.end(), changed));
        return {begin, end};
    }

  private:
    static constexpr std::size_t guard = 64;
    static constexpr unsigned char guard_byte = 0x5a;
    std::size_t offset_;
    std::int64_t stride_;
    std::int64_t row_bytes_;
    std::int32_t rows_;
    uniprefill_test::device_array<unsigned char> memory_;
};

/// A selection in device memory of which the host knows an upper bound only. Map entries beyond the kept rows
/// are nonsense, which the count keeps from being read.
class device_keep_set {
  public:
    /// Room for keep sets over up to @p rows rows and @p requests requests.
    device_keep_set(std::int32_t rows, std::int32_t requests)
        : kept_to_old_(static_cast<std::size_t>(rows))
        , cu_seqlens_(static_cast<std::size_t>(requests) + 1) {
        view.space = up::memory_space::device;
        view.identity = false;
        view.num_requests = view.num_segments = requests;
        view.num_rows = view.kept_bound = rows;
        view.kept_to_old = kept_to_old_.data();
        view.cu_seqlens = view.cu_segments = cu_seqlens_.data();
    }
    explicit device_keep_set(const keep_set& kept)
        : device_keep_set(kept.view.num_rows, kept.view.num_requests) {
        set(kept);
    }
    void set(const keep_set& kept) {
        std::vector<std::int32_t> map(kept.kept_to_old.begin(), kept.kept_to_old.begin() + kept.kept());
        for (std::size_t row = map.size(); row < kept_to_old_.size(); ++row) {
            map.push_back(row % 3 == 0 ? -1 : row % 3 == 1 ? 0 : INT32_MAX);
        }
        set_raw(map, kept.cu_seqlens);
    }
    void set_raw(const std::vector<std::int32_t>& map, const std::vector<std::int32_t>& cu_seqlens) {
        kept_to_old_.set(map);
        cu_seqlens_.set(cu_seqlens);
    }

    up::selection view;

  private:
    uniprefill_test::device_array<std::int32_t> kept_to_old_;
    uniprefill_test::device_array<std::int32_t> cu_seqlens_;
};

/// Scratch for moves in place; what it holds before a call means nothing.
class device_scratch {
  public:
    [[nodiscard]] up::workspace view() const { return {memory_.data(), memory_.size()}; }

  private:
    uniprefill_test::device_array<unsigned char> memory_{up::in_place_scratch_bytes()};
};

/// Keep sets that are hard on a move: nothing, everything, all but one row, every other row, halves, and
/// random ones.
inline std::vector<bool> keeps_of_kind(std::mt19937& random, std::int32_t rows, std::uint32_t kind) {
    std::vector<bool> keeps(static_cast<std::size_t>(rows), kind % 8 == 1 || kind % 8 == 2 || kind % 8 == 3);
    for (std::size_t row = 0; row < keeps.size(); ++row) {
        if (kind % 8 == 4) {
            keeps[row] = row % 2 == 1;
        } else if (kind % 8 == 5) {
            keeps[row] = row >= keeps.size() / 2;
        }
    }
    if (kind % 8 == 2 && rows > 0) {
        keeps[0] = false;
    } else if (kind % 8 == 3 && rows > 0) {
        keeps[random() % keeps.size()] = false;
    }
    return kind % 8 >= 6 ? random_keeps(random, rows) : keeps;
}

} // namespace propagate_test
