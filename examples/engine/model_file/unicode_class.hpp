// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

namespace engine {

/// What pre-tokenisers tell apart: \p{L}, \p{N}, \s and all the rest, invalid bytes included.
enum class unicode_class : unsigned char { other, letter, number, space };

/// Of a code point, by Unicode 14.0. O(log of the number of ranges), and a few compares for ASCII.
unicode_class class_of(char32_t code_point);

} // namespace engine
