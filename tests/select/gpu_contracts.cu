// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What is particular to the device: rules of one's own, bounds, and arrays that the host backend would
// refuse.

#include "gpu_step.cuh"

#include <functional>

namespace stranger {

/// The k heaviest blocks.
struct heaviest : uniprefill::rule_base {
    std::int32_t k = 1;
    __host__ __device__ std::int32_t keep_count(const uniprefill::ranked_blocks& ranked) const noexcept {
        return ranked.sums[ranked.count - 1] == ranked.total ? k : -1;
    }
};

} // namespace stranger

using namespace select_test;
using stranger::heaviest;

namespace {

/// A step of a few requests without anything wrong.
step sound_step(std::int32_t requests, std::int32_t rows) {
    step what(8);
    for (std::int32_t r = 0; r < requests; ++r) {
        what.add_request(rows, {1, 5, 9, 0}, up::selection_rule::top_p(0.5));
    }
    what.close();
    for (std::int32_t s = 0; s < requests; ++s) {
        for (std::int32_t b = 0; b < what.blocks_of(s); ++b) {
            what.free_mass(s, b) = 1 + (b * 7 + s) % 13;
        }
    }
    return what;
}

struct outputs {
    std::vector<up::keep_reason> reasons;
    std::vector<std::int32_t> kept_to_old;
    std::vector<std::int32_t> old_to_kept;
    std::vector<std::int32_t> cu_seqlens;
    std::vector<std::int32_t> kept;
};

/// Runs with spoiled arrays, in one launch and in two, which must agree; checks that maps are inverse to each
/// other.
template <class Spoil>
outputs run_spoiled(const step& what, std::int32_t kept_bound, Spoil spoil) {
    host_arrays<up::selection_rule> arrays(what, what.rules);
    spoil(arrays);
    device_step<up::selection_rule> memory(what.bounds);
    const auto rows = static_cast<std::int32_t>(what.positions.size());
    outputs result;
    for (std::int32_t i = 0; i < 6; ++i) {
        up::cuda_device device = this_device();
        const up::cuda_selector_options options = choices(2 * i + 1, device);
        memory.upload(arrays, !arrays.cu_segments.empty());
        memory.run(device, options, memory.batch(what.num_requests(), what.num_segments(), rows), kept_bound,
                   nullptr);
        const up::selection out = memory.download();
        outputs came;
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            came.reasons.push_back(out.outcomes[s].reason);
            came.kept.push_back(out.outcomes[s].kept);
        }
        came.kept_to_old.assign(out.kept_to_old, out.kept_to_old + kept_bound);
        came.old_to_kept.assign(out.old_to_kept, out.old_to_kept + rows);
        came.cu_seqlens.assign(out.cu_seqlens, out.cu_seqlens + what.num_requests() + 1);
        REQUIRE(came.cu_seqlens.front() == 0);
        REQUIRE(std::is_sorted(came.cu_seqlens.begin(), came.cu_seqlens.end()));
        const std::int32_t total = came.cu_seqlens.back();
        REQUIRE(total <= kept_bound);
        for (std::int32_t j = 0; j < kept_bound; ++j) {
            const std::int32_t row = came.kept_to_old[static_cast<std::size_t>(j)];
            REQUIRE((j < total) == (row >= 0));
            REQUIRE(row < rows);
            REQUIRE((row < 0 || came.old_to_kept[static_cast<std::size_t>(row)] == j));
        }
        if (i > 0) {
            REQUIRE(came.kept_to_old == result.kept_to_old);
            REQUIRE(came.old_to_kept == result.old_to_kept);
            REQUIRE(came.cu_seqlens == result.cu_seqlens);
            REQUIRE(came.reasons == result.reasons);
            REQUIRE(came.kept == result.kept);
        }
        result = came;
    }
    return result;
}

using reason = up::keep_reason;

} // namespace

TEST_CASE("gpu select: nothing in a step") {
    if (!has_device()) {
        return;
    }
    step none(8);
    none.close(3);
    const auto wanted = select(none);
    REQUIRE(wanted->result.ok());
    device_step<up::selection_rule> memory(none.bounds);
    check_run(memory, none, none.rules, *wanted, this_device(), {});
}

