// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_refusal.hpp"
#include "engine/gguf_samples.hpp"
#include "engine/model_file/byte_alphabet.hpp"
#include "engine/model_file/pretokenizer.hpp"
#include "engine/model_file/tokenizer.hpp"
#include "engine/model_file/unicode_class.hpp"
#include "engine/model_file/utf8.hpp"
#include "engine/tokenizer_golden.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using namespace engine;
using namespace engine_test;

namespace {

tokenizer make(const std::string& pre = "smollm", bool all_bytes = true) {
    gguf_builder builder;
    add_sample_tokenizer(builder, pre, all_bytes);
    const bytes file = builder.build();
    return tokenizer(gguf(span_of(file)));
}

/// Reads a sample tokenizer whose `key` is left out and written otherwise.
template <class Add>
void read_with(const std::string& key, Add add) {
    gguf_builder builder;
    add_sample_tokenizer(builder, "smollm", true, {key});
    add(builder);
    const bytes file = builder.build();
    tokenizer(gguf(span_of(file)));
}

std::string token_texts(const tokenizer& t, const std::string& text, bool parse_control = false) {
    std::string out;
    for (std::int32_t id : t.encode(text, parse_control)) {
        out += (out.empty() ? "" : "|") + std::string(t.bytes_of(id));
    }
    return out;
}

std::string random_bytes(std::mt19937_64& source, std::size_t size) {
    // Half anything, half the sample's words, so that merges, specials and broken characters meet.
    const std::string pieces[] = {"the",    " the", "  ",     "    ", "cat",      "<|a|>",
                                  "<|ab|>", "<|a",  "<tool>", "\xc3", "\xe2\x82", "\xf0\x9f\x98\x80",
                                  "1",      "12",   "\n",     "'s"};
    std::string out;
    while (out.size() < size) {
        if (source() % 2 == 0) {
            out += static_cast<char>(source() & 0xff);
        } else {
            out += pieces[source() % std::size(pieces)];
        }
    }
    return out;
}

} // namespace

TEST_CASE("words are those of the published patterns") {
    std::ifstream in = golden("tokenizer_splits.txt");
    std::map<std::string, int> seen;
    for (std::string line; std::getline(in, line);) {
        std::istringstream fields(line);
        std::string name;
        std::string hex;
        fields >> name >> hex;
        std::vector<std::size_t> expected{std::istream_iterator<std::size_t>(fields), {}};
        const std::string text = from_hex(hex);
        std::vector<std::size_t> came;
        for (std::string_view word : split_words(find_pretokenizer(name).value(), text)) {
            came.push_back(word.size());
        }
        INFO(line);
        CHECK(came == expected);
        ++seen[name];
    }
    CHECK(seen == std::map<std::string, int>{{"gpt-2", 100}, {"llama-bpe", 100}, {"smollm", 100}});
    CHECK(split_words(pretokenizer::gpt2, "").empty());
    CHECK(find_pretokenizer("llama3") == pretokenizer::llama3);
    CHECK(find_pretokenizer("llama-v3") == pretokenizer::llama3);
    CHECK(!find_pretokenizer("qwen2"));
}

TEST_CASE("words of any bytes are the text") {
    std::mt19937_64 source(uniprefill_test::seed());
    for (int i = 0; i < 2000; ++i) {
        const std::string text = random_bytes(source, source() % 60);
        for (pretokenizer kind : {pretokenizer::gpt2, pretokenizer::smollm, pretokenizer::llama3}) {
            std::string joined;
            bool empty_word = false;
            for (std::string_view word : split_words(kind, text)) {
                joined += word;
                empty_word = empty_word || word.empty();
            }
            REQUIRE(joined == text);
            REQUIRE(!empty_word);
        }
    }
}

