// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/byte_span.hpp"
#include "engine/model_file/mapped_file.hpp"
#include "engine/model_file/tensor_type.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace engine {

/// Types of metadata values, numbered as in GGUF files.
enum class value_type : std::uint32_t {
    u8 = 0,
    i8 = 1,
    u16 = 2,
    i16 = 3,
    u32 = 4,
    i32 = 5,
    f32 = 6,
    boolean = 7,
    string = 8,
    array = 9,
    u64 = 10,
    i64 = 11,
    f64 = 12,
};

std::string_view name_of(value_type type);

/// Bytes of one value in the file, 0 for strings and arrays.
std::size_t size_of(value_type type);

/// One metadata value, checked and left where it lies in the file. Names and strings may hold any bytes.
struct metadata_entry {
    std::string_view key;
    value_type type;
    value_type element;       ///< what an array holds; else equal to `type`
    std::uint64_t count;      ///< elements of an array, bytes of a string, else 1
    const std::byte* data;    ///< first byte of the value, of the string's text, or of the array's elements
    std::size_t first_string; ///< for arrays of strings: index of the first in the file's list of strings
};

/// One tensor, checked: `bytes` bytes lie at `data`. `shape[0]` runs fastest; sizes beyond `rank` are 1.
struct tensor_info {
    std::string_view name;
    const tensor_type_info* type;
    int rank;
    std::array<std::int64_t, 4> shape;
    std::uint64_t offset; ///< of the data, from the start of the data section
    std::uint64_t bytes;
    const std::byte* data;

    std::int64_t elements() const { return shape[0] * shape[1] * shape[2] * shape[3]; }
    std::int64_t rows() const { return shape[1] * shape[2] * shape[3]; }
    std::uint64_t row_bytes() const { return bytes / static_cast<std::uint64_t>(rows()); }
};

/// An array of numbers where it lies in the file.
template <class T>
class number_array {
  public:
    number_array(const std::byte* data, std::size_t size)
        : data_(data)
        , size_(size) {}
    std::size_t size() const { return size_; }
    T operator[](std::size_t i) const { return load<T>(data_ + i * sizeof(T)); }

  private:
    const std::byte* data_;
    std::size_t size_;
};

/// An array of strings where it lies in the file: each is a 64-bit length and that many bytes.
class string_array {
  public:
    string_array(const std::byte* file, const std::uint64_t* offsets, std::size_t size)
        : file_(file)
        , offsets_(offsets)
        , size_(size) {}
    std::size_t size() const { return size_; }
    std::string_view operator[](std::size_t i) const {
        const std::byte* const at = file_ + offsets_[i];
        return {reinterpret_cast<const char*>(at + 8), static_cast<std::size_t>(load<std::uint64_t>(at))};
    }

  private:
    const std::byte* file_;
    const std::uint64_t* offsets_; ///< in the file, of each string's length
    std::size_t size_;
};

/// A GGUF file, version 2 or 3, little-endian.
///
/// Hostile until checked: construction verifies every count, length, offset, type and alignment against the
/// size of the file and against limits before using it or allocating for it, and throws `error` naming the
/// key or tensor. Work is O(n log n) in the size of header and tables. Memory is a few times their size:
/// values, strings and tensors stay where they are, as views, so the bytes must outlive this object (`open`
/// sees to it).
class gguf {
  public:
    explicit gguf(byte_span bytes);
    static gguf open(const std::string& path);

    std::uint32_t version() const { return version_; }
    std::uint64_t alignment() const { return alignment_; }
    std::uint64_t file_bytes() const { return bytes_.size; }

    /// In the order of the file.
    const std::vector<metadata_entry>& metadata() const { return metadata_; }
    const std::vector<tensor_info>& tensors() const { return tensors_; }

    /// nullptr if there is none. O(log n).
    const metadata_entry* find(std::string_view key) const;
    const tensor_info* find_tensor(std::string_view name) const;

    bool has(std::string_view key) const { return find(key) != nullptr; }

    /// Typed access: throws `error` if the key is missing or of another type. Integers of any width are
    /// accepted where their value fits.
    std::uint32_t get_u32(std::string_view key) const;
    float get_f32(std::string_view key) const;
    bool get_bool(std::string_view key) const;
    std::string_view get_string(std::string_view key) const;
    string_array get_strings(std::string_view key) const;
    number_array<std::int32_t> get_i32s(std::string_view key) const;
    number_array<float> get_f32s(std::string_view key) const;

    /// Same, for keys that may be missing (a wrong type is an error all the same).
    std::optional<std::uint32_t> find_u32(std::string_view key) const;
    std::optional<float> find_f32(std::string_view key) const;
    std::optional<bool> find_bool(std::string_view key) const;
    std::optional<std::string_view> find_string(std::string_view key) const;

    /// Elements of an entry that is an array of strings.
    string_array strings_of(const metadata_entry& entry) const;

  private:
    class cursor;
    metadata_entry read_value(cursor& at, std::string_view key);
    void read_metadata(cursor& at, std::uint64_t count);
    void read_tensor_table(cursor& at, std::uint64_t count);
    void place_tensors(std::uint64_t data_start);
    const metadata_entry& require(std::string_view key) const;
    const metadata_entry& require_array(std::string_view key, value_type element) const;

    std::optional<mapped_file> file_; ///< set by `open`
    byte_span bytes_;
    std::uint32_t version_ = 0;
    std::uint64_t alignment_ = 32;
    std::vector<metadata_entry> metadata_;
    std::vector<tensor_info> tensors_;
    std::vector<std::uint64_t> strings_;         ///< where the elements of all arrays of strings lie
    std::vector<std::uint32_t> metadata_by_key_; ///< indices into metadata_, sorted by key
    std::vector<std::uint32_t> tensors_by_name_; ///< indices into tensors_, sorted by name
};

} // namespace engine