TEST_CASE("gpu select: segments without rows") {
    if (!has_device()) {
        return;
    }
    for (const std::int32_t empty : {1, 3, 40}) {
        step what(8);
        for (std::int32_t r = 0; r < empty; ++r) {
            what.add_request(0, {}, up::selection_rule::top_p(0.5));
            what.add_request(r % 2 == 0 ? 4000 : 20, {1, 1, 1, 0}, up::selection_rule::top_p(0.5));
        }
        what.add_request(0, {}, up::selection_rule::fixed_budget(4));
        what.close();
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            for (std::int32_t b = 0; b < what.blocks_of(s); ++b) {
                what.free_mass(s, b) = 1 + (b * 7 + s) % 13;
            }
        }
        const auto wanted = select(what);
        REQUIRE(wanted->result.ok());
        for (std::int32_t i = 0; i < scaled(105, enough_choices); ++i) {
            up::cuda_device device = this_device();
            const up::cuda_selector_options options = choices(i, device);
            INFO(empty << " empty, choice " << i);
            device_step<up::selection_rule> memory(what.bounds);
            check_run(memory, what, what.rules, *wanted, device, options);
        }
    }
}

TEST_CASE("gpu select: what makes no sense keeps its segment whole") {
    if (!has_device()) {
        return;
    }
    step what = sound_step(4, 100);
    what.bounds.max_forced_spans = 8;
    const auto wanted = select(what);
    const auto check_one = [&](reason told,
                               const std::function<void(host_arrays<up::selection_rule>&)>& spoil) {
        const outputs came = run_spoiled(what, 400, spoil);
        for (std::size_t s = 0; s < 4; ++s) {
            INFO("segment " << s);
            CHECK(came.reasons[s] == (s == 2 ? told : reason::selected));
            CHECK(came.kept[s] == (s == 2 ? 100 : wanted->outcome(static_cast<std::int32_t>(s)).kept));
        }
    };
    check_one(reason::invalid, [](auto& a) { a.rules[2].p.value = 0; });
    check_one(reason::invalid, [](auto& a) { a.rules[2].kind = static_cast<up::rule_kind>(77); });
    check_one(reason::invalid, [](auto& a) { a.rules[2].max_kept_rows = -4; });
    check_one(reason::invalid, [](auto& a) { a.options[2].sink = -1; });
    check_one(reason::invalid, [](auto& a) { a.options[2].tail = INT32_MIN; });
    check_one(reason::invalid, [](auto& a) { a.tags[2] = static_cast<up::request_tag>(-9); });
    check_one(reason::invalid, [](auto& a) {
        a.spans = {{20, 30}, {25, 40}};
        a.span_offsets = {0, 0, 0, 2, 2};
    });
    check_one(reason::overflow, [](auto& a) {
        a.span_offsets = {0, 0, 0, 9, 9};
        a.span_offsets[3] = 9;
        a.span_offsets[4] = 9;
        a.spans.assign(8, {5, 5});
    });
    // Under exact rows a fault voids the output, of B rows.
    const outputs exact = run_spoiled(what, 400, [](auto& a) {
        a.rules[2] = up::selection_rule::fixed_budget(40);
        a.options[2].tail = -1;
    });
    CHECK(exact.reasons[2] == reason::rerun_dense);
    CHECK(exact.kept[2] == 40);
}

