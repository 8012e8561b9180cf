// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/gguf_builder.hpp"
#include "oracle/oracle.hpp"

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace engine_test {

/// A llama model of a few thousand random weights, as a GGUF file and as plain numbers.
struct small_model {
    static constexpr int layers = 6;
    static constexpr int hidden = 48;
    static constexpr int heads = 6;
    static constexpr int kv_heads = 2;
    static constexpr int head_dim = 16; // heads * head_dim need not be hidden
    static constexpr int ffn = 80;
    static constexpr float epsilon = 1e-5f;
    static constexpr float rope_base = 10000;

    struct layer {
        std::vector<float> attention_norm, q, k, v, output, ffn_norm, gate, up, down;
    };

    explicit small_model(std::uint64_t seed);

    int vocab = 0;
    std::vector<float> embedding;
    std::vector<float> output_norm;
    std::vector<layer> blocks;
    bytes file; ///< the GGUF

    /// The forward pass once more in double, over the whole prompt at once: stored[l] are the positions whose
    /// keys layer l holds, processed[l] those whose queries, output projection and MLP it runs. A row that a
    /// layer doesn't process keeps its hidden state. The first @p reading_all rows see every position's keys,
    /// whatever is stored: they ran before anything was given up. @return logits [tokens][vocab]; rows
    /// dropped on the way have stale ones
    std::vector<std::vector<double>> logits(const std::vector<std::int32_t>& tokens,
                                            const std::vector<std::vector<int>>& stored,
                                            const std::vector<std::vector<int>>& processed,
                                            int reading_all = 0) const;

    std::vector<std::int32_t> random_tokens(int count, std::uint64_t seed) const;
};

} // namespace engine_test
