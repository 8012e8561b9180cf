// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/propagate/detail/check_rows.hpp>
#include <uniprefill/propagate/detail/move_rows.hpp>

UNIPREFILL_BEGIN_NAMESPACE

inline UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                          const byte_rows* destinations, std::int32_t count,
                                          host_stream) noexcept {
    UNIPREFILL_TRY(detail::check_map(rows, memory_space::host));
    UNIPREFILL_TRY(detail::check_moves(sources, destinations, count, rows.num_rows, rows.num_kept, true));
    for (std::int32_t t = 0; t < count; ++t) {
        if (sources[t].row_bytes == 0) {
            continue;
        }
        if (!detail::is_in_place(sources[t], destinations[t])) {
            detail::copy_rows<detail::move_direction::gather>(rows, sources[t], destinations[t]);
        } else if (!rows.identity) {
            detail::compact_in_place(rows, destinations[t]);
        }
    }
    return success();
}

inline UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                          const byte_rows* destinations, std::int32_t count,
                                          host_stream) noexcept {
    UNIPREFILL_TRY(detail::check_map(rows, memory_space::host));
    UNIPREFILL_TRY(
        detail::check_moves(sources, destinations, count, rows.num_kept, rows.num_rows, rows.identity));
    for (std::int32_t t = 0; t < count; ++t) {
        if (sources[t].row_bytes > 0 &&
            !(rows.identity && detail::is_in_place(sources[t], destinations[t]))) {
            detail::copy_rows<detail::move_direction::scatter>(rows, sources[t], destinations[t]);
        }
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
