// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/model.hpp"

#include "engine/cuda/row_kernels.hpp"
#include "engine/model/tensor_rows.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace engine::cuda {

namespace {

matrix upload(const stacked_rows& rows) {
    constexpr std::int64_t piece_rows = 512;
    matrix made;
    made.out = static_cast<std::int32_t>(rows.out());
    made.in = static_cast<std::int32_t>(rows.in());
    made.weights = device_array<bfloat16>(static_cast<std::size_t>(rows.out() * rows.in()));
    std::vector<float> numbers(static_cast<std::size_t>(std::min(piece_rows, rows.out()) * rows.in()));
    std::vector<bfloat16> rounded(numbers.size());
    for (std::int64_t first = 0; first < rows.out(); first += piece_rows) {
        const std::int64_t count = std::min(piece_rows, rows.out() - first);
        const auto elements = static_cast<std::size_t>(count * rows.in());
        rows.read(first, count, numbers.data());
        for (std::size_t i = 0; i < elements; ++i) {
            rounded[i] = uniprefill::from_float<bfloat16>(numbers[i]);
        }
        made.weights.set(rounded.data(), elements, static_cast<std::size_t>(first * rows.in()));
    }
    return made;
}

device_array<float> upload(const std::vector<float>& numbers) {
    device_array<float> made(numbers.size());
    made.set(numbers);
    return made;
}

/// Random matrices and norms of one, each matrix with numbers of its own.
class random_weights {
  public:
    explicit random_weights(std::uint64_t seed)
        : seed_(seed) {}
    matrix of(std::int64_t out, std::int64_t in, double deviation) {
        matrix made;
        made.out = static_cast<std::int32_t>(out);
        made.in = static_cast<std::int32_t>(in);
        made.weights = device_array<bfloat16>(static_cast<std::size_t>(out * in));
        fill_random(made.weights.data(), out * in, seed_ * 65536 + ++matrices_, static_cast<float>(deviation),
                    nullptr);
        return made;
    }
    static device_array<float> ones(std::int32_t count) {
        device_array<float> made(static_cast<std::size_t>(count));
        fill(made.data(), count, 1.0f, nullptr);
        return made;
    }

  private:
    std::uint64_t seed_;
    std::uint64_t matrices_ = 0;
};

} // namespace

void check_sizes(const llama_config& config) {
    const auto need = [](const char* what, std::int32_t came, std::int32_t multiple) {
        if (came % multiple != 0) {
            throw error(std::string("--device cuda, ") + what, "a multiple of " + std::to_string(multiple),
                        std::to_string(came));
        }
    };
    need("hidden size", config.hidden, 8);
    need("FFN size", config.ffn, 8);
    need("rotated dimensions", config.rope_dims, 8);
    if (config.head_dim != 64 && config.head_dim != 128) {
        throw error("--device cuda, head dimension", "64 or 128", std::to_string(config.head_dim));
    }
}

cuda_model::cuda_model(const gguf& file)
    : config_(read_llama_config(file))
    , name_(file.find_string("general.name").value_or("unnamed")) {
    check_sizes(config_);
    output_norm_ = upload(vector_of(tensor_of(file, "output_norm.weight")));
    embedding_ = upload(stacked_rows({&tensor_of(file, "token_embd.weight")}));
    if (!config_.tied_embeddings) head_ = upload(stacked_rows({&tensor_of(file, "output.weight")}));
    for (std::int32_t l = 0; l < config_.layers; ++l) {
        const std::string block = "blk." + std::to_string(l) + ".";
        const auto part = [&](const char* name) { return &tensor_of(file, block + name + ".weight"); };
        layer_weights layer;
        layer.attention_norm = upload(vector_of(*part("attn_norm")));
        layer.ffn_norm = upload(vector_of(*part("ffn_norm")));
        layer.qkv = upload(stacked_rows({part("attn_q"), part("attn_k"), part("attn_v")}));
        layer.output = upload(stacked_rows({part("attn_output")}));
        layer.gate_up = upload(stacked_rows({part("ffn_gate"), part("ffn_up")}));
        layer.down = upload(stacked_rows({part("ffn_down")}));
        layers_.push_back(std::move(layer));
    }
}

cuda_model::cuda_model(const llama_config& config, std::uint64_t seed)
    : config_(config)
    , name_("random weights") {
    check_sizes(config_);
    random_weights random(seed);
    const double hidden = config.hidden;
    const std::int64_t q = std::int64_t{config.heads} * config.head_dim;
    const std::int64_t kv = std::int64_t{config.kv_heads} * config.head_dim;
    // What each layer adds to the residual stream is small beside it, as in trained models: after all layers
    // it has grown by a constant.
    const double residual = 1 / std::sqrt(2.0 * config.layers);
    output_norm_ = random_weights::ones(config.hidden);
    embedding_ = random.of(config.vocab, config.hidden, 1);
    if (!config_.tied_embeddings) head_ = random.of(config.vocab, config.hidden, 1 / std::sqrt(hidden));
    for (std::int32_t l = 0; l < config.layers; ++l) {
        layer_weights layer;
        layer.attention_norm = random_weights::ones(config.hidden);
        layer.ffn_norm = random_weights::ones(config.hidden);
        layer.qkv = random.of(q + 2 * kv, config.hidden, 1 / std::sqrt(hidden));
        layer.output = random.of(config.hidden, q, residual / std::sqrt(static_cast<double>(q)));
        layer.gate_up = random.of(2 * std::int64_t{config.ffn}, config.hidden, 1 / std::sqrt(hidden));
        layer.down =
            random.of(config.hidden, config.ffn, residual / std::sqrt(static_cast<double>(config.ffn)));
        layers_.push_back(std::move(layer));
    }
    check(cudaDeviceSynchronize(), "random weights");
}

std::size_t cuda_model::bytes() const {
    std::size_t total = embedding_.weights.bytes() + head_.weights.bytes();
    for (const layer_weights& layer : layers_) {
        total += layer.qkv.weights.bytes() + layer.output.weights.bytes() + layer.gate_up.weights.bytes() +
                 layer.down.weights.bytes();
    }
    return total;
}

} // namespace engine::cuda
