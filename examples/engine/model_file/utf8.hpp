// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace engine {

/// One step through text that may be any bytes.
struct utf8_step {
    char32_t code_point; ///< `invalid_byte` if no well-formed character starts here
    std::size_t bytes;   ///< 1 to 4; 1 for an invalid byte
    bool incomplete;     ///< invalid only because the text ends too early
};

/// Beyond Unicode's last code point.
constexpr char32_t invalid_byte = 0x110000;

/// The character at the start of `text`, which must not be empty. Overlong forms, surrogates and what lies
/// beyond U+10FFFF are invalid (Unicode Standard, table 3-7).
utf8_step utf8_next(std::string_view text);

/// Appends `code_point` (at most U+10FFFF) in UTF-8.
void utf8_append(std::string& text, char32_t code_point);

/// Passes text on in pieces that never end inside a character: for printing tokens as they come, which may
/// hold parts of characters. Invalid bytes are passed on as they are.
class utf8_stream {
  public:
    /// What can be printed now. At most three bytes are held back.
    std::string push(std::string_view bytes);

    /// What was held back, at the end.
    std::string flush();

  private:
    std::string held_;
};

} // namespace engine
