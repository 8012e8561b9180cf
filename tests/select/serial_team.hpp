// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Teams of one thread: like a warp of the device, which holds every block, and like a thread block, which
/// searches by histograms.

#include <uniprefill/select/detail/held_blocks.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace select_test {

namespace detail = uniprefill::detail;

struct one_lane {
    static constexpr std::int32_t size = 1;

    std::int32_t rank() const { return 0; }
    std::int32_t any(bool mine, std::int32_t) const { return mine ? 0 : -1; }
    template <class Number>
    Number from(Number mine, std::int32_t) const {
        return mine;
    }
    std::uint64_t sum(std::uint64_t mine) const { return mine; }
};

/// Holds up to @p Held blocks.
template <std::int32_t Held>
class holding_team {
  public:
    static constexpr std::int32_t held_blocks = Held;
    static constexpr bool has_bins = false;

    std::int32_t rank() const { return 0; }
    std::int32_t size() const { return 1; }
    void sync() const {}
    detail::tally combine(const detail::tally& mine) const { return mine; }
    one_lane lanes() const { return {}; }
};

/// Holds @p Held blocks at a time; finds the cut among up to @p Capacity collected ones.
template <std::int32_t DigitBits, std::int32_t Held, std::int32_t Capacity>
class counting_team {
  public:
    static constexpr std::int32_t held_blocks = Held;
    static constexpr bool has_bins = true;
    static constexpr std::int32_t digit_bits = DigitBits;
    static constexpr std::int32_t capacity = Capacity;

    std::int32_t rank() const { return 0; }
    std::int32_t size() const { return 1; }
    void sync() const {}
    detail::tally combine(const detail::tally& mine) const { return mine; }
    one_lane lanes() const { return {}; }

    void start_search() {
        ++rounds;
        weights_.assign(weights_.size(), 0);
        collected_.clear();
    }
    void add(const std::uint32_t (&digits)[Held], const std::uint64_t (&weights)[Held]) {
        for (std::int32_t k = 0; k < Held; ++k) {
            if (weights[k] != 0) {
                weights_.at(digits[k]) += weights[k];
            }
        }
    }
    detail::found_bin find(std::uint64_t need) {
        detail::found_bin found;
        std::size_t digit = weights_.size() - 1;
        while (digit > 0 && weights_[digit] < need - found.above) {
            found.above += weights_[digit--];
        }
        if (weights_[digit] < need - found.above) {
            throw std::logic_error("the weights don't reach what is searched");
        }
        found.digit = static_cast<std::uint32_t>(digit);
        return found;
    }
    void collect(const detail::held_block& block) { collected_.push_back(block); }
    detail::held_block collected(std::int32_t i) const { return collected_.at(static_cast<std::size_t>(i)); }

    std::int32_t rounds = 0;

  private:
    std::vector<std::uint64_t> weights_ = std::vector<std::uint64_t>(std::size_t{1} << DigitBits);
    std::vector<detail::held_block> collected_;
};

} // namespace select_test
