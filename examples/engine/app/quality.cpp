// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/quality.hpp"

#include "engine/app/number_text.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>

namespace engine {
namespace {

constexpr double sure_margin = 0.1;

/// What one row of logits says, in one pass over it for the top two and one for the sum.
struct distribution {
    std::int32_t best = 0;
    double margin = 0;  ///< between the top two logits; infinite if there is one token
    double log_sum = 0; ///< log of the sum of exp(logit)
};

distribution read_row(const float* logits, std::int32_t vocab, const char* run, std::int32_t row) {
    distribution out;
    double second = -std::numeric_limits<double>::infinity();
    for (std::int32_t id = 0; id < vocab; ++id) {
        const double logit = logits[id];
        if (!std::isfinite(logit)) {
            throw error(std::string(run) + " logits, row " + std::to_string(row) + ", token " +
                            std::to_string(id),
                        "a finite number", short_number(logit));
        }
        if (id == 0) continue;
        if (logit > logits[out.best]) {
            second = logits[out.best];
            out.best = id;
        } else if (logit > second) {
            second = logit;
        }
    }
    const double top = logits[out.best];
    out.margin = top - second;
    double sum = 0;
    for (std::int32_t id = 0; id < vocab; ++id) {
        sum += std::exp(logits[id] - top);
    }
    out.log_sum = top + std::log(sum);
    return out;
}

double median(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    const std::size_t middle = values.size() / 2;
    return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

} // namespace

quality compare_logits(const float* dense, const float* ours, std::int32_t rows, std::int32_t vocab,
                       const std::vector<std::int32_t>& next_tokens) {
    if (rows <= 0) throw error("rows of logits", "at least 1", std::to_string(rows));
    if (vocab <= 0) throw error("vocabulary", "at least 1 token", std::to_string(vocab));
    if (next_tokens.size() > static_cast<std::size_t>(rows)) {
        throw error("next tokens", "at most one for each of " + std::to_string(rows) + " rows",
                    std::to_string(next_tokens.size()));
    }
    quality out;
    out.positions = rows;
    out.real_tokens = static_cast<std::int32_t>(next_tokens.size());
    std::vector<double> divergences;
    std::int32_t agreeing = 0;
    std::int32_t agreeing_sure = 0;
    double dense_nll = 0;
    double ours_nll = 0;
    for (std::int32_t row = 0; row < rows; ++row) {
        const float* p = dense + static_cast<std::ptrdiff_t>(row) * vocab;
        const float* q = ours + static_cast<std::ptrdiff_t>(row) * vocab;
        const distribution of_p = read_row(p, vocab, "dense", row);
        const distribution of_q = read_row(q, vocab, "sparsified", row);

        double divergence = 0;
        for (std::int32_t id = 0; id < vocab; ++id) {
            const double log_p = p[id] - of_p.log_sum;
            const double log_q = q[id] - of_q.log_sum;
            divergence += std::exp(log_p) * (log_p - log_q);
        }
        divergences.push_back(std::max(divergence, 0.0)); // rounding alone makes it negative

        const bool same = of_p.best == of_q.best;
        agreeing += same ? 1 : 0;
        if (of_p.margin > sure_margin) {
            ++out.sure_positions;
            agreeing_sure += same ? 1 : 0;
        }
        if (row < out.real_tokens) {
            const std::int32_t real = next_tokens[static_cast<std::size_t>(row)];
            if (real < 0 || real >= vocab) {
                throw error("next token " + std::to_string(row), "0 to " + std::to_string(vocab - 1),
                            std::to_string(real));
            }
            dense_nll += of_p.log_sum - p[real];
            ours_nll += of_q.log_sum - q[real];
        }
    }
    for (const double divergence : divergences) {
        out.kl_mean += divergence / rows;
    }
    out.kl_median = median(divergences);
    out.kl_max = *std::max_element(divergences.begin(), divergences.end());
    const double none = std::numeric_limits<double>::quiet_NaN();
    out.agree = static_cast<double>(agreeing) / rows;
    out.agree_sure = out.sure_positions > 0 ? static_cast<double>(agreeing_sure) / out.sure_positions : none;
    out.dense_nll = out.real_tokens > 0 ? dense_nll / out.real_tokens : none;
    out.dnll = out.real_tokens > 0 ? (ours_nll - dense_nll) / out.real_tokens : none;
    return out;
}

} // namespace engine
