// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Composing the row maps of two decisions, entry by entry, on host or device.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// One selection composed with those before it.
struct row_composition {
    const std::int32_t* kept_to_old = nullptr;      // [bound] of the selection
    const std::int32_t* cu_seqlens = nullptr;       // [num_requests + 1] of the selection
    const std::int32_t* cu_segments = nullptr;      // [num_segments + 1] of the selection
    const std::int32_t* rows_before = nullptr;      // [num_rows] original rows; null: the identity
    const std::int32_t* positions_before = nullptr; // [num_rows]
    std::int32_t* rows = nullptr;                   // [bound]
    std::int32_t* positions = nullptr;              // [bound]
    std::int32_t* new_cu_seqlens = nullptr;
    std::int32_t* new_cu_segments = nullptr;
    std::int32_t num_requests = 0;
    std::int32_t num_segments = 0;
    std::int32_t num_rows = 0;
    std::int32_t bound = 0;

    /// The row @p row after, @p kept of them being kept: original row and position.
    UNIPREFILL_API void compose_row(std::int32_t row, std::int32_t kept) const noexcept {
        const std::int32_t before = row < kept ? kept_to_old[row] : -1;
        const bool is_row = before >= 0 && before < num_rows;
        rows[row] = !is_row ? -1 : rows_before != nullptr ? rows_before[before] : before;
        positions[row] = is_row ? positions_before[before] : 0;
    }
};

[[nodiscard]] UNIPREFILL_API constexpr std::int32_t clamp_to(std::int32_t value, std::int32_t most) noexcept {
    return value < 0 ? 0 : value < most ? value : most;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
