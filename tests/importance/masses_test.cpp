// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "caches.hpp"
#include "estimate.hpp"
#include "naive.hpp"
#include "random_step.hpp"

namespace up = uniprefill;
using namespace importance_test;

namespace {

template <class T>
std::vector<naive_masses> naive(const step<T>& what, const up::attention_params& params) {
    std::vector<naive_masses> all;
    for (std::int32_t segment = 0; segment < what.num_segments(); ++segment) {
        all.push_back(naive(what, segment, params));
    }
    return all;
}

/// Compares one step's masses with the definition's. A row's share is right to a few 1e-6 of itself.
template <class T, class Reduction = up::head_sum>
void check_masses(const step<T>& what, masses& got, const std::vector<naive_masses>& right_ones) {
    const model& shape = what.shape();
    const up::batch_view batch = what.batch();
    const up::mass_format format = got.view().format;
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        const naive_masses& expected = right_ones[static_cast<std::size_t>(segment)];
        const bool unscored = expected.scored && !expected.observed;
        INFO("segment " << segment << " of request " << batch.request_of(segment));
        REQUIRE(got.view().faults[segment] == (unscored ? up::fault_word(up::mass_fault::unscored) : 0));
        const std::int64_t first = up::block_offset(segment, batch.segment_begin(segment), shape.block_rows);
        for (std::size_t block = 0; block < expected.blocks; ++block) {
            const std::int64_t at = first + static_cast<std::int64_t>(block);
            for (const bool forced : {false, true}) {
                std::int64_t reduced = 0;
                for (std::int32_t head = 0; head < shape.heads; ++head) {
                    const auto& of_heads = forced ? expected.forced : expected.free;
                    const double right = of_heads[static_cast<std::size_t>(head) * expected.blocks + block];
                    const up::head_mass_view heads = got.head_view();
                    const std::int64_t mass =
                        (forced ? heads.forced : heads.free)[head * heads.head_stride + at];
                    INFO("block " << block << ", head " << head << (forced ? ", forced" : ", free"));
                    REQUIRE(mass >= 0);
                    REQUIRE(std::abs(format.to_double(mass) - right) <= 2e-5 * right + 1e-7);
                    REQUIRE((right > 0 || mass == 0));
                    reduced = Reduction::combine(reduced, mass);
                }
                REQUIRE((forced ? got.view().forced : got.view().free)[at] == reduced);
            }
        }
    }
}

template <class T>
void check_step(const step<T>& what, const up::attention_params& params = {}) {
    masses got = estimate(what, params);
    check_masses(what, got, naive(what, params));
}

template <class T, class Cached>
void check_caches(const step<T>& what, const up::attention_params& params) {
    const caches<Cached> cached(what);
    const std::vector<naive_masses> expected = naive(what, params);
    const auto check = [&](const auto& view) {
        masses got = estimate(what, view, params, what.tight_limits());
        check_masses(what, got, expected);
    };
    check(cached.contiguous());
    check(cached.page_table());
    check(cached.csr_pages());
    check(cached.token_slots());
    check(cached.page_pointers());
}

} // namespace

TEMPLATE_TEST_CASE("masses of random steps", "[importance]", float, up::half, up::bfloat16) {
    for (std::uint64_t i = 0; i < 60; ++i) {
        generator random(uniprefill_test::seed() * 1000 + i);
        const model shape = random.any_model();
        std::vector<request> requests;
        for (std::int32_t r = 1 + random.below(4); r > 0; --r) {
            requests.push_back(random.any_request(shape));
        }
        std::vector<float> sinks;
        const up::attention_params params = random.any_params(shape, sinks);
        INFO("case " << i << ": " << shape.heads << '/' << shape.kv_heads << " heads, d " << shape.head_dim
                     << ", G " << shape.block_rows << ", n " << shape.num_observations << ", scale "
                     << params.scale << ", softcap " << params.softcap << ", sinks " << sinks.size());
        check_caches<TestType, TestType>(step<TestType>(shape, requests), params);
    }
}

