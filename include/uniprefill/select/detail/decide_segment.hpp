// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The decision about one segment.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/select/detail/outcome_rules.hpp>
#include <uniprefill/select/detail/rank.hpp>
#include <uniprefill/select/detail/row_marks.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Decides one segment: marks its rows and fills its outcome.
template <class Rule>
class segment_decision {
  public:
    UNIPREFILL_HOST_API segment_decision(const batch_view& batch, std::int32_t segment,
                                         std::int32_t block_rows, const Rule& rule, std::int32_t* marks,
                                         const rank_scratch& scratch) noexcept
        : batch_(batch)
        , rule_(rule)
        , marks_(marks)
        , scratch_(scratch)
        , segment_(segment)
        , block_rows_(block_rows)
        , begin_(batch.segment_begin(segment))
        , end_(batch.segment_end(segment)) {
        outcome_.rows = end_ - begin_;
    }

    [[nodiscard]] UNIPREFILL_HOST_API segment_outcome run(const mass_view& masses) noexcept {
        if (!may_be_thinned()) {
            outcome_.reason =
                batch_.is_prefill(request()) ? keep_reason::switched_off : keep_reason::not_prefill;
            keep_all();
        } else if (outcome_.rows == 0) {
            outcome_.reason = keep_reason::empty;
        } else {
            forced_ = mark_forced_rows(batch_, segment_, marks_);
            ranked_blocks ranked;
            outcome_.reason = rank(masses, ranked);
            if (must_run_dense_again(rule_, outcome_.rows, forced_, outcome_.reason)) {
                outcome_.reason = keep_reason::rerun_dense;
                outcome_.kept = rule_.exact_rows();
                keep_latest_rows(marks_, begin_, end_, forced_, rule_.exact_rows());
            } else if (outcome_.reason != keep_reason::selected) {
                keep_all();
            } else {
                keep_ranked(ranked);
            }
        }
        return outcome_;
    }

    /// Places that the segment has in the packed rows afterwards.
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t places() const noexcept {
        return may_be_thinned() && rule_.exact_rows() > 0 ? rule_.exact_rows() : outcome_.kept;
    }

  private:
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t request() const noexcept {
        return batch_.request_of(segment_);
    }
    /// Whether the engine lets this request's rows be dropped at all.
    [[nodiscard]] UNIPREFILL_HOST_API bool may_be_thinned() const noexcept {
        return batch_.is_prefill(request()) && batch_.options_of(request()).enabled != 0;
    }
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t block_begin(std::int32_t block) const noexcept {
        return begin_ + block * block_rows_;
    }
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t block_end(std::int32_t block) const noexcept {
        return end_ - block_begin(block) > block_rows_ ? block_begin(block) + block_rows_ : end_;
    }

    UNIPREFILL_HOST_API void keep_all() noexcept {
        mark_rows(marks_, begin_, end_, row_stays);
        outcome_.kept = outcome_.rows;
    }

    /// Ranks the blocks, or says why every row has to stay.
    [[nodiscard]] UNIPREFILL_HOST_API keep_reason rank(const mass_view& masses,
                                                       ranked_blocks& ranked) noexcept {
        if (outcome_.rows < batch_.options_of(request()).min_length || forced_ == outcome_.rows) {
            return keep_reason::short_segment;
        }
        if (const keep_reason fault = reason_of_fault(masses.faults[segment_]); is_fault(fault)) {
            return fault;
        }
        const std::int32_t blocks = num_blocks(outcome_.rows, block_rows_);
        for (std::int32_t b = 0; b < blocks; ++b) {
            std::int32_t free_rows = 0;
            for (std::int32_t row = block_begin(b); row < block_end(b); ++row) {
                free_rows += marks_[row] == row_goes ? 1 : 0;
            }
            scratch_.free_rows[b] = free_rows;
        }
        const std::int64_t offset = block_offset(segment_, begin_, block_rows_);
        free_mass_ = masses.free + offset;
        if (!rank_blocks({free_mass_, masses.forced + offset, rule_.scope}, blocks, rule_.ties, scratch_,
                         ranked)) {
            return keep_reason::overflow;
        }
        return ranked.total == 0 ? keep_reason::zero_mass : keep_reason::selected;
    }

    /// Free rows of the blocks that the rule chose.
    [[nodiscard]] UNIPREFILL_HOST_API std::int32_t wanted_free_rows(const ranked_blocks& ranked) noexcept {
        std::int32_t wanted = 0;
        if (rule_.exact_rows() <= 0) {
            const std::int32_t chosen = rule_.keep_count(ranked);
            for (std::int32_t k = 0; k < chosen && k < ranked.count; ++k) {
                wanted += scratch_.free_rows[scratch_.order[k]];
            }
        }
        return wanted;
    }

    /// Keeps free rows by rank: whole blocks, and of the last one its first free rows.
    UNIPREFILL_HOST_API void keep_ranked(const ranked_blocks& ranked) noexcept {
        std::int32_t left = free_rows_to_keep(rule_, outcome_.rows, forced_, wanted_free_rows(ranked));
        outcome_.total_mass = ranked.total;
        outcome_.kept = forced_ + left;
        outcome_.reason = outcome_.kept == outcome_.rows ? keep_reason::everything : keep_reason::selected;
        for (std::int32_t k = 0; k < ranked.count; ++k) {
            const std::int32_t block = scratch_.order[k];
            const std::int32_t free_rows = scratch_.free_rows[block];
            const std::int32_t kept = free_rows < left ? free_rows : left;
            if (kept == free_rows) {
                mark_rows(marks_, block_begin(block), block_end(block), row_stays);
            } else {
                outcome_.dropped_mass += share_rounded_up(free_mass_[block], free_rows - kept, free_rows);
                if (kept > 0) {
                    keep_first_free_rows(marks_, block_begin(block), block_end(block), kept);
                    outcome_.cut_block = block;
                    outcome_.cut_rows = kept;
                }
            }
            left -= kept;
        }
    }

    const batch_view& batch_;
    const Rule& rule_;
    std::int32_t* marks_;
    const rank_scratch& scratch_;
    const std::int64_t* free_mass_ = nullptr;
    std::int32_t segment_;
    std::int32_t block_rows_;
    std::int32_t begin_;
    std::int32_t end_;
    std::int32_t forced_ = 0;
    segment_outcome outcome_{};
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
