// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rules that the library doesn't ship, written as a stranger would.

#include "support/catch.hpp"

#include "step.hpp"

namespace stranger {

/// The k heaviest blocks.
struct top_k : uniprefill::rule_base {
    std::int32_t k = 1;
    std::int32_t keep_count(const uniprefill::ranked_blocks&) const noexcept { return k; }
};

/// Blocks up to the steepest fall of mass from one rank to the next.
struct largest_gap : uniprefill::rule_base {
    std::int32_t keep_count(const uniprefill::ranked_blocks& ranked) const noexcept {
        std::int32_t best = ranked.count;
        std::int64_t gap = 0;
        for (std::int32_t k = 1; k < ranked.count; ++k) {
            if (ranked.masses[k - 1] - ranked.masses[k] > gap) {
                gap = ranked.masses[k - 1] - ranked.masses[k];
                best = k;
            }
        }
        return best;
    }
};

/// As many rows as the engine has places for, checked by a validate() of its own.
struct places : uniprefill::rule_base {
    std::int32_t rows = 0;
    std::int32_t exact_rows() const noexcept { return rows; }
    std::int32_t keep_count(const uniprefill::ranked_blocks& ranked) const noexcept { return ranked.count; }
};
uniprefill::status validate(const places& rule) noexcept {
    return rule.rows > 0 ? uniprefill::success()
                         : uniprefill::failure(uniprefill::status_code::invalid_argument, "places.rows",
                                               "> 0", rule.rows);
}

struct no_rule : uniprefill::rule_base {};
struct not_derived {
    std::int32_t keep_count(const uniprefill::ranked_blocks&) const noexcept { return 1; }
};

} // namespace stranger

using namespace select_test;

static_assert(up::is_selection_rule_v<up::selection_rule>);
static_assert(up::is_selection_rule_v<stranger::top_k>);
static_assert(!up::is_selection_rule_v<stranger::no_rule>);
static_assert(!up::is_selection_rule_v<stranger::not_derived>);

namespace {

step two_requests() {
    step what(8);
    what.add_request(32, {1, 0, 0, 0}, {});
    what.add_request(32, {1, 1, 0, 0}, {});
    what.close();
    what.set_free(0, {5, 90, 80, 6});
    what.set_free(1, {5, 90, 80, 6});
    return what;
}

} // namespace

TEST_CASE("a rule of one's own decides, with bounds, ties and scope from the base") {
    step what = two_requests();
    std::vector<stranger::top_k> rules(2);
    rules[1].k = 3;
    rules[1].max_kept_rows = 18;
    const auto made = select(what, rules);
    REQUIRE(made->result.ok());
    CHECK(made->outcome(0).kept == 8);
    CHECK(made->keeps(8));
    CHECK(made->outcome(1).kept == 18);
    CHECK(made->outcome(1).cut_block == 3);
    CHECK(made->outcome(1).cut_rows == 1);

    const auto gap = select(what, std::vector<stranger::largest_gap>(2));
    REQUIRE(gap->result.ok());
    CHECK(gap->outcome(0).kept == 16);
    CHECK(gap->outcome(1).kept == 17);
}

TEST_CASE("a rule that answers out of range is clamped") {
    step what = two_requests();
    std::vector<stranger::top_k> rules(2);
    rules[0].k = 1000;
    rules[1].k = -3;
    const auto made = select(what, rules);
    REQUIRE(made->result.ok());
    CHECK(made->outcome(0).reason == up::keep_reason::everything);
    CHECK(made->outcome(1).kept == 1); // the sink
    CHECK(made->outcome(1).dropped_mass == 181);

    rules[0].k = 0; // and nothing is forced: one row stays, the first of the heaviest block
    const auto one = select(what, rules);
    REQUIRE(one->result.ok());
    CHECK(one->outcome(0).kept == 1);
    CHECK(one->outcome(0).cut_block == 1);
    CHECK(one->keeps(8));
}

TEST_CASE("a rule of one's own may ask for exact rows and check itself") {
    step what = two_requests();
    std::vector<stranger::places> rules(2);
    rules[0].rows = 10;
    const auto refused = select(what, rules);
    CHECK(refused->result.argument == std::string("places.rows"));
    CHECK(refused->result.request == 1);
    rules[1].rows = 5;
    const auto made = select(what, rules);
    REQUIRE(made->result.ok());
    CHECK(made->outcome(0).kept == 10);
    CHECK(made->outcome(1).kept == 5);
    CHECK(made->out.kept_bound == 15);

    std::vector<stranger::top_k> bounds(2);
    bounds[1].min_kept_rows = -1; // the base is checked where a rule has no validate()
    CHECK(select(what, bounds)->result.argument == std::string("rule.min_kept_rows"));
}
