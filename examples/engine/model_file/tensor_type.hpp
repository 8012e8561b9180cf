// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <string_view>

namespace engine {

/// Element types of tensors, numbered as in GGUF files (`ggml_type`).
enum class tensor_type : std::uint32_t {
    f32 = 0,
    f16 = 1,
    q4_0 = 2,
    q4_1 = 3,
    q5_0 = 6,
    q5_1 = 7,
    q8_0 = 8,
    q4_k = 12,
    q5_k = 13,
    q6_k = 14,
    bf16 = 30,
};

/// How a type is stored: rows are whole blocks of `block_elements` numbers in `block_bytes` bytes.
struct tensor_type_info {
    std::uint32_t number;
    std::string_view name;
    std::int32_t block_elements;
    std::int32_t block_bytes;
    /// Whether `dequantize_row` knows it. The others are listed so that a file that holds them can be
    /// inspected, and refused by the name of the type.
    bool readable;
};

/// What is known of a type, or nullptr for a number that isn't one.
const tensor_type_info* find_tensor_type(std::uint32_t number);

/// Same for a type that is known to exist.
const tensor_type_info& info_of(tensor_type type);

} // namespace engine
