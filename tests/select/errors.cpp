// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Wrong arguments are named, and nothing is written.

#include "support/catch.hpp"

#include "step.hpp"

#include <functional>
#include <limits>

using namespace select_test;

namespace {

/// One call that would succeed; a test spoils one thing.
struct call {
    step what{8};
    up::limits selector_bounds;
    up::mass_view masses;
    up::batch_view batch;
    const up::selection_rule* rules = nullptr;
    std::unique_ptr<decision> made;
    memory scratch{1};
    up::workspace workspace;

    call() {
        for (std::int32_t r = 0; r < 3; ++r) {
            what.add_request(20, {1, 2, 2, 0}, up::selection_rule::top_p(0.5));
        }
        what.close();
        for (std::int32_t s = 0; s < 3; ++s) {
            what.set_free(s, {1, 2, 3});
        }
        selector_bounds = what.bounds;
        masses = what.masses();
        batch = what.batch();
        rules = what.rules.data();
        made = std::make_unique<decision>(what.bounds);
        scratch = memory(up::block_selector<>(selector_bounds).workspace_bytes());
        workspace = scratch.workspace();
    }
    up::status run() {
        return up::block_selector<>(selector_bounds).run(masses, batch, rules, made->out, workspace, {});
    }
};

void refuses(up::status_code code, const std::string& argument, const std::function<void(call&)>& spoil,
             std::int32_t request = -1) {
    INFO(argument);
    call sound;
    REQUIRE(sound.run().ok());
    call spoiled;
    spoil(spoiled);
    const auto arrays = spoiled.made->arrays.bytes();
    const auto scratch = spoiled.scratch.bytes();
    const up::selection out = spoiled.made->out;
    const up::status result = spoiled.run();
    CHECK(up::to_string(result.code) == std::string(up::to_string(code)));
    CHECK(result.argument == argument);
    CHECK(result.request == request);
    CHECK(std::string(result.expected) != "");
    CHECK(spoiled.made->arrays.bytes() == arrays);
    CHECK(spoiled.scratch.bytes() == scratch);
    CHECK(std::memcmp(&spoiled.made->out, &out, sizeof out) == 0);
}

} // namespace

TEST_CASE("select: arrays, spaces and sizes are checked") {
    using code = up::status_code;
    refuses(code::invalid_argument, "limits.block_rows (G)",
            [](call& c) { c.selector_bounds.block_rows = 7; });
    refuses(code::out_of_range, "batch.num_rows", [](call& c) { c.selector_bounds.max_rows = 59; });
    refuses(code::invalid_argument, "batch.positions", [](call& c) { c.batch.positions = nullptr; });
    refuses(code::not_supported, "masses.space", [](call& c) { c.masses.space = up::memory_space::device; });
    refuses(code::invalid_argument, "masses.free", [](call& c) { c.masses.free = nullptr; });
    refuses(code::invalid_argument, "masses.forced", [](call& c) { c.masses.forced = nullptr; });
    refuses(code::invalid_argument, "masses.faults", [](call& c) { c.masses.faults = nullptr; });
    refuses(code::out_of_range, "masses.num_segments", [](call& c) { c.masses.num_segments = 2; });
    // The last segment starts at block 40 / 8 + 2 and has 3.
    refuses(code::out_of_range, "masses.num_blocks", [](call& c) { c.masses.num_blocks = 9; });
    refuses(code::invalid_argument, "rules", [](call& c) { c.rules = nullptr; });
    refuses(code::not_supported, "out.space", [](call& c) { c.made->out.space = up::memory_space::device; });
    refuses(code::invalid_argument, "out.block_rows", [](call& c) { c.made->out.block_rows = 16; });
    // Carved with smaller limits than the selector has.
    refuses(code::out_of_range, "out", [](call& c) { c.made->out.max_requests = 2; });
    refuses(code::out_of_range, "out", [](call& c) { c.made->out.max_segments = 2; });
    refuses(code::out_of_range, "out", [](call& c) { c.made->out.max_rows = 59; });
    refuses(code::out_of_range, "out", [](call& c) { c.made->out.max_blocks = 9; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.keep_bits = nullptr; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.kept_to_old = nullptr; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.old_to_kept = nullptr; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.cu_seqlens = nullptr; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.cu_segments = nullptr; });
    refuses(code::invalid_argument, "out", [](call& c) { c.made->out.outcomes = nullptr; });
    refuses(code::invalid_argument, "workspace", [](call& c) { c.workspace = {}; });
    refuses(code::workspace_too_small, "workspace", [](call& c) {
        c.workspace = {c.scratch.data(), c.workspace.bytes() - 1};
    });
    refuses(code::misaligned, "workspace", [](call& c) {
        c.workspace = {static_cast<char*>(c.scratch.data()) + 8, c.workspace.bytes()};
    });
    call exact;
    exact.masses.num_blocks = 10;
    CHECK(exact.run().ok());
}

