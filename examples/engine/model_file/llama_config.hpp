// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/gguf.hpp"

#include <cstdint>
#include <string>

namespace engine {

/// Hyperparameters of a `llama` model, read from its metadata and checked: sizes are positive and bounded,
/// heads divide into KV heads, `rope_dims` is even and at most `head_dim`.
struct llama_config {
    std::int32_t layers;
    std::int32_t hidden;
    std::int32_t ffn;
    std::int32_t heads;
    std::int32_t kv_heads;
    std::int32_t head_dim;
    std::int32_t context; ///< tokens the model was trained for
    std::int32_t vocab;
    std::int32_t rope_dims;
    float rope_base;
    float rms_epsilon;
    bool tied_embeddings; ///< no `output.weight`: the head is `token_embd.weight`
};

/// Reads and checks. Throws `error` naming the key or tensor if the architecture isn't `llama`, a value is
/// missing or out of bounds, the model wants arithmetic that this engine doesn't have (rope scaling, experts,
/// biases, ...), or a tensor is missing, of another shape, of a type that can't be read, or unknown.
llama_config read_llama_config(const gguf& file);

} // namespace engine
