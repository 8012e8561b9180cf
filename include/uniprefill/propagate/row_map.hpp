// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which rows go where: the one thing that moving rows needs to know.
#pragma once

#include <uniprefill/core/selection.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Kept rows by their place before: row j after is row kept_to_old[j] before, ascending. A view; made from
/// the selection of one layer, or from a row_lineage over several.
///
/// It is also what an engine needs that moves nothing: a product that reads row kept_to_old[j] of its input
/// as its row j gathers by itself, and later layers then read its output. In device memory such a product
/// takes its number of rows from `kept_count`, or runs over all `num_kept` places: those beyond the kept rows
/// hold -1. The other way round, a place for each row before, is selection::old_to_kept.
struct row_map {
    memory_space space = memory_space::host;
    bool identity = true;                      ///< row j is row j; no array is touched
    const std::int32_t* kept_to_old = nullptr; // [num_kept]
    /// Where `space` is the device: how many rows there are after, [1] in device memory; null: num_kept. What
    /// it says beyond 0..num_kept counts as the nearest of these.
    const std::int32_t* kept_count = nullptr;
    std::int32_t num_kept = 0; ///< rows after, padding not counted; an upper bound with `kept_count`
    std::int32_t num_rows = 0; ///< rows before (an upper bound where only the device knows)

    row_map() noexcept = default;
    /// The rows that one decision keeps.
    UNIPREFILL_HOST_API row_map(const selection& decided) noexcept
        : space(decided.space)
        , identity(decided.identity)
        , kept_to_old(decided.kept_to_old)
        , num_kept(decided.num_rows)
        , num_rows(decided.num_rows) {
        if (identity || decided.cu_seqlens == nullptr) {
            return;
        }
        if (space == memory_space::host) {
            num_kept = decided.cu_seqlens[decided.num_requests];
        } else {
            kept_count = decided.cu_seqlens + decided.num_requests;
            num_kept = decided.kept_bound < num_rows ? decided.kept_bound : num_rows;
        }
    }
};

UNIPREFILL_END_NAMESPACE
