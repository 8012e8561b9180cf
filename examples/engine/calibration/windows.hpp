// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <vector>

namespace engine::calibration {

/// Real tokens after each prompt, on which answers are compared: with the prompt's last row, 65 rows.
constexpr std::int32_t fed_tokens = 64;

/// A prompt and the real tokens that follow it.
struct window {
    std::int64_t begin = 0; ///< among the tokens of all texts, one after another
    std::vector<std::int32_t> prompt;
    std::vector<std::int32_t> fed;
};

/// @p count windows with prompts of @p prompt_tokens, one in each of as many equal parts of @p tokens, at a
/// place in it that @p seed draws; the same with every standard library. Throws `error` where the windows
/// would overlap.
std::vector<window> draw_windows(const std::vector<std::int32_t>& tokens, std::int32_t prompt_tokens,
                                 std::int32_t count, std::uint64_t seed);

} // namespace engine::calibration
