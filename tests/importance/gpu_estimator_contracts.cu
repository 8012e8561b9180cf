// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What the CUDA estimator promises whatever the element type: the same bits for any grid, packing and number
// of ranks; graphs, hostile arrays, faults, bounds; keep sets that are the host's.

#include "gpu_step.cuh"
#include "support/cuda_calls.hpp"

#include <uniprefill/select/selector.hpp>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <iostream>

namespace up = uniprefill;
using namespace importance_test;
using uniprefill_test::captured_graph;
using uniprefill_test::check_cuda;
using uniprefill_test::cuda_calls;

namespace {

constexpr std::int32_t G = 16;
constexpr std::int32_t N = 32;
constexpr std::int32_t D = 64;
using bf16 = up::bfloat16;
using policy = up::estimator_policy<G, N, up::head_sum, D>;
using cache_view = up::contiguous_cache<bf16>;

constexpr bool has_sm90 = up::detail::score_bodies<bf16, bf16, cache_view, D, G>::has_sm90;

const char* name_of(const up::cuda_device& device) {
    return device.body == up::cuda_body::sm90 ? "wgmma" : "portable";
}

/// A share of the full number of random cases, for runs under tools that are slow.
std::int32_t scaled(std::int32_t count) {
    const char* const scale = std::getenv("UNIPREFILL_TEST_SCALE");
    const double share = scale != nullptr ? std::atof(scale) : 1.0;
    return std::max(1, static_cast<std::int32_t>(count * share));
}

std::vector<request> some_requests() {
    std::vector<request> requests;
    requests.push_back({21, up::request_tag::prefill, 0, {533}, {1, 100, 128, 0}});
    requests.push_back({22, up::request_tag::prefill, 0, {5}, {1, 1, 1, 0}});
    requests.push_back({23, up::request_tag::chunk, 77, {170, 0, 229}, {1, 64, 30, 0}});
    requests.push_back({24, up::request_tag::decode, 300, {1}});
    requests.push_back({25, up::request_tag::prefill, 0, {0}, {1, 4, 8, 0}});
    requests.push_back({26, up::request_tag::chunk, 1000, {300}, {1, 0, 0, 0}});
    requests[0].forced = {{130, 141}, {163, 330}};
    requests[2].observed = {{90, 200}};
    requests[5].gaps = true;
    return requests;
}

/// A step and its cache in both memories.
struct both {
    step<bf16> host;
    caches<bf16> cached;
    device_step<bf16> device;
    device_caches<bf16> device_cached;
    up::limits bounds;

    both(const model& shape, const std::vector<request>& requests)
        : host(shape, requests)
        , cached(host)
        , device(host)
        , device_cached(cached)
        , bounds(host.tight_limits()) {}
    masses estimate_here(const up::cuda_device& on) {
        return estimate_on_device<policy>(device, device_cached.contiguous(), {}, bounds, on);
    }
};

} // namespace

TEST_CASE("device masses are the same bits for any grid and any packing", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{8, 2, D, G, N};
    both all(shape, some_requests());
    for (up::cuda_device device : each_body<has_sm90>()) {
        INFO(name_of(device));
        masses packed = all.estimate_here(device);
        for (const std::int32_t ctas : {1, 2, 7, 31}) {
            device.max_ctas = ctas;
            const masses again = all.estimate_here(device);
            CHECK((again.buffer == packed.buffer));
            CHECK((again.heads == packed.heads));
        }
        device.max_ctas = 0;
        std::int32_t segment = 0;
        for (const request& one : some_requests()) {
            both alone(shape, {one});
            masses single = alone.estimate_here(device);
            for (std::int32_t s = 0; s < static_cast<std::int32_t>(one.segments.size()); ++s, ++segment) {
                CAPTURE(segment);
                CHECK((of_segment(single, alone.host.batch(), s) ==
                       of_segment(packed, all.host.batch(), segment)));
            }
        }
    }
}

