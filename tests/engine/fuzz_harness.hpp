// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/byte_span.hpp"

#include <array>
#include <cstddef>
#include <string_view>

namespace engine_test {

/// Where a file was refused first, or that it wasn't.
enum class fate { magic, header, metadata, tensor_table, hyperparameters, tokenizer, accepted };
constexpr std::size_t fates = 7;
constexpr std::array<std::string_view, fates> fate_names = {
    "magic", "header", "metadata", "tensor table", "hyperparameters", "tokenizer", "accepted"};

/// Does with a file all that the engine does before it computes: parses it, reads hyperparameters and
/// tokenizer, encodes and decodes a little text, dequantises the first rows of every tensor. What is sound is
/// used even where another part isn't. Anything but `engine::error` is let through, and fails the fuzzer.
fate load_everything(engine::byte_span file);

} // namespace engine_test
