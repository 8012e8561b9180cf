// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The documented errors of the vector functions, and that every lane agrees.

#include "support/catch.hpp"

#include <uniprefill/core/detail/host_kernels.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace up = uniprefill;

namespace {

using math = up::detail::host_kernels<up::detail::host_build>;

/// One value through all lanes; they must agree.
template <class Function>
float value_of(Function function, float x) {
    float lanes[math::width];
    math::store(lanes, function(math::splat(x)));
    const auto bits = [](float lane) { return up::bit_cast<std::uint32_t>(lane); };
    if (!std::all_of(lanes, lanes + math::width, [&](float lane) { return bits(lane) == bits(lanes[0]); })) {
        FAIL("lanes disagree at " << x);
    }
    return lanes[0];
}

} // namespace

TEST_CASE("exp2 of negative numbers", "[importance]") {
    const auto exp2 = [](math::floats x) { return math::exp2_of_negative(x); };
    double worst = 0;
    for (int i = 0; i <= 200000; ++i) {
        const float x = -static_cast<float>(i) * (124.0f / 200000);
        worst = std::max(
            worst, std::abs(static_cast<double>(value_of(exp2, x)) / std::exp2(static_cast<double>(x)) - 1));
    }
    INFO("relative error " << worst);
    REQUIRE(worst < 1.5e-7);
    REQUIRE(value_of(exp2, 0.0f) == 1.0f);
    REQUIRE(value_of(exp2, -1.0f) == 0.5f);
    REQUIRE(value_of(exp2, -1e38f) < 1e-37f);
    REQUIRE(value_of(exp2, -1e38f) >= 0.0f);
}

TEST_CASE("log2 of positive numbers", "[importance]") {
    const auto log2 = [](math::floats x) { return math::log2_of_positive(x); };
    for (int i = 0; i <= 100000; ++i) {
        const float x = std::exp2(-1.0f + static_cast<float>(i) * 1e-4f);
        const double right = std::log2(static_cast<double>(x));
        REQUIRE(std::abs(static_cast<double>(value_of(log2, x)) - right) < 1e-7 + std::abs(right) * 6e-8);
    }
    REQUIRE(value_of(log2, 1.0f) == 0.0f);
    REQUIRE(value_of(log2, 64.0f) == 6.0f);
}

TEST_CASE("tanh", "[importance]") {
    const auto tanh = [](math::floats x) { return math::tanh(x); };
    double worst = 0;
    for (int i = -100000; i <= 100000; ++i) {
        const float x = static_cast<float>(i) * 1e-4f;
        const double right = std::tanh(static_cast<double>(x));
        if (i != 0) {
            worst = std::max(worst, std::abs(static_cast<double>(value_of(tanh, x)) / right - 1));
        }
    }
    INFO("relative error " << worst);
    REQUIRE(worst < 4e-7);
    REQUIRE(value_of(tanh, 0.0f) == 0.0f);
    REQUIRE(value_of(tanh, 1e30f) == 1.0f);
    REQUIRE(value_of(tanh, -1e30f) == -1.0f);
}

TEST_CASE("NaN and infinity are told by their bits", "[importance]") {
    const auto found = [](float x) {
        return math::any_non_finite(math::larger_magnitude(math::splat(0), math::splat(x)));
    };
    const float most = std::numeric_limits<float>::max();
    for (const float fine : {0.0f, -0.0f, 1.0f, -most, most, std::numeric_limits<float>::denorm_min()}) {
        REQUIRE_FALSE(found(fine));
    }
    REQUIRE(found(std::numeric_limits<float>::infinity()));
    REQUIRE(found(-std::numeric_limits<float>::infinity()));
    REQUIRE(found(std::numeric_limits<float>::quiet_NaN()));
    REQUIRE(found(-std::numeric_limits<float>::quiet_NaN()));
}