TEST_CASE("rank buffers add up to that of one rank", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{16, 8, D, G, N};
    both all(shape, some_requests());
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        const masses whole = all.estimate_here(device);
        for (const std::int32_t ranks : {2, 4, 8}) {
            up::limits bounds = all.bounds;
            bounds.num_global_heads = bounds.num_heads;
            bounds.num_heads /= ranks;
            bounds.num_kv_heads /= ranks;
            std::vector<std::int64_t> sum(whole.buffer.size(), 0);
            for (std::int32_t rank = 0; rank < ranks; ++rank) {
                auto queries = all.device.query_rows();
                queries.data += rank * bounds.num_heads * D;
                queries.num_heads = bounds.num_heads;
                auto keys = all.device.key_rows();
                keys.data += rank * bounds.num_kv_heads * D;
                keys.num_heads = bounds.num_kv_heads;
                auto cached = all.device_cached.contiguous();
                cached.data += rank * bounds.num_kv_heads * D;
                const masses part =
                    run_on_device<policy>(queries, up::key_source<bf16, cache_view>{keys, cached}, {},
                                          all.device.batch(), bounds, device);
                for (std::size_t i = 0; i < sum.size(); ++i) {
                    sum[i] += part.buffer[i];
                }
            }
            CAPTURE(ranks);
            const auto faults = sum.end() - bounds.max_segments;
            CHECK(std::equal(sum.begin(), faults, whole.buffer.begin()));
            CHECK(std::equal(faults, sum.end(), whole.buffer.end() - bounds.max_segments,
                             [](std::int64_t a, std::int64_t b) { return (a != 0) == (b != 0); }));
        }
    }
}

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

TEST_CASE("a run makes no calls but launches, and replays with other lengths and switches", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{4, 2, D, G, N};
    const std::vector<request> first = some_requests();
    std::vector<request> second = first;
    second[0].segments = {200};
    second[0].forced = {{10, 20}, {30, 40}};
    second[1].options.enabled = 0;
    second[2].segments = {40, 300, 1};
    second[2].cached = 12;
    second[3].tag = up::request_tag::verify;
    second[4].segments = {40};
    second[5].seed = 61;
    second[5].cached = 600;
    const step<bf16> steps[] = {step<bf16>(shape, first), step<bf16>(shape, second)};
    const up::limits bounds = steps[0].tight_limits();
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        device_step<bf16> on_device(steps[0]);
        const caches<bf16> cached[] = {caches<bf16>(steps[0]), caches<bf16>(steps[1])};
        device_array<bf16> rows(cached[0].rows());
        cache_view view = cached[0].contiguous();
        view.data = rows.data();
        const up::importance_estimator<policy, up::backend::cuda> estimator(bounds, device);
        REQUIRE(estimator.template prepare<bf16, bf16, cache_view>().ok());
        const std::size_t bytes = estimator.workspace_bytes();
        const device_array<unsigned char> memory(bytes);
        const device_masses result(bounds);
        const auto run = [&](up::backend::cuda::stream stream) {
            const up::status done = estimator.run(
                on_device.query_rows(), up::key_source<bf16, cache_view>{on_device.key_rows(), view}, {},
                on_device.batch(), result.view(), result.head_view(), up::workspace(memory.data(), bytes),
                stream);
            REQUIRE(done.ok());
        };
        const cuda_calls before = cuda_calls::now();
        run(nullptr);
        CHECK(before.since() == "");
        masses eager = result.get();

        captured_graph graph(run);
        for (const std::int32_t which : {1, 0, 1}) {
            on_device.assign(steps[which]);
            // The second step's cache rows lie as far apart as the first's.
            std::vector<bf16> moved(cached[0].rows().size());
            const std::int64_t from = cached[which].contiguous().request_stride;
            for (std::int64_t r = 0; r < 6; ++r) {
                std::copy_n(cached[which].rows().begin() + r * from, from,
                            moved.begin() + r * view.request_stride);
            }
            rows.set(moved);
            graph.replay();
            masses replayed = result.get();
            run(nullptr);
            CHECK((replayed.buffer == result.get().buffer));
            masses host = estimate(steps[which], cached[which].contiguous(), {}, bounds);
            CHECK(worst_difference(replayed, host, steps[which].batch()) < 1);
            if (which == 0) {
                CHECK((replayed.buffer == eager.buffer));
                CHECK((replayed.heads == eager.heads));
            }
        }
    }
}

