// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The order in which rows move in place, with threads of the host as workers: every row comes from where the
// map says, whatever the number of workers, and the words that tell of pieces serve many times over.

#include "support/catch.hpp"

#include "tensors.hpp"

#include <uniprefill/propagate/detail/piece_order.hpp>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <thread>
#include <vector>

using namespace propagate_test;
using up::detail::piece_order;

namespace {

/// Everything in one order, so that no fence is needed (ThreadSanitizer knows none).
struct host_words {
    static constexpr std::uint32_t at_once = 3;

    static std::uint32_t load(const std::uint32_t* word) { return __atomic_load_n(word, __ATOMIC_SEQ_CST); }
    static void flip(std::uint32_t* word, std::uint32_t bits) {
        __atomic_fetch_xor(word, bits, __ATOMIC_SEQ_CST);
    }
    static void raise(std::uint32_t* word, std::uint32_t value) {
        std::uint32_t now = load(word);
        while (now < value &&
               !__atomic_compare_exchange_n(word, &now, value, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
        }
    }
    static std::uint32_t count_whole(const std::uint32_t* read, std::uint32_t group) {
        std::uint32_t count = 0;
        while (count < at_once &&
               load(&read[(group + count) % piece_order::ring]) == piece_order::whole(group + count)) {
            ++count;
        }
        return count;
    }
    static void pause() { std::this_thread::yield(); }
};
using host_reader = up::detail::piece_reader<host_words>;

/// One worker: pieces of @p at_once rows, each row a number.
void work(piece_order& order, const std::vector<std::int32_t>& map, std::int32_t kept, std::int32_t at_once,
          std::vector<std::int32_t>& rows, unsigned seed) {
    std::mt19937 random(seed);
    host_reader reader(&order);
    std::vector<std::int32_t> held;
    const auto pieces = static_cast<std::uint32_t>((kept + at_once - 1) / at_once);
    for (;;) {
        const std::uint32_t piece = __atomic_fetch_add(&order.next_ticket, 1u, __ATOMIC_RELAXED);
        if (piece >= pieces) {
            return;
        }
        const std::int32_t begin = static_cast<std::int32_t>(piece) * at_once;
        const std::int32_t end = std::min(begin + at_once, kept);
        if (random() % 64 == 0) {
            std::this_thread::yield();
        }
        held.clear();
        for (std::int32_t row = begin; row < end; ++row) {
            held.push_back(rows[static_cast<std::size_t>(map[static_cast<std::size_t>(row)])]);
        }
        reader.tell(piece);
        std::int32_t first = 32;
        for (std::int32_t probe = 31; probe >= 0; --probe) {
            const std::int32_t row = up::detail::probe_row(probe, end);
            first = map[static_cast<std::size_t>(row)] >= end ? probe : first;
        }
        const auto needed =
            static_cast<std::uint32_t>((up::detail::rows_by_probes(first, end) + at_once - 1) / at_once);
        reader.wait(std::min(needed, piece));
        std::copy(held.begin(), held.end(), rows.begin() + begin);
    }
}

} // namespace

TEST_CASE("piece_order: workers move rows in place") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (const unsigned workers : {1u, 2u, 5u, 9u}) {
        for (const std::int32_t keep : {5, 50, 95, 99, 100}) { // of 100
            for (const std::int32_t at_once : {1, 3}) {
                // More pieces than there are words and bits for.
                const std::int32_t total =
                    at_once == 1 ? static_cast<std::int32_t>(3 * piece_order::ring * piece_order::group)
                                 : 5000;
                std::vector<std::int32_t> rows, map;
                for (std::int32_t row = 0; row < total; ++row) {
                    rows.push_back(row);
                    if (static_cast<std::int32_t>(random() % 100) < keep) {
                        map.push_back(row);
                    }
                }
                INFO(workers << " workers, " << map.size() << " of " << total << " rows, " << at_once
                             << " at once");
                const auto order = std::make_unique<piece_order>();
                std::vector<std::thread> threads;
                for (unsigned w = 0; w < workers; ++w) {
                    threads.emplace_back(work, std::ref(*order), std::cref(map),
                                         static_cast<std::int32_t>(map.size()), at_once, std::ref(rows), w);
                }
                for (std::thread& thread : threads) {
                    thread.join();
                }
                rows.resize(map.size());
                REQUIRE(rows == map);
                const auto pieces = static_cast<std::uint32_t>(
                    (map.size() + static_cast<std::size_t>(at_once) - 1) / static_cast<std::size_t>(at_once));
                CHECK(order->frontier <= pieces / std::uint32_t{piece_order::group});
                CHECK(host_reader(order.get()).look(pieces));
                CHECK_FALSE(host_reader(order.get()).look(pieces + 1));
            }
        }
    }
}

TEST_CASE("piece_order: what is known of pieces told in any order") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 1);
    const auto order = std::make_unique<piece_order>();
    constexpr std::uint32_t window = 500;
    constexpr std::uint32_t total = 2 * piece_order::ring * piece_order::group + 12345;
    std::vector<std::uint32_t> waiting; // drawn, not told
    std::uint32_t drawn = 0;
    host_reader teller(order.get());
    for (std::uint32_t step = 0; drawn < total || !waiting.empty(); ++step) {
        while (drawn < total && waiting.size() < window) {
            waiting.push_back(drawn++);
        }
        const std::size_t one = random() % (random() % 2 == 0 ? waiting.size() : 1);
        teller.tell(waiting[one]);
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(one));
        if (step % 16 == 0) {
            const std::uint32_t told = waiting.empty() ? drawn : waiting.front(); // all below
            host_reader fresh(order.get());
            const std::uint32_t needed = told - std::min(told, static_cast<std::uint32_t>(random() % 40));
            REQUIRE(fresh.look(needed));
            REQUIRE(fresh.look(needed)); // and again from what it knows
            if (!waiting.empty()) {
                REQUIRE_FALSE(fresh.look(told + 1));
                REQUIRE_FALSE(fresh.look(told + 100));
                REQUIRE_FALSE(teller.look(drawn));
            }
        }
    }
    host_reader fresh(order.get());
    CHECK_FALSE(fresh.knows(1));
    CHECK(fresh.look(total));
    CHECK(fresh.knows(total / piece_order::group * piece_order::group));
}

TEST_CASE("piece_order: a word isn't used again before its pieces are read") {
    const auto order = std::make_unique<piece_order>();
    constexpr std::uint32_t around = piece_order::ring * piece_order::group;
    host_reader reader(order.get());
    for (std::uint32_t piece = 0; piece < around; ++piece) {
        if (piece != 5) {
            reader.tell(piece);
        }
    }
    const std::uint32_t before = host_words::load(&order->read[0]);
    CHECK(before == ~(1u << 5));
    std::thread ahead([&] { host_reader(order.get()).tell(around); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    const std::uint32_t meanwhile = host_words::load(&order->read[0]);
    reader.tell(5);
    ahead.join();
    CHECK(meanwhile == before);
    CHECK(order->read[0] == ~1u);
    CHECK(order->frontier == around / std::uint32_t{piece_order::group});
    CHECK(reader.look(around + 1));
    CHECK_FALSE(reader.look(around + 2));
}
