// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/inspect.hpp"

#include "engine/error.hpp"
#include "engine/model_file/gguf.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iomanip>
#include <map>
#include <nlohmann/json.hpp>
#include <ostream>
#include <string>
#include <string_view>

namespace engine {

namespace {

using json_value = nlohmann::ordered_json;

constexpr std::uint64_t shown_elements = 8;
constexpr std::size_t shown_bytes = 60;

std::string_view string_of(const metadata_entry& entry) {
    return {reinterpret_cast<const char*>(entry.data), static_cast<std::size_t>(entry.count)};
}

/// Element i of an entry; 0 for an entry that is one value.
json_value element_of(const gguf& file, const metadata_entry& entry, std::uint64_t i) {
    const std::byte* const at = entry.data + i * size_of(entry.element);
    switch (entry.element) {
    case value_type::u8:
        return load<std::uint8_t>(at);
    case value_type::i8:
        return load<std::int8_t>(at);
    case value_type::u16:
        return load<std::uint16_t>(at);
    case value_type::i16:
        return load<std::int16_t>(at);
    case value_type::u32:
        return load<std::uint32_t>(at);
    case value_type::i32:
        return load<std::int32_t>(at);
    case value_type::u64:
        return load<std::uint64_t>(at);
    case value_type::i64:
        return load<std::int64_t>(at);
    case value_type::f64:
        return load<double>(at);
    case value_type::boolean:
        return std::to_integer<int>(*at) != 0;
    // As a decimal that a person would write: 1e-05, not 9.999999747378752e-06.
    case value_type::f32: {
        const float value = load<float>(at);
        const std::string text = text_of_number(value);
        return std::isfinite(value) ? json_value(std::stod(text)) : json_value(text);
    }
    case value_type::string:
    case value_type::array:
        break;
    }
    if (entry.type != value_type::array) return std::string(string_of(entry));
    return std::string(file.strings_of(entry)[static_cast<std::size_t>(i)]);
}

std::string text_of_element(const gguf& file, const metadata_entry& entry, std::uint64_t i) {
    const json_value value = element_of(file, entry, i);
    return value.is_string() && entry.element == value_type::string
               ? quoted(value.get_ref<const std::string&>(), shown_bytes)
           : value.is_string() ? value.get<std::string>()
                               : value.dump();
}

std::string text_of_entry(const gguf& file, const metadata_entry& entry) {
    if (entry.type != value_type::array) return text_of_element(file, entry, 0);
    std::string out = "[";
    for (std::uint64_t i = 0; i < std::min(entry.count, shown_elements); ++i) {
        out += (i != 0 ? ", " : "") + text_of_element(file, entry, i);
    }
    if (entry.count > shown_elements) out += ", ... (" + std::to_string(entry.count) + ")";
    return out + "]";
}

std::string type_of_entry(const metadata_entry& entry) {
    const std::string element(name_of(entry.element));
    return entry.type == value_type::array ? element + "[]" : element;
}

struct totals {
    std::uint64_t tensors = 0;
    std::uint64_t elements = 0;
    std::uint64_t bytes = 0;

    void add(const tensor_info& tensor) {
        ++tensors;
        elements += static_cast<std::uint64_t>(tensor.elements());
        bytes += tensor.bytes;
    }
};

struct all_totals {
    totals all;
    std::map<std::string_view, totals> by_type;

