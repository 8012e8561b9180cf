// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Every half and every bfloat16, and every place where a float rounds to one or the other. Compiled twice,
// the second time with -ffast-math: so NaN and infinity are told by bits here too.

#include "support/catch.hpp"

#include <uniprefill/core/element.hpp>

#include <cmath>
#include <limits>
#include <random>

namespace up = uniprefill;

namespace {

std::uint32_t bits_of(float value) {
    return up::bit_cast<std::uint32_t>(value);
}
float from_bits(std::uint32_t bits) {
    return up::bit_cast<float>(bits);
}
bool is_nan(float value) {
    return (bits_of(value) & 0x7fffffffu) > 0x7f800000u;
}
bool is_nan(up::half value) {
    return (value.bits & 0x7fffu) > 0x7c00u;
}
bool is_nan(up::bfloat16 value) {
    return (value.bits & 0x7fffu) > 0x7f80u;
}

/// What the bits of a finite half mean.
double value_of(up::half h) {
    const int exponent = h.bits >> 10 & 31;
    const int fraction = h.bits & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
    return h.bits & 0x8000 ? -magnitude : magnitude;
}

template <class Element>
constexpr std::uint16_t infinity = std::is_same_v<Element, up::half> ? 0x7c00 : 0x7f80;

/// Every neighbouring pair of non-negative finite values: the middle goes to the even one, what lies on
/// either side of it to the nearer one; the negatives alike.
template <class Element>
void check_rounding() {
    std::int32_t wrong = 0;
    for (std::uint32_t low = 0; low < infinity<Element>; ++low) {
        const Element below{static_cast<std::uint16_t>(low)};
        const Element above{static_cast<std::uint16_t>(low + 1)};
        const auto even = static_cast<std::uint16_t>(low % 2 == 0 ? low : low + 1);
        // The middle of the last value and "the next power of two" rounds to infinity.
        const double next =
            above.bits == infinity<Element>
                ? 2.0 * static_cast<double>(up::to_float(below)) -
                      static_cast<double>(up::to_float(Element{static_cast<std::uint16_t>(low - 1)}))
                : static_cast<double>(up::to_float(above));
        const auto middle = static_cast<float>((static_cast<double>(up::to_float(below)) + next) / 2);
        const std::uint32_t bits = bits_of(middle);
        for (const std::uint32_t sign : {0u, 0x80000000u}) {
            const auto rounds_to = [&](std::uint32_t value, std::uint32_t expected) {
                const auto came = up::from_float<Element>(from_bits(value | sign)).bits;
                wrong += came == (expected | sign >> 16) ? 0 : 1;
            };
            rounds_to(bits, even);
            rounds_to(bits - 1, below.bits);
            rounds_to(bits + 1, above.bits);
        }
    }
    CHECK(wrong == 0);
}

/// To a 16-bit type and back, bit for bit; NaN stays NaN.
template <class Element>
void check_round_trip() {
    std::int32_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const Element element{static_cast<std::uint16_t>(bits)};
        const float value = up::to_float(element);
        const Element back = up::from_float<Element>(value);
        if (is_nan(element)) {
            wrong += is_nan(value) && is_nan(back) ? 0 : 1;
        } else {
            wrong += back.bits == bits ? 0 : 1;
        }
        wrong += up::is_non_finite(value) == ((bits & 0x7fffu) >= infinity<Element>) ? 0 : 1;
    }
    CHECK(wrong == 0);
}

} // namespace

TEST_CASE("half: all 65,536 values") {
    std::int32_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const up::half h{static_cast<std::uint16_t>(bits)};
        if ((bits & 0x7fffu) < 0x7c00u) {
            const double came = static_cast<double>(up::to_float(h));
            wrong += came == value_of(h) ? 0 : 1;
            wrong += (bits_of(up::to_float(h)) >> 31) == bits >> 15 ? 0 : 1; // -0 stays -0
        } else if ((bits & 0x7fffu) == 0x7c00u) {
            wrong += bits_of(up::to_float(h)) == (0x7f800000u | bits >> 15 << 31) ? 0 : 1;
        }
    }
    CHECK(wrong == 0);
    check_round_trip<up::half>();
}