namespace {

/// Elements that look random, with a standard deviation of about @p spread; 0: zeros.
__global__ void fill(bf16* values, std::int64_t count, float spread) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        std::uint64_t z = static_cast<std::uint64_t>(i) * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        std::int32_t sum = -1020 * 2; // eight bytes, each uniform in 0..255, have a deviation of 209 together
        for (std::int32_t byte = 0; byte < 8; ++byte) {
            sum += static_cast<std::int32_t>(z >> (8 * byte) & 255u);
        }
        values[i] = up::from_float<bf16>(static_cast<float>(sum + 1020) * (spread / 209.0f));
    }
}
void fill(const device_array<bf16>& values, float spread) {
    fill<<<1024, 256>>>(values.data(), static_cast<std::int64_t>(values.size()), spread);
    check_cuda(cudaGetLastError(), "fill");
}
bool has_memory(std::size_t bytes) {
    std::size_t available = 0;
    std::size_t total = 0;
    check_cuda(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
    if (available < bytes) {
        uniprefill_test::skip("too little device memory");
        return false;
    }
    return true;
}
std::vector<std::int32_t> ascending(std::int32_t count) {
    std::vector<std::int32_t> numbers(static_cast<std::size_t>(count));
    for (std::int32_t i = 0; i < count; ++i) {
        numbers[static_cast<std::size_t>(i)] = i;
    }
    return numbers;
}

} // namespace

TEST_CASE("2 million tokens", "[gpu]") {
    if (!uniprefill_test::has_device() || !has_memory(std::size_t{3} << 30)) {
        return;
    }
    constexpr std::int32_t tokens = 2000000;
    constexpr std::int32_t heads = 2;
    up::limits bounds;
    bounds.max_rows = tokens;
    bounds.max_cached_tokens = tokens;
    bounds.num_heads = heads;
    bounds.head_dim = D;
    bounds.block_rows = G;
    bounds.num_observations = N;
    const device_array<bf16> queries(std::size_t{tokens} * heads * D);
    const device_array<bf16> keys(std::size_t{tokens} * D);
    const device_array<std::int32_t> positions(ascending(tokens));
    const device_array<up::request_tag> tags(std::vector<up::request_tag>{up::request_tag::chunk});
    device_array<std::int32_t> cu_seqlens(std::vector<std::int32_t>{0, tokens});
    device_array<std::int32_t> cached_lens(std::vector<std::int32_t>{0});
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = 1;
    batch.num_rows = tokens;
    batch.tags = tags.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.positions = positions.data();
    batch.cached_lens = cached_lens.data();
    const cache_view cached{keys.data(), std::int64_t{tokens} * D, D, D};
    const up::key_source<bf16, cache_view> source{{keys.data(), D, D, tokens, 1, D}, cached};
    const up::head_rows<const bf16> query_rows{queries.data(), heads * D, D, tokens, heads, D};
    fill(keys, 1.0f);
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        fill(queries, 2.0f);
        cu_seqlens.set({0, tokens});
        cached_lens.set({0});
        masses all = run_on_device<policy>(query_rows, source, {}, batch, bounds, device);
        REQUIRE(all.view().faults[0] == 0);
        double total = 0;
        std::int64_t empty = 0;
        for (std::int64_t b = 0; b < tokens / G; ++b) {
            const double mass = all.view().format.to_double(all.view().free[b] + all.view().forced[b]);
            total += mass;
            empty += mass > 0 ? 0 : 1;
        }
        std::cout << name_of(device) << ": total mass of 2 million keys " << total << " of " << N * heads
                  << std::endl;
        CHECK(std::abs(total - N * heads) < 1e-4 * N * heads);
        CHECK(empty == 0);

        // All keys alike, all but the last rows cached: each key has the same share.
        constexpr std::int32_t own = 4000;
        fill(queries, 0.0f);
        cu_seqlens.set({0, own});
        cached_lens.set({tokens});
        masses last = run_on_device<policy>(query_rows, source, {}, batch, bounds, device);
        REQUIRE(last.view().faults[0] == 0);
        double worst = 0;
        for (std::int64_t b = 0; b < (own - N) / G; ++b) {
            double expected = 0;
            for (std::int32_t row = own - N; row < own; ++row) {
                expected += heads * G / (tokens + row + 1.0);
            }
            const double mass = last.view().format.to_double(last.view().free[b] + last.view().forced[b]);
            worst = std::max(worst, std::abs(mass / expected - 1));
        }
        std::cout << name_of(device) << ": worst relative error beside 2 million cached keys " << worst
                  << std::endl;
        CHECK(worst < 1e-5);
    }
}

