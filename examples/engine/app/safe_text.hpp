// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <string>
#include <string_view>

namespace engine {

enum class line_breaks {
    keep,
    escape, ///< as \n
};

/// Bytes from anywhere as UTF-8 that shows what is there and does nothing else to a screen: control
/// characters become their pictures (U+2400 and on), what isn't UTF-8 \xNN, characters that are invisible or
/// reorder text \u{NNNN}.
std::string visible(std::string_view bytes, line_breaks breaks);

/// `visible` text with what HTML treats specially written as entities: safe as an element's content and
/// inside quoted attributes.
std::string escape_html(std::string_view bytes, line_breaks breaks = line_breaks::keep);

} // namespace engine
