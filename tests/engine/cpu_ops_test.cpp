// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CPU operators against plain double-precision code, and the promise that a row's bits are its own.

#include "engine/cpu/attention.hpp"
#include "engine/cpu/kernels.hpp"
#include "engine/cpu/products.hpp"
#include "engine/cpu/rows.hpp"
#include "engine/cpu/threads.hpp"
#include "engine/error.hpp"

#include "support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

namespace {

using namespace engine::cpu;

std::size_t size(std::int64_t n) {
    return static_cast<std::size_t>(n);
}

std::vector<float> normal(std::int64_t n, unsigned seed, float deviation = 1.0f) {
    std::mt19937 bits(seed);
    std::normal_distribution<float> distribution(0.0f, deviation);
    std::vector<float> values(size(n));
    for (float& v : values) {
        v = distribution(bits);
    }
    return values;
}

bool same_bits(const float* a, const float* b, std::int64_t n) {
    return std::memcmp(a, b, size(n) * sizeof(float)) == 0;
}

std::vector<simd_level> levels() {
    std::vector<simd_level> found{simd_level::portable};
    if (best_simd() != simd_level::portable) found.push_back(simd_level::avx2);
    if (best_simd() == simd_level::avx512) found.push_back(simd_level::avx512);
    return found;
}

std::vector<arithmetic> arithmetics() {
    std::vector<arithmetic> found;
    for (const arithmetic kind : {arithmetic::fp32, arithmetic::bf16x3, arithmetic::bf16}) {
        if (resolve(kind) == kind) found.push_back(kind);
    }
    return found;
}

// Runs with a number of threads, then restores the old one.
class with_threads {
  public:
    explicit with_threads(int threads)
        : before_(max_threads()) {
        set_threads(threads);
    }
    ~with_threads() { set_threads(before_); }
    with_threads(const with_threads&) = delete;
    with_threads& operator=(const with_threads&) = delete;

