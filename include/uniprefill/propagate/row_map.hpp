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
struct row_map {
    memory_space space = memory_space::host;
    bool identity = true;                      ///< row j is row j; no array is touched
    const std::int32_t* kept_to_old = nullptr; // [num_kept]
    std::int32_t num_kept = 0;                 ///< rows after, padding not counted
    std::int32_t num_rows = 0;                 ///< rows before

    row_map() noexcept = default;
    /// The rows that one decision keeps.
    UNIPREFILL_HOST_API row_map(const selection& decided) noexcept
        : space(decided.space)
        , identity(decided.identity)
        , kept_to_old(decided.kept_to_old)
        , num_kept(decided.num_rows)
        , num_rows(decided.num_rows) {
        if (!identity && space == memory_space::host && decided.cu_seqlens != nullptr) {
            num_kept = decided.cu_seqlens[decided.num_requests];
        }
    }
};

UNIPREFILL_END_NAMESPACE
