// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Block lists against a plain retelling, what doesn't change them, and wrong arguments.

#include "support/catch.hpp"
#include "support/scale.hpp"

#include "head_step.hpp"
#include "naive.hpp"

#include <functional>
#include <iostream>
#include <optional>
#include <set>

using namespace select_test;

namespace {

/// The list of query heads [first, first + group).
std::vector<std::int32_t> naive_list(const head_step& from, const list_options& how, std::int32_t segment,
                                     std::int32_t first, std::int32_t group) {
    const step& what = from.what;
    const std::int32_t g = what.bounds.block_rows;
    const up::batch_view batch = what.batch();
    std::set<std::int32_t> every, listed;
    struct block {
        std::int32_t index;
        uint128 mass;
    };
    std::vector<block> ranked;
    uint128 total = 0;
    bool trusted = from.faults[static_cast<std::size_t>(segment)] == 0;
    for (std::int32_t b = 0; b < what.blocks_of(segment); ++b) {
        every.insert(b);
        bool has_free = false, has_forced = false, is_sink = false;
        for (std::int32_t row = what.begin(segment) + b * g;
             row < std::min(what.end(segment), what.begin(segment) + (b + 1) * g); ++row) {
            (up::is_forced_row(batch, segment, row) ? has_forced : has_free) = true;
            is_sink = is_sink || what.positions[static_cast<std::size_t>(row)] < how.sink;
        }
        if (is_sink || (how.rule.scope == up::mass_scope::free && has_forced)) {
            listed.insert(b);
        }
        uint128 sums[2] = {0, 0};
        for (std::int32_t head = first; head < first + group; ++head) {
            for (const auto* masses : {&from.free, &from.forced}) {
                const std::int64_t mass = (*masses)[from.at(head, segment, b)];
                const bool counts =
                    masses == &from.free || how.rule.scope == up::mass_scope::all || group > 1;
                trusted = trusted && (mass >= 0 || !counts ||
                                      (group == 1 && how.rule.scope == up::mass_scope::free && !has_free));
                sums[masses == &from.free ? 0 : 1] += static_cast<uint128>(mass < 0 ? 0 : mass);
            }
        }
        trusted = trusted && (group == 1 || (sums[0] <= INT64_MAX && sums[1] <= INT64_MAX));
        if (how.rule.scope == up::mass_scope::free && !has_free) {
            continue;
        }
        const uint128 mass = sums[0] + (how.rule.scope == up::mass_scope::all ? sums[1] : 0);
        total += mass;
        auto place = ranked.begin();
        while (place != ranked.end() &&
               (place->mass > mass ||
                (place->mass == mass && how.rule.ties == up::tie_order::lower_block_first))) {
            ++place;
        }
        ranked.insert(place, {b, mass});
    }
    if (!trusted || total == 0 || total > static_cast<uint128>(INT64_MAX)) {
        return {every.begin(), every.end()};
    }
    std::vector<std::int64_t> masses;
    for (const block& one : ranked) {
        masses.push_back(static_cast<std::int64_t>(one.mass));
    }
    const std::size_t chosen = naive_count(how.rule, masses, static_cast<std::int64_t>(total));
    const bool budget = how.rule.kind == up::rule_kind::fixed_budget;
    for (std::size_t k = 0; k < ranked.size(); ++k) {
        const auto rows_before = static_cast<std::int64_t>(k) * g;
        const bool wanted =
            budget ? rows_before < how.rule.budget_rows
                   : (k < chosen || rows_before < how.rule.min_kept_rows) &&
                         (rows_before + g <= how.rule.max_kept_rows || rows_before < how.rule.min_kept_rows);
        if (wanted) {
            listed.insert(ranked[k].index);
        }
    }
    return {listed.begin(), listed.end()};
}

} // namespace

TEST_CASE("lists: what a plain retelling lists, for random steps") {
    generator random(uniprefill_test::seed());
    std::int64_t partial = 0, whole = 0;
    for (int i = 0; i < 3000; ++i) {
        INFO("case " << i << " of seed " << uniprefill_test::seed());
        head_step from = random_head_step(random);
        const list_options how = random_list_options(random);
        for (const std::int32_t heads : {from.what.bounds.num_heads, from.what.bounds.num_kv_heads}) {
            const std::int32_t group = from.what.bounds.num_heads / heads;
            lists made(from.what.bounds, heads);
            REQUIRE(run(from, how, made).ok());
            REQUIRE(made.out.num_segments == from.what.num_segments());
            REQUIRE(made.out.window == how.window);
            for (std::int32_t s = 0; s < from.what.num_segments(); ++s) {
                for (std::int32_t head = 0; head < heads; ++head) {
                    const auto came = made.of(s, head);
                    REQUIRE(came == naive_list(from, how, s, head * group, group));
                    (came.size() < static_cast<std::size_t>(from.what.blocks_of(s)) ? partial : whole) += 1;
                }
            }
        }
    }
    std::cout << partial << " lists name some of the blocks, " << whole << " all\n";
    CHECK(partial > 1000);
    CHECK(whole > 1000);
}

TEST_CASE("lists: a share of 1 lists every block, forced rows or not") {
    generator random(uniprefill_test::seed() + 2);
    for (int i = 0; i < 200; ++i) {
        INFO("case " << i << " of seed " << uniprefill_test::seed());
        head_step from = random_head_step(random);
        for (const auto scope : {up::mass_scope::free, up::mass_scope::all}) {
            list_options how;
            how.rule = up::selection_rule::top_p(1, scope);
            how.sink = how.window = 0;
            lists made(from.what.bounds, from.what.bounds.num_heads);
            REQUIRE(run(from, how, made).ok());
            for (std::int32_t s = 0; s < from.what.num_segments(); ++s) {
                for (std::int32_t head = 0; head < from.what.bounds.num_heads; ++head) {
                    REQUIRE(made.of(s, head).size() == static_cast<std::size_t>(from.what.blocks_of(s)));
                }
            }
        }
    }
}

