// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The functions by which the device decides, run by a team of one thread, against the host selector.

#include "support/catch.hpp"

#include "serial_team.hpp"
#include "step.hpp"

#include <uniprefill/select/detail/quick_decision.hpp>
#include <uniprefill/select/detail/team_decision.hpp>

#include <algorithm>
#include <string>
#include <type_traits>

using namespace select_test;

namespace {

/// The k heaviest blocks, through the sorted list.
struct heaviest : up::rule_base {
    std::int32_t k = 1;
    std::int32_t keep_count(const up::ranked_blocks& ranked) const noexcept {
        return ranked.sums[ranked.count - 1] == ranked.total ? k : -1;
    }
};

detail::step_view view_of(step& what) {
    const up::mass_view masses = what.masses();
    return {what.batch(),
            masses.free,
            masses.forced,
            masses.faults,
            detail::block_size::of(what.bounds.block_rows),
            1 << 20};
}

/// Where a segment is the common case, its verdict must be the same. @return 1 if it is
template <class Team, bool Only>
std::int32_t check_quick(const detail::step_view& view, const std::vector<up::selection_rule>& rules,
                         std::int32_t s, const detail::segment_verdict& wanted,
                         const detail::segment_blocks& blocks) {
    for (std::int32_t part = 0; part < 4; ++part) {
        Team team;
        detail::quick_decision<Team, Only> decision(team, view, rules.data(), s);
        detail::block_stretch stretch; // from before the first block to beyond the last
        stretch.of_cluster = stretch.own = blocks.count * part / 2;
        bool asked = false;
        if (!decision.run(stretch, [&] { asked = decision.blocks().count == blocks.count; })) {
            return 0;
        }
        REQUIRE(asked);
        const detail::segment_verdict came = decision.verdict();
        REQUIRE(wanted.reason == up::keep_reason::selected);
        REQUIRE(came.reason == wanted.reason);
        REQUIRE(came.total_mass == wanted.total_mass);
        REQUIRE(came.dropped_mass == wanted.dropped_mass);
        REQUIRE(came.cut_block == wanted.cut_block);
        REQUIRE(came.cut_rows == wanted.cut_rows);
        REQUIRE(came.kept == wanted.kept);
        REQUIRE(decision.kept() == wanted.kept);
        REQUIRE(came.num_spans == 0);
        std::int32_t place = 0;
        for (std::int32_t b = 0; b < blocks.count; ++b) {
            const detail::block_fate fate = detail::fate_of(wanted, blocks, b);
            REQUIRE(detail::fate_of(came, blocks, b).kept() == fate.kept());
            REQUIRE(fate.rows - decision.rows_that_go(b) == fate.kept());
            place += b < stretch.own ? fate.kept() : 0;
        }
        REQUIRE(decision.place() == place);
    }
    return 1;
}

/// Decides every segment with a team, and checks all that the host selector wrote. @return how many segments
/// were the common case
template <class Team, class Rule>
std::int32_t check_alike(step& what, const std::vector<Rule>& rules, const decision& wanted) {
    const detail::step_view view = view_of(what);
    up::workspace counting;
    static_cast<void>(detail::sort_buffers::carve(counting, what.bounds.max_blocks()));
    memory scratch(counting.bytes_used(), 0xcd);
    auto pieces = scratch.workspace();
    const auto buffers = detail::sort_buffers::carve(pieces, what.bounds.max_blocks());
    std::int32_t next = 0;
    std::int32_t quick = 0;
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        INFO("segment " << s);
        REQUIRE(detail::segment_is_in_order(view.batch, s));
        Team team;
        detail::team_decision<Team, Rule> decision(team, view, rules.data(), buffers, s);
        const detail::segment_verdict verdict = decision.run();
        const up::segment_outcome came = verdict.outcome(what.rows_of(s));
        const up::segment_outcome& told = wanted.outcome(s);
        REQUIRE(up::to_string(came.reason) == std::string(up::to_string(told.reason)));
        REQUIRE(came.rows == told.rows);
        REQUIRE(came.kept == told.kept);
        REQUIRE(came.total_mass == told.total_mass);
        REQUIRE(came.dropped_mass == told.dropped_mass);
        REQUIRE(came.cut_block == told.cut_block);
        REQUIRE(came.cut_rows == told.cut_rows);
        REQUIRE(wanted.out.cu_segments[s] == next);

        const detail::segment_blocks blocks =
            view.blocks_of(s, detail::rows_of_segment(view.batch, s), verdict);
        for (std::int32_t b = 0; b < blocks.count; ++b) {
            const detail::row_range rows = blocks.rows_of(b);
            const detail::block_fate fate = detail::fate_of(verdict, blocks, b);
            REQUIRE(fate.rows == rows.size());
            const std::int64_t index = up::block_offset(s, what.begin(s), what.bounds.block_rows) + b;
            REQUIRE(wanted.out.keeps_block(index) == (fate.kept() == fate.rows));
            std::int32_t kept = 0;
            std::int32_t free_before = 0;
            for (std::int32_t row = rows.begin; row < rows.end; ++row) {
                bool stays = fate.kept() == fate.rows;
                if (!stays) {
                    const bool forced = blocks.forced.holds(rows, row);
                    stays = fate.keeps(forced, free_before, row - rows.begin - free_before);
                    free_before += forced ? 0 : 1;
                }
                REQUIRE(wanted.out.old_to_kept[row] == (stays ? next + kept : -1));
                kept += stays ? 1 : 0;
            }
            REQUIRE(kept == fate.kept());
            next += kept;
            REQUIRE(decision.kept_before(b + 1) ==
                    static_cast<std::uint32_t>(next - wanted.out.cu_segments[s]));
        }
        if constexpr (std::is_same_v<Rule, up::selection_rule>) {
            quick += check_quick<Team, false>(view, rules, s, verdict, blocks);
            if (what.num_segments() == 1) {
                quick += check_quick<Team, true>(view, rules, s, verdict, blocks);
            }
        }
    }
    REQUIRE(wanted.out.cu_segments[what.num_segments()] == next);
    return quick;
}

} // namespace