  private:
    int before_;
};

// Error of a product relative to sum |w| |x|, the scale that rounding goes by.
double tolerance(arithmetic kind) {
    return kind == arithmetic::bf16 ? 1.0 / 128 : kind == arithmetic::bf16x3 ? 2e-5 : 2e-6;
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("2^x is right to 2e-7 at every instruction set", "[engine][cpu]") {
    std::vector<float> x;
    for (double v = -126.0; v <= 126.5; v += 0.00137) {
        x.push_back(static_cast<float>(v));
    }
    x.insert(x.end(), {0.0f, -126.5f, -1000.0f, -INFINITY, NAN});
    for (const simd_level level : levels()) {
        std::vector<float> y(x.size());
        rows_for(level).exp2(x.data(), static_cast<int>(x.size()), y.data());
        double worst = 0;
        for (std::size_t i = 0; i + 5 < x.size(); ++i) {
            const double right = std::exp2(static_cast<double>(x[i]));
            worst = std::max(worst, std::abs(static_cast<double>(y[i]) - right) / right);
        }
        INFO("level " << static_cast<int>(level) << ", worst " << worst);
        CHECK(worst < 2e-7);
        CHECK(y[x.size() - 5] == 1.0f);
        CHECK(y[x.size() - 4] == 0.0f);
        CHECK(y[x.size() - 3] == 0.0f);
        CHECK(y[x.size() - 2] == 0.0f);
        CHECK(std::isnan(y[x.size() - 1]));
    }
}

TEST_CASE("bf16 parts round to nearest even and keep NaN", "[engine][cpu]") {
    std::vector<float> x = normal(1003, 11, 100.0f);
    x.insert(x.end(), {1.00390625f, 1.01171875f, 0.0f, -0.0f, INFINITY, NAN}); // the first two lie half way
    for (const simd_level level : levels()) {
        std::vector<std::uint16_t> high(x.size()), low(x.size());
        rows_for(level).split_bf16(x.data(), static_cast<int>(x.size()), high.data(), low.data());
        for (std::size_t i = 0; i < 1003; ++i) {
            const float h = uniprefill::to_float(uniprefill::bfloat16{high[i]});
            const float l = uniprefill::to_float(uniprefill::bfloat16{low[i]});
            REQUIRE(std::abs(h - x[i]) <= std::abs(x[i]) / 256.0f);
            REQUIRE(std::abs(h + l - x[i]) <= std::abs(x[i]) / 65536.0f);
        }
        CHECK(high[1003] == 0x3f80);
        CHECK(high[1004] == 0x3f82);
        CHECK(high[1005] == 0);
        CHECK(high[1006] == 0x8000);
        CHECK(high[1007] == 0x7f80);
        CHECK((high[1008] & 0x7fff) > 0x7f80);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("products agree with double precision in every arithmetic", "[engine][cpu][products]") {
    struct shape {
        int out, in, rows;
    };
    scratch memory;
    for (const shape s : {shape{1, 1, 1},
                          {40, 33, 3},
                          {7, 576, 31},
                          {576, 96, 32},
                          {960, 576, 33},
                          {576, 1536, 130},
                          {1056, 64, 64},
                          {513, 100, 5}}) {
        const int x_stride = s.in + 5, y_stride = s.out + 3, w_stride = s.in + 2;
        const auto w = normal(std::int64_t{s.out} * w_stride, 1);
        const auto x = normal(std::int64_t{s.rows} * x_stride, 2);
        const auto old = normal(std::int64_t{s.rows} * y_stride, 3);
        for (const arithmetic kind : arithmetics()) {
            const matrix packed(s.out, s.in, kind, w.data(), w_stride);
            REQUIRE(packed.out() == s.out);
            REQUIRE(packed.in() == s.in);
            REQUIRE(packed.kind() == kind);
            std::vector<float> y = old, sum = old;
            multiply(packed, x.data(), x_stride, s.rows, y.data(), y_stride, memory);
            multiply_add(packed, x.data(), x_stride, s.rows, sum.data(), y_stride, memory);
            double worst = 0, worst_sum = 0;
            for (int r = 0; r < s.rows; ++r) {
                for (int o = 0; o < y_stride; ++o) {
                    const std::size_t at = size(std::int64_t{r} * y_stride + o);
                    if (o >= s.out) { // between the rows nothing is touched
                        REQUIRE(y[at] == old[at]);
                        REQUIRE(sum[at] == old[at]);
                        continue;
                    }
                    double right = 0, scale = 0;
                    for (int i = 0; i < s.in; ++i) {
                        const double product = static_cast<double>(w[size(std::int64_t{o} * w_stride + i)]) *
                                               static_cast<double>(x[size(std::int64_t{r} * x_stride + i)]);
                        right += product;
                        scale += std::abs(product);
                    }
                    worst = std::max(worst, std::abs(static_cast<double>(y[at]) - right) / scale);
                    const double with_old = right + static_cast<double>(old[at]);
                    worst_sum = std::max(worst_sum, std::abs(static_cast<double>(sum[at]) - with_old) /
                                                        (scale + std::abs(static_cast<double>(old[at]))));
                }
            }
            INFO(name(kind) << " " << s.out << " x " << s.in << ", " << s.rows << " rows: worst " << worst
                            << " and " << worst_sum);
            CHECK(worst < tolerance(kind));
            CHECK(worst_sum < tolerance(kind));
        }
    }
}

TEST_CASE("a row's product has the same bits wherever and with whatever it runs", "[engine][cpu][products]") {
    scratch memory;
    struct shape {
        int out, in;
    };
    for (const shape s : {shape{960, 576}, {576, 1536}, {530, 100}, {96, 4096}}) {
        const int rows = 300;
        const auto w = normal(std::int64_t{s.out} * s.in, 4);
        const auto x = normal(std::int64_t{rows} * s.in, 5);
        for (const arithmetic kind : arithmetics()) {
            const matrix packed(s.out, s.in, kind, w.data(), s.in);
            std::vector<float> all(size(std::int64_t{rows} * s.out));
            multiply(packed, x.data(), s.in, rows, all.data(), s.out, memory);
            for (const int threads : {1, 2, 3}) {
                const with_threads guard(threads);
                const matrix again(s.out, s.in, kind, w.data(), s.in);
                for (const int count : {1, 2, 31, 32, 33, 127, 129, 300}) {
                    for (const int first : {0, 1, 17, 150}) {
                        if (first + count > rows) continue;
                        std::vector<float> some(size(std::int64_t{count} * s.out));
                        multiply(again, x.data() + std::int64_t{first} * s.in, s.in, count, some.data(),
                                 s.out, memory);
                        INFO(name(kind) << " " << s.out << " x " << s.in << ": " << count << " rows from "
                                        << first << ", threads " << threads);
                        REQUIRE(same_bits(some.data(), all.data() + std::int64_t{first} * s.out,
                                          std::int64_t{count} * s.out));
                    }
                }
            }
        }
    }
}

TEST_CASE("a steady loop of products and attention grows no memory", "[engine][cpu]") {
    scratch memory;
    const auto w = normal(64 * 64, 6), x = normal(50 * 64, 7);
    std::vector<float> y(50 * 64);
    const matrix packed(64, 64, arithmetic::automatic, w.data(), 64);
    multiply(packed, x.data(), 64, 50, y.data(), 64, memory);
    const std::size_t held = memory.bytes();
    for (int rows = 1; rows <= 50; ++rows) {
        multiply(packed, x.data(), 64, rows, y.data(), 64, memory);
    }
    CHECK(held > 0);
    CHECK(memory.bytes() == held);
}

TEST_CASE("no rows are no work, and an empty matrix shape is refused", "[engine][cpu][products]") {
    scratch memory;
    const auto w = normal(64, 8);
    const matrix packed(8, 8, arithmetic::fp32, w.data(), 8);
    multiply(packed, nullptr, 8, 0, nullptr, 8, memory);
    CHECK_THROWS_AS(matrix(0, 8, arithmetic::fp32, w.data(), 8), engine::error);
    CHECK_THROWS_AS(matrix(8, 0, arithmetic::fp32, w.data(), 8), engine::error);
    CHECK_THROWS_AS(
        matrix(8, 8, arithmetic::fp32, [](int, int, float*) { throw engine::error("tensor", "a", "b"); }),
        engine::error);
}

// ---------------------------------------------------------------------------------------------------------------------

// A request with everything it needs.
struct request {
    int query_heads = 0, kv_heads = 0, dim = 0, window = 0;
    std::vector<std::int32_t> query_positions, key_positions;
    std::vector<float> q, k, v;
    std::vector<std::uint16_t> k16, v16;
    std::vector<std::int64_t> slots;
    bool bf16_cache = false;
    std::vector<std::int64_t> list_offsets; // empty: no lists
    std::vector<std::int32_t> listed;
    int first_key = 0, block_keys = 0, list_window = 0;
    std::vector<float> mean_k, mean_v; // [whole blocks, kv_heads, dim], empty: no means

    int mean_blocks() const {
        return mean_k.empty() ? 0 : (static_cast<int>(key_positions.size()) - first_key) / block_keys;
    }
    // Whether a query meets a block by its mean: it sees all of it, reads nothing of it and isn't in it.
    bool skips(int head, int query_position, int block) const {
        const std::int64_t begin = first_key + std::int64_t{block} * block_keys;
        for (std::int64_t i = begin; i < begin + block_keys; ++i) {
            const int distance = query_position - key_positions[size(i)];
            if (distance <= 0 || (window > 0 && distance >= window) || reads(head, distance, i)) return false;
        }
        return true;
    }
    bool reads(int head, int distance, std::int64_t key) const {
        if (distance < 0 || (window > 0 && distance >= window)) return false;
        if (list_offsets.empty() || key < first_key) return true;
        const auto block = static_cast<std::int32_t>((key - first_key) / block_keys);
        const auto* begin = listed.data() + list_offsets[size(head)];
        return std::find(begin, listed.data() + list_offsets[size(head + 1)], block) !=
                   listed.data() + list_offsets[size(head + 1)] ||
               block_is_near(block, key_positions[size(key)] + distance);
    }
    // Whether any key of a block is inside the window of a query.
    bool block_is_near(int block, int query_position) const {
        for (std::int64_t i = first_key + std::int64_t{block} * block_keys;
             i < std::min<std::int64_t>(first_key + (std::int64_t{block} + 1) * block_keys,
                                        static_cast<std::int64_t>(key_positions.size()));
             ++i) {
            const int distance = query_position - key_positions[size(i)];
            if (distance >= 0 && distance < list_window) return true;
        }
        return false;
    }

    attention_call call(std::vector<float>& out) const {
        attention_call c;
        c.query_heads = query_heads;
        c.kv_heads = kv_heads;
        c.head_dim = dim;
        c.scale = 1.0f / std::sqrt(static_cast<float>(dim));
        c.window = window;
        c.query_rows = static_cast<std::int64_t>(query_positions.size());
        c.query_positions = query_positions.data();
        c.queries = q.data();
        c.query_row_stride = query_stride();
        c.query_head_stride = dim + 1;
        c.key_rows = static_cast<std::int64_t>(key_positions.size());
        c.key_positions = key_positions.data();
        c.keys = view(k, k16);
        c.values = view(v, v16);
        if (!list_offsets.empty()) {
            c.lists = {list_offsets.data(),
                       listed.data(),
                       first_key,
                       block_keys,
                       list_window,
                       mean_k.empty() ? nullptr : mean_k.data(),
                       mean_v.empty() ? nullptr : mean_v.data()};
        }
        out.assign(query_positions.size() * size(query_heads * dim), -7.0f);
        c.out = out.data();
        c.out_row_stride = query_heads * dim;
        c.out_head_stride = dim;
        return c;
    }
    std::int64_t query_stride() const { return query_heads * (dim + 1) + 3; }
    std::int64_t kv_stride() const { return kv_heads * dim + 2; }

    kv_rows view(const std::vector<float>& wide, const std::vector<std::uint16_t>& narrow) const {
        kv_rows rows;
        rows.type = bf16_cache ? uniprefill::element_type::bf16 : uniprefill::element_type::f32;
        rows.data =
            bf16_cache ? static_cast<const void*>(narrow.data()) : static_cast<const void*>(wide.data());
        rows.row_stride = kv_stride();
        rows.head_stride = dim;
        rows.slots = slots.empty() ? nullptr : slots.data();
        return rows;
    }
    double key(const std::vector<float>& wide, std::int64_t row, int head, int c) const {
        const std::int64_t slot = slots.empty() ? row : slots[size(row)];
        return static_cast<double>(wide[size(slot * kv_stride() + head * dim + c)]);
    }
};

// keys: every position below `length` with probability `held`; queries: of those, with probability `kept`.
request random_request(int query_heads, int kv_heads, int dim, int length, double held, double kept,
                       int window, bool bf16_cache, bool paged, unsigned seed) {
    std::mt19937 bits(seed);
    std::uniform_real_distribution<double> chance(0, 1);
    request r;
    r.query_heads = query_heads;
    r.kv_heads = kv_heads;
    r.dim = dim;
    r.window = window;
    r.bf16_cache = bf16_cache;
    for (std::int32_t p = 0; p < length; ++p) {
        if (chance(bits) >= held) continue;
        r.key_positions.push_back(p);
        if (chance(bits) < kept) r.query_positions.push_back(p);
    }
    const auto keys = static_cast<std::int64_t>(r.key_positions.size());
    r.q = normal(static_cast<std::int64_t>(r.query_positions.size()) * r.query_stride(), seed + 1, 1.5f);
    r.k = normal(keys * r.kv_stride(), seed + 2, 1.5f);
    r.v = normal(keys * r.kv_stride(), seed + 3);
    if (bf16_cache) {
        for (auto [wide, narrow] : {std::pair{&r.k, &r.k16}, {&r.v, &r.v16}}) {
            narrow->resize(wide->size());
            rows_for(simd_level::portable)
                .split_bf16(wide->data(), static_cast<int>(wide->size()), narrow->data(), nullptr);
            for (std::size_t i = 0; i < wide->size(); ++i) {
                (*wide)[i] = uniprefill::to_float(uniprefill::bfloat16{(*narrow)[i]});
            }
        }
    }
    if (paged) {
        for (std::int64_t i = 0; i < keys; ++i) {
            r.slots.push_back(i);
        }
        std::shuffle(r.slots.begin(), r.slots.end(), bits);
    }
    return r;
}

std::vector<double> plain_attention(const request& r) {
    const int group = r.query_heads / r.kv_heads;
    const double scale = 1.0 / std::sqrt(static_cast<double>(r.dim));
    std::vector<double> out;
    const std::size_t keys = r.key_positions.size();
    std::vector<double> weight(keys + size(r.mean_blocks())); // means behind keys
    const auto element = [&](const std::vector<float>& rows, const std::vector<float>& means, std::size_t i,
                             int head, int c) {
        return i < keys ? r.key(rows, static_cast<std::int64_t>(i), head, c)
                        : static_cast<double>(
                              means[((i - keys) * size(r.kv_heads) + size(head)) * size(r.dim) + size(c)]);
    };
    for (std::size_t q = 0; q < r.query_positions.size(); ++q) {
        for (int h = 0; h < r.query_heads; ++h) {
            double largest = -INFINITY, sum = 0;
            for (std::size_t i = 0; i < weight.size(); ++i) {
                weight[i] = -INFINITY;
                const bool counts = i < keys ? r.reads(h, r.query_positions[q] - r.key_positions[i],
                                                       static_cast<std::int64_t>(i))
                                             : r.skips(h, r.query_positions[q], static_cast<int>(i - keys));
                if (!counts) continue;
                weight[i] = i < keys ? 0 : std::log(static_cast<double>(r.block_keys));
                for (int c = 0; c < r.dim; ++c) {
                    const auto at = static_cast<std::int64_t>(q) * r.query_stride() + h * (r.dim + 1) + c;
                    weight[i] +=
                        static_cast<double>(r.q[size(at)]) * element(r.k, r.mean_k, i, h / group, c) * scale;
                }
                largest = std::max(largest, weight[i]);
            }
            for (double& w : weight) {
                w = std::isinf(largest) ? 0 : std::exp(w - largest);
                sum += w;
            }
            for (int c = 0; c < r.dim; ++c) {
                double total = 0;
                for (std::size_t i = 0; i < weight.size(); ++i) {
                    if (weight[i] > 0) total += weight[i] * element(r.v, r.mean_v, i, h / group, c);
                }
                out.push_back(sum > 0 ? total / sum : 0);
            }
        }
    }
    return out;
}

// Lists of their own for each head: about `share` of the blocks, none for the first head.
request with_lists(request r, int first_key, int block_keys, int list_window, double share, unsigned seed) {
    std::mt19937 bits(seed);
    std::uniform_real_distribution<double> chance(0, 1);
    r.first_key = first_key;
    r.block_keys = block_keys;
    r.list_window = list_window;
    r.list_offsets.push_back(0);
    for (int head = 0; head < r.query_heads; ++head) {
        for (int block = 0; first_key + block * block_keys < static_cast<int>(r.key_positions.size());
             ++block) {
            if (head > 0 && chance(bits) < share) r.listed.push_back(block);
        }
        r.list_offsets.push_back(static_cast<std::int64_t>(r.listed.size()));
    }
    return r;
}

// Any numbers for means: attention takes them at their word.
request with_means(request r, unsigned seed) {
    const std::int64_t blocks =
        (static_cast<std::int64_t>(r.key_positions.size()) - r.first_key) / r.block_keys;
    r.mean_k = normal(blocks * r.kv_heads * r.dim, seed, 1.0f);
    r.mean_v = normal(blocks * r.kv_heads * r.dim, seed + 1);
    return r;
}

double largest_difference(const std::vector<float>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double worst = 0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double d = std::abs(static_cast<double>(a[i]) - b[i]);
        worst = d <= worst ? worst : d; // a NaN is the worst
    }
    return worst;
}

std::vector<request> requests() {
    std::vector<request> all;
    all.push_back(random_request(9, 3, 64, 700, 1, 1, 0, false, false, 100));
    all.push_back(random_request(9, 3, 64, 700, 0.5, 0.4, 0, false, false, 200));
    all.push_back(random_request(9, 3, 64, 900, 0.7, 0.5, 128, false, true, 300));
    all.push_back(random_request(8, 8, 24, 260, 0.9, 1, 5, true, false, 400));
    all.push_back(random_request(7, 1, 80, 300, 1, 1, 0, false, false, 500));
    all.push_back(random_request(4, 2, 256, 200, 0.8, 0.7, 0, true, true, 600));
    all.push_back(random_request(2, 1, 1, 130, 1, 1, 0, false, false, 700));
    all.push_back(random_request(70, 1, 96, 129, 1, 0.3, 64, false, false, 800));
    all.push_back(random_request(300, 1, 16, 70, 1, 0.3, 0, false, false, 900)); // one query fills a tile
    all.push_back(random_request(3, 3, 128, 64, 1, 1, 0, false, false, 1000));
    all.push_back(random_request(3, 3, 128, 65, 1, 1, 1, false, false, 1100));
    for (const int length : {1, 2, 63, 64, 65, 127, 128, 129}) {
        all.push_back(
            random_request(2, 1, 32, length, 1, 1, 0, false, false, 1200 + static_cast<unsigned>(length)));
    }
    const auto listed = [&](int first_key, int block_keys, int list_window, double share, bool paged,
                            int window, double held) {
        const auto seed = static_cast<unsigned>(1500 + all.size());
        all.push_back(with_lists(random_request(9, 3, 64, 700, held, 0.6, window, false, paged, seed),
                                 first_key, block_keys, list_window, share, seed));
    };
    listed(0, 64, 256, 0.2, false, 0, 1);
    listed(0, 64, 0, 0.2, true, 0, 1);
    listed(0, 64, 100, 0.1, false, 0, 0.5);
    listed(0, 32, 70, 0.5, true, 0, 0.8);
    listed(0, 9, 33, 0.3, false, 0, 1);
    listed(200, 64, 128, 0.2, true, 0, 1);
    listed(37, 64, 1, 0.5, false, 0, 0.7);
    listed(100, 256, 64, 0.3, false, 0, 1);
    listed(11, 16, 40, 0.2, false, 150, 0.9);
    listed(700, 64, 40, 0.2, false, 0, 1); // no block: all keys are context
    listed(0, 64, 64, 0, true, 0, 1);
    listed(0, 64, 64, 1, false, 0, 1);
    for (std::size_t i = 0, count = all.size(); i < count; ++i) {
        if (all[i].list_offsets.empty()) continue;
        all.push_back(with_means(all[i], static_cast<unsigned>(3000 + 2 * i)));
    }
    // More blocks than a tile has keys.
    all.push_back(with_means(
        with_lists(random_request(4, 2, 32, 1500, 1, 0.05, 0, false, false, 2900), 3, 8, 20, 0.4, 2901),
        2902));
    return all;
}

TEST_CASE("attention pairs are counted", "[engine][cpu][attention]") {
    for (const request& r : requests()) {
        std::vector<float> out;
        std::int64_t pairs = 0;
        for (int head = 0; head < r.query_heads; ++head) {
            for (const std::int32_t query : r.query_positions) {
                for (std::size_t i = 0; i < r.key_positions.size(); ++i) {
                    pairs += r.reads(head, query - r.key_positions[i], static_cast<std::int64_t>(i)) ? 1 : 0;
                }
                for (int block = 0; block < r.mean_blocks(); ++block) {
                    pairs += r.skips(head, query, block) ? 1 : 0;
                }
            }
        }
        CHECK(attention_pairs(r.call(out)) == pairs);
    }
}

TEST_CASE("lists or windows of every key give the bits of none", "[engine][cpu][attention]") {
    scratch memory;
    const request dense = random_request(4, 2, 64, 500, 0.8, 0.7, 0, false, false, 44);
    const request full = with_lists(dense, 0, 64, 0, 2, 45); // but for the first head, which has none
    for (const arithmetic kind : arithmetics()) {
        std::vector<float> a, b;
        attention_call call = dense.call(a);
        call.kind = kind;
        attend(call, memory);
        call = full.call(b);
        call.kind = kind;
        attend(call, memory);
        for (std::size_t i = 0; i < dense.query_positions.size(); ++i) {
            const auto at = static_cast<std::int64_t>(i) * 4 * 64;
            CHECK(same_bits(a.data() + at + 64, b.data() + at + 64, 3 * 64));
            CHECK(std::all_of(b.data() + at, b.data() + at + 64, [](float x) { return x == 0.0f; }));
        }
        // With means, which heads of full lists never meet.
        const request means = with_means(full, 47);
        call = means.call(b);
        call.kind = kind;
        attend(call, memory);
        for (std::size_t i = 0; i < dense.query_positions.size(); ++i) {
            const auto at = static_cast<std::int64_t>(i) * 4 * 64;
            CHECK(same_bits(a.data() + at + 64, b.data() + at + 64, 3 * 64));
        }
        const request near = with_lists(dense, 77, 64, 1000, 0, 46); // nothing listed, a window of everything
        call = near.call(b);
        call.kind = kind;
        attend(call, memory);
        CHECK(same_bits(a.data(), b.data(), static_cast<std::int64_t>(a.size())));
    }
}

TEST_CASE("attention agrees with double precision in every arithmetic", "[engine][cpu][attention]") {
    scratch memory;
    for (const request& r : requests()) {
        const std::vector<double> right = plain_attention(r);
        std::vector<float> out;
        INFO(r.query_heads << "/" << r.kv_heads << " heads of " << r.dim << ", " << r.query_positions.size()
                           << " queries, " << r.key_positions.size() << " keys, window " << r.window);
        for (const simd_level level : levels()) {
            attend_fp32(r.call(out), memory, level);
            INFO("level " << static_cast<int>(level));
            CHECK(largest_difference(out, right) < 5e-6);
        }
        for (const arithmetic kind : arithmetics()) {
            attention_call call = r.call(out);
            call.kind = kind;
            attend(call, memory);
            INFO(name(kind));
            CHECK(largest_difference(out, right) < (kind == arithmetic::bf16     ? 0.08
                                                    : kind == arithmetic::bf16x3 ? 3e-4
                                                                                 : 5e-6));
        }
    }
}

TEST_CASE("a query's attention has the same bits whichever queries run with it", "[engine][cpu][attention]") {
    scratch memory;
    std::mt19937 bits(77);
    for (const request& whole : requests()) {
        std::vector<float> all, some;
        for (const arithmetic kind : arithmetics()) {
            attention_call call = whole.call(all);
            call.kind = kind;
            attend(call, memory);
            for (const int threads : {1, 2, 3}) {
                for (const double kept : {0.02, 0.3, 0.8, 1.0}) {
                    const with_threads guard(threads);
                    std::uniform_real_distribution<double> chance(0, 1);
                    request part = whole;
                    part.query_positions.clear();
                    part.q.clear();
                    std::vector<std::size_t> from;
                    for (std::size_t i = 0; i < whole.query_positions.size(); ++i) {
                        if (chance(bits) >= kept) continue;
                        part.query_positions.push_back(whole.query_positions[i]);
                        const auto at =
                            whole.q.begin() + static_cast<std::ptrdiff_t>(i) * whole.query_stride();
                        part.q.insert(part.q.end(), at, at + whole.query_stride());
                        from.push_back(i);
                    }
                    call = part.call(some);
                    call.kind = kind;
                    attend(call, memory);
                    const std::int64_t width = whole.query_heads * whole.dim;
                    for (std::size_t i = 0; i < from.size(); ++i) {
                        INFO(name(kind) << ", " << whole.query_heads << "/" << whole.kv_heads << " heads of "
                                        << whole.dim << ", query " << from[i] << ", threads " << threads
                                        << ", kept " << kept);
                        REQUIRE(same_bits(some.data() + static_cast<std::int64_t>(i) * width,
                                          all.data() + static_cast<std::int64_t>(from[i]) * width, width));
                    }
                }
            }
        }
    }
}

TEST_CASE("scores far apart and far from zero neither overflow nor vanish", "[engine][cpu][attention]") {
    scratch memory;
    request r = random_request(2, 1, 64, 400, 1, 1, 0, false, false, 5);
    for (std::size_t i = 0; i < r.k.size(); ++i) {
        r.k[i] *= i > r.k.size() / 2 ? 40.0f : 0.01f; // the maximum jumps in the middle
    }
    std::vector<float> out;
    const std::vector<double> right = plain_attention(r);
    for (const arithmetic kind : arithmetics()) {
        if (kind == arithmetic::bf16) continue; // rounds scores of several hundred by more than one
        attention_call call = r.call(out);
        call.kind = kind;
        attend(call, memory);
        INFO(name(kind));
        CHECK(largest_difference(out, right) < (kind == arithmetic::bf16x3 ? 1e-2 : 2e-4));
    }
}

TEST_CASE("queries that see no key get zeros", "[engine][cpu][attention]") {
    scratch memory;
    request r = random_request(2, 1, 32, 50, 1, 1, 0, false, false, 6);
    r.key_positions.erase(r.key_positions.begin(),
                          r.key_positions.begin() + 10); // keys 0..39 now sit at 10..49
    for (const arithmetic kind : arithmetics()) {
        std::vector<float> out;
        attention_call call = r.call(out);
        call.kind = kind;
        attend(call, memory);
        CHECK(std::all_of(out.begin(), out.begin() + 10 * 64, [](float x) { return x == 0.0f; }));
        CHECK(largest_difference(out, plain_attention(r)) < 0.08);
        call = r.call(out);
        call.kind = kind;
        call.key_rows = 0;
        attend(call, memory);
        CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == 0.0f; }));
    }
}

