// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <vector>

namespace engine {

/// How far one run's next-token distributions are from another's. Nats throughout.
struct quality {
    std::int32_t positions = 0;
    double kl_mean = 0; ///< KL(dense || ours)
    double kl_median = 0;
    double kl_max = 0;
    double agree = 0; ///< share of positions with the same likeliest token
    double agree_sure =
        0; ///< the same, where the dense run's top two differ by more than 0.1 nat; NaN if nowhere
    std::int32_t sure_positions = 0;
    double dense_nll =
        0;           ///< mean negative log-likelihood of the real tokens in the dense run; NaN without any
    double dnll = 0; ///< ours less dense
    std::int32_t real_tokens = 0;
};

/// Compares logits [rows, vocab], row-major. `next_tokens[i]` is the token that really follows row i; there
/// may be fewer than rows (the last row's is often unknown). Double arithmetic; the result doesn't depend on
/// threads.
///
/// Throws `error` if rows or vocab isn't positive, there are more next tokens than rows, one lies outside the
/// vocabulary, or a logit isn't finite.
quality compare_logits(const float* dense, const float* ours, std::int32_t rows, std::int32_t vocab,
                       const std::vector<std::int32_t>& next_tokens);

} // namespace engine
