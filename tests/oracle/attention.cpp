// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "oracle/oracle.hpp"
#include "oracle/score.hpp"

#include <algorithm>
#include <cmath>

namespace oracle {

double dot_product(const tensor& q, int row, int head, const tensor& k, int key) {
    const int kv_head = head / (q.heads / k.heads);
    double sum = 0;
    for (int i = 0; i < q.dim; ++i) {
        sum += q.at(row, head, i) * k.at(key, kv_head, i);
    }
    return sum;
}

double score_of(double dot, const score_parameters& parameters) {
    const double scaled = dot * parameters.scale;
    return parameters.softcap == 0 ? scaled : parameters.softcap * std::tanh(scaled / parameters.softcap);
}

std::vector<double> softmax(const std::vector<double>& scores, const score_parameters& parameters, int head) {
    double largest = no_score;
    for (const double score : scores) {
        largest = std::max(largest, score);
    }
    const bool has_sink = !parameters.sink_logits.empty();
    const double sink = has_sink ? parameters.sink_logits[static_cast<std::size_t>(head)] : no_score;
    largest = std::max(largest, sink);
    std::vector<double> shares(scores.size(), 0.0);
    if (largest == no_score) {
        return shares;
    }
    long double denominator = std::exp(sink - largest);
    for (const double score : scores) {
        denominator += std::exp(score - largest);
    }
    for (std::size_t i = 0; i < scores.size(); ++i) {
        shares[i] = static_cast<double>(std::exp(scores[i] - largest) / denominator);
    }
    return shares;
}

mask stored_causal_mask(const std::vector<int>& query_positions, const std::vector<int>& key_positions,
                        const std::vector<int>& stored, int window) {
    mask allowed;
    for (const int query : query_positions) {
        std::vector<bool> row;
        for (const int key : key_positions) {
            const bool held = std::binary_search(stored.begin(), stored.end(), key);
            row.push_back(held && key <= query && (window == 0 || key > query - window));
        }
        allowed.push_back(row);
    }
    return allowed;
}

tensor masked_attention(const tensor& q, const tensor& k, const tensor& v, const score_parameters& score,
                        const mask& allowed) {
    tensor out(q.rows, q.heads, v.dim);
    for (int row = 0; row < q.rows; ++row) {
        for (int head = 0; head < q.heads; ++head) {
            std::vector<double> scores(static_cast<std::size_t>(k.rows), no_score);
            for (int key = 0; key < k.rows; ++key) {
                if (allowed[static_cast<std::size_t>(row)][static_cast<std::size_t>(key)]) {
                    scores[static_cast<std::size_t>(key)] =
                        score_of(dot_product(q, row, head, k, key), score);
                }
            }
            const std::vector<double> shares = softmax(scores, score, head);
            const int kv_head = head / (q.heads / v.heads);
            for (int i = 0; i < v.dim; ++i) {
                long double sum = 0;
                for (int key = 0; key < k.rows; ++key) {
                    sum += static_cast<long double>(shares[static_cast<std::size_t>(key)]) *
                           static_cast<long double>(v.at(key, kv_head, i));
                }
                out.at(row, head, i) = static_cast<double>(sum);
            }
        }
    }
    return out;
}

std::vector<bool> listed_keys(const std::vector<bool>& allowed, int position,
                              const std::vector<int>& key_positions, const block_list& list) {
    std::vector<bool> reads(allowed.size(), false);
    const int keys = static_cast<int>(allowed.size());
    const auto block_of = [&](int key) { return (key - list.first_key) / list.block_rows; };
    int first_block = keys; // of the window
    for (int key = keys - 1; key >= list.first_key; --key) {
        const int at = key_positions[static_cast<std::size_t>(key)];
        if (list.window > 0 && at <= position && at > position - list.window) {
            first_block = block_of(key);
        }
    }
    for (int key = 0; key < keys; ++key) {
        const bool before = key < list.first_key;
        const bool in_window = !before && block_of(key) >= first_block;
        const bool in_list = !before && list.listed[static_cast<std::size_t>(block_of(key))];
        reads[static_cast<std::size_t>(key)] =
            allowed[static_cast<std::size_t>(key)] && (before || in_window || in_list);
    }
    return reads;
}

attended_row attend_row(const tensor& q, int row, int head, const tensor& k, const tensor& v,
                        const score_parameters& score, const std::vector<bool>& reads, int extra,
                        const std::vector<double>& log_weights) {
    attended_row result;
    result.out.assign(static_cast<std::size_t>(v.dim), 0.0);
    result.magnitude = result.out;
    std::vector<double> scores(static_cast<std::size_t>(k.rows), no_score);
    double largest = no_score;
    for (int key = 0; key < k.rows; ++key) {
        if (reads[static_cast<std::size_t>(key)]) {
            scores[static_cast<std::size_t>(key)] =
                score_of(dot_product(q, row, head, k, key), score) +
                (log_weights.empty() ? 0.0 : log_weights[static_cast<std::size_t>(key)]);
            largest = std::max(largest, scores[static_cast<std::size_t>(key)]);
            ++result.reads;
        }
    }
    const bool has_sink = !score.sink_logits.empty();
    const double sink = has_sink ? score.sink_logits[static_cast<std::size_t>(head)] : no_score;
    largest = std::max(largest, sink);
    result.lse = largest;
    if (largest == no_score) {
        return result;
    }
    long double denominator = std::exp(sink - largest);
    for (const double one : scores) {
        denominator += std::exp(one - largest);
    }
    result.lse += static_cast<double>(std::log(denominator));
    const std::vector<double> shares = softmax(scores, score, head);
    const int kv_head = head / (q.heads / k.heads);
    for (int key = 0; key < k.rows; ++key) {
        const double share = shares[static_cast<std::size_t>(key)];
        for (int i = 0; i < v.dim; ++i) {
            result.out[static_cast<std::size_t>(i)] += share * v.at(key, kv_head, i);
            result.magnitude[static_cast<std::size_t>(i)] += share * std::abs(v.at(key, kv_head, i));
        }
        if (share > 1e-40) {
            double sum = 0;
            int products = extra;
            for (int i = 0; i < q.dim; ++i) {
                const double product = q.at(row, head, i) * k.at(key, kv_head, i);
                sum += std::abs(product);
                products += product != 0 ? 1 : 0;
            }
            result.score_magnitude = std::max(result.score_magnitude, score.scale * sum * products);
            result.largest_score =
                std::max(result.largest_score, std::abs(scores[static_cast<std::size_t>(key)]));
        }
    }
    return result;
}

} // namespace oracle
