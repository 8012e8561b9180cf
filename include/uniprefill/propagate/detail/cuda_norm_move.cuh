// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What one launch gathers, adds and normalises.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/propagate/detail/cuda_order.cuh>
#include <uniprefill/propagate/detail/cuda_row_move.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What one launch does. Strides in bytes.
template <class Weight>
struct norm_move {
    const std::byte* hidden = nullptr;
    const std::byte* residual = nullptr;
    std::byte* out_hidden = nullptr;
    std::byte* out_residual = nullptr;
    const Weight* weight = nullptr;
    std::int64_t hidden_stride = 0;
    std::int64_t residual_stride = 0;
    std::int64_t out_hidden_stride = 0;
    std::int64_t out_residual_stride = 0;
    std::int32_t vectors = 0; ///< of a row
    float share = 0;          ///< 1 / hidden_size
    float epsilon = 0;
    float weight_offset = 0;
    std::int32_t num_kept = 0;
    std::int32_t num_rows = 0;
    const std::int32_t* kept_to_old = nullptr; ///< null: the identity
    const std::int32_t* kept_count = nullptr;  ///< null: num_kept
    piece_order* order = nullptr;              ///< of rows, where one of the results is in place
};

/// Rows that must be read before row @p row is written in place. Called by all lanes of a warp.
template <class Weight>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t rows_before(const norm_move<Weight>& move,
                                                                     std::uint32_t row) {
    const auto rows =
        static_cast<std::uint32_t>(rows_read_below(move.kept_to_old, static_cast<std::int32_t>(row) + 1));
    return rows < row ? rows : row;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
