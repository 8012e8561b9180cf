// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which entries of a request's block table a layer still needs: pages in use, pages to hand back, pages
/// shared by a fork.
///
/// A page belongs to rows, and rows to original positions: what a window has passed is told by the positions
/// of a page's rows, never by their number. Plain values and pure functions: safe on any thread,
/// deterministic, O(1).
#pragma once

#include <uniprefill/core/status.hpp>
#include <uniprefill/ledger/kv_slots.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A range of entries of one block table, [begin, end).
struct page_span {
    std::int32_t begin = 0;
    std::int32_t end = 0;

    /// Entries in the range.
    [[nodiscard]] UNIPREFILL_API std::int32_t count() const noexcept { return end - begin; }
};

/// How a layer's cache is cut into pages, and which of its rows are still read.
struct page_rule {
    std::int32_t page_tokens = 16; ///< rows of a page
    std::int32_t window = 0;       ///< original positions that a query sees, its own included; 0: all
    /// Positions that rollback() may yet take back from the requests: pages that the window has passed are
    /// kept for so much longer.
    std::int32_t max_rollback = 0;

    /// Whether the ledger may count by this rule; fails on numbers that no cache has.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept {
        if (page_tokens < 1) {
            return failure(status_code::invalid_argument, "page_rule.page_tokens", ">= 1", page_tokens);
        }
        if (window < 0) {
            return failure(status_code::invalid_argument, "page_rule.window", ">= 0", window);
        }
        return max_rollback >= 0
                   ? success()
                   : failure(status_code::invalid_argument, "page_rule.max_rollback", ">= 0", max_rollback);
    }
};

/// What becomes of a layer's pages when its request is forked.
struct forked_pages {
    page_span shared{}; ///< full pages: both requests read them, and neither writes them while rows grow
    /// The partly filled page that both would go on filling: one of them needs a copy of its first
    /// `copied_rows` rows. -1: there is none.
    std::int32_t copied = -1;
    std::int32_t copied_rows = 0;
};

/// Pages of some layers of some requests. Multiply by the bytes of a page for a saving in bytes.
struct page_usage {
    std::int64_t pages = 0;       ///< that hold rows which are still read
    std::int64_t dense_pages = 0; ///< that there would be if no position had been dropped
};

/// Block tables that pages are handed back from (drop_ledger::hand_back_pages()), as in block_table_view,
/// with the entries that each has in use. Shared by layers: layer_stride and span_layer_stride are both 0.
struct page_tables {
    std::int32_t* table = nullptr; // [num_layers or 1, num_requests, max_pages] pages
    page_span* in_use = nullptr;   // [num_layers or 1, num_requests] entries that name pages
    std::int64_t layer_stride = 0; ///< entries of `table` from one layer to the next
    std::int64_t request_stride = 0;
    std::int64_t span_layer_stride = 0; ///< entries of `in_use` from one layer to the next
    std::int64_t span_request_stride = 1;
    std::int32_t max_pages = 0; ///< entries of one request
    std::int32_t no_page = -1;  ///< what an entry says afterwards that has been handed back
    request_index rows = request_index::batch;

    /// The entries of a request, numbered as `rows` says.
    [[nodiscard]] UNIPREFILL_API std::int32_t* entries(std::int32_t layer,
                                                       std::int32_t request) const noexcept {
        return table + layer * layer_stride + request * request_stride;
    }
    /// Which of them are in use.
    [[nodiscard]] UNIPREFILL_API page_span& span(std::int32_t layer, std::int32_t request) const noexcept {
        return in_use[layer * span_layer_stride + request * span_request_stride];
    }
};

UNIPREFILL_END_NAMESPACE
