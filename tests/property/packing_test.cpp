// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// One request is decided alone, whatever shares its step, how many threads work, where its context lies and
// how many ranks its heads are spread over: masses and keep sets are the same bits.

#include "property/estimate.hpp"

#include <thread>

#if defined(_OPENMP)
#    include <omp.h>
#endif

using namespace property;

namespace {

/// A step's masses and decisions, by segment.
struct decided {
    std::vector<segment_masses> masses;
    std::vector<kept_segment> kept;
};

bool operator==(const decided& a, const decided& b) {
    return a.masses == b.masses && a.kept == b.kept;
}

template <class Element, class Cache>
decided run(const step<Element>& packed, const shape& of, const Cache& cache, const up::limits& bounds,
            const std::vector<up::selection_rule>& rules) {
    estimated ours = estimate(packed, of, cache, bounds);
    decided out;
    for (int s = 0; s < packed.batch().num_segments; ++s) {
        out.masses.push_back(masses_of_segment(ours, packed.batch(), s));
    }
    out.kept = decide(bounds, ours.masses(), packed.batch(), rules);
    return out;
}

decided part_of(const decided& whole, int first, int count) {
    decided out;
    out.masses.assign(whole.masses.begin() + first, whole.masses.begin() + first + count);
    out.kept.assign(whole.kept.begin() + first, whole.kept.begin() + first + count);
    return out;
}

shape small_shape(random_numbers& numbers) {
    shape of = random_shape(numbers);
    of.dim = numbers.one_of({8, 16, 40, 64});
    of.block_rows = numbers.one_of({8, 16, 24, 64});
    of.observations = numbers.one_of({1, 5, 16, 33});
    of.score.scale = 0.25;
    return of;
}

request small_request(random_numbers& numbers, const shape& of, int cached, int segments) {
    request_wishes wishes;
    wishes.rows = numbers.between(0, 5 * of.block_rows);
    wishes.cached = cached;
    wishes.segments = segments;
    wishes.gaps = numbers.chance(0.3);
    wishes.spans = numbers.chance(0.3);
    wishes.observed = numbers.chance(0.2);
    wishes.tag = cached > 0 ? up::request_tag::chunk : up::request_tag::prefill;
    wishes.style = random_style(numbers);
    return random_request(numbers, of, wishes, rounding::f32);
}

request decode_request(random_numbers& numbers, const shape& of) {
    request_wishes wishes;
    wishes.rows = numbers.between(1, 5);
    wishes.cached = numbers.between(0, 60);
    wishes.tag = wishes.rows == 1 ? up::request_tag::decode : up::request_tag::verify;
    return random_request(numbers, of, wishes, rounding::f32);
}

template <class Cache>
bool is_same_with(const Cache& cache, const step<float>& packed, const shape& of, const up::limits& bounds,
                  const std::vector<up::selection_rule>& rules, const decided& wanted) {
    return run(packed, of, cache, bounds, rules) == wanted;
}

} // namespace

TEST_CASE("a request is decided alone, first, last and between others") {
    const int cases = scaled(250);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const shape of = small_shape(numbers);
        const request one = small_request(numbers, of, numbers.chance(0.4) ? numbers.between(1, 90) : 0,
                                          numbers.between(1, 3));
        const up::selection_rule rule = random_rule(numbers, one.rows()).ours;
        INFO(describe(one, of));

        // The same limits' scale everywhere, as one engine has; all else as the step needs.
        const step<float> alone({one}, of);
        const key_caches<float> cache_alone({one}, of, numbers);
        const decided wanted = run(alone, of, cache_alone.contiguous(), alone.limits(of.heads), {rule});

        for (int packing = 0; packing < 3; ++packing) {
            std::vector<request> requests;
            for (int other = numbers.between(1, 4); other > 0; --other) {
                requests.push_back(numbers.chance(0.4)
                                       ? decode_request(numbers, of)
                                       : small_request(numbers, of, 0, numbers.between(1, 3)));
                if (numbers.chance(0.15)) { // a neighbour that can't be trusted
                    for (double& value : requests.back().k.data) {
                        value = std::numeric_limits<double>::quiet_NaN();
                    }
                }
            }
            const int place = packing == 0   ? 0
                              : packing == 1 ? static_cast<int>(requests.size())
                                             : numbers.between(0, static_cast<int>(requests.size()));
            requests.insert(requests.begin() + place, one);
            std::vector<up::selection_rule> rules;
            int first_segment = 0;
            for (int r = 0; r < static_cast<int>(requests.size()); ++r) {
                rules.push_back(r == place ? rule : random_rule(numbers, 50).ours);
                first_segment += r < place ? requests[static_cast<std::size_t>(r)].segments() : 0;
            }
            const step<float> packed(requests, of, numbers.one_of({0, 3}));
            const key_caches<float> caches(requests, of, numbers);
            const decided all = run(packed, of, caches.csr_pages(), packed.limits(of.heads), rules);
            REQUIRE(part_of(all, first_segment, one.segments()) == wanted);
        }
    }
}

