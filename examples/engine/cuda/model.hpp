// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/products.hpp"
#include "engine/model_file/gguf.hpp"
#include "engine/model_file/llama_config.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace engine::cuda {

/// One layer of a llama model in device memory. Products that read the same rows are one matrix.
struct layer_weights {
    device_array<float> attention_norm; // [hidden]
    device_array<float> ffn_norm;       // [hidden]
    matrix qkv;                         // [heads * d + 2 * kv_heads * d, hidden]
    matrix output;                      // [hidden, heads * d]
    matrix gate_up;                     // [2 * ffn, hidden]
    matrix down;                        // [hidden, ffn]
};

/// A model in device memory, matrices in bf16. Never changes once made, so sessions may share it.
class cuda_model {
  public:
    /// Dequantises and uploads every tensor; the file isn't needed afterwards. Throws `error` where it isn't
    /// a llama model that the engine runs, or doesn't fit.
    explicit cuda_model(const gguf& file);
    /// Random weights, made on the device, so large that activations keep their size from layer to layer. The
    /// same for the same seed.
    cuda_model(const llama_config& config, std::uint64_t seed);

    const llama_config& config() const { return config_; }
    const std::string& name() const { return name_; }
    const std::vector<layer_weights>& layers() const { return layers_; }
    const device_array<float>& output_norm() const { return output_norm_; }
    /// [vocab, hidden]: rows that tokens become, and the head; one array where the model ties them.
    const matrix& embedding() const { return embedding_; }
    const matrix& head() const { return config_.tied_embeddings ? embedding_ : head_; }
    /// Bytes of the matrices.
    std::size_t bytes() const;

  private:
    llama_config config_;
    std::string name_;
    std::vector<layer_weights> layers_;
    device_array<float> output_norm_;
    matrix embedding_;
    matrix head_;
};

/// Throws `error` where the sizes are none that the CUDA operators work on.
void check_sizes(const llama_config& config);

} // namespace engine::cuda
