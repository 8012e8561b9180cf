// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What the CUDA estimator makes of numbers, arrays and requests that it can't trust.

#include "gpu_contracts.cuh"

#include <algorithm>
#include <cmath>
#include <iostream>

using namespace importance_test;

TEST_CASE("device faults are the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    std::vector<request> requests = some_requests();
    requests.push_back({31, up::request_tag::prefill, 0, {200}, {0, 1, 1, 0}});   // switched off
    requests.push_back({32, up::request_tag::prefill, 0, {200}, {1, 1, 1, 201}}); // short
    requests.push_back(
        {33, up::request_tag::prefill, 0, {200}, {1, 1, 1, 0}}); // none of its observers is alive
    requests.back().observed = {{900, 1000}};
    for (std::uint64_t seed = 34; seed < 40; ++seed) {
        requests.push_back({seed, up::request_tag::chunk, 40, {200}, {1, 1, 1, 0}});
    }
    const model shape{4, 2, D, G, N};
    step<bf16> what(shape, requests);
    const auto row_of = [&](std::int32_t request, std::int32_t row) {
        return static_cast<std::size_t>(what.cu_seqlens[static_cast<std::size_t>(request)] + row);
    };
    constexpr up::bfloat16 not_a_number{0x7fc0};
    constexpr up::bfloat16 minus_infinity{0xff80};
    constexpr up::bfloat16 huge{0x7180};                        // 2^100
    what.keys[(row_of(9, 0) * 2 + 1) * D + 3] = not_a_number;   // seen by all
    what.keys[(row_of(10, 199) * 2) * D + 63] = minus_infinity; // masked for all rows but the last
    what.queries[(row_of(11, 190) * 4 + 2) * D] = not_a_number; // an observer
    what.queries[(row_of(12, 100) * 4 + 2) * D] = not_a_number; // no observer: no fault
    what.keys[row_of(13, 50) * 2 * D + 5] = huge;               // finite, and so are its scores
    what.data[14].keys[7 * 2 * D] = minus_infinity;             // cached
    const caches<bf16> cached(what);
    device_step<bf16> on_device(what);
    const device_caches<bf16> device_cached(cached);
    masses host = estimate(what, cached.contiguous(), {}, what.tight_limits());
    const auto fault_of = [&](std::int32_t request) {
        std::int32_t segment = 0;
        while (what.segment_request[static_cast<std::size_t>(segment)] != request) {
            ++segment;
        }
        return host.view().faults[segment];
    };
    REQUIRE(fault_of(8) == up::fault_word(up::mass_fault::unscored));
    for (const std::int32_t request : {9, 10, 11, 14}) {
        REQUIRE(fault_of(request) == up::fault_word(up::mass_fault::non_finite));
    }
    REQUIRE(fault_of(12) == 0);
    REQUIRE(fault_of(13) == 0);
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        masses came = estimate_on_device<policy>(on_device, device_cached.contiguous(), {},
                                                 what.tight_limits(), device);
        CHECK(worst_difference(came, host, what.batch()) < 1);
    }

    // Sink logits and scales that aren't finite.
    const device_array<float> sinks(std::vector<float>{0, 1, INFINITY, 0});
    up::attention_params params;
    params.sink_logits = sinks.data();
    masses came = estimate_on_device<policy>(on_device, device_cached.contiguous(), params,
                                             what.tight_limits(), this_device());
    CHECK(came.view().faults[0] == up::fault_word(up::mass_fault::non_finite));
    CHECK((of_segment(came, what.batch(), 0) != of_segment(host, what.batch(), 0)));
}

TEST_CASE("scores whose powers of two leave the range of floats", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    std::vector<request> requests = some_requests();
    for (request& one : requests) {
        one.spread = 120.0f; // scores of hundreds, with either sign
    }
    both what(model{4, 2, D, G, N}, requests);
    masses host = estimate(what.host, what.cached.contiguous(), {}, what.bounds);
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        masses came = what.estimate_here(device);
        const double worst = worst_difference(came, host, what.host.batch());
        std::cout << name_of(device) << ": scores of hundreds, worst difference " << worst << std::endl;
        CHECK(worst < 100); // a unit in the last place of such scores is 1e-5 of a mass, and there are some
    }
}

