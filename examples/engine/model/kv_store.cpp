// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/kv_store.hpp"

#include <algorithm>

namespace engine {

contiguous_kv_store::contiguous_kv_store(std::int32_t layers, std::int32_t requests, std::int32_t kv_heads,
                                         std::int32_t head_dim)
    : requests_(requests)
    , head_dim_(head_dim)
    , row_elements_(std::int64_t{kv_heads} * head_dim)
    , sequences_(static_cast<std::size_t>(layers) * static_cast<std::size_t>(requests)) {}

void contiguous_kv_store::write(std::int32_t layer, std::int32_t request, std::int64_t first, const float* k,
                                const float* v, std::int64_t rows, std::int64_t stride) {
    sequence& into = sequences_[index(layer, request)];
    const auto put = [&](std::vector<float>& to, const float* from) {
        to.resize(static_cast<std::size_t>((first + rows) * row_elements_));
        for (std::int64_t row = 0; row < rows; ++row) {
            std::copy_n(from + row * stride, row_elements_, to.data() + (first + row) * row_elements_);
        }
    };
    put(into.k, k);
    put(into.v, v);
}

void contiguous_kv_store::keep(std::int32_t layer, std::int32_t request, const std::int32_t* from,
                               std::int32_t count) {
    sequence& held = sequences_[index(layer, request)];
    for (std::vector<float>* rows : {&held.k, &held.v}) {
        for (std::int32_t row = 0; row < count; ++row) {
            if (from[row] != row) {
                std::copy_n(rows->data() + from[row] * row_elements_, row_elements_,
                            rows->data() + row * row_elements_);
            }
        }
        rows->resize(static_cast<std::size_t>(count * row_elements_));
        rows->shrink_to_fit();
    }
}

kv_sequence contiguous_kv_store::rows(std::int32_t layer, std::int32_t request) const {
    const sequence& held = sequences_[index(layer, request)];
    return {held.k.data(),
            held.v.data(),
            row_elements_,
            head_dim_,
            static_cast<std::int64_t>(held.k.size()) / row_elements_,
            nullptr};
}

void contiguous_kv_store::release(std::int32_t request) {
    for (std::size_t at = static_cast<std::size_t>(request); at < sequences_.size();
         at += static_cast<std::size_t>(requests_)) {
        sequences_[at] = {};
    }
}

std::size_t contiguous_kv_store::bytes() const {
    std::size_t elements = 0;
    for (const sequence& held : sequences_) {
        elements += held.k.size() + held.v.size();
    }
    return elements * sizeof(float);
}

} // namespace engine
