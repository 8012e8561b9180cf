// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/weights.hpp"

#include "engine/error.hpp"
#include "engine/model_file/dequantize.hpp"

#include <algorithm>
#include <initializer_list>
#include <utility>

namespace engine {

namespace {

const tensor_info& tensor(const gguf& file, const std::string& name) {
    const tensor_info* found = file.find_tensor(name);
    if (found == nullptr) throw error("tensor " + quoted(name), "one in the file", "none");
    return *found;
}

void dequantize_rows(const tensor_info& from, std::int64_t first, std::int64_t count, float* to) {
    for (std::int64_t row = first; row < first + count; ++row) {
        dequantize_row(static_cast<tensor_type>(from.type->number),
                       from.data + static_cast<std::uint64_t>(row) * from.row_bytes(), to, from.shape[0]);
        to += from.shape[0];
    }
}

std::vector<float> vector_of(const tensor_info& from) {
    std::vector<float> values(static_cast<std::size_t>(from.elements()));
    dequantize_rows(from, 0, from.rows(), values.data());
    return values;
}

/// The rows of several tensors, one after another, as one matrix.
template <class Matrix, class Arithmetic>
Matrix stack(std::initializer_list<const tensor_info*> parts, Arithmetic kind) {
    std::int64_t out = 0;
    for (const tensor_info* part : parts) {
        out += part->rows();
    }
    const auto rows = [&parts](int first, int count, float* to) {
        std::int64_t begin = 0;
        for (const tensor_info* part : parts) {
            const std::int64_t end = begin + part->rows();
            const std::int64_t from = std::max<std::int64_t>(first, begin);
            const std::int64_t until = std::min<std::int64_t>(first + count, end);
            if (from < until) {
                dequantize_rows(*part, from - begin, until - from, to + (from - first) * part->shape[0]);
            }
            begin = end;
        }
    };
    return Matrix(static_cast<int>(out), static_cast<int>((*parts.begin())->shape[0]), kind, rows);
}

} // namespace

template <class Ops>
basic_weights<Ops>::basic_weights(const gguf& file, typename Ops::arithmetic kind)
    : config_(read_llama_config(file))
    , name_(file.find_string("general.name").value_or("unnamed"))
    , embedding_(&tensor(file, "token_embd.weight"))
    , output_norm_(vector_of(tensor(file, "output_norm.weight"))) {
    using matrix = typename Ops::matrix;
    for (std::int32_t l = 0; l < config_.layers; ++l) {
        const std::string block = "blk." + std::to_string(l) + ".";
        const auto part = [&](const char* name) { return &tensor(file, block + name + ".weight"); };
        layer_weights<Ops> layer;
        layer.attention_norm = vector_of(*part("attn_norm"));
        layer.ffn_norm = vector_of(*part("ffn_norm"));
        layer.qkv = stack<matrix>({part("attn_q"), part("attn_k"), part("attn_v")}, kind);
        layer.output = stack<matrix>({part("attn_output")}, kind);
        layer.gate_up = stack<matrix>({part("ffn_gate"), part("ffn_up")}, kind);
        layer.down = stack<matrix>({part("ffn_down")}, kind);
        layers_.push_back(std::move(layer));
    }
    head_ = stack<matrix>({config_.tied_embeddings ? embedding_ : &tensor(file, "output.weight")}, kind);
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
