// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// An engine's pool of pages, without any GPU: who has a page, and what its rows say.

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace ledger_test {

/// Pages of `rows` rows of 64 bits, each with a number of owners. Layers may use fewer rows of their pages.
class simulated_pool {
  public:
    simulated_pool(std::int32_t pages, std::int32_t rows)
        : rows_(rows)
        , owners_(static_cast<std::size_t>(pages))
        , free_(static_cast<std::size_t>(pages))
        , contents_(static_cast<std::size_t>(pages) * static_cast<std::size_t>(rows)) {
        std::iota(free_.rbegin(), free_.rend(), 0);
    }

    std::int32_t pages() const { return static_cast<std::int32_t>(owners_.size()); }
    std::int32_t free_pages() const { return static_cast<std::int32_t>(free_.size()); }
    std::int32_t owners(std::int32_t page) const { return owners_.at(static_cast<std::size_t>(page)); }

    /// A page with one owner and rows that say nothing, or -1 when there is none.
    std::int32_t take() {
        if (free_.empty()) {
            return -1;
        }
        const std::int32_t page = free_.back();
        free_.pop_back();
        owners_[static_cast<std::size_t>(page)] = 1;
        for (std::int32_t row = 0; row < rows_; ++row) {
            row_of(page, row) = 0xdeadbeef;
        }
        return page;
    }
    void share(std::int32_t page) {
        must_have_owner(page);
        ++owners_[static_cast<std::size_t>(page)];
    }
    void give_back(std::int32_t page) {
        must_have_owner(page);
        if (--owners_[static_cast<std::size_t>(page)] == 0) {
            free_.push_back(page);
        }
    }
    /// A page of one's own with the same rows, or -1 when there is none.
    std::int32_t copy(std::int32_t page) {
        const std::int32_t made = take();
        for (std::int32_t row = 0; made >= 0 && row < rows_; ++row) {
            row_of(made, row) = row_of(page, row);
        }
        return made;
    }

    std::uint64_t read(std::int32_t page, std::int32_t row) {
        must_have_owner(page);
        return row_of(page, row);
    }
    void write(std::int32_t page, std::int32_t row, std::uint64_t value) {
        if (owners(page) != 1) {
            throw std::logic_error("a row was written to page " + std::to_string(page) + ", which has " +
                                   std::to_string(owners(page)) + " owners");
        }
        row_of(page, row) = value;
    }

  private:
    std::uint64_t& row_of(std::int32_t page, std::int32_t row) {
        return contents_.at(static_cast<std::size_t>(page) * static_cast<std::size_t>(rows_) +
                            static_cast<std::size_t>(row));
    }
    void must_have_owner(std::int32_t page) const {
        if (owners(page) < 1) {
            throw std::logic_error("page " + std::to_string(page) + " is free");
        }
    }

    std::int32_t rows_;
    std::vector<std::int32_t> owners_;
    std::vector<std::int32_t> free_;
    std::vector<std::uint64_t> contents_;
};

} // namespace ledger_test
