// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/weights.hpp"

#include "engine/error.hpp"
#include "engine/model/tensor_rows.hpp"

#include <utility>

namespace engine {

namespace {

template <class Matrix, class Arithmetic>
Matrix stack(std::vector<const tensor_info*> parts, Arithmetic kind) {
    const stacked_rows rows(std::move(parts));
    return Matrix(static_cast<int>(rows.out()), static_cast<int>(rows.in()), kind,
                  [&rows](int first, int count, float* to) { rows.read(first, count, to); });
}

} // namespace

template <class Ops>
basic_weights<Ops>::basic_weights(const gguf& file, typename Ops::arithmetic kind)
    : config_(read_llama_config(file))
    , name_(file.find_string("general.name").value_or("unnamed"))
    , embedding_(&tensor_of(file, "token_embd.weight"))
    , output_norm_(vector_of(tensor_of(file, "output_norm.weight"))) {
    using matrix = typename Ops::matrix;
    for (std::int32_t l = 0; l < config_.layers; ++l) {
        const std::string block = "blk." + std::to_string(l) + ".";
        const auto part = [&](const char* name) { return &tensor_of(file, block + name + ".weight"); };
        layer_weights<Ops> layer;
        layer.attention_norm = vector_of(*part("attn_norm"));
        layer.ffn_norm = vector_of(*part("ffn_norm"));
        layer.qkv = stack<matrix>({part("attn_q"), part("attn_k"), part("attn_v")}, kind);
        layer.output = stack<matrix>({part("attn_output")}, kind);
        layer.gate_up = stack<matrix>({part("ffn_gate"), part("ffn_up")}, kind);
        layer.down = stack<matrix>({part("ffn_down")}, kind);
        layers_.push_back(std::move(layer));
    }
    head_ = stack<matrix>({config_.tied_embeddings ? embedding_ : &tensor_of(file, "output.weight")}, kind);
}

template <class Ops>
std::size_t basic_weights<Ops>::bytes() const {
    std::size_t total = head_.bytes();
    for (const auto& layer : layers_) {
        total += layer.qkv.bytes() + layer.output.bytes() + layer.gate_up.bytes() + layer.down.bytes();
    }
    return total;
}

template <class Ops>
void basic_weights<Ops>::embed(const std::vector<std::int32_t>& tokens, float* out) const {
    for (const std::int32_t token : tokens) {
        if (token < 0 || token >= config_.vocab) {
            throw error("token id", "0.." + std::to_string(config_.vocab - 1), std::to_string(token));
        }
    }
    for (const std::int32_t token : tokens) {
        dequantize_rows(*embedding_, token, 1, out);
        out += config_.hidden;
    }
}

template class basic_weights<cpu_ops>;

} // namespace engine
