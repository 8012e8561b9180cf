// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/fuzz_harness.hpp"

#include "engine/error.hpp"
#include "engine/model_file/dequantize.hpp"
#include "engine/model_file/gguf.hpp"
#include "engine/model_file/llama_config.hpp"
#include "engine/model_file/tokenizer.hpp"

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

namespace engine_test {

namespace {

using namespace engine;

/// The parser's errors begin with the part of the file that they are about.
fate parser_fate(const std::string& argument) {
    const auto begins = [&](std::string_view with) { return argument.rfind(with, 0) == 0; };
    if (begins("magic")) return fate::magic;
    if (begins("version") || begins("tensor count") || begins("metadata count")) return fate::header;
    if (begins("key ")) return fate::metadata;
    if (begins("tensor ")) return fate::tensor_table;
    throw std::logic_error("an error about something else: " + argument);
}

/// Touches what the entry says it holds.
std::size_t read_entry(const gguf& file, const metadata_entry& entry) {
    std::size_t sum = entry.key.size();
    if (entry.element == value_type::string && entry.type == value_type::array) {
        const string_array strings = file.strings_of(entry);
        for (std::size_t i = 0; i < strings.size(); ++i) {
            for (char c : strings[i]) {
                sum += static_cast<unsigned char>(c);
            }
        }
        return sum;
    }
    const std::size_t element = entry.type == value_type::string ? 1 : size_of(entry.element);
    for (std::size_t i = 0; i < entry.count * element; ++i) {
        sum += std::to_integer<std::size_t>(entry.data[i]);
    }
    return sum;
}

/// Asks for the entry as what it says it is: only integers may be refused then, those beyond 32 bits.
void ask_for(const gguf& file, const metadata_entry& entry) {
    const bool array = entry.type == value_type::array;
    switch (entry.element) {
    case value_type::string:
        array ? (void)file.get_strings(entry.key) : (void)file.get_string(entry.key);
        return;
    case value_type::f32:
        array ? (void)file.get_f32s(entry.key) : (void)file.get_f32(entry.key);
        return;
    case value_type::boolean:
        if (!array) (void)file.get_bool(entry.key);
        return;
    case value_type::f64:
    case value_type::array:
        return;
    default:
        break;
    }
    if (array) {
        if (entry.element == value_type::i32) (void)file.get_i32s(entry.key);
        return;
    }
    try {
        (void)file.get_u32(entry.key);
    } catch (const error&) {
        return;
    }
}

void read_tensor(const tensor_info& tensor) {
    std::array<float, 512> row; // two of the largest blocks
    if (!tensor.type->readable) return;
    const std::int64_t n = std::min<std::int64_t>(tensor.shape[0], row.size());
    const auto type = static_cast<tensor_type>(tensor.type->number);
    for (std::int64_t i = 0; i < std::min<std::int64_t>(tensor.rows(), 2); ++i) {
        dequantize_row(type, tensor.data + static_cast<std::uint64_t>(i) * tensor.row_bytes(), row.data(),
                       n / tensor.type->block_elements * tensor.type->block_elements);
    }
    // And the last byte that is promised.
    volatile std::byte last = tensor.data[tensor.bytes - 1];
    (void)last;
}

void use_tokenizer(const tokenizer& t) {
    for (const char* const text :
         {"the cat  the    cat1", "<|a|><|ab|><tool>",
          "It's  we'LL\r\n\n \t12345 \xe4\xb8\xad\xc3\xa9 \xf0\x9f\x98\x80!?\n\xff\xc3"}) {
        std::vector<std::int32_t> ids;
        try {
            ids = t.encode(text, true);
        } catch (const error&) {
            continue; // no token for one of the bytes
        }
        if (t.decode(ids) != text) throw std::logic_error("a round trip that isn't one");
    }
    for (std::int32_t id = 0; id < std::min(t.vocab(), 300); ++id) {
        (void)t.bytes_of(id);
    }
}

} // namespace

fate load_everything(byte_span bytes) {
    std::optional<gguf> file;
    try {
        file.emplace(bytes);
    } catch (const error& refused) {
        return parser_fate(refused.argument());
    }
    std::size_t sum = 0;
    for (const metadata_entry& entry : file->metadata()) {
        sum += read_entry(*file, entry);
        ask_for(*file, entry);
    }
    volatile std::size_t keep = sum;
    (void)keep;
    for (const tensor_info& tensor : file->tensors()) {
        read_tensor(tensor);
    }

    fate first = fate::accepted;
    try {
        const llama_config model = read_llama_config(*file);
        const tensor_info* const embedding = file->find_tensor("token_embd.weight");
        if (embedding == nullptr || embedding->rows() != model.vocab)
            throw std::logic_error("unchecked embedding");
    } catch (const error&) {
        first = fate::hyperparameters;
    }
    try {
        use_tokenizer(tokenizer(*file));
    } catch (const error&) {
        if (first == fate::accepted) first = fate::tokenizer;
    }
    return first;
}

} // namespace engine_test
