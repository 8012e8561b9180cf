// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// How the device picks a query block's list from its masses, by teams of one thread and of several, against
// sorting them; and where lists go that have no room.

#include "support/catch.hpp"
#include "support/scale.hpp"

#include "head_step.hpp"
#include "serial_team.hpp"
#include "thread_team.hpp"

#include <uniprefill/select/detail/query_list_decision.hpp>

#include <algorithm>
#include <numeric>

using namespace select_test;

namespace {

struct weighed {
    std::vector<std::int64_t> masses;
    std::int32_t begin = 0;
    std::int32_t end = 0;
    std::int32_t sinks = 0;
    up::selection_rule rule;

    [[nodiscard]] detail::weighed_blocks view() const {
        return {masses.data(), static_cast<std::int32_t>(masses.size()), begin, end, rule.ties};
    }
    /// By sorting; {-1} where nothing weighs anything.
    [[nodiscard]] std::vector<std::int32_t> right() const {
        std::vector<std::int32_t> order(static_cast<std::size_t>(end - begin));
        std::iota(order.begin(), order.end(), begin);
        const auto mass = [&](std::int32_t b) { return masses[static_cast<std::size_t>(b)]; };
        std::stable_sort(order.begin(), order.end(), [&](std::int32_t a, std::int32_t b) {
            return mass(a) != mass(b)                               ? mass(a) > mass(b)
                   : rule.ties == up::tie_order::higher_block_first ? a > b
                                                                    : false;
        });
        std::vector<std::int64_t> sorted;
        std::vector<std::int64_t> sums;
        for (const std::int32_t b : order) {
            sorted.push_back(mass(b));
            sums.push_back(mass(b) + (sums.empty() ? 0 : sums.back()));
        }
        if (sums.empty() || sums.back() == 0) {
            return {-1};
        }
        const up::ranked_blocks ranked{sorted.data(), sums.data(), sums.back(),
                                       static_cast<std::int32_t>(order.size())};
        const std::int32_t wanted = detail::bounded_blocks(rule, rule.keep_count(ranked), ranked.count, 8);
        std::vector<std::int32_t> list(static_cast<std::size_t>(sinks));
        std::iota(list.begin(), list.end(), 0);
        for (std::int32_t k = 0; k < wanted; ++k) {
            if (order[static_cast<std::size_t>(k)] >= sinks) {
                list.push_back(order[static_cast<std::size_t>(k)]);
            }
        }
        std::sort(list.begin(), list.end());
        return list;
    }
};

weighed any_weighed(generator& random) {
    weighed made;
    const auto count = 1 + static_cast<std::int32_t>(random.below(random.chance(5) ? 2000 : 90));
    const std::int64_t most = random.chance(3) ? 5 : std::int64_t{1} << (1 + random.below(44));
    for (std::int32_t b = 0; b < count; ++b) {
        made.masses.push_back(random.below(most));
    }
    made.sinks = static_cast<std::int32_t>(random.below(std::min(count, 4) + 1));
    made.end = count;
    if (random.chance(2)) {
        made.begin = made.sinks;
        made.end = made.begin + static_cast<std::int32_t>(random.below(count - made.begin + 1));
        // What is no candidate weighs nothing, but says so only by its number.
        for (std::int32_t b = 0; b < count; ++b) {
            if (b < made.begin || b >= made.end) {
                made.masses[static_cast<std::size_t>(b)] = 0;
            }
        }
    }
    made.rule = random_rule(random, count * 8);
    return made;
}

template <class Team>
void check_alone(const weighed& from) {
    Team team;
    std::vector<std::int32_t> listed;
    const std::int32_t length = detail::pick_query_list(team, from.view(), from.rule, 8, from.sinks,
                                                        [&](std::int32_t block, bool is_listed) {
                                                            if (is_listed) {
                                                                listed.push_back(block);
                                                            }
                                                        });
    const std::vector<std::int32_t> right = from.right();
    if (right == std::vector<std::int32_t>{-1}) {
        REQUIRE(length == detail::query_list_marks::untrusted);
        return;
    }
    std::sort(listed.begin(), listed.end());
    REQUIRE(listed == right);
    REQUIRE(length == static_cast<std::int32_t>(right.size()));
}

} // namespace

TEST_CASE("a team picks a query block's list as sorting does") {
    generator random(uniprefill_test::seed() + 50);
    for (std::int32_t i = 0; i < uniprefill_test::scaled(6000, 300); ++i) {
        const weighed from = any_weighed(random);
        INFO("case " << i << ", seed " << uniprefill_test::seed() << ": " << from.masses.size()
                     << " blocks, candidates " << from.begin << " to " << from.end << ", sinks "
                     << from.sinks);
        check_alone<serial_team<9, 64, 1>>(from);
        check_alone<serial_team<12, 1, 3>>(from);
        check_alone<serial_team<9, 128, 32>>(from);
        if (i % 20 == 0) {
            using team_type = thread_team<9, 4, 1>;
            typename team_type::crew crew(4);
            std::vector<std::uint8_t> marks(from.masses.size() + 64, 0);
            std::vector<std::int32_t> lengths(4);
            crew.run([&](std::int32_t rank) {
                team_type team(crew, rank);
                lengths[static_cast<std::size_t>(rank)] = detail::pick_query_list(
                    team, from.view(), from.rule, 8, from.sinks, [&](std::int32_t block, bool is_listed) {
                        marks[static_cast<std::size_t>(block)] = is_listed ? 1 : 0;
                    });
            });
            const std::vector<std::int32_t> right = from.right();
            for (const std::int32_t length : lengths) {
                REQUIRE(length == (right[0] < 0 ? detail::query_list_marks::untrusted
                                                : static_cast<std::int32_t>(right.size())));
            }
            for (std::size_t b = 0; right[0] >= 0 && b < marks.size(); ++b) {
                REQUIRE((marks[b] != 0) ==
                        std::binary_search(right.begin(), right.end(), static_cast<std::int32_t>(b)));
            }
        }
    }
}
