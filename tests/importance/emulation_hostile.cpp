// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The functions by which the CUDA estimator plans a step and combines scores to masses, with arrays and
// limits that can't be trusted: the host can't check what lies on a device.

#include "naive_partials.hpp"
#include "random_step.hpp"
#include "serial_estimator.hpp"

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

namespace up = uniprefill;
using namespace importance_test;

namespace {

const std::int64_t overflow = up::fault_word(up::mass_fault::overflow);

/// Plans a step and combines partials that mean nothing. Checks that everything stays in its place: that
/// segments have places of their own within the workspace, that every mass is written, that segments with a
/// fault have none, and others no more than their rows have to give.
/// @param num_rows of the step before it was spoiled
masses require_contained(const step<float>& what, const up::limits& bounds, std::int32_t num_rows) {
    up::batch_view batch = what.batch();
    batch.num_rows = num_rows;
    batch.num_requests = static_cast<std::int32_t>(what.requests().size());
    serial_estimator estimator(bounds, batch, {bounds.block_rows, 64, 256});
    estimator.plan();
    const detail::cuda_buffers& buffers = estimator.buffers();
    const std::int64_t one_slot = bounds.num_kv_heads;
    std::int64_t partials = 0;
    std::int64_t stats = 0;
    std::int32_t cuts = 0;
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
        const detail::cuda_segment& plan = estimator.segment(s);
        INFO("segment " << s);
        REQUIRE(plan.first_row >= 0);
        REQUIRE(plan.rows >= 0);
        REQUIRE(plan.first_row + plan.rows <= num_rows);
        REQUIRE(plan.request >= 0);
        REQUIRE(plan.request < batch.num_requests);
        REQUIRE(plan.out_block + up::num_blocks(plan.rows, bounds.block_rows) <= bounds.max_blocks());
        if (plan.num_observations == 0) {
            continue;
        }
        REQUIRE(plan.num_observations <= std::min(bounds.num_observations, plan.rows));
        REQUIRE(plan.cached >= 0);
        REQUIRE(plan.cached <= bounds.max_cached_tokens);
        REQUIRE(plan.context >= plan.cached);
        REQUIRE(plan.request_row + plan.context - plan.cached == plan.first_row);
        REQUIRE(plan.first_partial >= partials);
        REQUIRE(plan.first_stat >= stats);
        REQUIRE(plan.first_cut >= cuts);
        partials = plan.first_partial + plan.slots() * one_slot * plan.lanes;
        stats = plan.first_stat + one_slot * plan.lanes;
        cuts = plan.first_cut + plan.num_cuts;
        REQUIRE(partials <= buffers.max_partials);
        REQUIRE(stats <= buffers.max_stats);
        REQUIRE(cuts <= buffers.max_cuts);
        for (std::int32_t i = 0; i < plan.num_observations; ++i) {
            const std::int32_t row = detail::observation_row(buffers, plan, s, bounds.num_observations, i);
            REQUIRE(row >= 0);
            REQUIRE(row < plan.rows);
        }
        for (std::int32_t i = 0; i < plan.num_cuts; ++i) {
            const std::int32_t block = buffers.cut_blocks[plan.first_cut + i];
            REQUIRE(block >= (i > 0 ? buffers.cut_blocks[plan.first_cut + i - 1] + 1 : 0));
            REQUIRE(block < up::num_blocks(plan.rows, bounds.block_rows));
        }
        for (std::int64_t i = plan.first_partial; i < partials; ++i) {
            buffers.partials[i] = static_cast<float>(i % 11) - 5.0f;
        }
    }
    masses out(bounds);
    estimator.combine<up::head_sum>(nullptr, out, true, 3);
    REQUIRE(estimator.is_intact());
    const auto nonsense = [](std::int64_t mass) { return mass == masses::nonsense; };
    REQUIRE(std::none_of(out.buffer.begin(), out.buffer.end(), nonsense));
    REQUIRE(std::none_of(out.heads.begin(), out.heads.end(), nonsense));
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
        const detail::cuda_segment& plan = estimator.segment(s);
        double mass = 0;
        for (std::int64_t b = 0; b < up::num_blocks(plan.rows, bounds.block_rows); ++b) {
            mass += out.view().format.to_double(out.view().free[plan.out_block + b] +
                                                out.view().forced[plan.out_block + b]);
        }
        INFO("segment " << s);
        REQUIRE((out.view().faults[s] == 0 || mass == 0));
        REQUIRE(mass <= 1.0001 * bounds.num_heads * plan.num_observations);
    }
    return out;
}

/// Limits of a step, with as many spans in its arrays as they promise.
up::limits limits_of(step<float>& what) {
    up::limits bounds = what.tight_limits();
    what.forced_spans.resize(static_cast<std::size_t>(bounds.max_forced_spans));
    what.observed_spans.resize(static_cast<std::size_t>(bounds.max_forced_spans));
    return bounds;
}

} // namespace

