// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/tokenizer.hpp"

#include "engine/error.hpp"
#include "engine/model_file/byte_alphabet.hpp"

#include <algorithm>
#include <queue>
#include <tuple>

namespace engine {

namespace {

/// `tokenizer.ggml.token_type`.
enum token_kind : std::uint8_t {
    kind_undefined = 0,
    kind_normal = 1,
    kind_unknown = 2,
    kind_control = 3,
    kind_user_defined = 4,
    kind_unused = 5,
    kind_byte = 6,
};

constexpr std::size_t max_vocab = std::size_t{1} << 22;
constexpr std::size_t max_merges = std::size_t{1} << 23;
constexpr std::size_t max_special_bytes = 1024;
constexpr std::size_t max_token_bytes_in_all = std::size_t{1} << 30;

std::string key_named(std::string_view key) {
    return "key " + quoted(key);
}

std::string entry_named(std::string_view key, std::size_t i) {
    return key_named(key) + ", entry " + std::to_string(i);
}

} // namespace

/// What encoding a word needs, kept from word to word.
struct tokenizer::scratch {
    static constexpr std::uint32_t none = UINT32_MAX;
    struct symbol {
        std::int32_t id; ///< -1 once it has been merged into the one before
        std::uint32_t previous;
        std::uint32_t next;
    };
    /// A merge that was possible when it was queued.
    struct candidate {
        const merge* what;
        std::uint32_t at; ///< the left symbol
    };
    struct goes_later {
        bool operator()(const candidate& a, const candidate& b) const {
            return std::tie(a.what->rank, a.at) > std::tie(b.what->rank, b.at);
        }
    };
    std::vector<symbol> symbols;
    std::priority_queue<candidate, std::vector<candidate>, goes_later> queue;
};

tokenizer::tokenizer(const gguf& file) {
    const std::string_view model = file.get_string("tokenizer.ggml.model");
    if (model != "gpt2")
        throw error(key_named("tokenizer.ggml.model"), "'gpt2' (byte-level BPE)", quoted(model));
    const std::string_view name = file.get_string("tokenizer.ggml.pre");
    const auto kind = find_pretokenizer(name);
    if (!kind) {
        throw error(key_named("tokenizer.ggml.pre"), "'smollm', 'gpt-2', 'llama-bpe', 'llama3' or 'llama-v3'",
                    quoted(name));
    }
    pretokenizer_ = *kind;
    whole_words_first_ = *kind == pretokenizer::llama3;
    read_tokens(file);
    read_merges(file);
    read_special_ids(file);
}

void tokenizer::read_tokens(const gguf& file) {
    constexpr std::string_view key = "tokenizer.ggml.tokens";
    constexpr std::string_view kind_key = "tokenizer.ggml.token_type";
    const string_array tokens = file.get_strings(key);
    if (tokens.size() < 1 || tokens.size() > max_vocab) {
        throw error(key_named(key), "1 to " + std::to_string(max_vocab) + " tokens",
                    std::to_string(tokens.size()));
    }
    kinds_.assign(tokens.size(), kind_normal);
    if (file.has(kind_key)) {
        const number_array<std::int32_t> kinds = file.get_i32s(kind_key);
        if (kinds.size() != tokens.size()) {
            throw error(key_named(kind_key), "as many as there are tokens, " + std::to_string(tokens.size()),
                        std::to_string(kinds.size()));
        }
        for (std::size_t i = 0; i < kinds.size(); ++i) {
            if (kinds[i] < kind_undefined || kinds[i] > kind_byte) {
                throw error(entry_named(kind_key, i), "0 to 6", std::to_string(kinds[i]));
            }
            kinds_[i] = static_cast<std::uint8_t>(kinds[i]);
        }
    }

    // A token never has more bytes than its spelling.
    std::size_t in_all = 0;
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        in_all += tokens[i].size();
        if (in_all > max_token_bytes_in_all) throw error(key_named(key), "less than 1 GiB of text", "more");
    }
    bytes_.reserve(in_all);
    starts_.reserve(tokens.size() + 1);
    words_.reserve(tokens.size());
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        starts_.push_back(static_cast<std::uint32_t>(bytes_.size()));
        const bool literal =
            kinds_[i] == kind_control || kinds_[i] == kind_user_defined || kinds_[i] == kind_unknown;
        const auto spelled = literal ? std::nullopt : bytes_spelled(tokens[i]);
        // What isn't in the alphabet can't come from text; it is shown as it stands.
        bytes_ += spelled ? std::string_view(*spelled) : tokens[i];
        if (spelled && !spelled->empty()) words_.push_back(static_cast<std::int32_t>(i));
    }
    starts_.push_back(static_cast<std::uint32_t>(bytes_.size()));

    sort_by_bytes(words_);
    find_specials();
    sort_by_bytes(specials_);
    for (std::size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
        const char text = static_cast<char>(static_cast<unsigned char>(byte));
        byte_tokens_[byte] = find_word({&text, 1});
    }
}

