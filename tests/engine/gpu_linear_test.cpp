// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What layers of hybrid models have beside a llama's, on a CUDA device against plain loops in double: the
// gated delta rule, what is done to rows around it, and norms and gates of attention and FFN.

#include "support/cuda.cuh"

#include "engine/cuda/gated_delta.hpp"
#include "engine/cuda/linear_rows.hpp"
#include "engine/cuda/row_kernels.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <random>

using engine::cuda::gated_delta_call;
using uniprefill::bfloat16;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

constexpr int dim = gated_delta_call::head_dim;
constexpr int chunk = gated_delta_call::chunk;

double number(bfloat16 value) {
    return static_cast<double>(uniprefill::to_float(value));
}

std::size_t at(std::int64_t row, std::int64_t columns, std::int64_t column) {
    return static_cast<std::size_t>(row * columns + column);
}

/// Rows of several requests, with numbers as layers have them.
struct problem {
    std::vector<std::int32_t> cu_seqlens;
    int k_heads;
    int v_heads;
    int rows; ///< in the arrays; some more than there are
    std::vector<bfloat16> q, k, v;
    std::vector<float> log_decay, beta, state;

    problem(const std::vector<int>& lengths, int key_heads, int value_heads, double strongest_decay,
            std::uint64_t seed)
        : cu_seqlens{0}
        , k_heads(key_heads)
        , v_heads(value_heads) {
        for (const int length : lengths) {
            cu_seqlens.push_back(cu_seqlens.back() + length);
        }
        rows = cu_seqlens.back() + 3;
        std::mt19937_64 random(seed);
        std::normal_distribution<double> normal;
        std::uniform_real_distribution<double> uniform(0, 1);
        q = vectors(rows * k_heads, true, random);
        k = vectors(rows * k_heads, true, random);
        v = vectors(rows * v_heads, false, random);
        for (int i = 0; i < rows * v_heads; ++i) {
            log_decay.push_back(static_cast<float>(-strongest_decay * uniform(random)));
            beta.push_back(static_cast<float>(uniform(random)));
        }
        const std::size_t states = at(static_cast<std::int64_t>(lengths.size()) * v_heads, dim * dim, 0);
        for (std::size_t i = 0; i < states; ++i) {
            state.push_back(static_cast<float>(0.1 * normal(random)));
        }
    }

  private:
    static std::vector<bfloat16> vectors(int count, bool unit, std::mt19937_64& random) {
        std::normal_distribution<double> normal;
        std::vector<bfloat16> all;
        for (int i = 0; i < count; ++i) {
            double one[dim];
            double squares = 0;
            for (double& value : one) {
                value = normal(random);
                squares += value * value;
            }
            for (const double value : one) {
                // A little shorter than 1, so that rounding doesn't make it longer.
                all.push_back(uniprefill::from_float<bfloat16>(
                    static_cast<float>(unit ? 0.99 * value / std::sqrt(squares) : value)));
            }
        }
        return all;
    }
};

struct answer {
    std::vector<double> out;   // [rows, v_heads, 128]
    std::vector<double> state; // [requests, v_heads, 128 of v, 128 of k]
};

/// The rule, row by row.
answer recurrence(const problem& of, bool from_zero) {
    answer made;
    made.out.resize(at(of.rows, of.v_heads * dim, 0));
    made.state.resize(of.state.size());
    const double scale = static_cast<double>(gated_delta_call{}.scale);
    const int requests = static_cast<int>(of.cu_seqlens.size()) - 1;
    for (int request = 0; request < requests; ++request) {
        for (int head = 0; head < of.v_heads; ++head) {
            const std::size_t first = at(request * of.v_heads + head, dim * dim, 0);
            double* const s = made.state.data() + first;
            for (int i = 0; i < dim * dim; ++i) {
                s[i] = from_zero ? 0 : static_cast<double>(of.state[first + static_cast<std::size_t>(i)]);
            }
            const int k_head = head / (of.v_heads / of.k_heads);
            const auto request_at = static_cast<std::size_t>(request);
            for (int row = of.cu_seqlens[request_at]; row < of.cu_seqlens[request_at + 1]; ++row) {
                const bfloat16* const q = of.q.data() + at(row, of.k_heads * dim, k_head * dim);
                const bfloat16* const k = of.k.data() + at(row, of.k_heads * dim, k_head * dim);
                const bfloat16* const v = of.v.data() + at(row, of.v_heads * dim, head * dim);
                const double decay = std::exp(static_cast<double>(of.log_decay[at(row, of.v_heads, head)]));
                const double beta = static_cast<double>(of.beta[at(row, of.v_heads, head)]);
                for (int i = 0; i < dim; ++i) {
                    double* const state_row = s + i * dim;
                    double known = 0;
                    for (int j = 0; j < dim; ++j) {
                        state_row[j] *= decay;
                        known += state_row[j] * number(k[j]);
                    }
                    const double news = beta * (number(v[i]) - known);
                    double sum = 0;
                    for (int j = 0; j < dim; ++j) {
                        state_row[j] += news * number(k[j]);
                        sum += state_row[j] * number(q[j]);
                    }
                    made.out[at(row, of.v_heads * dim, head * dim + i)] = scale * sum;
                }
            }
        }
    }
    return made;
}

