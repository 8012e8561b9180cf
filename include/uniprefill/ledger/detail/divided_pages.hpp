// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What becomes of the entries of a block table when pages are handed back.
#pragma once

#include <uniprefill/ledger/pages.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The smallest span that has both.
[[nodiscard]] inline UNIPREFILL_API page_span together(page_span a, page_span b) noexcept {
    return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
}

/// What becomes of the entries in use of one table: two ranges are handed back, what lies between stays.
/// Where nothing stays, it is empty at the entry that comes next.
struct divided_pages {
    page_span before;
    page_span kept;
    page_span after;

    UNIPREFILL_API divided_pages(page_span used, page_span live) noexcept
        : before(used)
        , after{used.end, used.end} {
        const std::int32_t begin = used.begin > live.begin ? used.begin : live.begin;
        const std::int32_t end = used.end < live.end ? used.end : live.end;
        kept.begin = begin < live.end ? begin : live.end;
        kept.end = end > kept.begin ? end : kept.begin;
        if (kept.count() > 0) {
            before.end = kept.begin;
            after.begin = kept.end;
        }
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
