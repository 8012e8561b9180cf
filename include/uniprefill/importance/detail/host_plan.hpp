// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which segments of a step are scored, on which rows and keys, and where their temporaries lie.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/importance/detail/named_rows.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Query rows are padded to this many, on every machine, so that sizes don't depend on the vector width.
inline constexpr std::int32_t padded_lanes = 64;
/// Rows that a block's tiles have beyond G, for the last register tile, whatever its height.
inline constexpr std::int32_t spare_keys = 8;
/// (segment, KV head) pairs that are worked on between two barriers, at most.
inline constexpr std::int32_t max_wave_items = 16;
/// Numbers that those pairs may leave between them where one alone would leave fewer: 8 MiB.
inline constexpr std::int64_t max_wave_partials = std::int64_t{1} << 21;
/// Threads that are used, at most: each has a tile of its own in the workspace.
inline constexpr std::int32_t max_workers = 64;

[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int64_t round_up(std::int64_t value,
                                                                  std::int64_t multiple) noexcept {
    return (value + multiple - 1) / multiple * multiple;
}

/// A segment whose masses are wanted. Its keys are the request's cached ones, then the rows of the step from
/// the request's first to the segment's last; those before the segment's own are its context.
struct UNIPREFILL_HIDDEN scored_segment {
    std::int64_t context = 0;           ///< keys before the segment's first row
    std::int64_t context_blocks = 0;    ///< of G keys each, the last one shorter
    std::int64_t first_observation = 0; ///< in host_buffers::observations
    std::int64_t out_block = 0;         ///< in the arrays of mass_view
    std::int32_t segment = 0;
    std::int32_t request = 0;
    std::int32_t first_row = 0; ///< packed
    std::int32_t rows = 0;
    std::int32_t own_blocks = 0;
    std::int32_t num_observations = 0; ///< 0: no observation row is alive
    std::int32_t query_rows = 0;       ///< group heads * observations: the lanes of one KV head
    std::int32_t lanes = 0;            ///< query_rows, padded

    /// Places for one number of a query row: one for a context block, two for an own block (free, forced).
    [[nodiscard]] std::int64_t slots() const noexcept {
        return context_blocks + std::int64_t{2} * own_blocks;
    }
    [[nodiscard]] std::int64_t blocks() const noexcept { return context_blocks + own_blocks; }
};

static_assert(sizeof(scored_segment) == 64, "workspace_bytes() documents this size");

/// The workspace, carved; importance_estimator::workspace_bytes() documents the sizes.
struct UNIPREFILL_HIDDEN host_buffers {
    scored_segment* segments = nullptr;   // [S]
    std::int32_t* observations = nullptr; // [min(S * n, R)] observation rows, counted from their segment's
    float* queries = nullptr;             // [items][d][lanes], in panels
    float* partials = nullptr;            // [num_partials] of each item of a wave: [slots][lanes]
    float* reference = nullptr;           // [items][lanes] the largest partial of a row
    float* inverse_sum = nullptr;         // [items][lanes] 1 / (the row's sum, relative to its reference)
    float* tiles = nullptr;         // [workers][G + 8 rounded up to 16][d + 64] keys and scores of a block
    std::uint8_t* faulty = nullptr; // [workers][S] whether a worker met NaN or infinity in a segment

    std::int64_t lanes = 0;
    std::int64_t num_partials = 0;
    std::int64_t tile_size = 0;
    std::int32_t items = 0;
    std::int32_t workers = 0;

    [[nodiscard]] static UNIPREFILL_HOST_API host_buffers carve(workspace& memory,
                                                                const limits& bounds) noexcept {
        const std::int64_t rows = bounds.max_rows;
        const std::int64_t keys = rows + bounds.max_cached_tokens;
        const std::int64_t segments = bounds.max_segments;
        const std::int64_t observations = bounds.num_observations;
        const auto smaller = [](std::int64_t a, std::int64_t b) { return a < b ? a : b; };

        host_buffers made;
        made.lanes = round_up(bounds.group_heads() * smaller(observations, rows), padded_lanes);
        made.items = static_cast<std::int32_t>(smaller(max_wave_items, segments * bounds.num_kv_heads));
        const std::int64_t slots = keys / bounds.block_rows + rows / bounds.block_rows + 3;
        const std::int64_t of_one = slots * made.lanes;
        const std::int64_t of_several = smaller(made.items * of_one, max_wave_partials);
        made.num_partials = of_one < of_several ? of_several : of_one;
        made.workers = static_cast<std::int32_t>(smaller(max_workers, keys / bounds.block_rows + 2));
        made.tile_size = round_up(bounds.block_rows + spare_keys, 16) * (bounds.head_dim + padded_lanes);

        made.segments = memory.take<scored_segment>(segments);
        made.observations = memory.take<std::int32_t>(smaller(segments * observations, rows));
        made.queries = memory.take<float>(made.items * made.lanes * bounds.head_dim);
        made.partials = memory.take<float>(made.num_partials);
        made.reference = memory.take<float>(made.items * made.lanes);
        made.inverse_sum = memory.take<float>(made.items * made.lanes);
        made.tiles = memory.take<float>(made.workers * made.tile_size);
        made.faulty = memory.take<std::uint8_t>(made.workers * segments);
        return made;
    }
};

/// Whether rows are forced, asked in ascending order: is_forced_row() with everything that doesn't depend on
/// the row taken out of the loop.
class UNIPREFILL_HIDDEN forced_row_scan {
  public:
    forced_row_scan(const batch_view& batch, std::int32_t segment, std::int32_t first_row) noexcept
        : positions_(batch.positions) {
        const std::int32_t request = batch.request_of(segment);
        const request_options options = batch.options_of(request);
        sink_ = options.sink;
        tail_begin_ = batch.segment_end(segment) - options.tail;
        if (batch.forced.offsets != nullptr) {
            span_ = batch.forced.spans + batch.forced.offsets[request];
            spans_end_ = batch.forced.spans + batch.forced.offsets[request + 1];
            // The first span that ends beyond the first row: ends ascend as spans are sorted and disjoint.
            for (auto count = spans_end_ - span_; count > 0;) {
                const auto half_count = count / 2;
                const bool before = span_[half_count].end <= positions_[first_row];
                span_ += before ? half_count + 1 : 0;
                count = before ? count - half_count - 1 : half_count;
            }
        }
    }

    [[nodiscard]] bool operator()(std::int32_t row) noexcept {
        const std::int32_t position = positions_[row];
        while (span_ != spans_end_ && span_->end <= position) {
            ++span_;
        }
        return position < sink_ || row >= tail_begin_ || (span_ != spans_end_ && position >= span_->begin);
    }

  private:
    const std::int32_t* positions_;
    const position_span* span_ = nullptr;
    const position_span* spans_end_ = nullptr;
    std::int32_t sink_ = 0;
    std::int32_t tail_begin_ = 0;
};

/// Writes the observation rows of a segment, ascending and counted from its first row.
/// @return how many there are, at most n.
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t list_observations(const batch_view& batch,
                                                                        const scored_segment& what,
                                                                        std::int32_t n,
                                                                        std::int32_t* rows) noexcept {
    const span_lists& named = batch.observed;
    if (named.offsets != nullptr && named.offsets[what.request] < named.offsets[what.request + 1]) {
        return list_named_rows(batch.positions, what.first_row, what.first_row + what.rows, named.spans,
                               named.offsets[what.request], named.offsets[what.request + 1], n, rows);
    }
    const std::int32_t count = what.rows < n ? what.rows : n;
    for (std::int32_t i = 0; i < count; ++i) {
        rows[i] = what.rows - count + i;
    }
    return count;
}

/// Whether a decision about the segment could drop anything.
[[nodiscard]] inline UNIPREFILL_HOST_API bool is_decided(const batch_view& batch,
                                                         std::int32_t segment) noexcept {
    const std::int32_t request = batch.request_of(segment);
    const request_options options = batch.options_of(request);
    const std::int32_t begin = batch.segment_begin(segment);
    const std::int32_t end = batch.segment_end(segment);
    if (!batch.is_prefill(request) || options.enabled == 0 || begin == end ||
        end - begin < options.min_length) {
        return false;
    }
    forced_row_scan is_forced(batch, segment, begin);
    for (std::int32_t row = begin; row < end; ++row) {
        if (!is_forced(row)) {
            return true;
        }
    }
    return false;
}

/// Fills host_buffers::segments and observations. @return the number of segments that a decision is about.
[[nodiscard]] inline UNIPREFILL_HOST_API std::int32_t
plan_segments(const batch_view& batch, const limits& bounds, const host_buffers& buffers) noexcept {
    std::int32_t count = 0;
    std::int64_t observations = 0;
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        if (!is_decided(batch, segment)) {
            continue;
        }
        scored_segment& what = buffers.segments[count++];
        what = scored_segment{};
        what.segment = segment;
        what.request = batch.request_of(segment);
        what.first_row = batch.segment_begin(segment);
        what.rows = batch.segment_end(segment) - what.first_row;
        what.own_blocks = num_blocks(what.rows, bounds.block_rows);
        what.context =
            std::int64_t{batch.cached_len(what.request)} + what.first_row - batch.cu_seqlens[what.request];
        what.context_blocks = round_up(what.context, bounds.block_rows) / bounds.block_rows;
        what.out_block = block_offset(segment, what.first_row, bounds.block_rows);
        what.first_observation = observations;
        what.num_observations =
            list_observations(batch, what, bounds.num_observations, buffers.observations + observations);
        what.query_rows = what.num_observations * bounds.group_heads();
        what.lanes = static_cast<std::int32_t>(round_up(what.query_rows, padded_lanes));
        observations += what.num_observations;
    }
    return count;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
