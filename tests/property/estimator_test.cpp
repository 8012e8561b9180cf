// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Queries and keys -> masses -> keep set, against the oracle in double precision.

#include "property/estimate.hpp"

#include <iostream>

using namespace property;

namespace {

/// What a block's mass may be off by, as a share of all observers' mass.
constexpr double tolerance = 1e-5;

double work_of(const request& one, const shape& of) {
    return static_cast<double>(one.rows() + one.cached) * std::min(one.rows(), of.observations) * of.heads *
           of.dim;
}

/// Shapes and requests of every kind, none of them dear for the oracle.
std::vector<request> draw(random_numbers& numbers, shape& of, rounding to, double most_work) {
    for (;;) {
        of = random_shape(numbers);
        std::vector<request> requests;
        double work = 0;
        for (int count = numbers.between(1, 3); count > 0; --count) {
            request_wishes wishes;
            const int g = of.block_rows;
            const int n = of.observations;
            const int lengths[] = {0, 1, n - 1, n, n + 1, g - 1, g, g + 1, n + 20, 2 * g + n, -1, -1, -1, -1};
            wishes.rows = numbers.one_of(lengths);
            wishes.cached = numbers.chance(0.4) ? numbers.between(0, 3 * g) : 0;
            wishes.segments = numbers.chance(0.3) ? numbers.between(2, 4) : 1;
            wishes.gaps = numbers.chance(0.5);
            wishes.spans = numbers.chance(0.4);
            wishes.observed = numbers.chance(0.25);
            wishes.tag = wishes.cached > 0 ? up::request_tag::chunk : up::request_tag::prefill;
            wishes.style = random_style(numbers);
            if (numbers.chance(0.1)) {
                wishes.tag = numbers.one_of({up::request_tag::decode, up::request_tag::verify});
            }
            requests.push_back(random_request(numbers, of, wishes, to));
            requests.back().options.enabled = numbers.chance(0.95) ? 1 : 0;
            requests.back().options.min_length = numbers.chance(0.1) ? numbers.between(0, 100) : 0;
            work += work_of(requests.back(), of);
        }
        if (work <= most_work) {
            return requests;
        }
    }
}

/// Whether a decision about the segment is possible at all: everything else has no masses.
bool is_decided(const request& one, const oracle::segment_problem& problem) {
    const bool prefill = one.tag == up::request_tag::prefill || one.tag == up::request_tag::chunk;
    const int rows = static_cast<int>(problem.forced.size());
    return prefill && one.options.enabled != 0 && rows > 0 && rows >= one.options.min_length &&
           std::count(problem.forced.begin(), problem.forced.end(), false) > 0;
}

struct largest_error {
    double block = 0; // as a share of the observers' mass
};

bool are_close(const std::vector<std::int64_t>& ours, const std::vector<double>& theirs, double unit,
               double mass, largest_error& seen) {
    if (ours.size() != theirs.size()) return false;
    bool good = true;
    for (std::size_t block = 0; block < ours.size(); ++block) {
        const double error = std::abs(static_cast<double>(ours[block]) / unit - theirs[block]) / mass;
        seen.block = std::max(seen.block, error);
        good = good && error <= tolerance;
    }
    return good;
}

/// Compares every segment of a step with the oracle.
template <class Element>
void check_masses(const std::vector<request>& requests, const shape& of, const up::batch_view& batch,
                  const estimated& ours, largest_error& seen) {
    const double unit =
        static_cast<double>(std::int64_t{1} << up::mass_format::of(ours.bounds).fraction_bits);
    int segment = 0;
    for (const request& one : requests) {
        for (int i = 0; i < one.segments(); ++i, ++segment) {
            INFO("segment " << i << ": " << describe(one, of));
            const oracle::segment_problem problem = problem_of(one, i, of);
            const segment_masses mine = masses_of_segment(ours, batch, segment);
            if (!is_decided(one, problem)) {
                REQUIRE(std::all_of(mine.free.begin(), mine.free.end(), [](auto m) { return m == 0; }));
                REQUIRE(mine.fault == 0);
                continue;
            }
            const oracle::block_masses wanted = oracle::masses_of(problem);
            REQUIRE(mine.fault == (wanted.unscored     ? up::fault_word(up::mass_fault::unscored)
                                   : wanted.non_finite ? up::fault_word(up::mass_fault::non_finite)
                                                       : 0));
            if (mine.fault != 0) {
                REQUIRE(std::all_of(mine.free.begin(), mine.free.end(), [](auto m) { return m == 0; }));
                continue;
            }
            const auto observers = static_cast<double>(problem.observers.size());
            bool good = are_close(mine.free, wanted.free, unit, observers * of.heads, seen) &&
                        are_close(mine.forced, wanted.forced, unit, observers * of.heads, seen);
            for (int head = 0; head < of.heads; ++head) {
                const auto h = static_cast<std::size_t>(head);
                good = good && are_close(mine.head_free[h], wanted.head_free[h], unit, observers, seen) &&
                       are_close(mine.head_forced[h], wanted.head_forced[h], unit, observers, seen);
            }
            REQUIRE(good);
        }
    }
}

template <class Element>
void masses_against_oracle(rounding to, int cases, double most_work) {
    largest_error seen;
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        shape of;
        const std::vector<request> requests = draw(numbers, of, to, most_work);
        const step<Element> packed(requests, of, numbers.one_of({0, 0, 5}));
        const key_caches<Element> caches(requests, of, numbers);
        up::limits bounds = packed.limits();
        if (numbers.chance(0.5)) { // limits beyond this step change nothing
            bounds.max_requests += numbers.between(0, 3);
            bounds.max_segments += numbers.between(3, 9);
            bounds.max_rows += numbers.between(0, 1000);
            bounds.max_cached_tokens += numbers.between(0, 1000);
        }
        check_masses<Element>(requests, of, packed.batch(), estimate(packed, of, caches.page_table(), bounds),
                              seen);
    }
    std::cout << "largest error of a block's mass: " << seen.block << " of all observers' mass, " << cases
              << " cases" << std::endl;
}

} // namespace

