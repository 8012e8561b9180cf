// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/propagate/detail/cuda_move.cuh>
#include <uniprefill/propagate/detail/row_composition.hpp>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

template <int Threads>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(Threads)
    compose_rows_kernel(const __grid_constant__ row_composition work) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const std::int32_t kept = kept_rows(work.cu_seqlens + work.num_requests, work.bound);
    const std::int64_t first = blockIdx.x * Threads + threadIdx.x;
    const std::int64_t step = gridDim.x * Threads;
    for (std::int64_t row = first; row < work.bound; row += step) {
        work.compose_row(static_cast<std::int32_t>(row), kept);
    }
    for (std::int64_t r = first; r <= work.num_requests; r += step) {
        work.new_cu_seqlens[r] = clamp_to(work.cu_seqlens[r], kept);
    }
    for (std::int64_t s = first; s <= work.num_segments; s += step) {
        work.new_cu_segments[s] = clamp_to(work.cu_segments[s], kept);
    }
}

} // namespace detail

inline UNIPREFILL_HOST_API row_lineage<backend::cuda>::buffer
row_lineage<backend::cuda>::carve(workspace& memory, const limits& bounds) noexcept {
    buffer made;
    made.original_rows = memory.take<std::int32_t>(bounds.max_rows);
    made.positions = memory.take<std::int32_t>(bounds.max_rows);
    made.cu_seqlens = memory.take<std::int32_t>(std::int64_t{bounds.max_requests} + 1);
    made.cu_segments = memory.take<std::int32_t>(std::int64_t{bounds.max_segments} + 1);
    return made;
}

inline UNIPREFILL_HOST_API std::size_t row_lineage<backend::cuda>::state_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(carve(counting, bounds_));
    static_cast<void>(carve(counting, bounds_));
    return counting.bytes_used() + in_place_scratch_bytes();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::begin(const batch_view& step, workspace memory,
                                                                    stream) noexcept {
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(detail::check_device_batch(step, bounds_));
    UNIPREFILL_TRY(memory.check(state_bytes()));
    workspace pieces(memory.data(), memory.bytes());
    buffers_[0] = carve(pieces, bounds_);
    buffers_[1] = carve(pieces, bounds_);
    const auto scratch = static_cast<std::int64_t>(in_place_scratch_bytes());
    scratch_ = workspace(pieces.take<std::byte>(scratch), in_place_scratch_bytes());
    next_buffer_ = 0;
    step_ = step;
    current_ = step;
    original_rows_ = nullptr;
    begun_ = true;
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::check(const selection& decided) const noexcept {
    if (!begun_) {
        return failure(status_code::wrong_state, "lineage", "begin() before apply() and revive()", 0);
    }
    if (decided.space != memory_space::device) {
        return failure(status_code::not_supported, "decided.space", "device memory", 0);
    }
    if (decided.num_rows != current_.num_rows) {
        return failure(status_code::invalid_argument, "decided.num_rows", "the number of current rows",
                       decided.num_rows);
    }
    if (decided.num_requests != current_.num_requests || decided.num_segments != current_.num_segments) {
        return failure(status_code::invalid_argument, "decided.num_segments",
                       "the requests and segments of the step", decided.num_segments);
    }
    const bool filled = decided.cu_seqlens != nullptr && decided.cu_segments != nullptr;
    if (!decided.identity &&
        (!filled || decided.kept_bound < 0 || (decided.kept_bound > 0 && decided.kept_to_old == nullptr))) {
        return failure(status_code::invalid_argument, "decided", "a selection whose arrays are filled",
                       decided.kept_bound);
    }
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::apply(const selection& decided,
                                                                    stream queue) noexcept {
    UNIPREFILL_TRY(check(decided));
    if (decided.identity) {
        return success();
    }
    const buffer& now = buffers_[next_buffer_];
    detail::row_composition work;
    work.kept_to_old = decided.kept_to_old;
    work.cu_seqlens = decided.cu_seqlens;
    work.cu_segments = decided.cu_segments;
    work.rows_before = original_rows_;
    work.positions_before = current_.positions;
    work.rows = now.original_rows;
    work.positions = now.positions;
    work.new_cu_seqlens = now.cu_seqlens;
    work.new_cu_segments = now.cu_segments;
    work.num_requests = decided.num_requests;
    work.num_segments = decided.num_segments;
    work.num_rows = decided.num_rows;
    work.bound = row_map(decided).num_kept;

    constexpr int threads = 256;
    std::int32_t most = work.num_requests > work.num_segments ? work.num_requests : work.num_segments;
    most = work.bound > most ? work.bound : most;
    const std::int32_t blocks = most / threads + 1;
    const std::int32_t fit = device_.ctas(4);
    UNIPREFILL_TRY(detail::launch(device_, &detail::compose_rows_kernel<threads>,
                                  dim3(static_cast<unsigned>(blocks < fit ? blocks : fit)), dim3(threads), 0,
                                  queue, work));
    next_buffer_ = 1 - next_buffer_;
    original_rows_ = now.original_rows;
    current_.num_rows = work.bound;
    current_.positions = now.positions;
    current_.cu_seqlens = now.cu_seqlens;
    current_.cu_segments = step_.cu_segments != nullptr ? now.cu_segments : nullptr;
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::revive(stream) noexcept {
    if (!begun_) {
        return failure(status_code::wrong_state, "lineage", "begin() before apply() and revive()", 0);
    }
    current_ = step_;
    original_rows_ = nullptr;
    return success();
}

inline UNIPREFILL_HOST_API row_map row_lineage<backend::cuda>::map() const noexcept {
    row_map made;
    made.space = memory_space::device;
    made.identity = holds_every_row();
    made.kept_to_old = original_rows_;
    made.kept_count = made.identity ? nullptr : current_.cu_seqlens + current_.num_requests;
    made.num_kept = current_.num_rows;
    made.num_rows = step_.num_rows;
    return made;
}

UNIPREFILL_END_NAMESPACE
