// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/tensor_rows.hpp"

#include "engine/error.hpp"
#include "engine/model_file/dequantize.hpp"

#include <algorithm>
#include <utility>

namespace engine {

const tensor_info& tensor_of(const gguf& file, const std::string& name) {
    const tensor_info* found = file.find_tensor(name);
    if (found == nullptr) throw error("tensor " + quoted(name), "one in the file", "none");
    return *found;
}

void dequantize_rows(const tensor_info& from, std::int64_t first, std::int64_t count, float* to) {
    for (std::int64_t row = first; row < first + count; ++row) {
        dequantize_row(static_cast<tensor_type>(from.type->number),
                       from.data + static_cast<std::uint64_t>(row) * from.row_bytes(), to, from.shape[0]);
        to += from.shape[0];
    }
}

std::vector<float> vector_of(const tensor_info& from) {
    std::vector<float> values(static_cast<std::size_t>(from.elements()));
    dequantize_rows(from, 0, from.rows(), values.data());
    return values;
}

stacked_rows::stacked_rows(std::vector<const tensor_info*> parts)
    : parts_(std::move(parts)) {
    for (const tensor_info* part : parts_) {
        out_ += part->rows();
    }
}

void stacked_rows::read(std::int64_t first, std::int64_t count, float* to) const {
    std::int64_t begin = 0;
    for (const tensor_info* part : parts_) {
        const std::int64_t end = begin + part->rows();
        const std::int64_t from = std::max(first, begin);
        const std::int64_t until = std::min(first + count, end);
        if (from < until) {
            dequantize_rows(*part, from - begin, until - from, to + (from - first) * part->shape[0]);
        }
        begin = end;
    }
}

} // namespace engine
