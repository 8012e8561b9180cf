// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Checks the moves between `full` and `working` (or within `working`) of each tensor.
template <class Check>
[[nodiscard]] UNIPREFILL_HOST_API status check_each(const row_tensor* tensors, std::int32_t count,
                                                    Check check) noexcept {
    if (count < 0) {
        return failure(status_code::invalid_argument, "count", ">= 0", count);
    }
    if (count > 0 && tensors == nullptr) {
        return failure(status_code::invalid_argument, "tensors", "an array, not a null pointer", 0);
    }
    for (std::int32_t t = 0; t < count; ++t) {
        if (const status bad = check(tensors[t]); !bad.ok()) {
            return bad.at_request(t);
        }
    }
    return success();
}

/// The tensors of a policy as two lists, a few at a time, so that a device moves them together.
template <class Move>
[[nodiscard]] UNIPREFILL_HOST_API status move_each(const row_tensor* tensors, std::int32_t count,
                                                   byte_rows row_tensor::*from, byte_rows row_tensor::*to,
                                                   Move move) noexcept {
    constexpr std::int32_t at_once = 8;
    for (std::int32_t begin = 0; begin < count; begin += at_once) {
        const std::int32_t moved = count - begin < at_once ? count - begin : at_once;
        byte_rows sources[at_once];
        byte_rows destinations[at_once];
        for (std::int32_t t = 0; t < moved; ++t) {
            sources[t] = tensors[begin + t].*from;
            destinations[t] = tensors[begin + t].*to;
        }
        UNIPREFILL_TRY(move(sources, destinations, moved));
    }
    return success();
}

} // namespace detail

template <class Lineage>
UNIPREFILL_HOST_API status cumulative::leave(Lineage& lineage, const selection& decided,
                                             const row_tensor* tensors, std::int32_t count,
                                             typename Lineage::stream stream) noexcept {
    UNIPREFILL_TRY(lineage.check(decided));
    const row_map rows = decided;
    UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
        return detail::check_moves(&tensor.working, &tensor.working, 1, rows.num_rows, rows.num_kept, true);
    }));
    UNIPREFILL_TRY(
        detail::move_each(tensors, count, &row_tensor::working, &row_tensor::working,
                          [&](const byte_rows* sources, const byte_rows* destinations, std::int32_t moved) {
                              return lineage.compact(rows, sources, destinations, moved, stream);
                          }));
    return lineage.apply(decided, stream);
}

template <class Lineage>
UNIPREFILL_HOST_API status revive::enter(Lineage& lineage, const row_tensor* tensors, std::int32_t count,
                                         typename Lineage::stream stream) noexcept {
    const row_map rows = lineage.map();
    if (!rows.identity) {
        UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
            return detail::check_moves(&tensor.working, &tensor.full, 1, rows.num_kept, rows.num_rows, false);
        }));
        UNIPREFILL_TRY(detail::move_each(
            tensors, count, &row_tensor::working, &row_tensor::full,
            [&](const byte_rows* sources, const byte_rows* destinations, std::int32_t moved) {
                return lineage.scatter(rows, sources, destinations, moved, stream);
            }));
    }
    return lineage.revive(stream);
}

template <class Lineage>
UNIPREFILL_HOST_API status revive::leave(Lineage& lineage, const selection& decided,
                                         const row_tensor* tensors, std::int32_t count,
                                         typename Lineage::stream stream) noexcept {
    UNIPREFILL_TRY(lineage.check(decided));
    if (!lineage.holds_every_row()) {
        return failure(status_code::wrong_state, "lineage", "enter() before leave() at each selecting layer",
                       0);
    }
    const row_map rows = decided;
    UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
        return detail::check_moves(&tensor.full, &tensor.working, 1, rows.num_rows, rows.num_kept, false);
    }));
    if (!detail::keeps_all(rows)) {
        UNIPREFILL_TRY(detail::move_each(
            tensors, count, &row_tensor::full, &row_tensor::working,
            [&](const byte_rows* sources, const byte_rows* destinations, std::int32_t moved) {
                return lineage.compact(rows, sources, destinations, moved, stream);
            }));
    }
    return lineage.apply(decided, stream);
}

UNIPREFILL_END_NAMESPACE
