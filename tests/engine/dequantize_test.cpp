// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_refusal.hpp"
#include "engine/model_file/byte_span.hpp"
#include "engine/model_file/dequantize.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <vector>

using namespace engine;

TEST_CASE("every type gives what the Python package gguf gives") {
    std::ifstream in(ENGINE_TEST_DATA "/dequantize_golden.bin", std::ios::binary);
    const std::vector<char> content((std::istreambuf_iterator<char>(in)), {});
    const auto* at = reinterpret_cast<const std::byte*>(content.data());
    const std::byte* const end = at + content.size();
    std::set<std::string> seen;
    while (at < end) {
        const auto number = load<std::uint32_t>(at);
        const auto elements = load<std::uint32_t>(at + 4);
        const auto size = load<std::uint32_t>(at + 8);
        at += 12;
        const tensor_type_info* const info = find_tensor_type(number);
        REQUIRE(info != nullptr);
        REQUIRE(info->readable);
        INFO(info->name);
        seen.emplace(info->name);
        const auto block = static_cast<std::uint32_t>(info->block_elements);
        REQUIRE(size == elements / block * static_cast<std::uint32_t>(info->block_bytes));
        REQUIRE(at + size + elements * 4 <= end);

        // An exact copy on the heap, so that a sanitizer sees a read beyond it.
        const std::vector<std::byte> source(at, at + size);
        std::vector<float> values(elements, NAN);
        dequantize_row(static_cast<tensor_type>(number), source.data(), values.data(), elements);
        std::size_t wrong = 0;
        for (std::size_t first = 0; first < elements; first += block) {
            float largest = 0;
            for (std::size_t i = first; i < first + block; ++i) {
                largest = std::max(largest, std::abs(load<float>(at + size + 4 * i)));
            }
            // Scale times number minus minimum: contraction to one rounding may move the last bits.
            const float allowed = block == 1 ? 0.0F : 4e-7F * largest;
            for (std::size_t i = first; i < first + block; ++i) {
                wrong += !(std::abs(values[i] - load<float>(at + size + 4 * i)) <= allowed);
            }
        }
        CHECK(wrong == 0);
        at += size + elements * 4;
    }
    CHECK(seen.size() == 11);
}

TEST_CASE("every half is exact") {
    std::size_t wrong = 0;
    for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
        const float value = half_to_float(static_cast<std::uint16_t>(bits));
        const int exponent = static_cast<int>(bits >> 10 & 31);
        const int fraction = static_cast<int>(bits & 1023);
        const bool negative = (bits & 0x8000) != 0;
        if (exponent == 31) {
            wrong += fraction != 0 ? !std::isnan(value) : !std::isinf(value);
        } else {
            const double magnitude =
                exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
            wrong += std::abs(static_cast<double>(value)) != magnitude;
        }
        wrong += !std::isnan(value) && std::signbit(value) != negative;
    }
    CHECK(wrong == 0);
}

TEST_CASE("rows of no elements are legal, parts of blocks and other types aren't") {
    dequantize_row(tensor_type::q4_k, nullptr, nullptr, 0);
    const std::vector<std::byte> source(1024);
    std::vector<float> values(512);
    const auto row = [&](std::uint32_t type, std::int64_t n) {
        dequantize_row(static_cast<tensor_type>(type), source.data(), values.data(), n);
    };
    CHECK_REFUSES(row(12, 255), "row of type Q4_K", "255");
    CHECK_REFUSES(row(8, -32), "row of type Q8_0", "-32");
    CHECK_REFUSES(row(10, 256), "tensor type", "Q2_K");
    CHECK_REFUSES(row(4, 32), "tensor type", "number 4");
}