TEST_CASE("lists: a request's lists are the same alone") {
    generator random(uniprefill_test::seed() + 1);
    for (int i = 0; i < 200; ++i) {
        INFO("case " << i << " of seed " << uniprefill_test::seed());
        head_step packed = random_head_step(random);
        const list_options how = random_list_options(random);
        lists together(packed.what.bounds, packed.what.bounds.num_heads);
        REQUIRE(run(packed, how, together).ok());
        for (std::int32_t s = 0; s < packed.what.num_segments(); ++s) {
            const auto request = static_cast<std::size_t>(packed.what.batch().request_of(s));
            step alone(packed.what.bounds.block_rows);
            const up::batch_view all = packed.what.batch();
            alone.add_request({packed.what.rows_of(s)},
                              {packed.what.positions.begin() + packed.what.begin(s),
                               packed.what.positions.begin() + packed.what.end(s)},
                              {all.forced.spans + all.forced.offsets[request],
                               all.forced.spans + all.forced.offsets[request + 1]},
                              packed.what.options[request], packed.what.rules[request],
                              packed.what.tags[request]);
            alone.close();
            head_step single(alone, packed.what.bounds.num_kv_heads,
                             packed.what.bounds.num_heads / packed.what.bounds.num_kv_heads);
            single.faults[0] = packed.faults[static_cast<std::size_t>(s)];
            for (std::int32_t head = 0; head < packed.what.bounds.num_heads; ++head) {
                for (std::int32_t b = 0; b < packed.what.blocks_of(s); ++b) {
                    single.free[single.at(head, 0, b)] = packed.free[packed.at(head, s, b)];
                    single.forced[single.at(head, 0, b)] = packed.forced[packed.at(head, s, b)];
                }
            }
            lists apart(single.what.bounds, single.what.bounds.num_heads);
            REQUIRE(run(single, how, apart).ok());
            for (std::int32_t head = 0; head < packed.what.bounds.num_heads; ++head) {
                REQUIRE(apart.of(0, head) == together.of(s, head));
            }
        }
    }
}

TEST_CASE("lists: wrong arguments are named, and nothing is written") {
    using code = up::status_code;
    struct call {
        std::optional<head_step> from;
        up::limits bounds;
        up::head_mass_view masses;
        const std::int64_t* faults = nullptr;
        list_options how;
        std::optional<lists> made;
        std::size_t scratch_less = 0;

        call() {
            step what(8);
            what.add_request(20, {1, 2, 2, 0}, up::selection_rule::top_p(0.5));
            what.close();
            from.emplace(what, 2, 3);
            bounds = from->what.bounds;
            masses = from->masses();
            faults = from->faults.data();
            made.emplace(bounds, 6);
        }
        up::status run() {
            const up::block_lister<> lister(bounds);
            memory scratch(lister.workspace_bytes());
            const up::workspace whole = scratch.workspace();
            return lister.run(masses, faults, from->what.batch(), how, made->out,
                              up::workspace(whole.data(), whole.bytes() - scratch_less));
        }
    };
    const auto refuses = [](code expected, const std::string& argument,
                            const std::function<void(call&)>& spoil) {
        INFO(argument);
        call sound;
        REQUIRE(sound.run().ok());
        call spoiled;
        spoil(spoiled);
        const auto before = spoiled.made->arrays.bytes();
        const up::status came = spoiled.run();
        CHECK(up::to_string(came.code) == std::string(up::to_string(expected)));
        CHECK(came.argument == argument);
        CHECK(std::string(came.expected) != "");
        CHECK(spoiled.made->arrays.bytes() == before);
    };
    refuses(code::invalid_argument, "limits.block_rows (G)", [](call& c) { c.bounds.block_rows = 7; });
    refuses(code::out_of_range, "batch.num_rows", [](call& c) { c.bounds.max_rows = 19; });
    refuses(code::invalid_argument, "rule.p", [](call& c) { c.how.rule.p.value = 0; });
    refuses(code::invalid_argument, "options.sink", [](call& c) { c.how.sink = -1; });
    refuses(code::invalid_argument, "options.window", [](call& c) { c.how.window = -1; });
    refuses(code::not_supported, "out.space", [](call& c) { c.made->out.space = up::memory_space::device; });
    refuses(code::invalid_argument, "out.block_rows", [](call& c) { c.made->out.block_rows = 16; });
    refuses(code::invalid_argument, "out.num_heads", [](call& c) { c.made->out.num_heads = 3; });
    refuses(code::out_of_range, "out.max_segments", [](call& c) { --c.made->out.max_segments; });
    refuses(code::out_of_range, "out.capacity", [](call& c) { --c.made->out.capacity; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.blocks = nullptr; });
    refuses(code::invalid_argument, "per_head.free", [](call& c) { c.masses.free = nullptr; });
    refuses(code::invalid_argument, "per_head.forced", [](call& c) { c.masses.forced = nullptr; });
    refuses(code::invalid_argument, "per_head.num_heads", [](call& c) { c.masses.num_heads = 5; });
    refuses(code::out_of_range, "per_head.head_stride", [](call& c) { c.masses.head_stride = 2; });
    refuses(code::invalid_argument, "faults", [](call& c) { c.faults = nullptr; });
    refuses(code::workspace_too_small, "workspace", [](call& c) { c.scratch_less = 1; });
}
