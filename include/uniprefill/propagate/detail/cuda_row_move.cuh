// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What one launch moves.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/piece_order.hpp>
#include <uniprefill/propagate/detail/row_tiles.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Tensors that one launch moves.
inline constexpr std::int32_t moved_at_once = 8;

/// What one launch does. Kept rows beyond what the map says, and rows outside the tensors, are left alone.
struct row_move {
    moved_tensor tensors[moved_at_once];
    std::int32_t count = 0;
    bool scatters = false;
    std::int32_t num_kept = 0;
    std::int32_t num_rows = 0;
    const std::int32_t* kept_to_old = nullptr; ///< null: the identity
    const std::int32_t* kept_count = nullptr;  ///< null: num_kept
    piece_order* order = nullptr;              ///< of tiles, where a tensor is moved in place
};

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t kept_rows(const std::int32_t* kept_count,
                                                                         std::int32_t bound) {
    if (kept_count == nullptr) {
        return bound;
    }
    const std::int32_t count = *kept_count;
    return count < 0 ? 0 : count < bound ? count : bound;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