TEST_CASE("arrays that make no sense are clamped and raise faults, on the host", "[importance]") {
    std::vector<request> requests;
    for (std::uint64_t seed = 41; seed < 45; ++seed) {
        requests.push_back({seed, up::request_tag::chunk, 50, {300}, {1, 4, 4, 0}});
        requests.back().forced = {{60, 70}};
    }
    const step<float> sound({4, 2, 1, 64, 16}, requests);
    /// Spoils a copy of the step; segments with a fault must be exactly those named.
    const auto check_spoiled = [&](const char* how, const std::vector<std::int32_t>& faulty,
                                   const std::function<void(step<float>&)>& spoil) {
        INFO(how);
        step<float> what = sound;
        const up::limits bounds = limits_of(what);
        spoil(what);
        masses came = require_contained(what, bounds, sound.num_rows());
        for (std::int32_t s = 0; s < sound.num_segments(); ++s) {
            CAPTURE(s);
            const bool named = std::find(faulty.begin(), faulty.end(), s) != faulty.end();
            CHECK(came.view().faults[s] == (named ? overflow : 0));
        }
    };
    using spoiled = step<float>;
    check_spoiled("nothing", {}, [](spoiled&) {});
    // Ranges overlap then, so no segment can be trusted.
    check_spoiled("a segment that ends before it begins", {0, 1, 2, 3},
                  [](spoiled& w) { w.cu_segments[2] = 250; });
    check_spoiled("a segment beyond the rows", {3}, [](spoiled& w) { w.cu_segments[4] = 1000000; });
    check_spoiled("a segment that begins before the rows", {0}, [](spoiled& w) { w.cu_segments[0] = -7; });
    check_spoiled("a request that begins after its segment", {2}, [](spoiled& w) { w.cu_seqlens[2] = 601; });
    check_spoiled("a request that begins before the rows", {2},
                  [](spoiled& w) { w.cu_seqlens[2] = -2000000000; });
    check_spoiled("a negative cache", {1}, [](spoiled& w) { w.cached_lens[1] = -1; });
    check_spoiled("a cache beyond all bounds", {1}, [](spoiled& w) { w.cached_lens[1] = 2147483647; });
    check_spoiled("a request that there isn't", {3}, [](spoiled& w) { w.segment_request[3] = 4; });
    check_spoiled("a negative request", {3}, [](spoiled& w) { w.segment_request[3] = -1; });
    check_spoiled("spans that fall", {1}, [](spoiled& w) { w.forced_offsets[1] = 3; });
    check_spoiled("spans beyond all bounds", {2, 3}, [](spoiled& w) { w.forced_offsets[3] = 1 << 30; });
    check_spoiled("negative spans", {0, 1}, [](spoiled& w) { w.forced_offsets[1] = -1; });
    check_spoiled("a tail and a sink beyond all rows", {}, [](spoiled& w) {
        w.options[1].tail = 2147483647;
        w.options[2].tail = -5;
        w.options[2].sink = -5;
        w.options[3].sink = 2147483647;
    });
    check_spoiled("an unknown tag", {}, [](spoiled& w) { w.tags[1] = static_cast<up::request_tag>(77); });
}

TEST_CASE("whatever arrays hold, nothing is written beside the workspace", "[importance]") {
    std::int32_t scored = 0;
    for (std::uint64_t i = 0; i < 3000; ++i) {
        generator random(uniprefill_test::seed() * 3000 + i);
        model shape = random.any_model();
        shape.head_dim = 1;
        shape.block_rows = random.among({16, 32, 64, 128, 256});
        std::vector<request> requests;
        for (std::int32_t r = 1 + random.below(4); r > 0; --r) {
            requests.push_back(random.any_request(shape));
        }
        step<float> what(shape, requests);
        const std::int32_t num_rows = what.num_rows();
        const up::limits bounds = limits_of(what);
        const auto anything = [&](std::int32_t was) {
            const auto sum = [&](std::int32_t more) {
                return static_cast<std::int32_t>(static_cast<std::uint32_t>(was) +
                                                 static_cast<std::uint32_t>(more));
            };
            return random.among({sum(1), sum(-1), sum(random.below(300)), was / 2, -random.below(300),
                                 random.below(1 << 30), INT32_MAX, INT32_MIN, 0});
        };
        const auto spoil = [&](std::vector<std::int32_t>& values) {
            if (!values.empty()) {
                const auto at =
                    static_cast<std::size_t>(random.below(static_cast<std::int32_t>(values.size())));
                values[at] = anything(values[at]);
            }
        };
        for (std::int32_t times = 1 + random.below(3); times > 0; --times) {
            const auto r = static_cast<std::size_t>(random.below(static_cast<std::int32_t>(requests.size())));
            const auto span = static_cast<std::size_t>(random.below(bounds.max_forced_spans));
            switch (random.below(11)) {
            case 0:
                spoil(what.cu_seqlens);
                break;
            case 1:
                spoil(what.cu_segments);
                break;
            case 2:
                spoil(what.segment_request);
                break;
            case 3:
                spoil(what.cached_lens);
                break;
            case 4:
                spoil(what.positions);
                break;
            case 5:
                spoil(what.forced_offsets);
                break;
            case 6:
                spoil(what.observed_offsets);
                break;
            case 7:
                what.options[r].sink = anything(what.options[r].sink);
                break;
            case 8:
                what.options[r].tail = anything(what.options[r].tail);
                break;
            case 9:
                what.forced_spans[span] = {anything(50), anything(90)};
                break;
            default:
                what.observed_spans[span] = {anything(50), anything(90)};
            }
        }
        INFO("case " << i);
        masses came = require_contained(what, bounds, num_rows);
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            scored += came.view().faults[s] == 0 ? 1 : 0;
        }
    }
    CHECK(scored > 1000);
}

