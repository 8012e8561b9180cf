// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

/// The last query rows of each selecting layer of each request: all that decisions at a prompt's end need
/// beside the cache.
class query_tails {
  public:
    query_tails() = default;
    /// @param most_rows     that are kept
    /// @param row_elements  of one row
    query_tails(std::size_t layers, std::size_t requests, std::int64_t most_rows, std::int64_t row_elements)
        : requests_(requests)
        , most_rows_(most_rows)
        , row_elements_(row_elements)
        , tails_(layers * requests) {}

    /// The next rows of a request, @p stride elements apart.
    void append(std::size_t layer, std::size_t request, const float* rows, std::int64_t count,
                std::int64_t stride) {
        std::vector<float>& tail = tails_[layer * requests_ + request];
        const std::int64_t fresh = std::min(count, most_rows_);
        const std::int64_t before = static_cast<std::int64_t>(tail.size()) / row_elements_;
        const std::int64_t leaving = std::max<std::int64_t>(0, before + fresh - most_rows_);
        tail.erase(tail.begin(), tail.begin() + leaving * row_elements_);
        for (std::int64_t row = count - fresh; row < count; ++row) {
            tail.insert(tail.end(), rows + row * stride, rows + row * stride + row_elements_);
        }
    }
    /// What there is of it, in order of position, dense.
    const std::vector<float>& of(std::size_t layer, std::size_t request) const {
        return tails_[layer * requests_ + request];
    }
    void forget(std::size_t request) {
        for (std::size_t at = request; at < tails_.size(); at += requests_) {
            tails_[at].clear();
        }
    }

  private:
    std::size_t requests_ = 1;
    std::int64_t most_rows_ = 0;
    std::int64_t row_elements_ = 1;
    std::vector<std::vector<float>> tails_; // [layers, requests] of [rows, row_elements]
};

} // namespace engine
