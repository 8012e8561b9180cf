// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A segment by blocks, for decisions that many threads take together: which rows are forced, counted by
/// ranges, and what each block weighs. Everything here is a pure function of the step's arrays, whatever they
/// hold.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>

/// For what few segments need: the device fetches instructions of its own for every copy.
#if defined(__CUDACC__)
#    define UNIPREFILL_OUT_OF_LINE __noinline__
#else
#    define UNIPREFILL_OUT_OF_LINE
#endif

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A half-open range of packed rows.
struct row_range {
    std::int32_t begin = 0;
    std::int32_t end = 0;

    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t size() const noexcept { return end - begin; }
};

/// G, and how to divide by it without a division: by a product with a fraction that is exact for all counts
/// below 2^31 (Granlund and Montgomery, "Division by invariant integers using multiplication", 1994).
struct block_size {
    std::int32_t rows = 1;
    std::int32_t shift = 31;
    std::uint32_t fraction = std::uint32_t{1} << 31; ///< ceil(2^shift / rows)

    [[nodiscard]] static UNIPREFILL_API constexpr block_size of(std::int32_t rows) noexcept {
        std::int32_t length = 0;
        while ((std::int64_t{1} << length) < rows) {
            ++length;
        }
        const auto divisor = static_cast<std::uint64_t>(rows);
        const std::uint64_t fraction = ((std::uint64_t{1} << (31 + length)) + divisor - 1) / divisor;
        return {rows, 31 + length, static_cast<std::uint32_t>(fraction)};
    }
    /// Whole blocks in @p count rows.
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t whole(std::int32_t count) const noexcept {
        return static_cast<std::int32_t>((std::uint64_t{static_cast<std::uint32_t>(count)} * fraction) >>
                                         shift);
    }
    /// As num_blocks().
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t blocks(std::int32_t count) const noexcept {
        const std::int32_t full = whole(count);
        return full + (full * rows < count ? 1 : 0);
    }
    /// As block_offset().
    [[nodiscard]] UNIPREFILL_API constexpr std::int64_t offset(std::int32_t segment,
                                                               std::int32_t first_row) const noexcept {
        return std::int64_t{whole(first_row)} + segment;
    }
};

/// The rows of a segment; offsets that make no sense are clamped to the step's rows.
[[nodiscard]] inline UNIPREFILL_API row_range rows_of_segment(const batch_view& batch,
                                                              std::int32_t segment) noexcept {
    const std::int32_t begin = clamped(batch.segment_begin(segment), 0, batch.num_rows);
    return {begin, clamped(batch.segment_end(segment), begin, batch.num_rows)};
}

/// The request of a segment; an index that makes no sense is clamped.
[[nodiscard]] inline UNIPREFILL_API std::int32_t request_of_segment(const batch_view& batch,
                                                                    std::int32_t segment) noexcept {
    return clamped(batch.request_of(segment), 0, batch.num_requests - 1);
}

/// Whether segment @p s begins where the one before it ends, ends no earlier, belongs to the same or the next
/// request, and meets the edges of its request.
[[nodiscard]] inline UNIPREFILL_API bool segment_is_in_order(const batch_view& batch,
                                                             std::int32_t s) noexcept {
    const std::int32_t begin = batch.segment_begin(s);
    const std::int32_t end = batch.segment_end(s);
    const bool rises = begin >= 0 && end >= begin && end <= batch.num_rows && (s > 0 || begin == 0);
    if (batch.cu_segments == nullptr && batch.segment_request == nullptr) {
        return rises; // segments are requests
    }
    const std::int32_t request = batch.request_of(s);
    const std::int32_t before = s > 0 ? batch.request_of(s - 1) : -1;
    const std::int32_t after = s + 1 < batch.num_segments ? batch.request_of(s + 1) : batch.num_requests;
    if (request < 0 || request >= batch.num_requests) {
        return false;
    }
    const bool meets_begin = begin == batch.cu_seqlens[request];
    const bool meets_end = end == batch.cu_seqlens[request + 1];
    return rises && (request == before || (request == before + 1 && meets_begin)) &&
           (request == after || (after == request + 1 && meets_end));
}

