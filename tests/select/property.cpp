// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Random steps against the plain retelling in naive.hpp, and what must hold of any selection.

#include "support/catch.hpp"

#include "naive.hpp"

#include <thread>

using namespace select_test;

namespace {

constexpr std::int32_t cases = 6000;

void check_outcome(const up::segment_outcome& came, const up::segment_outcome& wanted) {
    CHECK(up::to_string(came.reason) == std::string(up::to_string(wanted.reason)));
    CHECK(came.rows == wanted.rows);
    CHECK(came.kept == wanted.kept);
    CHECK(came.total_mass == wanted.total_mass);
    CHECK(came.dropped_mass == wanted.dropped_mass);
    CHECK(came.cut_block == wanted.cut_block);
    CHECK(came.cut_rows == wanted.cut_rows);
}

/// Row maps, offsets, bits and bounds of a selection agree with each other and with the kept rows.
void check_maps(step& what, const decision& made, const std::vector<std::int32_t>& kept,
                std::int64_t places) {
    const up::selection& out = made.out;
    REQUIRE_FALSE(out.identity);
    REQUIRE(out.num_requests == what.num_requests());
    REQUIRE(out.num_segments == what.num_segments());
    REQUIRE(out.num_rows == static_cast<std::int32_t>(what.positions.size()));
    REQUIRE(out.kept_bound == std::min<std::int64_t>(places, what.bounds.max_rows));
    REQUIRE(made.rows() == kept);
    for (std::int32_t j = static_cast<std::int32_t>(kept.size()); j < out.kept_bound; ++j) {
        REQUIRE(out.kept_to_old[j] == -1);
    }
    std::int32_t next = 0;
    for (std::int32_t row = 0; row < out.num_rows; ++row) {
        const bool stays = std::binary_search(kept.begin(), kept.end(), row);
        REQUIRE(out.old_to_kept[row] == (stays ? next : -1));
        next += stays ? 1 : 0;
    }
    const auto kept_before = [&](std::int32_t row) {
        return static_cast<std::int32_t>(std::lower_bound(kept.begin(), kept.end(), row) - kept.begin());
    };
    for (std::int32_t r = 0; r <= out.num_requests; ++r) {
        REQUIRE(out.cu_seqlens[r] == kept_before(what.cu_seqlens[static_cast<std::size_t>(r)]));
    }
    std::int64_t bits = 0;
    for (std::int32_t s = 0; s <= out.num_segments; ++s) {
        REQUIRE(out.cu_segments[s] == kept_before(what.cu_segments[static_cast<std::size_t>(s)]));
    }
    for (std::int32_t s = 0; s < out.num_segments; ++s) {
        for (std::int32_t b = 0; b < what.blocks_of(s); ++b) {
            const std::int32_t from = what.begin(s) + b * out.block_rows;
            const std::int32_t to = std::min(what.end(s), from + out.block_rows);
            const bool complete = kept_before(to) - kept_before(from) == to - from;
            REQUIRE(out.keeps_block(up::block_offset(s, what.begin(s), out.block_rows) + b) == complete);
            bits += complete ? 1 : 0;
        }
    }
    for (std::int64_t i = 0; i < what.bounds.max_blocks(); ++i) {
        bits -= out.keeps_block(i) ? 1 : 0;
    }
    REQUIRE(bits == 0); // no bit but those of blocks
}

/// The sentence in core/selection.hpp that says when a row is kept.
void check_row_rule(step& what, const decision& made, std::int32_t segment) {
    const up::segment_outcome& told = made.outcome(segment);
    const up::batch_view batch = what.batch();
    std::int32_t cut_rows = 0;
    for (std::int32_t row = what.begin(segment); row < what.end(segment); ++row) {
        const std::int32_t block = (row - what.begin(segment)) / what.bounds.block_rows;
        const bool forced = up::is_forced_row(batch, segment, row);
        bool stays =
            forced || made.out.keeps_block(
                          up::block_offset(segment, what.begin(segment), what.bounds.block_rows) + block);
        if (!forced && block == told.cut_block && cut_rows < told.cut_rows) {
            ++cut_rows;
            stays = true;
        }
        REQUIRE(made.keeps(row) == stays);
    }
}

} // namespace

