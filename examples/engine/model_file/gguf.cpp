// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/model_file/gguf.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace engine {

namespace {

// Sane limits: real files stay far below, and what a hostile one may claim is bounded even where its size
// allows more.
constexpr std::uint64_t max_entries = 1U << 16;
constexpr std::uint64_t max_tensors = 1U << 17;
constexpr std::uint64_t max_key_bytes = 1024;
constexpr std::uint64_t max_tensor_name_bytes = 256;
constexpr std::uint64_t max_string_bytes = 1U << 26;
constexpr std::uint64_t max_array_elements = 1U << 28;
constexpr std::uint64_t max_alignment = 1U << 16;
constexpr std::uint64_t max_tensor_elements = std::uint64_t{1} << 48;

std::string key_named(std::string_view key) {
    return "key " + quoted(key);
}

std::string tensor_named(std::string_view name) {
    return "tensor " + quoted(name);
}

bool is_integer(value_type type) {
    return size_of(type) != 0 && type != value_type::f32 && type != value_type::f64 &&
           type != value_type::boolean;
}

std::string type_of(const metadata_entry& entry) {
    if (entry.type != value_type::array) return std::string(name_of(entry.type));
    return "an array of " + std::string(name_of(entry.element));
}

/// Indices 0..n-1 sorted by name. Throws if two names are equal.
template <class Items, class NameOf, class ArgumentOf>
std::vector<std::uint32_t> sorted_unique(const Items& items, NameOf name_of_item, ArgumentOf argument) {
    std::vector<std::uint32_t> order(items.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
        order[i] = static_cast<std::uint32_t>(i);
    }
    std::sort(order.begin(), order.end(), [&](std::uint32_t a, std::uint32_t b) {
        return name_of_item(items[a]) < name_of_item(items[b]);
    });
    for (std::size_t i = 1; i < order.size(); ++i) {
        if (name_of_item(items[order[i - 1]]) == name_of_item(items[order[i]])) {
            throw error(argument(name_of_item(items[order[i]])), "to occur once", "two of them");
        }
    }
    return order;
}

template <class Item, class NameOf>
const Item* find_sorted(const std::vector<Item>& items, const std::vector<std::uint32_t>& order,
                        std::string_view name, NameOf name_of_item) {
    const auto at =
        std::lower_bound(order.begin(), order.end(), name, [&](std::uint32_t index, std::string_view wanted) {
            return name_of_item(items[index]) < wanted;
        });
    if (at == order.end() || name_of_item(items[*at]) != name) return nullptr;
    return &items[*at];
}

std::string_view key_of(const metadata_entry& entry) {
    return entry.key;
}

std::string_view tensor_name_of(const tensor_info& tensor) {
    return tensor.name;
}

} // namespace

std::string_view name_of(value_type type) {
    constexpr std::string_view names[] = {"u8",   "i8",     "u16",   "i16", "u32", "i32", "f32",
                                          "bool", "string", "array", "u64", "i64", "f64"};
    return names[static_cast<std::size_t>(type)];
}

std::size_t size_of(value_type type) {
    constexpr std::size_t sizes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return sizes[static_cast<std::size_t>(type)];
}

/// Reads forward through the file and never past its end.
class gguf::cursor {
  public:
    explicit cursor(byte_span bytes)
        : bytes_(bytes) {}

    std::uint64_t position() const { return position_; }
    std::uint64_t left() const { return bytes_.size - position_; }

    /// The next `size` bytes. `argument` is called for the name only if they aren't there.
    template <class Argument>
    const std::byte* take(std::uint64_t size, Argument argument) {
        if (size > left()) {
            throw error(argument(), std::to_string(size) + " bytes",
                        "the end of the file after " + std::to_string(left()));
        }
        const std::byte* const from = bytes_.data + position_;
        position_ += static_cast<std::size_t>(size);
        return from;
    }

    template <class T, class Argument>
    T take(Argument argument) {
        return load<T>(take(sizeof(T), argument));
    }

    /// A length and that many bytes.
    template <class Argument>
    std::string_view take_string(std::uint64_t max_bytes, Argument argument) {
        const auto size = take<std::uint64_t>(argument);
        if (size > max_bytes) {
            throw error(argument(), "a string of at most " + std::to_string(max_bytes) + " bytes",
                        std::to_string(size));
        }
        const std::byte* const text = take(size, argument);
        return {reinterpret_cast<const char*>(text), static_cast<std::size_t>(size)};
    }