/// Spans of positions over a block's rows. By value: an object whose address is handed to a function that
/// isn't inlined lives in memory, not in registers.
struct block_spans {
    const std::int32_t* positions = nullptr;
    const position_span* spans = nullptr;
    std::int32_t num_spans = 0;
    row_range free{}; ///< rows outside of it don't count
    row_range block{};

    /// Calls @p visit with each range of the block's rows that a span holds.
    template <class Visit>
    UNIPREFILL_API void each(Visit visit) const noexcept {
        const std::int32_t first = positions[block.begin];
        const std::int32_t last = positions[block.end - 1];
        std::int32_t i = 0;
        for (std::int32_t end = num_spans; i < end;) {
            const std::int32_t middle = i + (end - i) / 2;
            if (spans[middle].end > first) {
                end = middle;
            } else {
                i = middle + 1;
            }
        }
        for (; i < num_spans && spans[i].begin <= last; ++i) {
            const std::int32_t from = first_row_at(positions, block.begin, block.end, spans[i].begin);
            const std::int32_t to = first_row_at(positions, block.begin, block.end, spans[i].end);
            const row_range cut{from > free.begin ? from : free.begin, to < free.end ? to : free.end};
            if (cut.begin < cut.end) {
                visit(cut);
            }
        }
    }
};

/// Rows that spans hold.
[[nodiscard]] inline UNIPREFILL_API UNIPREFILL_OUT_OF_LINE std::int32_t
count_rows(block_spans spans) noexcept {
    std::int32_t count = 0;
    spans.each([&count](row_range rows) { count += rows.size(); });
    return count;
}

/// Whether spans hold a row.
[[nodiscard]] inline UNIPREFILL_API UNIPREFILL_OUT_OF_LINE bool holds_row(block_spans spans,
                                                                          std::int32_t row) noexcept {
    bool found = false;
    spans.each([&](row_range rows) { found = found || (row >= rows.begin && row < rows.end); });
    return found;
}

/// Which rows of a segment are forced, without a number for each row.
struct forced_rows {
    const std::int32_t* positions = nullptr;
    const position_span* spans = nullptr; ///< of the request; sorted and disjoint
    std::int32_t num_spans = 0;
    row_range free{};       ///< rows before it are the sink, rows after it the tail
    row_range near_spans{}; ///< rows outside of it are in no span

    /// Whether a span may hold rows of a block.
    [[nodiscard]] UNIPREFILL_API bool meets_spans(row_range block) const noexcept {
        return num_spans > 0 && block.end > near_spans.begin && block.begin < near_spans.end;
    }
    /// Rows of a block that are neither sink nor tail.
    [[nodiscard]] UNIPREFILL_API std::int32_t count_outside_spans(row_range block) const noexcept {
        const std::int32_t from = block.begin > free.begin ? block.begin : free.begin;
        const std::int32_t to = block.end < free.end ? block.end : free.end;
        return to > from ? to - from : 0;
    }
    /// Rows of a block that may be dropped.
    [[nodiscard]] UNIPREFILL_API std::int32_t count_free(row_range block) const noexcept {
        const std::int32_t count = count_outside_spans(block);
        return meets_spans(block) ? count - count_rows({positions, spans, num_spans, free, block}) : count;
    }
    /// Whether a row of a block is forced.
    [[nodiscard]] UNIPREFILL_API bool holds(row_range block, std::int32_t row) const noexcept {
        return row < free.begin || row >= free.end ||
               (meets_spans(block) && holds_row({positions, spans, num_spans, free, block}, row));
    }
};

/// The positions of a segment's first and last row.
struct end_positions {
    std::int32_t first = 0;
    std::int32_t last = 0;

