// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/model_shapes.hpp"

#include "engine/error.hpp"

namespace engine {

namespace {

struct named_shape {
    const char* name;
    llama_config config;
    layer_pattern pattern;
};

/// Qwen3-Next's layers: three of the gated delta rule, then one of gated full attention.
constexpr layer_pattern linear_and_full() {
    layer_pattern pattern;
    pattern.period = 4;
    pattern.others = layer_kind::linear;
    pattern.linear_k_heads = 16;
    pattern.linear_v_heads = 32;
    pattern.head_norms = true;
    pattern.output_gate = true;
    return pattern;
}

/// Gemma 3's: five that see 1024 positions, then one that sees all.
constexpr layer_pattern window_and_full() {
    layer_pattern pattern;
    pattern.period = 6;
    pattern.others = layer_kind::window;
    pattern.window = 1024;
    pattern.window_rope_base = 10000.0f;
    pattern.head_norms = true;
    pattern.post_norms = true;
    pattern.gelu = true;
    return pattern;
}

// layers, hidden, ffn, heads, KV heads, head dimension, context, vocabulary, rotated dimensions, RoPE base,
// epsilon, tied embeddings: as the models' published configurations have them. Contexts are what a synthetic
// run may ask for, not what a model was trained for.
constexpr std::int32_t any_context = 1 << 21;
constexpr named_shape shapes[] = {
    {"llama3-8b", {32, 4096, 14336, 32, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, false}, {}},
    {"llama3-70b", {80, 8192, 28672, 64, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, false}, {}},
    {"llama3.2-1b", {16, 2048, 8192, 32, 8, 64, any_context, 128256, 64, 500000.0f, 1e-5f, true}, {}},
    {"llama3.2-3b", {28, 3072, 8192, 24, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, true}, {}},
    {"mistral-7b", {32, 4096, 14336, 32, 8, 128, any_context, 32768, 128, 1000000.0f, 1e-5f, false}, {}},
    {"smollm2-135m", {30, 576, 1536, 9, 3, 64, any_context, 49152, 64, 100000.0f, 1e-5f, true}, {}},
    // Like Qwen3-Next-80B-A3B, but that its experts are one dense FFN of the width that a token activates,
    // ten chosen experts and a shared one of 512 each: what a token costs without the routing.
    {"qwen3-next-like",
     {48, 2048, 11 * 512, 16, 2, 256, any_context, 151936, 64, 10000000.0f, 1e-6f, false},
     linear_and_full()},
    // Like Gemma-3-12B's language model, but that RoPE's positions aren't scaled in full layers.
    {"gemma3-12b-like",
     {48, 3840, 15360, 16, 8, 256, any_context, 262208, 256, 1000000.0f, 1e-6f, true},
     window_and_full()},
};

const named_shape& shape_named(const std::string& option, const std::string& name) {
    for (const named_shape& one : shapes) {
        if (name == one.name) return one;
    }
    throw error(option, model_shape_names(), quoted(name));
}

} // namespace

llama_config model_shape(const std::string& option, const std::string& name) {
    return shape_named(option, name).config;
}

layer_pattern model_pattern(const std::string& option, const std::string& name) {
    return shape_named(option, name).pattern;
}

std::string model_shape_names() {
    std::string all;
    for (const named_shape& one : shapes) {
        all += all.empty() ? "" : ", ";
        all += one.name;
    }
    return all;
}

} // namespace engine