TEST_CASE("gpu select: segments in no order keep the whole step in place") {
    if (!has_device()) {
        return;
    }
    step what = sound_step(4, 100);
    const auto check_all = [&](const std::function<void(host_arrays<up::selection_rule>&)>& spoil) {
        const outputs came = run_spoiled(what, 400, spoil);
        for (std::int32_t row = 0; row < 400; ++row) {
            REQUIRE(came.old_to_kept[static_cast<std::size_t>(row)] == row);
        }
        CHECK(came.cu_seqlens.back() == 400);
        for (const reason told : came.reasons) {
            CHECK(told == reason::invalid);
        }
    };
    check_all([](auto& a) { a.cu_seqlens = {0, 100, 50, 300, 400}; });
    check_all([](auto& a) { a.cu_seqlens = {0, 100, 200, 300, 401}; });
    check_all([](auto& a) { a.cu_seqlens = {7, 100, 200, 300, 400}; });
    check_all([](auto& a) { a.cu_seqlens = {0, -100, INT32_MAX, INT32_MIN, 400}; });
    const auto segments = [](auto& a, std::vector<std::int32_t> offsets, std::vector<std::int32_t> requests) {
        a.cu_segments = offsets;
        a.segment_request = requests;
    };
    check_all([&](auto& a) { segments(a, {0, 100, 200, 300, 400}, {0, 2, 2, 3}); });
    check_all([&](auto& a) { segments(a, {0, 100, 200, 300, 400}, {0, 0, 1, 2}); });
    check_all([&](auto& a) { segments(a, {0, 100, 220, 300, 400}, {0, 1, 2, 3}); });
    check_all([&](auto& a) { segments(a, {0, 100, 200, 300, 400}, {0, 1, 2, 99999999}); });
    check_all([&](auto& a) { segments(a, {0, 100, 200, 300, 400}, {0, -5, 2, 3}); });
}

TEST_CASE("gpu select: rubbish everywhere touches nothing but the outputs") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 31);
    for (std::int32_t i = 0; i < scaled(150, 10); ++i) {
        step what = sound_step(5, 200);
        what.bounds.max_forced_spans = 16;
        run_spoiled(what, 1000, [&](host_arrays<up::selection_rule>& a) {
            const auto spoil = [&](auto& values, std::int32_t one_in) {
                auto* words = reinterpret_cast<std::uint32_t*>(values.data());
                const std::size_t count = values.size() * sizeof(values[0]) / 4;
                for (std::size_t w = 0; w < count; ++w) {
                    if (random.chance(one_in)) {
                        words[w] = static_cast<std::uint32_t>(random.next() >> random.below(64));
                    }
                }
            };
            a.spans.resize(16);
            for (std::int32_t s = 0; s < 16; ++s) {
                a.spans[static_cast<std::size_t>(s)] = {12 * s, 12 * s + 5};
            }
            a.span_offsets = {0, 4, 4, 9, 16, 16};
            spoil(a.positions, 1 + i % 3);
            spoil(a.spans, i % 2 == 0 ? 1000 : 4);
            spoil(a.span_offsets, i % 2 == 0 ? 1000 : 4);
            spoil(a.options, 6);
            spoil(a.rules, 12);
            spoil(a.tags, 30);
            spoil(a.rank_buffer, i % 4 == 0 ? 3 : 1000);
            if (i % 5 == 0) {
                spoil(a.cu_seqlens, 3);
            }
        });
    }
}

TEST_CASE("gpu select: a bound of kept rows that the engine knows") {
    if (!has_device()) {
        return;
    }
    step what = sound_step(4, 100);
    for (auto& rule : what.rules) {
        rule = up::selection_rule::fixed_budget(30);
    }
    const auto wanted = select(what);
    REQUIRE(wanted->out.kept_bound == 120);
    const outputs fits = run_spoiled(what, 120, [](auto&) {});
    for (std::int32_t j = 0; j < 120; ++j) {
        CHECK(fits.kept_to_old[static_cast<std::size_t>(j)] == wanted->out.kept_to_old[j]);
    }
    CHECK(fits.reasons == std::vector<reason>(4, reason::selected));
    // One request is switched off, which the engine didn't count.
    const outputs beyond = run_spoiled(what, 120, [](auto& a) { a.options[1].enabled = 0; });
    CHECK(beyond.reasons == std::vector<reason>{reason::selected, reason::rerun_dense, reason::rerun_dense,
                                                reason::rerun_dense});
    CHECK(beyond.kept == std::vector<std::int32_t>{30, 90, 0, 0});
    CHECK(beyond.cu_seqlens == std::vector<std::int32_t>{0, 30, 120, 120, 120});
}