// Rounding to bf16 changes a number by at most this part of it. What is done in fp32 (sums of at most 128
// products, exponentials) is off by less than the other part of the sum of absolute values.
constexpr double coarse = 1.0 / 256;
constexpr double fine = 3e-5;

/// A matrix, and by how much each element that a device computes may differ from it.
struct bounded {
    int rows = 0, columns = 0;
    std::vector<double> exact, off;
    bounded(int r, int c)
        : rows(r)
        , columns(c)
        , exact(at(r, c, 0))
        , off(at(r, c, 0)) {}
    double& operator()(int r, int c) { return exact[at(r, columns, c)]; }
    double& error(int r, int c) { return off[at(r, columns, c)]; }
    void round() {
        for (std::size_t i = 0; i < exact.size(); ++i) {
            off[i] += coarse * (std::abs(exact[i]) + off[i]);
        }
    }
    template <class Factor> // of row and column, exact but for `fine`
    bounded scaled(const Factor& factor) const {
        bounded made = *this;
        for (int r = 0; r < rows; ++r) {
            for (int c = 0; c < columns; ++c) {
                const double f = factor(r, c);
                const std::size_t i = at(r, columns, c);
                made.off[i] = std::abs(f) * (off[i] + fine * (std::abs(exact[i]) + off[i]));
                made.exact[i] *= f;
            }
        }
        return made;
    }
};

/// sum += sign * a b, or a b^T.
void add_product(bounded& sum, double sign, const bounded& a, const bounded& b, bool b_transposed) {
    const int inner = a.columns;
    for (int r = 0; r < sum.rows; ++r) {
        for (int c = 0; c < sum.columns; ++c) {
            double exact = 0;
            double off = 0;
            double size = 0;
            for (int i = 0; i < inner; ++i) {
                const std::size_t x = at(r, a.columns, i);
                const std::size_t y = b_transposed ? at(c, b.columns, i) : at(i, b.columns, c);
                const double big_a = std::abs(a.exact[x]) + a.off[x];
                const double big_b = std::abs(b.exact[y]) + b.off[y];
                exact += a.exact[x] * b.exact[y];
                off += a.off[x] * std::abs(b.exact[y]) + big_a * b.off[y];
                size += big_a * big_b;
            }
            sum(r, c) += sign * exact;
            sum.error(r, c) += off + fine * (size + std::abs(sum(r, c)));
        }
    }
}

