// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Keep sets from the device's masses are those from the host's.

#include "gpu_contracts.cuh"
#include "support/scale.hpp"

#include <uniprefill/select/selector.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iostream>
#include <numeric>

using namespace importance_test;

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
            std::vector<std::int32_t> where(static_cast<std::size_t>(rows));
            std::iota(where.begin(), where.end(), 0);
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
    for (std::int32_t i = 0; i < uniprefill_test::scaled(100); ++i) {
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
