// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The integers that decide, against 128-bit arithmetic.

#include "support/catch.hpp"

#include <uniprefill/core/fixed_point.hpp>

#include <cmath>
#include <limits>
#include <random>

namespace up = uniprefill;
__extension__ using uint128 = unsigned __int128;

namespace {

constexpr std::uint64_t interesting[] = {0,
                                         1,
                                         2,
                                         3,
                                         0x7fffffffu,
                                         0x80000000u,
                                         0xffffffffu,
                                         0x100000000u,
                                         0x100000001u,
                                         (std::uint64_t{1} << 62) - 1,
                                         std::uint64_t{1} << 62,
                                         (std::uint64_t{1} << 62) + 1,
                                         (std::uint64_t{1} << 63) - 1,
                                         std::uint64_t{1} << 63,
                                         (std::uint64_t{1} << 63) + 1,
                                         std::numeric_limits<std::uint64_t>::max()};

/// Whole range, small numbers as likely as large ones.
std::uint64_t any_size(std::mt19937_64& random) {
    return random() >> (random() % 64);
}

} // namespace

TEST_CASE("unit_fraction: doubles from 2^-11 to 1 convert exactly") {
    std::mt19937_64 random(uniprefill_test::seed());
    for (std::int32_t i = 0; i < 100000; ++i) {
        const double number = std::ldexp(1.0 + static_cast<double>(random() >> 12) * 0x1p-52,
                                         -1 - static_cast<int>(random() % 11));
        const auto value = static_cast<std::uint64_t>(std::ldexp(number, 63));
        INFO("seed " << uniprefill_test::seed() << ", number " << number);
        REQUIRE(up::unit_fraction::from(number).value == value);
        REQUIRE(std::ldexp(static_cast<double>(value), -63) == number);
    }
    CHECK(up::unit_fraction::from(1.0).value == up::unit_fraction::one);
    CHECK(up::unit_fraction::from(0.5).value == up::unit_fraction::one / 2);
    CHECK(up::unit_fraction::from(0x1p-11).value == std::uint64_t{1} << 52);
    CHECK(up::unit_fraction{}.value == up::unit_fraction::one);
}

TEST_CASE("unit_fraction: smaller doubles are rounded to the nearest multiple of 2^-63") {
    std::mt19937_64 random(uniprefill_test::seed() + 1);
    for (std::int32_t i = 0; i < 100000; ++i) {
        const std::uint64_t mantissa = (random() >> 12) | (std::uint64_t{1} << 52);
        const int exponent =
            -12 - static_cast<int>(random() % 60); // number in [2^exponent, 2^(exponent + 1))
        const double number = std::ldexp(static_cast<double>(mantissa), exponent - 52);
        // number * 2^63 = mantissa * 2^-shift; the nearest integer, halves up.
        const int shift = -(exponent - 52 + 63);
        const uint128 wanted = ((static_cast<uint128>(mantissa) << 1 >> shift) + 1) >> 1;
        INFO(number);
        REQUIRE(up::unit_fraction::from(number).value == static_cast<std::uint64_t>(wanted));
    }
    CHECK(up::unit_fraction::from(0x1p-63).value == 1);
    CHECK(up::unit_fraction::from(0x1p-64).value == 1);
    CHECK(up::unit_fraction::from(0x1.fffffffffffffp-65).value == 0);
    CHECK(up::unit_fraction::from(0x1p-65).value == 0);
}

TEST_CASE("unit_fraction: what is no fraction gives 0") {
    const auto bits = [](std::uint64_t value) { return up::bit_cast<double>(value); };
    CHECK(up::unit_fraction::from(0.0).value == 0);
    CHECK(up::unit_fraction::from(-0.0).value == 0);
    CHECK(up::unit_fraction::from(-0.5).value == 0);
    CHECK(up::unit_fraction::from(-1.0).value == 0);
    CHECK(up::unit_fraction::from(0x1.0000000000001p0).value == 0);
    CHECK(up::unit_fraction::from(2.0).value == 0);
    CHECK(up::unit_fraction::from(1e300).value == 0);
    CHECK(up::unit_fraction::from(0x1p-1074).value == 0);
    CHECK(up::unit_fraction::from(0x1p-1022).value == 0);
    for (const std::uint64_t special : {0x7ff0000000000000u, 0xfff0000000000000u, 0x7ff8000000000000u,
                                        0xfff8000000000000u, 0x7ff0000000000001u, 0x7fffffffffffffffu}) {
        CHECK(up::unit_fraction::from(bits(special)).value == 0);
    }
}