/// By how much a device's numbers may differ from recurrence()'s: the algorithm's steps on exact numbers,
/// each step's error by first-order analysis of its roundings, all at their worst.
answer bound(const problem& of, bool from_zero) {
    answer made;
    made.out.resize(at(of.rows, of.v_heads * dim, 0));
    made.state.resize(of.state.size());
    const double scale = static_cast<double>(gated_delta_call{}.scale);
    const int requests = static_cast<int>(of.cu_seqlens.size()) - 1;
    for (int request = 0; request < requests; ++request) {
        for (int head = 0; head < of.v_heads; ++head) {
            const std::size_t state_at = at(request * of.v_heads + head, dim * dim, 0);
            bounded s(dim, dim); // [v, k]
            for (std::size_t i = 0; i < s.exact.size(); ++i) {
                s.exact[i] = from_zero ? 0 : static_cast<double>(of.state[state_at + i]);
            }
            const int k_head = head / (of.v_heads / of.k_heads);
            const auto request_at = static_cast<std::size_t>(request);
            const int end = of.cu_seqlens[request_at + 1];
            for (int first = of.cu_seqlens[request_at]; first < end; first += chunk) {
                const int n = std::min(chunk, end - first);
                bounded q(n, dim), k(n, dim), v(n, dim);
                std::vector<double> sums, betas;
                for (int r = 0; r < n; ++r) {
                    const std::size_t cell = at(first + r, of.v_heads, head);
                    sums.push_back((r == 0 ? 0 : sums.back()) + static_cast<double>(of.log_decay[cell]));
                    betas.push_back(static_cast<double>(of.beta[cell]));
                    for (int c = 0; c < dim; ++c) {
                        q(r, c) = number(of.q[at(first + r, of.k_heads * dim, k_head * dim + c)]);
                        k(r, c) = number(of.k[at(first + r, of.k_heads * dim, k_head * dim + c)]);
                        v(r, c) = number(of.v[at(first + r, of.v_heads * dim, head * dim + c)]);
                    }
                }
                const auto decay = [&](int r, int c) {
                    return std::exp(sums[static_cast<std::size_t>(r)] - sums[static_cast<std::size_t>(c)]);
                };
                const auto beta = [&](int r) { return betas[static_cast<std::size_t>(r)]; };
                const auto grown = [&](int r) { return std::exp(sums[static_cast<std::size_t>(r)]); };
                bounded a(n, n), p(n, n);
                add_product(a, 1, k, k, true);
                add_product(p, 1, q, k, true);
                a = a.scaled([&](int r, int c) { return c < r ? beta(r) * decay(r, c) : 0; });
                p = p.scaled([&](int r, int c) { return c <= r ? scale * decay(r, c) : 0; });
                p.round();
                const auto solved = [&](const bounded& right) {
                    bounded x(n, dim);
                    for (int block = 0; block < n; block += 16) {
                        const int m = std::min(16, n - block);
                        bounded y(m, dim), inverse(m, m);
                        for (int r = 0; r < m; ++r) {
                            for (int c = 0; c < dim; ++c) {
                                y(r, c) = right.exact[at(block + r, dim, c)];
                                y.error(r, c) = right.off[at(block + r, dim, c)];
                            }
                        }
                        if (block > 0) {
                            bounded below(m, block), before(block, dim);
                            for (int r = 0; r < m; ++r) {
                                for (int c = 0; c < block; ++c) {
                                    below(r, c) = a(block + r, c);
                                    below.error(r, c) = a.error(block + r, c);
                                }
                            }
                            std::copy_n(x.exact.begin(), before.exact.size(), before.exact.begin());
                            std::copy_n(x.off.begin(), before.off.size(), before.off.begin());
                            below.round();
                            add_product(y, -1, below, before, false);
                        }
                        y.round();
                        for (int c = 0; c < m; ++c) {
                            for (int r = c; r < m; ++r) {
                                double exact = r == c ? 1 : 0;
                                double off = 0;
                                for (int i = c; i < r; ++i) {
                                    const double size = std::abs(inverse(i, c)) + inverse.error(i, c);
                                    const double entry = std::abs(a(block + r, block + i));
                                    exact -= a(block + r, block + i) * inverse(i, c);
                                    off += a.error(block + r, block + i) * size +
                                           entry * inverse.error(i, c) + fine * entry * size;
                                }
                                inverse(r, c) = exact;
                                inverse.error(r, c) = off;
                            }
                        }
                        inverse.round();
                        bounded part(m, dim);
                        add_product(part, 1, inverse, y, false);
                        part.round();
                        std::copy(part.exact.begin(), part.exact.end(),
                                  x.exact.begin() + std::ptrdiff_t{block} * dim);
                        std::copy(part.off.begin(), part.off.end(),
                                  x.off.begin() + std::ptrdiff_t{block} * dim);
                    }
                    return x;
                };
                const bounded w = solved(k.scaled([&](int r, int) { return beta(r) * grown(r); }));
                bounded news = solved(v.scaled([&](int r, int) { return beta(r); })); // V'
                bounded rounded = s;
                rounded.round();
                add_product(news, -1, w, rounded, true);
                bounded out(n, dim);
                add_product(out, 1, q, rounded, true);
                out = out.scaled([&](int r, int) { return scale * grown(r); });
                bounded seen = news;
                seen.round();
                add_product(out, 1, p, seen, false);
                out.round();
                for (int r = 0; r < n; ++r) {
                    std::copy_n(out.off.begin() + std::ptrdiff_t{r} * dim, dim,
                                made.out.begin() +
                                    static_cast<std::ptrdiff_t>(at(first + r, of.v_heads * dim, head * dim)));
                }
                bounded later = news.scaled([&](int r, int) { return decay(n - 1, r); });
                later.round();
                bounded turned(dim, n);
                for (int r = 0; r < n; ++r) {
                    for (int c = 0; c < dim; ++c) {
                        turned(c, r) = later(r, c);
                        turned.error(c, r) = later.error(r, c);
                    }
                }
                s = s.scaled([&](int, int) { return grown(n - 1); });
                add_product(s, 1, turned, k, false);
            }
            std::copy(s.off.begin(), s.off.end(), made.state.begin() + static_cast<std::ptrdiff_t>(state_at));
        }
    }
    return made;
}

