// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace engine {

/// Byte-level vocabularies spell each byte as one printable character: '!'..'~', U+00A1..U+00AC and
/// U+00AE..U+00FF stand for themselves, the other 68 bytes in ascending order are U+0100..U+0143 (GPT-2's
/// `bytes_to_unicode`).

/// The bytes that `text` spells, or nothing if it has a character outside the alphabet.
std::optional<std::string> bytes_spelled(std::string_view text);

/// How one byte is spelt, in UTF-8.
std::string spelling_of(unsigned char byte);

} // namespace engine
