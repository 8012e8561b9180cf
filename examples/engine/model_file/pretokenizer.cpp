// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/pretokenizer.hpp"

#include "engine/model_file/unicode_class.hpp"
#include "engine/model_file/utf8.hpp"

#include <algorithm>
#include <cstddef>

namespace engine {

namespace {

struct character {
    char32_t point;
    unicode_class kind;
    std::size_t offset; ///< of its first byte in the text
};

/// The patterns as functions from a position to the end of the match, on characters [first, last) of a text.
/// Each alternative returns its own start when it doesn't match.
class matcher {
  public:
    matcher(const std::vector<character>& text, std::size_t last)
        : text_(text)
        , last_(last) {}

    std::size_t gpt2(std::size_t at) const {
        const std::size_t contracted = contraction(at, false);
        if (contracted != at) return contracted;
        const std::size_t start = at + (is(at, U' ') ? 1 : 0);
        for (unicode_class kind : {unicode_class::letter, unicode_class::number, unicode_class::other}) {
            const std::size_t end = run(start, kind);
            if (end != start) return end;
        }
        return spaces(at);
    }

    std::size_t llama3(std::size_t at) const {
        const std::size_t contracted = contraction(at, true);
        if (contracted != at) return contracted;

        const bool may_lead = !is_newline(at) && text_[at].kind != unicode_class::letter &&
                              text_[at].kind != unicode_class::number;
        const std::size_t letters = at + (may_lead ? 1 : 0);
        const std::size_t word_end = run(letters, unicode_class::letter);
        if (word_end != letters) return word_end;

        if (text_[at].kind == unicode_class::number) {
            std::size_t end = at + 1;
            while (end < last_ && end < at + 3 && text_[end].kind == unicode_class::number) {
                ++end;
            }
            return end;
        }

        const std::size_t start = at + (is(at, U' ') ? 1 : 0);
        std::size_t end = run(start, unicode_class::other);
        if (end != start) {
            while (is_newline(end)) {
                ++end;
            }
            return end;
        }

        // White space up to and with its last line break, if it has one.
        const std::size_t space_end = run(at, unicode_class::space);
        for (std::size_t back = space_end; back > at; --back) {
            if (is_newline(back - 1)) return back;
        }
        return spaces(at);
    }

  private:
    bool is(std::size_t at, char32_t point) const { return at < last_ && text_[at].point == point; }
    bool is_newline(std::size_t at) const { return is(at, U'\r') || is(at, U'\n'); }

    std::size_t run(std::size_t at, unicode_class kind) const {
        while (at < last_ && text_[at].kind == kind) {
            ++at;
        }
        return at;
    }

    /// \s+(?!\S)|\s+ : white space without its last character, which goes with the word that follows, if one
    /// does.
    std::size_t spaces(std::size_t at) const {
        const std::size_t end = run(at, unicode_class::space);
        return end == last_ || end == at + 1 ? end : end - 1;
    }

    std::size_t contraction(std::size_t at, bool any_case) const {
        if (!is(at, U'\'')) return at;
        const auto letter = [&](std::size_t i) -> char32_t {
            if (i >= last_) return 0;
            const char32_t point = text_[i].point;
            return any_case && point >= U'A' && point <= U'Z' ? point + 32 : point;
        };
        const char32_t first = letter(at + 1);
        const char32_t second = letter(at + 2);
        if (first == U's' || first == U't' || first == U'm' || first == U'd') return at + 2;
        const bool two = (first == U'r' && second == U'e') || (first == U'v' && second == U'e') ||
                         (first == U'l' && second == U'l');
        return two ? at + 3 : at;
    }

    const std::vector<character>& text_;
    std::size_t last_;
};

std::vector<character> characters_of(std::string_view text) {
    std::vector<character> out;
    out.reserve(text.size() + 1);
    for (std::size_t at = 0; at < text.size();) {
        const utf8_step step = utf8_next(text.substr(at));
        out.push_back({step.code_point, class_of(step.code_point), at});
        at += step.bytes;
    }
    return out;
}

} // namespace

std::optional<pretokenizer> find_pretokenizer(std::string_view name) {
    if (name == "smollm") return pretokenizer::smollm;
    if (name == "gpt-2") return pretokenizer::gpt2;
    if (name == "llama-bpe" || name == "llama3" || name == "llama-v3") return pretokenizer::llama3;
    return std::nullopt;
}

std::vector<std::string_view> split_words(pretokenizer kind, std::string_view text) {
    std::vector<character> characters = characters_of(text);
    const std::size_t count = characters.size();
    characters.push_back({0, unicode_class::other, text.size()});

    std::vector<std::string_view> words;
    const auto add = [&](std::size_t from, std::size_t to) {
        const std::size_t start = characters[from].offset;
        words.push_back(text.substr(start, characters[to].offset - start));
    };
    const auto is_number = [](const character& c) { return c.kind == unicode_class::number; };

    std::size_t at = 0;
    while (at < count) {
        std::size_t last = count;
        if (kind == pretokenizer::smollm) {
            if (is_number(characters[at])) {
                add(at, at + 1);
                ++at;
                continue;
            }
            const auto begin = characters.begin();
            last =
                static_cast<std::size_t>(std::find_if(begin + static_cast<std::ptrdiff_t>(at),
                                                      begin + static_cast<std::ptrdiff_t>(count), is_number) -
                                         begin);
        }
        const matcher match(characters, last);
        while (at < last) {
            const std::size_t end = kind == pretokenizer::llama3 ? match.llama3(at) : match.gpt2(at);
            add(at, end);
            at = end;
        }
    }
    return words;
}

} // namespace engine
