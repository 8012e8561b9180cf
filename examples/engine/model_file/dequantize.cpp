// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/dequantize.hpp"

#include "engine/error.hpp"
#include "engine/model_file/byte_span.hpp"

#include <cstring>
#include <string>

namespace engine {

namespace {

// Block layouts: the GGUF specification's ggml types. `d` is a block's scale, `m` its minimum, both binary16.

float half_at(const std::byte* from) {
    return half_to_float(load<std::uint16_t>(from));
}

int u8(const std::byte* from, int i) {
    return std::to_integer<int>(from[i]);
}

int low(const std::byte* from, int i) {
    return u8(from, i) & 15;
}

int high(const std::byte* from, int i) {
    return u8(from, i) >> 4;
}

/// d, 16 bytes of nibbles: the low ones are numbers 0..15, the high ones 16..31.
void block_q4_0(const std::byte* b, float* y) {
    const float d = half_at(b);
    const std::byte* const q = b + 2;
    for (int j = 0; j < 16; ++j) {
        y[j] = d * static_cast<float>(low(q, j) - 8);
        y[j + 16] = d * static_cast<float>(high(q, j) - 8);
    }
}

/// d, m, nibbles.
void block_q4_1(const std::byte* b, float* y) {
    const float d = half_at(b);
    const float m = half_at(b + 2);
    const std::byte* const q = b + 4;
    for (int j = 0; j < 16; ++j) {
        y[j] = d * static_cast<float>(low(q, j)) + m;
        y[j + 16] = d * static_cast<float>(high(q, j)) + m;
    }
}

/// Bit j of a block's 32-bit word is the fifth bit of number j.
int fifth(std::uint32_t bits, int j) {
    return static_cast<int>((bits >> j) & 1) << 4;
}

/// d, fifth bits, nibbles.
void block_q5_0(const std::byte* b, float* y) {
    const float d = half_at(b);
    const auto bits = load<std::uint32_t>(b + 2);
    const std::byte* const q = b + 6;
    for (int j = 0; j < 16; ++j) {
        y[j] = d * static_cast<float>((low(q, j) | fifth(bits, j)) - 16);
        y[j + 16] = d * static_cast<float>((high(q, j) | fifth(bits, j + 16)) - 16);
    }
}

/// d, m, fifth bits, nibbles.
void block_q5_1(const std::byte* b, float* y) {
    const float d = half_at(b);
    const float m = half_at(b + 2);
    const auto bits = load<std::uint32_t>(b + 4);
    const std::byte* const q = b + 8;
    for (int j = 0; j < 16; ++j) {
        y[j] = d * static_cast<float>(low(q, j) | fifth(bits, j)) + m;
        y[j + 16] = d * static_cast<float>(high(q, j) | fifth(bits, j + 16)) + m;
    }
}

/// d, 32 signed bytes.
void block_q8_0(const std::byte* b, float* y) {
    const float d = half_at(b);
    for (int j = 0; j < 32; ++j) {
        y[j] = d * static_cast<float>(load<std::int8_t>(b + 2 + j));
    }
}

struct scale_and_min {
    float scale;
    float min;
};

/// Eight 6-bit scales and eight 6-bit minima in 12 bytes: the first four of each lie in the low six bits of
/// bytes 0..3 and 4..7; the last four have their low nibbles in bytes 8..11 and their top two bits above the
/// first four.
scale_and_min k_scale(const std::byte* packed, int j) {
    if (j < 4) {
        return {static_cast<float>(u8(packed, j) & 63), static_cast<float>(u8(packed, j + 4) & 63)};
    }
    return {static_cast<float>(low(packed, j + 4) | (u8(packed, j - 4) >> 6) << 4),
            static_cast<float>(high(packed, j + 4) | (u8(packed, j) >> 6) << 4)};
}

/// d, dmin, scales, nibbles: 32 bytes hold sub-block 2g in their low halves and 2g + 1 in their high ones.
void block_q4_k(const std::byte* b, float* y) {
    const float d = half_at(b);
    const float dmin = half_at(b + 2);
    const std::byte* const packed = b + 4;
    for (int g = 0; g < 4; ++g, y += 64) {
        const std::byte* const q = b + 16 + 32 * g;
        const scale_and_min first = k_scale(packed, 2 * g);
        const scale_and_min second = k_scale(packed, 2 * g + 1);
        for (int j = 0; j < 32; ++j) {
            y[j] = d * first.scale * static_cast<float>(low(q, j)) - dmin * first.min;
            y[j + 32] = d * second.scale * static_cast<float>(high(q, j)) - dmin * second.min;
        }
    }
}

/// d, dmin, scales, fifth bits (bit s of byte j belongs to number j of sub-block s), nibbles as in Q4_K.
void block_q5_k(const std::byte* b, float* y) {
    const float d = half_at(b);
    const float dmin = half_at(b + 2);
    const std::byte* const packed = b + 4;
    const std::byte* const fifths = b + 16;
    for (int g = 0; g < 4; ++g, y += 64) {
        const std::byte* const q = b + 48 + 32 * g;
        const scale_and_min first = k_scale(packed, 2 * g);
        const scale_and_min second = k_scale(packed, 2 * g + 1);
        for (int j = 0; j < 32; ++j) {
            const int bits = u8(fifths, j) >> (2 * g);
            const int q_first = low(q, j) | (bits & 1) << 4;
            const int q_second = high(q, j) | (bits & 2) << 3;
            y[j] = d * first.scale * static_cast<float>(q_first) - dmin * first.min;
            y[j + 32] = d * second.scale * static_cast<float>(q_second) - dmin * second.min;
        }
    }
}

/// 128 bytes of low nibbles, 64 of top bit pairs, 16 signed scales (one for 16 numbers), d. Two halves of 128
/// numbers; in each, quarter k takes its nibbles from byte j + 32 * (k % 2), half k / 2, and bits 2k, 2k + 1
/// of byte j.
void block_q6_k(const std::byte* b, float* y) {
    const float d = half_at(b + 208);
    for (int half = 0; half < 2; ++half) {
        const std::byte* const nibbles = b + 64 * half;
        const std::byte* const tops = b + 128 + 32 * half;
        const std::byte* const scales = b + 192 + 8 * half;
        for (int k = 0; k < 4; ++k, y += 32) {
            for (int j = 0; j < 32; ++j) {
                const int nibble = (u8(nibbles, j + 32 * (k % 2)) >> (4 * (k / 2))) & 15;
                const int top = (u8(tops, j) >> (2 * k)) & 3;
                const auto scale = static_cast<float>(load<std::int8_t>(scales + 2 * k + j / 16));
                y[j] = d * scale * static_cast<float>((nibble | top << 4) - 32);
            }
        }
    }
}

void block_f32(const std::byte* b, float* y) {
    *y = load<float>(b);
}

void block_f16(const std::byte* b, float* y) {
    *y = half_at(b);
}

void block_bf16(const std::byte* b, float* y) {
    const std::uint32_t bits = static_cast<std::uint32_t>(load<std::uint16_t>(b)) << 16;
    std::memcpy(y, &bits, sizeof(bits));
}

template <int Elements, int Bytes, void (*Block)(const std::byte*, float*)>
void each_block(const std::byte* src, float* dst, std::int64_t n) {
    for (std::int64_t i = 0; i < n; i += Elements, src += Bytes) {
        Block(src, dst + i);
    }
}

} // namespace

float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x8000U) << 16;
    const std::uint32_t exponent = (bits >> 10) & 31U;
    const std::uint32_t fraction = bits & 1023U;
    if (exponent == 0) {
        // Zero and subnormals are fraction * 2^-24, exact in float.
        const float magnitude = static_cast<float>(fraction) * 0x1p-24F;
        return sign != 0 ? -magnitude : magnitude;
    }
    // Bias 15 becomes 127; all ones (infinity, NaN) stay all ones.
    const std::uint32_t wide = exponent == 31 ? 255U : exponent + 112U;
    const std::uint32_t word = sign | wide << 23 | fraction << 13;
    float value;
    std::memcpy(&value, &word, sizeof(value));
    return value;
}