void tokenizer::find_specials() {
    for (std::int32_t id = 0; id < vocab(); ++id) {
        const auto kind = kinds_[static_cast<std::size_t>(id)];
        const std::string_view text = bytes_of(id);
        if ((kind != kind_control && kind != kind_user_defined) || text.empty()) continue;
        if (text.size() > max_special_bytes) {
            throw error(entry_named("tokenizer.ggml.tokens", static_cast<std::size_t>(id)),
                        "a special token of at most " + std::to_string(max_special_bytes) + " bytes",
                        std::to_string(text.size()));
        }
        specials_.push_back(id);
        special_starts_[static_cast<unsigned char>(text.front())] = true;
    }
}

void tokenizer::sort_by_bytes(std::vector<std::int32_t>& ids) const {
    std::sort(ids.begin(), ids.end(),
              [&](std::int32_t a, std::int32_t b) { return bytes_of(a) < bytes_of(b); });
    for (std::size_t i = 1; i < ids.size(); ++i) {
        if (bytes_of(ids[i - 1]) == bytes_of(ids[i])) {
            throw error(entry_named("tokenizer.ggml.tokens", static_cast<std::size_t>(ids[i])),
                        "a token of its own", quoted(bytes_of(ids[i])) + " again");
        }
    }
}

void tokenizer::read_merges(const gguf& file) {
    constexpr std::string_view key = "tokenizer.ggml.merges";
    const string_array lines = file.get_strings(key);
    if (lines.size() > max_merges) {
        throw error(key_named(key), "at most " + std::to_string(max_merges), std::to_string(lines.size()));
    }
    merges_.reserve(lines.size());
    for (std::size_t i = 0; i < lines.size(); ++i) {
        // The alphabet has no space of its own.
        const std::string_view line = lines[i];
        const std::size_t space = line.find(' ');
        merge pair = {-1, -1, static_cast<std::int32_t>(i), -1};
        if (space != std::string_view::npos) {
            const auto left = bytes_spelled(line.substr(0, space));
            const auto right = bytes_spelled(line.substr(space + 1));
            if (left && right) {
                pair.left = find_word(*left);
                pair.right = find_word(*right);
                pair.result = find_word(*left + *right);
            }
        }
        if (pair.left < 0 || pair.right < 0 || pair.result < 0) {
            throw error(entry_named(key, i), "two tokens, with a space between, that together are a token",
                        quoted(line));
        }
        merges_.push_back(pair);
    }
    std::sort(merges_.begin(), merges_.end(), [](const merge& a, const merge& b) {
        return std::tie(a.left, a.right, a.rank) < std::tie(b.left, b.right, b.rank);
    });
}

void tokenizer::read_special_ids(const gguf& file) {
    const auto read = [&](std::string_view key) -> std::int32_t {
        const auto id = file.find_u32(key);
        if (!id) return -1;
        if (*id >= kinds_.size()) {
            throw error(key_named(key), "a token below " + std::to_string(kinds_.size()),
                        std::to_string(*id));
        }
        return static_cast<std::int32_t>(*id);
    };
    bos_ = read("tokenizer.ggml.bos_token_id");
    eos_ = read("tokenizer.ggml.eos_token_id");
    end_of_turn_ = read("tokenizer.ggml.eot_token_id");

    // Files of llama3 models written before the key existed expect BOS.
    constexpr std::string_view key = "tokenizer.ggml.add_bos_token";
    const bool by_default = pretokenizer_ == pretokenizer::llama3 && bos_ >= 0;
    adds_bos_ = file.find_bool(key).value_or(by_default);
    if (adds_bos_ && bos_ < 0) throw error(key_named(key), "a 'tokenizer.ggml.bos_token_id' with it", "none");
}

std::string_view tokenizer::bytes_of(std::int32_t id) const {
    if (id < 0 || id >= vocab()) {
        throw error("token", "0 to " + std::to_string(vocab() - 1), std::to_string(id));
    }
    const auto i = static_cast<std::size_t>(id);
    return std::string_view(bytes_).substr(starts_[i], starts_[i + 1] - starts_[i]);
}

std::string tokenizer::decode(const std::vector<std::int32_t>& ids) const {
    std::string out;
    for (std::int32_t id : ids) {
        out += bytes_of(id);
    }
    return out;
}

bool tokenizer::is_control(std::int32_t id) const {
    return id >= 0 && id < vocab() && kinds_[static_cast<std::size_t>(id)] == kind_control;
}

std::int32_t tokenizer::find_word(std::string_view bytes) const {
    const auto at =
        std::lower_bound(words_.begin(), words_.end(), bytes,
                         [&](std::int32_t id, std::string_view wanted) { return bytes_of(id) < wanted; });
    return at != words_.end() && bytes_of(*at) == bytes ? *at : -1;
}

