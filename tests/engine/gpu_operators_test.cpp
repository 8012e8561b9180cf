// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The engine's small kernels and products on a CUDA device against plain loops in double.

#include "support/cuda.cuh"

#include "engine/app/quality.hpp"
#include "engine/cuda/compare_rows.hpp"
#include "engine/cuda/dense_attention.hpp"
#include "engine/cuda/pair_counts.hpp"
#include "engine/cuda/products.hpp"
#include "engine/cuda/row_kernels.hpp"

#include <cmath>
#include <limits>
#include <random>

using uniprefill::bfloat16;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

class numbers {
  public:
    std::vector<bfloat16> bf16(std::size_t count, float scale = 1) {
        std::vector<bfloat16> values(count);
        for (bfloat16& value : values) {
            value = uniprefill::from_float<bfloat16>(scale * next());
        }
        return values;
    }
    std::vector<float> fp32(std::size_t count, float mean = 0) {
        std::vector<float> values(count);
        for (float& value : values) {
            value = mean + next();
        }
        return values;
    }

  private:
    float next() { return static_cast<float>(static_cast<std::int32_t>(random_() % 2001) - 1000) / 1000; }
    std::mt19937_64 random_{uniprefill_test::seed()};
};

double number(bfloat16 value) {
    return static_cast<double>(uniprefill::to_float(value));
}

/// Whether @p came is @p wanted but for rounding to bf16, and @p slack besides.
bool close(double came, double wanted, double slack = 1e-6) {
    return std::abs(came - wanted) <= std::abs(wanted) / 250 + slack;
}

std::size_t at(int row, int columns, int column) {
    return static_cast<std::size_t>(row) * static_cast<std::size_t>(columns) +
           static_cast<std::size_t>(column);
}

} // namespace

TEST_CASE("cuda operators: embeddings, norms, SwiGLU") {
    if (!has_device()) return;
    numbers random;
    for (const int hidden : {64, 576, 4096}) {
        const int rows = 37;
        const int vocab = 11;
        const auto table = random.bf16(at(vocab, hidden, 0));
        std::vector<std::int32_t> tokens;
        for (int row = 0; row < rows; ++row) {
            tokens.push_back(row % (vocab + 1)); // one of them lies outside
        }
        const device_array<bfloat16> device_table(table);
        const device_array<std::int32_t> device_tokens(tokens);
        const device_array<float> embedded(at(rows, hidden, 0));
        engine::cuda::embed(device_table.data(), vocab, device_tokens.data(), rows, hidden, embedded.data(),
                            nullptr);
        const std::vector<float> x = embedded.get();
        bool same = true;
        for (int row = 0; row < rows; ++row) {
            for (int i = 0; i < hidden; ++i) {
                const int token = tokens[static_cast<std::size_t>(row)];
                const float wanted = token < vocab ? uniprefill::to_float(table[at(token, hidden, i)]) : 0.0f;
                same = same && x[at(row, hidden, i)] == wanted;
            }
        }
        CHECK(same);

        const auto weight = random.fp32(static_cast<std::size_t>(hidden), 1);
        const device_array<float> device_weight(weight);
        const device_array<bfloat16> normed(at(rows, hidden, 0));
        const std::vector<std::int32_t> ends{3, 20, rows};
        const device_array<std::int32_t> device_ends(ends);
        for (const bool last_rows : {false, true}) {
            const int count = last_rows ? 3 : rows;
            engine::cuda::rms_norm(embedded.data(), device_weight.data(), 1e-5f, count, hidden,
                                   last_rows ? device_ends.data() : nullptr, normed.data(), nullptr);
            const auto y = normed.get();
            bool good = true;
            for (int row = 0; row < count; ++row) {
                const int from = last_rows ? ends[static_cast<std::size_t>(row)] - 1 : row;
                double squares = 0;
                for (int i = 0; i < hidden; ++i) {
                    squares += std::pow(static_cast<double>(x[at(from, hidden, i)]), 2);
                }
                const double scale = 1 / std::sqrt(squares / hidden + 1e-5);
                for (int i = 0; i < hidden; ++i) {
                    const double wanted = static_cast<double>(x[at(from, hidden, i)]) * scale *
                                          static_cast<double>(weight[static_cast<std::size_t>(i)]);
                    good = good && close(number(y[at(row, hidden, i)]), wanted);
                }
            }
            CHECK(good);
        }

        const auto gates = random.bf16(at(rows, 2 * hidden, 0), 4);
        const device_array<bfloat16> device_gates(gates);
        engine::cuda::swiglu(device_gates.data(), rows, hidden, normed.data(), nullptr);
        const auto y = normed.get();
        bool good = true;
        for (int row = 0; row < rows; ++row) {
            for (int i = 0; i < hidden; ++i) {
                const double gate = number(gates[at(row, 2 * hidden, i)]);
                const double up = number(gates[at(row, 2 * hidden, hidden + i)]);
                good = good && close(number(y[at(row, hidden, i)]), gate / (1 + std::exp(-gate)) * up);
            }
        }
        CHECK(good);
    }
}