TEST_CASE("encode, then decode, gives any bytes back") {
    std::mt19937_64 source(uniprefill_test::seed());
    for (const char* const pre : {"gpt-2", "smollm", "llama-bpe"}) {
        const tokenizer t = make(pre);
        std::string all;
        for (int byte = 0; byte < 256; ++byte) {
            all += static_cast<char>(byte);
        }
        CHECK(t.decode(t.encode(all)) == all);
        for (int i = 0; i < 2000; ++i) {
            const std::string text = random_bytes(source, source() % 60);
            REQUIRE(t.decode(t.encode(text)) == text);
            REQUIRE(t.decode(t.encode(text, true)) == text);
        }
        CHECK(t.encode("").empty());
    }
}

TEST_CASE("merges go by rank, then from the left") {
    const tokenizer t = make();
    CHECK(token_texts(t, "the cat") == "the| |cat");
    CHECK(token_texts(t, "catthe") == "cat|the");
    CHECK(token_texts(t, "cat the") == "cat| the");
    CHECK(token_texts(t, "tthh") == "t|th|h");
    CHECK(token_texts(t, "     ") == "    | ");
    CHECK(token_texts(t, "   ") == "  | ");
    CHECK(token_texts(t, "thec12") == "the|c|1|2");
}

TEST_CASE("merges as one step at a time would do them") {
    // The definition: find the pair of lowest rank, leftmost, merge it, begin again.
    const tokenizer t = make();
    std::map<std::pair<std::string, std::string>, std::size_t> ranks;
    for (const std::string& line : sample_merges()) {
        const std::size_t space = line.find(' ');
        ranks[{bytes_spelled(line.substr(0, space)).value(), bytes_spelled(line.substr(space + 1)).value()}] =
            ranks.size();
    }
    std::mt19937_64 source(uniprefill_test::seed());
    for (int round = 0; round < 500; ++round) {
        std::string word;
        for (std::size_t i = source() % 30; i > 0; --i) {
            word += "theca"[source() % 5];
        }
        std::vector<std::string> parts;
        for (char c : word) {
            parts.emplace_back(1, c);
        }
        while (true) {
            std::size_t best = ranks.size();
            std::size_t at = 0;
            for (std::size_t i = 0; i + 1 < parts.size(); ++i) {
                const auto found = ranks.find({parts[i], parts[i + 1]});
                if (found != ranks.end() && found->second < best) {
                    best = found->second;
                    at = i;
                }
            }
            if (best == ranks.size()) break;
            parts[at] += parts[at + 1];
            parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
        }
        std::string expected;
        for (const std::string& part : parts) {
            expected += (expected.empty() ? "" : "|") + part;
        }
        REQUIRE(token_texts(t, word) == expected);
    }
}

TEST_CASE("llama3 takes whole words first") {
    // "c a" merges before "ca t", but "the" with a token of its own needs no merges: remove them and look.
    gguf_builder builder;
    add_sample_tokenizer(builder, "llama-bpe", true, {"tokenizer.ggml.merges"});
    builder.add_strings("tokenizer.ggml.merges", {});
    const bytes file = builder.build();
    const tokenizer t{gguf(span_of(file))};
    CHECK(token_texts(t, "the cat the1") == "the| |c|a|t| the|1");
    CHECK(t.adds_bos());
    CHECK(!make("smollm").adds_bos());
    CHECK(token_texts(make("gpt-2"), "the") == "the");
}

TEST_CASE("special tokens") {
    const tokenizer t = make();
    CHECK(t.encode("<|a|>", true) == std::vector<std::int32_t>{0});
    CHECK(t.encode("<|ab|>", true) == std::vector<std::int32_t>{1});
    CHECK(t.encode("<|a|>").size() == 5);
    CHECK(t.encode("<tool>") == std::vector<std::int32_t>{2}); // user-defined: always
    CHECK(token_texts(t, "the<|a|>cat<|ab|><|a<tool>", true) == "the|<|a|>|cat|<|ab|>|<|||a|<tool>");
    CHECK(t.is_control(0));
    CHECK(!t.is_control(2));
    CHECK(!t.is_control(-1));
    CHECK(t.bos() == 0);
    CHECK(t.eos() == 1);
    CHECK(t.ends_generation(1));
    CHECK(!t.ends_generation(0));
    CHECK(!t.ends_generation(-1));
    CHECK_REFUSES(t.bytes_of(-1), "token", "-1");
    CHECK_REFUSES(t.bytes_of(t.vocab()), "token", std::to_string(t.vocab()));
}

