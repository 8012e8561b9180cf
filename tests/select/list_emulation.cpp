// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The functions by which the device makes lists, run by teams of one thread and of several, against the host
// lister.

#include "support/catch.hpp"
#include "support/scale.hpp"

#include "head_step.hpp"
#include "serial_team.hpp"
#include "thread_team.hpp"

#include <uniprefill/select/detail/list_decision.hpp>

#include <algorithm>
#include <numeric>

using namespace select_test;

namespace {

/// The k heaviest blocks, or exactly so many rows, through the sorted list.
struct heaviest : up::rule_base {
    std::int32_t k = 1;
    std::int32_t exact = 0;
    std::int32_t exact_rows() const noexcept { return exact; }
    std::int32_t keep_count(const up::ranked_blocks& ranked) const noexcept {
        return ranked.sums[ranked.count - 1] == ranked.total ? k : -1;
    }
};

/// What kernels would leave in device memory.
struct emulated {
    head_step& from;
    lists made;
    std::vector<std::int32_t> lengths;
    std::vector<std::uint8_t> marks;
    std::vector<std::int64_t> sort_masses[2];
    std::vector<std::int32_t> sort_orders[2];
    detail::list_step step;
    detail::sort_buffers buffers;
    detail::list_arrays out;

    template <class Rule>
    emulated(head_step& source, const up::list_options<Rule>& how, std::int32_t heads)
        : from(source)
        , made(source.what.bounds, heads) {
        const up::limits& bounds = from.what.bounds;
        const auto blocks = static_cast<std::size_t>(bounds.max_blocks() * heads);
        lengths.assign(static_cast<std::size_t>(bounds.max_segments * heads), INT32_MIN);
        marks.assign(blocks, 0xcd);
        for (std::size_t i = 0; i < 2; ++i) {
            sort_masses[i].resize(blocks);
            sort_orders[i].resize(blocks);
            buffers.masses[i] = sort_masses[i].data();
            buffers.orders[i] = sort_orders[i].data();
        }
        step.batch = from.what.batch();
        step.free_mass = from.free.data();
        step.forced_mass = from.forced.data();
        step.head_stride = from.stride;
        step.faults = from.faults.data();
        step.block = detail::block_size::of(bounds.block_rows);
        step.max_spans = 1 << 20;
        step.sink = how.sink;
        step.num_heads = heads;
        step.group = bounds.num_heads / heads;
        step.max_blocks = bounds.max_blocks();
        step.lengths = lengths.data();
        step.marks = marks.data();
        out = {made.out.offsets, made.out.blocks, made.out.capacity};
        made.out.num_segments = step.batch.num_segments;
        made.out.window = how.window;
    }
    /// Every thread of a team calls it.
    template <class Team, class Rule>
    void decide(Team& team, const Rule& rule) const {
        detail::step_order order;
        for (std::int32_t list = 0; list < step.num_lists(); ++list) {
            detail::list_decision<Team, Rule>(team, step, rule, buffers, list).run(order);
        }
    }
    template <class Team>
    void write(Team& team, std::int32_t parts) const {
        const std::int32_t all = step.num_lists();
        const std::int32_t each = (all + parts - 1) / parts;
        for (std::int32_t part = 0; part < parts; ++part) {
            detail::write_lists(team, step, out, std::min(part * each, all),
                                std::min(part * each + each, all));
        }
    }
    void check(const lists& wanted) const {
        REQUIRE(made.out.offsets[0] == 0);
        for (std::int32_t s = 0; s < step.batch.num_segments; ++s) {
            for (std::int32_t head = 0; head < step.num_heads; ++head) {
                INFO("segment " << s << " head " << head);
                REQUIRE(made.of(s, head) == wanted.of(s, head));
            }
        }
    }
};

/// Writes lists alone.
struct lone_writer {
    static std::int32_t rank() { return 0; }
    static std::int32_t size() { return 1; }
    static std::int64_t sum(std::int64_t mine) { return mine; }
    static std::uint32_t prefix(std::uint32_t mine, std::uint32_t& total) { return total = mine; }
};

template <class Team, class Rule>
void check_alone(head_step& from, const up::list_options<Rule>& how, std::int32_t heads) {
    lists wanted(from.what.bounds, heads);
    REQUIRE(run(from, how, wanted).ok());
    emulated came(from, how, heads);
    Team team;
    lone_writer writer;
    came.decide(team, how.rule);
    came.write(writer, 1 + heads % 3);
    came.check(wanted);
}

template <class Team, class Rule>
void check_together(head_step& from, const up::list_options<Rule>& how, std::int32_t heads,
                    std::int32_t threads) {
    lists wanted(from.what.bounds, heads);
    REQUIRE(run(from, how, wanted).ok());
    emulated came(from, how, heads);
    typename Team::crew crew(threads);
    crew.run([&](std::int32_t rank) {
        Team team(crew, rank);
        came.decide(team, how.rule);
        team.sync();
        came.write(team, 1 + heads % 3);
    });
    came.check(wanted);
}

up::list_options<heaviest> with_own_rule(generator& random, const list_options& from) {
    heaviest rule;
    static_cast<up::rule_base&>(rule) = from.rule;
    rule.k = static_cast<std::int32_t>(random.below(12)) - 1;
    rule.exact = random.chance(5) ? 1 + static_cast<std::int32_t>(random.below(100)) : 0;
    return {rule, from.sink, from.window};
}

} // namespace

