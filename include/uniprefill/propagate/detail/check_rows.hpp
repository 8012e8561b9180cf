// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What must hold before rows are moved.
#pragma once

#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/propagate/row_map.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether two tensors are the very same rows.
[[nodiscard]] inline UNIPREFILL_HOST_API bool is_in_place(const byte_rows& a, const byte_rows& b) noexcept {
    return a.data == b.data && a.row_stride_bytes == b.row_stride_bytes;
}

/// Whether rows of @p a and rows of @p b may share a byte. Columns of one wider tensor don't.
[[nodiscard]] inline UNIPREFILL_HOST_API bool may_overlap(const byte_rows& a, std::int32_t a_rows,
                                                          const byte_rows& b, std::int32_t b_rows) noexcept {
    if (a_rows == 0 || b_rows == 0 || a.row_bytes == 0) {
        return false;
    }
    const auto address = [](const byte_rows& rows, std::int32_t row) {
        return reinterpret_cast<std::uintptr_t>(rows.data) +
               static_cast<std::uintptr_t>(row) * static_cast<std::uintptr_t>(rows.row_stride_bytes);
    };
    const auto bytes = static_cast<std::uintptr_t>(a.row_bytes);
    if (address(a, a_rows - 1) + bytes <= address(b, 0) || address(b, b_rows - 1) + bytes <= address(a, 0)) {
        return false;
    }
    if (a.row_stride_bytes != b.row_stride_bytes || a.row_stride_bytes == 0) {
        return true;
    }
    const auto stride = static_cast<std::uintptr_t>(a.row_stride_bytes);
    const std::uintptr_t apart =
        address(a, 0) < address(b, 0) ? address(b, 0) - address(a, 0) : address(a, 0) - address(b, 0);
    return apart % stride < bytes || stride - apart % stride < bytes;
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_tensor(const byte_rows& tensor,
                                                             std::int32_t needed_rows,
                                                             const char* name) noexcept {
    if (tensor.row_bytes < 0) {
        return failure(status_code::invalid_argument, name, "row_bytes >= 0", tensor.row_bytes);
    }
    if (tensor.num_rows < needed_rows) {
        return failure(status_code::out_of_range, name, "as many rows as the map says", tensor.num_rows);
    }
    if (needed_rows > 1 && tensor.row_stride_bytes < tensor.row_bytes) {
        return failure(status_code::invalid_argument, name, "row_stride_bytes >= row_bytes",
                       tensor.row_stride_bytes);
    }
    if (needed_rows > 0 && tensor.row_bytes > 0 && tensor.data == nullptr) {
        return failure(status_code::invalid_argument, name, "memory, not a null pointer", 0);
    }
    return success();
}

/// Checks what the host can see of a map that lies in @p space.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_map(const row_map& rows, memory_space space) noexcept {
    if (rows.space != space) {
        return failure(status_code::not_supported, "rows.space",
                       space == memory_space::host ? "host memory" : "device memory",
                       static_cast<std::int32_t>(rows.space));
    }
    if (rows.num_kept < 0 || rows.num_kept > rows.num_rows ||
        (rows.identity && rows.num_kept != rows.num_rows)) {
        return failure(status_code::invalid_argument, "rows.num_kept",
                       "0..rows.num_rows, all for an identity", rows.num_kept);
    }
    if (!rows.identity && rows.num_kept > 0 && rows.kept_to_old == nullptr) {
        return failure(status_code::invalid_argument, "rows.kept_to_old", "an array, not a null pointer", 0);
    }
    return success();
}

/// Whether the host knows that every row stays where it is.
[[nodiscard]] inline UNIPREFILL_HOST_API bool keeps_all(const row_map& rows) noexcept {
    return rows.identity || (rows.kept_count == nullptr && rows.num_kept == rows.num_rows);
}

/// Checks @p count moves of @p source_rows to @p destination_rows rows.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_moves(const byte_rows* sources,
                                                            const byte_rows* destinations, std::int32_t count,
                                                            std::int32_t source_rows,
                                                            std::int32_t destination_rows,
                                                            bool in_place_allowed) noexcept {
    if (count < 0) {
        return failure(status_code::invalid_argument, "count", ">= 0", count);
    }
    if (count > 0 && (sources == nullptr || destinations == nullptr)) {
        return failure(status_code::invalid_argument, sources == nullptr ? "sources" : "destinations",
                       "an array, not a null pointer", 0);
    }
    for (std::int32_t t = 0; t < count; ++t) {
        if (const status bad = check_tensor(sources[t], source_rows, "source"); !bad.ok()) {
            return bad.at_request(t);
        }
        if (const status bad = check_tensor(destinations[t], destination_rows, "destination"); !bad.ok()) {
            return bad.at_request(t);
        }
        if (destinations[t].row_bytes != sources[t].row_bytes) {
            return failure(status_code::invalid_argument, "destination", "the source's row_bytes",
                           destinations[t].row_bytes)
                .at_request(t);
        }
        if (in_place_allowed && is_in_place(sources[t], destinations[t])) {
            continue;
        }
        if (may_overlap(sources[t], source_rows, destinations[t], destination_rows)) {
            return failure(status_code::invalid_argument, "destination",
                           in_place_allowed ? "the source's address and stride, or no byte of its rows"
                                            : "no byte of the source's rows",
                           1)
                .at_request(t);
        }
    }
    return success();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