TEST_CASE("wrong attention arguments are named before anything is written", "[engine][cpu][attention]") {
    scratch memory;
    const request r = random_request(4, 2, 32, 20, 1, 1, 0, false, false, 9);
    std::vector<float> out;
    const auto refuses = [&](const char* argument, auto change) {
        attention_call call = r.call(out);
        change(call);
        try {
            attend(call, memory);
            FAIL("accepted a wrong " << argument);
        } catch (const engine::error& e) {
            CHECK(e.argument() == argument);
        }
        CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == -7.0f; }));
    };
    refuses("kv_heads", [](attention_call& c) { c.kv_heads = 0; });
    refuses("query_heads", [](attention_call& c) { c.query_heads = 5; });
    refuses("head_dim", [](attention_call& c) { c.head_dim = 257; });
    refuses("window", [](attention_call& c) { c.window = -1; });
    refuses("query_rows", [](attention_call& c) { c.query_rows = -1; });
    refuses("key_rows", [](attention_call& c) { c.key_rows = -1; });
    const std::vector<std::int32_t> descending = [] {
        std::vector<std::int32_t> p(20, 3);
        p[19] = 2;
        return p;
    }();
    refuses("query_positions", [&](attention_call& c) { c.query_positions = descending.data(); });
    refuses("key_positions", [&](attention_call& c) { c.key_positions = descending.data(); });
    const request listed = with_lists(r, 0, 8, 4, 0.5, 10);
    const std::vector<float> one_mean(1);
    const auto refuses_lists = [&](const char* argument, auto change) {
        refuses(argument, [&](attention_call& c) {
            c.lists = listed.call(out).lists;
            change(c.lists);
        });
    };
    refuses_lists("lists.block_keys", [](key_lists& l) { l.block_keys = 0; });
    refuses_lists("lists.window", [](key_lists& l) { l.window = -1; });
    const std::vector<std::int64_t> falling = {4, 3, 2, 1, 0}, negative = {-1, 0, 0, 0, 0};
    refuses_lists("lists.offsets", [&](key_lists& l) { l.offsets = falling.data(); });
    refuses_lists("lists.offsets", [&](key_lists& l) { l.offsets = negative.data(); });
    refuses_lists("lists.blocks", [](key_lists& l) { l.blocks = nullptr; });
    refuses_lists("lists.first_key", [](key_lists& l) { l.first_key = 21; });
    refuses_lists("lists.mean_values", [&](key_lists& l) { l.mean_keys = one_mean.data(); });
    refuses_lists("lists.blocks", [](key_lists& l) { l.first_key = 13; }); // fewer blocks than are listed
    const std::vector<std::int32_t> twice(listed.listed.size(), 0);
    refuses_lists("lists.blocks", [&](key_lists& l) { l.blocks = twice.data(); });
    attention_call none = r.call(out);
    none.query_rows = 0;
    attend(none, memory);
    CHECK(std::all_of(out.begin(), out.end(), [](float x) { return x == -7.0f; }));
}