TEST_CASE("masses are the oracle's, float") {
    masses_against_oracle<float>(rounding::f32, scaled(300), 2e7);
}

TEST_CASE("masses are the oracle's, bfloat16") {
    masses_against_oracle<up::bfloat16>(rounding::bf16, scaled(100), 2e7);
}

TEST_CASE("masses are the oracle's, half") {
    masses_against_oracle<up::half>(rounding::f16, scaled(100), 2e7);
}

TEST_CASE("masses are the oracle's, long and with compile-time extents") {
    random_numbers numbers(base_seed());
    shape of;
    of.heads = 9;
    of.kv_heads = 3;
    of.dim = 64;
    of.block_rows = 64;
    of.observations = 128;
    of.score.scale = 0.125;
    request_wishes wishes;
    wishes.rows = 3000;
    wishes.cached = 2000;
    wishes.tag = up::request_tag::chunk;
    wishes.style = key_style::sharp;
    wishes.spans = true;
    const std::vector<request> requests{random_request(numbers, of, wishes, rounding::f32)};
    const step<float> packed(requests, of);
    const key_caches<float> caches(requests, of, numbers);
    const estimated by_constants =
        estimate<up::estimator_policy<64, 128>>(packed, of, caches.contiguous(), packed.limits());
    const estimated by_values = estimate(packed, of, caches.contiguous(), packed.limits());
    CHECK(masses_of_segment(by_constants, packed.batch(), 0) ==
          masses_of_segment(by_values, packed.batch(), 0));
    largest_error seen;
    check_masses<float>(requests, of, packed.batch(), by_constants, seen);
    std::cout << "largest error of a block's mass, 5000 keys: " << seen.block << std::endl;
}

TEST_CASE("a total of zero keeps everything and says so") {
    random_numbers numbers(base_seed());
    shape of;
    of.score.sink_logits = {500.0}; // takes all of every row
    request_wishes wishes;
    wishes.rows = 100;
    request one = random_request(numbers, of, wishes, rounding::f32);
    one.options.sink = one.options.tail = 3;
    const step<float> packed({one}, of);
    estimated ours = estimate(packed, of);
    const auto kept =
        decide(packed.limits(), ours.masses(), packed.batch(), {up::selection_rule::top_p(0.5)});
    CHECK(kept[0].outcome.reason == up::keep_reason::zero_mass);
    CHECK(kept[0].outcome.kept == 100);
}
