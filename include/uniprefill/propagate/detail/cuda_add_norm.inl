// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/propagate/detail/check_rows.hpp>
#include <uniprefill/propagate/detail/cuda_norm.cuh>

#include <cstddef>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// One tensor of an add_norm as bytes that are a multiple of 16.
template <class T>
[[nodiscard]] UNIPREFILL_HOST_API status check_norm_rows(const element_rows<T>& tensor,
                                                         std::int32_t hidden_size, std::int32_t needed_rows,
                                                         const char* name, byte_rows& bytes) noexcept {
    constexpr auto size = static_cast<std::int64_t>(sizeof(T));
    if (tensor.row_elements != hidden_size) {
        return failure(status_code::invalid_argument, name, "norm.hidden.row_elements elements in a row",
                       tensor.row_elements);
    }
    using plain = std::remove_const_t<T>;
    bytes = {const_cast<plain*>(tensor.data), tensor.row_stride * size, hidden_size * size, tensor.num_rows};
    UNIPREFILL_TRY(check_tensor(bytes, needed_rows, name));
    if (reinterpret_cast<std::uintptr_t>(tensor.data) % 16 != 0 || bytes.row_stride_bytes % 16 != 0 ||
        bytes.row_bytes % 16 != 0) {
        return failure(status_code::misaligned, name,
                       "address, stride and row that are multiples of 16 bytes", bytes.row_bytes);
    }
    return success();
}

} // namespace detail

template <class Element, class Weight>
UNIPREFILL_HOST_API status compact_add_norm(const row_map& rows, const add_norm<Element, Weight>& norm,
                                            workspace scratch, const cuda_device& device,
                                            backend::cuda::stream stream) noexcept {
    static_assert(is_element_v<Element>, "Element: float, half or bfloat16 expected");
    static_assert(std::is_same_v<Weight, Element> || std::is_same_v<Weight, float>,
                  "Weight: Element or float expected");
    UNIPREFILL_TRY(detail::check_map(rows, memory_space::device));
    const std::int32_t hidden_size = norm.hidden.row_elements;
    byte_rows hidden, residual, out_hidden, out_residual;
    UNIPREFILL_TRY(detail::check_norm_rows(norm.hidden, hidden_size, rows.num_rows, "norm.hidden", hidden));
    UNIPREFILL_TRY(
        detail::check_norm_rows(norm.residual, hidden_size, rows.num_rows, "norm.residual", residual));
    UNIPREFILL_TRY(
        detail::check_norm_rows(norm.out_hidden, hidden_size, rows.num_kept, "norm.out_hidden", out_hidden));
    UNIPREFILL_TRY(detail::check_norm_rows(norm.out_residual, hidden_size, rows.num_kept, "norm.out_residual",
                                           out_residual));
    if (hidden_size <= 0 || hidden.row_bytes > detail::longest_norm_row) {
        return failure(status_code::out_of_range, "norm.hidden.row_elements", "rows of 16 bytes to 64 KiB",
                       hidden_size);
    }
    if (norm.weight == nullptr) {
        return failure(status_code::invalid_argument, "norm.weight", "an array, not a null pointer", 0);
    }
    if (reinterpret_cast<std::uintptr_t>(norm.weight) % 16 != 0) {
        return failure(status_code::misaligned, "norm.weight", "an address that is a multiple of 16",
                       reinterpret_cast<std::uintptr_t>(norm.weight) % 16);
    }
    if (!(norm.epsilon > 0)) {
        return failure(status_code::invalid_argument, "norm.epsilon", "> 0", norm.epsilon);
    }
    bool in_place = false;
    for (const byte_rows* out : {&out_hidden, &out_residual}) {
        for (const byte_rows* in : {&hidden, &residual}) {
            if (detail::is_in_place(*in, *out)) {
                in_place = true;
            } else if (detail::may_overlap(*in, rows.num_rows, *out, rows.num_kept)) {
                return failure(status_code::invalid_argument,
                               out == &out_hidden ? "norm.out_hidden" : "norm.out_residual",
                               "an input's address and stride, or no byte of its rows", 1);
            }
        }
    }
    if (detail::may_overlap(out_hidden, rows.num_kept, out_residual, rows.num_kept)) {
        return failure(status_code::invalid_argument, "norm.out_residual",
                       "no byte of the rows of norm.out_hidden", 1);
    }

    detail::norm_move<Weight> move;
    if (in_place && !rows.identity) {
        UNIPREFILL_TRY(detail::take_order(scratch, move.order));
    }
    if (rows.num_kept == 0) {
        return success();
    }
    move.hidden = static_cast<const std::byte*>(hidden.data);
    move.residual = static_cast<const std::byte*>(residual.data);
    move.out_hidden = static_cast<std::byte*>(out_hidden.data);
    move.out_residual = static_cast<std::byte*>(out_residual.data);
    move.weight = norm.weight;
    move.hidden_stride = hidden.row_stride_bytes;
    move.residual_stride = residual.row_stride_bytes;
    move.out_hidden_stride = out_hidden.row_stride_bytes;
    move.out_residual_stride = out_residual.row_stride_bytes;
    move.vectors = static_cast<std::int32_t>(hidden.row_bytes / 16);
    move.share = 1.0f / static_cast<float>(hidden_size);
    move.epsilon = norm.epsilon;
    move.weight_offset = norm.one_plus_weight ? 1.0f : 0.0f;
    move.num_kept = rows.num_kept;
    move.num_rows = rows.num_rows;
    move.kept_to_old = rows.identity ? nullptr : rows.kept_to_old;
    move.kept_count = rows.identity ? nullptr : rows.kept_count;
    if (move.order != nullptr) {
        UNIPREFILL_TRY(detail::clear_order(move.order, device, stream));
    }
    return detail::launch_norm<Element>(move, device, stream);
}

UNIPREFILL_END_NAMESPACE