TEST_CASE("spans that don't fit the limits' context are kept with a fault, on the host", "[importance]") {
    request many{51, up::request_tag::prefill, 0, std::vector<std::int32_t>(12, 100), {1, 4, 4, 0}};
    const step<float> what({4, 2, 3, 64, 16}, {many});
    const auto run = [&](std::int64_t context_keys) {
        up::limits bounds = what.tight_limits();
        bounds.max_context_keys = context_keys;
        serial_estimator estimator(bounds, what.batch(), {64, 128, 512});
        estimator.plan();
        for (std::int32_t s = 0; s < what.num_segments(); ++s) {
            if (estimator.segment(s).num_observations > 0) {
                naive_partials<float>(what, {}, estimator, s).write();
            }
        }
        masses out(bounds);
        estimator.combine<up::head_sum>(nullptr, out, true, 2);
        REQUIRE(estimator.is_intact());
        return out;
    };
    masses enough = run(100 * 66); // 0 + 1 + ... + 11 hundred rows
    masses few = run(1000);
    std::int32_t faults = 0;
    for (std::int32_t s = 0; s < 12; ++s) {
        INFO("segment " << s);
        const std::vector<std::int64_t> all = of_segment(few, what.batch(), s);
        REQUIRE(enough.view().faults[s] == 0);
        if (all[0] == 0) {
            CHECK((all == of_segment(enough, what.batch(), s)));
        } else {
            CHECK(all[0] == overflow);
            CHECK(std::all_of(all.begin() + 1, all.end(), [](std::int64_t mass) { return mass == 0; }));
            ++faults;
        }
    }
    CHECK(faults > 0);
    CHECK(faults < 12);
}

TEST_CASE("scores of a row that are finite but beyond all measure are doubt, on the host", "[importance]") {
    const step<float> what({2, 1, 4, 16, 4}, {{53, up::request_tag::prefill, 0, {100}}});
    const up::limits bounds = what.tight_limits();
    serial_estimator estimator(bounds, what.batch(), {16, 128, 512});
    estimator.plan();
    naive_partials<float>(what, {}, estimator, 0).write();
    const detail::cuda_segment& plan = estimator.segment(0);
    for (std::int64_t slot = 0; slot < plan.slots(); ++slot) {
        estimator.buffers().partials[plan.first_partial + slot * plan.lanes + 5] = -3.0e37f;
    }
    masses out(bounds);
    estimator.combine<up::head_sum>(nullptr, out, true, 2);
    const std::vector<std::int64_t> all = of_segment(out, what.batch(), 0);
    CHECK(all[0] == up::fault_word(up::mass_fault::non_finite));
    CHECK(std::all_of(all.begin() + 1, all.end(), [](std::int64_t mass) { return mass == 0; }));
}

TEST_CASE("more cut blocks than score kernels can number are kept with a fault, on the host",
          "[importance]") {
    for (const std::int32_t spans : {32767, 32768}) {
        request many{54, up::request_tag::prefill, 0, {32768 * 16}, {1, 0, 0, 0}};
        for (std::int32_t i = 0; i < spans; ++i) {
            many.forced.push_back({16 * i + 3, 16 * i + 5});
        }
        const step<float> what({1, 1, 1, 16, 1}, {many});
        up::limits bounds = what.tight_limits();
        bounds.max_forced_spans = spans;
        serial_estimator estimator(bounds, what.batch(), {16, 128, 512});
        estimator.plan();
        const detail::cuda_segment& plan = estimator.segment(0);
        INFO(spans << " spans");
        CHECK((plan.num_observations > 0) == (spans == 32767));
        CHECK(plan.num_cuts == (spans == 32767 ? spans : 0));
        CHECK(plan.has_fault == (spans == 32767 ? 0 : 1));
        CHECK(plan.fault == up::mass_fault::overflow);
        CHECK(estimator.is_intact());
    }
}