    [[nodiscard]] static UNIPREFILL_API end_positions of(const std::int32_t* positions,
                                                         row_range rows) noexcept {
        return rows.size() > 0 ? end_positions{positions[rows.begin], positions[rows.end - 1]}
                               : end_positions{};
    }
    /// bracketed_row_at().
    [[nodiscard]] UNIPREFILL_API std::int32_t row_at(const std::int32_t* positions, row_range rows,
                                                     std::int32_t position) const noexcept {
        if (rows.size() == 0 || first >= position) {
            return rows.begin;
        }
        if (last < position) {
            return rows.end;
        }
        const std::int64_t highest = std::int64_t{rows.begin} + position - first;
        const std::int64_t lowest = std::int64_t{rows.end} - 1 - last + position;
        return lowest == highest ? static_cast<std::int32_t>(highest) // rows without gaps
                                 : bracketed_row_at(positions, rows.begin, rows.end, position);
    }
};

/// The forced rows of a segment whose free rows begin at @p first_free; @p spans are those of its request,
/// none where they make no sense.
[[nodiscard]] inline UNIPREFILL_API forced_rows find_forced_rows(const batch_view& batch, row_range rows,
                                                                 std::int32_t first_free,
                                                                 const request_options& options,
                                                                 const position_span* spans,
                                                                 std::int32_t num_spans) noexcept {
    forced_rows forced;
    forced.positions = batch.positions;
    forced.free.begin = first_free;
    const std::int32_t tail = clamped(options.tail, 0, rows.size());
    forced.free.end = rows.end - tail > forced.free.begin ? rows.end - tail : forced.free.begin;
    if (num_spans > 0) {
        forced.spans = spans;
        forced.num_spans = num_spans;
        const end_positions ends = end_positions::of(batch.positions, rows);
        forced.near_spans.begin = ends.row_at(batch.positions, rows, spans[0].begin);
        forced.near_spans.end = ends.row_at(batch.positions, rows, spans[num_spans - 1].end);
    }
    return forced;
}

/// The blocks of one segment.
struct segment_blocks {
    row_range rows{};
    std::int32_t block_rows = 1; ///< G
    std::int32_t count = 0;
    mass_scope scope = mass_scope::free;
    tie_order ties = tie_order::lower_block_first;
    forced_rows forced{};
    const std::int64_t* free_mass = nullptr;   // [count]
    const std::int64_t* forced_mass = nullptr; // [count]

    [[nodiscard]] UNIPREFILL_API row_range rows_of(std::int32_t block) const noexcept {
        const std::int32_t begin = rows.begin + block * block_rows;
        return {begin, rows.end - begin > block_rows ? begin + block_rows : rows.end};
    }
    /// Of a block's rows those that are neither sink nor tail; none of a block beyond the last.
    [[nodiscard]] UNIPREFILL_API std::int32_t free_rows_outside_spans(std::int32_t block) const noexcept {
        const std::int32_t begin = rows.begin + block * block_rows; // the free rows end with the segment's
        return forced.count_outside_spans({begin, begin + block_rows});
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t free_rows(std::int32_t block) const noexcept {
        return forced.count_free(rows_of(block));
    }
    [[nodiscard]] UNIPREFILL_API bool is_candidate(std::int32_t block) const noexcept {
        return scope == mass_scope::all || free_rows(block) > 0;
    }
    /// Whether free_mass_of() is another number than the one that ranks.
    [[nodiscard]] UNIPREFILL_API bool weighs_free_apart() const noexcept { return scope == mass_scope::all; }
    [[nodiscard]] UNIPREFILL_API std::uint64_t free_mass_of(std::int32_t block) const noexcept {
        return static_cast<std::uint64_t>(free_mass[block]);
    }
    /// Over the scope. Only where masses can be trusted.
    [[nodiscard]] UNIPREFILL_API std::uint64_t mass_of(std::int32_t block) const noexcept {
        const auto mass = static_cast<std::uint64_t>(free_mass[block]);
        return scope == mass_scope::all ? mass + static_cast<std::uint64_t>(forced_mass[block]) : mass;
    }
    /// Among blocks of equal mass, those with a lower number rank first. The same function leads back.
    [[nodiscard]] UNIPREFILL_API std::int32_t order(std::int32_t block) const noexcept {
        return ties == tie_order::lower_block_first ? block : count - 1 - block;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
