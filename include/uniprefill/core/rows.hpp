// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Strided views of packed rows: what an engine's activations look like.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Rows of several heads, such as q, k and v of a step. Strides count elements and are 64 bit.
template <class T>
struct head_rows {
    T* data = nullptr;            // [num_rows, num_heads, head_dim]
    std::int64_t row_stride = 0;  ///< elements from one row to the next
    std::int64_t head_stride = 0; ///< elements from one head to the next
    std::int32_t num_rows = 0;
    std::int32_t num_heads = 0;
    std::int32_t head_dim = 0; ///< contiguous

    /// Address of a row of a head.
    [[nodiscard]] UNIPREFILL_API T* at(std::int64_t row, std::int64_t head) const noexcept {
        return data + row * row_stride + head * head_stride;
    }
};

/// Rows of elements, such as hidden states that a norm reads. Strides count elements and are 64 bit.
template <class T>
struct element_rows {
    T* data = nullptr;             // [num_rows, row_elements]
    std::int64_t row_stride = 0;   ///< elements from one row to the next, >= row_elements
    std::int32_t row_elements = 0; ///< contiguous
    std::int32_t num_rows = 0;
};

/// Rows of bytes that the library moves and never reads: hidden states, residuals, positions, quantised rows.
struct byte_rows {
    void* data = nullptr;              // [num_rows, row_bytes]
    std::int64_t row_stride_bytes = 0; ///< bytes from one row to the next, >= row_bytes
    std::int64_t row_bytes = 0;        ///< bytes of a row that are moved
    std::int32_t num_rows = 0;
};

/// A contiguous tensor [num_rows, row_elements] as bytes.
template <class T>
[[nodiscard]] UNIPREFILL_API inline byte_rows as_byte_rows(T* data, std::int32_t num_rows,
                                                           std::int64_t row_elements) noexcept {
    const std::int64_t bytes = row_elements * static_cast<std::int64_t>(sizeof(T));
    return {data, bytes, bytes, num_rows};
}

UNIPREFILL_END_NAMESPACE
