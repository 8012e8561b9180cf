// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Which query rows of a step are worked on together on the host, and what each of them reads.
#pragma once

#include <uniprefill/attend/detail/attention_unit.hpp>
#include <uniprefill/core/attention_options.hpp>
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
        , group_(bounds.group_heads())
        , query_rows_(lists.offsets != nullptr && lists.query_rows > 0 ? lists.query_rows : INT32_MAX) {}

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
            pairs += keys * queries_of(segment);
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
        const std::int64_t block = in_list / units_of_rows(segment, query_rows_);
        const std::int64_t in_block =
            (in_list - block * units_of_rows(segment, query_rows_)) * attention_lanes;
        const std::int64_t first = block * query_rows_ * heads + in_block;
        const std::int64_t rows_left = queries_of(segment) - block * query_rows_;
        const std::int64_t left = (rows_left < query_rows_ ? rows_left : query_rows_) * heads - in_block;

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
            const block_lists::entries own =
                lists_.list((first_list(segment) + block) * lists_.num_heads + head);
            if (!own.everything) {
                unit.list = lists_.blocks + own.begin;
                unit.num_listed = own.count;
                unit.first_listed = unit.cached + begin - unit.first_row;
                unit.block_rows = bounds_.block_rows;
                unit.first_mean = block_offset(segment, begin, bounds_.block_rows);
            }
        }
        for (std::int32_t lane = 0; lane < unit.lanes; ++lane) {
            const std::int64_t at = first + lane;
            unit.row[lane] = static_cast<std::int32_t>(kept_.segment_begin(batch_, segment) + at / heads);
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
    [[nodiscard]] std::int64_t queries_of(std::int32_t segment) const noexcept {
        return std::int64_t{kept_.segment_end(batch_, segment)} - kept_.segment_begin(batch_, segment);
    }
    /// The number of a segment's first lists: those of all its rows, or of its first query block.
    [[nodiscard]] std::int64_t first_list(std::int32_t segment) const noexcept {
        return block_lists::query_block_place(segment, kept_.segment_begin(batch_, segment), query_rows_);
    }

    /// Whether the query heads of each KV head read the same, and so can be worked on together.
    [[nodiscard]] bool shares_lists(std::int32_t segment) const noexcept {
        if (lists_.offsets == nullptr || lists_.num_heads != bounds_.num_heads || group_ == 1) {
            return true;
        }
        const std::int64_t first = first_list(segment) * lists_.num_heads;
        const std::int64_t blocks =
            lists_.query_rows > 0 ? (queries_of(segment) + query_rows_ - 1) / query_rows_ : 1;
        for (std::int64_t list = first; list < first + blocks * lists_.num_heads; ++list) {
            const block_lists::entries own = lists_.list(list);
            const block_lists::entries leading = lists_.list(list - (list - first) % group_);
            if (own.everything != leading.everything || own.count != leading.count) {
                return false;
            }
            for (std::int64_t i = 0; own.begin != leading.begin && i < own.count; ++i) {
                if (lists_.blocks[own.begin + i] != lists_.blocks[leading.begin + i]) {
                    return false;
                }
            }
        }
        return true;
    }

    [[nodiscard]] std::int64_t num_lists(std::int32_t segment) const noexcept {
        return shared_[segment] ? bounds_.num_kv_heads : bounds_.num_heads;
    }
    [[nodiscard]] std::int64_t units_of_rows(std::int32_t segment, std::int64_t rows) const noexcept {
        return (rows * (shared_[segment] ? group_ : 1) + attention_lanes - 1) / attention_lanes;
    }
    /// No unit has rows of two query blocks.
    [[nodiscard]] std::int64_t units_of_list(std::int32_t segment) const noexcept {
        const std::int64_t rows = queries_of(segment);
        return rows / query_rows_ * units_of_rows(segment, query_rows_) +
               units_of_rows(segment, rows % query_rows_);
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
        if (unit.first_listed != attention_unit::no_lists) {
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
        const std::int32_t* const held =
            options_.cached_positions != nullptr
                ? options_.cached_positions + unit.request * options_.cached_positions_stride
                : nullptr;
        return first_key_at(held, static_cast<std::int32_t>(unit.cached), batch_.positions,
                            batch_.cu_seqlens[unit.request], row, position);
    }

    const limits& bounds_;
    const batch_view& batch_;
    const selection& kept_;
    const block_lists& lists_;
    const attention_options& options_;
    std::int32_t group_;
    std::int32_t query_rows_;      ///< of a query block: without them, one that holds all
    std::int64_t* ends_ = nullptr; // [segments] units of the segments up to each
    bool* shared_ = nullptr;       // [segments] a unit has all query heads of a KV head
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