TEST_CASE("a pool of more than 2^31 elements", "[gpu]") {
    constexpr std::int64_t pool_slots = (std::int64_t{1} << 31) / D + 4096;
    if (!uniprefill_test::has_device() ||
        !has_memory(std::size_t{pool_slots} * D * 2 + (std::size_t{1} << 30))) {
        return;
    }
    using slot_view = up::token_slot_cache<bf16>;
    const model shape{2, 1, D, G, N};
    both what(shape, {{71, up::request_tag::chunk, 500, {200}, {1, 4, 4, 0}}});
    bf16* pool = nullptr;
    check_cuda(cudaMalloc(&pool, std::size_t{pool_slots} * D * sizeof(bf16)), "cudaMalloc");
    std::vector<std::int32_t> slots;
    for (std::int32_t token = 0; token < 500; ++token) {
        slots.push_back(static_cast<std::int32_t>(pool_slots) - 1 - 67000 * token);
        check_cuda(cudaMemcpy(pool + std::int64_t{slots.back()} * D,
                              what.device_cached.contiguous().data + std::int64_t{token} * D,
                              D * sizeof(bf16), cudaMemcpyDeviceToDevice),
                   "copy on the device");
    }
    const device_array<std::int32_t> device_slots(slots);
    const slot_view view{pool, D, D, device_slots.data(), 500};
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        const masses far = estimate_on_device<policy>(what.device, view, {}, what.bounds, device);
        CHECK((far.buffer == what.estimate_here(device).buffer));
    }
    cudaFree(pool);
}

namespace {

/// Requests without a cache whose values come from a table of normal numbers: quick to make.
template <class T>
struct plain_step {
    model kinds;
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu_seqlens{0}, positions, cached_lens;
    std::vector<up::request_options> options;
    std::vector<std::int32_t> cu_segments{0}, segment_request, forced_offsets{0}, observed_offsets{0};
    std::vector<up::position_span> forced_spans, observed_spans;
    std::vector<T> queries, keys;

