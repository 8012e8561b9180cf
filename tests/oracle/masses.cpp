// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "oracle/oracle.hpp"
#include "oracle/score.hpp"

#include <algorithm>
#include <cmath>

namespace oracle {

void tensor::append(const tensor& other) {
    data.insert(data.end(), other.data.begin(), other.data.end());
    rows += other.rows;
}

bool contains(const std::vector<range>& ranges, int position) {
    return std::any_of(ranges.begin(), ranges.end(),
                       [&](const range& r) { return r.begin <= position && position < r.end; });
}

std::vector<int> observers_of(const std::vector<int>& positions, const std::vector<range>& observed, int n) {
    std::vector<int> rows;
    for (int row = 0; row < static_cast<int>(positions.size()); ++row) {
        if (observed.empty() || contains(observed, positions[static_cast<std::size_t>(row)])) {
            rows.push_back(row);
        }
    }
    if (static_cast<int>(rows.size()) > n) {
        rows.erase(rows.begin(), rows.end() - n);
    }
    return rows;
}

std::vector<bool> forced_rows(const std::vector<int>& positions, int sink, int tail,
                              const std::vector<range>& spans) {
    std::vector<bool> forced;
    const int rows = static_cast<int>(positions.size());
    for (int row = 0; row < rows; ++row) {
        const int position = positions[static_cast<std::size_t>(row)];
        forced.push_back(position < sink || row >= rows - tail || contains(spans, position));
    }
    return forced;
}

block_masses masses_of(const segment_problem& problem) {
    const int rows = problem.q.rows;
    const int heads = problem.q.heads;
    const int keys = problem.keys.rows;
    const int first_own_key = keys - rows;
    const auto blocks = static_cast<std::size_t>((rows + problem.block_rows - 1) / problem.block_rows);

    block_masses out;
    out.unscored = problem.observers.empty();
    std::vector<long double> free(blocks, 0);
    std::vector<long double> forced(blocks, 0);
    for (int head = 0; head < heads; ++head) {
        std::vector<long double> one_free(blocks, 0);
        std::vector<long double> one_forced(blocks, 0);
        for (const int observer : problem.observers) {
            const int position = problem.positions[static_cast<std::size_t>(observer)];
            std::vector<double> scores(static_cast<std::size_t>(keys), no_score);
            for (int key = 0; key < keys; ++key) {
                const double dot = dot_product(problem.q, observer, head, problem.keys, key);
                out.non_finite = out.non_finite || !std::isfinite(dot);
                if (problem.key_positions[static_cast<std::size_t>(key)] <= position) {
                    scores[static_cast<std::size_t>(key)] = score_of(dot, problem.score);
                }
            }
            const std::vector<double> shares = softmax(scores, problem.score, head);
            for (int row = 0; row < rows; ++row) {
                const auto block = static_cast<std::size_t>(row / problem.block_rows);
                const double share = shares[static_cast<std::size_t>(first_own_key + row)];
                (problem.forced[static_cast<std::size_t>(row)] ? one_forced : one_free)[block] += share;
            }
        }
        out.head_free.emplace_back(one_free.begin(), one_free.end());
        out.head_forced.emplace_back(one_forced.begin(), one_forced.end());
        for (std::size_t block = 0; block < blocks; ++block) {
            free[block] += one_free[block];
            forced[block] += one_forced[block];
        }
    }
    out.free.assign(free.begin(), free.end());
    out.forced.assign(forced.begin(), forced.end());
    return out;
}

} // namespace oracle
