// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/small_model.hpp"

#include "engine/gguf_samples.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace engine_test {

namespace {

using row = std::vector<double>;

bytes bytes_of(const std::vector<float>& values) {
    bytes out(values.size() * sizeof(float));
    std::memcpy(out.data(), values.data(), out.size());
    return out;
}

row product(const std::vector<float>& weights, const row& x, int out) {
    row y(static_cast<std::size_t>(out));
    for (std::size_t o = 0; o < y.size(); ++o) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            y[o] += static_cast<double>(weights[o * x.size() + i]) * x[i];
        }
    }
    return y;
}

row normed(const row& x, const std::vector<float>& weight) {
    double squares = 0;
    for (const double value : x) {
        squares += value * value;
    }
    const double scale =
        1 / std::sqrt(squares / static_cast<double>(x.size()) + double{small_model::epsilon});
    row y(x.size());
    for (std::size_t i = 0; i < x.size(); ++i) {
        y[i] = x[i] * scale * static_cast<double>(weight[i]);
    }
    return y;
}

void rotate(row& x, int position) {
    constexpr int dim = small_model::head_dim;
    for (std::size_t pair = 0; pair < x.size() / 2; ++pair) {
        const double exponent = 2.0 * static_cast<double>(pair % (dim / 2)) / dim;
        const double angle = position * std::pow(double{small_model::rope_base}, -exponent);
        const double a = x[2 * pair];
        const double b = x[2 * pair + 1];
        x[2 * pair] = a * std::cos(angle) - b * std::sin(angle);
        x[2 * pair + 1] = a * std::sin(angle) + b * std::cos(angle);
    }
}

void put(oracle::tensor& into, int at, const row& values) {
    for (int head = 0; head < into.heads; ++head) {
        for (int i = 0; i < into.dim; ++i) {
            into.at(at, head, i) = values[static_cast<std::size_t>(head * into.dim + i)];
        }
    }
}

void add(row& to, const row& what) {
    for (std::size_t i = 0; i < to.size(); ++i) {
        to[i] += what[i];
    }
}

} // namespace

small_model::small_model(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    const auto numbers = [&](int rows, int columns, float scale, float mean = 0) {
        std::vector<float> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
        for (float& value : values) {
            // Multiples of 1/256 in (-1, 1), the same with every standard library.
            const auto step = static_cast<std::int32_t>(random() % 511) - 255;
            value = mean + scale * static_cast<float>(step) / 256.0f;
        }
        return values;
    };
    vocab = static_cast<int>(sample_tokens(true).size());
    embedding = numbers(vocab, hidden, 1.0f);
    output_norm = numbers(1, hidden, 0.3f, 1.0f);
    for (int l = 0; l < layers; ++l) {
        // Large enough queries and keys that attention is neither flat nor one-hot.
        blocks.push_back({numbers(1, hidden, 0.3f, 1.0f), numbers(heads * head_dim, hidden, 0.5f),
                          numbers(kv_heads * head_dim, hidden, 0.5f),
                          numbers(kv_heads * head_dim, hidden, 0.3f), numbers(hidden, heads * head_dim, 0.3f),
                          numbers(1, hidden, 0.3f, 1.0f), numbers(ffn, hidden, 0.3f),
                          numbers(ffn, hidden, 0.3f), numbers(hidden, ffn, 0.3f)});
    }

    gguf_builder made;
    add_llama_sizes(made,
                    {"small", layers, 4096, hidden, ffn, heads, kv_heads, head_dim, rope_base, epsilon});
    add_sample_tokenizer(made, "smollm", true);
    const auto tensor = [&](const std::string& name, const std::vector<float>& values, int columns) {
        const std::uint64_t rows = values.size() / static_cast<std::size_t>(columns);
        std::vector<std::uint64_t> shape{static_cast<std::uint64_t>(columns)};
        if (rows > 1) shape.push_back(rows);
        made.add_tensor(name, 0, shape, bytes_of(values));
    };
    tensor("token_embd.weight", embedding, hidden);
    tensor("output_norm.weight", output_norm, hidden);
    for (int l = 0; l < layers; ++l) {
        const std::string block = "blk." + std::to_string(l) + ".";
        const layer& of = blocks[static_cast<std::size_t>(l)];
        tensor(block + "attn_norm.weight", of.attention_norm, hidden);
        tensor(block + "attn_q.weight", of.q, hidden);
        tensor(block + "attn_k.weight", of.k, hidden);
        tensor(block + "attn_v.weight", of.v, hidden);
        tensor(block + "attn_output.weight", of.output, heads * head_dim);
        tensor(block + "ffn_norm.weight", of.ffn_norm, hidden);
        tensor(block + "ffn_gate.weight", of.gate, hidden);
        tensor(block + "ffn_up.weight", of.up, hidden);
        tensor(block + "ffn_down.weight", of.down, ffn);
    }
    file = made.build();
}

