// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Masses are the same bits wherever a request is packed, however many threads work, and whichever part of its
// context is cached.

#include "caches.hpp"
#include "estimate.hpp"

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace up = uniprefill;
using namespace importance_test;

namespace {

const model shape{6, 2, 40, 16, 24};

std::vector<request> some_requests() {
    std::vector<request> requests;
    requests.push_back({11, up::request_tag::prefill, 0, {333}});
    requests.push_back({12, up::request_tag::prefill, 0, {5}});
    requests.push_back({13, up::request_tag::prefill, 0, {100, 0, 129, 77}});
    requests.push_back({14, up::request_tag::decode, 0, {1}});
    requests.push_back({15, up::request_tag::chunk, 75, {64, 90}});
    requests.push_back({16, up::request_tag::prefill, 0, {1000}});
    requests[0].forced = {{30, 41}, {60, 60}, {63, 130}};
    requests[2].observed = {{10, 40}, {150, 153}};
    requests[5].gaps = true;
    return requests;
}

template <class T>
masses run(const step<T>& what) {
    const caches<T> cached(what);
    return estimate(what, cached.page_table(), {}, what.tight_limits());
}

/// The bits of every segment of request @p index of a step.
template <class T>
std::vector<std::vector<std::int64_t>> of_request(const step<T>& what, masses& got, std::int32_t index) {
    std::vector<std::vector<std::int64_t>> all;
    for (std::int32_t segment = 0; segment < what.num_segments(); ++segment) {
        if (what.segment_request[static_cast<std::size_t>(segment)] == index) {
            all.push_back(of_segment(got, what.batch(), segment));
        }
    }
    return all;
}

} // namespace

TEMPLATE_TEST_CASE("any packing gives the same bits", "[importance]", float, up::bfloat16) {
    std::vector<request> requests = some_requests();
    std::vector<std::vector<std::vector<std::int64_t>>> alone;
    for (const request& what : requests) {
        const step<TestType> one(shape, {what});
        masses got = run(one);
        alone.push_back(of_request(one, got, 0));
    }
    std::vector<std::size_t> order(requests.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = i;
    }
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    for (int packing = 0; packing < 12; ++packing) {
        std::shuffle(order.begin(), order.end(), random);
        std::vector<request> packed;
        for (const std::size_t i : order) {
            packed.push_back(requests[i]);
        }
        const step<TestType> together(shape, packed);
        masses got = run(together);
        for (std::size_t i = 0; i < order.size(); ++i) {
            REQUIRE(of_request(together, got, static_cast<std::int32_t>(i)) == alone[order[i]]);
        }
    }
}

TEST_CASE("many requests in waves give the same bits as one", "[importance]") {
    const request what{21, up::request_tag::prefill, 0, {90}};
    const step<float> one(shape, {what});
    masses expected = estimate(one);
    const step<float> many(shape, std::vector<request>(70, what));
    masses got = estimate(many);
    for (std::int32_t segment = 0; segment < 70; ++segment) {
        REQUIRE(of_segment(got, many.batch(), segment) == of_segment(expected, one.batch(), 0));
    }
}

TEST_CASE("larger limits give the same bits", "[importance]") {
    const step<float> what(shape, {{22, up::request_tag::prefill, 0, {500}}});
    masses tight = estimate(what);
    up::limits roomy = what.tight_limits();
    roomy.max_rows += 5000;
    roomy.max_requests += 3;
    roomy.max_segments += 30;
    roomy.max_cached_tokens += 77;
    masses wide = estimate(what, up::no_cache<float>{}, {}, roomy);
    REQUIRE(of_segment(tight, what.batch(), 0) == of_segment(wide, what.batch(), 0));
}

TEST_CASE("any number of threads gives the same bits", "[importance]") {
#if defined(_OPENMP)
    // Long enough that every thread is found worth waking; short ones beside, so that waves are mixed.
    std::vector<request> requests = some_requests();
    requests[0].segments = {6000};
    requests[5].segments = {2000, 3000};
    const step<float> what(shape, requests);
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    masses expected = run(what);
    const step<float> alone(shape, {requests[5]});
    masses of_one = run(alone);
    REQUIRE(of_request(what, expected, 5) == of_request(alone, of_one, 0));
    for (const int threads : {2, 3, 4, 7}) {
        omp_set_num_threads(threads);
        for (int repeat = 0; repeat < 3; ++repeat) {
            const masses got = run(what);
            REQUIRE(got.buffer == expected.buffer);
            REQUIRE(got.heads == expected.heads);
        }
    }
    omp_set_num_threads(before);
#else
    uniprefill_test::skip("built without OpenMP");
#endif
}

TEMPLATE_TEST_CASE("cached context and context in the step give the same bits", "[importance]", float,
                   up::half) {
    for (const std::int32_t context : {1, 15, 16, 17, 100}) {
        request whole{31, up::request_tag::prefill, 0, {context, 150}};
        request chunk{31, up::request_tag::chunk, context, {150}};
        request half_cached{31, up::request_tag::chunk, context / 2, {context - context / 2, 150}};
        std::vector<std::vector<std::int64_t>> seen;
        for (const request& what : {whole, chunk, half_cached}) {
            const step<TestType> one(shape, {what});
            masses got = run(one);
            seen.push_back(of_segment(got, one.batch(), one.num_segments() - 1));
        }
        INFO("context " << context);
        REQUIRE(seen[0] == seen[1]);
        REQUIRE(seen[0] == seen[2]);
    }
}

TEST_CASE("the rows of one rank's heads have the bits they have on a rank with all heads", "[importance]") {
    const step<float> all(shape, {{41, up::request_tag::prefill, 0, {300}}});
    masses expected = estimate(all);
    const std::int32_t heads = shape.heads / shape.kv_heads;
    std::vector<std::int64_t> sum(static_cast<std::size_t>(expected.view().num_blocks));
    for (std::int32_t rank = 0; rank < shape.kv_heads; ++rank) {
        up::limits bounds = all.tight_limits();
        bounds.num_global_heads = bounds.num_heads;
        bounds.num_heads = heads;
        bounds.num_kv_heads = 1;
        const dynamic_estimator estimator(bounds);
        masses got(bounds);
        const guarded_buffer memory(estimator.workspace_bytes());
        up::head_rows<const float> queries = all.query_rows();
        up::head_rows<const float> keys = all.key_rows();
        queries.data += std::int64_t{rank} * heads * queries.head_stride;
        queries.num_heads = heads;
        keys.data += rank * keys.head_stride;
        keys.num_heads = 1;
        REQUIRE(estimator
                    .run(queries, up::key_source<float>{keys, {}}, {}, all.batch(), got.view(), {},
                         up::workspace(memory.data(), estimator.workspace_bytes()))
                    .ok());
        for (std::size_t block = 0; block < 19; ++block) { // 300 rows
            sum[block] += got.view().free[block];
        }
    }
    for (std::size_t block = 0; block < 19; ++block) {
        REQUIRE(sum[block] == expected.view().free[block]);
    }
}
