// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Each rule on masses small enough to work out by hand. Blocks of 8 rows.

#include "support/catch.hpp"

#include "step.hpp"

#include <cmath>

using namespace select_test;
using rows = std::vector<std::int32_t>;

namespace {

constexpr up::request_options nothing_forced{1, 0, 0, 0};

rows blocks(const std::vector<std::int32_t>& which) {
    rows made;
    for (const std::int32_t b : which) {
        for (std::int32_t i = 0; i < 8; ++i) {
            made.push_back(8 * b + i);
        }
    }
    return made;
}

std::unique_ptr<decision> decide(const std::vector<std::int64_t>& masses, const up::selection_rule& rule,
                                 const up::request_options& options = nothing_forced,
                                 std::int32_t length = -1) {
    step what(8);
    what.add_request(length >= 0 ? length : static_cast<std::int32_t>(8 * masses.size()), options, rule);
    what.close();
    what.set_free(0, masses);
    auto made = select(what);
    REQUIRE(made->result.ok());
    return made;
}

} // namespace

TEST_CASE("top_p: the fewest blocks that hold p of the mass") {
    const std::vector<std::int64_t> masses{10, 40, 20, 30};
    CHECK(decide(masses, up::selection_rule::top_p(0.5))->rows() == blocks({1, 3}));
    CHECK(decide(masses, up::selection_rule::top_p(0.375))->rows() == blocks({1}));
    CHECK(decide(masses, up::selection_rule::top_p(0.4))->rows() ==
          blocks({1, 3})); // the double is above 0.4
    CHECK(decide(masses, up::selection_rule::top_p(0.90625))->rows() == blocks({0, 1, 2, 3}));
    const auto made = decide(masses, up::selection_rule::top_p(0.875));
    CHECK(made->rows() == blocks({1, 2, 3}));
    CHECK(made->outcome().total_mass == 100);
    CHECK(made->outcome().dropped_mass == 10);
    CHECK(made->outcome().kept == 24);
    CHECK(made->outcome().reason == up::keep_reason::selected);
}

TEST_CASE("top_p: a sum that meets p exactly is enough, unless the published crossing is asked for") {
    const std::vector<std::int64_t> masses{1, 2, 4, 1};
    up::selection_rule rule = up::selection_rule::top_p(0.75);
    CHECK(decide(masses, rule)->rows() == blocks({1, 2}));
    rule.crossing = up::crossing::published;
    CHECK(decide(masses, rule)->rows() == blocks({0, 1, 2}));
}

TEST_CASE("top_p: ties go to the lower block, or the higher where asked") {
    const std::vector<std::int64_t> masses{5, 5, 5, 5};
    up::selection_rule rule = up::selection_rule::top_p(0.5);
    CHECK(decide(masses, rule)->rows() == blocks({0, 1}));
    rule.ties = up::tie_order::higher_block_first;
    CHECK(decide(masses, rule)->rows() == blocks({2, 3}));
}

TEST_CASE("top_p: tiny p keeps the heaviest block, p = 1 every row") {
    const std::vector<std::int64_t> masses{0, 7, 0, 1};
    CHECK(decide(masses, up::selection_rule::top_p(1e-18))->rows() == blocks({1}));
    const auto made = decide(masses, up::selection_rule::top_p(1));
    CHECK(made->rows() == blocks({0, 1, 2, 3}));
    CHECK(made->outcome().reason == up::keep_reason::everything);
    // The largest double below 1 leaves out the blocks that hold nothing.
    CHECK(decide(masses, up::selection_rule::top_p(std::nextafter(1.0, 0.0)))->rows() == blocks({1, 3}));
}

TEST_CASE("top_p: differences of one unit at 2^62 decide") {
    const std::int64_t half = std::int64_t{1} << 61;
    // 0.5 of 2^62 - 1 is 2^61 - 0.5, of 2^62 + 1 it is 2^61 + 0.5: no double tells these apart.
    CHECK(decide({half, half - 1}, up::selection_rule::top_p(0.5))->rows() == blocks({0}));
    CHECK(decide({half - 1, half}, up::selection_rule::top_p(0.5))->rows() == blocks({1}));
    CHECK(decide({half, half, 1}, up::selection_rule::top_p(0.5))->rows() == blocks({0, 1}));
    CHECK(decide({half, half - 1, 1}, up::selection_rule::top_p(0.5))->rows() == blocks({0}));
}

