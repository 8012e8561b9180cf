// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which query rows of a step are worked on together on the host, and what each of them reads.
#pragma once

#include <uniprefill/attend/detail/attention_unit.hpp>
#include <uniprefill/attend/options.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A step cut into units: those of a segment are consecutive, those of a head in it too.
class UNIPREFILL_HIDDEN attention_plan {
  public:
    attention_plan(const limits& bounds, const batch_view& batch, const selection& kept,
                   const block_lists& lists, const attention_options& options) noexcept
        : bounds_(bounds)
        , batch_(batch)
        , kept_(kept)
        , lists_(lists)
        , options_(options)
        , group_(bounds.group_heads()) {}

    /// Takes the memory of any step within the limits.
    void carve(workspace& memory) noexcept {
        ends_ = memory.take<std::int64_t>(bounds_.max_segments);
        shared_ = memory.take<bool>(bounds_.max_segments);
    }

    /// The most units of a step within @p bounds.
    [[nodiscard]] static UNIPREFILL_HOST_API std::int64_t most_units(const limits& bounds) noexcept {
        return std::int64_t{bounds.num_heads} *
               (bounds.max_rows / attention_lanes + std::int64_t{bounds.max_segments});
    }

    /// Counts the units of the step. @return how many there are
    [[nodiscard]] std::int64_t count_units() noexcept {
        std::int64_t units = 0;
        for (std::int32_t segment = 0; segment < batch_.num_segments; ++segment) {
            shared_[segment] = shares_lists(segment);
            units += num_lists(segment) * units_of_list(segment);
            ends_[segment] = units;
        }
        return units;
    }

    /// No fewer than the step has without its lists.
    [[nodiscard]] std::int64_t multiply_adds() const noexcept {
        std::int64_t pairs = 0;
        for (std::int32_t segment = 0; segment < batch_.num_segments; ++segment) {
            const std::int32_t request = batch_.request_of(segment);
            const std::int64_t keys = std::int64_t{batch_.cached_len(request)} + batch_.segment_end(segment) -
                                      batch_.cu_seqlens[request];
            pairs += keys * (first_kept(segment + 1) - first_kept(segment));
        }
        return pairs * bounds_.num_heads * bounds_.head_dim * 2;
    }

    /// Fills @p unit, made new, with unit @p index.
    void make(std::int64_t index, attention_unit& unit) const noexcept {
        const std::int32_t segment = segment_of(index);
        const std::int64_t in_segment = index - (segment > 0 ? ends_[segment - 1] : 0);
        const std::int64_t in_list = in_segment % units_of_list(segment);
        const auto list = static_cast<std::int32_t>(in_segment / units_of_list(segment));
        const std::int32_t heads = shared_[segment] ? group_ : 1;
        const std::int64_t first = in_list * attention_lanes;
        const std::int64_t left = rows_of_list(segment) - first;

        const std::int32_t begin = batch_.segment_begin(segment);
        unit.request = batch_.request_of(segment);
        unit.kv_head = shared_[segment] ? list : list / group_;
        unit.lanes = static_cast<std::int32_t>(left < attention_lanes ? left : attention_lanes);
        unit.cached = batch_.cached_len(unit.request);
        unit.first_row = batch_.cu_seqlens[unit.request];
        if (lists_.offsets != nullptr) {
            // Where all lists of a KV head are the same, the first of them.
            const std::int64_t head = lists_.num_heads == bounds_.num_heads ? std::int64_t{list} * heads
                                                                            : std::int64_t{unit.kv_head};
            const std::int64_t* offset = lists_.offsets + std::int64_t{segment} * lists_.num_heads + head;
            unit.list = lists_.blocks + offset[0];
            unit.num_listed = offset[1] - offset[0];
            unit.first_listed = unit.cached + begin - unit.first_row;
            unit.block_rows = bounds_.block_rows;
            unit.first_mean = block_offset(segment, begin, bounds_.block_rows);
        }
        for (std::int32_t lane = 0; lane < unit.lanes; ++lane) {
            const std::int64_t at = first + lane;
            unit.row[lane] = static_cast<std::int32_t>(first_kept(segment) + at / heads);
            unit.head[lane] = static_cast<std::int32_t>(
                unit.kv_head * group_ + (heads > 1 ? at % heads : std::int64_t{list % group_}));
            if (lane > 0 && unit.row[lane] == unit.row[lane - 1]) {
                unit.from[lane] = unit.from[lane - 1];
                unit.window[lane] = unit.window[lane - 1];
                unit.to[lane] = unit.to[lane - 1];
                unit.mean_from[lane] = unit.mean_from[lane - 1];
                unit.mean_to[lane] = unit.mean_to[lane - 1];
            } else {
                bound(unit, segment, lane);
            }
        }
    }

