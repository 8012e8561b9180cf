// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/byte_alphabet.hpp"

#include "engine/model_file/utf8.hpp"

#include <array>

namespace engine {

namespace {

constexpr bool stands_for_itself(unsigned byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

constexpr unsigned alphabet_end = 0x144;

/// Code point of each byte.
constexpr std::array<unsigned, 256> letters() {
    std::array<unsigned, 256> out = {};
    unsigned next = 0x100;
    for (unsigned byte = 0; byte < 256; ++byte) {
        out[byte] = stands_for_itself(byte) ? byte : next++;
    }
    return out;
}

/// Byte of each code point, -1 for those that aren't letters.
constexpr std::array<int, alphabet_end> bytes() {
    std::array<int, alphabet_end> out = {};
    for (int& byte : out) {
        byte = -1;
    }
    for (unsigned byte = 0; byte < 256; ++byte) {
        out[letters()[byte]] = static_cast<int>(byte);
    }
    return out;
}

} // namespace

std::optional<std::string> bytes_spelled(std::string_view text) {
    static constexpr std::array<int, alphabet_end> byte_of = bytes();
    std::string out;
    for (std::size_t at = 0; at < text.size();) {
        const utf8_step step = utf8_next(text.substr(at));
        const int byte = step.code_point < alphabet_end ? byte_of[step.code_point] : -1;
        if (byte < 0) return std::nullopt;
        out += static_cast<char>(byte);
        at += step.bytes;
    }
    return out;
}

std::string spelling_of(unsigned char byte) {
    static constexpr std::array<unsigned, 256> letter_of = letters();
    std::string out;
    utf8_append(out, letter_of[byte]);
    return out;
}

} // namespace engine