TEST_CASE("cuda operators: q and k are rotated, k and v stored") {
    if (!has_device()) return;
    numbers random;
    struct shape {
        int heads, kv_heads, head_dim, rope_dims;
    };
    for (const shape of :
         {shape{4, 2, 64, 64}, shape{9, 3, 64, 64}, shape{8, 2, 128, 128}, shape{2, 1, 128, 64}}) {
        for (const bool in_place : {false, true}) {
            const int rows = 70;
            const int alive = 61;
            const int cached = 5;
            const int capacity = 62; // the last rows don't fit
            const int positions = 5000;
            const int q = of.heads * of.head_dim;
            const int kv = of.kv_heads * of.head_dim;
            const int elements = q + 2 * kv;
            const auto before = random.bf16(at(rows, elements, 0));
            std::vector<std::int32_t> where;
            for (int row = 0; row < rows; ++row) {
                where.push_back(row * 83);
            }
            const device_array<bfloat16> qkv(before);
            const device_array<std::int32_t> device_where(where);
            const device_array<float2> table(static_cast<std::size_t>(positions) *
                                             static_cast<std::size_t>(of.rope_dims / 2));
            engine::cuda::make_rope_table(positions, of.rope_dims, 100000, table.data(), nullptr);
            const std::vector<bfloat16> untouched(at(capacity, kv, 0), bfloat16{0x1234});
            const device_array<bfloat16> k_cache(untouched);
            const device_array<bfloat16> v_cache(untouched);
            const device_array<std::int32_t> counts(std::vector<std::int32_t>{cached, alive, -1});
            engine::cuda::rope_call call;
            call.qkv = qkv.data();
            call.rows = rows;
            call.q_elements = q;
            call.kv_elements = kv;
            call.head_dim = of.head_dim;
            call.rope_dims = of.rope_dims;
            call.positions = device_where.data();
            call.table = table.data();
            call.table_positions = positions;
            call.k_cache = k_cache.data();
            call.v_cache = v_cache.data();
            call.capacity = capacity;
            call.cached_len = counts.data();
            call.alive = counts.data() + 1;
            call.entered = counts.data() + 2;
            call.keys_in_place = in_place;
            engine::cuda::rope_and_store(call, nullptr);
            CHECK(counts.get()[2] == alive);
            const auto after = qkv.get();
            const auto k = k_cache.get();
            const auto v = v_cache.get();
            bool rotated = true;
            bool kept = true;
            bool stored = true;
            for (int row = 0; row < rows; ++row) {
                const int slot = cached + row;
                for (int i = 0; i < elements; ++i) {
                    const int dim = i % of.head_dim;
                    double wanted = number(before[at(row, elements, i)]);
                    if (i < q + kv && dim < of.rope_dims) {
                        const double angle = where[static_cast<std::size_t>(row)] *
                                             std::pow(100000.0, -2.0 * (dim / 2) / of.rope_dims);
                        const double a = number(before[at(row, elements, i - dim % 2)]);
                        const double b = number(before[at(row, elements, i - dim % 2 + 1)]);
                        wanted = dim % 2 == 0 ? a * std::cos(angle) - b * std::sin(angle)
                                              : a * std::sin(angle) + b * std::cos(angle);
                    }
                    const double came = number(after[at(row, elements, i)]);
                    if (row < alive && (i < q || (in_place && i < q + kv))) {
                        rotated = rotated && close(came, wanted, 1e-4);
                    } else {
                        kept = kept && came == number(before[at(row, elements, i)]);
                    }
                    if (row < alive && slot < capacity && i >= q) {
                        const double cell =
                            i < q + kv ? number(k[at(slot, kv, i - q)]) : number(v[at(slot, kv, i - q - kv)]);
                        stored = stored && close(cell, wanted, 1e-4);
                    }
                }
            }
            CHECK(rotated);
            CHECK(kept);
            CHECK(stored);
            for (int slot = 0; slot < cached; ++slot) {
                CHECK(k[at(slot, kv, 0)].bits == 0x1234);
            }
        }
    }
}

