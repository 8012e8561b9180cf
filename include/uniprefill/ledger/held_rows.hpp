// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The positions that one layer's cache holds for one request, as a sequence of rows and as a set.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/ledger/detail/ledger_layout.hpp>
#include <uniprefill/ledger/pages.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {
struct held_rows_maker;
}

/// A view of what one layer holds of one request, rows of an open step included: row i of the cache is the
/// i-th position held, ascending. Made by drop_ledger::rows_of(); the next call that changes the request
/// makes it stale. Rows never move while a request only grows: a row keeps its index until a rollback.
///
/// Copies are cheap. Reading from several threads is safe while nothing changes the request.
class held_rows {
  public:
    held_rows() noexcept = default;

    /// Rows in the cache. O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t length() const noexcept {
        return below_ + num_tokens_ - dense_from_;
    }
    /// Positions of the request, held or dropped; also the position of the next token. O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t num_tokens() const noexcept { return num_tokens_; }

    /// Rows at positions below @p position (any integer): where a window over original positions starts.
    /// O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_below(std::int32_t position) const noexcept {
        if (position >= num_tokens_) {
            return length();
        }
        if (position >= dense_from_) {
            return below_ + position - dense_from_;
        }
        return position <= 0 ? 0 : sets_.rank(set_, position);
    }
    /// The row of @p position (any integer), -1 where it isn't held. O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t row_of(std::int32_t position) const noexcept {
        const bool held = position >= 0 && position < num_tokens_ &&
                          (position >= dense_from_ || sets_.holds(set_, position));
        return held ? rows_below(position) : -1;
    }
    /// The original position of @p row (any integer), -1 where there is no such row. O(log(tokens)).
    [[nodiscard]] UNIPREFILL_API std::int32_t position_of(std::int32_t row) const noexcept {
        if (row < 0 || row >= length()) {
            return -1;
        }
        return row >= below_ ? dense_from_ + row - below_ : sets_.select(set_, row, dense_from_);
    }

    /// Writes the positions of rows @p first_row on, at most @p capacity of them.
    /// O(rows + tokens / 64). @return how many were written
    template <class Index>
    UNIPREFILL_API std::int32_t copy_positions(std::int32_t first_row, Index* out,
                                               std::int32_t capacity) const noexcept {
        static_assert(std::is_same_v<Index, std::int32_t> || std::is_same_v<Index, std::int64_t>);
        std::int32_t position = position_of(first_row);
        std::int32_t written = 0;
        if (position < 0) {
            return written;
        }
        while (position < dense_from_ && written < capacity) {
            const std::int64_t w = position / detail::word_positions;
            std::uint64_t bits = sets_.word(set_, w) & detail::range_mask(w, position, dense_from_);
            for (; bits != 0 && written < capacity; bits &= bits - 1) {
                out[written++] = static_cast<Index>(w * detail::word_positions) + detail::lowest_bit(bits);
            }
            position = next_word(w);
        }
        for (; position < num_tokens_ && written < capacity; ++position) {
            out[written++] = position;
        }
        return written;
    }

    /// Writes the ranges of positions that this layer doesn't hold, ascending and not touching each other, at
    /// most @p capacity of them (@p out may be null when that is 0). O(ranges + tokens / 64).
    /// @return how many there are, as snprintf counts
    UNIPREFILL_API std::int32_t copy_dropped_ranges(position_span* out,
                                                    std::int32_t capacity) const noexcept {
        std::int32_t ranges = 0;
        std::int32_t position = 0;
        while (true) {
            const std::int32_t begin = next(position, false);
            if (begin >= dense_from_) {
                return ranges;
            }
            position = next(begin, true);
            if (ranges < capacity) {
                out[ranges] = {begin, position};
            }
            ++ranges;
        }
    }

    /// The first row that a query at @p position (any integer) sees through a window of @p window original
    /// positions, its own included; 0 where the window is 0. O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t window_row(std::int32_t position,
                                                         std::int32_t window) const noexcept {
        return window <= 0 || position < window ? 0 : rows_below(position - window + 1);
    }

    /// Pages of @p page_tokens (>= 1) rows that hold the rows. O(1).
    [[nodiscard]] UNIPREFILL_API std::int32_t pages(std::int32_t page_tokens) const noexcept {
        return num_blocks(length(), page_tokens);
    }
    /// The pages that are still read or written: from the first one that a query may yet look at to the last
    /// one that holds a row. The queries are those of the open step, and those after it. At most one of them
    /// is partly filled. O(1).
    /// @pre rule.check().ok()
    [[nodiscard]] UNIPREFILL_API page_span live_pages(const page_rule& rule) const noexcept {
        const std::int32_t back = rule.max_rollback < next_query_ ? rule.max_rollback : next_query_;
        return {window_row(next_query_ - back, rule.window) / rule.page_tokens, pages(rule.page_tokens)};
    }
    /// What a fork of the request shares of this layer's pages, and what it copies. O(1).
    /// @pre rule.check().ok()
    [[nodiscard]] UNIPREFILL_API forked_pages fork_pages(const page_rule& rule) const noexcept {
        const page_span live = live_pages(rule);
        const std::int32_t partial_rows = length() % rule.page_tokens;
        const std::int32_t full = partial_rows == 0 ? live.end : live.end - 1;
        return {{live.begin, full}, partial_rows == 0 ? -1 : full, partial_rows};
    }

  private:
    friend struct detail::held_rows_maker;

    /// The first position of the next word, or dense_from.
    [[nodiscard]] UNIPREFILL_API std::int32_t next_word(std::int64_t w) const noexcept {
        const std::int64_t begin = (w + 1) * detail::word_positions;
        return begin < dense_from_ ? static_cast<std::int32_t>(begin) : dense_from_;
    }
    /// The first position from @p position on that is held (or isn't), dense_from when there is none.
    [[nodiscard]] UNIPREFILL_API std::int32_t next(std::int32_t position, bool held) const noexcept {
        while (position < dense_from_) {
            const std::int64_t w = position / detail::word_positions;
            const std::uint64_t bits = held ? sets_.word(set_, w) : ~sets_.word(set_, w);
            const std::uint64_t found = bits & detail::range_mask(w, position, dense_from_);
            if (found != 0) {
                return static_cast<std::int32_t>(w * detail::word_positions) + detail::lowest_bit(found);
            }
            position = next_word(w);
        }
        return dense_from_;
    }

    detail::position_sets sets_{};
    std::int32_t set_ = 0;
    std::int32_t num_tokens_ = 0;
    std::int32_t next_query_ = 0; // the first position that isn't committed
    std::int32_t dense_from_ = 0; // positions from here on are all held; 0 for the set of everything
    std::int32_t below_ = 0;      // positions held before dense_from_
};

namespace detail {

/// What a set of a request holds, as its state says.
struct held_rows_maker {
    [[nodiscard]] static UNIPREFILL_API held_rows make(const request_record& state,
                                                       std::int32_t set) noexcept {
        return make(state, set, state.header->staged, state.staged_below);
    }
    /// The same for the request as committed, with @p more positions that every set holds.
    [[nodiscard]] static UNIPREFILL_API held_rows make_committed(const request_record& state,
                                                                 std::int32_t set,
                                                                 std::int32_t more) noexcept {
        request_extent extent = state.header->committed;
        extent.num_tokens += more;
        return make(state, set, extent, state.committed_below);
    }

  private:
    [[nodiscard]] static UNIPREFILL_API held_rows make(const request_record& state, std::int32_t set,
                                                       const request_extent& extent,
                                                       const std::int32_t* below) noexcept {
        held_rows made;
        made.sets_ = state.sets;
        made.set_ = set;
        made.num_tokens_ = extent.num_tokens;
        made.next_query_ = state.header->committed.num_tokens;
        made.dense_from_ = set == 0 ? 0 : extent.dense_from;
        made.below_ = set == 0 ? 0 : below[set];
        return made;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