TEST_CASE("a team lists what the host lister does") {
    generator random(uniprefill_test::seed() + 40);
    for (std::int32_t i = 0; i < 6000; ++i) {
        head_step from = random_head_step(random);
        const list_options how = random_list_options(random);
        INFO("case " << i);
        for (const std::int32_t heads : {from.what.bounds.num_heads, from.what.bounds.num_kv_heads}) {
            switch (i % 3) {
            case 0:
                check_alone<serial_team<8, 64, 20>>(from, how, heads);
                break;
            case 1:
                check_alone<serial_team<12, 1, 3>>(from, how, heads);
                break;
            default:
                check_alone<serial_team<12, 4>>(from, how, heads);
            }
            check_alone<serial_team<9, 3, 2>>(from, with_own_rule(random, how), heads);
        }
    }
}

TEST_CASE("a team of several threads lists what the host lister does") {
    generator random(uniprefill_test::seed() + 41);
    for (std::int32_t i = 0; i < uniprefill_test::scaled(300, 20); ++i) {
        head_step from = random_head_step(random);
        const list_options how = random_list_options(random);
        INFO("case " << i);
        const std::int32_t heads =
            random.chance(2) ? from.what.bounds.num_heads : from.what.bounds.num_kv_heads;
        if (i % 3 == 0) {
            check_together<thread_team<9, 2, 1>>(from, with_own_rule(random, how), heads, 3);
        } else {
            check_together<thread_team<9, 4, 2>>(from, how, heads, 1 + i % 4);
        }
    }
}

TEST_CASE("a team lists long segments as the host lister does") {
    generator random(uniprefill_test::seed() + 42);
    for (std::int32_t i = 0; i < 60; ++i) {
        step what(8);
        std::vector<up::position_span> spans;
        if (i % 3 == 0) {
            spans = {{1000, 1400}, {9001, 9002}};
        }
        const std::int32_t rows = 8 * 3000 + static_cast<std::int32_t>(random.below(20000));
        std::vector<std::int32_t> where(static_cast<std::size_t>(rows));
        for (std::int32_t row = 0; row < rows; ++row) {
            where[static_cast<std::size_t>(row)] = row + (row > 500 ? i : 0);
        }
        what.add_request({rows}, where, spans, {1, 100, 77, 0}, {}, up::request_tag::prefill);
        what.close();
        head_step from = with_heads(random, std::move(what), 2, 1 + i % 3);
        list_options how = random_list_options(random);
        how.rule = random_rule(random, rows);
        INFO("case " << i);
        check_alone<serial_team<9, 128, 32>>(from, how, i % 2 == 0 ? from.what.bounds.num_heads : 2);
        if (i % 10 == 0) {
            check_together<thread_team<12, 128, 4>>(from, how, 2, 4);
        }
    }
}

