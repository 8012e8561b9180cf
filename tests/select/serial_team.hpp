// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// A team of one thread.

#include <uniprefill/select/detail/cut_search.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <cstdint>
#include <numeric>
#include <stdexcept>
#include <vector>

namespace select_test {

namespace detail = uniprefill::detail;

/// Finds the cut among up to @p Capacity collected blocks, with bins of @p DigitBits binary digits.
template <std::int32_t DigitBits, std::int32_t Capacity, std::int32_t Held = 8>
class serial_team {
  public:
    static constexpr std::int32_t digit_bits = DigitBits;
    static constexpr std::int32_t capacity = Capacity;
    static constexpr std::int32_t held_blocks = Held;

    std::int32_t rank() const { return 0; }
    std::int32_t size() const { return 1; }
    std::int32_t near_rank() const { return 0; }
    std::int32_t near_size() const { return 1; }
    void sync() const {}
    std::int32_t count(bool mine) const { return mine ? 1 : 0; }
    detail::quick_note& note() { return note_; }
    const detail::quick_note& noted() const { return note_; }
    void sum(detail::quick_sums& sums) const {
        sums.collected = static_cast<std::uint32_t>(quick_collected_.size());
    }
    void add_near(std::int32_t, std::uint32_t) const { throw std::logic_error("not a cluster"); }
    detail::tally combine(const detail::tally& mine, bool with_free) const {
        detail::tally all = mine;
        all.free = with_free ? mine.free : 0x5555;
        return all;
    }

    void start_search(bool counts) {
        ++searches;
        rounds += counts ? 1 : 0;
        weights_.assign(weights_.size(), 0);
        collected_.clear();
        quick_collected_.clear();
        is_told_ = false;
    }
    void add(std::uint32_t digit, std::uint32_t weight) { weights_.at(digit) += weight; }
    template <class Need, class Meanwhile>
    detail::found_bin find(std::uint64_t mass, Need need_of, Meanwhile meanwhile) const {
        meanwhile();
        detail::found_bin found;
        found.total = mass;
        const std::uint32_t need = need_of(found);
        std::uint64_t above = 0;
        std::size_t digit = weights_.size() - 1;
        while (digit > 0 && above + weights_[digit] < need) {
            above += weights_[digit--];
        }
        found.digit = static_cast<std::uint32_t>(digit);
        return found;
    }
    void collect(const detail::collected_block& block) { collected_.push_back(block); }
    void quick_gather(std::int32_t count) const { gather(count); }
    void gather(std::int32_t count) const {
        if (static_cast<std::size_t>(count) != collected_.size() + quick_collected_.size()) {
            throw std::logic_error("not as many blocks as were counted");
        }
    }
    detail::collected_block collected(std::int32_t i) const {
        return collected_.at(static_cast<std::size_t>(i));
    }
    void quick_collect(const detail::quick_block& block) { quick_collected_.push_back(block); }
    detail::quick_block quick_collected(std::int32_t i) const {
        return quick_collected_.at(static_cast<std::size_t>(i));
    }
    static constexpr std::int32_t group_size = 1;
    void sum_group(detail::quick_sums&) const {}
    void quick_tell(const detail::quick_cut& result) {
        if (is_told_) {
            throw std::logic_error("two cuts");
        }
        quick_told_ = result;
        is_told_ = true;
    }
    detail::quick_cut quick_told() const { return is_told_ ? quick_told_ : detail::quick_cut{}; }
    std::int32_t share_bits(std::int32_t) const { return 0; }
    std::int32_t group_rank() const { return 0; }
    void sum_shares(detail::tally&, std::int32_t) const {}
    void tell(const detail::cut_result& result) {
        if (is_told_) {
            throw std::logic_error("two cuts");
        }
        told_ = result;
        is_told_ = true;
    }
    detail::cut_result told() const {
        if (std::accumulate(weights_.begin(), weights_.end(), std::uint64_t{0}) >> 32 != 0) {
            throw std::logic_error("weights whose sums don't fit the 32 bits of a device's bins");
        }
        return is_told_ ? told_ : detail::cut_result{};
    }

    std::int32_t searches = 0;
    std::int32_t rounds = 0; ///< with bins

  private:
    std::vector<std::uint64_t> weights_ = std::vector<std::uint64_t>(std::size_t{1} << DigitBits);
    std::vector<detail::collected_block> collected_;
    std::vector<detail::quick_block> quick_collected_;
    detail::cut_result told_{};
    detail::quick_cut quick_told_{};
    detail::quick_note note_{};
    bool is_told_ = false;
};

} // namespace select_test