TEST_CASE("bfloat16: all 65,536 values") {
    std::int32_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        wrong += bits_of(up::to_float(up::bfloat16{static_cast<std::uint16_t>(bits)})) == bits << 16 ? 0 : 1;
    }
    CHECK(wrong == 0);
    check_round_trip<up::bfloat16>();
}

TEST_CASE("half: every rounding edge") {
    check_rounding<up::half>();
    CHECK(up::from_float<up::half>(65504.0f).bits == 0x7bff);
    CHECK(up::from_float<up::half>(65519.996f).bits == 0x7bff);
    CHECK(up::from_float<up::half>(65520.0f).bits == 0x7c00);
    CHECK(up::from_float<up::half>(1e30f).bits == 0x7c00);
    CHECK(up::from_float<up::half>(0x1p-25f).bits == 0); // half of the smallest: a tie, to even
    CHECK(up::from_float<up::half>(0x1.000002p-25f).bits == 1);
    CHECK(up::from_float<up::half>(from_bits(1)).bits == 0);
    CHECK(up::from_float<up::half>(from_bits(0x80000001u)).bits == 0x8000);
}

TEST_CASE("bfloat16: every rounding edge") {
    std::int32_t wrong = 0;
    for (std::uint32_t low = 0; low < 0x7f80u; ++low) {
        const std::uint32_t bits = low << 16;
        for (const std::uint32_t sign : {0u, 0x80000000u}) {
            const auto rounds_to = [&](std::uint32_t value, std::uint32_t expected) {
                const auto came = up::from_float<up::bfloat16>(from_bits(value | sign)).bits;
                wrong += came == (expected | sign >> 16) ? 0 : 1;
            };
            rounds_to(bits | 0x7fffu, low);
            rounds_to(bits | 0x8000u, low % 2 == 0 ? low : low + 1);
            rounds_to(bits | 0x8001u, low + 1);
            rounds_to(bits | 0xffffu, low + 1);
        }
    }
    CHECK(wrong == 0);
}

TEST_CASE("NaN stays NaN whatever its payload, and infinity stays infinity") {
    for (const std::uint32_t sign : {0u, 0x80000000u}) {
        for (std::uint32_t payload = 1; payload < 0x800000u; payload = payload * 2 + 1) {
            for (const std::uint32_t one : {payload, (payload + 1) / 2}) { // runs of ones, and single bits
                const float nan = from_bits(0x7f800000u | sign | one);
                CHECK(is_nan(up::from_float<up::half>(nan)));
                CHECK(is_nan(up::from_float<up::bfloat16>(nan)));
                CHECK(bits_of(up::from_float<float>(nan)) == bits_of(nan));
                CHECK(up::is_non_finite(nan));
            }
        }
        const float infinite = from_bits(0x7f800000u | sign);
        CHECK(up::from_float<up::half>(infinite).bits == (0x7c00u | sign >> 16));
        CHECK(up::from_float<up::bfloat16>(infinite).bits == (0x7f80u | sign >> 16));
        CHECK(up::is_non_finite(infinite));
        CHECK_FALSE(up::is_non_finite(from_bits(0x7f7fffffu | sign)));
        CHECK_FALSE(up::is_non_finite(from_bits(sign)));
    }
}

TEST_CASE("half: random floats go to the nearest") {
    std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
    std::int32_t wrong = 0;
    for (std::int32_t i = 0; i < 300000; ++i) {
        const float value =
            from_bits(0x33000000u + static_cast<std::uint32_t>(random() % 0x14000000u)); // 2^-25..2^15
        const auto came = up::from_float<up::half>(value).bits;
        const double error = std::abs(value_of({came}) - static_cast<double>(value));
        const auto error_of = [&](int step) {
            return std::abs(value_of({static_cast<std::uint16_t>(came + step)}) - static_cast<double>(value));
        };
        wrong += error <= error_of(1) && (came == 0 || error <= error_of(-1)) ? 0 : 1;
    }
    CHECK(wrong == 0);
}

TEST_CASE("element types") {
    static_assert(up::is_element_v<float> && up::is_element_v<up::half> && up::is_element_v<up::bfloat16>);
    static_assert(!up::is_element_v<double> && !up::is_element_v<int>);
    CHECK(up::to_float(1.5f) == 1.5f);
    CHECK(up::bit_cast<std::uint16_t>(up::half{0x1234}) == 0x1234);
}
