// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/windows.hpp"

#include "engine/error.hpp"

#include <random>
#include <string>

namespace engine::calibration {

std::vector<window> draw_windows(const std::vector<std::int32_t>& tokens, std::int32_t prompt_tokens,
                                 std::int32_t count, std::uint64_t seed) {
    const std::int64_t length = std::int64_t{prompt_tokens} + fed_tokens;
    const auto total = static_cast<std::int64_t>(tokens.size());
    const std::int64_t part = total / count;
    if (part < length) {
        throw error("--texts",
                    "at least " + std::to_string(length * count) + " tokens for " + std::to_string(count) +
                        " windows of " + std::to_string(prompt_tokens) + " (fewer --windows or --tokens)",
                    std::to_string(total));
    }
    std::mt19937_64 random(seed);
    std::vector<window> made;
    for (std::int64_t i = 0; i < count; ++i) {
        const auto room = static_cast<std::uint64_t>(part - length + 1);
        window one;
        one.begin = i * part + static_cast<std::int64_t>(random() % room);
        const auto first = tokens.begin() + one.begin;
        one.prompt.assign(first, first + prompt_tokens);
        one.fed.assign(first + prompt_tokens, first + length);
        made.push_back(std::move(one));
    }
    return made;
}

} // namespace engine::calibration
