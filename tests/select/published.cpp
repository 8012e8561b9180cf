// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The rule of the released implementation, lane by lane as its kernel goes about it (a power of two of lanes,
// a score and an index in one word, words sorted downwards), but with exact sums. published_top_p() must give
// the same mask for the same block scores.

#include "support/catch.hpp"

#include "naive.hpp"

#include <functional>

using namespace select_test;

namespace {

/// Which of @p rows rows stay, for block scores below 2^32 and p < 1.
std::vector<bool> released_mask(const std::vector<std::int64_t>& scores, up::unit_fraction p,
                                std::int32_t rows, std::int32_t block_rows, std::int32_t sink,
                                std::int32_t last_queries) {
    std::size_t lanes = 1;
    while (lanes < scores.size()) {
        lanes *= 2;
    }
    std::int64_t total = 0;
    std::vector<std::uint64_t> words;
    for (std::size_t lane = 0; lane < lanes; ++lane) {
        const std::int64_t score = lane < scores.size() ? scores[lane] : 0; // padding lanes score 0
        total += score;
        words.push_back(static_cast<std::uint64_t>(score) << 32 | lane);
    }
    std::sort(words.begin(), words.end(), std::greater<>());
    std::vector<bool> block_stays(scores.size(), false);
    std::int64_t before = 0;
    for (std::size_t rank = 0; rank < scores.size(); ++rank) { // ranks beyond the blocks are never stored
        const auto score = static_cast<std::int64_t>(words[rank] >> 32);
        const auto block = static_cast<std::size_t>(words[rank] & 0xffffffffu);
        if (rank == 0 || compare_share(before, p, total) <= 0) {
            if (block < scores.size()) {
                block_stays[block] = true;
            }
        }
        before += score;
    }
    std::vector<bool> mask;
    for (std::int32_t row = 0; row < rows; ++row) {
        mask.push_back(block_stays[static_cast<std::size_t>(row / block_rows)] || row < sink ||
                       row >= rows - last_queries);
    }
    return mask;
}

} // namespace

TEST_CASE("published_top_p: the mask of the released rule") {
    generator random(uniprefill_test::seed() + 10);
    constexpr double shares[] = {1e-9, 0.25, 0.5, 0.75, 0.875, 0.975, 0.98, 0.99, 0.9999};
    std::int32_t differs_from_minimal = 0;
    for (std::int32_t i = 0; i < 4000; ++i) {
        const std::int32_t g = random.chance(2) ? 8 : 64;
        const auto rows = static_cast<std::int32_t>(1 + random.below(40 * g));
        const auto sink = static_cast<std::int32_t>(random.below(2 * g));
        const auto last = static_cast<std::int32_t>(1 + random.below(2 * g));
        const double share = shares[random.below(9)];
        step what(g);
        what.add_request(rows, {1, sink, last, 0}, up::selection_rule::published_top_p(share));
        what.close();
        const std::int64_t largest = random.chance(2) ? 4 : std::int64_t{1} << (1 + random.below(31));
        std::vector<std::int64_t> scores;
        std::int64_t total = 0;
        for (std::int32_t b = 0; b < what.blocks_of(0); ++b) {
            scores.push_back(random.chance(3) ? 0 : random.below(largest));
            total += scores.back();
            // How a block's score is shared between forced and free rows must not matter.
            what.free_mass(0, b) = random.below(scores.back() + 1);
            what.forced_mass(0, b) = scores.back() - what.free_mass(0, b);
        }
        if (total == 0 || rows <= sink + last) {
            continue; // the released rule divides by zero, or keeps everything as ours does
        }
        const std::vector<bool> wanted =
            released_mask(scores, up::unit_fraction::from(share), rows, g, sink, last);
        const auto made = select(what);
        REQUIRE(made->result.ok());
        INFO("case " << i << ", " << rows << " rows of blocks of " << g << ", p " << share);
        for (std::int32_t row = 0; row < rows; ++row) {
            REQUIRE(made->keeps(row) == wanted[static_cast<std::size_t>(row)]);
        }
        what.rules[0] = up::selection_rule::top_p(share, up::mass_scope::all);
        differs_from_minimal += select(what)->rows() != made->rows() ? 1 : 0;
    }
    CHECK(differs_from_minimal > 100); // the options matter in these cases
}