    explicit all_totals(const gguf& file) {
        for (const tensor_info& tensor : file.tensors()) {
            all.add(tensor);
            by_type[tensor.type->name].add(tensor);
        }
    }
};

void print_text(const gguf& file, const std::string& path, std::ostream& out) {
    out << printable(path, 400) << ": GGUF " << file.version() << ", " << file.file_bytes()
        << " bytes, alignment " << file.alignment() << "\n\nmetadata (" << file.metadata().size() << ")\n";
    for (const metadata_entry& entry : file.metadata()) {
        out << "  " << std::left << std::setw(48) << printable(entry.key) << ' ' << std::setw(8)
            << type_of_entry(entry) << ' ' << text_of_entry(file, entry) << '\n';
    }
    out << "\ntensors (" << file.tensors().size() << ")\n";
    for (const tensor_info& tensor : file.tensors()) {
        std::string shape;
        for (int d = 0; d < tensor.rank; ++d) {
            shape += (d != 0 ? " x " : "") + std::to_string(tensor.shape[static_cast<std::size_t>(d)]);
        }
        out << "  " << std::left << std::setw(32) << printable(tensor.name) << ' ' << std::setw(8)
            << tensor.type->name << ' ' << std::setw(20) << shape << ' ' << std::right << std::setw(12)
            << tensor.bytes << " bytes\n";
    }
    const all_totals sums(file);
    out << "\ntotals\n";
    const auto line = [&](std::string_view name, const totals& sum) {
        out << "  " << std::left << std::setw(8) << name << std::right << std::setw(8) << sum.tensors
            << " tensors " << std::setw(16) << sum.elements << " elements " << std::setw(16) << sum.bytes
            << " bytes\n";
    };
    for (const auto& [name, sum] : sums.by_type) {
        line(name, sum);
    }
    line("all", sums.all);
}

json_value json_of_entry(const gguf& file, const metadata_entry& entry) {
    json_value out = {{"type", type_of_entry(entry)}};
    if (entry.type != value_type::array) {
        out["value"] = element_of(file, entry, 0);
        return out;
    }
    json_value first = json_value::array();
    for (std::uint64_t i = 0; i < std::min(entry.count, shown_elements); ++i) {
        first.push_back(element_of(file, entry, i));
    }
    out["count"] = entry.count;
    out[entry.count > shown_elements ? "first" : "value"] = std::move(first);
    return out;
}

json_value json_of_totals(const totals& sum) {
    return {{"tensors", sum.tensors}, {"elements", sum.elements}, {"bytes", sum.bytes}};
}

void print_json(const gguf& file, const std::string& path, std::ostream& out) {
    json_value all = {{"path", path},
                      {"version", file.version()},
                      {"file_bytes", file.file_bytes()},
                      {"alignment", file.alignment()},
                      {"metadata", json_value::object()},
                      {"tensors", json_value::array()}};
    json_value& metadata = all["metadata"];
    for (const metadata_entry& entry : file.metadata()) {
        // Keys are few: ordered_json's linear look-up is skipped by appending, for the parser has seen them
        // unique.
        metadata.get_ref<json_value::object_t&>().push_back(
            {std::string(entry.key), json_of_entry(file, entry)});
    }
    for (const tensor_info& tensor : file.tensors()) {
        const auto begin = tensor.shape.begin();
        all["tensors"].push_back(
            {{"name", std::string(tensor.name)},
             {"type", tensor.type->name},
             {"shape", json_value(std::vector<std::int64_t>(begin, begin + tensor.rank))},
             {"offset", tensor.offset},
             {"bytes", tensor.bytes}});
    }
    const all_totals sums(file);
    all["totals"] = json_of_totals(sums.all);
    for (const auto& [name, sum] : sums.by_type) {
        all["totals"]["by_type"][std::string(name)] = json_of_totals(sum);
    }
    // Names may hold any bytes; JSON holds Unicode, so what isn't UTF-8 becomes U+FFFD.
    out << all.dump(2, ' ', false, json_value::error_handler_t::replace) << '\n';
}

} // namespace

void inspect(const gguf& file, const std::string& name, bool json, std::ostream& out) {
    if (json) {
        print_json(file, name, out);
    } else {
        print_text(file, name, out);
    }
}

int inspect(const std::string& path, bool json, std::ostream& out) {
    inspect(gguf::open(path), path, json, out);
    return 0;
}

} // namespace engine