    template <class Argument>
    value_type take_type(Argument argument) {
        const auto number = take<std::uint32_t>(argument);
        if (number > static_cast<std::uint32_t>(value_type::f64)) {
            throw error(argument(), "a value type of 0 to 12", std::to_string(number));
        }
        return static_cast<value_type>(number);
    }

  private:
    byte_span bytes_;
    std::size_t position_ = 0;
};

gguf::gguf(byte_span bytes)
    : bytes_(bytes) {
    cursor at(bytes);
    const auto magic = [] { return std::string("magic number"); };
    const std::byte* const first = at.take(4, magic);
    const std::string_view letters(reinterpret_cast<const char*>(first), 4);
    if (letters != "GGUF") throw error(magic(), "'GGUF'", quoted(letters));

    version_ = at.take<std::uint32_t>([] { return std::string("version"); });
    if (version_ != 2 && version_ != 3) {
        const bool swapped = version_ == 0x02000000U || version_ == 0x03000000U;
        throw error("version", "2 or 3, little-endian",
                    swapped ? "a big-endian file" : std::to_string(version_));
    }

    const auto tensor_count = at.take<std::uint64_t>([] { return std::string("tensor count"); });
    const auto entry_count = at.take<std::uint64_t>([] { return std::string("metadata count"); });
    // The least that an entry takes is its key's length, its type and one byte; a tensor, one dimension.
    const auto check_count = [&](const char* what, std::uint64_t count, std::uint64_t least,
                                 std::uint64_t max) {
        const std::uint64_t fit = std::min(at.left() / least, max);
        if (count > fit) throw error(what, "at most " + std::to_string(fit), std::to_string(count));
    };
    check_count("metadata count", entry_count, 8 + 4 + 1, max_entries);
    check_count("tensor count", tensor_count, 8 + 4 + 8 + 4 + 8, max_tensors);

    read_metadata(at, entry_count);
    read_tensor_table(at, tensor_count);
    place_tensors((at.position() + alignment_ - 1) / alignment_ * alignment_);
}

gguf gguf::open(const std::string& path) {
    mapped_file file(path);
    try {
        gguf content(file.bytes());
        content.file_ = std::move(file);
        return content;
    } catch (const error& inner) {
        throw error("model file " + quoted(path, 400) + ", " + inner.argument(), inner.expected(),
                    inner.came());
    }
}

metadata_entry gguf::read_value(cursor& at, std::string_view key) {
    const auto argument = [&] { return key_named(key); };
    metadata_entry entry = {key, at.take_type(argument), value_type::u8, 1, nullptr, 0};
    entry.element = entry.type;

    if (entry.type == value_type::string) {
        const std::string_view text = at.take_string(max_string_bytes, argument);
        entry.count = text.size();
        entry.data = reinterpret_cast<const std::byte*>(text.data());
        return entry;
    }
    if (entry.type == value_type::array) {
        entry.element = at.take_type(argument);
        entry.count = at.take<std::uint64_t>(argument);
        if (entry.element == value_type::array) {
            throw error(argument(), "an array of numbers or strings", "an array of arrays");
        }
        if (entry.count > max_array_elements) {
            throw error(argument(), "at most " + std::to_string(max_array_elements) + " elements",
                        std::to_string(entry.count));
        }
    }
    if (entry.element == value_type::string) {
        entry.first_string = strings_.size();
        entry.data = at.take(0, argument);
        for (std::uint64_t i = 0; i < entry.count; ++i) {
            strings_.push_back(at.position());
            at.take_string(max_string_bytes, argument);
        }
        return entry;
    }
    // No overflow: the count is at most 2^28, the size at most 8.
    entry.data = at.take(entry.count * size_of(entry.element), argument);
    if (entry.element == value_type::boolean) {
        for (std::uint64_t i = 0; i < entry.count; ++i) {
            const int value = std::to_integer<int>(entry.data[i]);
            if (value > 1) throw error(argument(), "a bool, 0 or 1", std::to_string(value));
        }
    }
    return entry;
}