struct run_options {
    bool from_zero = true;
    int state_columns = 32;
    std::size_t memory = std::size_t{1} << 30;
};

struct device_answer {
    std::vector<bfloat16> out;
    std::vector<float> state;
};

device_answer run(const problem& of, const run_options& how) {
    const device_array<bfloat16> q(of.q), k(of.k), v(of.v), out(of.v.size());
    const device_array<float> log_decay(of.log_decay), beta(of.beta), state(of.state);
    const device_array<std::int32_t> cu_seqlens(of.cu_seqlens);
    gated_delta_call call;
    call.q = q.data();
    call.k = k.data();
    call.v = v.data();
    call.q_stride = call.k_stride = of.k_heads * dim;
    call.v_stride = call.out_stride = of.v_heads * dim;
    call.log_decay = log_decay.data();
    call.beta = beta.data();
    call.k_heads = of.k_heads;
    call.v_heads = of.v_heads;
    call.cu_seqlens = cu_seqlens.data();
    call.requests = static_cast<std::int32_t>(of.cu_seqlens.size()) - 1;
    call.rows = of.rows;
    call.state = state.data();
    call.from_zero = how.from_zero;
    call.out = out.data();
    call.state_columns = how.state_columns;
    const std::size_t bytes =
        engine::cuda::gated_delta_bytes(call.rows, call.requests, call.v_heads, how.memory);
    const device_array<std::uint8_t> memory(bytes);
    engine::cuda::gated_delta(call, memory.data(), bytes, nullptr);
    return {out.get(), state.get()};
}

bool same(const device_answer& a, const device_answer& b) {
    return std::equal(a.out.begin(), a.out.end(), b.out.begin(),
                      [](bfloat16 x, bfloat16 y) { return x.bits == y.bits; }) &&
           a.state == b.state;
}

double length(const std::vector<double>& numbers) {
    double squares = 0;
    for (const double value : numbers) {
        squares += value * value;
    }
    return std::sqrt(squares);
}

/// How far a device's numbers lie from the exact ones, as a part of their length. Checks each against its
/// bound.
double judge(const problem& of, const device_answer& came, bool from_zero) {
    const answer wanted = recurrence(of, from_zero);
    const answer most = bound(of, from_zero);
    const auto alive = static_cast<std::size_t>(of.cu_seqlens.back() * of.v_heads * dim);
    std::size_t beyond = 0;
    std::vector<double> off;
    for (std::size_t i = 0; i < alive; ++i) {
        off.push_back(number(came.out[i]) - wanted.out[i]);
        beyond += std::abs(off.back()) <= most.out[i] + 1e-12 ? 0 : 1; // a NaN is beyond
    }
    for (std::size_t i = 0; i < came.state.size(); ++i) {
        const double difference = static_cast<double>(came.state[i]) - wanted.state[i];
        beyond += std::abs(difference) <= most.state[i] + 1e-12 ? 0 : 1;
    }
    CHECK(beyond == 0);
    bool untouched = true;
    for (std::size_t i = alive; uniprefill_test::fills_arrays() && i < came.out.size(); ++i) {
        untouched = untouched && came.out[i].bits == 0xa5a5;
    }
    CHECK(untouched);
    return alive == 0 ? 0 : length(off) / length(wanted.out);
}

} // namespace

TEST_CASE("linear layers: the gated delta rule stays inside derived bounds") {
    if (!has_device()) return;
    struct shape {
        std::vector<int> lengths;
        int k_heads, v_heads;
    };
    for (const shape& of : {shape{{1}, 1, 1}, shape{{16}, 1, 1}, shape{{64}, 1, 2}, shape{{65, 0, 63}, 2, 2},
                            shape{{0, 130, 17, 300}, 1, 3}, shape{{257}, 2, 4}}) {
        for (const double decay : {0.02, 1.0, 30.0}) {
            for (const bool from_zero : {true, false}) {
                const problem rows(of.lengths, of.k_heads, of.v_heads, decay, uniprefill_test::seed());
                run_options how;
                how.from_zero = from_zero;
                how.state_columns = from_zero ? 32 : 64;
                const double part = judge(rows, run(rows, how), from_zero);
                CAPTURE(part);
                CHECK(part < 0.01);
            }
        }
    }
}

