// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The outcome of one decision: what select fills, and everything downstream reads.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Why a segment kept what it kept. Values below 64 are information, those from 64 on are faults.
enum class keep_reason : std::int32_t {
    selected = 0,      ///< the rule decided
    everything = 1,    ///< the rule decided, and kept every row (p = 1 among others)
    empty = 2,         ///< the segment has no rows
    not_prefill = 3,   ///< decode and verify rows are never dropped
    switched_off = 4,  ///< request_options::enabled is 0
    short_segment = 5, ///< fewer rows than min_length, or every row is forced

    non_finite = 64,  ///< NaN or infinity in a score: every row kept
    zero_mass = 65,   ///< nothing to rank by: every row kept
    unscored = 66,    ///< no observation row was alive: every row kept
    overflow = 67,    ///< a workspace was too small: every row kept
    rank = 68,        ///< another rank reported a fault: every row kept
    rerun_dense = 69, ///< a fault under a fixed budget: the budget's rows were kept and the output is void
    invalid = 70, ///< device arrays or a rule that make no sense (the host backend refuses them): every row
                  ///< kept
};

/// Whether the segment kept its rows because its masses could not be trusted.
[[nodiscard]] UNIPREFILL_API constexpr bool is_fault(keep_reason reason) noexcept {
    return static_cast<std::int32_t>(reason) >= 64;
}

/// The reason in words, for reports.
[[nodiscard]] UNIPREFILL_API constexpr const char* to_string(keep_reason reason) noexcept {
    switch (reason) {
    case keep_reason::selected:
        return "selected";
    case keep_reason::everything:
        return "everything";
    case keep_reason::empty:
        return "empty";
    case keep_reason::not_prefill:
        return "not prefill";
    case keep_reason::switched_off:
        return "switched off";
    case keep_reason::short_segment:
        return "short";
    case keep_reason::non_finite:
        return "non-finite score";
    case keep_reason::zero_mass:
        return "zero mass";
    case keep_reason::unscored:
        return "unscored";
    case keep_reason::overflow:
        return "workspace overflow";
    case keep_reason::rank:
        return "fault on another rank";
    case keep_reason::rerun_dense:
        return "rerun dense";
    case keep_reason::invalid:
        return "invalid arrays";
    }
    return "unknown reason";
}

/// What happened to one segment.
struct segment_outcome {
    std::int64_t total_mass = 0;   ///< fixed point, over the scope of p
    std::int64_t dropped_mass = 0; ///< fixed point, over the dropped rows; a cut block counts in proportion
                                   ///< of its dropped free rows, rounded up
    std::int32_t rows = 0;         ///< rows before
    std::int32_t kept = 0;         ///< rows after
    std::int32_t cut_block =
        -1; ///< the one block (of the segment) of which only the first rows are kept, -1: none
    std::int32_t cut_rows = 0; ///< free rows kept of it
    keep_reason reason = keep_reason::selected;
};

/// The rows that go on, over the packed rows of a step.
///
/// `identity` says "keep all" and that no array may be touched (they may be null): the answer of a layer that
/// doesn't select. Otherwise every array is filled. A row of a segment is kept exactly when it is forced, or
/// its block's bit is set, or its block is the cut and the row is among the first `cut_rows` free rows of it.
/// A segment whose reason is `rerun_dense` follows the row maps alone.
struct selection {
    memory_space space = memory_space::host;
    bool identity = true;
    std::int32_t num_requests = 0;
    std::int32_t num_segments = 0;
    std::int32_t num_rows = 0; ///< rows before (upper bound where only the device knows)
    std::int32_t kept_bound =
        0; ///< upper bound of rows after, known to the host; the exact count on the host
    std::int32_t block_rows = 0; ///< G

    std::int32_t max_requests = 0; ///< requests, segments, rows and blocks that the arrays have room for
    std::int32_t max_segments = 0;
    std::int32_t max_rows = 0;
    std::int64_t max_blocks = 0;

    std::uint32_t* keep_bits =
        nullptr; // [ceil(max_blocks / 32)] bit i % 32 of word i / 32, i as in block_offset
    std::int32_t* kept_to_old = nullptr; // [kept_bound] packed row before; -1 beyond the kept rows
    std::int32_t* old_to_kept = nullptr; // [num_rows] packed row after, -1 where dropped
    std::int32_t* cu_seqlens = nullptr;  // [num_requests + 1] after
    std::int32_t* cu_segments = nullptr; // [num_segments + 1] after
    segment_outcome* outcomes = nullptr; // [num_segments]

    /// "Keep all" for a step of @p rows rows.
    [[nodiscard]] static UNIPREFILL_API selection keep_all(std::int32_t requests, std::int32_t segments,
                                                           std::int32_t rows, memory_space space) noexcept {
        selection all;
        all.space = space;
        all.num_requests = requests;
        all.num_segments = segments;
        all.num_rows = rows;
        all.kept_bound = rows;
        return all;
    }

    /// Carves the arrays of a selection over steps within @p bounds.
    [[nodiscard]] static UNIPREFILL_HOST_API selection carve(workspace& memory, const limits& bounds,
                                                             memory_space space) noexcept {
        selection made;
        made.space = space;
        made.identity = false;
        made.block_rows = bounds.block_rows;
        made.max_requests = bounds.max_requests;
        made.max_segments = bounds.max_segments;
        made.max_rows = bounds.max_rows;
        made.max_blocks = bounds.max_blocks();
        made.keep_bits = memory.take<std::uint32_t>((bounds.max_blocks() + 31) / 32);
        made.kept_to_old = memory.take<std::int32_t>(bounds.max_rows);
        made.old_to_kept = memory.take<std::int32_t>(bounds.max_rows);
        made.cu_seqlens = memory.take<std::int32_t>(std::int64_t{bounds.max_requests} + 1);
        made.cu_segments = memory.take<std::int32_t>(std::int64_t{bounds.max_segments} + 1);
        made.outcomes = memory.take<segment_outcome>(bounds.max_segments);
        return made;
    }

    /// The first kept row of a segment of @p batch, among the kept ones of a step in host memory.
    [[nodiscard]] UNIPREFILL_API std::int32_t segment_begin(const batch_view& batch,
                                                            std::int32_t segment) const noexcept {
        return identity ? batch.segment_begin(segment) : cu_segments[segment];
    }
    /// One past the last kept row of a segment.
    [[nodiscard]] UNIPREFILL_API std::int32_t segment_end(const batch_view& batch,
                                                          std::int32_t segment) const noexcept {
        return identity ? batch.segment_end(segment) : cu_segments[segment + 1];
    }

    /// Whether the arrays have room for every step within @p bounds.
    [[nodiscard]] UNIPREFILL_API bool holds(const limits& bounds) const noexcept {
        return max_requests >= bounds.max_requests && max_segments >= bounds.max_segments &&
               max_rows >= bounds.max_rows && max_blocks >= bounds.max_blocks();
    }

    /// Whether the bit of block @p index (counted as block_offset() does) is set.
    [[nodiscard]] UNIPREFILL_API bool keeps_block(std::int64_t index) const noexcept {
        return identity || ((keep_bits[index / 32] >> (index % 32)) & 1u) != 0;
    }
};

UNIPREFILL_END_NAMESPACE