// ---------------------------------------------------------------------------------------------------------------------

TEST_CASE("row operations agree with double precision at every instruction set", "[engine][cpu][rows]") {
    for (const int dim : {1, 7, 16, 64, 576, 1001}) {
        const auto x = normal(dim, 31), g = normal(dim, 32, 4.0f), w = normal(dim, 33);
        double mean = 0;
        for (const float v : x) {
            mean += static_cast<double>(v) * static_cast<double>(v) / dim;
        }
        for (const simd_level level : levels()) {
            std::vector<float> normed(x.size()), gated(x.size()), added = w;
            rows_for(level).rms_norm(x.data(), w.data(), dim, 1e-5f, normed.data());
            rows_for(level).swiglu(g.data(), w.data(), dim, gated.data());
            rows_for(level).add(x.data(), dim, added.data());
            INFO("dim " << dim << ", level " << static_cast<int>(level));
            for (std::size_t i = 0; i < x.size(); ++i) {
                const double gate = static_cast<double>(g[i]), weight = static_cast<double>(w[i]);
                const double norm = static_cast<double>(x[i]) / std::sqrt(mean + 1e-5) * weight;
                REQUIRE(std::abs(static_cast<double>(normed[i]) - norm) <= 1e-6 * (std::abs(norm) + 1e-3));
                const double swish = gate / (1 + std::exp(-gate)) * weight;
                REQUIRE(std::abs(static_cast<double>(gated[i]) - swish) <= 2e-6 * (std::abs(swish) + 1e-3));
                REQUIRE(added[i] == x[i] + w[i]);
            }
        }
    }
    // Gates beyond what exp can hold.
    const std::vector<float> gate = {-1000.0f, -88.0f, 88.0f, 1000.0f}, up = {1, 1, 1, 1};
    std::vector<float> y(4);
    swiglu(gate.data(), 4, up.data(), 4, 1, 4, y.data(), 4);
    CHECK(std::abs(y[0]) < 1e-30f);
    CHECK(std::abs(y[1]) < 1e-30f);
    CHECK(y[2] == 88.0f);
    CHECK(y[3] == 1000.0f);
}

