// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/error.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// Which pages of a pool are taken, and by how many: a page is free again when its last holder gives it back.
class page_pool {
  public:
    explicit page_pool(std::int32_t pages)
        : references_(static_cast<std::size_t>(pages), 0) {
        for (std::int32_t page = pages; page-- > 0;) {
            free_.push_back(page);
        }
    }

    std::int32_t size() const { return static_cast<std::int32_t>(references_.size()); }
    std::int32_t num_free() const { return static_cast<std::int32_t>(free_.size()); }
    std::int32_t num_taken() const { return size() - num_free(); }
    /// Holders of a page.
    std::int32_t references(std::int32_t page) const { return references_[static_cast<std::size_t>(page)]; }

    /// A free page, with one holder. Throws `error` where there is none: callers count before they take.
    std::int32_t take() {
        if (free_.empty()) {
            throw error("page pool", "a free page", "none of " + std::to_string(size()));
        }
        const std::int32_t page = free_.back();
        free_.pop_back();
        references_[static_cast<std::size_t>(page)] = 1;
        return page;
    }
    /// One more holder of a page that has one.
    void share(std::int32_t page) { ++references_[static_cast<std::size_t>(page)]; }
    /// One holder less.
    void give_back(std::int32_t page) {
        if (--references_[static_cast<std::size_t>(page)] == 0) free_.push_back(page);
    }

  private:
    std::vector<std::int32_t> references_;
    std::vector<std::int32_t> free_; ///< the last one is taken next
};

} // namespace engine
