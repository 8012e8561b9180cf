// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace engine {

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#    error "the model file reader is written for little-endian machines, as GGUF files are"
#endif

/// Bytes that somebody else owns.
struct byte_span {
    const std::byte* data = nullptr;
    std::size_t size = 0;
};

/// Reads a T from an address of any alignment: fields of model files are packed.
template <class T>
T load(const std::byte* from) {
    static_assert(std::is_trivially_copyable_v<T>);
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

} // namespace engine
