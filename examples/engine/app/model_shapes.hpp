// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/llama_config.hpp"

#include <cstdint>
#include <string>

namespace engine {

/// What mixes rows in a layer.
enum class layer_kind {
    full,   ///< attention over all positions before
    window, ///< attention over the last positions
    linear, ///< the gated delta rule, behind a short convolution
};

/// What the layers of a hybrid do that a llama's don't; a llama's is what this is without being told.
struct layer_pattern {
    std::int32_t period = 1;              ///< the last layer of each period has full attention
    layer_kind others = layer_kind::full; ///< and the ones before it are these
    std::int32_t window = 0;              ///< positions that window layers see
    float window_rope_base = 0;
    std::int32_t linear_k_heads = 0; ///< of linear layers; their heads have 128 dimensions
    std::int32_t linear_v_heads = 0;
    bool head_norms = false;  ///< q and k are normalised head by head
    bool output_gate = false; ///< what full attention returns is multiplied by sigmoid(W x)
    bool post_norms = false;  ///< what attention and FFN return is normalised before it is added
    bool gelu = false;        ///< the FFN's gate is GELU(x), not SiLU(x)

    layer_kind kind(std::int32_t layer) const {
        return (layer + 1) % period == 0 ? layer_kind::full : others;
    }
    bool has(layer_kind wanted) const {
        return wanted == layer_kind::full || (period > 1 && others == wanted);
    }
};

/// The sizes of a well-known model, for runs on random weights. Throws `error`, naming @p option, where the
/// name isn't one of model_shape_names().
llama_config model_shape(const std::string& option, const std::string& name);
/// The same model's layers.
layer_pattern model_pattern(const std::string& option, const std::string& name);

/// "llama3-8b, llama3.2-1b, ...": what model_shape() knows.
std::string model_shape_names();

} // namespace engine
