// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "support/catch.hpp"

#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/selection.hpp>

#include <algorithm>
#include <random>
#include <set>
#include <vector>

namespace up = uniprefill;

TEST_CASE("selection: keep all names counts and touches no array") {
    const auto all = up::selection::keep_all(3, 5, 100, up::memory_space::device);
    CHECK(all.identity);
    CHECK(all.space == up::memory_space::device);
    CHECK(all.num_requests == 3);
    CHECK(all.num_segments == 5);
    CHECK(all.num_rows == 100);
    CHECK(all.kept_bound == 100);
    CHECK(all.keep_bits == nullptr);
    CHECK(all.keeps_block(1000000));
}

TEST_CASE("selection: carved arrays fit the limits, apart from each other") {
    up::limits bounds;
    bounds.max_requests = 3;
    bounds.max_segments = 5;
    bounds.max_rows = 1000;
    bounds.block_rows = 64;
    up::workspace counting;
    CHECK(up::selection::carve(counting, bounds, up::memory_space::host).keep_bits == nullptr);
    std::vector<unsigned char> storage(counting.bytes_used() + up::workspace::alignment);
    auto* data = storage.data();
    while (reinterpret_cast<std::uintptr_t>(data) % up::workspace::alignment != 0) {
        ++data;
    }
    up::workspace memory(data, counting.bytes_used());
    const auto made = up::selection::carve(memory, bounds, up::memory_space::host);
    CHECK_FALSE(made.identity);
    CHECK(made.block_rows == 64);
    // Each array written in full with its own number: none tramples another.
    const std::int64_t words = (bounds.max_blocks() + 31) / 32;
    std::fill_n(made.keep_bits, words, 1u);
    std::fill_n(made.kept_to_old, 1000, 2);
    std::fill_n(made.old_to_kept, 1000, 3);
    std::fill_n(made.cu_seqlens, 4, 4);
    std::fill_n(made.cu_segments, 6, 5);
    std::fill_n(made.outcomes, 5, up::segment_outcome{});
    CHECK(made.keep_bits[words - 1] == 1u);
    CHECK(made.kept_to_old[999] == 2);
    CHECK(made.old_to_kept[999] == 3);
    CHECK(made.cu_seqlens[3] == 4);
    CHECK(made.cu_segments[5] == 5);
    CHECK(made.outcomes[4].cut_block == -1);
}

TEST_CASE("selection: knows the limits that it was carved for") {
    up::limits bounds;
    bounds.max_requests = 3;
    bounds.max_segments = 5;
    bounds.max_rows = 1000;
    up::workspace counting;
    const auto made = up::selection::carve(counting, bounds, up::memory_space::host);
    CHECK(made.holds(bounds));
    up::limits smaller = bounds;
    smaller.max_rows = 10;
    CHECK(made.holds(smaller));
    for (std::int32_t field = 0; field < 4; ++field) {
        up::limits larger = bounds;
        larger.max_requests += field == 0 ? 1 : 0;
        larger.max_segments += field == 1 ? 1 : 0;
        larger.max_rows += field == 2 ? 1 : 0;
        larger.block_rows = field == 3 ? 32 : 64; // more blocks
        CHECK_FALSE(made.holds(larger));
    }
}

TEST_CASE("selection: bits by block") {
    std::uint32_t bits[] = {0x80000001u, 0x00000002u};
    up::selection made;
    made.identity = false;
    made.keep_bits = bits;
    std::set<std::int64_t> kept;
    for (std::int64_t b = 0; b < 64; ++b) {
        if (made.keeps_block(b)) {
            kept.insert(b);
        }
    }
    CHECK(kept == std::set<std::int64_t>{0, 31, 33});
}

TEST_CASE("keep_reason: names, and which are faults") {
    std::set<std::string> names;
    for (const std::int32_t reason : {0, 1, 2, 3, 4, 5, 64, 65, 66, 67, 68, 69, 70}) {
        const auto value = static_cast<up::keep_reason>(reason);
        names.insert(up::to_string(value));
        CHECK(up::is_fault(value) == (reason >= 64));
    }
    CHECK(names.size() == 13);
    CHECK(names.count("unknown reason") == 0);
}

TEST_CASE("mass_format: a segment's sum stays below 2^62, and rounding a little up doesn't break that") {
    for (const std::int32_t heads : {1, 2, 3, 9, 32, 127, 128, 1024, 65536}) {
        for (const std::int32_t observations : {1, 2, 100, 128, 512}) {
            up::limits bounds;
            bounds.num_heads = heads;
            bounds.num_observations = observations;
            const std::int32_t bits = up::mass_format::of(bounds).fraction_bits;
            const std::int64_t probabilities = std::int64_t{heads} * observations;
            CHECK(bits >= 30); // enough to tell shares of long prompts apart
            CHECK(probabilities <= (((std::int64_t{1} << 62) - 1) >> bits));
            // The format follows from the heads of all ranks, whatever a rank holds.
            up::limits rank = bounds;
            rank.num_heads = 1;
            rank.num_global_heads = heads;
            CHECK(up::mass_format::of(rank).fraction_bits == bits);
        }
    }
    CHECK(up::mass_format{4}.to_double(24) == 1.5);
}

TEST_CASE("mass_view: one buffer holds all that ranks reduce") {
    up::limits bounds;
    bounds.max_requests = 2;
    bounds.max_segments = 3;
    bounds.max_rows = 500;
    std::vector<std::int64_t> buffer(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)));
    const auto view = up::mass_view::over(buffer.data(), bounds, up::memory_space::host);
    CHECK(view.num_blocks == 500 / 64 + 3);
    CHECK(view.num_segments == 3);
    CHECK(view.free == buffer.data());
    CHECK(view.forced == view.free + view.num_blocks);
    CHECK(view.faults == view.forced + view.num_blocks);
    CHECK(view.faults + view.num_segments == buffer.data() + buffer.size());
}

TEST_CASE("fault words: added or maximised over ranks, a fault stays a fault") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (std::int32_t i = 0; i < 1000; ++i) {
        std::int64_t sum = 0;
        std::int64_t largest = 0;
        bool faulty = false;
        for (std::int32_t rank = 0; rank < 64; ++rank) {
            if (random() % 64 == 0) {
                const std::int64_t word = up::fault_word(static_cast<up::mass_fault>(random() % 4));
                CHECK(word != 0);
                sum += word;
                largest = largest > word ? largest : word;
                faulty = true;
            }
        }
        CHECK((sum != 0) == faulty);
        CHECK((largest != 0) == faulty);
    }
}