TEST_CASE("copies stand on their own") {
    auto first = std::make_unique<tokenizer>(make());
    const tokenizer copy = *first;
    first.reset();
    CHECK(copy.encode("<|a|>the", true).size() == 2);
    CHECK(token_texts(copy, "the cat") == "the| |cat");
}

TEST_CASE("bytes that the vocabulary can't spell are refused, not dropped") {
    const tokenizer t = make("smollm", false);
    CHECK(token_texts(t, "the cat") == "the| |cat");
    CHECK_REFUSES(t.encode("the\xff"), "text", "'\\xff' at byte 3");
    CHECK_REFUSES(t.encode("<tool>the dog"), "text", "'d' at byte 10");
}

TEST_CASE("pathological text takes no time worth noting") {
    const std::size_t size = std::size_t{1} << 18;
    std::string many_specials;
    while (many_specials.size() < size) {
        many_specials += "<|a";
    }
    const std::string texts[] = {std::string(size, 'a'),    std::string(size, ' '), std::string(size, '\n'),
                                 std::string(size, '\xff'), std::string(size, '1'), std::string(size, '\''),
                                 std::string(size, '<'),    many_specials};
    for (const char* const pre : {"gpt-2", "smollm", "llama-bpe"}) {
        const tokenizer t = make(pre);
        for (const std::string& text : texts) {
            const auto start = std::chrono::steady_clock::now();
            const bool same = t.decode(t.encode(text, true)) == text;
            const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
            CHECK(same);
            // Quadratic work would be 7 * 10^10 steps; this allows for sanitizers on a busy machine.
            CHECK(took.count() < 60);
        }
    }
    // One word of a megabyte, all of it merged.
    const tokenizer t = make();
    std::string word;
    while (word.size() < (std::size_t{1} << 20)) {
        word += "thecat";
    }
    CHECK(t.encode(word).size() == word.size() / 3);
}

