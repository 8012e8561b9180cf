// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>

namespace quality_bench {

/// The same trials run two ways, counted.
struct paired_counts {
    std::int32_t both = 0;
    std::int32_t only_reference = 0;
    std::int32_t only_ours = 0;
    std::int32_t neither = 0;
};

/// Exact binomial sign test over the trials that came out differently: were both ways as good, each would be
/// a fair coin.
struct sign_test {
    double fewer = 1;     ///< probability of as few successes of ours alone, or fewer
    double two_sided = 1; ///< of a difference as large, either way
};

/// Without a trial that came out differently both are 1.
sign_test sign_test_of(const paired_counts& counts);

} // namespace quality_bench
