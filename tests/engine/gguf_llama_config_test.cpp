// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_refusal.hpp"
#include "engine/gguf_samples.hpp"
#include "engine/model_file/llama_config.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <functional>
#include <string>

using namespace engine;
using namespace engine_test;

namespace {

llama_config read(const bytes& file) {
    return read_llama_config(gguf(span_of(file)));
}

/// A sound model whose `key` is left out and written otherwise.
template <class Add>
bytes with(const std::string& key, Add add) {
    sample_model model;
    model.without = {key};
    gguf_builder builder = model.builder();
    add(builder);
    return builder.build();
}

bytes with_u32(const std::string& key, std::uint32_t value) {
    return with(key, [&](gguf_builder& b) { b.add_u32(key, value); });
}

bytes with_f32(const std::string& key, float value) {
    return with(key, [&](gguf_builder& b) { b.add_f32(key, value); });
}

bytes with_string(const std::string& key, const std::string& value) {
    return with(key, [&](gguf_builder& b) { b.add_string(key, value); });
}

} // namespace

TEST_CASE("a sound model of every type") {
    for (std::uint32_t number : {0U, 1U, 30U, 2U, 3U, 6U, 7U, 8U, 12U, 13U, 14U}) {
        sample_model model;
        model.type = static_cast<tensor_type>(number);
        model.hidden = 256;
        model.layers = 2;
        model.tied = number % 2 == 0;
        const llama_config config = read(model.builder().build());
        CHECK(config.layers == 2);
        CHECK(config.hidden == 256);
        CHECK(config.ffn == 256);
        CHECK(config.heads == 2);
        CHECK(config.kv_heads == 1);
        CHECK(config.head_dim == 128);
        CHECK(config.rope_dims == 128);
        CHECK(config.context == 128);
        CHECK(config.rope_base == 10000.0F);
        CHECK(config.rms_epsilon == 1e-5F);
        CHECK(config.vocab == static_cast<std::int32_t>(sample_tokens(false).size()));
        CHECK(config.tied_embeddings == model.tied);
    }
}

TEST_CASE("values that may be missing") {
    sample_model model;
    model.kv_heads = 2;
    model.without = {"llama.attention.head_count_kv", "llama.rope.dimension_count", "llama.rope.freq_base"};
    gguf_builder builder = model.builder();
    builder.add_string("llama.rope.scaling.type", "none");
    builder.add_u32("llama.expert_count", 0);
    builder.add_bool("llama.attention.causal", true);
    const llama_config config = read(builder.build());
    CHECK(config.kv_heads == 2);
    CHECK(config.rope_dims == 16);
    CHECK(config.rope_base == 10000.0F);
}

TEST_CASE("a head dimension of its own") {
    // Heads of 16 as the tensors are, said by key_length.
    CHECK(read(with_u32("llama.attention.key_length", 16)).head_dim == 16);
    CHECK_REFUSES(read(with_u32("llama.attention.key_length", 8)), "key 'llama.rope.dimension_count'",
                  "1 to 8");
    CHECK_REFUSES(read(with_u32("llama.attention.key_length", 18)), "tensor 'blk.0.attn_q.weight'",
                  "[32, 36]");
    CHECK_REFUSES(read(with_u32("llama.attention.key_length", 257)), "key 'llama.attention.key_length'",
                  "257");
    CHECK_REFUSES(read(with_u32("llama.attention.value_length", 8)), "key 'llama.attention.value_length'",
                  "came 8");
}

TEST_CASE("another architecture, other arithmetic") {
    CHECK_REFUSES(read(with_string("general.architecture", "qwen2")), "key 'general.architecture'",
                  "'qwen2'");
    CHECK_REFUSES(read(with("general.architecture", [](gguf_builder&) {})), "key 'general.architecture'",
                  "none");
    for (const char* const type : {"linear", "yarn", "longrope"}) {
        CHECK_REFUSES(read(with_string("llama.rope.scaling.type", type)), "key 'llama.rope.scaling.type'",
                      "'" + std::string(type) + "'");
    }
    CHECK_REFUSES(read(with_f32("llama.rope.scaling.factor", 4)), "key 'llama.rope.scaling.factor'",
                  "came 4");
    CHECK_REFUSES(read(with_f32("llama.rope.scale_linear", 2)), "key 'llama.rope.scale_linear'", "came 2");
    CHECK_REFUSES(read(with_u32("llama.expert_count", 8)), "key 'llama.expert_count'", "came 8");
    CHECK_REFUSES(read(with_f32("llama.logit_scale", 0.5F)), "key 'llama.logit_scale'", "came 0.5");
    CHECK_REFUSES(read(with("", [](gguf_builder& b) { b.add_bool("llama.attention.causal", false); })),
                  "key 'llama.attention.causal'", "false");
    for (const char* const extra : {"rope_freqs.weight", "blk.0.attn_q.bias", "blk.1.attn_q.weight", "x"}) {
        const bytes file = with("", [&](gguf_builder& b) { b.add_tensor(extra, 0, {32}, bytes(128)); });
        CHECK_REFUSES(read(file), "tensor '" + std::string(extra) + "'", "plain llama");
    }
}

