// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "quality/passkey_prompt.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <random>

namespace quality_bench {

std::string passkey_sentence(const std::string& key) {
    return "\nThe code of the vault is " + key + ". Remember it: the vault opens with " + key + ".\n";
}

const char* passkey_question() {
    return "\nWhat is the code of the vault? The code of the vault is";
}

passkey_prompt make_passkey_prompt(const encoder& encode, const std::vector<std::int32_t>& text,
                                   std::int64_t length, std::int32_t trial, std::int32_t trials,
                                   std::uint64_t seed) {
    if (trials < 1 || trial < 0 || trial >= trials) {
        throw engine::error("trial", "0 to " + std::to_string(trials - 1), std::to_string(trial));
    }
    // mt19937_64 is the same everywhere, the distributions of the standard library aren't.
    std::mt19937_64 random(seed ^ (static_cast<std::uint64_t>(length) << 32) ^
                           static_cast<std::uint64_t>(trial));
    passkey_prompt made;
    made.key = std::to_string(10000 + random() % 90000);
    made.answer = encode(" " + made.key);
    const std::vector<std::int32_t> sentence = encode(passkey_sentence(made.key));
    const std::vector<std::int32_t> question = encode(passkey_question());
    const std::int64_t around =
        length - static_cast<std::int64_t>(sentence.size()) - static_cast<std::int64_t>(question.size());
    if (around < 1) {
        throw engine::error("--lengths", "room for the sentence and the question", std::to_string(length));
    }
    const auto held = static_cast<std::int64_t>(text.size());
    if (held < around) {
        throw engine::error("the stream of essays", "at least " + std::to_string(around) + " tokens",
                            std::to_string(held));
    }
    made.depth = (trial + 0.5) / trials;
    made.position = static_cast<std::int64_t>(std::floor(made.depth * static_cast<double>(around)));
    const auto start =
        text.begin() + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(held - around + 1));
    made.tokens.assign(start, start + made.position);
    made.tokens.insert(made.tokens.end(), sentence.begin(), sentence.end());
    made.tokens.insert(made.tokens.end(), start + made.position, start + around);
    made.tokens.insert(made.tokens.end(), question.begin(), question.end());
    return made;
}

std::string hash_of(const std::vector<std::int32_t>& tokens) {
    std::uint64_t hash = 14695981039346656037u;
    for (const std::int32_t token : tokens) {
        for (int shift = 0; shift < 32; shift += 8) {
            hash ^= (static_cast<std::uint32_t>(token) >> shift) & 0xffu;
            hash *= 1099511628211u;
        }
    }
    std::string digits(16, '0');
    for (auto digit = digits.rbegin(); digit != digits.rend(); ++digit, hash >>= 4) {
        *digit = "0123456789abcdef"[hash & 15];
    }
    return digits;
}

} // namespace quality_bench
