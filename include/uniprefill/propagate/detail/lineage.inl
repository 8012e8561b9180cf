// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

inline UNIPREFILL_HOST_API row_lineage<backend::host>::buffer
row_lineage<backend::host>::carve(workspace& memory, const limits& bounds) noexcept {
    buffer made;
    made.original_rows = memory.take<std::int32_t>(bounds.max_rows);
    made.positions = memory.take<std::int32_t>(bounds.max_rows);
    made.cu_seqlens = memory.take<std::int32_t>(std::int64_t{bounds.max_requests} + 1);
    made.cu_segments = memory.take<std::int32_t>(std::int64_t{bounds.max_segments} + 1);
    return made;
}

inline UNIPREFILL_HOST_API std::size_t row_lineage<backend::host>::state_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(carve(counting, bounds_));
    static_cast<void>(carve(counting, bounds_));
    return counting.bytes_used();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::begin(const batch_view& step, workspace memory,
                                                                    host_stream) noexcept {
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(validate(step, bounds_));
    UNIPREFILL_TRY(memory.check(state_bytes()));
    workspace pieces(memory.data(), memory.bytes());
    buffers_[0] = carve(pieces, bounds_);
    buffers_[1] = carve(pieces, bounds_);
    next_buffer_ = 0;
    step_ = step;
    current_ = step;
    original_rows_ = nullptr;
    begun_ = true;
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::check(const selection& decided) const noexcept {
    if (!begun_) {
        return failure(status_code::wrong_state, "lineage", "begin() before apply() and revive()", 0);
    }
    if (decided.space != memory_space::host) {
        return failure(status_code::not_supported, "decided.space", "host memory", 1);
    }
    if (decided.num_rows != current_.num_rows) {
        return failure(status_code::invalid_argument, "decided.num_rows", "the number of current rows",
                       decided.num_rows);
    }
    if (decided.num_requests != current_.num_requests || decided.num_segments != current_.num_segments) {
        return failure(status_code::invalid_argument, "decided.num_segments",
                       "the requests and segments of the step", decided.num_segments);
    }
    if (decided.identity) {
        return success();
    }
    const bool filled = decided.cu_seqlens != nullptr && decided.cu_segments != nullptr;
    const std::int32_t kept = filled ? decided.cu_seqlens[decided.num_requests] : -1;
    if (kept < 0 || kept > decided.num_rows || (kept > 0 && decided.kept_to_old == nullptr)) {
        return failure(status_code::invalid_argument, "decided", "a selection whose arrays are filled", kept);
    }
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::apply(const selection& decided,
                                                                    host_stream) noexcept {
    UNIPREFILL_TRY(check(decided));
    const std::int32_t kept = decided.identity ? decided.num_rows : decided.cu_seqlens[decided.num_requests];
    if (kept == decided.num_rows) {
        return success();
    }
    const buffer& now = buffers_[next_buffer_];
    next_buffer_ = 1 - next_buffer_;
    for (std::int32_t row = 0; row < kept; ++row) {
        const std::int32_t before = decided.kept_to_old[row];
        now.original_rows[row] = original_rows_ != nullptr ? original_rows_[before] : before;
        now.positions[row] = current_.positions[before];
    }
    for (std::int32_t r = 0; r <= decided.num_requests; ++r) {
        now.cu_seqlens[r] = decided.cu_seqlens[r];
    }
    for (std::int32_t s = 0; s <= decided.num_segments; ++s) {
        now.cu_segments[s] = decided.cu_segments[s];
    }
    original_rows_ = now.original_rows;
    current_.num_rows = kept;
    current_.positions = now.positions;
    current_.cu_seqlens = now.cu_seqlens;
    current_.cu_segments = step_.cu_segments != nullptr ? now.cu_segments : nullptr;
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::revive(host_stream) noexcept {
    if (!begun_) {
        return failure(status_code::wrong_state, "lineage", "begin() before apply() and revive()", 0);
    }
    current_ = step_;
    original_rows_ = nullptr;
    return success();
}

inline UNIPREFILL_HOST_API row_map row_lineage<backend::host>::map() const noexcept {
    row_map made;
    made.identity = holds_every_row();
    made.kept_to_old = original_rows_;
    made.num_kept = current_.num_rows;
    made.num_rows = step_.num_rows;
    return made;
}

UNIPREFILL_END_NAMESPACE