TEST_CASE("select: random steps are decided as told plainly") {
    generator random(uniprefill_test::seed());
    std::int32_t seen[80] = {};
    std::int32_t cuts = 0;
    for (std::int32_t i = 0; i < cases; ++i) {
        step what = random_step(random);
        const auto made = select(what);
        INFO("case " << i);
        REQUIRE(made->result.ok());
        std::vector<std::int32_t> kept;
        std::int64_t places = 0;
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            INFO("segment " << s);
            const naive_outcome wanted = naive_decision(what, s);
            check_outcome(made->outcome(s), wanted.told);
            kept.insert(kept.end(), wanted.kept.begin(), wanted.kept.end());
            places += wanted.places;
            if (wanted.told.reason != up::keep_reason::rerun_dense) {
                check_row_rule(what, *made, s);
            }
            if (wanted.told.rows > 0) {
                REQUIRE(wanted.told.kept > 0);
            }
            ++seen[static_cast<std::int32_t>(wanted.told.reason)];
            cuts += wanted.told.cut_block >= 0 ? 1 : 0;
        }
        check_maps(what, *made, kept, places);
    }
    // The cases reach every reason, often.
    for (const std::int32_t reason : {0, 1, 2, 3, 4, 5, 64, 65, 66, 67, 68, 69}) {
        INFO(up::to_string(static_cast<up::keep_reason>(reason)));
        CHECK(seen[reason] > 30);
    }
    CHECK(cuts > 300);
}

TEST_CASE("select: a segment is decided alike alone and among others") {
    generator random(uniprefill_test::seed() + 1);
    for (std::int32_t i = 0; i < 500; ++i) {
        step what = random_step(random);
        const auto together = select(what);
        REQUIRE(together->result.ok());
        for (std::int32_t r = 0; r < what.num_requests(); ++r) {
            const auto request = static_cast<std::size_t>(r);
            step alone(what.bounds.block_rows);
            std::vector<std::int32_t> segments;
            std::int32_t first = -1;
            for (std::int32_t s = 0; s < what.num_segments(); ++s) {
                if (what.segment_request[static_cast<std::size_t>(s)] == r) {
                    first = first < 0 ? s : first;
                    segments.push_back(what.rows_of(s));
                }
            }
            alone.add_request(segments,
                              {what.positions.begin() + what.cu_seqlens[request],
                               what.positions.begin() + what.cu_seqlens[request + 1]},
                              {what.spans.begin() + what.span_offsets[request],
                               what.spans.begin() + what.span_offsets[request + 1]},
                              what.options[request], what.rules[request], what.tags[request]);
            alone.close();
            for (std::int32_t s = 0; s < alone.num_segments(); ++s) {
                for (std::int32_t b = 0; b < alone.blocks_of(s); ++b) {
                    alone.free_mass(s, b) = what.free_mass(first + s, b);
                    alone.forced_mass(s, b) = what.forced_mass(first + s, b);
                }
                alone.fault(s) = what.fault(first + s);
            }
            const auto apart = select(alone);
            REQUIRE(apart->result.ok());
            for (std::int32_t s = 0; s < alone.num_segments(); ++s) {
                check_outcome(apart->outcome(s), together->outcome(first + s));
            }
            for (std::int32_t row = 0; row < what.cu_seqlens[request + 1] - what.cu_seqlens[request]; ++row) {
                REQUIRE(apart->keeps(row) == together->keeps(what.cu_seqlens[request] + row));
            }
        }
    }
}

TEST_CASE("select: one selector serves several threads") {
    generator random(uniprefill_test::seed() + 2);
    step what = random_step(random);
    while (what.positions.size() < 500) {
        what = random_step(random);
    }
    const up::block_selector<> selector(what.bounds);
    const auto expected = select(what);
    std::vector<std::unique_ptr<decision>> made;
    std::vector<std::thread> threads;
    for (std::int32_t t = 0; t < 4; ++t) {
        made.push_back(std::make_unique<decision>(what.bounds));
    }
    for (auto& mine : made) {
        threads.emplace_back([&] {
            memory scratch(selector.workspace_bytes());
            for (std::int32_t i = 0; i < 50; ++i) {
                mine->result = selector.run(what.masses(), what.batch(), what.rules.data(), mine->out,
                                            scratch.workspace(), {});
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    for (const auto& mine : made) {
        REQUIRE(mine->result.ok());
        REQUIRE(mine->rows() == expected->rows());
    }
}