TEST_CASE("rope rotates neighbouring pairs by the row's position", "[engine][cpu][rows]") {
    const int heads = 3, dims = 8, head_stride = 10, rows = 5;
    const std::int64_t row_stride = heads * head_stride + 1;
    const double base = 100000;
    const std::vector<float> factors = {1, 2, 4, 8};
    const std::vector<std::int32_t> positions = {0, 3, 3, 100, 8191};
    for (const float* f : {static_cast<const float*>(nullptr), factors.data()}) {
        const rope_table table(8192, dims, base, f);
        const auto before = normal(rows * row_stride, 41);
        auto x = before;
        rope(x.data(), row_stride, head_stride, heads, rows, positions.data(), table);
        for (int r = 0; r < rows; ++r) {
            for (int h = 0; h < heads; ++h) {
                for (int c = 0; c < head_stride; ++c) {
                    const std::size_t at = size(r * row_stride + h * head_stride + c);
                    if (c >= dims) {
                        REQUIRE(x[at] == before[at]);
                        continue;
                    }
                    const int pair = c / 2;
                    const double angle = positions[size(r)] * std::pow(base, -2.0 * pair / dims) /
                                         (f == nullptr ? 1.0 : static_cast<double>(f[pair]));
                    const double a = static_cast<double>(before[at - size(c % 2)]);
                    const double b = static_cast<double>(before[at - size(c % 2) + 1]);
                    const double right = c % 2 == 0 ? a * std::cos(angle) - b * std::sin(angle)
                                                    : a * std::sin(angle) + b * std::cos(angle);
                    REQUIRE(std::abs(static_cast<double>(x[at]) - right) < 2e-6);
                }
            }
        }
        REQUIRE(same_bits(x.data(), before.data(), dims)); // position 0 turns nothing
    }
    const rope_table small(100, dims, base);
    auto x = normal(rows * row_stride, 42);
    const auto before = x;
    CHECK_THROWS_AS(rope(x.data(), row_stride, head_stride, heads, rows, positions.data(), small),
                    engine::error);
    CHECK(x == before);
    CHECK_THROWS_AS(rope_table(10, 7, base), engine::error);
    CHECK_THROWS_AS(rope_table(10, 8, 0), engine::error);
    CHECK_THROWS_AS(rope_table(-1, 8, base), engine::error);
}

