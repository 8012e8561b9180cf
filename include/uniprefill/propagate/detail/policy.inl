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

} // namespace detail

template <class Lineage>
UNIPREFILL_HOST_API status cumulative::leave(Lineage& lineage, const selection& decided,
                                             const row_tensor* tensors, std::int32_t count,
                                             host_stream stream) noexcept {
    UNIPREFILL_TRY(lineage.check(decided));
    const row_map rows = decided;
    UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
        return detail::check_moves(&tensor.working, &tensor.working, 1, rows.num_rows, rows.num_kept, true);
    }));
    for (std::int32_t t = 0; t < count; ++t) {
        UNIPREFILL_TRY(compact(rows, tensors[t].working, tensors[t].working, stream));
    }
    return lineage.apply(decided, stream);
}

template <class Lineage>
UNIPREFILL_HOST_API status revive::enter(Lineage& lineage, const row_tensor* tensors, std::int32_t count,
                                         host_stream stream) noexcept {
    const row_map rows = lineage.map();
    if (!rows.identity) {
        UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
            return detail::check_moves(&tensor.working, &tensor.full, 1, rows.num_kept, rows.num_rows, false);
        }));
        for (std::int32_t t = 0; t < count; ++t) {
            UNIPREFILL_TRY(scatter(rows, tensors[t].working, tensors[t].full, stream));
        }
    }
    return lineage.revive(stream);
}

template <class Lineage>
UNIPREFILL_HOST_API status revive::leave(Lineage& lineage, const selection& decided,
                                         const row_tensor* tensors, std::int32_t count,
                                         host_stream stream) noexcept {
    UNIPREFILL_TRY(lineage.check(decided));
    if (!lineage.holds_every_row()) {
        return failure(status_code::wrong_state, "lineage", "enter() before leave() at each selecting layer",
                       0);
    }
    const row_map rows = decided;
    UNIPREFILL_TRY(detail::check_each(tensors, count, [&](const row_tensor& tensor) {
        return detail::check_moves(&tensor.full, &tensor.working, 1, rows.num_rows, rows.num_kept, false);
    }));
    if (rows.num_kept < rows.num_rows) {
        for (std::int32_t t = 0; t < count; ++t) {
            UNIPREFILL_TRY(compact(rows, tensors[t].full, tensors[t].working, stream));
        }
    }
    return lineage.apply(decided, stream);
}

UNIPREFILL_END_NAMESPACE
