// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Random numbers that are the same with every standard library.

#include "support/catch.hpp"
#include "support/scale.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>

namespace property {

/// The seed of all property tests: UNIPREFILL_TEST_SEED, or the run's.
inline std::uint64_t base_seed() {
    const char* given = std::getenv("UNIPREFILL_TEST_SEED");
    return given != nullptr ? std::strtoull(given, nullptr, 10) : uniprefill_test::seed();
}

using uniprefill_test::scaled;

/// splitmix64 (Steele, Lea, Flood 2014).
class random_numbers {
  public:
    explicit random_numbers(std::uint64_t seed)
        : state_(seed) {}

    std::uint64_t next() {
        state_ += 0x9e3779b97f4a7c15u;
        std::uint64_t z = state_;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        return z ^ (z >> 31);
    }
    /// Uniform in [0, 1).
    double unit() { return static_cast<double>(next() >> 11) * 0x1p-53; }
    /// Uniform in [low, high].
    int between(int low, int high) {
        return low + static_cast<int>(next() % static_cast<std::uint64_t>(high - low + 1));
    }
    bool chance(double probability) { return unit() < probability; }
    template <class T, std::size_t Size>
    T one_of(const T (&choices)[Size]) {
        return choices[next() % Size];
    }
    /// Normal, mean 0, variance 1 (twelve uniforms: tails don't matter here).
    double normal() {
        double sum = -6;
        for (int i = 0; i < 12; ++i) {
            sum += unit();
        }
        return sum;
    }

  private:
    std::uint64_t state_;
};

} // namespace property
