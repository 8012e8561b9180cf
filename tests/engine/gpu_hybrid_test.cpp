// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Hybrid models on a CUDA device: the whole forward pass against plain loops in double, and against itself
// run in other ways.

#include "support/cuda.cuh"

#include "engine/cuda/model.hpp"
#include "engine/cuda/session.hpp"

#include <algorithm>
#include <cmath>
#include <random>

using engine::counts_kind;
using engine::layer_kind;
using engine::layer_pattern;
using engine::llama_config;
using engine::cuda::cuda_model;
using uniprefill::bfloat16;
using uniprefill::selection_rule;
using uniprefill_test::has_device;

namespace {

constexpr int linear_dim = engine::cuda::gated_delta_call::head_dim;

std::vector<std::int32_t> random_tokens(int count, int vocab, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < count; ++i) {
        tokens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
    return tokens;
}

llama_config small(std::int32_t layers) {
    return {layers, 128, 256, 4, 2, 128, 1 << 20, 500, 64, 10000.0f, 1e-6f, false};
}

layer_pattern linear_pattern() {
    layer_pattern pattern;
    pattern.period = 2;
    pattern.others = layer_kind::linear;
    pattern.linear_k_heads = 2;
    pattern.linear_v_heads = 4;
    pattern.head_norms = true;
    pattern.output_gate = true;
    return pattern;
}

layer_pattern window_pattern(std::int32_t window) {
    layer_pattern pattern;
    pattern.period = 2;
    pattern.others = layer_kind::window;
    pattern.window = window;
    pattern.window_rope_base = 1000;
    pattern.head_norms = true;
    pattern.post_norms = true;
    pattern.gelu = true;
    return pattern;
}

using vector = std::vector<double>;

double logistic(double x) {
    return 1 / (1 + std::exp(-x));
}

vector multiplied(const engine::cuda::matrix& w, const std::vector<bfloat16>& weights, const vector& x) {
    vector y(static_cast<std::size_t>(w.out));
    for (std::size_t o = 0; o < y.size(); ++o) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            y[o] += static_cast<double>(uniprefill::to_float(weights[o * x.size() + i])) * x[i];
        }
    }
    return y;
}

std::vector<vector> multiplied(const engine::cuda::matrix& w, const std::vector<vector>& rows) {
    const auto weights = w.weights.get();
    std::vector<vector> all;
    for (const vector& row : rows) {
        all.push_back(multiplied(w, weights, row));
    }
    return all;
}

void normalise(double* x, int count, double epsilon) {
    double squares = 0;
    for (int i = 0; i < count; ++i) {
        squares += x[i] * x[i];
    }
    const double scale = 1 / std::sqrt(squares / count + epsilon);
    for (int i = 0; i < count; ++i) {
        x[i] *= scale;
    }
}

/// The forward pass in double, as slow as it is plain. Norms' weights are ones but behind attention and FFN.
class plain_forward {
  public:
    explicit plain_forward(const cuda_model& model)
        : model_(model)
        , config_(model.config())
        , pattern_(model.pattern()) {}

    /// Logits of the last row.
    vector run(const std::vector<std::int32_t>& tokens) {
        const auto table = model_.embedding().weights.get();
        for (const std::int32_t token : tokens) {
            vector row;
            for (int i = 0; i < config_.hidden; ++i) {
                row.push_back(static_cast<double>(
                    uniprefill::to_float(table[static_cast<std::size_t>(token * config_.hidden + i)])));
            }
            hidden_.push_back(row);
        }
        for (std::int32_t layer = 0; layer < config_.layers; ++layer) {
            const auto& weights = model_.layers()[static_cast<std::size_t>(layer)];
            const auto mixed = pattern_.kind(layer) == layer_kind::linear ? linear(layer) : attention(layer);
            add(multiplied(weights.output, mixed), weights.attention_post_norm.get());
            auto ffn = multiplied(weights.gate_up, normed());
            for (vector& row : ffn) {
                const auto columns = static_cast<std::size_t>(config_.ffn);
                for (std::size_t i = 0; i < columns; ++i) {
                    const double x = row[i];
                    const double cubed = 0.7978845608 * (x + 0.044715 * x * x * x);
                    const double gate = pattern_.gelu ? 0.5 * x * (1 + std::tanh(cubed)) : x * logistic(x);
                    row[i] = gate * row[columns + i];
                }
                row.resize(columns);
            }
            add(multiplied(weights.down, ffn), weights.ffn_post_norm.get());
        }
        return multiplied(model_.head(), {normed().back()}).front();
    }

