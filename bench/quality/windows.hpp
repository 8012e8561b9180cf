// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace quality_bench {

constexpr std::int32_t prompt_tokens = 8000;
constexpr std::int32_t fed_tokens = 64;

/// A prompt and the real tokens that follow it.
struct window {
    std::string stream;
    std::int32_t index = 0;
    double dense_nll =
        0; ///< of the fed tokens, as measured elsewhere with exact fp32 products (two decimals)
    std::vector<std::int32_t> prompt;
    std::vector<std::int32_t> fed;
};

/// A file of little-endian int32 token ids. Throws `engine::error` where there is none.
std::vector<std::int32_t> read_stream(const std::string& path);

/// The 31 windows over the streams essays, code and law, which are DIR/<stream>.i32 (little-endian int32
/// token ids). Window j of k starts at j * floor((T - 8064) / (k - 1)). Throws `engine::error` where a stream
/// is missing or short.
std::vector<window> read_windows(const std::string& folder);

/// The tokens of the essays that no window holds, stretch after stretch: for what mustn't have seen them.
std::vector<std::int32_t> essays_between_windows(const std::string& folder);

} // namespace quality_bench
