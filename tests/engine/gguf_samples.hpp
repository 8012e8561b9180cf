// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/gguf_builder.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace engine_test {

/// A small sound llama model: what a test wants to change about it is a member.
struct sample_model {
    std::uint32_t version = 3;
    std::uint32_t alignment = 32;
    engine::tensor_type type = engine::tensor_type::f32; ///< of the matrices; norms are F32
    std::uint32_t layers = 1;
    std::uint32_t hidden = 32; ///< a multiple of 256 if the type's block is
    std::uint32_t heads = 2;
    std::uint32_t kv_heads = 1;
    bool tied = true;
    std::string pretokenizer = "smollm";
    /// All 256 bytes, or just what "the cat" needs, which keeps files small.
    bool all_bytes = false;
    /// Left out of the file, to be added otherwise or to be missed.
    std::vector<std::string> without;

    /// The builder, for what else is to be added; `build()` on it makes the file.
    gguf_builder builder() const;
};

/// What a llama model's file says of its sizes.
struct llama_sizes {
    const char* name;
    std::uint32_t layers;
    std::uint32_t context;
    std::uint32_t hidden;
    std::uint32_t ffn;
    std::uint32_t heads;
    std::uint32_t kv_heads;
    std::uint32_t head_dim;
    float rope_base;
    float epsilon;
};
void add_llama_sizes(gguf_builder& file, const llama_sizes& sizes);

/// A sound file that isn't a model: every value type alone and in arrays, empty strings and arrays, ranks 1
/// to 4, a tensor type that can't be read.
gguf_builder sample_of_every_value();

/// The tokenizer's keys alone: bytes (and the control tokens <|a|> = id 0 and <|ab|> = id 1, the user-defined
/// <tool> = 2), merges for "the", " the", "cat" and runs of spaces, and two that those
/// overtake.
void add_sample_tokenizer(gguf_builder& file, const std::string& pretokenizer, bool all_bytes,
                          const std::vector<std::string>& without = {});
std::vector<std::string> sample_tokens(bool all_bytes);
std::vector<std::string> sample_merges();

/// Bytes that look like nothing in particular, but finite where read as any of the types' scales.
bytes sample_data(std::size_t size);

} // namespace engine_test