  private:
    std::vector<vector> normed() const {
        std::vector<vector> rows = hidden_;
        for (vector& row : rows) {
            normalise(row.data(), config_.hidden, static_cast<double>(config_.rms_epsilon));
        }
        return rows;
    }
    void add(std::vector<vector> rows, const std::vector<float>& post_norm) {
        for (std::size_t row = 0; row < rows.size(); ++row) {
            if (!post_norm.empty()) {
                normalise(rows[row].data(), config_.hidden, static_cast<double>(config_.rms_epsilon));
            }
            for (std::size_t i = 0; i < rows[row].size(); ++i) {
                hidden_[row][i] += rows[row][i] * (post_norm.empty() ? 1 : static_cast<double>(post_norm[i]));
            }
        }
    }

    std::vector<vector> attention(std::int32_t layer) const {
        const auto& weights = model_.layers()[static_cast<std::size_t>(layer)];
        const bool windowed = pattern_.kind(layer) == layer_kind::window;
        const int d = config_.head_dim;
        const double base = static_cast<double>(windowed ? pattern_.window_rope_base : config_.rope_base);
        const auto x = normed();
        auto qkv = multiplied(weights.qkv, x);
        for (std::size_t row = 0; row < qkv.size(); ++row) {
            for (int head = 0; head < config_.heads + config_.kv_heads; ++head) {
                double* const one = qkv[row].data() + head * d;
                if (pattern_.head_norms) normalise(one, d, static_cast<double>(config_.rms_epsilon));
                for (int i = 0; i < config_.rope_dims; i += 2) {
                    const double angle = static_cast<double>(row) *
                                         std::pow(base, -static_cast<double>(i) / config_.rope_dims);
                    const double a = one[i];
                    const double b = one[i + 1];
                    one[i] = a * std::cos(angle) - b * std::sin(angle);
                    one[i + 1] = a * std::sin(angle) + b * std::cos(angle);
                }
            }
        }
        std::vector<vector> out(qkv.size(), vector(static_cast<std::size_t>(config_.heads * d)));
        for (int row = 0; row < static_cast<int>(qkv.size()); ++row) {
            for (int head = 0; head < config_.heads; ++head) {
                const int kv = head / (config_.heads / config_.kv_heads);
                const double* const q = qkv[static_cast<std::size_t>(row)].data() + head * d;
                double* const to = out[static_cast<std::size_t>(row)].data() + head * d;
                double total = 0;
                for (int key = windowed ? std::max(row - pattern_.window + 1, 0) : 0; key <= row; ++key) {
                    const double* const k =
                        qkv[static_cast<std::size_t>(key)].data() + (config_.heads + kv) * d;
                    double score = 0;
                    for (int i = 0; i < d; ++i) {
                        score += q[i] * k[i];
                    }
                    const double share = std::exp(score / std::sqrt(static_cast<double>(d)));
                    total += share;
                    for (int i = 0; i < d; ++i) {
                        to[i] += share * k[config_.kv_heads * d + i];
                    }
                }
                for (int i = 0; i < d; ++i) {
                    to[i] /= total;
                }
            }
        }
        if (pattern_.output_gate) {
            const auto gates = multiplied(weights.output_gate, x);
            for (std::size_t row = 0; row < out.size(); ++row) {
                for (std::size_t i = 0; i < out[row].size(); ++i) {
                    out[row][i] *= logistic(gates[row][i]);
                }
            }
        }
        return out;
    }

