// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Never drop on doubt: NaN and infinity anywhere that an observer looks keep every row of that segment, and
// of no other. Built with -ffast-math too, so nothing here compares numbers that aren't finite.

#include "property/estimate.hpp"

using namespace property;

namespace {

constexpr std::uint32_t bad_bits[] = {0x7fc00000u, 0xffc00000u, 0x7f800001u,
                                      0xffffffffu, 0x7f800000u, 0xff800000u};

template <class Element>
Element bad_element(random_numbers& numbers) {
    const std::uint32_t bits = numbers.one_of(bad_bits);
    if constexpr (std::is_same_v<Element, float>) {
        return up::bit_cast<float>(bits);
    } else if constexpr (std::is_same_v<Element, up::bfloat16>) {
        return {static_cast<std::uint16_t>((bits >> 16) | (bits == 0x7f800001u ? 1u : 0u))};
    } else {
        const std::uint32_t sign = (bits >> 16) & 0x8000u;
        return {static_cast<std::uint16_t>(sign | ((bits & 0x7fffffu) != 0 ? 0x7e01u : 0x7c00u))};
    }
}

template <class Element>
void run_cases(int cases) {
    int seen = 0;
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        shape of;
        of.kv_heads = numbers.between(1, 2);
        of.heads = of.kv_heads * numbers.between(1, 3);
        of.dim = numbers.one_of({1, 8, 17, 64});
        of.block_rows = numbers.one_of({8, 16, 64});
        of.observations = numbers.one_of({1, 4, 16});
        of.score.scale = 0.25;
        of.score.softcap = numbers.one_of({0.0, 0.0, 5.0});

        // Three requests of one segment each; the middle one is spoilt by one element.
        std::vector<request> requests;
        for (int r = 0; r < 3; ++r) {
            request_wishes wishes;
            wishes.rows = numbers.between(4, 4 * of.block_rows);
            wishes.cached = numbers.between(0, 30);
            wishes.tag = up::request_tag::chunk;
            requests.push_back(random_request(numbers, of, wishes, rounding::bf16));
            requests.back().options = {1, 1, 1, 0};
        }
        step<Element> packed(requests, of);
        key_caches<Element> caches(requests, of, numbers);
        const estimated clean = estimate(packed, of, caches.contiguous(), packed.limits());

        const request& spoilt = requests[1];
        const int head = numbers.between(0, of.kv_heads - 1);
        const int element = numbers.between(0, of.dim - 1);
        const int key = numbers.between(0, spoilt.k.rows - 1);
        const int row = numbers.between(0, spoilt.rows() - 1);
        const bool in_query = numbers.chance(0.4);
        const bool observed = row >= spoilt.rows() - of.observations;
        const Element bad = bad_element<Element>(numbers);
        if (in_query) {
            packed.spoil_query(requests[0].rows() + row, numbers.between(0, of.heads - 1), element, bad);
        } else if (key >= spoilt.cached) {
            packed.spoil_key(requests[0].rows() + key - spoilt.cached, head, element, bad);
        } else {
            caches.spoil_contiguous(1, key, head, element, bad);
        }
        INFO((in_query ? "query row " : "key ") << (in_query ? row : key) << ": " << describe(spoilt, of));
        estimated ours = estimate(packed, of, caches.contiguous(), packed.limits());
        const up::batch_view batch = packed.batch();
        const bool faulty = !in_query || observed;
        seen += faulty ? 1 : 0;
        REQUIRE(ours.masses().faults[1] == (faulty ? up::fault_word(up::mass_fault::non_finite) : 0));
        const segment_masses mine = masses_of_segment(ours, batch, 1);
        if (faulty) {
            REQUIRE(std::all_of(mine.free.begin(), mine.free.end(), [](auto mass) { return mass == 0; }));
        } else {
            REQUIRE(mine == masses_of_segment(clean, batch, 1));
        }
        for (const int other : {0, 2}) {
            REQUIRE(masses_of_segment(ours, batch, other) == masses_of_segment(clean, batch, other));
        }
        const std::vector<up::selection_rule> rules(3, up::selection_rule::top_p(0.5));
        const auto kept = decide(ours.bounds, ours.masses(), batch, rules);
        if (faulty) {
            REQUIRE(kept[1].outcome.reason == up::keep_reason::non_finite);
            REQUIRE(kept[1].outcome.kept == spoilt.rows());
        }
    }
    CHECK(seen > cases / 3);
}

} // namespace

TEST_CASE("what isn't finite keeps its segment whole and touches no other, float") {
    run_cases<float>(scaled(400));
}

TEST_CASE("what isn't finite keeps its segment whole and touches no other, bfloat16") {
    run_cases<up::bfloat16>(scaled(200));
}

TEST_CASE("what isn't finite keeps its segment whole and touches no other, half") {
    run_cases<up::half>(scaled(200));
}

TEST_CASE("scores that overflow keep everything") {
    shape of;
    of.score.scale = 1;
    request one;
    one.options = {1, 0, 0, 0};
    one.span_rows = {40};
    one.q = oracle::tensor(40, 1, 8);
    one.k = one.q;
    for (int row = 0; row < 40; ++row) {
        one.positions.push_back(row);
        one.q.at(row, 0, 0) = 3e30;
        one.k.at(row, 0, 0) = row == 7 ? 3e30 : 1.0;
    }
    const step<float> packed({one}, of);
    estimated ours = estimate(packed, of);
    CHECK(ours.masses().faults[0] == up::fault_word(up::mass_fault::non_finite));
}

TEST_CASE("a sink logit that isn't finite keeps everything that is scored") {
    for (const std::uint32_t bits : bad_bits) {
        random_numbers numbers(base_seed());
        shape of;
        of.heads = of.kv_heads = 2;
        request_wishes wishes;
        wishes.rows = 50;
        std::vector<request> requests{random_request(numbers, of, wishes, rounding::f32),
                                      random_request(numbers, of, wishes, rounding::f32)};
        requests[0].options = requests[1].options = {1, 3, 3, 0};
        requests[1].tag = up::request_tag::verify; // never scored
        const step<float> packed(requests, of);
        const up::limits bounds = packed.limits();
        const up::importance_estimator<up::estimator_policy<up::dynamic, up::dynamic>> estimator(bounds);
        const aligned_memory memory(estimator.workspace_bytes());
        estimated out;
        out.bounds = bounds;
        out.buffer.assign(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), -1);
        const float sinks[] = {0.5f, up::bit_cast<float>(bits)};
        up::attention_params attention;
        attention.sink_logits = sinks;
        REQUIRE(estimator
                    .run(packed.q(), up::key_source<float>{packed.k(), {}}, attention, packed.batch(),
                         out.masses(), {}, memory.view(), {})
                    .ok());
        CHECK(out.masses().faults[0] == up::fault_word(up::mass_fault::non_finite));
        CHECK(out.masses().faults[1] == 0);
        const std::vector<up::selection_rule> rules(2, up::selection_rule::top_p(0.5));
        const auto kept = decide(bounds, out.masses(), packed.batch(), rules);
        CHECK(kept[0].outcome.reason == up::keep_reason::non_finite);
        CHECK(kept[1].outcome.reason == up::keep_reason::not_prefill);
    }
}
