// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/fuzz_mutations.hpp"

#include "engine/gguf_samples.hpp"

#include <algorithm>
#include <cstring>
#include <iterator>

namespace engine_test {

namespace {

using kind = gguf_builder::field_kind;
using field = gguf_builder::field;

std::size_t below(std::mt19937_64& random, std::size_t bound) {
    return bound == 0 ? 0 : static_cast<std::size_t>(random() % bound);
}

std::uint64_t read(const bytes& file, std::size_t offset, std::size_t size) {
    std::uint64_t value = 0;
    if (offset + size <= file.size()) std::memcpy(&value, file.data() + offset, size);
    return value;
}

/// A field's new value.
std::uint64_t provoking(const field& at, std::uint64_t value, const bytes& file, std::mt19937_64& random) {
    if (at.kind == kind::value_type && below(random, 4) != 0) return below(random, 14);
    if (at.kind == kind::tensor_type && below(random, 4) != 0) return below(random, 42);
    if (at.kind == kind::rank && below(random, 4) != 0) return below(random, 7);
    const std::uint64_t values[] = {0,
                                    1,
                                    value + 1,
                                    value - 1,
                                    value * 2,
                                    value / 2,
                                    value ^ std::uint64_t{1} << below(random, at.size * 8),
                                    file.size(),
                                    file.size() - at.offset,
                                    file.size() - at.offset - at.size,
                                    std::uint64_t{1} << below(random, 64),
                                    (std::uint64_t{1} << below(random, 64)) - 1,
                                    ~std::uint64_t{0},
                                    std::uint64_t{0} - 32,
                                    value + 32,
                                    random(),
                                    random() % 4096};
    return values[below(random, std::size(values))];
}

void change_field(const seed_file& seed, bytes& file, std::mt19937_64& random) {
    const field& at = seed.fields[below(random, seed.fields.size())];
    if (at.offset + at.size > file.size()) return;
    if (at.kind == kind::text || at.size > 8) {
        // Part of a name, a string or an array.
        file[at.offset + below(random, at.size)] = static_cast<std::byte>(random() & 0xff);
        return;
    }
    std::uint64_t value = provoking(at, read(file, at.offset, at.size), file, random);
    if (below(random, 6) == 0) {
        const field& other = seed.fields[below(random, seed.fields.size())];
        value = read(file, other.offset, std::min<std::size_t>(other.size, 8));
    }
    std::memcpy(file.data() + at.offset, &value, at.size);
}

/// Anywhere behind the magic number and before the data.
std::size_t table_offset(const seed_file& seed, const bytes& file, std::mt19937_64& random) {
    const std::size_t end = std::min(seed.data_start, file.size());
    return end <= 8 ? end : 8 + below(random, end - 8);
}

void change(const seed_file& seed, bytes& file, std::mt19937_64& random) {
    const std::size_t at = table_offset(seed, file, random);
    const auto place = file.begin() + static_cast<std::ptrdiff_t>(at);
    switch (below(random, 16)) {
    case 0: // flip one bit
        if (at < file.size()) file[at] ^= static_cast<std::byte>(1U << below(random, 8));
        break;
    case 1: // cut, at times within the tables
        file.resize(below(random, 4) == 0 ? at : file.size() - below(random, file.size() + 1) / 4);
        break;
    case 2: // insert
        file.insert(place, 1 + below(random, 16), static_cast<std::byte>(random() & 0xff));
        break;
    case 3: // remove
        file.erase(place,
                   place + static_cast<std::ptrdiff_t>(std::min(1 + below(random, 16), file.size() - at)));
        break;
    case 4: { // copy a piece of the tables over another
        const std::size_t from = table_offset(seed, file, random);
        const std::size_t size = std::min(below(random, 64), file.size() - std::max(from, at));
        std::memmove(file.data() + at, file.data() + from, size);
        break;
    }
    case 5: // more data than needed
        file.resize(file.size() + below(random, 256));
        break;
    default:
        change_field(seed, file, random);
        break;
    }
}

/// Keys that a model may have, with the values that change nothing.
void add_optional_keys(gguf_builder& builder, const sample_model& model) {
    builder.add_u32("llama.vocab_size", static_cast<std::uint32_t>(sample_tokens(model.all_bytes).size()));
    builder.add_u32("llama.attention.key_length", model.hidden / model.heads);
    builder.add_u32("llama.attention.value_length", model.hidden / model.heads);
    builder.add_bool("llama.attention.causal", true);
    builder.add_u32("llama.expert_count", 0);
    builder.add_f32("llama.logit_scale", 0);
    builder.add_f32("llama.rope.scaling.factor", 1);
    if (model.tied) builder.add_string("llama.rope.scaling.type", "none");
    builder.add_bool("tokenizer.ggml.add_bos_token", true);
}

} // namespace

std::vector<seed_file> seed_files() {
    std::vector<seed_file> out;
    const auto add = [&](gguf_builder builder) {
        bytes content = builder.build();
        out.push_back({std::move(content), builder.fields(), builder.data_start()});
    };
    const char* const pretokenizers[] = {"smollm", "gpt-2", "llama-bpe", "llama3", "llama-v3"};
    std::uint32_t n = 0;
    for (std::uint32_t number : {0U, 1U, 2U, 3U, 6U, 7U, 8U, 12U, 13U, 14U, 30U}) {
        sample_model model;
        model.type = static_cast<engine::tensor_type>(number);
        model.version = n % 3 == 0 ? 2 : 3;
        model.alignment = n % 4 == 3 ? 64 : 32;
        model.hidden = engine::info_of(model.type).block_elements == 256 ? 256 : 32;
        model.layers = n % 2 + 1;
        model.tied = n % 4 < 2;
        model.pretokenizer = pretokenizers[n % 5];
        model.all_bytes = n % 5 == 0;
        gguf_builder builder = model.builder();
        if (n % 2 == 1) add_optional_keys(builder, model);
        add(builder);
        ++n;
    }
    add(sample_of_every_value());
    gguf_builder nested;
    nested.add_nested_array("nested");
    add(nested);
    return out;
}

bytes mutated(const seed_file& seed, std::mt19937_64& random) {
    bytes file = seed.content;
    if (below(random, 20) == 0) file[below(random, 8)] = static_cast<std::byte>(random() & 0xff);
    // Half of them have one change, so that many come far.
    std::size_t changes = below(random, 2) == 0 ? 1 : 2 + below(random, 3);
    for (; changes > 0; --changes) {
        change(seed, file, random);
    }
    return file;
}

} // namespace engine_test