TEST_CASE("a team decides as the host selector does") {
    generator random(uniprefill_test::seed() + 10);
    std::int32_t cuts = 0;
    std::int32_t quick[3] = {};
    for (std::int32_t i = 0; i < 12000; ++i) {
        step what = random_step(random);
        const auto made = select(what);
        INFO("case " << i);
        REQUIRE(made->result.ok());
        switch (i % 3) {
        case 0:
            quick[0] += check_alike<serial_team<8, 64, 20>>(what, what.rules, *made);
            break;
        case 1:
            quick[1] += check_alike<serial_team<12, 1, 3>>(what, what.rules, *made);
            break;
        default:
            quick[2] += check_alike<serial_team<12, 4>>(what, what.rules, *made);
        }
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            cuts += made->outcome(s).cut_block >= 0 ? 1 : 0;
        }
    }
    CHECK(cuts > 300);
    CHECK(*std::min_element(quick, quick + 3) > 100);
}

TEST_CASE("a team asks a rule of one's own as the host selector does") {
    generator random(uniprefill_test::seed() + 11);
    for (std::int32_t i = 0; i < 3000; ++i) {
        step what = random_step(random);
        std::vector<heaviest> rules(what.rules.size());
        for (std::size_t r = 0; r < rules.size(); ++r) {
            static_cast<up::rule_base&>(rules[r]) = what.rules[r];
            rules[r].k = static_cast<std::int32_t>(random.below(12)) - 1;
        }
        const auto made = select(what, rules);
        INFO("case " << i);
        REQUIRE(made->result.ok());
        check_alike<serial_team<8, 3, 2>>(what, rules, *made);
    }
}

TEST_CASE("among many blocks without any mass, those that are no candidates don't count") {
    for (const auto ties : {up::tie_order::lower_block_first, up::tie_order::higher_block_first}) {
        step what(8);
        up::selection_rule rule = up::selection_rule::fixed_ratio(0.5);
        rule.ties = ties;
        what.add_request(8 * 300, {1, 8 * 50, 8 * 50, 0}, rule);
        what.close();
        what.free_mass(0, 170) = 1000;
        const auto made = select(what);
        REQUIRE(made->result.ok());
        REQUIRE(made->outcome().kept == 8 * (100 + 100));
        check_alike<serial_team<12, 64>>(what, what.rules, *made);
    }
}

TEST_CASE("a search ends after few rounds, however masses lie") {
    generator random(uniprefill_test::seed() + 12);
    for (std::int32_t style = 0; style < 5; ++style) {
        constexpr std::int32_t count = 5000;
        std::vector<std::int64_t> masses(count);
        detail::cut_goal goal;
        goal.weight = detail::cut_weight::mass;
        goal.mass_bits = 0;
        for (std::int64_t& mass : masses) {
            const auto any = static_cast<std::int64_t>(random.next() >> 16);
            mass = style == 0   ? any
                   : style == 1 ? any >> random.below(48)
                   : style == 2 ? 7
                   : style == 3 ? random.below(4)
                                : (std::int64_t{1} << 47) + (any >> 40);
            goal.target += static_cast<std::uint64_t>(mass);
            goal.mass_bits = std::max(goal.mass_bits, detail::bit_length(static_cast<std::uint64_t>(mass)));
        }
        goal.whole = goal.target;
        goal.target = goal.target / 2 + 1;
        detail::segment_blocks blocks;
        blocks.block_rows = 8;
        blocks.count = count;
        blocks.rows = {0, 8 * count};
        blocks.forced.free = blocks.rows;
        blocks.free_mass = masses.data();
        using team_type = serial_team<11, 128>;
        team_type team;
        goal.free_mass = goal.whole;
        detail::held_blocks<team_type> held;
        held.load(team, masses.data(), count);
        held.make(team, blocks);
        const detail::cut_result cut = detail::find_cut(team, blocks, held, goal);
        INFO("style " << style << ": " << team.rounds << " rounds");
        CHECK(team.rounds <= (style < 2 ? 2 : 4));
        // What lies before the cut doesn't reach the target, with the block at it it does.
        std::uint64_t before = 0;
        std::int32_t rows = 0;
        std::uint64_t after = 0;
        for (std::int32_t b = 0; b < count; ++b) {
            const auto mass = static_cast<std::uint64_t>(masses[static_cast<std::size_t>(b)]);
            if (detail::block_rank{mass, b}.before(cut.at)) {
                before += mass;
                rows += 8;
            } else if (b != cut.at.order) {
                after += mass;
            }
        }
        CHECK(before < goal.target);
        CHECK(before + cut.at.mass >= goal.target);
        CHECK(cut.rows_before == rows);
        CHECK(goal.free_mass - cut.mass_before == after);
    }
}