TEST_CASE("spans of one step are the same spans in steps of their own, with any cache") {
    const int cases = scaled(250);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const shape of = small_shape(numbers);
        const request whole = small_request(numbers, of, numbers.chance(0.3) ? numbers.between(1, 90) : 0,
                                            numbers.between(2, 4));
        const up::selection_rule rule = random_rule(numbers, whole.rows()).ours;
        INFO(describe(whole, of));
        const step<float> together({whole}, of);
        const key_caches<float> cache_before({whole}, of, numbers);
        const decided wanted = run(together, of, cache_before.contiguous(), together.limits(), {rule});

        for (int s = 0; s < whole.segments(); ++s) {
            const int begin = segment_begin(whole, s);
            const int rows = whole.span_rows[static_cast<std::size_t>(s)];
            request chunk = whole;
            chunk.tag = up::request_tag::chunk;
            chunk.cached = whole.cached + begin;
            chunk.cached_positions.insert(chunk.cached_positions.end(), whole.positions.begin(),
                                          whole.positions.begin() + begin);
            chunk.positions.assign(whole.positions.begin() + begin, whole.positions.begin() + begin + rows);
            chunk.span_rows = {rows};
            chunk.q = problem_of(whole, s, of).q;
            chunk.k = problem_of(whole, s, of).keys;
            const step<float> apart({chunk}, of);
            const key_caches<float> caches({chunk}, of, numbers);
            const decided one = part_of(wanted, s, 1);
            const up::limits bounds = apart.limits();
            INFO("span " << s);
            REQUIRE(is_same_with(caches.contiguous(), apart, of, bounds, {rule}, one));
            REQUIRE(is_same_with(caches.page_table(), apart, of, bounds, {rule}, one));
            REQUIRE(is_same_with(caches.csr_pages(), apart, of, bounds, {rule}, one));
            REQUIRE(is_same_with(caches.token_slots(), apart, of, bounds, {rule}, one));
            REQUIRE(is_same_with(caches.page_pointers(), apart, of, bounds, {rule}, one));
        }
    }
}

TEST_CASE("heads spread over ranks sum to the same masses, and a fault on one rank keeps all on every rank") {
    const int cases = scaled(250);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const int ranks = numbers.between(2, 4);
        shape of = small_shape(numbers);
        const int group = of.heads / of.kv_heads;
        of.kv_heads = ranks * numbers.between(1, 2);
        of.heads = of.kv_heads * group;
        of.score.sink_logits.clear();
        if (numbers.chance(0.3)) {
            for (int head = 0; head < of.heads; ++head) {
                of.score.sink_logits.push_back(rounded(numbers.normal(), rounding::f32));
            }
        }
        const request one = small_request(numbers, of, 0, numbers.between(1, 3));
        const up::selection_rule rule = random_rule(numbers, one.rows()).ours;
        INFO(describe(one, of) << ", ranks " << ranks);
        const step<float> single({one}, of);
        estimated wanted = estimate(single, of);
        const std::vector<kept_segment> kept =
            decide(single.limits(), wanted.masses(), single.batch(), {rule});

        const int faulty_rank = numbers.between(0, ranks - 1);
        std::vector<std::int64_t> sum(wanted.buffer.size(), 0);
        std::vector<std::int64_t> sum_with_fault(wanted.buffer.size(), 0);
        for (int rank = 0; rank < ranks; ++rank) {
            shape share = of;
            share.heads = of.heads / ranks;
            share.kv_heads = of.kv_heads / ranks;
            if (!of.score.sink_logits.empty()) {
                share.score.sink_logits.assign(of.score.sink_logits.begin() + rank * share.heads,
                                               of.score.sink_logits.begin() + (rank + 1) * share.heads);
            }
            request part = one;
            part.q = oracle::tensor(one.rows(), share.heads, of.dim);
            part.k = oracle::tensor(one.k.rows, share.kv_heads, of.dim);
            for (int row = 0; row < one.rows(); ++row) {
                for (int d = 0; d < of.dim; ++d) {
                    for (int head = 0; head < share.heads; ++head) {
                        part.q.at(row, head, d) = one.q.at(row, rank * share.heads + head, d);
                    }
                    for (int head = 0; head < share.kv_heads; ++head) {
                        part.k.at(row, head, d) = one.k.at(row, rank * share.kv_heads + head, d);
                    }
                }
            }
            const step<float> packed({part}, share);
            const estimated mine = estimate(packed, share, up::no_cache<float>{}, packed.limits(of.heads));
            request broken = part;
            if (rank == faulty_rank) {
                for (double& value : broken.k.data) {
                    value = std::numeric_limits<double>::infinity();
                }
            }
            const step<float> packed_broken({broken}, share);
            const estimated faulty =
                estimate(packed_broken, share, up::no_cache<float>{}, packed_broken.limits(of.heads));
            REQUIRE(mine.buffer.size() == sum.size());
            for (std::size_t word = 0; word < sum.size(); ++word) {
                sum[word] += mine.buffer[word];
                sum_with_fault[word] += faulty.buffer[word];
            }
        }
        const auto reduced = up::mass_view::over(sum.data(), single.limits(), up::memory_space::host);
        for (int s = 0; s < single.batch().num_segments; ++s) {
            const std::int64_t begin = up::block_offset(s, single.batch().segment_begin(s), of.block_rows);
            const segment_masses all = masses_of_segment(wanted, single.batch(), s);
            for (std::size_t block = 0; block < all.free.size(); ++block) {
                REQUIRE(reduced.free[begin + static_cast<std::int64_t>(block)] == all.free[block]);
                REQUIRE(reduced.forced[begin + static_cast<std::int64_t>(block)] == all.forced[block]);
            }
        }
        REQUIRE(decide(single.limits(), reduced, single.batch(), {rule}) == kept);

        const auto broken =
            up::mass_view::over(sum_with_fault.data(), single.limits(), up::memory_space::host);
        for (const kept_segment& segment : decide(single.limits(), broken, single.batch(), {rule})) {
            const up::keep_reason reason = segment.outcome.reason;
            REQUIRE(reason != up::keep_reason::selected);
            REQUIRE(reason != up::keep_reason::everything);
            REQUIRE((segment.outcome.kept == segment.outcome.rows || reason == up::keep_reason::rerun_dense));
        }
    }
}

