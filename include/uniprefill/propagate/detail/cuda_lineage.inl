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

inline UNIPREFILL_HOST_API std::size_t row_lineage<backend::cuda>::state_bytes() const noexcept {
    const std::size_t bytes = buffer_bytes();
    return bytes == 0 ? 0 : bytes + in_place_scratch_bytes();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::begin(const batch_view& step, workspace memory,
                                                                    stream) noexcept {
    UNIPREFILL_TRY(validate(bounds()));
    UNIPREFILL_TRY(detail::check_device_batch(step, bounds()));
    UNIPREFILL_TRY(memory.check(state_bytes()));
    workspace pieces(memory.data(), memory.bytes());
    start(step, pieces);
    const auto scratch = static_cast<std::int64_t>(in_place_scratch_bytes());
    scratch_ = workspace(pieces.take<std::byte>(scratch), in_place_scratch_bytes());
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::cuda>::check(const selection& decided) const noexcept {
    UNIPREFILL_TRY(check_about(decided, memory_space::device));
    const bool filled = decided.cu_seqlens != nullptr && decided.cu_segments != nullptr;
    if (!decided.identity &&
        (!filled || decided.kept_bound < 0 || (decided.kept_bound > 0 && decided.kept_to_old == nullptr))) {
        return failure(status_code::invalid_argument, "decided", "a selection whose arrays are filled",
                       decided.kept_bound);
    }
    return success();
}

template <class>
UNIPREFILL_HOST_API status row_lineage<backend::cuda>::apply(const selection& decided,
                                                             stream queue) noexcept {
    UNIPREFILL_TRY(check(decided));
    if (decided.identity) {
        return success();
    }
    const buffer& made = next_buffer();
    detail::row_composition work;
    work.kept_to_old = decided.kept_to_old;
    work.cu_seqlens = decided.cu_seqlens;
    work.cu_segments = decided.cu_segments;
    work.rows_before = original_rows();
    work.positions_before = current().positions;
    work.rows = made.original_rows;
    work.positions = made.positions;
    work.new_cu_seqlens = made.cu_seqlens;
    work.new_cu_segments = made.cu_segments;
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
    advance(work.bound);
    return success();
}

inline UNIPREFILL_HOST_API row_map row_lineage<backend::cuda>::map() const noexcept {
    row_map made;
    made.space = memory_space::device;
    made.identity = holds_every_row();
    made.kept_to_old = original_rows();
    made.kept_count = made.identity ? nullptr : current().cu_seqlens + current().num_requests;
    made.num_kept = current().num_rows;
    made.num_rows = step().num_rows;
    return made;
}

UNIPREFILL_END_NAMESPACE
