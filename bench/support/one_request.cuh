// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// What benchmarks of one request's prefill share: its batch in device memory.

#include "device_timer.cuh"

#include <uniprefill/core/batch.hpp>

#include <cstdint>
#include <numeric>
#include <vector>

namespace device_bench {

/// A step of one request with @p length rows after @p cached tokens.
class one_request {
  public:
    one_request(std::int32_t length, uniprefill::request_tag tag, std::int32_t cached = 0)
        : positions_(rising(length, cached))
        , offsets_(std::vector<std::int32_t>{0, length})
        , cached_lens_(std::vector<std::int32_t>{cached})
        , tags_(std::vector<uniprefill::request_tag>{tag}) {
        batch_.space = uniprefill::memory_space::device;
        batch_.num_requests = batch_.num_segments = 1;
        batch_.num_rows = length;
        batch_.tags = tags_.data();
        batch_.cu_seqlens = offsets_.data();
        batch_.positions = positions_.data();
        batch_.cached_lens = cached > 0 ? cached_lens_.data() : nullptr;
    }
    [[nodiscard]] const uniprefill::batch_view& batch() const { return batch_; }

  private:
    static std::vector<std::int32_t> rising(std::int32_t length, std::int32_t first) {
        std::vector<std::int32_t> all(static_cast<std::size_t>(length));
        std::iota(all.begin(), all.end(), first);
        return all;
    }

    device_array<std::int32_t> positions_;
    device_array<std::int32_t> offsets_;
    device_array<std::int32_t> cached_lens_;
    device_array<uniprefill::request_tag> tags_;
    uniprefill::batch_view batch_;
};

} // namespace device_bench
