// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// A team of several threads: what a serial team can't show, which element belongs to whom and what is read
/// before it is there.

#include <uniprefill/select/detail/cut_search.hpp>
#include <uniprefill/select/detail/team.hpp>

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace select_test {

namespace detail = uniprefill::detail;

/// What the threads of a team share.
template <std::int32_t DigitBits>
class thread_crew {
  public:
    explicit thread_crew(std::int32_t size)
        : size_(size) {}

    /// Runs work(rank) by all.
    template <class Work>
    void run(Work work) {
        std::vector<std::thread> threads;
        for (std::int32_t rank = 0; rank < size_; ++rank) {
            threads.emplace_back([rank, work] { work(rank); });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
    }
    void meet() {
        std::unique_lock<std::mutex> lock(mutex_);
        const std::int64_t meeting = meetings_;
        if (++arrived_ == size_) {
            arrived_ = 0;
            ++meetings_;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return meetings_ != meeting; });
    }
    /// @p change by each, one after the other, then everyone goes on.
    template <class Change>
    void each(Change change) {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            change();
        }
        meet();
    }
    [[nodiscard]] std::int32_t size() const { return size_; }
    std::mutex& mutex() { return mutex_; }

    detail::tally sum{};
    std::int64_t number = 0;
    std::vector<std::uint32_t> numbers; ///< of each rank
    std::vector<std::uint64_t> weights = std::vector<std::uint64_t>(std::size_t{1} << DigitBits);
    std::vector<detail::collected_block> collected;
    detail::cut_result told{};

  private:
    std::int32_t size_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::int32_t arrived_ = 0;
    std::int64_t meetings_ = 0;
};

/// One thread of them. Finds the cut among up to @p Capacity collected blocks, with bins of @p DigitBits
/// binary digits.
template <std::int32_t DigitBits, std::int32_t Capacity, std::int32_t Held>
class thread_team {
  public:
    static constexpr std::int32_t digit_bits = DigitBits;
    static constexpr std::int32_t capacity = Capacity;
    static constexpr std::int32_t held_blocks = Held;
    using crew = thread_crew<DigitBits>;

    thread_team(crew& others, std::int32_t rank)
        : crew_(others)
        , rank_(rank) {}

    std::int32_t rank() const { return rank_; }
    std::int32_t size() const { return crew_.size(); }
    std::int32_t near_rank() const { return rank_; }
    std::int32_t near_size() const { return crew_.size(); }
    std::int32_t group_rank() const { return rank_; }
    void sync() const { crew_.meet(); }
    std::int32_t count(bool mine) const { return static_cast<std::int32_t>(sum(mine ? 1 : 0)); }
    detail::tally combine(const detail::tally& mine, bool with_free) const {
        clear([&] { crew_.sum = {}; });
        crew_.each([&] {
            detail::tally& all = crew_.sum;
            const bool fits = all.mass < detail::tally::full && mine.mass < detail::tally::full &&
                              all.mass + mine.mass < detail::tally::full;
            all.mass = fits ? all.mass + mine.mass : detail::tally::full;
            all.free += mine.free;
            all.rows += mine.rows;
            all.blocks += mine.blocks;
            all.inside += mine.inside;
            all.bits = all.bits < mine.bits ? mine.bits : all.bits;
        });
        detail::tally all = crew_.sum;
        all.free = with_free ? all.free : 0x5555;
        return all;
    }
    void start_search(bool counts) {
        clear([&] {
            if (counts) {
                crew_.weights.assign(crew_.weights.size(), 0);
            }
            crew_.collected.clear();
            crew_.told = {};
        });
    }
    void add(std::uint32_t digit, std::uint32_t weight) {
        const std::lock_guard<std::mutex> lock(crew_.mutex());
        crew_.weights.at(digit) += weight;
    }
    template <class Need, class Meanwhile>
    detail::found_bin find(std::uint64_t, Need need_of, Meanwhile meanwhile) const {
        meanwhile();
        sync();
        detail::found_bin found;
        const std::uint32_t need = need_of(found);
        std::uint64_t above = 0;
        std::size_t digit = crew_.weights.size() - 1;
        while (digit > 0 && above + crew_.weights[digit] < need) {
            above += crew_.weights[digit--];
        }
        found.digit = static_cast<std::uint32_t>(digit);
        return found;
    }
    void collect(const detail::collected_block& block) {
        const std::lock_guard<std::mutex> lock(crew_.mutex());
        crew_.collected.push_back(block);
    }
    void gather(std::int32_t) const {}
    detail::collected_block collected(std::int32_t i) const {
        return crew_.collected.at(static_cast<std::size_t>(i));
    }
    std::int32_t share_bits(std::int32_t) const { return 0; }
    void sum_shares(detail::tally&, std::int32_t) const {}
    void tell(const detail::cut_result& result) { crew_.told = result; }
    detail::cut_result told() const {
        sync();
        return crew_.told;
    }

    // Of a team that writes lists.
    std::int64_t sum(std::int64_t mine) const {
        clear([&] { crew_.number = 0; });
        crew_.each([&] { crew_.number += mine; });
        return crew_.number;
    }
    std::uint32_t prefix(std::uint32_t mine, std::uint32_t& total) const {
        clear([&] { crew_.numbers.assign(static_cast<std::size_t>(size()), 0); });
        crew_.each([&] { crew_.numbers[static_cast<std::size_t>(rank_)] = mine; });
        std::uint32_t before = 0;
        total = 0;
        for (std::int32_t i = 0; i < size(); ++i) {
            const std::uint32_t one = crew_.numbers[static_cast<std::size_t>(i)];
            before += i <= rank_ ? one : 0;
            total += one;
        }
        return before;
    }

  private:
    /// Once everyone has read what was there.
    template <class Clear>
    void clear(Clear work) const {
        sync();
        if (rank_ == 0) {
            work();
        }
        sync();
    }

    crew& crew_;
    std::int32_t rank_;
};

} // namespace select_test
