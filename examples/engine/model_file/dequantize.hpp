// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/tensor_type.hpp"

#include <cstddef>
#include <cstdint>

namespace engine {

/// Writes the `n` numbers stored at `src` (any alignment) to `dst` as float.
/// `n` must be a multiple of the type's block, else `error`; so is a type that isn't readable.
/// The caller has checked that `n / block_elements * block_bytes` bytes lie at `src`.
void dequantize_row(tensor_type type, const std::byte* src, float* dst, std::int64_t n);

/// IEEE 754 binary16 to float, exact, subnormals, infinities and NaN included.
float half_to_float(std::uint16_t bits);

} // namespace engine