#if defined(_OPENMP)
TEST_CASE("any number of threads gives the same bits") {
    const int usual = omp_get_max_threads();
    const int cases = scaled(60);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const shape of = small_shape(numbers);
        std::vector<request> requests;
        std::vector<up::selection_rule> rules;
        for (int count = numbers.between(1, 6); count > 0; --count) {
            requests.push_back(small_request(numbers, of, numbers.chance(0.4) ? numbers.between(1, 90) : 0,
                                             numbers.between(1, 3)));
            rules.push_back(random_rule(numbers, requests.back().rows()).ours);
        }
        const step<float> packed(requests, of);
        const key_caches<float> caches(requests, of, numbers);
        omp_set_num_threads(1);
        const decided wanted = run(packed, of, caches.contiguous(), packed.limits(), rules);
        for (const int threads : {2, 3, 5}) {
            omp_set_num_threads(threads);
            REQUIRE(run(packed, of, caches.contiguous(), packed.limits(), rules) == wanted);
        }
    }
    omp_set_num_threads(usual);
}
#endif

TEST_CASE("one estimator and one selector serve many threads, each with memory of its own") {
    random_numbers numbers(base_seed());
    const shape of = small_shape(numbers);
    const request one = small_request(numbers, of, 30, 2);
    const step<float> packed({one}, of);
    const key_caches<float> caches({one}, of, numbers);
    const up::limits bounds = packed.limits();
    const up::importance_estimator<up::estimator_policy<up::dynamic, up::dynamic>> estimator(bounds);
    const up::block_selector<> selector(bounds);
    const up::selection_rule rule = up::selection_rule::top_p(0.9);
    up::workspace count;
    static_cast<void>(up::selection::carve(count, bounds, up::memory_space::host));

    constexpr int threads = 4;
    std::vector<std::vector<std::int64_t>> buffers(
        threads,
        std::vector<std::int64_t>(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds))));
    std::vector<std::vector<int>> kept(threads);
    std::vector<std::thread> running;
    for (int t = 0; t < threads; ++t) {
        running.emplace_back([&, t] {
            const auto mine = static_cast<std::size_t>(t);
            const aligned_memory memory(estimator.workspace_bytes());
            const aligned_memory scratch(selector.workspace_bytes());
            const aligned_memory arrays(count.bytes_used());
            const auto masses = up::mass_view::over(buffers[mine].data(), bounds, up::memory_space::host);
            const up::key_source<float, up::contiguous_cache<float>> keys{packed.k(), caches.contiguous()};
            for (int repeat = 0; repeat < 5; ++repeat) {
                up::workspace piece = arrays.view();
                up::selection out = up::selection::carve(piece, bounds, up::memory_space::host);
                const bool good =
                    estimator.run(packed.q(), keys, {}, packed.batch(), masses, {}, memory.view(), {}).ok() &&
                    selector.run(masses, packed.batch(), &rule, out, scratch.view(), {}).ok();
                kept[mine].assign(1, good ? out.cu_seqlens[1] : -1);
                kept[mine].insert(kept[mine].end(), out.old_to_kept, out.old_to_kept + out.num_rows);
            }
        });
    }
    for (std::thread& thread : running) {
        thread.join();
    }
    for (std::size_t t = 1; t < threads; ++t) {
        CHECK(kept[0][0] >= 0);
        CHECK(kept[t] == kept[0]);
    }
}