TEST_CASE("heads whose masses are none, or sum to none, make their lists whole") {
    constexpr std::int64_t most = INT64_MAX;
    const std::vector<std::int64_t> hostile[] = {{-1, 0, 0},       {1, -1, 0},      {0, 0, INT64_MIN},
                                                 {most, 1, 0},     {most, most, 2}, {most, most, most},
                                                 {most, -most, 0}, {most / 2, 1, 0}};
    for (const auto& by_head : hostile) {
        for (std::int32_t kind = 0; kind < 2; ++kind) {
            for (const auto scope : {up::mass_scope::free, up::mass_scope::all}) {
                INFO(by_head[0] << " " << by_head[1] << " " << by_head[2] << " kind " << kind);
                step what(8);
                what.add_request(80, {1, 2, 2, 0}, {});
                what.close();
                head_step from(std::move(what), 1, 3);
                for (std::int32_t head = 0; head < 3; ++head) {
                    for (std::int32_t b = 0; b < 10; ++b) {
                        from.free[from.at(head, 0, b)] = 5 + b;
                    }
                    (kind == 0 ? from.free : from.forced)[from.at(head, 0, 4)] =
                        by_head[static_cast<std::size_t>(head)];
                }
                list_options how;
                how.rule = up::selection_rule::top_p(0.1, scope);
                how.sink = 0;
                for (const std::int32_t heads : {3, 1}) {
                    check_alone<serial_team<9, 4>>(from, how, heads);
                }
            }
        }
    }
}

TEST_CASE("segments in no order have every block of the rows that they name, within what lists hold") {
    for (const std::vector<std::int32_t>& offsets : {std::vector<std::int32_t>{0, 100, 50, 300},
                                                     {0, -5, 300, 300},
                                                     {7, 100, 200, 300},
                                                     {0, 300, 0, 300},
                                                     {0, INT32_MAX, INT32_MIN, 300}}) {
        step what(8);
        for (std::int32_t r = 0; r < 3; ++r) {
            what.add_request(100, {1, 2, 2, 0}, up::selection_rule::top_p(0.5));
        }
        what.close();
        generator random(3);
        head_step from = with_heads(random, std::move(what), 2, 1);
        std::fill(from.faults.begin(), from.faults.end(), 0);
        from.what.cu_seqlens = offsets;
        list_options how;
        how.rule = up::selection_rule::top_p(0.3, up::mass_scope::free);
        emulated came(from, how, 2);
        serial_team<9, 4> team;
        lone_writer writer;
        came.decide(team, how.rule);
        came.write(writer, 2);
        std::int64_t next = 0;
        for (std::int32_t list = 0; list < 6; ++list) {
            const detail::row_range rows = detail::rows_of_segment(came.step.batch, list / 2);
            next = std::min<std::int64_t>(next + up::num_blocks(rows.size(), 8), came.out.capacity);
            REQUIRE(came.out.offsets[list + 1] == next);
            for (std::int64_t i = came.out.offsets[list]; i < next; ++i) {
                REQUIRE(came.out.blocks[i] == i - came.out.offsets[list]);
            }
        }
    }
}

TEST_CASE("lists of requests whose options or spans make no sense have every block, where these count") {
    step what(8);
    std::vector<std::int32_t> where(400);
    std::iota(where.begin(), where.end(), 0);
    what.add_request({400}, where, {{20, 30}, {50, 60}}, {1, 2, 2, 0}, {}, up::request_tag::prefill);
    what.close();
    head_step from(std::move(what), 1, 1);
    for (std::int32_t b = 0; b < 50; ++b) {
        from.free[from.at(0, 0, b)] = b == 9 || b == 30 ? 1000 : 1;
    }
    const auto listed = [&](up::mass_scope scope, std::int32_t max_spans) {
        list_options how;
        how.rule = up::selection_rule::top_p(0.3, scope);
        how.sink = 0;
        emulated came(from, how, 1);
        came.step.max_spans = max_spans;
        serial_team<9, 4> team;
        came.decide(team, how.rule);
        return came.lengths[0];
    };
    CHECK(listed(up::mass_scope::all, 2) == 1);
    CHECK(listed(up::mass_scope::free, 2) == 7); // block 9, and those with sinks, spans and the tail
    CHECK(listed(up::mass_scope::free, 1) == ~50);
    CHECK(listed(up::mass_scope::all, 1) == 1);
    from.what.options[0].tail = -1;
    CHECK(listed(up::mass_scope::free, 2) == ~50);
    CHECK(listed(up::mass_scope::all, 2) == 1);
    from.what.options[0].tail = 2;
    from.what.spans = {{50, 60}, {20, 30}};
    CHECK(listed(up::mass_scope::free, 2) == ~50);
}