const tokenizer::merge* tokenizer::find_merge(std::int32_t left, std::int32_t right) const {
    const auto at =
        std::lower_bound(merges_.begin(), merges_.end(), std::tie(left, right),
                         [](const merge& a, const std::tuple<const std::int32_t&, const std::int32_t&>& b) {
                             return std::tie(a.left, a.right) < b;
                         });
    return at != merges_.end() && at->left == left && at->right == right ? &*at : nullptr;
}

/// The longest special token that `text` begins with, or -1.
std::int32_t tokenizer::special_at(std::string_view text, bool parse_control) const {
    if (!special_starts_[static_cast<unsigned char>(text.front())]) return -1;
    // Those that begin with the first `depth` bytes of `text` are [first, last), narrowed byte by byte.
    std::int32_t found = -1;
    auto first = specials_.begin();
    auto last = specials_.end();
    for (std::size_t depth = 0; first != last; ++depth) {
        if (bytes_of(*first).size() == depth) {
            if (parse_control || !is_control(*first)) found = *first;
            ++first;
        }
        if (depth == text.size()) break;
        const auto byte = static_cast<unsigned char>(text[depth]);
        const auto byte_of = [&](std::int32_t id) { return static_cast<unsigned char>(bytes_of(id)[depth]); };
        first = std::partition_point(first, last, [&](std::int32_t id) { return byte_of(id) < byte; });
        last = std::partition_point(first, last, [&](std::int32_t id) { return byte_of(id) == byte; });
    }
    return found;
}

std::vector<std::int32_t> tokenizer::encode(std::string_view text, bool parse_control) const {
    std::vector<std::int32_t> out;
    scratch work;
    std::size_t done = 0;
    for (std::size_t at = 0; at < text.size();) {
        const std::int32_t found = special_at(text.substr(at), parse_control);
        if (found < 0) {
            ++at;
            continue;
        }
        encode_plain(text.substr(done, at - done), done, work, out);
        out.push_back(found);
        at += bytes_of(found).size();
        done = at;
    }
    encode_plain(text.substr(done), done, work, out);
    return out;
}

void tokenizer::encode_plain(std::string_view text, std::size_t offset, scratch& work,
                             std::vector<std::int32_t>& out) const {
    for (std::string_view word : split_words(pretokenizer_, text)) {
        encode_word(word, offset, work, out);
        offset += word.size();
    }
}

void tokenizer::encode_word(std::string_view word, std::size_t offset, scratch& work,
                            std::vector<std::int32_t>& out) const {
    if (whole_words_first_) {
        const std::int32_t whole = find_word(word);
        if (whole >= 0) {
            out.push_back(whole);
            return;
        }
    }
    if (word.size() >= scratch::none)
        throw error("text", "words of less than 4 GiB", std::to_string(word.size()));

    // One symbol for each byte, linked; the best merge first, and it makes at most two new ones possible.
    std::vector<scratch::symbol>& symbols = work.symbols;
    symbols.clear();
    for (std::size_t i = 0; i < word.size(); ++i) {
        const auto byte = static_cast<unsigned char>(word[i]);
        const std::int32_t id = byte_tokens_[byte];
        if (id < 0) {
            throw error("text", "bytes that the model's vocabulary can spell",
                        quoted(word.substr(i, 1)) + " at byte " + std::to_string(offset + i));
        }
        const auto at = static_cast<std::uint32_t>(i);
        symbols.push_back(
            {id, i == 0 ? scratch::none : at - 1, i + 1 == word.size() ? scratch::none : at + 1});
    }
    const auto consider = [&](std::uint32_t left) {
        if (left == scratch::none || symbols[left].next == scratch::none) return;
        const merge* const pair = find_merge(symbols[left].id, symbols[symbols[left].next].id);
        if (pair != nullptr) work.queue.push({pair, left});
    };
    for (std::size_t i = 0; i < symbols.size(); ++i) {
        consider(static_cast<std::uint32_t>(i));
    }
    while (!work.queue.empty()) {
        const scratch::candidate best = work.queue.top();
        work.queue.pop();
        scratch::symbol& left = symbols[best.at];
        if (left.id != best.what->left || left.next == scratch::none) continue;
        scratch::symbol& right = symbols[left.next];
        if (right.id != best.what->right) continue;
        left.id = best.what->result;
        right.id = -1;
        left.next = right.next;
        if (left.next != scratch::none) symbols[left.next].previous = best.at;
        consider(left.previous);
        consider(best.at);
    }
    for (std::uint32_t at = 0; at != scratch::none && at < symbols.size(); at = symbols[at].next) {
        out.push_back(symbols[at].id);
    }
}

} // namespace engine
