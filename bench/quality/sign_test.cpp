// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "quality/sign_test.hpp"

#include <algorithm>
#include <cmath>

namespace quality_bench {

namespace {

/// P(X <= most) for X successes of @p trials fair coins.
double lower_tail(std::int32_t most, std::int32_t trials) {
    double sum = 0;
    double log_choose = 0; // log of trials over k
    for (std::int32_t k = 0; k <= most; ++k) {
        if (k > 0) log_choose += std::log(trials - k + 1) - std::log(k);
        sum += std::exp(log_choose - trials * std::log(2.0));
    }
    return std::min(sum, 1.0);
}

} // namespace

sign_test sign_test_of(const paired_counts& counts) {
    const std::int32_t differing = counts.only_reference + counts.only_ours;
    sign_test made;
    made.fewer = lower_tail(counts.only_ours, differing);
    made.two_sided =
        std::min(1.0, 2 * lower_tail(std::min(counts.only_ours, counts.only_reference), differing));
    return made;
}

} // namespace quality_bench