std::vector<std::vector<double>> small_model::logits(const std::vector<std::int32_t>& tokens,
                                                     const std::vector<std::vector<int>>& stored,
                                                     const std::vector<std::vector<int>>& processed,
                                                     int reading_all) const {
    const auto count = static_cast<int>(tokens.size());
    std::vector<row> x;
    std::vector<int> positions;
    for (int t = 0; t < count; ++t) {
        const auto first = embedding.begin() + std::ptrdiff_t{tokens[static_cast<std::size_t>(t)]} * hidden;
        x.emplace_back(first, first + hidden);
        positions.push_back(t);
    }
    for (std::size_t l = 0; l < blocks.size(); ++l) {
        const layer& of = blocks[l];
        oracle::tensor q(count, heads, head_dim);
        oracle::tensor k(count, kv_heads, head_dim);
        oracle::tensor v(count, kv_heads, head_dim);
        for (int t = 0; t < count; ++t) {
            const row y = normed(x[static_cast<std::size_t>(t)], of.attention_norm);
            row query = product(of.q, y, heads * head_dim);
            row key = product(of.k, y, kv_heads * head_dim);
            rotate(query, t);
            rotate(key, t);
            put(q, t, query);
            put(k, t, key);
            put(v, t, product(of.v, y, kv_heads * head_dim));
        }
        oracle::score_parameters score;
        score.scale = 1 / std::sqrt(double{head_dim});
        oracle::mask seen = oracle::stored_causal_mask(positions, positions, stored[l]);
        const oracle::mask causal = oracle::stored_causal_mask(positions, positions, positions);
        std::copy_n(causal.begin(), reading_all, seen.begin());
        const oracle::tensor attended = oracle::masked_attention(q, k, v, score, seen);
        for (const int t : processed[l]) {
            row heads_of_row;
            for (int head = 0; head < heads; ++head) {
                for (int i = 0; i < head_dim; ++i) {
                    heads_of_row.push_back(attended.at(t, head, i));
                }
            }
            row& state = x[static_cast<std::size_t>(t)];
            add(state, product(of.output, heads_of_row, hidden));
            const row y = normed(state, of.ffn_norm);
            row gate = product(of.gate, y, ffn);
            const row up = product(of.up, y, ffn);
            for (std::size_t i = 0; i < gate.size(); ++i) {
                gate[i] = gate[i] / (1 + std::exp(-gate[i])) * up[i];
            }
            add(state, product(of.down, gate, hidden));
        }
    }
    std::vector<std::vector<double>> all;
    for (const row& state : x) {
        all.push_back(product(embedding, normed(state, output_norm), vocab));
    }
    return all;
}

std::vector<std::int32_t> small_model::random_tokens(int count, std::uint64_t seed) const {
    std::mt19937_64 random(seed);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < count; ++i) {
        tokens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
    return tokens;
}

} // namespace engine_test