TEST_CASE("masses at every head dimension, G and n of a model", "[importance]") {
    for (const std::int32_t head_dim : {1, 5, 64, 80, 128, 256}) {
        check_step(step<float>({4, 2, head_dim, 64, 32}, {{1, up::request_tag::prefill, 0, {300}}}));
    }
    for (const std::int32_t g : {8, 9, 31, 64, 100, 128, 255, 256}) {
        check_step(step<float>({3, 1, 32, g, 16}, {{2, up::request_tag::prefill, 0, {600}}}));
    }
    for (const std::int32_t n : {1, 2, 63, 64, 65, 128, 511, 512}) {
        check_step(step<up::bfloat16>({3, 1, 32, 64, n}, {{3, up::request_tag::prefill, 0, {700}}}));
        check_step(step<up::half>({1, 1, 32, 64, n}, {{3, up::request_tag::prefill, 0, {130}}}));
    }
}

TEST_CASE("masses of lengths around n, G and the forced rows", "[importance]") {
    const std::int32_t n = 16;
    const std::int32_t g = 24;
    for (const std::int32_t sink : {0, 5}) {
        for (const std::int32_t tail : {0, 3, n}) {
            for (const std::int32_t rows :
                 {0, 1, 2, n - 1, n, n + 1, g - 1, g, g + 1, sink + tail, sink + tail + 1, sink + n, 5 * g}) {
                request what{static_cast<std::uint64_t>(rows), up::request_tag::prefill, 0, {rows}};
                what.options = {1, sink, tail, 0};
                INFO("rows " << rows << ", sink " << sink << ", tail " << tail);
                check_step(step<float>({6, 2, 20, g, n}, {what}));
            }
        }
    }
}

TEST_CASE("a row's masses, context and sink make one", "[importance]") {
    const step<float> what({9, 3, 64, 64, 128}, {{4, up::request_tag::prefill, 0, {4000}}});
    masses got = estimate(what);
    double total = 0;
    for (std::int64_t block = 0; block < got.view().num_blocks; ++block) {
        if (block < up::num_blocks(4000, 64)) {
            total += got.view().format.to_double(got.view().free[block] + got.view().forced[block]);
        }
    }
    REQUIRE(std::abs(total - 9 * 128) < 9 * 128 * 1e-6);
    check_masses(what, got, naive(what, {}));
}

TEST_CASE("a cache may have another element type than the rows", "[importance]") {
    // Keys that both types hold exactly, so that one reference does for both.
    request what{5, up::request_tag::chunk, 100, {150}};
    step<up::bfloat16> coarse({4, 2, 24, 16, 8}, {what});
    check_caches<up::bfloat16, float>(coarse, {});
}

TEST_CASE("heads reduced by the largest", "[importance]") {
    const step<float> what({6, 3, 16, 16, 8}, {{6, up::request_tag::prefill, 0, {200}}});
    masses got = estimate<up::importance_estimator<up::estimator_policy<16, 8, up::head_max>>>(
        what, up::no_cache<float>{}, {}, what.tight_limits());
    check_masses<float, up::head_max>(what, got, naive(what, {}));
    STATIC_REQUIRE(up::head_max::ranks == up::rank_reduction::maximum);
    STATIC_REQUIRE(up::head_sum::ranks == up::rank_reduction::sum);
}

TEST_CASE("a soft-cap much larger than the scores changes nothing that matters", "[importance]") {
    up::attention_params params;
    params.softcap = 1000.0f;
    check_step(step<float>({3, 1, 32, 32, 16}, {{7, up::request_tag::prefill, 0, {300}}}), params);
}

TEST_CASE("a large sink logit takes nearly all of the mass", "[importance]") {
    const std::vector<float> sinks{60.0f, -60.0f};
    up::attention_params params;
    params.sink_logits = sinks.data();
    check_step(step<float>({2, 1, 32, 32, 16}, {{8, up::request_tag::prefill, 0, {300}}}), params);
}

TEST_CASE("nothing at all is a legal step", "[importance]") {
    check_step(step<float>({}, {}));
    check_step(
        step<float>({}, {{1, up::request_tag::prefill, 0, {0}}, {2, up::request_tag::decode, 0, {0}}}));
}

TEST_CASE("two million tokens", "[importance]") {
    const std::int32_t rows = 2000000;
    request what{9, up::request_tag::prefill, 0, {rows}};
    what.options = {1, 128, 128, 0};
    const step<float> long_prompt({1, 1, 2, 64, 2}, {what});
    check_step(long_prompt);
}
