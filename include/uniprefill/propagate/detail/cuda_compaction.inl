// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/propagate/detail/check_rows.hpp>
#include <uniprefill/propagate/detail/cuda_move.cuh>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Launches moves that have been checked, a few tensors at a time.
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status move_on_device(const row_map& rows, const byte_rows* sources,
                                                        const byte_rows* destinations, std::int32_t count,
                                                        bool scatters, piece_order* order,
                                                        const cuda_device& device,
                                                        backend::cuda::stream stream) noexcept {
    row_move move;
    move.scatters = scatters;
    move.num_kept = rows.num_kept;
    move.num_rows = rows.num_rows;
    move.kept_to_old = rows.identity ? nullptr : rows.kept_to_old;
    move.kept_count = rows.identity ? nullptr : rows.kept_count;
    for (std::int32_t t = 0; t < count; ++t) {
        const bool in_place = is_in_place(sources[t], destinations[t]);
        if (sources[t].row_bytes == 0 || (in_place && rows.identity)) {
            continue;
        }
        move.tensors[move.count++] = moved(sources[t], destinations[t]);
        move.order = in_place ? order : move.order;
        if (move.count == moved_at_once) {
            UNIPREFILL_TRY(launch_move(move, device, stream));
            move.count = 0;
            move.order = nullptr;
        }
    }
    return launch_move(move, device, stream);
}

/// Whether each row is few enough words for one launch.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_words(const byte_rows* sources,
                                                            const byte_rows* destinations,
                                                            std::int32_t count) noexcept {
    for (std::int32_t t = 0; t < count; ++t) {
        if (sources[t].row_bytes / word_bytes_of(sources[t], destinations[t]) > max_row_words) {
            return failure(status_code::out_of_range, "source", "rows of at most 2^30 words",
                           sources[t].row_bytes)
                .at_request(t);
        }
    }
    return success();
}

/// Checks the scratch of a move in place. @param order the scratch as the kernels use it
[[nodiscard]] inline UNIPREFILL_HOST_API status take_order(workspace scratch, piece_order*& order) noexcept {
    UNIPREFILL_TRY(scratch.check(in_place_scratch_bytes()));
    order = static_cast<piece_order*>(scratch.data());
    return success();
}

} // namespace detail

inline UNIPREFILL_HOST_API std::size_t in_place_scratch_bytes() noexcept {
    workspace counting;
    static_cast<void>(counting.take<detail::piece_order>(1));
    return counting.bytes_used();
}

template <class>
UNIPREFILL_HOST_API status compact(const row_map& rows, const byte_rows* sources,
                                   const byte_rows* destinations, std::int32_t count, workspace scratch,
                                   const cuda_device& device, backend::cuda::stream stream) noexcept {
    UNIPREFILL_TRY(detail::check_map(rows, memory_space::device));
    UNIPREFILL_TRY(detail::check_moves(sources, destinations, count, rows.num_rows, rows.num_kept, true));
    UNIPREFILL_TRY(detail::check_words(sources, destinations, count));
    detail::piece_order* order = nullptr;
    for (std::int32_t t = 0; t < count && order == nullptr; ++t) {
        if (!rows.identity && detail::is_in_place(sources[t], destinations[t])) {
            UNIPREFILL_TRY(detail::take_order(scratch, order));
        }
    }
    return detail::move_on_device(rows, sources, destinations, count, false, order, device, stream);
}

template <class>
UNIPREFILL_HOST_API status scatter(const row_map& rows, const byte_rows* sources,
                                   const byte_rows* destinations, std::int32_t count,
                                   const cuda_device& device, backend::cuda::stream stream) noexcept {
    UNIPREFILL_TRY(detail::check_map(rows, memory_space::device));
    UNIPREFILL_TRY(
        detail::check_moves(sources, destinations, count, rows.num_kept, rows.num_rows, rows.identity));
    UNIPREFILL_TRY(detail::check_words(sources, destinations, count));
    return detail::move_on_device(rows, sources, destinations, count, true, nullptr, device, stream);
}

UNIPREFILL_END_NAMESPACE
