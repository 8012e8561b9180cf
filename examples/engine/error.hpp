// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

namespace engine {

/// What the user must be told, in one line: which argument, what was expected of it, what came.
/// The programs' `main` prints `what()` and ends with exit code 2.
class error : public std::runtime_error {
  public:
    error(const std::string& argument, const std::string& expected, const std::string& came)
        : std::runtime_error(argument + ": expected " + expected + ", came " + came)
        , argument_(argument)
        , expected_(expected)
        , came_(came) {}

    /// The argument alone: an option, a file, "key 'general.alignment'", "tensor 'output.weight'", ...
    const std::string& argument() const { return argument_; }
    const std::string& expected() const { return expected_; }
    const std::string& came() const { return came_; }

  private:
    std::string argument_;
    std::string expected_;
    std::string came_;
};

/// `text` made safe for one line of a terminal: control characters, backslashes and bytes above 0x7e are
/// written as \xNN (or \n, \t, \r), and what exceeds `max_bytes` bytes of input is cut and replaced by "...".
/// For names out of files, which may hold anything.
inline std::string printable(std::string_view text, std::size_t max_bytes = 80) {
    constexpr char digits[] = "0123456789abcdef";
    std::string out;
    for (char character : text.substr(0, max_bytes)) {
        const auto byte = static_cast<unsigned char>(character);
        if (character == '\n') {
            out += "\\n";
        } else if (character == '\t') {
            out += "\\t";
        } else if (character == '\r') {
            out += "\\r";
        } else if (byte < 0x20 || byte > 0x7e || character == '\\') {
            out += "\\x";
            out += digits[byte >> 4];
            out += digits[byte & 15];
        } else {
            out += character;
        }
    }
    if (text.size() > max_bytes) out += "...";
    return out;
}

/// 'text' in quotes, made printable.
inline std::string quoted(std::string_view text, std::size_t max_bytes = 80) {
    std::string out = "'";
    out += printable(text, max_bytes);
    out += '\'';
    return out;
}

/// The shortest decimal that reads back as `number`: 0.5, 1e-05, nan.
inline std::string text_of_number(float number) {
    char text[32] = "";
    for (int digits = 6; digits <= 9; ++digits) {
        std::snprintf(text, sizeof(text), "%.*g", digits, static_cast<double>(number));
        if (std::strtof(text, nullptr) == number) break;
    }
    return text;
}

} // namespace engine