TEST_CASE("cuda operators: the likeliest token") {
    if (!has_device()) return;
    const int vocab = 49153;
    std::vector<float> logits(at(4, vocab, 0), -1.0f);
    logits[at(0, vocab, 49152)] = 2;
    logits[at(1, vocab, 300)] = logits[at(1, vocab, 40000)] = 2; // the lower one
    logits[at(2, vocab, 7)] = std::numeric_limits<float>::quiet_NaN();
    logits[at(3, vocab, 7)] = std::numeric_limits<float>::infinity();
    const device_array<float> device_logits(logits);
    const device_array<std::int32_t> best(4);
    engine::cuda::argmax(device_logits.data(), 4, vocab, best.data(), nullptr);
    CHECK(best.get() == std::vector<std::int32_t>{49152, 300, -1, -1});
}

TEST_CASE("cuda operators: products") {
    if (!has_device()) return;
    numbers random;
    engine::cuda::products products;
    struct shape {
        int rows, in, out;
    };
    for (const shape of :
         {shape{1, 576, 960}, shape{7, 64, 329}, shape{193, 256, 128}, shape{1030, 128, 512}}) {
        const auto weights = random.bf16(at(of.out, of.in, 0));
        const auto x = random.bf16(at(of.rows, of.in, 0));
        const auto before = random.fp32(at(of.rows, of.out, 0));
        engine::cuda::matrix w;
        w.out = of.out;
        w.in = of.in;
        w.weights = engine::cuda::device_array<bfloat16>(weights.size());
        w.weights.set(weights);
        const device_array<bfloat16> device_x(x);
        const device_array<bfloat16> short_y(before.size());
        const device_array<float> y(before.size());
        const device_array<float> sum(before);
        products.multiply(w, device_x.data(), of.rows, short_y.data(), nullptr);
        products.multiply(w, device_x.data(), of.rows, y.data(), nullptr);
        products.multiply_add(w, device_x.data(), of.rows, sum.data(), nullptr);
        const auto came = y.get();
        const auto came_short = short_y.get();
        const auto came_sum = sum.get();
        bool good = true;
        for (int row = 0; row < of.rows; ++row) {
            for (int o = 0; o < of.out; ++o) {
                double wanted = 0;
                for (int i = 0; i < of.in; ++i) {
                    wanted += number(weights[at(o, of.in, i)]) * number(x[at(row, of.in, i)]);
                }
                const std::size_t cell = at(row, of.out, o);
                good = good && std::abs(static_cast<double>(came[cell]) - wanted) < 1e-3;
                good = good && close(number(came_short[cell]), wanted, 1e-3);
                good = good && std::abs(static_cast<double>(came_sum[cell]) - wanted -
                                        static_cast<double>(before[cell])) < 1e-3;
            }
        }
        CHECK(good);
    }
}