TEST_CASE("linear layers: the bounds would show a wrong sum") {
    const problem rows({200}, 1, 1, 1.0, 3);
    const answer wanted = recurrence(rows, false);
    const answer most = bound(rows, false);
    CHECK(length(most.out) < 0.2 * length(wanted.out));
    CHECK(length(most.state) < 0.2 * length(wanted.state));
}

TEST_CASE("linear layers: keys that are all alike") {
    if (!has_device()) return;
    problem rows({150}, 1, 1, 0.0, uniprefill_test::seed());
    for (std::size_t i = 0; i < rows.k.size(); ++i) {
        rows.k[i] = rows.k[i % dim];
    }
    std::fill(rows.beta.begin(), rows.beta.end(), 1.0f);
    const double part = judge(rows, run(rows, {}), true);
    CAPTURE(part);
    CHECK(part < 0.05);
}

TEST_CASE("linear layers: bits don't depend on packing, working memory or columns of a thread block") {
    if (!has_device()) return;
    const problem rows({70, 200, 129}, 2, 4, 0.2, uniprefill_test::seed());
    run_options how;
    how.from_zero = false;
    const device_answer one = run(rows, how);
    how.state_columns = 64;
    CHECK(same(run(rows, how), one));
    for (const std::size_t chunks : {1, 2, 3}) {
        how.memory = chunks * engine::cuda::gated_delta_bytes(1, 0, rows.v_heads, 1);
        CHECK(same(run(rows, how), one));
    }
    problem second = rows; // the second request alone
    const auto part = [&](std::vector<bfloat16>& all, int columns) {
        all.erase(all.begin(), all.begin() + std::ptrdiff_t{70} * columns);
    };
    part(second.q, 2 * dim);
    part(second.k, 2 * dim);
    part(second.v, 4 * dim);
    second.log_decay.erase(second.log_decay.begin(), second.log_decay.begin() + 70 * 4);
    second.beta.erase(second.beta.begin(), second.beta.begin() + 70 * 4);
    second.state.assign(rows.state.begin() + 4 * dim * dim, rows.state.begin() + 8 * dim * dim);
    second.cu_seqlens = {0, 200};
    second.rows -= 70;
    const device_answer alone = run(second, how);
    bool equal = true;
    for (std::size_t i = 0; i < at(200, 4 * dim, 0); ++i) {
        equal = equal && alone.out[i].bits == one.out[at(70, 4 * dim, 0) + i].bits;
    }
    CHECK(equal);
    CHECK(std::equal(alone.state.begin(), alone.state.end(), one.state.begin() + 4 * dim * dim));
}

TEST_CASE("linear layers: a request in two pieces, the state handed on") {
    if (!has_device()) return;
    problem whole({192}, 1, 2, 0.5, uniprefill_test::seed());
    const device_answer wanted = run(whole, {});
    problem piece = whole;
    piece.cu_seqlens = {0, 128};
    const device_answer first = run(piece, {});
    piece.cu_seqlens = {0, 64};
    piece.q.erase(piece.q.begin(), piece.q.begin() + 128 * dim);
    piece.k.erase(piece.k.begin(), piece.k.begin() + 128 * dim);
    piece.v.erase(piece.v.begin(), piece.v.begin() + 128 * 2 * dim);
    piece.log_decay.erase(piece.log_decay.begin(), piece.log_decay.begin() + 128 * 2);
    piece.beta.erase(piece.beta.begin(), piece.beta.begin() + 128 * 2);
    piece.rows -= 128;
    piece.state = first.state;
    run_options how;
    how.from_zero = false;
    CHECK(run(piece, how).state == wanted.state);
}

TEST_CASE("linear layers: what the gated delta rule doesn't do is refused") {
    if (!has_device()) return;
    problem rows({5}, 2, 3, 0.5, 1);
    CHECK_THROWS_AS(run(rows, {}), engine::error);
    rows.k_heads = 1;
    run_options how;
    how.state_columns = 16;
    CHECK_THROWS_AS(run(rows, how), engine::error);
}