TEST_CASE("digits rise with keys, and tell which keys they stand for") {
    generator random(uniprefill_test::seed() + 15);
    using digits = detail::key_digits<11>;
    for (std::int32_t bits = 0; bits <= 63; ++bits) {
        const digits scale = digits::of(bits);
        const std::uint64_t end = std::uint64_t{1} << bits;
        std::uint32_t below = 0;
        for (std::int32_t i = 0; i < 400; ++i) {
            // From both ends, and anywhere.
            const std::uint64_t any = random.next() >> random.below(64);
            const std::uint64_t key = (i % 3 == 0 ? end - 1 - (any >> (64 - bits / 2 - 1)) : any) % end;
            const std::uint32_t digit = scale.digit(key);
            REQUIRE(digit < 2048);
            std::int32_t width = -1;
            const std::uint64_t first = scale.first_key(digit, width);
            REQUIRE(first <= key);
            REQUIRE(key - first < std::uint64_t{1} << width);
            REQUIRE(width <= (bits > 9 ? bits - 9 : 0));
            REQUIRE(scale.digit(first) == digit);
            below = digit > below ? digit : below;
        }
        REQUIRE(scale.digit(end - 1) >= below);
    }
}

TEST_CASE("targets of masses are exact") {
    constexpr std::uint64_t one = up::unit_fraction::one;
    CHECK(detail::mass_target(10, {one / 2}, false) == 5);
    CHECK(detail::mass_target(10, {one / 2}, true) == 6);
    CHECK(detail::mass_target(11, {one / 2}, false) == 6);
    CHECK(detail::mass_target(11, {one / 2}, true) == 6);
    CHECK(detail::mass_target(one - 1, {one - 1}, false) == one - 2 + 1);
    generator random(uniprefill_test::seed() + 13);
    for (std::int32_t i = 0; i < 20000; ++i) {
        const std::uint64_t whole = (random.next() >> (1 + random.below(60))) + 1;
        const up::unit_fraction share{random.next() % one + 1};
        const std::uint64_t target = detail::mass_target(whole, share, false);
        REQUIRE(up::at_least_fraction(target, share, whole));
        REQUIRE_FALSE(up::at_least_fraction(target - 1, share, whole));
        const std::uint64_t beyond = detail::mass_target(whole, share, true);
        REQUIRE(up::more_than_fraction(beyond, share, whole));
        REQUIRE_FALSE(up::more_than_fraction(beyond - 1, share, whole));
    }
}

TEST_CASE("a row is found by position with or without gaps, in arrays of any content") {
    generator random(uniprefill_test::seed() + 14);
    for (std::int32_t i = 0; i < 20000; ++i) {
        const bool sorted = random.chance(2);
        const auto rows = static_cast<std::int32_t>(random.below(40));
        std::vector<std::int32_t> positions;
        auto position = static_cast<std::int32_t>(random.below(50));
        for (std::int32_t row = 0; row < rows; ++row) {
            positions.push_back(sorted ? position : static_cast<std::int32_t>(random.next()));
            position += 1 + static_cast<std::int32_t>(random.chance(3) ? random.below(30) : 0);
        }
        const auto wanted = static_cast<std::int32_t>(random.below(position + 20));
        const std::int32_t came = detail::bracketed_row_at(positions.data(), 0, rows, wanted);
        REQUIRE(came >= 0);
        REQUIRE(came <= rows);
        if (sorted) {
            REQUIRE(came == detail::first_row_at(positions.data(), 0, rows, wanted));
            REQUIRE((came == 0 || positions[static_cast<std::size_t>(came) - 1] < wanted));
            REQUIRE((came == rows || positions[static_cast<std::size_t>(came)] >= wanted));
        } else if (wanted < INT32_MAX) {
            REQUIRE(detail::first_row_at(positions.data(), 0, rows, wanted) <=
                    detail::first_row_at(positions.data(), 0, rows, wanted + 1));
        }
    }
}