TEST_CASE("cuda operators: random numbers have the deviation asked for, and repeat") {
    if (!has_device()) return;
    const std::int64_t count = 1 << 20;
    const device_array<bfloat16> some(static_cast<std::size_t>(count));
    engine::cuda::fill_random(some.data(), count, 5, 0.25f, nullptr);
    const auto values = some.get();
    double sum = 0;
    double squares = 0;
    for (const bfloat16 value : values) {
        sum += number(value);
        squares += number(value) * number(value);
    }
    CHECK(std::abs(sum / static_cast<double>(count)) < 0.002);
    CHECK(std::abs(std::sqrt(squares / static_cast<double>(count)) - 0.25) < 0.002);
    engine::cuda::fill_random(some.data(), count, 5, 0.25f, nullptr);
    const auto again = some.get();
    bool same = true;
    for (std::size_t i = 0; i < values.size(); ++i) {
        same = same && values[i].bits == again[i].bits;
    }
    CHECK(same);
}

namespace {

/// A step of one request: positions with gaps, segments, kept rows and a list for each (segment, head).
struct listed_step {
    static constexpr int block_rows = 16;
    static constexpr int heads = 3;

    explicit listed_step(int segments, bool all_kept) {
        std::mt19937_64 random(uniprefill_test::seed() + static_cast<std::uint64_t>(segments));
        bounds.push_back(0);
        offsets.push_back(0);
        std::int32_t position = 0;
        for (int s = 0; s < segments; ++s) {
            const auto rows = static_cast<std::int32_t>(random() % 150); // none, too
            for (std::int32_t row = 0; row < rows; ++row) {
                position += 1 + static_cast<std::int32_t>(random() % 4 == 0 ? random() % 40 : 0);
                positions.push_back(position);
            }
            bounds.push_back(bounds.back() + rows);
            for (int head = 0; head < heads; ++head) {
                for (std::int32_t block = 0; block * block_rows < rows; ++block) {
                    if (random() % 3 == 0) blocks.push_back(block);
                }
                offsets.push_back(static_cast<std::int64_t>(blocks.size()));
            }
        }
        for (std::int32_t row = 0; row < bounds.back(); ++row) {
            if (all_kept || random() % 2 == 0) kept.push_back(row);
        }
    }

    /// Every (query, key) pair asked whether it is read.
    long long pairs(int window, bool listed) const {
        long long sum = 0;
        for (const std::int32_t query : kept) {
            std::size_t s = 0;
            while (query >= bounds[s + 1]) {
                ++s;
            }
            for (int head = 0; head < (listed ? heads : 1); ++head) {
                for (std::int32_t key = 0; key <= query; ++key) {
                    sum += listed ? reads(query, key, s, head, window)
                                  : window == 0 || in_window(query, key, window);
                }
            }
        }
        return sum;
    }

    std::vector<std::int32_t> positions, bounds, blocks, kept;
    std::vector<std::int64_t> offsets;

  private:
    bool in_window(std::int32_t query, std::int32_t key, int window) const {
        return positions[static_cast<std::size_t>(key)] > positions[static_cast<std::size_t>(query)] - window;
    }
    bool reads(std::int32_t query, std::int32_t key, std::size_t s, int head, int window) const {
        if (key < bounds[s]) return true;
        const std::int32_t block = (key - bounds[s]) / block_rows;
        const std::size_t list = s * heads + static_cast<std::size_t>(head);
        for (std::int64_t i = offsets[list]; i < offsets[list + 1]; ++i) {
            if (blocks[static_cast<std::size_t>(i)] == block) return true;
        }
        for (std::int32_t row = bounds[s]; row <= query; ++row) { // the first block with a row in the window
            if (in_window(query, row, window)) return block >= (row - bounds[s]) / block_rows;
        }
        return false;
    }
};

} // namespace