TEST_CASE("gpu select: wrong arguments are named and nothing is launched") {
    up::cuda_device device; // none is needed for this
    step what = sound_step(3, 20);
    up::batch_view batch = what.batch();
    batch.space = up::memory_space::device;
    up::mass_view masses = what.masses();
    masses.space = up::memory_space::device;
    decision made(what.bounds);
    made.out.space = up::memory_space::device;
    const up::block_selector<up::selection_rule, up::backend::cuda> selector(what.bounds, device);
    memory scratch(selector.workspace_bytes());
    const auto refuses = [&](const std::string& argument, const std::function<void()>& spoil) {
        const up::batch_view kept_batch = batch;
        const up::mass_view kept_masses = masses;
        const up::selection kept_out = made.out;
        spoil();
        const up::status came =
            selector.run(masses, batch, what.rules.data(), made.out, scratch.workspace(), nullptr);
        CHECK(came.argument == argument);
        CHECK_FALSE(came.ok());
        batch = kept_batch;
        masses = kept_masses;
        made.out = kept_out;
    };
    refuses("batch.space", [&] { batch.space = up::memory_space::host; });
    refuses("batch.num_requests", [&] { batch.num_requests = 4; });
    refuses("batch.num_segments", [&] { batch.num_segments = 2; });
    refuses("batch.num_rows", [&] { batch.num_rows = 61; });
    refuses("batch.tags", [&] { batch.tags = nullptr; });
    refuses("batch.cu_seqlens", [&] { batch.cu_seqlens = nullptr; });
    refuses("batch.positions", [&] { batch.positions = nullptr; });
    refuses("batch.cu_segments", [&] { batch.cu_segments = what.cu_segments.data(); });
    refuses("masses.space", [&] { masses.space = up::memory_space::host; });
    refuses("masses.free", [&] { masses.free = nullptr; });
    refuses("masses.num_segments", [&] { masses.num_segments = 2; });
    refuses("masses.num_blocks", [&] { masses.num_blocks = 9; });
    refuses("out.space", [&] { made.out.space = up::memory_space::host; });
    refuses("out.block_rows", [&] { made.out.block_rows = 16; });
    refuses("out", [&] { made.out.keep_bits = nullptr; });
    refuses("out", [&] { made.out.max_rows = 59; });
    refuses("out", [&] { made.out.max_segments = 2; });
    CHECK(selector.run(masses, batch, nullptr, made.out, scratch.workspace(), nullptr).argument ==
          std::string("rules"));
    CHECK(
        selector.run(masses, batch, what.rules.data(), 61, made.out, scratch.workspace(), nullptr).argument ==
        std::string("kept_bound"));
    CHECK(selector.run(masses, batch, what.rules.data(), made.out, {}, nullptr).argument ==
          std::string("workspace"));
    CHECK(up::block_selector<heaviest, up::backend::cuda>(what.bounds, device).workspace_bytes() >
          selector.workspace_bytes());
}

TEST_CASE("gpu select: a rule of one's own is asked as by the host") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 30);
    for (std::int32_t i = 0; i < scaled(1500); ++i) {
        step what = random_step(random);
        what.bounds.max_forced_spans = 1 << 12;
        std::vector<heaviest> rules(what.rules.size());
        for (std::size_t r = 0; r < rules.size(); ++r) {
            static_cast<up::rule_base&>(rules[r]) = what.rules[r];
            rules[r].k = static_cast<std::int32_t>(random.below(12)) - 1;
        }
        const auto wanted = select(what, rules);
        REQUIRE(wanted->result.ok());
        up::cuda_device device = this_device();
        const up::cuda_selector_options options = choices(i, device);
        INFO("case " << i);
        device_step<heaviest> memory(what.bounds);
        check_run(memory, what, rules, *wanted, device, options);
    }
    const std::int32_t blocks = scaled(20000, 6000);
    step large(8);
    std::vector<heaviest> rules(2);
    for (std::int32_t r = 0; r < 2; ++r) {
        large.add_request(8 * blocks + r, {1, 0, 0, 0}, {});
        rules[static_cast<std::size_t>(r)].k = blocks / 3;
    }
    large.close();
    for (std::int32_t s = 0; s < 2; ++s) {
        for (std::int32_t b = 0; b < large.blocks_of(s); ++b) {
            large.free_mass(s, b) =
                s == 0 ? random.below(1000) : static_cast<std::int64_t>(random.next() >> 20);
        }
    }
    const auto wanted = select(large, rules);
    REQUIRE(wanted->result.ok());
    device_step<heaviest> memory(large.bounds);
    check_run(memory, large, rules, *wanted, this_device(), {});
}