TEST_CASE("select: the rule of each request is checked") {
    const auto refuses_rule = [](const std::string& argument,
                                 const std::function<void(up::selection_rule&)>& spoil) {
        for (const std::int32_t request : {0, 2}) {
            refuses(
                up::status_code::invalid_argument, argument,
                [&](call& c) { spoil(c.what.rules[static_cast<std::size_t>(request)]); }, request);
        }
    };
    using rule = up::selection_rule;
    for (const double p : {0.0, -0.5, 1.0000001, 1e-30, std::numeric_limits<double>::infinity(),
                           std::numeric_limits<double>::quiet_NaN()}) {
        refuses_rule("rule.p", [p](rule& r) { r = rule::top_p(p); });
        refuses_rule("rule.p", [p](rule& r) { r = rule::published_top_p(p); });
        refuses_rule("rule.p", [p](rule& r) { r = rule::fixed_ratio(p); });
        refuses_rule("rule.p", [p](rule& r) { r = rule::max_fraction(p); });
    }
    refuses_rule("rule.p", [](rule& r) { r.p.value = up::unit_fraction::one + 1; });
    refuses_rule("rule.budget_rows", [](rule& r) { r = rule::fixed_budget(0); });
    refuses_rule("rule.budget_rows", [](rule& r) { r = rule::fixed_budget(-4); });
    refuses_rule("rule.budget_rows", [](rule& r) {
        r = rule::fixed_budget(4);
        r.min_kept_rows = 5;
    });
    refuses_rule("rule.budget_rows", [](rule& r) {
        r = rule::fixed_budget(4);
        r.max_kept_rows = 3;
    });
    refuses_rule("rule.min_kept_rows", [](rule& r) { r.min_kept_rows = -1; });
    refuses_rule("rule.max_kept_rows", [](rule& r) { r.max_kept_rows = 0; });
    refuses_rule("rule.max_kept_rows", [](rule& r) {
        r.min_kept_rows = 5;
        r.max_kept_rows = 4;
    });
    refuses_rule("rule.kind", [](rule& r) { r.kind = static_cast<up::rule_kind>(4); });
    refuses_rule("rule.scope", [](rule& r) { r.scope = static_cast<up::mass_scope>(2); });
    refuses_rule("rule.ties", [](rule& r) { r.ties = static_cast<up::tie_order>(-1); });
    refuses_rule("rule.crossing", [](rule& r) { r.crossing = static_cast<up::crossing>(2); });
}

TEST_CASE("select: the workspace size is monotone, and nothing beyond it is written") {
    up::limits bounds;
    std::size_t previous = 0;
    for (std::int32_t rows = 0; rows < 3000; rows += 37) {
        bounds.max_rows = rows;
        const std::size_t bytes = up::block_selector<>(bounds).workspace_bytes();
        CHECK(bytes >= previous);
        CHECK(bytes <= 24u * static_cast<std::size_t>(rows / 64 + 1) + 4 * 256);
        previous = bytes;
    }
    bounds.max_rows = INT32_MAX - 1025; // the most there is
    CHECK(up::block_selector<>(bounds).workspace_bytes() >=
          24u * (static_cast<std::size_t>(bounds.max_rows) / 64));
    bounds.block_rows = 0;
    CHECK(up::block_selector<>(bounds).workspace_bytes() == 0);

    call c;
    memory guarded(c.workspace.bytes() + 256, 0x5a);
    c.workspace = {guarded.data(), c.workspace.bytes()};
    REQUIRE(c.run().ok());
    const auto* end = static_cast<unsigned char*>(guarded.data()) + c.workspace.bytes();
    for (std::int32_t i = 0; i < 256; ++i) {
        REQUIRE(end[i] == 0x5a);
    }
}
