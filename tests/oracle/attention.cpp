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

} // namespace oracle