    plain_step(const model& shape, std::int32_t requests, std::uint64_t seed)
        : kinds(shape) {
        static const std::vector<float> table = [] {
            std::mt19937_64 random(3);
            std::normal_distribution<float> normal;
            std::vector<float> made(1 << 20);
            std::generate(made.begin(), made.end(), [&] { return normal(random); });
            return made;
        }();
        std::mt19937_64 random(seed);
        const auto add = [&](std::vector<T>& to, std::int64_t count, float spread) {
            std::size_t at = random();
            for (std::int64_t i = 0; i < count; ++i, ++at) {
                to.push_back(element_of<T>(table[at % table.size()] * spread));
            }
        };
        for (std::int32_t r = 0; r < requests; ++r) {
            const auto rows = static_cast<std::int32_t>(1 + random() % 640);
            const float spread = 0.5f + static_cast<float>(random() % 1024) / 256.0f;
            tags.push_back(up::request_tag::prefill);
            cached_lens.push_back(0);
            options.push_back(
                {1, static_cast<std::int32_t>(random() % 40), static_cast<std::int32_t>(random() % 40), 0});
            segment_request.push_back(r);
            const std::vector<std::int32_t> where = ascending(rows);
            positions.insert(positions.end(), where.begin(), where.end());
            cu_seqlens.push_back(static_cast<std::int32_t>(positions.size()));
            cu_segments.push_back(cu_seqlens.back());
            forced_offsets.push_back(0);
            observed_offsets.push_back(0);
            // Only the last rows observe.
            const std::int32_t unused = std::max(0, rows - shape.num_observations);
            queries.resize(queries.size() + static_cast<std::size_t>(unused * shape.heads * shape.head_dim));
            add(queries, std::int64_t{rows - unused} * shape.heads * shape.head_dim, spread);
            add(keys, std::int64_t{rows} * shape.kv_heads * shape.head_dim, 1.0f);
        }
    }
    [[nodiscard]] const model& shape() const { return kinds; }
    [[nodiscard]] up::batch_view batch() const {
        up::batch_view view;
        view.num_requests = view.num_segments = static_cast<std::int32_t>(tags.size());
        view.num_rows = cu_seqlens.back();
        view.tags = tags.data();
        view.cu_seqlens = cu_seqlens.data();
        view.positions = positions.data();
        view.options = options.data();
        return view;
    }
    [[nodiscard]] up::head_rows<const T> query_rows() const {
        return {queries.data(), kinds.heads * D, D, cu_seqlens.back(), kinds.heads, D};
    }
    [[nodiscard]] up::head_rows<const T> key_rows() const {
        return {keys.data(), kinds.kv_heads * D, D, cu_seqlens.back(), kinds.kv_heads, D};
    }
    [[nodiscard]] up::limits tight_limits() const {
        up::limits bounds;
        bounds.max_requests = bounds.max_segments = static_cast<std::int32_t>(tags.size());
        bounds.max_rows = cu_seqlens.back();
        bounds.num_heads = kinds.heads;
        bounds.num_kv_heads = kinds.kv_heads;
        bounds.head_dim = D;
        bounds.block_rows = G;
        bounds.num_observations = N;
        return bounds;
    }
};

/// Keep bits by the host's selector.
std::vector<std::uint32_t> keep_bits(masses& from, const up::batch_view& batch,
                                     const std::vector<up::selection_rule>& rules) {
    up::workspace counting;
    static_cast<void>(up::selection::carve(counting, from.bounds, up::memory_space::host));
    const guarded_buffer arrays(counting.bytes_used());
    up::workspace pieces(arrays.data(), counting.bytes_used());
    up::selection out = up::selection::carve(pieces, from.bounds, up::memory_space::host);
    const up::block_selector<> selector(from.bounds);
    const guarded_buffer scratch(selector.workspace_bytes());
    const up::status done = selector.run(from.view(), batch, rules.data(), out,
                                         up::workspace(scratch.data(), selector.workspace_bytes()), {});
    INFO(message(done));
    REQUIRE(done.ok());
    return {out.keep_bits, out.keep_bits + (from.bounds.max_blocks() + 31) / 32};
}

struct keep_set_counts {
    std::int64_t cases = 0;
    std::int64_t different_cases = 0;
    std::int64_t blocks = 0;
    std::int64_t different_blocks = 0;
    std::int64_t unexplained_cases = 0; ///< of the different ones, those that rounding can't have caused
};

/// Whether a relative error of 4e-6 in masses can change what @p rule keeps of a segment without forced rows:
/// the block at the cut weighs nearly what its neighbour does, or the running sum meets its target that
/// closely.
bool lies_near_the_cut(std::vector<std::int64_t> segment_masses, const up::selection_rule& rule) {
    constexpr double rounding = 4e-6;
    std::sort(segment_masses.begin(), segment_masses.end(), std::greater<>());
    double total = 0;
    for (const std::int64_t mass : segment_masses) {
        total += static_cast<double>(mass);
    }
    const double share = static_cast<double>(rule.p.value) / static_cast<double>(up::unit_fraction::one);
    const double target = share * total;
    double sum = 0;
    for (std::size_t k = 0; k < segment_masses.size(); ++k) {
        const auto mass = static_cast<double>(segment_masses[k]);
        sum += mass;
        const bool is_cut =
            rule.kind == up::rule_kind::top_p
                ? sum >= target * (1 - rounding)
                : static_cast<double>(k + 1) >= share * static_cast<double>(segment_masses.size());
        if (is_cut) {
            const bool sum_is_near =
                rule.kind == up::rule_kind::top_p && std::abs(sum - target) <= rounding * total;
            const bool next_is_near =
                k + 1 < segment_masses.size() &&
                mass - static_cast<double>(segment_masses[k + 1]) <= 2 * rounding * mass;
            const bool last_is_near =
                k > 0 && static_cast<double>(segment_masses[k - 1]) - mass <= 2 * rounding * mass;
            return sum_is_near || next_is_near || last_is_near;
        }
    }
    return false;
}

/// Keep sets of random requests, from the device's masses and from the host's.
template <class T, class Cache>
keep_set_counts compare_keep_sets(const up::cuda_device& device, const Cache& cached) {
    constexpr std::int32_t at_once = 100;
    constexpr double shares[] = {0.5, 0.9, 0.95, 0.98, 0.99};
    const model shape{2, 1, D, G, N};
    keep_set_counts counts;
    for (std::int32_t i = 0; i < scaled(100); ++i) {
        const plain_step<T> what(shape, at_once, uniprefill_test::seed() + static_cast<std::uint64_t>(i));
        const up::limits bounds = what.tight_limits();
        device_step<T> on_device(what);
        on_device.batch().cached_lens = nullptr;
        masses came = estimate_on_device<policy>(on_device, cached, {}, bounds, device);
        masses host = estimate(what, up::no_cache<T>{}, {}, bounds);
        std::vector<up::selection_rule> rules;
        for (std::int32_t r = 0; r < at_once; ++r) {
            rules.push_back(r % 7 == 6 ? up::selection_rule::fixed_ratio(0.4)
                                       : up::selection_rule::top_p(shares[r % 5]));
        }
        const std::vector<std::uint32_t> mine = keep_bits(came, what.batch(), rules);
        const std::vector<std::uint32_t> told = keep_bits(host, what.batch(), rules);
        for (std::int32_t r = 0; r < at_once; ++r) {
            const std::int32_t begin = what.cu_seqlens[static_cast<std::size_t>(r)];
            const std::int32_t blocks =
                up::num_blocks(what.cu_seqlens[static_cast<std::size_t>(r) + 1] - begin, G);
            std::int64_t different = 0;
            for (std::int64_t b = up::block_offset(r, begin, G), end = b + blocks; b < end; ++b) {
                const auto word = static_cast<std::size_t>(b / 32);
                different += (mine[word] ^ told[word]) >> (b % 32) & 1u;
            }
            ++counts.cases;
            counts.different_cases += different > 0 ? 1 : 0;
            counts.blocks += blocks;
            counts.different_blocks += different;
            if (different > 0) {
                const std::int64_t* const first = host.view().free + up::block_offset(r, begin, G);
                const bool near =
                    lies_near_the_cut({first, first + blocks}, rules[static_cast<std::size_t>(r)]);
                counts.unexplained_cases += near ? 0 : 1;
            }
        }
    }
    std::cout << name_of(device) << ", " << sizeof(T) << " bytes an element: keep sets of "
              << counts.different_cases << " of " << counts.cases << " requests differ, "
              << counts.different_blocks << " of " << counts.blocks << " blocks" << std::endl;
    return counts;
}

} // namespace

TEST_CASE("keep sets of float masses are the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const keep_set_counts counts = compare_keep_sets<float>(each_body<false>()[0], up::no_cache<float>{});
    CHECK(counts.unexplained_cases == 0);
    CHECK(counts.different_cases * 1000 < counts.cases);
}

TEST_CASE("keep sets of bfloat16 masses are the host's, but for rounding", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        const keep_set_counts counts = compare_keep_sets<bf16>(device, cache_view{});
        CHECK(counts.unexplained_cases == 0);
        CHECK(counts.different_blocks * 10000 < counts.blocks);
    }
}
