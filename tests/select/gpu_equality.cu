// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The device's selections against the host's, in every output.

#include "gpu_step.cuh"

using namespace select_test;

namespace {

/// Small steps have limits of their own; this makes room for any of them.
up::limits roomy(const up::limits& bounds) {
    up::limits made = bounds;
    made.max_forced_spans = 1 << 12;
    return made;
}

} // namespace

TEST_CASE("gpu select: random steps come out as on the host") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 20);
    for (std::int32_t i = 0; i < scaled(10000); ++i) {
        step what = random_step(random);
        what.bounds = roomy(what.bounds);
        const auto wanted = select(what);
        REQUIRE(wanted->result.ok());
        up::cuda_device device = this_device();
        const up::cuda_selector_options options = choices(i, device);
        INFO("case " << i);
        device_step<up::selection_rule> memory(what.bounds);
        check_run(memory, what, what.rules, *wanted, device, options);
    }
}

TEST_CASE("gpu select: the same with any grid and cluster and number of launches") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 21);
    for (const std::int32_t requests : {1, 3, 40, 200}) {
        step what = many_requests(random, requests, requests == 1 ? 3000 : 6000 / requests, 16);
        const auto wanted = select(what);
        REQUIRE(wanted->result.ok());
        device_step<up::selection_rule> memory(what.bounds);
        for (std::int32_t i = 0; i < scaled(105, enough_choices); ++i) {
            up::cuda_device device = this_device();
            const up::cuda_selector_options options = choices(i, device);
            INFO(requests << " requests, choice " << i);
            check_run(memory, what, what.rules, *wanted, device, options);
        }
    }
}

TEST_CASE("gpu select: thousands of requests") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 22);
    step what = many_requests(random, scaled(4096, 300), 20, 16);
    const auto wanted = select(what);
    REQUIRE(wanted->result.ok());
    device_step<up::selection_rule> memory(what.bounds);
    for (const std::int32_t grid : {0, 9, 1}) {
        up::cuda_device device = this_device();
        device.max_ctas = grid;
        check_run(memory, what, what.rules, *wanted, device, {});
    }
}

TEST_CASE("gpu select: one request of 262144 blocks") {
    if (!has_device()) {
        return;
    }
    generator random(uniprefill_test::seed() + 23);
    const std::int32_t blocks = scaled(262144, 20000);
    for (const std::int32_t style : {0, 1, 2}) {
        step what(16);
        up::selection_rule rule = style == 0   ? up::selection_rule::top_p(0.98)
                                  : style == 1 ? up::selection_rule::fixed_budget(blocks * 4 - 48573)
                                               : up::selection_rule::top_p(0.9, up::mass_scope::all);
        if (style == 2) {
            rule.ties = up::tie_order::higher_block_first;
        }
        what.add_request(blocks * 16 - 5, {1, 128, 128, 0}, rule);
        what.close();
        for (std::int32_t b = 0; b < blocks; ++b) {
            what.free_mass(0, b) =
                style == 2 ? 3 : static_cast<std::int64_t>(random.next() >> 22 >> random.below(30));
            what.forced_mass(0, b) = b < 8 ? 1000 : 0;
        }
        const auto wanted = select(what);
        REQUIRE(wanted->result.ok());
        REQUIRE(wanted->outcome().reason == up::keep_reason::selected);
        device_step<up::selection_rule> memory(what.bounds);
        for (std::int32_t i = 0; i < 3; ++i) {
            up::cuda_device device = this_device();
            up::cuda_selector_options options;
            device.max_ctas = i == 2 ? 5 : 0;
            options.launches = i == 1 ? up::cuda_selector_options::launch_count::one
                                      : up::cuda_selector_options::launch_count::automatic;
            INFO("style " << style << ", choice " << i);
            check_run(memory, what, what.rules, *wanted, device, options);
        }
    }
}

TEST_CASE("gpu select: among many blocks without any mass, those that are no candidates don't count") {
    if (!has_device()) {
        return;
    }
    for (const auto ties : {up::tie_order::lower_block_first, up::tie_order::higher_block_first}) {
        step what(8);
        up::selection_rule rule = up::selection_rule::fixed_ratio(0.5);
        rule.ties = ties;
        what.add_request(8 * 1000, {1, 8 * 150, 8 * 150, 0}, rule);
        what.close();
        what.free_mass(0, 470) = 1000;
        const auto wanted = select(what);
        REQUIRE(wanted->result.ok());
        REQUIRE(wanted->outcome().kept == 8 * (300 + 350));
        device_step<up::selection_rule> memory(what.bounds);
        for (std::int32_t i = 0; i < enough_choices; ++i) {
            up::cuda_device device = this_device();
            const up::cuda_selector_options options = choices(i, device);
            INFO("choice " << i);
            check_run(memory, what, what.rules, *wanted, device, options);
        }
    }
}

TEST_CASE("gpu select: a graph replayed with other lengths and rules and options and spans and masses") {
    if (!has_device()) {
        return;
    }
    using launch_count = up::cuda_selector_options::launch_count;
    generator random(uniprefill_test::seed() + 24);
    for (const launch_count launches : {launch_count::one, launch_count::two}) {
        constexpr std::int32_t requests = 17;
        constexpr std::int32_t rows = requests * 2 * 30 * 16;
        up::limits bounds = many_requests(random, requests, 30, 16).bounds;
        bounds.max_rows = rows;
        device_step<up::selection_rule> memory(bounds);
        up::cuda_selector_options options;
        options.launches = launches;
        // Once before, so that nothing is loaded for the first time while a graph is captured.
        step first = many_requests(random, requests, 30, 16);
        memory.upload(host_arrays<up::selection_rule>(first, first.rules), false);
        memory.run(this_device(), options, memory.batch(requests, requests, rows), rows, nullptr);
        check_cuda(cudaDeviceSynchronize(), "first run");
        captured_graph graph([&](cudaStream_t stream) {
            memory.run(this_device(), options, memory.batch(requests, requests, rows), rows, stream);
        });
        for (std::int32_t i = 0; i < scaled(50, 3); ++i) {
            step what = many_requests(random, requests, 30, 16);
            what.bounds = bounds;
            // Masses lie where the graph's limits put them.
            what.rank_buffer.assign(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), 0);
            for (std::int32_t s = 0; s < what.num_segments(); ++s) {
                randomise_masses(random, what, s);
            }
            const auto wanted = select(what);
            REQUIRE(wanted->result.ok());
            memory.upload(host_arrays<up::selection_rule>(what, what.rules), false);
            graph.replay();
            INFO("replay " << i);
            check_alike(what, *wanted, memory.download(), rows);
        }
    }
}
