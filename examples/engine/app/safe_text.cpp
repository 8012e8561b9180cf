// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/safe_text.hpp"

#include "engine/model_file/utf8.hpp"

#include <cstdint>
#include <cstdio>

namespace engine {
namespace {

/// Invisible, or able to reorder what stands around it. Joiners within words and emoji are left alone.
bool hides(char32_t c) {
    return (c >= 0x80 && c < 0xa0) || c == 0xad || c == 0x61c || c == 0x180e || c == 0x200b || c == 0x200e ||
           c == 0x200f || (c >= 0x2028 && c <= 0x202e) || (c >= 0x2060 && c <= 0x206f) || c == 0xfeff ||
           (c >= 0xfff9 && c <= 0xfffb) || (c >= 0xe0000 && c <= 0xe0fff);
}

} // namespace

std::string visible(std::string_view bytes, line_breaks breaks) {
    std::string out;
    out.reserve(bytes.size());
    char escape[16];
    while (!bytes.empty()) {
        const utf8_step step = utf8_next(bytes);
        const char32_t c = step.code_point;
        if (c == invalid_byte) {
            std::snprintf(escape, sizeof(escape), "\\x%02X",
                          static_cast<unsigned>(static_cast<std::uint8_t>(bytes[0])));
            out += escape;
        } else if (c == '\n' && breaks == line_breaks::escape) {
            out += "\\n";
        } else if (c == '\n' || (c == '\t' && breaks == line_breaks::keep)) {
            out += static_cast<char>(c);
        } else if (c < 0x20) {
            utf8_append(out, 0x2400 + c);
        } else if (c == 0x7f) {
            utf8_append(out, 0x2421);
        } else if (hides(c)) {
            std::snprintf(escape, sizeof(escape), "\\u{%X}", static_cast<unsigned>(c));
            out += escape;
        } else {
            out += bytes.substr(0, step.bytes);
        }
        bytes.remove_prefix(step.bytes);
    }
    return out;
}

std::string escape_html(std::string_view bytes, line_breaks breaks) {
    const std::string text = visible(bytes, breaks);
    std::string out;
    out.reserve(text.size() + text.size() / 8);
    for (const char c : text) {
        switch (c) {
        case '&':
            out += "&amp;";
            break;
        case '<':
            out += "&lt;";
            break;
        case '>':
            out += "&gt;";
            break;
        case '"':
            out += "&quot;";
            break;
        case '\'':
            out += "&#39;";
            break;
        default:
            out += c;
        }
    }
    return out;
}

} // namespace engine