TEST_CASE("arrays that make no sense are clamped and raise faults", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{4, 2, D, G, N};
    std::vector<request> requests;
    for (std::uint64_t seed = 41; seed < 45; ++seed) {
        requests.push_back({seed, up::request_tag::chunk, 50, {300}, {1, 4, 4, 0}});
        requests.back().forced = {{60, 70}};
    }
    const step<bf16> sound(shape, requests);
    const caches<bf16> cached(sound);
    const device_caches<bf16> device_cached(cached);
    const up::limits bounds = sound.tight_limits();
    const std::int64_t overflow = up::fault_word(up::mass_fault::overflow);
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        /// Spoils a copy of the step; segments with a fault must be exactly those named.
        const auto check_spoiled = [&](const char* how, const std::vector<std::int32_t>& faulty, auto spoil) {
            INFO(how);
            step<bf16> what = sound;
            spoil(what);
            device_step<bf16> on_device(what);
            on_device.batch().num_rows = sound.num_rows();
            masses came =
                estimate_on_device<policy>(on_device, device_cached.contiguous(), {}, bounds, device);
            for (std::int32_t s = 0; s < sound.num_segments(); ++s) {
                CAPTURE(s);
                const bool named = std::find(faulty.begin(), faulty.end(), s) != faulty.end();
                CHECK(came.view().faults[s] == (named ? overflow : 0));
            }
        };
        check_spoiled("nothing", {}, [](step<bf16>&) {});
        // Ranges overlap then, so no segment can be trusted.
        check_spoiled("a segment that ends before it begins", {0, 1, 2, 3},
                      [](step<bf16>& w) { w.cu_segments[2] = 250; });
        check_spoiled("a segment beyond the rows", {3}, [](step<bf16>& w) { w.cu_segments[4] = 1000000; });
        check_spoiled("a segment that begins before the rows", {0},
                      [](step<bf16>& w) { w.cu_segments[0] = -7; });
        check_spoiled("a request that begins after its segment", {2},
                      [](step<bf16>& w) { w.cu_seqlens[2] = 601; });
        check_spoiled("a request that begins before the rows", {2},
                      [](step<bf16>& w) { w.cu_seqlens[2] = -2000000000; });
        check_spoiled("a negative cache", {1}, [](step<bf16>& w) { w.cached_lens[1] = -1; });
        check_spoiled("a cache beyond all bounds", {1}, [](step<bf16>& w) { w.cached_lens[1] = 2147483647; });
        check_spoiled("a request that there isn't", {3}, [](step<bf16>& w) { w.segment_request[3] = 4; });
        check_spoiled("a negative request", {3}, [](step<bf16>& w) { w.segment_request[3] = -1; });
        check_spoiled("spans that fall", {1}, [](step<bf16>& w) { w.forced_offsets[1] = 3; });
        check_spoiled("spans beyond all bounds", {2, 3},
                      [](step<bf16>& w) { w.forced_offsets[3] = 1 << 30; });
        check_spoiled("negative spans", {0, 1}, [](step<bf16>& w) { w.forced_offsets[1] = -1; });
        check_spoiled("a tail and a sink beyond all rows", {}, [](step<bf16>& w) {
            w.options[1].tail = 2147483647;
            w.options[2].tail = -5;
            w.options[2].sink = -5;
            w.options[3].sink = 2147483647;
        });
        check_spoiled("an unknown tag", {},
                      [](step<bf16>& w) { w.tags[1] = static_cast<up::request_tag>(77); });
    }
}

TEST_CASE("spans of a request that don't fit the limits' context are kept with a fault", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{4, 2, D, G, N};
    request many{51, up::request_tag::prefill, 0, std::vector<std::int32_t>(12, 100), {1, 4, 4, 0}};
    both what(shape, {many});
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        what.bounds.max_context_keys = 100 * 66; // 0 + 1 + ... + 11 hundred rows
        masses enough = what.estimate_here(device);
        masses host = estimate(what.host, what.cached.contiguous(), {}, what.bounds);
        CHECK(worst_difference(enough, host, what.host.batch()) < 1);
        what.bounds.max_context_keys = 1000;
        masses few = what.estimate_here(device);
        std::int32_t faults = 0;
        for (std::int32_t s = 0; s < 12; ++s) {
            const std::int64_t fault = few.view().faults[s];
            if (fault == 0) {
                CHECK((of_segment(few, what.host.batch(), s) == of_segment(enough, what.host.batch(), s)));
            } else {
                CHECK(fault == up::fault_word(up::mass_fault::overflow));
                const auto all = of_segment(few, what.host.batch(), s);
                CHECK(std::all_of(all.begin() + 1, all.end(), [](std::int64_t mass) { return mass == 0; }));
                ++faults;
            }
        }
        CHECK(faults > 0);
        CHECK(faults < 12);
    }
}