TEST_CASE("fixed_ratio: blocks, rounded up") {
    const std::vector<std::int64_t> masses{1, 5, 3, 4, 2};
    CHECK(decide(masses, up::selection_rule::fixed_ratio(0.4))->rows() ==
          blocks({1, 2, 3})); // 0.4 > 2/5 as a double
    CHECK(decide(masses, up::selection_rule::fixed_ratio(0.375))->rows() == blocks({1, 3}));
    CHECK(decide(masses, up::selection_rule::fixed_ratio(1e-9))->rows() == blocks({1}));
    CHECK(decide(masses, up::selection_rule::fixed_ratio(1))->outcome().reason ==
          up::keep_reason::everything);
}

TEST_CASE("max_fraction: blocks that weigh a share of the heaviest, equality included") {
    const std::vector<std::int64_t> masses{8, 2, 16, 4};
    CHECK(decide(masses, up::selection_rule::max_fraction(0.25))->rows() == blocks({0, 2, 3}));
    CHECK(decide(masses, up::selection_rule::max_fraction(0.2500001))->rows() == blocks({0, 2}));
    CHECK(decide(masses, up::selection_rule::max_fraction(1))->rows() == blocks({2}));
}

TEST_CASE("fixed_budget: every budget from 1 to more than the rows") {
    const std::vector<std::int64_t> masses{1, 9, 5};
    const up::request_options options{1, 2, 3, 0}; // rows 0, 1 and 17, 18, 19 of 20
    for (std::int32_t budget = 1; budget <= 21; ++budget) {
        INFO("budget " << budget);
        const auto made = decide(masses, up::selection_rule::fixed_budget(budget), options, 20);
        CHECK(made->outcome().kept == std::min(budget, 20));
        CHECK(made->out.kept_bound == std::min(budget, 20)); // max_rows is 20
        CHECK((made->outcome().reason == up::keep_reason::rerun_dense) == (budget < 5));
        CHECK((made->outcome().reason == up::keep_reason::everything) == (budget >= 20));
    }
    // Forced rows don't fit: the latest of them, and the output is void.
    CHECK(decide(masses, up::selection_rule::fixed_budget(4), options, 20)->rows() == rows{1, 17, 18, 19});
    // Forced rows and the first free rows of the heaviest block.
    const auto cut = decide(masses, up::selection_rule::fixed_budget(8), options, 20);
    CHECK(cut->rows() == rows{0, 1, 8, 9, 10, 17, 18, 19});
    CHECK(cut->outcome().cut_block == 1);
    CHECK(cut->outcome().cut_rows == 3);
    // 5 of 8 rows of mass 9 is 5.625: rounded up, and the two other blocks.
    CHECK(cut->outcome().dropped_mass == 6 + 1 + 5);
}

TEST_CASE("fixed_budget: the shape doesn't depend on the lengths") {
    for (const std::int32_t length : {0, 3, 40, 100}) {
        step what(8);
        what.add_request(length, nothing_forced, up::selection_rule::fixed_budget(16));
        what.add_request(64, nothing_forced, up::selection_rule::fixed_budget(24));
        what.add_request(1, nothing_forced, up::selection_rule::fixed_budget(24), up::request_tag::decode);
        what.close(40);
        for (std::int32_t s = 0; s < 2; ++s) {
            what.set_free(s, std::vector<std::int64_t>(static_cast<std::size_t>(what.blocks_of(s)), 1));
        }
        const auto made = select(what);
        REQUIRE(made->result.ok());
        CHECK(made->out.kept_bound == 16 + 24 + 1);
        CHECK(made->out.cu_seqlens[3] == std::min(length, 16) + 24 + 1);
        for (std::int32_t j = made->out.cu_seqlens[3]; j < made->out.kept_bound; ++j) {
            CHECK(made->out.kept_to_old[j] == -1);
        }
    }
}

