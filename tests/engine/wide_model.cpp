// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/wide_model.hpp"

#include "engine/gguf_samples.hpp"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <random>
#include <stdexcept>
#include <vector>

namespace engine_test {

wide_model::wide_model(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    gguf_builder made;
    const auto tensor = [&](const std::string& name, int rows, int columns, float scale, float mean = 0) {
        std::vector<float> values(static_cast<std::size_t>(rows) * static_cast<std::size_t>(columns));
        for (float& value : values) {
            // Multiples of 1/128 in (-1, 1), and powers of two beside them: seven bits of mantissa.
            const auto step = static_cast<std::int32_t>(random() % 255) - 127;
            value = mean + scale * static_cast<float>(step) / 128.0f;
        }
        bytes data(values.size() * sizeof(float));
        std::memcpy(data.data(), values.data(), data.size());
        std::vector<std::uint64_t> shape{static_cast<std::uint64_t>(columns)};
        if (rows > 1) shape.push_back(static_cast<std::uint64_t>(rows));
        made.add_tensor(name, 0, shape, data);
    };
    vocab = static_cast<int>(sample_tokens(true).size());
    add_llama_sizes(made, {"wide", layers, 8192, hidden, ffn, heads, kv_heads, head_dim, 10000.0f, 1e-5f});
    add_sample_tokenizer(made, "smollm", true);
    tensor("token_embd.weight", vocab, hidden, 1);
    tensor("output_norm.weight", 1, hidden, 0.25f, 1);
    for (int l = 0; l < layers; ++l) {
        const std::string block = "blk." + std::to_string(l) + ".";
        tensor(block + "attn_norm.weight", 1, hidden, 0.25f, 1);
        // Large enough queries and keys that attention is neither flat nor one-hot.
        tensor(block + "attn_q.weight", heads * head_dim, hidden, 0.25f);
        tensor(block + "attn_k.weight", kv_heads * head_dim, hidden, 0.25f);
        tensor(block + "attn_v.weight", kv_heads * head_dim, hidden, 0.125f);
        tensor(block + "attn_output.weight", hidden, heads * head_dim, 0.125f);
        tensor(block + "ffn_norm.weight", 1, hidden, 0.25f, 1);
        tensor(block + "ffn_gate.weight", ffn, hidden, 0.125f);
        tensor(block + "ffn_up.weight", ffn, hidden, 0.125f);
        tensor(block + "ffn_down.weight", hidden, ffn, 0.125f);
    }
    file = made.build();
}

std::string written(const bytes& file, const std::string& name) {
    const std::string path = (std::filesystem::temp_directory_path() / ("uniprefill-test-" + name)).string();
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(file.data()), static_cast<std::streamsize>(file.size()));
    if (!out.flush()) throw std::runtime_error(path + " can't be written");
    return path;
}

} // namespace engine_test
