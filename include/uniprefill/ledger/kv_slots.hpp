// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// From a row of a layer's cache to the slot that an engine stores it in: paged and contiguous caches.
///
/// Both are *slot sources*: `request_index rows`, `status check()`, and
/// `std::int64_t slot(layer, request, row)`, which is negative where the cache has no room. Any type with
/// these serves drop_ledger::slot_mapping(). Views over the engine's arrays, read only: safe on any thread,
/// deterministic, O(1).
#pragma once

#include <uniprefill/core/status.hpp>
#include <uniprefill/ledger/detail/bits.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// How an engine's tables number their requests.
enum class request_index : std::int32_t {
    batch,  ///< by place in the batch of this step
    ledger, ///< by the request's slot in the ledger, the same for all its life
};

/// Pages named by a padded table. One table for all layers, or one for each (layer_stride not 0).
/// A page size of 1 is a table with a slot for each token.
struct block_table_view {
    const std::int32_t* table = nullptr; // [num_layers or 1, num_requests, max_pages] pages; negative: none
    std::int64_t layer_stride = 0;       ///< entries from one layer to the next, 0: shared by all layers
    std::int64_t request_stride = 0;     ///< entries from one request to the next
    std::int32_t max_pages = 0;          ///< entries of one request
    std::int32_t page_tokens = 1;        ///< slots of a page
    request_index rows = request_index::batch;

    /// Whether slot() may be called; fails on extents that no cache has.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept {
        if (max_pages < 0 || (max_pages > 0 && table == nullptr)) {
            return failure(status_code::invalid_argument, "block_table.table", "max_pages entries a request",
                           max_pages);
        }
        return page_tokens >= 1
                   ? success()
                   : failure(status_code::invalid_argument, "block_table.page_tokens", ">= 1", page_tokens);
    }
    /// The slot of row @p row (>= 0) of a layer's cache, negative where there is none.
    /// @param request numbered as `rows` says
    [[nodiscard]] UNIPREFILL_API std::int64_t slot(std::int32_t layer, std::int32_t request,
                                                   std::int32_t row) const noexcept {
        const detail::row_place place = detail::place_of(row, page_tokens);
        if (place.page >= max_pages) {
            return -1;
        }
        const std::int64_t page = table[layer * layer_stride + request * request_stride + place.page];
        return page < 0 ? -1 : page * page_tokens + place.row;
    }
};

/// One stretch of slots for each request: the identity up to strides.
struct contiguous_slots {
    std::int64_t layer_stride = 0;   ///< slots from one layer to the next, 0: each layer counts its own
    std::int64_t request_stride = 0; ///< slots from one request to the next
    std::int32_t max_tokens = 0;     ///< slots of one request
    request_index rows = request_index::batch;

    /// Whether slot() may be called; fails on extents that no cache has.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept {
        return max_tokens >= 0 ? success()
                               : failure(status_code::invalid_argument, "contiguous_slots.max_tokens", ">= 0",
                                         max_tokens);
    }
    /// The slot of row @p row (>= 0) of a layer's cache, negative where there is none.
    /// @param request numbered as `rows` says
    [[nodiscard]] UNIPREFILL_API std::int64_t slot(std::int32_t layer, std::int32_t request,
                                                   std::int32_t row) const noexcept {
        return row < max_tokens ? layer * layer_stride + request * request_stride + row : -1;
    }
};

UNIPREFILL_END_NAMESPACE
