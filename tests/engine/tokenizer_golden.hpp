// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <fstream>
#include <string>

namespace engine_test {

inline std::string from_hex(const std::string& hex) {
    std::string out;
    for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
        out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
    }
    return out;
}

/// A stored result of tokenizer_golden.py.
inline std::ifstream golden(const std::string& name) {
    return std::ifstream(ENGINE_TEST_DATA "/" + name);
}

} // namespace engine_test