TEST_CASE("wide_product: all 128 bits, and their order") {
    std::mt19937_64 random(uniprefill_test::seed() + 2);
    const auto check = [](std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d) {
        const up::wide_product left = up::wide_product::of(a, b);
        const up::wide_product right = up::wide_product::of(c, d);
        const uint128 exact_left = static_cast<uint128>(a) * b;
        const uint128 exact_right = static_cast<uint128>(c) * d;
        REQUIRE(left.high == static_cast<std::uint64_t>(exact_left >> 64));
        REQUIRE(left.low == static_cast<std::uint64_t>(exact_left));
        REQUIRE((left < right) == (exact_left < exact_right));
        REQUIRE((right < left) == (exact_right < exact_left));
    };
    for (const std::uint64_t a : interesting) {
        for (const std::uint64_t b : interesting) {
            check(a, b, b, a);
            check(a, b, a, b + 1);
            check(a, b, a / 3, b);
        }
    }
    for (std::int32_t i = 0; i < 100000; ++i) {
        check(any_size(random), any_size(random), any_size(random), any_size(random));
    }
    static_assert(up::wide_product::of(std::uint64_t{1} << 40, std::uint64_t{1} << 40).high == 1u << 16);
}

TEST_CASE("at_least_fraction and more_than_fraction: exact at the edge") {
    std::mt19937_64 random(uniprefill_test::seed() + 3);
    const auto check = [](std::uint64_t part, up::unit_fraction share, std::uint64_t whole) {
        const uint128 left = static_cast<uint128>(part) << 63;
        const uint128 right = static_cast<uint128>(share.value) * whole;
        REQUIRE(up::at_least_fraction(part, share, whole) == (left >= right));
        REQUIRE(up::more_than_fraction(part, share, whole) == (left > right));
    };
    for (std::int32_t i = 0; i < 100000; ++i) {
        const std::uint64_t whole = any_size(random) >> 1;
        const up::unit_fraction share{random() % (up::unit_fraction::one + 1)};
        const auto edge = static_cast<std::uint64_t>(static_cast<uint128>(share.value) * whole >> 63);
        check(edge, share, whole);
        check(edge + 1, share, whole);
        check(edge > 0 ? edge - 1 : 0, share, whole);
        // Shares that a sum meets exactly.
        const up::unit_fraction quarter{up::unit_fraction::one / 4 * (random() % 5)};
        check(whole / 4 * 4 / 4 * (quarter.value / (up::unit_fraction::one / 4)), quarter, whole / 4 * 4);
    }
    // 2^62 and its neighbours, where a double can't tell.
    const std::uint64_t whole = std::uint64_t{1} << 62;
    const auto half = up::unit_fraction::from(0.5);
    CHECK(up::at_least_fraction(whole / 2, half, whole));
    CHECK_FALSE(up::more_than_fraction(whole / 2, half, whole));
    CHECK_FALSE(up::at_least_fraction(whole / 2 - 1, half, whole));
    CHECK(up::more_than_fraction(whole / 2 + 1, half, whole));
    CHECK(up::at_least_fraction(0, half, 0));
    CHECK_FALSE(up::more_than_fraction(0, half, 0));
}

TEST_CASE("ceil_fraction: exact") {
    std::mt19937_64 random(uniprefill_test::seed() + 4);
    const auto check = [](up::unit_fraction share, std::int32_t count) {
        const uint128 product = static_cast<uint128>(share.value) * static_cast<uint128>(count);
        const uint128 wanted = (product + up::unit_fraction::one - 1) >> 63;
        REQUIRE(static_cast<uint128>(up::ceil_fraction(share, count)) == wanted);
    };
    for (std::int32_t i = 0; i < 100000; ++i) {
        const auto count = static_cast<std::int32_t>(any_size(random) >> 33);
        check({random() % (up::unit_fraction::one + 1)}, count);
        check({up::unit_fraction::one / 8 * (random() % 9)}, count);
        check({1}, count);
        check({up::unit_fraction::one}, count);
    }
    CHECK(up::ceil_fraction({up::unit_fraction::one}, INT32_MAX) == INT32_MAX);
    CHECK(up::ceil_fraction({1}, INT32_MAX) == 1);
    CHECK(up::ceil_fraction({1}, 0) == 0);
    CHECK(up::ceil_fraction(up::unit_fraction::from(0.25), 8) == 2);
    CHECK(up::ceil_fraction(up::unit_fraction::from(0.25), 9) == 3);
}