TEST_CASE("row operations give each row the same bits at any number of threads", "[engine][cpu][rows]") {
    const int dim = 576;
    const std::int64_t rows = 200, stride = dim + 3;
    const auto x = normal(rows * stride, 51), z = normal(rows * stride, 52), w = normal(dim, 53);
    std::vector<float> first[3];
    for (const int threads : {1, 2, 3}) {
        const with_threads guard(threads);
        std::vector<float> results[3] = {z, z, z};
        rms_norm(x.data(), stride, w.data(), 1e-5f, rows, dim, results[0].data(), stride);
        swiglu(x.data(), stride, z.data(), stride, rows, dim, results[1].data(), stride);
        add(x.data(), stride, rows, dim, results[2].data(), stride);
        for (int i = 0; i < 3; ++i) {
            if (threads == 1) first[i] = results[i];
            CHECK(same_bits(results[i].data(), first[i].data(), rows * stride));
            CHECK(results[i][size(dim)] == z[size(dim)]); // between the rows nothing is touched
        }
        std::vector<float> one(size(dim)); // a row alone
        rms_norm(x.data() + 17 * stride, 0, w.data(), 1e-5f, 1, dim, one.data(), 0);
        CHECK(same_bits(one.data(), results[0].data() + 17 * stride, dim));
    }
}

TEST_CASE("gather copies the rows asked for and refuses others", "[engine][cpu][rows]") {
    const auto table = normal(10 * 6, 61);
    const std::vector<std::int32_t> ids = {9, 0, 0, 4}, over = {0, 10}, under = {0, -1};
    std::vector<float> y(4 * 7, 1.0f);
    gather(table.data(), 10, 6, ids.data(), 4, y.data(), 7);
    for (std::size_t i = 0; i < 4; ++i) {
        CHECK(same_bits(y.data() + i * 7, table.data() + ids[i] * 6, 6));
        CHECK(y[i * 7 + 6] == 1.0f);
    }
    CHECK_THROWS_AS(gather(table.data(), 10, 6, over.data(), 2, y.data(), 7), engine::error);
    CHECK_THROWS_AS(gather(table.data(), 10, 6, under.data(), 2, y.data(), 7), engine::error);
}

} // namespace
