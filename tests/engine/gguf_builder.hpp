// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/gguf.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace engine_test {

using bytes = std::vector<std::byte>;

inline engine::byte_span span_of(const bytes& file) {
    return {file.data(), file.size()};
}

/// Builds GGUF files in memory, sound ones unless asked otherwise, and remembers where each field lies so
/// that mutations can aim.
class gguf_builder {
  public:
    enum class field_kind {
        version,
        count,
        length,
        value_type,
        scalar,
        text,
        rank,
        dimension,
        tensor_type,
        offset
    };
    struct field {
        field_kind kind;
        std::size_t offset; ///< in the built file
        std::size_t size;   ///< in bytes
    };

    explicit gguf_builder(std::uint32_t version = 3, std::uint32_t alignment = 32);

    void add_string(std::string_view key, std::string_view value);
    void add_bool(std::string_view key, bool value);
    void add_u32(std::string_view key, std::uint32_t value);
    void add_f32(std::string_view key, float value);
    /// One number of any type, as its bytes.
    void add_scalar(std::string_view key, engine::value_type type, const void* value);
    void add_strings(std::string_view key, const std::vector<std::string>& values);
    /// `count` numbers of any type, as their bytes.
    void add_numbers(std::string_view key, engine::value_type type, const void* values, std::size_t count);
    void add_i32s(std::string_view key, const std::vector<std::int32_t>& values);
    /// An array of one array of one u8, which readers may refuse.
    void add_nested_array(std::string_view key);

    /// Data must be what the type and the shape need, if the file is to be sound.
    void add_tensor(std::string_view name, std::uint32_t type, const std::vector<std::uint64_t>& shape,
                    const bytes& data);
    /// Same with an offset of one's own, and no data added.
    void add_tensor_at(std::string_view name, std::uint32_t type, const std::vector<std::uint64_t>& shape,
                       std::uint64_t offset);

    /// The file. `fields()` are then right.
    bytes build();
    const std::vector<field>& fields() const { return fields_; }
    std::size_t data_start() const { return data_start_; }

  private:
    struct section {
        bytes content;
        std::vector<field> fields;
        void put(field_kind kind, const void* from, std::size_t size);
        template <class T>
        void put(field_kind kind, T value) {
            put(kind, &value, sizeof(value));
        }
        void put_string(std::string_view text);
    };
    void begin_value(std::string_view key, engine::value_type type);
    void begin_array(std::string_view key, engine::value_type element, std::uint64_t count);
    void append(const section& part, bytes& file);

    std::uint32_t version_;
    std::uint32_t alignment_;
    section metadata_;
    section tensors_;
    std::uint64_t entry_count_ = 0;
    std::uint64_t tensor_count_ = 0;
    bytes data_;
    std::vector<field> fields_;
    std::size_t data_start_ = 0;
};

} // namespace engine_test
