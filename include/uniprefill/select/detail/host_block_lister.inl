// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/select/detail/check_arguments.hpp>
#include <uniprefill/select/detail/list_rules.hpp>
#include <uniprefill/select/detail/rank.hpp>

#include <algorithm>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Arrays for the list that is being made.
struct list_scratch {
    rank_scratch ranks;
    std::int64_t* free = nullptr;   // [blocks] masses of a KV head's query heads together
    std::int64_t* forced = nullptr; // [blocks]

    [[nodiscard]] static UNIPREFILL_HOST_API list_scratch carve(workspace& memory,
                                                                std::int64_t blocks) noexcept {
        list_scratch made;
        made.ranks = rank_scratch::carve(memory, blocks);
        made.free = memory.take<std::int64_t>(blocks);
        made.forced = memory.take<std::int64_t>(blocks);
        return made;
    }
};

/// The lists of one segment.
template <class Rule>
class segment_lists {
  public:
    UNIPREFILL_HOST_API segment_lists(const batch_view& batch, std::int32_t segment, std::int32_t block_rows,
                                      const list_options<Rule>& options, const list_scratch& scratch) noexcept
        : options_(options)
        , scratch_(scratch)
        , block_rows_(block_rows) {
        const std::int32_t begin = batch.segment_begin(segment);
        const std::int32_t end = batch.segment_end(segment);
        count_ = num_blocks(end - begin, block_rows);
        rows_ = end - begin;
        offset_ = block_offset(segment, begin, block_rows);
        const std::int32_t sinks = first_row_at(batch.positions, begin, end, options.sink) - begin;
        sink_blocks_ = num_blocks(sinks, block_rows);
        if (options.rule.scope == mass_scope::free) {
            count_free_rows(batch, segment);
        }
    }

    [[nodiscard]] UNIPREFILL_HOST_API std::int64_t offset() const noexcept { return offset_; }

    /// @param masses of the segment's blocks, null: they can't be trusted
    /// @return how many blocks were written to @p out
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t list(const std::int64_t* free, const std::int64_t* forced,
                                                        std::int32_t* out) const noexcept {
        ranked_blocks ranked;
        if (free == nullptr ||
            !rank_blocks({free, forced, options_.rule.scope}, count_, options_.rule.ties, scratch_.ranks,
                         ranked) ||
            ranked.total == 0) {
            for (std::int32_t b = 0; b < count_; ++b) {
                out[b] = b;
            }
            return count_;
        }
        std::int32_t listed = 0;
        for (std::int32_t b = 0; b < count_; ++b) {
            if (is_always_listed(b)) {
                out[listed++] = b;
            }
        }
        const std::int32_t chosen = blocks_to_list(ranked);
        for (std::int32_t k = 0; k < chosen; ++k) {
            const std::int32_t block = scratch_.ranks.order[k];
            if (!is_always_listed(block)) {
                out[listed++] = block;
            }
        }
        std::sort(out, out + listed);
        return listed;
    }

    /// The same for the query heads [@p first, @p first + @p group) together.
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t list_group(const head_mass_view& masses,
                                                              std::int32_t first, std::int32_t group,
                                                              std::int32_t* out) const noexcept {
        for (std::int32_t b = 0; b < count_; ++b) {
            std::int64_t sums[2] = {0, 0};
            for (std::int32_t head = first; head < first + group; ++head) {
                const std::int64_t at = head * masses.head_stride + offset_ + b;
                const std::int64_t own[2] = {masses.free[at], masses.forced[at]};
                for (std::int32_t kind = 0; kind < 2; ++kind) {
                    if (own[kind] < 0 || own[kind] > INT64_MAX - sums[kind]) {
                        return list(nullptr, nullptr, out);
                    }
                    sums[kind] += own[kind];
                }
            }
            scratch_.free[b] = sums[0];
            scratch_.forced[b] = sums[1];
        }
        return list(scratch_.free, scratch_.forced, out);
    }