TEST_CASE("fixed_budget: a fault keeps the budget's rows and says that the output is void") {
    const up::request_options options{1, 2, 3, 0};
    for (const bool fits : {false, true}) {
        step what(8);
        what.add_request(20, options, up::selection_rule::fixed_budget(fits ? 20 : 8));
        what.add_request(20, options, up::selection_rule::fixed_budget(8));
        what.close();
        what.set_free(0, {1, 9, 5});
        what.set_free(1, {1, 9, 5});
        what.fault(0) = up::fault_word(up::mass_fault::unscored);
        const auto made = select(what);
        REQUIRE(made->result.ok());
        CHECK(made->outcome(0).reason == (fits ? up::keep_reason::unscored : up::keep_reason::rerun_dense));
        const rows kept(made->out.kept_to_old, made->out.kept_to_old + made->out.cu_seqlens[1]);
        if (fits) {
            CHECK(kept.size() == 20);
        } else {
            CHECK(kept == rows{0, 1, 14, 15, 16, 17, 18, 19});
        }
        CHECK(made->outcome(1).reason == up::keep_reason::selected); // the neighbour is decided as ever
    }
}

TEST_CASE("min and max kept rows: whole blocks by rank, the last one cut, forced rows always") {
    const std::vector<std::int64_t> masses{1, 9, 5, 2};
    const up::request_options options{1, 2, 2, 0}; // rows 0, 1 and 30, 31
    up::selection_rule rule = up::selection_rule::top_p(0.5);
    CHECK(decide(masses, rule, options)->outcome().kept == 12);

    rule.min_kept_rows = 15;
    const auto more = decide(masses, rule, options);
    CHECK(more->rows() == rows{0, 1, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 30, 31});
    CHECK(more->outcome().cut_block == 2);
    CHECK(more->outcome().cut_rows == 3);

    rule.min_kept_rows = 1000;
    CHECK(decide(masses, rule, options)->outcome().reason == up::keep_reason::everything);

    rule.min_kept_rows = 0;
    rule.max_kept_rows = 7;
    CHECK(decide(masses, rule, options)->rows() == rows{0, 1, 8, 9, 10, 30, 31});
    rule.max_kept_rows = 3; // fewer than are forced
    const auto forced_only = decide(masses, rule, options);
    CHECK(forced_only->rows() == rows{0, 1, 30, 31});
    CHECK(forced_only->outcome().dropped_mass == 17);
    CHECK(forced_only->outcome().cut_block == -1);
}

TEST_CASE("scope: forced rows count or don't") {
    step what(8);
    const up::request_options options{1, 12, 0, 0}; // block 0 and half of block 1
    what.add_request(32, options, up::selection_rule::top_p(0.5, up::mass_scope::free));
    what.add_request(32, options, up::selection_rule::top_p(0.5, up::mass_scope::all));
    what.close();
    for (std::int32_t s = 0; s < 2; ++s) {
        what.set_free(s, {0, 3, 4, 2});
        what.forced_mass(s, 0) = 20;
        what.forced_mass(s, 1) = 1;
    }
    const auto made = select(what);
    REQUIRE(made->result.ok());
    CHECK(made->outcome(0).total_mass == 9);
    CHECK(made->outcome(0).kept == 12 + 4 + 8); // the rest of block 1, and block 2
    CHECK(made->outcome(0).dropped_mass == 2);
    CHECK(made->outcome(1).total_mass == 30);
    CHECK(made->outcome(1).kept == 12); // the sinks ate the budget
    CHECK(made->outcome(1).dropped_mass == 9);
    // The bit of a block says that all of its rows stay, whoever asked for them.
    CHECK(made->out.keeps_block(up::block_offset(1, 32, 8)));
    CHECK_FALSE(made->out.keeps_block(up::block_offset(1, 32, 8) + 1));
}

