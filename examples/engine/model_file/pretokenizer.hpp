// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace engine {

/// How text is cut into words before byte pairs are merged within each. The patterns, by the names that GGUF
/// files use (`tokenizer.ggml.pre`); `\s`, `\p{L}` and `\p{N}` are Unicode's, an invalid byte is in none of
/// them:
///   gpt2    '(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
///   smollm  every \p{N} alone, and `gpt2` on what lies between them
///   llama3  (?i:'(?:s|t|re|ve|m|ll|d))|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|
///   ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+
///           |\s+(?!\S)|\s+                                              (ASCII letters only where case is
///           ignored)
enum class pretokenizer { gpt2, smollm, llama3 };

/// By its name in GGUF files, llama3's aliases included.
std::optional<pretokenizer> find_pretokenizer(std::string_view name);

/// The words of `text`, in order; together they are `text`. O(n).
std::vector<std::string_view> split_words(pretokenizer kind, std::string_view text);

} // namespace engine
