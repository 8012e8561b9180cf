// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/model.hpp"
#include "engine/cuda/session.hpp"
#include "engine/reading/prompt_reader.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace engine {

/// A model file on the current CUDA device. Sessions are costly to make: that of the reader that ended last
/// serves the next one whose prompt is as long, under another policy.
class cuda_prompt_model final : public prompt_model {
  public:
    explicit cuda_prompt_model(const std::string& path)
        : file_(gguf::open(path))
        , words_(file_)
        , weights_(file_) {}

    const tokenizer& words() const override { return words_; }
    const llama_config& config() const override { return weights_.config(); }
    const std::string& name() const override { return weights_.name(); }
    std::string arithmetic() const override { return "bf16 on a CUDA device"; }
    std::string device() const override;
    std::unique_ptr<prompt_reader> reader_of(const policy& policy, std::int32_t prompt,
                                             std::int32_t following) override;
    const cuda::cuda_model& weights() const { return weights_; }

  private:
    gguf file_;
    tokenizer words_;
    cuda::cuda_model weights_;
    std::unique_ptr<cuda::session> idle_;
};

} // namespace engine