  private:
    /// The first query of a segment.
    [[nodiscard]] std::int32_t first_kept(std::int32_t segment) const noexcept {
        if (kept_.identity) {
            return segment < batch_.num_segments ? batch_.segment_begin(segment) : batch_.num_rows;
        }
        return kept_.cu_segments[segment];
    }

    /// Whether the query heads of each KV head read the same, and so can be worked on together.
    [[nodiscard]] bool shares_lists(std::int32_t segment) const noexcept {
        if (lists_.offsets == nullptr || lists_.num_heads != bounds_.num_heads || group_ == 1) {
            return true;
        }
        const std::int64_t* offsets = lists_.offsets + std::int64_t{segment} * lists_.num_heads;
        for (std::int32_t head = 0; head < lists_.num_heads; ++head) {
            const std::int32_t first = head - head % group_;
            const std::int64_t count = offsets[head + 1] - offsets[head];
            if (count != offsets[first + 1] - offsets[first]) {
                return false;
            }
            for (std::int64_t i = 0; head != first && i < count; ++i) {
                if (lists_.blocks[offsets[head] + i] != lists_.blocks[offsets[first] + i]) {
                    return false;
                }
            }
        }
        return true;
    }

    [[nodiscard]] std::int64_t num_lists(std::int32_t segment) const noexcept {
        return shared_[segment] ? bounds_.num_kv_heads : bounds_.num_heads;
    }
    [[nodiscard]] std::int64_t rows_of_list(std::int32_t segment) const noexcept {
        return std::int64_t{first_kept(segment + 1) - first_kept(segment)} * (shared_[segment] ? group_ : 1);
    }
    [[nodiscard]] std::int64_t units_of_list(std::int32_t segment) const noexcept {
        return (rows_of_list(segment) + attention_lanes - 1) / attention_lanes;
    }

    /// The first segment whose units end after @p unit.
    [[nodiscard]] std::int32_t segment_of(std::int64_t unit) const noexcept {
        std::int32_t begin = 0;
        std::int32_t end = batch_.num_segments - 1;
        while (begin < end) {
            const std::int32_t middle = begin + (end - begin) / 2;
            if (ends_[middle] > unit) {
                end = middle;
            } else {
                begin = middle + 1;
            }
        }
        return begin;
    }

    /// What a lane's query reads.
    void bound(attention_unit& unit, std::int32_t segment, std::int32_t lane) const noexcept {
        const std::int32_t row = kept_.identity ? unit.row[lane] : kept_.kept_to_old[unit.row[lane]];
        const std::int32_t position = batch_.positions[row];
        unit.to[lane] = unit.cached + row - unit.first_row + 1;
        unit.from[lane] = options_.window > 0 ? first_seen(unit, row, position - options_.window + 1) : 0;
        unit.window[lane] = unit.to[lane];
        if (lists_.offsets != nullptr) {
            const std::int32_t begin = batch_.segment_begin(segment);
            std::int32_t block = (row - begin) / bounds_.block_rows;
            if (lists_.window > 0) {
                const std::int32_t in_window =
                    bracketed_row_at(batch_.positions, begin, row + 1, position - lists_.window + 1);
                block = (in_window - begin) / bounds_.block_rows;
                unit.window[lane] = unit.first_listed + std::int64_t{block} * bounds_.block_rows;
            }
            const std::int64_t unseen = unit.from[lane] - unit.first_listed;
            unit.mean_from[lane] = unseen > 0 ? (unseen + bounds_.block_rows - 1) / bounds_.block_rows : 0;
            unit.mean_to[lane] = block;
        }
        if (unit.window[lane] < unit.from[lane]) {
            unit.window[lane] = unit.from[lane];
        }
    }

    /// The first key at @p position or later, of those up to a row's own.
    [[nodiscard]] std::int64_t first_seen(const attention_unit& unit, std::int32_t row,
                                          std::int32_t position) const noexcept {
        const std::int32_t begin = batch_.cu_seqlens[unit.request];
        if (batch_.positions[begin] < position) {
            return unit.cached + bracketed_row_at(batch_.positions, begin, row + 1, position) - begin;
        }
        const auto cached = static_cast<std::int32_t>(unit.cached);
        if (options_.cached_positions == nullptr) {
            return position <= 0 ? 0 : position < cached ? position : cached;
        }
        return first_row_at(options_.cached_positions + unit.request * options_.cached_positions_stride, 0,
                            cached, position);
    }

    const limits& bounds_;
    const batch_view& batch_;
    const selection& kept_;
    const block_lists& lists_;
    const attention_options& options_;
    std::int32_t group_;
    std::int64_t* ends_ = nullptr; // [segments] units of the segments up to each
    bool* shared_ = nullptr;       // [segments] a unit has all query heads of a KV head
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