TEST_CASE("cuda operators: pairs that are read, counted") {
    if (!has_device()) return;
    for (const int segments : {1, 2, 7}) {
        for (const bool all_kept : {true, false}) {
            const listed_step step(segments, all_kept);
            const device_array<std::int32_t> positions(step.positions);
            const device_array<std::int32_t> bounds(step.bounds);
            const device_array<std::int32_t> blocks(step.blocks);
            const device_array<std::int64_t> offsets(step.offsets);
            std::vector<std::int32_t> padded = step.kept;
            padded.resize(step.positions.size() + 77, -1);
            const device_array<std::int32_t> kept(padded);
            const device_array<std::int32_t> alive(
                std::vector<std::int32_t>{static_cast<std::int32_t>(step.kept.size())});
            for (const bool listed : {false, true}) {
                for (const int window : {0, 1, 40, 100000}) {
                    engine::cuda::pair_count_call call;
                    call.rows = static_cast<std::int32_t>(padded.size());
                    call.alive = alive.data();
                    call.kept_to_old = all_kept ? nullptr : kept.data();
                    call.positions = positions.data();
                    call.bounds = bounds.data();
                    call.segments = segments;
                    call.offsets = listed ? offsets.data() : nullptr;
                    call.blocks = blocks.data();
                    call.heads = listed_step::heads;
                    call.block_rows = listed_step::block_rows;
                    call.window = window;
                    const device_array<engine::cuda::pair_count> counted(
                        std::vector<engine::cuda::pair_count>(1));
                    engine::cuda::count_pairs(call, counted.data(), nullptr);
                    const auto came = counted.get().front();
                    CAPTURE(segments, all_kept, listed, window);
                    CHECK(static_cast<long long>(came.pairs) == step.pairs(window, listed));
                    CHECK(came.queries == static_cast<long long>(step.kept.size()));
                }
            }
        }
    }
}

TEST_CASE("cuda operators: divergences of rows of logits") {
    if (!has_device()) return;
    numbers random;
    for (const int vocab : {1, 7, 512, 49152}) {
        const int rows = 5;
        std::vector<float> p = random.fp32(at(rows, vocab, 0));
        std::vector<float> q = random.fp32(at(rows, vocab, 0), 0.5f);
        for (std::size_t i = 0; i < p.size(); ++i) {
            p[i] *= 12;
            q[i] = p[i] + q[i];
        }
        for (int i = 0; i < vocab; ++i) {
            q[at(2, vocab, i)] = p[at(2, vocab, i)];
        }
        const device_array<float> device_p(p);
        const device_array<float> device_q(q);
        const device_array<double> out(rows);
        engine::cuda::compare_rows(device_p.data(), device_q.data(), rows, vocab, out.data(), nullptr);
        const std::vector<double> came = out.get();
        for (int row = 0; row < rows; ++row) {
            const double wanted = engine::compare_logits(p.data() + at(row, vocab, 0),
                                                         q.data() + at(row, vocab, 0), 1, vocab, {})
                                      .kl_mean;
            CAPTURE(vocab, row, wanted, came[static_cast<std::size_t>(row)]);
            CHECK(std::abs(came[static_cast<std::size_t>(row)] - wanted) <= 1e-9 * (1 + wanted));
        }
        CHECK(came[2] < 1e-12);
        q[at(3, vocab, vocab - 1)] = std::numeric_limits<float>::infinity();
        p[at(4, vocab, 0)] = std::numeric_limits<float>::quiet_NaN();
        const device_array<float> bad_p(p);
        const device_array<float> bad_q(q);
        engine::cuda::compare_rows(bad_p.data(), bad_q.data(), rows, vocab, out.data(), nullptr);
        const std::vector<double> bad = out.get();
        CHECK(bad[0] == came[0]);
        CHECK(std::isnan(bad[3]));
        CHECK(std::isnan(bad[4]));
    }
}
