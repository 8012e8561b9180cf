// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/gguf.hpp"
#include "engine/model_file/pretokenizer.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

/// Byte-level BPE as a GGUF file describes it (`tokenizer.ggml.model` "gpt2").
///
/// Text is any bytes. decode(encode(text)) is `text`, bit for bit, or encode throws: some vocabularies have
/// no token for bytes that well-formed text hardly holds (SmolLM2's lacks 21, such as 0xFF and 0x04), and
/// dropping bytes in silence is not an answer. Methods are const and may be called from many threads.
class tokenizer {
  public:
    /// Copies what it needs: `file` may go. Throws `error` naming the key if anything is missing or
    /// inconsistent.
    explicit tokenizer(const gguf& file);

    std::int32_t vocab() const { return static_cast<std::int32_t>(kinds_.size()); }

    /// Token ids of `text`, without BOS. Control tokens such as <|im_start|> are recognised in the text only
    /// if `parse_control`, so that a prompt from outside can't forge them; user-defined tokens always are.
    /// O(n log n), whatever the text.
    std::vector<std::int32_t> encode(std::string_view text, bool parse_control = false) const;

    /// What a token stands for; may be part of a character (see `utf8_stream`). Control tokens give their
    /// name.
    std::string_view bytes_of(std::int32_t id) const;
    std::string decode(const std::vector<std::int32_t>& ids) const;

    bool is_control(std::int32_t id) const;

    /// Whether a generated `id` is the end: EOS, or end of turn.
    bool ends_generation(std::int32_t id) const { return id >= 0 && (id == eos_ || id == end_of_turn_); }

    /// -1 if the file names none.
    std::int32_t bos() const { return bos_; }
    std::int32_t eos() const { return eos_; }

    /// Whether the model expects prompts to begin with BOS.
    bool adds_bos() const { return adds_bos_; }

  private:
    struct merge {
        std::int32_t left;
        std::int32_t right;
        std::int32_t rank; ///< lower ones go first
        std::int32_t result;
    };
    struct scratch;

    void read_tokens(const gguf& file);
    void read_merges(const gguf& file);
    void read_special_ids(const gguf& file);
    void find_specials();
    void sort_by_bytes(std::vector<std::int32_t>& ids) const;
    std::int32_t find_word(std::string_view bytes) const;
    const merge* find_merge(std::int32_t left, std::int32_t right) const;
    std::int32_t special_at(std::string_view text, bool parse_control) const;
    void encode_plain(std::string_view text, std::size_t offset, scratch& work,
                      std::vector<std::int32_t>& out) const;
    void encode_word(std::string_view word, std::size_t offset, scratch& work,
                     std::vector<std::int32_t>& out) const;

    pretokenizer pretokenizer_ = pretokenizer::gpt2;
    bool whole_words_first_ = false; ///< a word that is a token needs no merges (llama3)
    std::string bytes_;              ///< of all tokens, one after another
    std::vector<std::uint32_t> starts_;
    std::vector<std::uint8_t> kinds_;
    std::vector<std::int32_t> words_;    ///< ordinary tokens sorted by their bytes
    std::vector<merge> merges_;          ///< sorted by left, right, rank
    std::vector<std::int32_t> specials_; ///< control and user-defined tokens sorted by text
    std::array<bool, 256> special_starts_ = {};
    std::array<std::int32_t, 256> byte_tokens_ = {};
    std::int32_t bos_ = -1;
    std::int32_t eos_ = -1;
    std::int32_t end_of_turn_ = -1;
    bool adds_bos_ = false;
};

} // namespace engine