TEST_CASE("tokenizers that aren't sound") {
    const auto strings = [](const char* key, std::vector<std::string> values) {
        return [=] { read_with(key, [&](gguf_builder& b) { b.add_strings(key, values); }); };
    };
    const auto nothing = [](gguf_builder&) {};
    for (const char* const key :
         {"tokenizer.ggml.model", "tokenizer.ggml.pre", "tokenizer.ggml.tokens", "tokenizer.ggml.merges"}) {
        CHECK_REFUSES(read_with(key, nothing), "key '" + std::string(key) + "'", "none");
    }
    for (const char* const key : {"", "tokenizer.ggml.bos_token_id", "tokenizer.ggml.eos_token_id"}) {
        CHECK(refusal([&] { read_with(key, nothing); }).empty());
    }
    CHECK_REFUSES(read_with("tokenizer.ggml.model",
                            [](gguf_builder& b) { b.add_string("tokenizer.ggml.model", "llama"); }),
                  "key 'tokenizer.ggml.model'", "'llama'");
    CHECK_REFUSES(
        read_with("tokenizer.ggml.pre", [](gguf_builder& b) { b.add_string("tokenizer.ggml.pre", "qwen2"); }),
        "key 'tokenizer.ggml.pre'", "'qwen2'");
    CHECK_REFUSES(strings("tokenizer.ggml.tokens", {})(), "key 'tokenizer.ggml.tokens'", "came 0");
    CHECK_REFUSES(strings("tokenizer.ggml.tokens", {"a"})(), "key 'tokenizer.ggml.token_type'", "as many");
    CHECK_REFUSES(strings("tokenizer.ggml.merges", {"t h", "th"})(), "key 'tokenizer.ggml.merges', entry 1",
                  "'th'");
    CHECK_REFUSES(strings("tokenizer.ggml.merges", {"t q"})(), "key 'tokenizer.ggml.merges', entry 0",
                  "'t q'");
    CHECK_REFUSES(strings("tokenizer.ggml.merges", {"t "})(), "key 'tokenizer.ggml.merges', entry 0", "'t '");
    CHECK_REFUSES(strings("tokenizer.ggml.merges", {"\xe4\xb8\xad t"})(),
                  "key 'tokenizer.ggml.merges', entry 0", "");

    std::vector<std::string> tokens = sample_tokens(true);
    tokens[10] = tokens[20];
    CHECK_REFUSES(strings("tokenizer.ggml.tokens", tokens)(), "key 'tokenizer.ggml.tokens', entry", "again");
    tokens = sample_tokens(true);
    tokens[1] = tokens[0];
    CHECK_REFUSES(strings("tokenizer.ggml.tokens", tokens)(), "key 'tokenizer.ggml.tokens', entry", "again");
    tokens[1] = std::string(2000, 'x');
    CHECK_REFUSES(strings("tokenizer.ggml.tokens", tokens)(), "key 'tokenizer.ggml.tokens', entry 1", "2000");

    std::vector<std::int32_t> kinds(tokens.size(), 1);
    const auto with_kind = [&](std::int32_t kind) {
        kinds[5] = kind;
        read_with("tokenizer.ggml.token_type",
                  [&](gguf_builder& b) { b.add_i32s("tokenizer.ggml.token_type", kinds); });
    };
    CHECK_REFUSES(with_kind(7), "key 'tokenizer.ggml.token_type', entry 5", "came 7");
    CHECK_REFUSES(with_kind(-1), "key 'tokenizer.ggml.token_type', entry 5", "came -1");

    // The unknown token is no word, so nothing merges into it; an unused one is.
    kinds.assign(tokens.size(), 1);
    kinds.back() = 2;
    const auto with_kinds = [&] {
        read_with("tokenizer.ggml.token_type",
                  [&](gguf_builder& b) { b.add_i32s("tokenizer.ggml.token_type", kinds); });
    };
    CHECK_REFUSES(with_kinds(), "key 'tokenizer.ggml.merges', entry 8", "'h e'");
    kinds.back() = 5;
    CHECK(refusal(with_kinds).empty());

    const auto id = [](const char* key, std::uint32_t value) {
        return [=] { read_with(key, [&](gguf_builder& b) { b.add_u32(key, value); }); };
    };
    const auto vocab = static_cast<std::uint32_t>(tokens.size());
    CHECK_REFUSES(id("tokenizer.ggml.bos_token_id", vocab)(), "key 'tokenizer.ggml.bos_token_id'", "");
    CHECK_REFUSES(id("tokenizer.ggml.eos_token_id", 0xffffffffU)(), "key 'tokenizer.ggml.eos_token_id'",
                  "4294967295");
    CHECK_REFUSES(read_with("tokenizer.ggml.bos_token_id",
                            [](gguf_builder& b) { b.add_bool("tokenizer.ggml.add_bos_token", true); }),
                  "key 'tokenizer.ggml.add_bos_token'", "came none");
}