void gguf::read_metadata(cursor& at, std::uint64_t count) {
    metadata_.reserve(static_cast<std::size_t>(count)); // checked against the file's size
    for (std::uint64_t i = 0; i < count; ++i) {
        const auto argument = [&] { return "key number " + std::to_string(i + 1); };
        const std::string_view key = at.take_string(max_key_bytes, argument);
        if (key.empty()) throw error(argument(), "a name", "an empty string");
        metadata_.push_back(read_value(at, key));
    }
    metadata_by_key_ = sorted_unique(metadata_, key_of, key_named);

    constexpr std::string_view key = "general.alignment";
    if (!has(key)) return;
    alignment_ = get_u32(key);
    const bool power_of_two = alignment_ != 0 && (alignment_ & (alignment_ - 1)) == 0;
    if (!power_of_two || alignment_ < 8 || alignment_ > max_alignment) {
        throw error(key_named(key), "a power of two from 8 to " + std::to_string(max_alignment),
                    std::to_string(alignment_));
    }
}

void gguf::read_tensor_table(cursor& at, std::uint64_t count) {
    tensors_.reserve(static_cast<std::size_t>(count)); // checked against the file's size
    for (std::uint64_t i = 0; i < count; ++i) {
        tensor_info tensor = {};
        tensor.name = at.take_string(max_tensor_name_bytes,
                                     [&] { return "tensor number " + std::to_string(i + 1) + ", its name"; });
        const auto argument = [&] { return tensor_named(tensor.name); };

        const auto rank = at.take<std::uint32_t>(argument);
        if (rank < 1 || rank > 4) throw error(argument(), "1 to 4 dimensions", std::to_string(rank));
        tensor.rank = static_cast<int>(rank);
        tensor.shape = {1, 1, 1, 1};
        std::uint64_t elements = 1;
        for (std::uint32_t d = 0; d < rank; ++d) {
            const auto size = at.take<std::uint64_t>(argument);
            if (size == 0) throw error(argument(), "dimensions of at least 1", "0");
            if (size > max_tensor_elements / elements) {
                throw error(argument(), "at most 2^48 elements",
                            std::to_string(elements) + " x " + std::to_string(size));
            }
            elements *= size;
            tensor.shape[d] = static_cast<std::int64_t>(size);
        }

        const auto number = at.take<std::uint32_t>(argument);
        tensor.type = find_tensor_type(number);
        if (tensor.type == nullptr) {
            throw error(argument(), "a known element type", "type number " + std::to_string(number));
        }
        if (tensor.shape[0] % tensor.type->block_elements != 0) {
            throw error(argument(),
                        "rows of a multiple of " + std::to_string(tensor.type->block_elements) +
                            " elements (" + std::string(tensor.type->name) + ")",
                        std::to_string(tensor.shape[0]));
        }
        // No overflow: at most 2^48 elements of at most 8 bytes.
        tensor.bytes = elements / static_cast<std::uint64_t>(tensor.type->block_elements) *
                       static_cast<std::uint64_t>(tensor.type->block_bytes);
        tensor.offset = at.take<std::uint64_t>(argument);
        if (tensor.offset % alignment_ != 0) {
            throw error(argument(), "an offset that is a multiple of " + std::to_string(alignment_),
                        std::to_string(tensor.offset));
        }
        tensors_.push_back(tensor);
    }
    tensors_by_name_ = sorted_unique(tensors_, tensor_name_of, tensor_named);
}

void gguf::place_tensors(std::uint64_t data_start) {
    const std::uint64_t data_bytes = data_start <= bytes_.size ? bytes_.size - data_start : 0;
    for (tensor_info& tensor : tensors_) {
        if (tensor.bytes > data_bytes || tensor.offset > data_bytes - tensor.bytes) {
            throw error(tensor_named(tensor.name),
                        "data within the file's " + std::to_string(bytes_.size) + " bytes",
                        std::to_string(tensor.bytes) + " bytes at offset " + std::to_string(tensor.offset) +
                            " of the data section, which starts at " + std::to_string(data_start));
        }
        tensor.data = bytes_.data + data_start + tensor.offset;
    }
    std::vector<std::uint32_t> order = tensors_by_name_;
    std::sort(order.begin(), order.end(),
              [&](std::uint32_t a, std::uint32_t b) { return tensors_[a].offset < tensors_[b].offset; });
    for (std::size_t i = 1; i < order.size(); ++i) {
        const tensor_info& before = tensors_[order[i - 1]];
        const tensor_info& after = tensors_[order[i]];
        if (before.offset + before.bytes > after.offset) {
            throw error(tensor_named(after.name), "data of its own",
                        "data that overlaps tensor " + quoted(before.name));
        }
    }
}

