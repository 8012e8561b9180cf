// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_samples.hpp"

#include "engine/model_file/byte_alphabet.hpp"

#include <algorithm>

namespace engine_test {

using engine::value_type;

namespace {

bool contains(const std::vector<std::string>& names, std::string_view name) {
    return std::find(names.begin(), names.end(), name) != names.end();
}

} // namespace

bytes sample_data(std::size_t size) {
    bytes out(size);
    std::uint32_t state = 12345;
    for (std::byte& byte : out) {
        state = state * 1664525U + 1013904223U;
        byte = static_cast<std::byte>((state >> 24) & 0x3FU);
    }
    return out;
}

std::vector<std::string> sample_merges() {
    const std::string space = engine::spelling_of(' ');
    return {"t h",
            "th e",
            space + " the",
            "c a",
            "ca t",
            space + " " + space,
            space + space + " " + space + space,
            "a t",
            "h e"};
}

std::vector<std::string> sample_tokens(bool all_bytes) {
    std::vector<std::string> tokens = {"<|a|>", "<|ab|>", "<tool>"};
    for (unsigned byte = 0; byte < 256; ++byte) {
        const auto letter = static_cast<unsigned char>(byte);
        if (all_bytes ||
            std::string_view(" theca1").find(static_cast<char>(letter)) != std::string_view::npos) {
            tokens.push_back(engine::spelling_of(letter));
        }
    }
    for (std::string merged : sample_merges()) {
        merged.erase(merged.find(' '), 1);
        tokens.push_back(merged);
    }
    return tokens;
}

void add_llama_sizes(gguf_builder& file, const llama_sizes& sizes) {
    file.add_string("general.architecture", "llama");
    file.add_string("general.name", sizes.name);
    file.add_u32("llama.block_count", sizes.layers);
    file.add_u32("llama.context_length", sizes.context);
    file.add_u32("llama.embedding_length", sizes.hidden);
    file.add_u32("llama.feed_forward_length", sizes.ffn);
    file.add_u32("llama.attention.head_count", sizes.heads);
    file.add_u32("llama.attention.head_count_kv", sizes.kv_heads);
    file.add_u32("llama.attention.key_length", sizes.head_dim);
    file.add_u32("llama.attention.value_length", sizes.head_dim);
    file.add_u32("llama.rope.dimension_count", sizes.head_dim);
    file.add_f32("llama.rope.freq_base", sizes.rope_base);
    file.add_f32("llama.attention.layer_norm_rms_epsilon", sizes.epsilon);
}

void add_sample_tokenizer(gguf_builder& file, const std::string& pretokenizer, bool all_bytes,
                          const std::vector<std::string>& without) {
    const std::vector<std::string> tokens = sample_tokens(all_bytes);
    std::vector<std::int32_t> kinds(tokens.size(), 1);
    kinds[0] = kinds[1] = 3;
    kinds[2] = 4;
    const auto wanted = [&](const char* key) { return !contains(without, key); };
    if (wanted("tokenizer.ggml.model")) file.add_string("tokenizer.ggml.model", "gpt2");
    if (wanted("tokenizer.ggml.pre")) file.add_string("tokenizer.ggml.pre", pretokenizer);
    if (wanted("tokenizer.ggml.tokens")) file.add_strings("tokenizer.ggml.tokens", tokens);
    if (wanted("tokenizer.ggml.token_type")) file.add_i32s("tokenizer.ggml.token_type", kinds);
    if (wanted("tokenizer.ggml.merges")) file.add_strings("tokenizer.ggml.merges", sample_merges());
    if (wanted("tokenizer.ggml.bos_token_id")) file.add_u32("tokenizer.ggml.bos_token_id", 0);
    if (wanted("tokenizer.ggml.eos_token_id")) file.add_u32("tokenizer.ggml.eos_token_id", 1);
}

gguf_builder sample_model::builder() const {
    const std::uint32_t head_dim = hidden / heads;
    const std::uint32_t ffn = hidden;
    gguf_builder file(version, alignment);
    const auto wanted = [&](const std::string& name) { return !contains(without, name); };
    const auto add_u32 = [&](const std::string& key, std::uint32_t value) {
        if (wanted(key)) file.add_u32(key, value);
    };
    if (wanted("general.architecture")) file.add_string("general.architecture", "llama");
    add_u32("llama.block_count", layers);
    add_u32("llama.context_length", 128);
    add_u32("llama.embedding_length", hidden);
    add_u32("llama.feed_forward_length", ffn);
    add_u32("llama.attention.head_count", heads);
    add_u32("llama.attention.head_count_kv", kv_heads);
    add_u32("llama.rope.dimension_count", head_dim);
    if (wanted("llama.rope.freq_base")) file.add_f32("llama.rope.freq_base", 10000.0F);
    if (wanted("llama.attention.layer_norm_rms_epsilon")) {
        file.add_f32("llama.attention.layer_norm_rms_epsilon", 1e-5F);
    }
    add_sample_tokenizer(file, pretokenizer, all_bytes, without);

    const auto add_tensor = [&](const std::string& name, engine::tensor_type kind,
                                std::vector<std::uint64_t> shape) {
        if (!wanted(name)) return;
        const engine::tensor_type_info& info = engine::info_of(kind);
        std::uint64_t elements = 1;
        for (std::uint64_t size : shape) {
            elements *= size;
        }
        file.add_tensor(name, info.number, shape,
                        sample_data(elements / static_cast<std::uint64_t>(info.block_elements) *
                                    static_cast<std::uint64_t>(info.block_bytes)));
    };
    const std::uint64_t vocab = sample_tokens(all_bytes).size();
    const std::uint64_t keys = std::uint64_t{kv_heads} * head_dim;
    add_tensor("token_embd.weight", type, {hidden, vocab});
    add_tensor("output_norm.weight", engine::tensor_type::f32, {hidden});
    if (!tied) add_tensor("output.weight", type, {hidden, vocab});
    for (std::uint32_t layer = 0; layer < layers; ++layer) {
        const std::string block = "blk." + std::to_string(layer) + ".";
        add_tensor(block + "attn_norm.weight", engine::tensor_type::f32, {hidden});
        add_tensor(block + "attn_q.weight", type, {hidden, hidden});
        add_tensor(block + "attn_k.weight", type, {hidden, keys});
        add_tensor(block + "attn_v.weight", type, {hidden, keys});
        add_tensor(block + "attn_output.weight", type, {hidden, hidden});
        add_tensor(block + "ffn_norm.weight", engine::tensor_type::f32, {hidden});
        add_tensor(block + "ffn_gate.weight", type, {hidden, ffn});
        add_tensor(block + "ffn_up.weight", type, {hidden, ffn});
        add_tensor(block + "ffn_down.weight", type, {ffn, hidden});
    }
    return file;
}

gguf_builder sample_of_every_value() {
    gguf_builder file(3, 64);
    const bytes values = sample_data(64);
    const std::vector<std::uint8_t> flags = {0, 1, 1, 0};
    for (std::uint32_t number = 0; number <= 12; ++number) {
        const auto type = static_cast<value_type>(number);
        if (engine::size_of(type) == 0) continue;
        const bool is_bool = type == value_type::boolean;
        const void* const from = is_bool ? static_cast<const void*>(flags.data()) : values.data();
        const std::string name(engine::name_of(type));
        file.add_scalar("one." + name, type, from);
        file.add_numbers("several." + name, type, from, is_bool ? 4 : 5);
        file.add_numbers("no." + name, type, from, 0);
    }
    file.add_string("one.string", "line one\nline two \x1b[31m");
    file.add_string("one.empty_string", "");
    file.add_strings("several.string", {"a", "", "ccc", "\xff\xfe"});
    file.add_strings("no.string", {});
    file.add_tensor("rank1", 0, {3}, sample_data(12));
    file.add_tensor("rank2", 1, {3, 2}, sample_data(12));
    file.add_tensor("rank3", 2, {32, 2, 2}, sample_data(72));
    file.add_tensor("rank4", 14, {256, 1, 2, 1}, sample_data(420));
    file.add_tensor("unreadable", 10, {256}, sample_data(84));
    return file;
}

} // namespace engine_test