TEST_CASE("linear layers: convolution over the rows that there are, heads of length 1") {
    if (!has_device()) return;
    std::mt19937_64 random(uniprefill_test::seed());
    std::normal_distribution<float> normal;
    for (const int channels : {256, 384, 4096 + 128}) {
        const std::vector<std::int32_t> cu_seqlens{0, 2, 2, 33, 35, 200};
        const int rows = 211; // 11 more than there are
        const int stride = channels + 64;
        const int unit = 256;
        std::vector<bfloat16> in;
        for (int i = 0; i < rows * stride; ++i) {
            in.push_back(uniprefill::from_float<bfloat16>(normal(random)));
        }
        std::vector<float> weights;
        for (int i = 0; i < 4 * channels; ++i) {
            weights.push_back(normal(random));
        }
        const device_array<bfloat16> device_in(in), out(at(rows, channels, 0));
        const device_array<float> device_weights(weights);
        const device_array<std::int32_t> device_cu(cu_seqlens);
        engine::cuda::short_convolution_call call;
        call.in = device_in.data();
        call.in_stride = stride;
        call.weights = device_weights.data();
        call.channels = channels;
        call.unit_channels = unit;
        call.cu_seqlens = device_cu.data();
        call.requests = 5;
        call.rows = rows;
        call.out = out.data();
        engine::cuda::short_convolution(call, nullptr);
        const auto came = out.get();
        bool good = true;
        for (int row = 0; row < 200; ++row) {
            const int begin = *(std::upper_bound(cu_seqlens.begin(), cu_seqlens.end(), row) - 1);
            std::vector<double> wanted;
            for (int c = 0; c < channels; ++c) {
                double sum = 0;
                for (int tap = 0; tap < 4; ++tap) {
                    const int from = row - 3 + tap;
                    if (from >= begin) {
                        sum += number(in[at(from, stride, c)]) *
                               static_cast<double>(weights[at(tap, channels, c)]);
                    }
                }
                wanted.push_back(sum / (1 + std::exp(-sum)));
            }
            for (int head = 0; head < unit / dim; ++head) {
                double squares = 1e-6;
                for (int i = 0; i < dim; ++i) {
                    squares += std::pow(wanted[static_cast<std::size_t>(head * dim + i)], 2);
                }
                for (int i = 0; i < dim; ++i) {
                    wanted[static_cast<std::size_t>(head * dim + i)] /= std::sqrt(squares);
                }
            }
            for (int c = 0; c < channels; ++c) {
                const double expected = wanted[static_cast<std::size_t>(c)];
                good = good && std::abs(number(came[at(row, channels, c)]) - expected) <=
                                   std::abs(expected) / 250 + 1e-5;
            }
        }
        CHECK(good);
        bool untouched = true;
        for (std::size_t i = at(200, channels, 0); uniprefill_test::fills_arrays() && i < came.size(); ++i) {
            untouched = untouched && came[i].bits == 0xa5a5;
        }
        CHECK(untouched);
    }
}

TEST_CASE("linear layers: gates, and the norm behind the rule") {
    if (!has_device()) return;
    std::mt19937_64 random(uniprefill_test::seed());
    std::normal_distribution<float> normal;
    const int rows = 23;
    for (const int heads : {1, 3, 32}) {
        const int stride = 2 * heads + 8 * heads * dim;
        std::vector<bfloat16> in;
        for (int i = 0; i < rows * stride; ++i) {
            in.push_back(uniprefill::from_float<bfloat16>(4 * normal(random)));
        }
        std::vector<float> rate, bias, weight;
        for (int i = 0; i < heads; ++i) {
            rate.push_back(std::abs(normal(random)));
            bias.push_back(normal(random));
        }
        for (int i = 0; i < dim; ++i) {
            weight.push_back(1 + 0.1f * normal(random));
        }
        const device_array<bfloat16> device_in(in);
        const device_array<float> device_rate(rate), device_bias(bias), device_weight(weight);
        const device_array<float> beta(at(rows, heads, 0)), log_decay(at(rows, heads, 0));
        engine::cuda::delta_gates(device_in.data(), stride, device_rate.data(), device_bias.data(), rows,
                                  heads, beta.data(), log_decay.data(), nullptr);
        const auto came_beta = beta.get();
        const auto came_decay = log_decay.get();
        bool good = true;
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                const auto h = static_cast<std::size_t>(head);
                const double b = number(in[at(row, stride, head)]);
                const double a = number(in[at(row, stride, heads + head)]) + static_cast<double>(bias[h]);
                const double wanted = -static_cast<double>(rate[h]) * std::log1p(std::exp(a));
                good = good && std::abs(static_cast<double>(came_beta[at(row, heads, head)]) -
                                        1 / (1 + std::exp(-b))) < 1e-5;
                good = good && std::abs(static_cast<double>(came_decay[at(row, heads, head)]) - wanted) <=
                                   1e-5 * (1 + std::abs(wanted));
            }
        }
        CHECK(good);

        std::vector<bfloat16> x;
        for (int i = 0; i < rows * heads * dim; ++i) {
            x.push_back(uniprefill::from_float<bfloat16>(normal(random)));
        }
        const device_array<bfloat16> device_x(x);
        // Gates begin where rows of the arrays are aligned.
        const std::vector<bfloat16> gates(
            in.begin(), in.begin() + static_cast<std::ptrdiff_t>(at(rows, 2 * heads * dim, 0)));
        const device_array<bfloat16> device_gates(gates);
        engine::cuda::gated_norm(device_x.data(), device_gates.data(), 2 * heads * dim, device_weight.data(),
                                 1e-6f, rows, heads, nullptr);
        const auto came = device_x.get();
        good = true;
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                double squares = 0;
                for (int i = 0; i < dim; ++i) {
                    squares += std::pow(number(x[at(row, heads * dim, head * dim + i)]), 2);
                }
                for (int i = 0; i < dim; ++i) {
                    const std::size_t cell = at(row, heads * dim, head * dim + i);
                    const double gate = number(gates[at(row, 2 * heads * dim, head * dim + i)]);
                    const double wanted = number(x[cell]) / std::sqrt(squares / dim + 1e-6) *
                                          static_cast<double>(weight[static_cast<std::size_t>(i)]) * gate /
                                          (1 + std::exp(-gate));
                    good = good && std::abs(number(came[cell]) - wanted) <= std::abs(wanted) / 250 + 1e-5;
                }
            }
        }
        CHECK(good);
    }
}