TEST_CASE("byte alphabet") {
    std::map<std::string, int> letters;
    for (int byte = 0; byte < 256; ++byte) {
        const std::string letter = spelling_of(static_cast<unsigned char>(byte));
        ++letters[letter];
        CHECK(bytes_spelled(letter) == std::string(1, static_cast<char>(byte)));
    }
    CHECK(letters.size() == 256);
    CHECK(spelling_of(' ') == "\xc4\xa0");  // U+0120
    CHECK(spelling_of('\n') == "\xc4\x8a"); // U+010A
    CHECK(spelling_of(0xad) == "\xc5\x83"); // U+0143, the last
    CHECK(spelling_of('a') == "a");
    CHECK(!bytes_spelled(" "));
    CHECK(!bytes_spelled("\xff"));
    CHECK(!bytes_spelled("\xc5\x84")); // U+0144
}

TEST_CASE("classes of characters") {
    CHECK(class_of(U'a') == unicode_class::letter);
    CHECK(class_of(U'7') == unicode_class::number);
    CHECK(class_of(U' ') == unicode_class::space);
    CHECK(class_of(U'_') == unicode_class::other);
    CHECK(class_of(0x00) == unicode_class::other);
    CHECK(class_of(0x1f) == unicode_class::other);
    CHECK(class_of(0x85) == unicode_class::space);
    CHECK(class_of(0x3000) == unicode_class::space);
    CHECK(class_of(0x200b) == unicode_class::other);
    CHECK(class_of(0x2167) == unicode_class::number);
    CHECK(class_of(0x4e2d) == unicode_class::letter);
    CHECK(class_of(0x0301) == unicode_class::other);
    CHECK(class_of(0x10ffff) == unicode_class::other);
    CHECK(class_of(invalid_byte) == unicode_class::other);
}

TEST_CASE("UTF-8, well-formed or not") {
    std::size_t wrong = 0;
    for (char32_t point = 0; point < 0x110000; ++point) {
        std::string text;
        utf8_append(text, point);
        const utf8_step step = utf8_next(text);
        const bool surrogate = point >= 0xd800 && point < 0xe000;
        wrong += surrogate ? step.code_point != invalid_byte || step.bytes != 1 || step.incomplete
                           : step.code_point != point || step.bytes != text.size();
        for (std::size_t size = 1; size < text.size() && !surrogate; ++size) {
            const utf8_step part = utf8_next(std::string_view(text).substr(0, size));
            wrong += part.code_point != invalid_byte || part.bytes != 1 || !part.incomplete;
        }
    }
    CHECK(wrong == 0);
    for (const char* const bad : {"\x80", "\xc0\x80", "\xc1\xbf", "\xe0\x9f\xbf", "\xf0\x8f\xbf\xbf",
                                  "\xf4\x90\x80\x80", "\xf5\x80\x80\x80", "\xff",
                                  "\xc3"
                                  "A",
                                  "\xe2\x82"
                                  "A"}) {
        const utf8_step step = utf8_next(bad);
        CHECK(step.code_point == invalid_byte);
        CHECK(step.bytes == 1);
        CHECK(!step.incomplete);
    }
}

TEST_CASE("a stream holds back parts of characters, and loses nothing") {
    utf8_stream stream;
    CHECK(stream.push("a\xf0").compare("a") == 0);
    CHECK(stream.push("\x9f\x98").empty());
    CHECK(stream.push("\x80"
                      "b") == "\xf0\x9f\x98\x80"
                              "b");
    CHECK(stream.push("\xff\xc3") == "\xff");
    CHECK(stream.push("x") == "\xc3"
                              "x");
    CHECK(stream.push("\xe2\x82").empty());
    CHECK(stream.flush() == "\xe2\x82");
    CHECK(stream.flush().empty());

    std::mt19937_64 source(uniprefill_test::seed());
    for (int i = 0; i < 2000; ++i) {
        const std::string text = random_bytes(source, source() % 40);
        std::string out;
        for (std::size_t at = 0; at < text.size();) {
            const std::size_t size = std::min<std::size_t>(1 + source() % 3, text.size() - at);
            out += stream.push(std::string_view(text).substr(at, size));
            at += size;
            REQUIRE(at - out.size() <= 3);
        }
        REQUIRE(out + stream.flush() == text);
    }
}
