// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/model_shapes.hpp"
#include "engine/cuda/products.hpp"
#include "engine/model_file/gguf.hpp"
#include "engine/model_file/llama_config.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace engine::cuda {

/// What a layer of the gated delta rule has instead of attention.
struct linear_weights {
    matrix in;                       // [q | k | v | gate | b | a, hidden]
    device_array<float> convolution; // [4, channels of q, k and v]
    device_array<float> rate;        // [v_heads]
    device_array<float> bias;        // [v_heads]
    device_array<float> norm;        // [128]
};

/// One layer in device memory. Products that read the same rows are one matrix. What the model doesn't have
/// is empty.
struct layer_weights {
    device_array<float> attention_norm;                     // [hidden]
    device_array<float> ffn_norm;                           // [hidden]
    device_array<float> attention_post_norm, ffn_post_norm; // [hidden]
    device_array<float> q_norm, k_norm;                     // [d]
    matrix qkv;                                             // [heads * d + 2 * kv_heads * d, hidden]
    matrix output_gate;                                     // [heads * d, hidden]
    linear_weights linear;
    matrix output;  // [hidden, heads * d], or of the linear layer's heads
    matrix gate_up; // [2 * ffn, hidden]
    matrix down;    // [hidden, ffn]
};

/// A model in device memory, matrices in bf16. Never changes once made, so sessions may share it.
class cuda_model {
  public:
    /// Dequantises and uploads every tensor; the file isn't needed afterwards. Throws `error` where it isn't
    /// a llama model that the engine runs, or doesn't fit.
    explicit cuda_model(const gguf& file);
    /// Random weights, made on the device, so large that activations keep their size from layer to layer. The
    /// same for the same seed.
    cuda_model(const llama_config& config, std::uint64_t seed, const layer_pattern& pattern = {});

    const llama_config& config() const { return config_; }
    /// What its layers are; all the same in a llama.
    const layer_pattern& pattern() const { return pattern_; }
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
    layer_pattern pattern_;
    std::string name_;
    std::vector<layer_weights> layers_;
    device_array<float> output_norm_;
    matrix embedding_;
    matrix head_;
};

/// Throws `error` where the sizes are none that the CUDA operators work on.
void check_sizes(const llama_config& config, const layer_pattern& pattern = {});

} // namespace engine::cuda
