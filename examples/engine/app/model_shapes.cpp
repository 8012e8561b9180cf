// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/app/model_shapes.hpp"

#include "engine/error.hpp"

namespace engine {

namespace {

struct named_shape {
    const char* name;
    llama_config config;
};

// layers, hidden, ffn, heads, KV heads, head dimension, context, vocabulary, rotated dimensions, RoPE base,
// epsilon, tied embeddings: as the models' published configurations have them. Contexts are what a synthetic
// run may ask for, not what a model was trained for.
constexpr std::int32_t any_context = 1 << 21;
constexpr named_shape shapes[] = {
    {"llama3-8b", {32, 4096, 14336, 32, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, false}},
    {"llama3-70b", {80, 8192, 28672, 64, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, false}},
    {"llama3.2-1b", {16, 2048, 8192, 32, 8, 64, any_context, 128256, 64, 500000.0f, 1e-5f, true}},
    {"llama3.2-3b", {28, 3072, 8192, 24, 8, 128, any_context, 128256, 128, 500000.0f, 1e-5f, true}},
    {"mistral-7b", {32, 4096, 14336, 32, 8, 128, any_context, 32768, 128, 1000000.0f, 1e-5f, false}},
    {"smollm2-135m", {30, 576, 1536, 9, 3, 64, any_context, 49152, 64, 100000.0f, 1e-5f, true}},
};

} // namespace

llama_config model_shape(const std::string& option, const std::string& name) {
    for (const named_shape& one : shapes) {
        if (name == one.name) return one.config;
    }
    throw error(option, model_shape_names(), quoted(name));
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
