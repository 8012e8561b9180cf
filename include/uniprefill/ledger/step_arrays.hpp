// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What an engine's kernels read of a step, for several layers at once.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Arrays that drop_ledger::look_up() fills, in the index types that the engine's kernels take (int32 or
/// int64). A null array isn't wanted. Each has one part for each layer asked for, in that order: by request
/// `num_requests` entries (cu_seqlens one more), by row `num_rows`. Entries beyond the step's requests, and
/// beyond the rows that enter a layer, are filled as engines pad.
template <class Index = std::int32_t, class Slot = std::int64_t>
struct step_arrays {
    std::int32_t num_requests = 0; ///< entries by request, at least the step's
    std::int32_t num_rows = 0;     ///< entries by row, at least the most rows that enter one of the layers
    std::int32_t num_chunks = 0;   ///< pairs of `chunks`: num_requests + num_rows / chunk_rows are enough

    Index* cached_lens = nullptr;   // [layers, num_requests] keys held before the step; padded with 0
    Index* seq_lens = nullptr;      // [layers, num_requests] keys held with the step's rows; 0
    Index* cu_seqlens = nullptr;    // [layers, num_requests + 1] first row of each request; the end
    Index* num_pages = nullptr;     // [layers, num_requests] table entries that seq_lens rows take; 0
    Index* partial_pages = nullptr; // [layers, num_requests] the table entry whose page holds rows already
                                    // and takes the step's first row, -1 where there is none. Where other
                                    // requests have that page too, it is to be copied before; -1
    Index* row_positions = nullptr; // [layers, num_rows] original position of each row; -1
    Index* write_rows = nullptr;    // [layers, num_rows] where in its request's cache each row goes; -1
    Index* window_rows = nullptr;   // [layers, num_rows] the first row of the cache in each row's window; -1
    Slot* slots = nullptr;          // [layers, num_rows] the slot that each row goes to; no_slot
    Index* chunks = nullptr;        // [layers, num_chunks, 2] for layers that run over rows in chunks of
                                    // chunk_rows (linear attention, convolutions): each chunk's request, and
                                    // its number there; -1

    std::int32_t page_tokens = 16; ///< rows of a page, for num_pages and partial_pages
    std::int32_t chunk_rows = 64;  ///< rows of a chunk; a request's last one may have fewer
    std::int32_t window = 0;       ///< original positions that a query sees, its own included; 0: all
    Slot no_slot = -1; ///< what rows that are no rows get: -1, or the slot that an engine throws away
};

UNIPREFILL_END_NAMESPACE