void dequantize_row(tensor_type type, const std::byte* src, float* dst, std::int64_t n) {
    const tensor_type_info& info = info_of(type);
    if (n < 0 || n % info.block_elements != 0) {
        throw error("row of type " + std::string(info.name),
                    "a multiple of " + std::to_string(info.block_elements) + " numbers", std::to_string(n));
    }
    switch (type) {
    case tensor_type::f32:
        return each_block<1, 4, block_f32>(src, dst, n);
    case tensor_type::f16:
        return each_block<1, 2, block_f16>(src, dst, n);
    case tensor_type::bf16:
        return each_block<1, 2, block_bf16>(src, dst, n);
    case tensor_type::q4_0:
        return each_block<32, 18, block_q4_0>(src, dst, n);
    case tensor_type::q4_1:
        return each_block<32, 20, block_q4_1>(src, dst, n);
    case tensor_type::q5_0:
        return each_block<32, 22, block_q5_0>(src, dst, n);
    case tensor_type::q5_1:
        return each_block<32, 24, block_q5_1>(src, dst, n);
    case tensor_type::q8_0:
        return each_block<32, 34, block_q8_0>(src, dst, n);
    case tensor_type::q4_k:
        return each_block<256, 144, block_q4_k>(src, dst, n);
    case tensor_type::q5_k:
        return each_block<256, 176, block_q5_k>(src, dst, n);
    case tensor_type::q6_k:
        return each_block<256, 210, block_q6_k>(src, dst, n);
    }
    throw error("tensor type", "one of F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K",
                std::string(info.name));
}

} // namespace engine
