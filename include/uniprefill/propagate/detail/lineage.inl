// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::begin(const batch_view& step, workspace memory,
                                                                    host_stream) noexcept {
    UNIPREFILL_TRY(validate(bounds()));
    UNIPREFILL_TRY(validate(step, bounds()));
    UNIPREFILL_TRY(memory.check(state_bytes()));
    workspace pieces(memory.data(), memory.bytes());
    start(step, pieces);
    return success();
}

inline UNIPREFILL_HOST_API status row_lineage<backend::host>::check(const selection& decided) const noexcept {
    UNIPREFILL_TRY(check_about(decided, memory_space::host));
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
    const buffer& made = next_buffer();
    const std::int32_t* const rows_before = original_rows();
    const std::int32_t* const positions_before = current().positions;
    for (std::int32_t row = 0; row < kept; ++row) {
        const std::int32_t before = decided.kept_to_old[row];
        made.original_rows[row] = rows_before != nullptr ? rows_before[before] : before;
        made.positions[row] = positions_before[before];
    }
    for (std::int32_t r = 0; r <= decided.num_requests; ++r) {
        made.cu_seqlens[r] = decided.cu_seqlens[r];
    }
    for (std::int32_t s = 0; s <= decided.num_segments; ++s) {
        made.cu_segments[s] = decided.cu_segments[s];
    }
    advance(kept);
    return success();
}

inline UNIPREFILL_HOST_API row_map row_lineage<backend::host>::map() const noexcept {
    row_map made;
    made.identity = holds_every_row();
    made.kept_to_old = original_rows();
    made.num_kept = current().num_rows;
    made.num_rows = step().num_rows;
    return made;
}

UNIPREFILL_END_NAMESPACE
