// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/gguf_builder.hpp"

#include <cstdint>
#include <string>

namespace engine_test {

/// A llama model of random weights with heads of 64 dimensions, as device kernels want them. Every weight is
/// a bf16 number, so that engines that keep weights so start from the same ones.
struct wide_model {
    static constexpr int layers = 4;
    static constexpr int hidden = 128;
    static constexpr int heads = 4;
    static constexpr int kv_heads = 2;
    static constexpr int head_dim = 64;
    static constexpr int ffn = 256;

    explicit wide_model(std::uint64_t seed);

    int vocab = 0;
    bytes file; ///< the GGUF
};

/// Writes @p file where temporary files go. @return its path
std::string written(const bytes& file, const std::string& name);

} // namespace engine_test
