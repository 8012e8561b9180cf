// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/utf8.hpp"

#include <algorithm>
#include <utility>

namespace engine {

utf8_step utf8_next(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const unsigned lead = byte(0);
    if (lead < 0x80) return {lead, 1, false};
    if (lead < 0xC2 || lead > 0xF4) return {invalid_byte, 1, false};

    const std::size_t bytes = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    char32_t code_point = lead & (0x7FU >> bytes);
    for (std::size_t i = 1; i < bytes; ++i) {
        if (i == text.size()) return {invalid_byte, 1, true};
        // Only the second byte has tighter bounds, after four of the leads.
        const unsigned least = i > 1 ? 0x80 : lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
        const unsigned most = i > 1 ? 0xBF : lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
        if (byte(i) < least || byte(i) > most) return {invalid_byte, 1, false};
        code_point = code_point << 6 | (byte(i) & 0x3FU);
    }
    return {code_point, bytes, false};
}

void utf8_append(std::string& text, char32_t code_point) {
    const auto put = [&](char32_t byte) { text += static_cast<char>(static_cast<unsigned char>(byte)); };
    if (code_point < 0x80) {
        put(code_point);
    } else if (code_point < 0x800) {
        put(0xC0 | code_point >> 6);
        put(0x80 | (code_point & 0x3F));
    } else if (code_point < 0x10000) {
        put(0xE0 | code_point >> 12);
        put(0x80 | (code_point >> 6 & 0x3F));
        put(0x80 | (code_point & 0x3F));
    } else {
        put(0xF0 | code_point >> 18);
        put(0x80 | (code_point >> 12 & 0x3F));
        put(0x80 | (code_point >> 6 & 0x3F));
        put(0x80 | (code_point & 0x3F));
    }
}

std::string utf8_stream::push(std::string_view bytes) {
    held_ += bytes;
    // An incomplete character can only be the last three bytes or fewer.
    std::size_t ready = held_.size();
    for (std::size_t back = 1; back <= std::min<std::size_t>(3, held_.size()); ++back) {
        if (utf8_next(std::string_view(held_).substr(held_.size() - back)).incomplete) {
            ready = held_.size() - back;
        }
    }
    std::string out = held_.substr(0, ready);
    held_.erase(0, ready);
    return out;
}

std::string utf8_stream::flush() {
    return std::exchange(held_, std::string());
}

} // namespace engine
