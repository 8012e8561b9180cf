// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace quality_bench {

/// What turns a text into token ids.
using encoder = std::function<std::vector<std::int32_t>(const std::string&)>;

/// A five-digit number hidden in a long text, and asked for at its end.
struct passkey_prompt {
    std::string key;
    double depth = 0;          ///< where it is hidden: 0 the beginning, 1 right before the question
    std::int64_t position = 0; ///< of the first token of the sentence that tells it
    std::vector<std::int32_t> tokens;
    std::vector<std::int32_t> answer; ///< what must follow, token by token
};

/// Trial @p trial of @p trials, @p length tokens long: depths are spread evenly, key and stretch of @p text
/// are drawn. The same for the same seed with every standard library. Throws `engine::error` where the text
/// is too short, or @p length has no room for sentence and question.
passkey_prompt make_passkey_prompt(const encoder& encode, const std::vector<std::int32_t>& text,
                                   std::int64_t length, std::int32_t trial, std::int32_t trials,
                                   std::uint64_t seed);

/// FNV-1a of the tokens' bytes, 16 hexadecimal digits: tells whether two files are about the same prompts.
std::string hash_of(const std::vector<std::int32_t>& tokens);

/// The sentence that hides @p key and the question after the text, as results files name them.
std::string passkey_sentence(const std::string& key);
const char* passkey_question();

} // namespace quality_bench