TEST_CASE("sizes out of bounds") {
    struct wrong {
        const char* key;
        std::vector<std::uint32_t> values;
    };
    const wrong all[] = {
        {"llama.block_count", {0, 1025, 0xffffffffU}},
        {"llama.context_length", {0, (1U << 24) + 1}},
        {"llama.embedding_length", {0, (1U << 17) + 1, 0x80000000U}},
        {"llama.feed_forward_length", {0, (1U << 20) + 1}},
        {"llama.attention.head_count", {0, 1025}},
        {"llama.attention.head_count_kv", {0, 3, 1025}},
        {"llama.rope.dimension_count", {0, 15, 17}},
        {"llama.vocab_size", {0, 1, 49152}},
    };
    for (const wrong& one : all) {
        for (std::uint32_t value : one.values) {
            CHECK_REFUSES(read(with_u32(one.key, value)), "key '" + std::string(one.key) + "'",
                          std::to_string(value));
        }
        if (std::string(one.key) != "llama.vocab_size") {
            CHECK_REFUSES(read(with_string(one.key, "1")), "key '" + std::string(one.key) + "'",
                          "came string");
        }
    }
    CHECK_REFUSES(read(with_u32("llama.attention.head_count", 3)), "key 'llama.attention.head_count'",
                  "came 3");
    for (float value : {0.0F, -1.0F, NAN, INFINITY, 2.0F}) {
        CHECK_REFUSES(read(with_f32("llama.attention.layer_norm_rms_epsilon", value)),
                      "key 'llama.attention.layer_norm_rms_epsilon'", "");
    }
    for (float value : {0.0F, -1.0F, NAN, INFINITY}) {
        CHECK_REFUSES(read(with_f32("llama.rope.freq_base", value)), "key 'llama.rope.freq_base'", "");
    }
    for (const char* const key : {"llama.block_count", "llama.embedding_length", "llama.attention.head_count",
                                  "llama.attention.layer_norm_rms_epsilon", "tokenizer.ggml.tokens"}) {
        CHECK_REFUSES(read(with(key, [](gguf_builder&) {})), "key '" + std::string(key) + "'", "none");
    }
}

TEST_CASE("tensors") {
    for (const char* const name : {"token_embd.weight", "output_norm.weight", "blk.0.attn_norm.weight",
                                   "blk.0.attn_q.weight", "blk.0.ffn_down.weight"}) {
        const std::string argument = "tensor '" + std::string(name) + "'";
        CHECK_REFUSES(read(with(name, [](gguf_builder&) {})), argument, "no such tensor");
        CHECK_REFUSES(read(with(name,
                                [&](gguf_builder& b) {
                                    b.add_tensor(name, 0, {16, 2}, bytes(128));
                                })),
                      argument, "came [16, 2]");
        CHECK_REFUSES(read(with(name,
                                [&](gguf_builder& b) {
                                    b.add_tensor(name, 0, {32, 1, 1}, bytes(128));
                                })),
                      argument, "came [32, 1, 1]");
    }
    // IQ4_NL has Q4_0's block and size, but isn't read.
    const bytes file = with("blk.0.ffn_up.weight", [](gguf_builder& b) {
        b.add_tensor("blk.0.ffn_up.weight", 20, {32, 32}, bytes(18 * 32));
    });
    CHECK_REFUSES(read(file), "tensor 'blk.0.ffn_up.weight'", "IQ4_NL");
    CHECK_REFUSES(read(with_u32("llama.block_count", 2)), "tensor 'blk.1.attn_norm.weight'",
                  "no such tensor");
}
