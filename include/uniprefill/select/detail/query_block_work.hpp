// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Query blocks of a step: which of their rows are scored, what those see, and which blocks of keys there are
/// to choose from. Plain functions of host and device.
#pragma once

#include <uniprefill/core/attention_options.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/detail/segment_keys.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Query blocks of a group: as many as fill @p group_rows rows, each with @p samples rows of @p heads query
/// heads; 1 if one has more.
[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int32_t
blocks_of_group(std::int32_t samples, std::int32_t heads, std::int32_t group_rows) noexcept {
    const std::int64_t fit = group_rows / (std::int64_t{samples} * heads);
    return fit > 1 ? static_cast<std::int32_t>(fit) : 1;
}

/// A step as listers by query block know it. Query blocks are worked on in *groups*: as many neighbours of a
/// segment as fill `group_rows` rows, each with all its sampled rows and the query heads of one KV head.
struct query_list_step {
    batch_view batch;
    const std::int32_t* kept_to_old = nullptr; // [kept rows] null: every row is kept
    const std::int32_t* cu_kept = nullptr;     // [num_segments + 1] first kept row; null: as the batch's rows
    std::int32_t kept_bound = 0;
    std::int32_t query_rows = 1;   ///< of a query block
    std::int32_t sample = 1;       ///< every how many of them is scored
    std::int32_t samples = 1;      ///< scored rows of a whole query block
    std::int32_t group_blocks = 1; ///< query blocks of a group
    std::int32_t heads = 1;        ///< query heads of a KV head
    std::int32_t num_kv_heads = 1;
    std::int32_t lists = 1;      ///< of a KV head: 1, or one for each of its query heads
    std::int32_t block_rows = 1; ///< G
    std::int32_t sink = 0;
    std::int32_t list_window = 0;
    std::int32_t window = 0; ///< the model's
    const std::int32_t* cached_positions = nullptr;
    std::int64_t cached_positions_stride = 0;
    mass_scope scope = mass_scope::all;

    /// @param group_rows that a group's rows fill, if one query block doesn't have more
    UNIPREFILL_HOST_API void set(const limits& bounds, const batch_view& step_batch, const selection& kept,
                                 const attention_options& attention, const block_lists& out,
                                 std::int32_t sample_of, std::int32_t group_rows) noexcept {
        batch = step_batch;
        if (!kept.identity) {
            kept_to_old = kept.kept_to_old;
            cu_kept = kept.cu_segments;
        }
        kept_bound = kept.kept_bound;
        heads = bounds.group_heads();
        num_kv_heads = bounds.num_kv_heads;
        lists = out.num_heads / bounds.num_kv_heads;
        block_rows = bounds.block_rows;
        window = attention.window;
        cached_positions = attention.cached_positions;
        cached_positions_stride = attention.cached_positions_stride;
        query_rows = out.query_rows;
        sample = sample_of;
        samples = (query_rows - 1) / sample + 1;
        group_blocks = blocks_of_group(samples, heads, group_rows);
    }
    /// Rows of a query block in a group.
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_of_block() const noexcept { return samples * heads; }
    [[nodiscard]] UNIPREFILL_API std::int32_t list_heads() const noexcept { return num_kv_heads * lists; }
    /// Lists that may have a number, those of no query block counted.
    [[nodiscard]] UNIPREFILL_API std::int64_t num_lists() const noexcept {
        return (std::int64_t{kept_bound} / query_rows + batch.num_segments) * list_heads();
    }
};

/// The fixed-point format of one list's masses: at most so many shares of 1.
[[nodiscard]] UNIPREFILL_API constexpr mass_format query_mass_format(std::int32_t samples,
                                                                     std::int32_t heads) noexcept {
    limits rows;
    rows.num_heads = heads;
    rows.num_observations = samples;
    return mass_format::of(rows);
}

/// Groups of a segment, of each KV head.
[[nodiscard]] inline UNIPREFILL_API std::int32_t groups_of(const query_list_step& step,
                                                           std::int32_t segment) noexcept {
    const kept_range queries = kept_of(step, segment);
    const std::int32_t blocks = num_blocks(queries.end - queries.begin, step.query_rows);
    return num_blocks(blocks, step.group_blocks);
}

/// A segment as query blocks see it.
struct query_segment : segment_keys {
    std::int32_t segment;
    std::int32_t sink_blocks; ///< its first ones, which are listed whatever they weigh
    kept_range queries;
    bool is_scored; ///< else everything is read
};
[[nodiscard]] inline UNIPREFILL_API query_segment query_segment_of(const query_list_step& step,
                                                                   std::int32_t segment) noexcept {
    const batch_view& batch = step.batch;
    query_segment made{};
    static_cast<segment_keys&>(made) = segment_keys_of(batch, segment);
    made.segment = segment;
    made.queries = kept_of(step, segment);
    const request_options options = batch.options_of(made.request);
    made.is_scored =
        batch.is_prefill(made.request) && options.enabled != 0 && made.rows >= options.min_length;
    const std::int32_t end = made.begin + made.rows;
    made.sink_blocks =
        num_blocks(first_row_at(batch.positions, made.begin, end, step.sink) - made.begin, step.block_rows);
    return made;
}

/// One query block. Blocks of keys are counted from the segment's first.
struct query_block {
    std::int64_t place; ///< of its lists: block_lists says what it is
    std::int32_t first_kept;
    std::int32_t rows; ///< kept ones
    std::int32_t samples;
    std::int32_t blocks;          ///< up to its last row's
    std::int32_t candidate_begin; ///< blocks that the scope weighs: [candidate_begin, candidate_end)
    std::int32_t candidate_end;
    std::int32_t sink_blocks;
    bool has_choice; ///< else its rows read every block anyway, or aren't scored
};
/// The packed row of kept row @p kept; -1 where the map makes no sense.
[[nodiscard]] inline UNIPREFILL_API std::int32_t
packed_row_of(const query_list_step& step, const query_segment& of, std::int32_t kept) noexcept {
    const std::int32_t row = step.kept_to_old != nullptr ? step.kept_to_old[kept] : kept;
    return row < of.begin || row - of.begin >= of.rows ? -1 : row;
}
/// Query block @p index of a segment. O(log window).
[[nodiscard]] inline UNIPREFILL_API query_block query_block_of(const query_list_step& step,
                                                               const query_segment& of,
                                                               std::int32_t index) noexcept {
    query_block made{};
    const std::int32_t before = index * step.query_rows;
    const std::int32_t left = of.queries.end - of.queries.begin - before;
    made.place = block_lists::query_block_place(of.segment, of.queries.begin, step.query_rows) + index;
    made.first_kept = of.queries.begin + before;
    made.rows = left < step.query_rows ? left : step.query_rows;
    made.samples = (made.rows - 1) / step.sample + 1;
    const std::int32_t last = packed_row_of(step, of, made.first_kept + made.rows - 1);
    if (last < 0) {
        return made;
    }
    made.blocks = (last - of.begin) / step.block_rows + 1;
    made.sink_blocks = of.sink_blocks < made.blocks ? of.sink_blocks : made.blocks;
    // Blocks that are in the window of the last row are in that of all.
    std::int32_t window_block = made.blocks;
    if (step.list_window > 0) {
        const std::int32_t least = step.batch.positions[last] - step.list_window + 1;
        window_block =
            (bracketed_row_at(step.batch.positions, of.begin, last, least) - of.begin) / step.block_rows;
    }
    made.has_choice = of.is_scored && made.sink_blocks < window_block;
    const bool all = step.scope == mass_scope::all;
    made.candidate_begin = all ? 0 : made.sink_blocks;
    made.candidate_end = all ? made.blocks : window_block;
    return made;
}
/// The kept row that is sample @p sample of a query block: its last row is the first.
[[nodiscard]] inline UNIPREFILL_API std::int32_t
sampled_row(const query_list_step& step, const query_block& block, std::int32_t sample) noexcept {
    return block.first_kept + block.rows - 1 - sample * step.sample;
}

/// Keys that a row sees: [first, end).
struct seen_keys {
    std::int32_t first;
    std::int32_t end;
};
/// What packed row @p row of a segment sees. O(log window).
[[nodiscard]] inline UNIPREFILL_API seen_keys seen_by(const query_list_step& step, const query_segment& of,
                                                      std::int32_t row) noexcept {
    seen_keys made{0, of.context + row - of.begin + 1};
    if (step.window > 0) {
        const std::int32_t* const held =
            step.cached_positions != nullptr
                ? step.cached_positions + of.request * step.cached_positions_stride
                : nullptr;
        made.first = first_key_at(held, of.cached, step.batch.positions, of.request_begin, row,
                                  step.batch.positions[row] - step.window + 1);
    }
    return made;
}

/// What is known of each list before they are written: bits of the blocks that it names, and how many they
/// are.
struct query_list_marks {
    std::int32_t* lengths = nullptr; // [lists] or why everything is read
    std::uint32_t* bits = nullptr;   // [lists][words] bit i % 32 of word i / 32: block i
    std::int64_t words = 0;
    std::int64_t capacity = 0; ///< of block_lists::blocks

    UNIPREFILL_HIDDEN static constexpr std::int32_t no_choice = -1; ///< everything is read whatever is listed
    UNIPREFILL_HIDDEN static constexpr std::int32_t untrusted = -2; ///< scores or the total make no sense

    [[nodiscard]] static UNIPREFILL_HOST_API query_list_marks carve(workspace& memory, const limits& bounds,
                                                                    std::int32_t query_rows,
                                                                    std::int32_t heads) noexcept {
        query_list_marks made;
        const std::int64_t lists = block_lists::most_query_blocks(bounds, query_rows) * heads;
        made.words = (std::int64_t{num_blocks(bounds.max_rows, bounds.block_rows)} + 31) / 32;
        made.lengths = memory.take<std::int32_t>(lists);
        made.bits = memory.take<std::uint32_t>(lists * made.words);
        return made;
    }
    [[nodiscard]] UNIPREFILL_API std::uint32_t* bits_of(std::int64_t list) const noexcept {
        return bits + list * words;
    }
    /// The offset of a list of @p length blocks, or none, that follows lists of @p before together.
    [[nodiscard]] UNIPREFILL_API std::int64_t offset(std::int32_t length,
                                                     std::int64_t before) const noexcept {
        const std::int64_t place = before < capacity ? before : capacity;
        return length < 0 || is_unfitting(length, before) ? ~place : place;
    }
    [[nodiscard]] UNIPREFILL_API bool is_unfitting(std::int32_t length, std::int64_t before) const noexcept {
        return length > 0 && before + length > capacity;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
