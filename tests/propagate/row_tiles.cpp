// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The arithmetic that host and device share: tiles of rows, what must be read before a tile is overwritten in
// place, and the composition of row maps.

#include "support/catch.hpp"

#include "tensors.hpp"

#include <uniprefill/propagate/detail/row_composition.hpp>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <algorithm>
#include <cstdint>
#include <random>

using namespace propagate_test;

TEST_CASE("row_divider: the quotient of every kind of number") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    const auto check = [](std::uint32_t divisor, std::uint32_t number) {
        INFO(number << " / " << divisor);
        REQUIRE(up::detail::row_divider::by(divisor).quotient(number) == number / divisor);
    };
    for (std::uint32_t i = 0; i < 20000; ++i) {
        const std::uint32_t divisor =
            std::max<std::uint32_t>(1, static_cast<std::uint32_t>(random()) >> (1 + i % 31));
        const std::uint32_t multiple = (static_cast<std::uint32_t>(random()) >> 1) / divisor * divisor;
        for (const std::uint32_t number :
             {multiple, multiple - (multiple > 0 ? 1 : 0), std::uint32_t{0}, divisor - 1,
              std::min<std::uint32_t>(divisor, INT32_MAX), std::uint32_t{INT32_MAX}}) {
            check(divisor, number);
        }
    }
    for (std::uint32_t divisor = 1; divisor <= 64; ++divisor) {
        for (std::uint32_t number = 0; number < 4096; ++number) {
            check(divisor, number);
        }
    }
}

TEST_CASE("tiles: every word of every row is in one tile, in order") {
    for (const std::int32_t words : {1, 3, 512, 2048, 5000}) {
        for (const std::int32_t rows : {0, 1, 7, 2049}) {
            constexpr std::int32_t tile_words = 2048;
            const std::int64_t tiles = up::detail::tiles_of(rows, words, tile_words);
            REQUIRE(tiles * tile_words >= std::int64_t{rows} * words);
            REQUIRE((tiles - 1) * tile_words < std::int64_t{rows} * words);
            for (std::int64_t tile = 0; tile < tiles; ++tile) {
                const auto start = up::detail::start_of(tile, words, tile_words);
                REQUIRE(start.row * words + start.word == tile * tile_words);
                REQUIRE(start.word < static_cast<std::uint32_t>(words));
            }
        }
    }
    // 2 million rows of 2^30 words: more than 32 bits everywhere.
    const auto far = up::detail::start_of(std::int64_t{1} << 40, 1 << 30, 2048);
    CHECK(far.row == std::int64_t{1} << 21);
    CHECK(far.word == 0);
}

TEST_CASE("moved_tensor: the widest word that addresses, strides and rows allow") {
    alignas(64) static unsigned char memory[256];
    const auto word = [](std::int64_t offset, std::int64_t stride, std::int64_t bytes) {
        const up::byte_rows aligned{memory, 64, bytes, 2};
        const up::byte_rows other{memory + offset, stride, bytes, 2};
        CHECK(up::detail::moved(aligned, other).word_bytes == up::detail::moved(other, aligned).word_bytes);
        const auto moved = up::detail::moved(other, aligned);
        CHECK(moved.words * moved.word_bytes == bytes);
        return moved.word_bytes;
    };
    CHECK(word(16, 48, 32) == 16);
    CHECK(word(8, 48, 32) == 4);
    CHECK(word(16, 40, 32) == 4);
    CHECK(word(16, 48, 24) == 4);
    CHECK(word(16, 48, 30) == 2);
    CHECK(word(2, 48, 32) == 2);
    CHECK(word(16, 48, 33) == 1);
    CHECK(word(16, 49, 32) == 1);
    CHECK(word(1, 48, 32) == 1);
}

TEST_CASE("probes: no row beyond the bound is read from where it goes") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()) + 1);
    std::int64_t spared = 0;
    for (std::int32_t i = 0; i < 300; ++i) {
        const auto rows = static_cast<std::int32_t>(1 + random() % 500);
        const keep_set kept(random_keeps(random, rows), {0, rows});
        for (std::int32_t end = 0; end <= kept.kept(); ++end) {
            std::int32_t first = 32;
            for (std::int32_t probe = 31; probe >= 0; --probe) {
                const std::int32_t row = up::detail::probe_row(probe, end);
                REQUIRE((row < end || end == 0));
                if (row < end && kept.kept_to_old[static_cast<std::size_t>(row)] >= end) {
                    first = probe;
                }
            }
            const std::int32_t bound = up::detail::rows_by_probes(first, end);
            REQUIRE(bound <= end);
            for (std::int32_t row = bound; row < kept.kept(); ++row) {
                REQUIRE(kept.kept_to_old[static_cast<std::size_t>(row)] >= end);
            }
            spared += end - bound;
        }
    }
    CHECK(spared > 0);
}

TEST_CASE("row_composition: maps, padding and entries that make no sense") {
    const std::int32_t kept_to_old[] = {1, -7, 3, 9, INT32_MIN, 2};
    const std::int32_t rows_before[] = {10, 11, 12, 13};
    const std::int32_t positions_before[] = {100, 101, 102, 103};
    std::int32_t rows[6];
    std::int32_t positions[6];
    up::detail::row_composition work;
    work.kept_to_old = kept_to_old;
    work.rows_before = rows_before;
    work.positions_before = positions_before;
    work.rows = rows;
    work.positions = positions;
    work.num_rows = 4;
    work.bound = 6;
    const std::int32_t wanted_rows[] = {11, -1, 13, -1, -1, -1};
    const std::int32_t wanted_positions[] = {101, 0, 103, 0, 0, 0};
    for (std::int32_t row = 0; row < 6; ++row) {
        work.compose_row(row, 5);
    }
    CHECK(std::equal(rows, rows + 6, wanted_rows));
    CHECK(std::equal(positions, positions + 6, wanted_positions));
    work.rows_before = nullptr;
    work.compose_row(0, 5);
    CHECK(rows[0] == 1);
    CHECK(up::detail::clamp_to(-1, 5) == 0);
    CHECK(up::detail::clamp_to(5, 5) == 5);
    CHECK(up::detail::clamp_to(INT32_MAX, 5) == 5);
    CHECK(up::detail::clamp_to(3, 5) == 3);
}

TEST_CASE("moved_row_search: the first row that a map moves") {
    for (const std::int32_t probes : {2, 32, 256}) {
        for (const std::int32_t rows : {0, 1, 2, 31, 257, 4096, 70000, INT32_MAX}) {
            for (const std::int32_t first : {0, 1, 2, 30, 255, 256, 4095, 4096, 69999, INT32_MAX - 1}) {
                const std::int32_t expected = std::min(first, rows);
                INFO(probes << " probes, " << rows << " rows, moved from " << expected << " on");
                up::detail::moved_row_search search{probes, 0, rows};
                std::int32_t rounds = 0;
                while (!search.is_done()) {
                    REQUIRE(++rounds <= 64);
                    std::int32_t stay = 0;
                    for (std::int32_t i = 0; i < probes; ++i) {
                        const std::int32_t row = search.probe(i);
                        REQUIRE(row < rows);
                        stay += row >= 0 && row < expected ? 1 : 0;
                    }
                    search.narrow(stay);
                }
                REQUIRE(search.begin == expected);
            }
        }
    }
}