const metadata_entry* gguf::find(std::string_view key) const {
    return find_sorted(metadata_, metadata_by_key_, key, key_of);
}

const tensor_info* gguf::find_tensor(std::string_view name) const {
    return find_sorted(tensors_, tensors_by_name_, name, tensor_name_of);
}

const metadata_entry& gguf::require(std::string_view key) const {
    const metadata_entry* const entry = find(key);
    if (entry == nullptr) throw error(key_named(key), "it in the model file", "none");
    return *entry;
}

const metadata_entry& gguf::require_array(std::string_view key, value_type element) const {
    const metadata_entry& entry = require(key);
    if (entry.type != value_type::array || entry.element != element) {
        throw error(key_named(key), "an array of " + std::string(name_of(element)), type_of(entry));
    }
    return entry;
}

std::uint32_t gguf::get_u32(std::string_view key) const {
    const metadata_entry& entry = require(key);
    if (!is_integer(entry.type)) throw error(key_named(key), "an integer", type_of(entry));
    // Every width as its 64 bits; a negative one becomes larger than any u32.
    std::uint64_t value = 0;
    switch (entry.type) {
    case value_type::u8:
        value = load<std::uint8_t>(entry.data);
        break;
    case value_type::u16:
        value = load<std::uint16_t>(entry.data);
        break;
    case value_type::u32:
        value = load<std::uint32_t>(entry.data);
        break;
    case value_type::u64:
        value = load<std::uint64_t>(entry.data);
        break;
    case value_type::i8:
        value = static_cast<std::uint64_t>(std::int64_t{load<std::int8_t>(entry.data)});
        break;
    case value_type::i16:
        value = static_cast<std::uint64_t>(std::int64_t{load<std::int16_t>(entry.data)});
        break;
    case value_type::i32:
        value = static_cast<std::uint64_t>(std::int64_t{load<std::int32_t>(entry.data)});
        break;
    default:
        value = static_cast<std::uint64_t>(load<std::int64_t>(entry.data));
        break;
    }
    if (value > std::numeric_limits<std::uint32_t>::max()) {
        throw error(key_named(key), "an integer from 0 to 4294967295",
                    entry.type == value_type::u64 ? std::to_string(value)
                                                  : std::to_string(static_cast<std::int64_t>(value)));
    }
    return static_cast<std::uint32_t>(value);
}

float gguf::get_f32(std::string_view key) const {
    const metadata_entry& entry = require(key);
    if (entry.type != value_type::f32) throw error(key_named(key), "f32", type_of(entry));
    return load<float>(entry.data);
}

bool gguf::get_bool(std::string_view key) const {
    const metadata_entry& entry = require(key);
    if (entry.type != value_type::boolean) throw error(key_named(key), "bool", type_of(entry));
    return std::to_integer<int>(*entry.data) != 0;
}

std::string_view gguf::get_string(std::string_view key) const {
    const metadata_entry& entry = require(key);
    if (entry.type != value_type::string) throw error(key_named(key), "a string", type_of(entry));
    return {reinterpret_cast<const char*>(entry.data), static_cast<std::size_t>(entry.count)};
}

string_array gguf::get_strings(std::string_view key) const {
    return strings_of(require_array(key, value_type::string));
}

number_array<std::int32_t> gguf::get_i32s(std::string_view key) const {
    const metadata_entry& entry = require_array(key, value_type::i32);
    return {entry.data, static_cast<std::size_t>(entry.count)};
}

number_array<float> gguf::get_f32s(std::string_view key) const {
    const metadata_entry& entry = require_array(key, value_type::f32);
    return {entry.data, static_cast<std::size_t>(entry.count)};
}

std::optional<std::uint32_t> gguf::find_u32(std::string_view key) const {
    return has(key) ? std::optional(get_u32(key)) : std::nullopt;
}

std::optional<float> gguf::find_f32(std::string_view key) const {
    return has(key) ? std::optional(get_f32(key)) : std::nullopt;
}

std::optional<bool> gguf::find_bool(std::string_view key) const {
    return has(key) ? std::optional(get_bool(key)) : std::nullopt;
}

std::optional<std::string_view> gguf::find_string(std::string_view key) const {
    return has(key) ? std::optional(get_string(key)) : std::nullopt;
}

string_array gguf::strings_of(const metadata_entry& entry) const {
    return {bytes_.data, strings_.data() + entry.first_string, static_cast<std::size_t>(entry.count)};
}

} // namespace engine
