// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/gguf_builder.hpp"

namespace engine_test {

using engine::value_type;

void gguf_builder::section::put(field_kind kind, const void* from, std::size_t size) {
    const auto* const first = static_cast<const std::byte*>(from);
    fields.push_back({kind, content.size(), size});
    content.insert(content.end(), first, first + size);
}

void gguf_builder::section::put_string(std::string_view text) {
    put(field_kind::length, std::uint64_t{text.size()});
    if (!text.empty()) put(field_kind::text, text.data(), text.size());
}

gguf_builder::gguf_builder(std::uint32_t version, std::uint32_t alignment)
    : version_(version)
    , alignment_(alignment) {
    if (alignment != 32) add_u32("general.alignment", alignment);
}

void gguf_builder::begin_value(std::string_view key, value_type type) {
    ++entry_count_;
    metadata_.put_string(key);
    metadata_.put(field_kind::value_type, static_cast<std::uint32_t>(type));
}

void gguf_builder::begin_array(std::string_view key, value_type element, std::uint64_t count) {
    begin_value(key, value_type::array);
    metadata_.put(field_kind::value_type, static_cast<std::uint32_t>(element));
    metadata_.put(field_kind::count, count);
}

void gguf_builder::add_string(std::string_view key, std::string_view value) {
    begin_value(key, value_type::string);
    metadata_.put_string(value);
}

void gguf_builder::add_scalar(std::string_view key, value_type type, const void* value) {
    begin_value(key, type);
    metadata_.put(field_kind::scalar, value, engine::size_of(type));
}

void gguf_builder::add_bool(std::string_view key, bool value) {
    const std::uint8_t byte = value ? 1 : 0;
    add_scalar(key, value_type::boolean, &byte);
}

void gguf_builder::add_u32(std::string_view key, std::uint32_t value) {
    add_scalar(key, value_type::u32, &value);
}

void gguf_builder::add_f32(std::string_view key, float value) {
    add_scalar(key, value_type::f32, &value);
}

void gguf_builder::add_strings(std::string_view key, const std::vector<std::string>& values) {
    begin_array(key, value_type::string, values.size());
    for (const std::string& value : values) {
        metadata_.put_string(value);
    }
}

void gguf_builder::add_numbers(std::string_view key, value_type type, const void* values, std::size_t count) {
    begin_array(key, type, count);
    metadata_.put(field_kind::scalar, values, count * engine::size_of(type));
}

void gguf_builder::add_i32s(std::string_view key, const std::vector<std::int32_t>& values) {
    add_numbers(key, value_type::i32, values.data(), values.size());
}

void gguf_builder::add_nested_array(std::string_view key) {
    begin_array(key, value_type::array, 1);
    metadata_.put(field_kind::value_type, static_cast<std::uint32_t>(value_type::u8));
    metadata_.put(field_kind::count, std::uint64_t{1});
    metadata_.put(field_kind::scalar, std::uint8_t{7});
}

void gguf_builder::add_tensor(std::string_view name, std::uint32_t type,
                              const std::vector<std::uint64_t>& shape, const bytes& data) {
    data_.resize((data_.size() + alignment_ - 1) / alignment_ * alignment_);
    add_tensor_at(name, type, shape, data_.size());
    data_.insert(data_.end(), data.begin(), data.end());
}

void gguf_builder::add_tensor_at(std::string_view name, std::uint32_t type,
                                 const std::vector<std::uint64_t>& shape, std::uint64_t offset) {
    ++tensor_count_;
    tensors_.put_string(name);
    tensors_.put(field_kind::rank, static_cast<std::uint32_t>(shape.size()));
    for (std::uint64_t size : shape) {
        tensors_.put(field_kind::dimension, size);
    }
    tensors_.put(field_kind::tensor_type, type);
    tensors_.put(field_kind::offset, offset);
}

void gguf_builder::append(const section& part, bytes& file) {
    for (field f : part.fields) {
        f.offset += file.size();
        fields_.push_back(f);
    }
    file.insert(file.end(), part.content.begin(), part.content.end());
}

bytes gguf_builder::build() {
    fields_.clear();
    bytes file = {std::byte{'G'}, std::byte{'G'}, std::byte{'U'}, std::byte{'F'}};
    section header;
    header.put(field_kind::version, version_);
    header.put(field_kind::count, tensor_count_);
    header.put(field_kind::count, entry_count_);
    append(header, file);
    append(metadata_, file);
    append(tensors_, file);
    file.resize((file.size() + alignment_ - 1) / alignment_ * alignment_);
    data_start_ = file.size();
    file.insert(file.end(), data_.begin(), data_.end());
    return file;
}

} // namespace engine_test
