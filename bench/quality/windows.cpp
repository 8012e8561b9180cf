// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "quality/windows.hpp"

#include "engine/error.hpp"

#include <fstream>
#include <iterator>

namespace quality_bench {

namespace {

struct stream {
    const char* name;
    std::vector<double> dense_nll; ///< one for each window
};

const std::vector<stream> streams = {
    {"essays", {2.49, 2.89, 3.22, 3.41, 3.52, 3.36, 3.29, 3.23, 3.16, 2.92, 2.78, 3.08, 3.36, 4.50}},
    {"code", {0.52, 1.66, 1.68, 1.25, 0.89, 0.96, 1.32, 1.67, 1.84, 1.63, 1.16, 1.36, 2.70, 1.96}},
    {"law", {2.13, 2.37, 2.96}},
};

constexpr std::int64_t window_length = prompt_tokens + fed_tokens;

std::int64_t stride_of(const stream& of, std::int64_t total) {
    return (total - window_length) / (static_cast<std::int64_t>(of.dense_nll.size()) - 1);
}

} // namespace

std::vector<std::int32_t> read_stream(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw engine::error("--data", "a folder with " + path, "no such file");
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<std::int32_t> tokens;
    for (std::size_t at = 0; at + 4 <= bytes.size(); at += 4) {
        std::uint32_t token = 0;
        for (std::size_t b = 0; b < 4; ++b) {
            token |= std::uint32_t{static_cast<unsigned char>(bytes[at + b])} << (8 * b);
        }
        tokens.push_back(static_cast<std::int32_t>(token));
    }
    return tokens;
}

std::vector<window> read_windows(const std::string& folder) {
    constexpr std::int64_t length = window_length;
    std::vector<window> windows;
    for (const stream& of : streams) {
        const std::vector<std::int32_t> tokens = read_stream(folder + "/" + of.name + ".i32");
        const auto total = static_cast<std::int64_t>(tokens.size());
        if (total < length) {
            throw engine::error(std::string("stream ") + of.name,
                                "at least " + std::to_string(length) + " tokens", std::to_string(total));
        }
        const auto count = static_cast<std::int64_t>(of.dense_nll.size());
        const std::int64_t stride = stride_of(of, total);
        for (std::int64_t j = 0; j < count; ++j) {
            const auto begin = tokens.begin() + j * stride;
            windows.push_back({of.name,
                               static_cast<std::int32_t>(j),
                               of.dense_nll[static_cast<std::size_t>(j)],
                               {begin, begin + prompt_tokens},
                               {begin + prompt_tokens, begin + length}});
        }
    }
    return windows;
}

std::vector<std::int32_t> essays_between_windows(const std::string& folder) {
    static_cast<void>(read_windows(folder)); // checks the streams
    const stream& of = streams.front();
    const std::vector<std::int32_t> tokens = read_stream(folder + "/" + of.name + ".i32");
    const std::int64_t stride = stride_of(of, static_cast<std::int64_t>(tokens.size()));
    std::vector<std::int32_t> made;
    for (std::size_t j = 0; j + 1 < of.dense_nll.size(); ++j) {
        const auto begin = tokens.begin() + static_cast<std::int64_t>(j) * stride;
        if (stride > window_length) made.insert(made.end(), begin + window_length, begin + stride);
    }
    return made;
}

} // namespace quality_bench