TEST_CASE("hybrid layers: heads are normalised before they are rotated") {
    if (!has_device()) return;
    std::mt19937_64 random(uniprefill_test::seed());
    std::normal_distribution<float> normal;
    struct shape {
        int heads, kv_heads, head_dim, rope_dims;
    };
    for (const shape of : {shape{3, 1, 64, 64}, shape{4, 2, 128, 64}, shape{16, 2, 256, 64}}) {
        const int rows = 9;
        const int q = of.heads * of.head_dim;
        const int kv = of.kv_heads * of.head_dim;
        const int elements = q + 2 * kv;
        std::vector<bfloat16> before;
        for (int i = 0; i < rows * elements; ++i) {
            before.push_back(uniprefill::from_float<bfloat16>(3 * normal(random)));
        }
        std::vector<float> q_norm, k_norm;
        for (int i = 0; i < of.head_dim; ++i) {
            q_norm.push_back(1 + 0.2f * normal(random));
            k_norm.push_back(1 + 0.2f * normal(random));
        }
        const device_array<bfloat16> qkv(before), k_cache(at(rows, kv, 0)), v_cache(at(rows, kv, 0));
        const device_array<float> device_q(q_norm), device_k(k_norm);
        const device_array<float2> table(at(64, of.rope_dims / 2, 0));
        const device_array<std::int32_t> counts(std::vector<std::int32_t>{0, rows, -1});
        const device_array<std::int32_t> positions(std::vector<std::int32_t>{0, 1, 2, 5, 8, 13, 21, 34, 55});
        const auto where = positions.get();
        engine::cuda::make_rope_table(64, of.rope_dims, 10000, table.data(), nullptr);
        engine::cuda::rope_call call;
        call.qkv = qkv.data();
        call.rows = rows;
        call.q_elements = q;
        call.kv_elements = kv;
        call.head_dim = of.head_dim;
        call.rope_dims = of.rope_dims;
        call.positions = positions.data();
        call.table = table.data();
        call.table_positions = 64;
        call.q_norm = device_q.data();
        call.k_norm = device_k.data();
        call.norm_epsilon = 1e-6f;
        call.k_cache = k_cache.data();
        call.v_cache = v_cache.data();
        call.capacity = rows;
        call.cached_len = counts.data();
        call.alive = counts.data() + 1;
        call.entered = counts.data() + 2;
        engine::cuda::rope_and_store(call, nullptr);
        const auto after = qkv.get();
        const auto k = k_cache.get();
        const auto v = v_cache.get();
        bool good = true;
        for (int row = 0; row < rows; ++row) {
            for (int head = 0; head < of.heads + of.kv_heads; ++head) {
                const auto& weight = head < of.heads ? q_norm : k_norm;
                std::vector<double> x;
                double squares = 0;
                for (int i = 0; i < of.head_dim; ++i) {
                    x.push_back(number(before[at(row, elements, head * of.head_dim + i)]));
                    squares += x.back() * x.back();
                }
                for (int i = 0; i < of.head_dim; ++i) {
                    x[static_cast<std::size_t>(i)] *=
                        static_cast<double>(weight[static_cast<std::size_t>(i)]) /
                        std::sqrt(squares / of.head_dim + 1e-6);
                }
                for (int i = 0; i < of.head_dim; ++i) {
                    const double pair[2] = {x[static_cast<std::size_t>(i - i % 2)],
                                            x[static_cast<std::size_t>(i - i % 2 + 1)]};
                    const double angle = where[static_cast<std::size_t>(row)] *
                                         std::pow(10000.0, -2.0 * (i / 2) / of.rope_dims);
                    const double wanted = i >= of.rope_dims ? x[static_cast<std::size_t>(i)]
                                          : i % 2 == 0
                                              ? pair[0] * std::cos(angle) - pair[1] * std::sin(angle)
                                              : pair[0] * std::sin(angle) + pair[1] * std::cos(angle);
                    const int column = head * of.head_dim + i;
                    const double came = number(head < of.heads ? after[at(row, elements, column)]
                                                               : k[at(row, kv, column - q)]);
                    // Rounded before the rotation, too.
                    const double size = std::abs(pair[0]) + std::abs(pair[1]);
                    good = good && std::abs(came - wanted) <= (std::abs(wanted) + size) / 250 + 1e-4;
                }
            }
            for (int i = 0; i < kv; ++i) {
                good = good && v[at(row, kv, i)].bits == before[at(row, elements, q + kv + i)].bits;
            }
        }
        CHECK(good);
    }
}