TEST_CASE("reasons: what is left alone, and why") {
    const up::selection_rule rule = up::selection_rule::top_p(0.5);
    step what(8);
    what.add_request(32, nothing_forced, rule, up::request_tag::decode);
    what.add_request(32, nothing_forced, rule, up::request_tag::verify);
    what.add_request(32, {0, 0, 0, 0}, rule);
    what.add_request(0, nothing_forced, rule);
    what.add_request(32, {1, 0, 0, 33}, rule);
    what.add_request(32, {1, 0, 0, 32}, rule);
    what.add_request(32, {1, 16, 16, 0}, rule);
    what.add_request(32, nothing_forced, rule, up::request_tag::chunk);
    what.add_request(32, nothing_forced, rule);
    what.close();
    for (std::int32_t s = 0; s < 8; ++s) {
        what.set_free(s, std::vector<std::int64_t>(static_cast<std::size_t>(what.blocks_of(s)), 1));
    }
    what.fault(0) = what.fault(4) =
        up::fault_word(up::mass_fault::unscored); // nothing was to be scored there
    const auto made = select(what);
    REQUIRE(made->result.ok());
    using reason = up::keep_reason;
    const reason wanted[] = {reason::not_prefill,   reason::not_prefill,   reason::switched_off,
                             reason::empty,         reason::short_segment, reason::selected,
                             reason::short_segment, reason::selected,      reason::zero_mass};
    for (std::int32_t s = 0; s < 9; ++s) {
        INFO("segment " << s);
        CHECK(up::to_string(made->outcome(s).reason) == std::string(up::to_string(wanted[s])));
        CHECK(made->outcome(s).kept == (wanted[s] == reason::selected ? 16 : what.rows_of(s)));
    }
}

TEST_CASE("reasons: each fault keeps its own segment whole and no other") {
    const std::pair<up::mass_fault, up::keep_reason> faults[] = {
        {up::mass_fault::non_finite, up::keep_reason::non_finite},
        {up::mass_fault::unscored, up::keep_reason::unscored},
        {up::mass_fault::overflow, up::keep_reason::overflow},
        {up::mass_fault::rank, up::keep_reason::rank},
    };
    for (const auto& [fault, reason] : faults) {
        for (const std::int64_t ranks : {1, 8, 65535}) { // words of all ranks, added
            for (std::int32_t faulty = 0; faulty < 3; ++faulty) {
                step what(8);
                for (std::int32_t s = 0; s < 3; ++s) {
                    what.add_request(32, nothing_forced, up::selection_rule::top_p(0.5));
                }
                what.close();
                for (std::int32_t s = 0; s < 3; ++s) {
                    what.set_free(s, {1, 1, 1, 1});
                }
                what.fault(faulty) = static_cast<std::int64_t>(
                    static_cast<std::uint64_t>(up::fault_word(fault)) * static_cast<std::uint64_t>(ranks));
                const auto made = select(what);
                REQUIRE(made->result.ok());
                for (std::int32_t s = 0; s < 3; ++s) {
                    CHECK(made->outcome(s).reason == (s == faulty ? reason : up::keep_reason::selected));
                    CHECK(made->outcome(s).kept == (s == faulty ? 32 : 16));
                }
            }
        }
    }
}

TEST_CASE("an empty step and a step without rows are legal") {
    step nothing(64);
    nothing.close();
    const auto none = select(nothing);
    REQUIRE(none->result.ok());
    CHECK(none->out.kept_bound == 0);
    CHECK(none->out.cu_seqlens[0] == 0);
    CHECK(none->out.cu_segments[0] == 0);

    step empty(64);
    empty.add_request(0, nothing_forced, up::selection_rule::top_p());
    empty.add_request(0, nothing_forced, up::selection_rule::top_p());
    empty.close();
    const auto made = select(empty);
    REQUIRE(made->result.ok());
    CHECK(made->out.cu_seqlens[2] == 0);
    CHECK(made->outcome(1).reason == up::keep_reason::empty);
}

TEST_CASE("options may be left out") {
    step what(8);
    what.add_request(400, nothing_forced, up::selection_rule::top_p(0.5));
    what.close();
    what.set_free(0, std::vector<std::int64_t>(50, 1));
    up::batch_view batch = what.batch();
    batch.options = nullptr; // sink 128, tail 128
    batch.forced = {};
    decision made(what.bounds);
    const up::block_selector<> selector(what.bounds);
    memory scratch(selector.workspace_bytes());
    REQUIRE(selector.run(what.masses(), batch, what.rules.data(), made.out, scratch.workspace(), {}).ok());
    CHECK(made.outcome().total_mass == 18); // 144 free rows
    CHECK(made.outcome().kept == 256 + 72);
}