  private:
    /// Rows of each block that may be dropped: is_forced_row() for a whole segment, by ranges.
    UNIPREFILL_HOST_API void count_free_rows(const batch_view& batch, std::int32_t segment) const noexcept {
        const std::int32_t begin = batch.segment_begin(segment);
        const std::int32_t end = begin + rows_;
        const std::int32_t request = batch.request_of(segment);
        const request_options options = batch.options_of(request);
        const std::int32_t tail = options.tail < rows_ ? end - options.tail : begin;
        std::int32_t row = first_row_at(batch.positions, begin, end, options.sink);
        std::fill_n(scratch_.ranks.free_rows, count_, 0);
        const auto count_up_to = [&](std::int32_t last) {
            for (; row < (std::min)(last, tail); ++row) {
                ++scratch_.ranks.free_rows[(row - begin) / block_rows_];
            }
        };
        if (batch.forced.offsets != nullptr) {
            for (std::int32_t i = batch.forced.offsets[request]; i < batch.forced.offsets[request + 1]; ++i) {
                const position_span span = batch.forced.spans[i];
                count_up_to(first_row_at(batch.positions, begin, end, span.begin));
                row = (std::max)(row, first_row_at(batch.positions, begin, end, span.end));
            }
        }
        count_up_to(end);
    }

    /// Sinks, and where masses leave forced rows out, the blocks of those.
    [[nodiscard]] UNIPREFILL_HOST_API bool is_always_listed(std::int32_t block) const noexcept {
        return block < sink_blocks_ ||
               (options_.rule.scope == mass_scope::free &&
                scratch_.ranks.free_rows[block] < (std::min)(block_rows_, rows_ - block * block_rows_));
    }

    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t
    blocks_to_list(const ranked_blocks& ranked) const noexcept {
        const Rule& rule = options_.rule;
        const std::int32_t wanted = rule.exact_rows() > 0 ? ranked.count : rule.keep_count(ranked);
        return bounded_blocks(rule, wanted, ranked.count, block_rows_);
    }

    const list_options<Rule>& options_;
    const list_scratch& scratch_;
    std::int64_t offset_ = 0; ///< of the first block, among those of all segments
    std::int32_t block_rows_;
    std::int32_t rows_ = 0;
    std::int32_t count_ = 0; ///< blocks
    std::int32_t sink_blocks_ = 0;
};

} // namespace detail

template <class Rule>
UNIPREFILL_HOST_API std::size_t block_lister<Rule, backend::host>::workspace_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(
        detail::list_scratch::carve(counting, num_blocks(bounds_.max_rows, bounds_.block_rows)));
    return counting.bytes_used();
}

template <class Rule>
UNIPREFILL_HOST_API status block_lister<Rule, backend::host>::run(
    const head_mass_view& per_head, const std::int64_t* faults, const batch_view& batch,
    const list_options<Rule>& options, block_lists& out, workspace memory, host_stream) const noexcept {
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(validate(batch, bounds_));
    UNIPREFILL_TRY(validate(options));
    UNIPREFILL_TRY(detail::check_lists(out, bounds_, memory_space::host));
    if (batch.num_segments > 0) {
        UNIPREFILL_TRY(detail::check_head_masses(per_head, bounds_, used_blocks(batch, bounds_.block_rows)));
        if (faults == nullptr) {
            return failure(status_code::invalid_argument, "faults", "an array, not a null pointer", 0);
        }
    }
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    workspace pieces(memory.data(), memory.bytes());
    const auto scratch =
        detail::list_scratch::carve(pieces, num_blocks(bounds_.max_rows, bounds_.block_rows));
    const std::int32_t group = bounds_.num_heads / out.num_heads;
    out.window = options.window;
    out.num_segments = batch.num_segments;
    out.offsets[0] = 0;
    std::int64_t next = 0;
    std::int64_t* offset = out.offsets + 1;
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
        const detail::segment_lists<Rule> lists(batch, s, bounds_.block_rows, options, scratch);
        for (std::int32_t head = 0; head < out.num_heads; ++head) {
            std::int32_t* const to = out.blocks + next;
            if (faults[s] != 0) {
                next += lists.list(nullptr, nullptr, to);
            } else if (group == 1) {
                const std::int64_t at = head * per_head.head_stride + lists.offset();
                next += lists.list(per_head.free + at, per_head.forced + at, to);
            } else {
                next += lists.list_group(per_head, head * group, group, to);
            }
            *offset++ = next;
        }
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