TEST_CASE("hybrid layers: GEGLU, gates of attention, norms behind products") {
    if (!has_device()) return;
    std::mt19937_64 random(uniprefill_test::seed());
    std::normal_distribution<float> normal;
    for (const int columns : {64, 576, 3840}) {
        const int rows = 7;
        std::vector<bfloat16> gate_up;
        std::vector<float> weight, sum;
        for (int i = 0; i < rows * 2 * columns; ++i) {
            gate_up.push_back(uniprefill::from_float<bfloat16>(3 * normal(random)));
        }
        for (int i = 0; i < rows * columns; ++i) {
            sum.push_back(normal(random));
        }
        for (int i = 0; i < columns; ++i) {
            weight.push_back(1 + 0.2f * normal(random));
        }
        const device_array<bfloat16> device_gates(gate_up), out(at(rows, columns, 0));
        engine::cuda::geglu(device_gates.data(), rows, columns, out.data(), nullptr);
        const auto activated = out.get();
        bool good = true;
        for (int row = 0; row < rows; ++row) {
            for (int i = 0; i < columns; ++i) {
                const double x = number(gate_up[at(row, 2 * columns, i)]);
                const double wanted = 0.5 * x * (1 + std::tanh(0.7978845608 * (x + 0.044715 * x * x * x))) *
                                      number(gate_up[at(row, 2 * columns, columns + i)]);
                good = good && std::abs(number(activated[at(row, columns, i)]) - wanted) <=
                                   std::abs(wanted) / 250 + 1e-5;
            }
        }
        CHECK(good);

        const device_array<float> device_sum(sum), device_weight(weight);
        engine::cuda::add_norm(out.data(), device_weight.data(), 1e-6f, rows, columns, device_sum.data(),
                               nullptr);
        const auto added = device_sum.get();
        good = true;
        for (int row = 0; row < rows; ++row) {
            double squares = 0;
            for (int i = 0; i < columns; ++i) {
                squares += std::pow(number(activated[at(row, columns, i)]), 2);
            }
            for (int i = 0; i < columns; ++i) {
                const std::size_t cell = at(row, columns, i);
                const double wanted = static_cast<double>(sum[cell]) +
                                      number(activated[cell]) / std::sqrt(squares / columns + 1e-6) *
                                          static_cast<double>(weight[static_cast<std::size_t>(i)]);
                good = good &&
                       std::abs(static_cast<double>(added[cell]) - wanted) <= 1e-5 * (1 + std::abs(wanted));
            }
        }
        CHECK(good);
    }
    std::vector<bfloat16> x, gates;
    const int columns = 520;
    const int rows = 5;
    for (int i = 0; i < rows * columns; ++i) {
        x.push_back(uniprefill::from_float<bfloat16>(normal(random)));
        gates.push_back(uniprefill::from_float<bfloat16>(3 * normal(random)));
    }
    const device_array<bfloat16> device_x(x), device_gates(gates);
    engine::cuda::multiply_by_sigmoid(device_x.data(), device_gates.data(), rows, columns, nullptr);
    const auto came = device_x.get();
    bool good = true;
    for (std::size_t i = 0; i < x.size(); ++i) {
        const double wanted = number(x[i]) / (1 + std::exp(-number(gates[i])));
        good = good && std::abs(number(came[i]) - wanted) <= std::abs(wanted) / 250 + 1e-6;
    }
    CHECK(good);
}