    std::vector<vector> linear(std::int32_t layer) const {
        const auto& weights = model_.layers()[static_cast<std::size_t>(layer)].linear;
        const auto taps = weights.convolution.get();
        const auto rate = weights.rate.get();
        const auto bias = weights.bias.get();
        const auto in = multiplied(weights.in, normed());
        const int k_heads = pattern_.linear_k_heads;
        const int v_heads = pattern_.linear_v_heads;
        const int channels = (2 * k_heads + v_heads) * linear_dim;
        const double scale = 1 / std::sqrt(static_cast<double>(linear_dim));
        std::vector<vector> states(static_cast<std::size_t>(v_heads),
                                   vector(static_cast<std::size_t>(linear_dim * linear_dim)));
        std::vector<vector> out;
        for (int row = 0; row < static_cast<int>(in.size()); ++row) {
            vector mixed;
            for (int channel = 0; channel < channels; ++channel) {
                double sum = 0;
                for (int tap = 0; tap < 4; ++tap) {
                    const int from = row - 3 + tap;
                    if (from < 0) continue;
                    sum += in[static_cast<std::size_t>(from)][static_cast<std::size_t>(channel)] *
                           static_cast<double>(taps[static_cast<std::size_t>(tap * channels + channel)]);
                }
                mixed.push_back(sum * logistic(sum));
            }
            for (int head = 0; head < 2 * k_heads; ++head) {
                normalise(mixed.data() + head * linear_dim, linear_dim, 1e-6 / linear_dim);
                for (int i = 0; i < linear_dim; ++i) {
                    mixed[static_cast<std::size_t>(head * linear_dim + i)] *= scale; // to length 1
                }
            }
            const double* const gates = in[static_cast<std::size_t>(row)].data() + channels;
            const double* const b = gates + v_heads * linear_dim;
            vector made(static_cast<std::size_t>(v_heads * linear_dim));
            for (int head = 0; head < v_heads; ++head) {
                const auto h = static_cast<std::size_t>(head);
                const double a = b[v_heads + head] + static_cast<double>(bias[h]);
                const double decay = std::exp(-static_cast<double>(rate[h]) * std::log1p(std::exp(a)));
                const double* const q = mixed.data() + head / (v_heads / k_heads) * linear_dim;
                const double* const k = q + k_heads * linear_dim;
                const double* const v = mixed.data() + (2 * k_heads + head) * linear_dim;
                double* const o = made.data() + head * linear_dim;
                for (int i = 0; i < linear_dim; ++i) {
                    double* const s = states[h].data() + i * linear_dim;
                    double known = 0;
                    for (int j = 0; j < linear_dim; ++j) {
                        s[j] *= decay;
                        known += s[j] * k[j];
                    }
                    for (int j = 0; j < linear_dim; ++j) {
                        s[j] += logistic(b[head]) * (v[i] - known) * k[j];
                        o[i] += scale * s[j] * q[j];
                    }
                }
                normalise(o, linear_dim, static_cast<double>(config_.rms_epsilon));
                for (int i = 0; i < linear_dim; ++i) {
                    const double gate = gates[head * linear_dim + i];
                    o[i] *= gate * logistic(gate);
                }
            }
            out.push_back(made);
        }
        return out;
    }

    const cuda_model& model_;
    const llama_config& config_;
    const layer_pattern& pattern_;
    std::vector<vector> hidden_;
};

/// How far apart, as a part of the length of the second.
template <class Numbers>
double distance(const std::vector<float>& came, const Numbers& wanted) {
    double off = 0;
    double size = 0;
    for (std::size_t i = 0; i < came.size(); ++i) {
        const double expected = static_cast<double>(wanted[i]);
        off += std::pow(static_cast<double>(came[i]) - expected, 2);
        size += expected * expected;
    }
    return std::sqrt(off / size);
}

engine::cuda::session_options plain_options(std::int32_t prompt) {
    engine::cuda::session_options options;
    options.prompt = prompt;
    return options;
}

engine::cuda::session_options dropping(std::int32_t prompt, counts_kind counts) {
    engine::cuda::session_options options = plain_options(prompt);
    options.counts = counts;
    options.selecting = {{3, selection_rule::fixed_budget(prompt * 6 / 10), nullptr},
                         {5, selection_rule::fixed_budget(prompt * 3 / 10), nullptr}};
    return options;
}

} // namespace

TEST_CASE("cuda hybrids: the forward pass is the plain one") {
    if (!has_device()) return;
    for (const layer_pattern& pattern : {layer_pattern{}, linear_pattern(), window_pattern(40)}) {
        const cuda_model model(small(4), 7, pattern);
        for (const int rows : {1, 3, 70, 150}) {
            const auto tokens = random_tokens(rows, model.config().vocab, 8);
            engine::cuda::session session(model, plain_options(rows));
            static_cast<void>(session.prefill(tokens));
            const double off = distance(session.logits(), plain_forward(model).run(tokens));
            CAPTURE(static_cast<int>(pattern.others), rows, off);
            CHECK(off < 0.03);
        }
    }
}

