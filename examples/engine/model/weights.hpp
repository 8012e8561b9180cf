// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/cpu_ops.hpp"
#include "engine/model_file/gguf.hpp"
#include "engine/model_file/llama_config.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine {

/// One layer of a llama model. Products that read the same rows are one matrix.
template <class Ops>
struct layer_weights {
    std::vector<float> attention_norm; // [hidden]
    std::vector<float> ffn_norm;       // [hidden]
    typename Ops::matrix qkv;          // [heads * d + 2 * kv_heads * d, hidden]
    typename Ops::matrix output;       // [hidden, heads * d]
    typename Ops::matrix gate_up;      // [2 * ffn, hidden]
    typename Ops::matrix down;         // [hidden, ffn]
};

/// A model packed for an ops backend. Never changes once loaded, so sessions may share it.
template <class Ops>
class basic_weights {
  public:
    /// Reads and packs every tensor; `file` must outlive the weights, since embeddings are read from it.
    /// Throws `error` where the file isn't a llama model that the engine runs.
    basic_weights(const gguf& file, typename Ops::arithmetic kind);

    const llama_config& config() const { return config_; }
    const std::string& name() const { return name_; }
    const std::vector<layer_weights<Ops>>& layers() const { return layers_; }
    const std::vector<float>& output_norm() const { return output_norm_; }
    const typename Ops::matrix& head() const { return head_; }
    /// Bytes of the packed matrices.
    std::size_t bytes() const;

    /// Writes the embeddings of `tokens`, dense [tokens, hidden]. Throws `error` on an id outside the
    /// vocabulary.
    void embed(const std::vector<std::int32_t>& tokens, float* out) const;

  private:
    llama_config config_;
    std::string name_;
    const tensor_info* embedding_;
    std::vector<layer_weights<Ops>> layers_;
    std::vector<float> output_norm_;
    typename Ops::matrix head_;
};

using cpu_weights = basic_weights<cpu_ops>;

} // namespace engine
