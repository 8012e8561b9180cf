// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// How much of itself a test does. UNIPREFILL_TEST_SCALE is a share, 1 by default: runs under a sanitizer
/// choose a small one, long runs a large one.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace uniprefill_test {

inline double test_scale() {
    const char* const given = std::getenv("UNIPREFILL_TEST_SCALE");
    return given != nullptr ? std::strtod(given, nullptr) : 1.0;
}
inline bool is_scaled_down() {
    return test_scale() < 1;
}

/// The scale's share of a number of cases, or of a size, but no less than @p at_least, nor than all if there
/// are fewer.
inline int scaled(int all, int at_least = 1) {
    return std::max(std::min(all, at_least), static_cast<int>(all * test_scale()));
}

/// So many of the cases 0, 1, ... of which each tests something else. If not all of them, they are spread by
/// the golden ratio, in step with nothing that cases may be told apart by.
inline std::vector<std::uint32_t> spread_cases(int all, int at_least = 1) {
    const int count = scaled(all, at_least);
    std::vector<std::uint32_t> chosen;
    for (int i = 0; i < count; ++i) {
        const double place = 0.6180339887498949 * (i + 1);
        chosen.push_back(static_cast<std::uint32_t>(count < all ? (place - std::floor(place)) * all : i));
    }
    return chosen;
}

} // namespace uniprefill_test
