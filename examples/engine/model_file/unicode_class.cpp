// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/unicode_class.hpp"

#include <algorithm>
#include <iterator>

namespace engine {

namespace {

struct class_range {
    char32_t first;
    char32_t last;
    unicode_class kind;
};

constexpr unicode_class L = unicode_class::letter;
constexpr unicode_class N = unicode_class::number;
constexpr unicode_class S = unicode_class::space;

constexpr class_range ranges[] = {
#include "engine/model_file/unicode_ranges.inc"
};

} // namespace

unicode_class class_of(char32_t code_point) {
    const class_range* const after =
        std::upper_bound(std::begin(ranges), std::end(ranges), code_point,
                         [](char32_t point, const class_range& range) { return point < range.first; });
    if (after == std::begin(ranges)) return unicode_class::other;
    const class_range& range = *std::prev(after);
    return code_point <= range.last ? range.kind : unicode_class::other;
}

} // namespace engine
