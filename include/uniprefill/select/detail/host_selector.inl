// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/select/detail/check_arguments.hpp>
#include <uniprefill/select/detail/decide_segment.hpp>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Turns the marks of one segment into row numbers from @p next on, and sets the bits of complete blocks.
/// @return the next number
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t
number_rows(const batch_view& batch, std::int32_t segment, std::int32_t next, selection& out) noexcept {
    const std::int32_t end = batch.segment_end(segment);
    std::int64_t block = block_offset(segment, batch.segment_begin(segment), out.block_rows);
    for (std::int32_t row = batch.segment_begin(segment); row < end; ++block) {
        const std::int32_t block_end = end - row > out.block_rows ? row + out.block_rows : end;
        const std::int32_t complete = next + (block_end - row);
        for (; row < block_end; ++row) {
            if (out.old_to_kept[row] == row_stays) {
                out.old_to_kept[row] = next;
                out.kept_to_old[next++] = row;
            }
        }
        if (next == complete) {
            out.keep_bits[block / 32] |= 1u << (block % 32);
        }
    }
    return next;
}

} // namespace detail

template <class Rule>
UNIPREFILL_HOST_API std::size_t block_selector<Rule, backend::host>::workspace_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(
        detail::rank_scratch::carve(counting, num_blocks(bounds_.max_rows, bounds_.block_rows)));
    return counting.bytes_used();
}

template <class Rule>
UNIPREFILL_HOST_API status block_selector<Rule, backend::host>::run(const mass_view& masses,
                                                                    const batch_view& batch,
                                                                    const Rule* rules, selection& out,
                                                                    workspace memory,
                                                                    host_stream) const noexcept {
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(validate(batch, bounds_));
    UNIPREFILL_TRY(detail::check_masses(masses, batch.num_segments, used_blocks(batch, bounds_.block_rows),
                                        memory_space::host));
    if (rules == nullptr && batch.num_requests > 0) {
        return failure(status_code::invalid_argument, "rules", "an array, not a null pointer", 0);
    }
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        if (const status bad = validate(rules[r]); !bad.ok()) {
            return bad.at_request(r);
        }
    }
    UNIPREFILL_TRY(detail::check_output(out, bounds_, memory_space::host));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    workspace pieces(memory.data(), memory.bytes());
    const auto scratch =
        detail::rank_scratch::carve(pieces, num_blocks(bounds_.max_rows, bounds_.block_rows));
    const std::int64_t words = (bounds_.max_blocks() + 31) / 32;
    for (std::int64_t word = 0; word < words; ++word) {
        out.keep_bits[word] = 0;
    }
    std::int32_t next = 0;
    std::int64_t places = 0;
    std::int32_t closed = 0; // requests whose end is written
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
        const std::int32_t request = batch.request_of(s);
        for (; closed <= request; ++closed) {
            out.cu_seqlens[closed] = next;
        }
        out.cu_segments[s] = next;
        detail::segment_decision<Rule> decision(batch, s, bounds_.block_rows, rules[request], out.old_to_kept,
                                                scratch);
        out.outcomes[s] = decision.run(masses);
        places += decision.places();
        next = detail::number_rows(batch, s, next, out);
    }
    for (; closed <= batch.num_requests; ++closed) {
        out.cu_seqlens[closed] = next;
    }
    out.cu_segments[batch.num_segments] = next;

    out.identity = false;
    out.num_requests = batch.num_requests;
    out.num_segments = batch.num_segments;
    out.num_rows = batch.num_rows;
    out.kept_bound = places < bounds_.max_rows ? static_cast<std::int32_t>(places) : bounds_.max_rows;
    for (std::int32_t row = next; row < out.kept_bound; ++row) {
        out.kept_to_old[row] = -1;
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