TEST_CASE("cuda hybrids: one graph comes to the bits of its kernels run one by one") {
    if (!has_device()) return;
    const int rows = 700;
    const int first = rows * 6 / 10;
    const int second = rows * 3 / 10;
    for (const layer_pattern& pattern : {linear_pattern(), window_pattern(100)}) {
        const cuda_model model(small(8), 9, pattern);
        engine::cuda::session graphs(model, dropping(rows, counts_kind::budget));
        engine::cuda::session eager(model, dropping(rows, counts_kind::read));
        for (std::uint64_t prompt = 0; prompt < 3; ++prompt) {
            const auto tokens = random_tokens(rows, model.config().vocab, 10 + prompt);
            CHECK(graphs.prefill(tokens).count_reads == 0);
            CHECK(eager.prefill(tokens).count_reads == 2);
            CHECK(graphs.logits() == eager.logits());
            CHECK(graphs.likeliest() >= 0);
            CHECK(graphs.rows_kept() ==
                  std::vector<std::int32_t>{rows, rows, rows, first, first, second, second, second});
            const bool linear = pattern.others == layer_kind::linear;
            CHECK(graphs.lengths() ==
                  (linear ? std::vector<std::int32_t>{0, rows, 0, rows, 0, first, 0, second}
                          : std::vector<std::int32_t>{rows, rows, rows, rows, first, first, second, second}));
        }
        CHECK(graphs.graph_nodes() > 0);
    }
}

TEST_CASE("cuda hybrids: lists of all blocks read what no lists read") {
    if (!has_device()) return;
    const int rows = 700;
    for (const layer_pattern& pattern : {linear_pattern(), window_pattern(100)}) {
        const cuda_model model(small(8), 11, pattern);
        const auto tokens = random_tokens(rows, model.config().vocab, 12);
        auto options = dropping(rows, counts_kind::read);
        engine::cuda::session plain(model, options);
        options.lists.emplace();
        options.lists->rule = selection_rule::fixed_ratio(1.0);
        options.lists->rule.scope = uniprefill::mass_scope::all;
        engine::cuda::session listed(model, options);
        static_cast<void>(plain.prefill(tokens));
        static_cast<void>(listed.prefill(tokens));
        const double off = distance(listed.logits(), plain.logits());
        CAPTURE(off);
        CHECK(off < 0.03);
    }
}

TEST_CASE("cuda hybrids: windows by cuDNN") {
    if (!has_device()) return;
    if (!engine::cuda::dense_attention::built() ||
        engine::cuda::dense_attention::library().find("frontend") == std::string::npos) {
        uniprefill_test::skip("no cuDNN");
        return;
    }
    const int rows = 700;
    const cuda_model model(small(8), 13, window_pattern(100));
    const auto tokens = random_tokens(rows, model.config().vocab, 14);
    for (const bool drops : {false, true}) {
        auto options = drops ? dropping(rows, counts_kind::read) : plain_options(rows);
        engine::cuda::session ours(model, options);
        options.attention = engine::attention_kind::cudnn;
        engine::cuda::session theirs(model, options);
        static_cast<void>(ours.prefill(tokens));
        static_cast<void>(theirs.prefill(tokens));
        const double off = distance(theirs.logits(), ours.logits());
        CAPTURE(drops, off, theirs.windows_by_cudnn());
        CHECK(off < (drops ? 0.2 : 0.03)); // a block near the cut may fall on either side of it
    }
}

TEST_CASE("cuda hybrids: what they don't do is refused by name") {
    if (!has_device()) return;
    const cuda_model model(small(8), 15, linear_pattern());
    auto options = plain_options(10);
    engine::cuda::session session(model, options);
    static_cast<void>(session.prefill(random_tokens(10, 500, 16)));
    CHECK_THROWS_AS(session.feed({1}), engine::error);
    options.selecting = {{2, selection_rule::fixed_budget(5), nullptr}};
    CHECK_THROWS_AS(engine::cuda::session(model, options), engine::error);
    layer_pattern pattern = linear_pattern();
    pattern.linear_v_heads = 2;
    CHECK_THROWS_AS(cuda_model(small(2), 1, pattern), engine::error);
}
