// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The decision about a segment in a few numbers, from which any thread can tell what becomes of any row.
#pragma once

#include <uniprefill/core/selection.hpp>
#include <uniprefill/select/detail/segment_blocks.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a verdict's numbers mean.
enum class keep_form : std::uint8_t {
    all,           ///< every row
    ranked,        ///< forced rows, and free rows by rank down to the cut
    latest_free,   ///< forced rows, and free rows from the end down to the cut
    latest_forced, ///< of the forced rows only, from the end down to the cut
};

struct segment_verdict {
    std::int64_t total_mass = 0;
    std::int64_t dropped_mass = 0;
    std::int64_t cut_mass = INT64_MAX; ///< ranked: heavier blocks stay whole,
    std::int32_t cut_order = 0;        ///< and those of this mass whose order is lower
    std::int32_t cut_block =
        -1; ///< ranked: of this block the first cut_rows free rows stay; else the last ones
    std::int32_t cut_rows = 0;
    std::int32_t kept = 0;
    row_range free{};           ///< forced_rows::free
    row_range near_spans{};     ///< forced_rows::near_spans
    std::int32_t num_spans = 0; ///< spans to heed
    keep_reason reason = keep_reason::selected;
    keep_form form = keep_form::all;
    bool whole_scope = false;  ///< mass_scope::all
    bool higher_first = false; ///< tie_order::higher_block_first
    std::uint8_t padding[5] = {};

    /// As the caller is told, for a segment of @p rows rows.
    [[nodiscard]] UNIPREFILL_API segment_outcome outcome(std::int32_t rows) const noexcept {
        const bool cut = form == keep_form::ranked && cut_block >= 0;
        return {total_mass, dropped_mass, rows, kept, cut ? cut_block : -1, cut ? cut_rows : 0, reason};
    }
    /// Whether a candidate stays whole by its rank.
    [[nodiscard]] UNIPREFILL_API bool ranks_before_cut(std::uint64_t mass,
                                                       std::int32_t order) const noexcept {
        const auto cut = static_cast<std::uint64_t>(cut_mass);
        return mass > cut || (mass == cut && order < cut_order);
    }
};
static_assert(sizeof(segment_verdict) == 72);

/// What becomes of one block.
struct block_fate {
    std::int32_t rows = 0;
    std::int32_t free_rows = 0;
    std::int32_t forced_kept = 0; ///< forced rows that stay: the last ones
    std::int32_t free_kept = 0;   ///< free rows that stay: the first ones, or the last ones
    bool first_free_rows = true;

    [[nodiscard]] UNIPREFILL_API std::int32_t kept() const noexcept { return forced_kept + free_kept; }
    /// Whether a row stays that has @p free_before free and @p forced_before forced rows of the block before
    /// it.
    [[nodiscard]] UNIPREFILL_API bool keeps(bool forced, std::int32_t free_before,
                                            std::int32_t forced_before) const noexcept {
        if (forced) {
            return rows - free_rows - forced_before <= forced_kept;
        }
        return first_free_rows ? free_before < free_kept : free_rows - free_before <= free_kept;
    }
};

/// What becomes of block @p block. Reads its masses only where they decide.
[[nodiscard]] inline UNIPREFILL_API block_fate fate_of(const segment_verdict& verdict,
                                                       const segment_blocks& blocks,
                                                       std::int32_t block) noexcept {
    block_fate fate;
    fate.rows = blocks.rows_of(block).size();
    if (verdict.form == keep_form::all) {
        fate.forced_kept = fate.rows;
        return fate;
    }
    fate.free_rows = blocks.free_rows(block);
    fate.forced_kept = fate.rows - fate.free_rows;
    const bool is_cut = block == verdict.cut_block;
    if (verdict.form == keep_form::ranked) {
        if (fate.free_rows > 0) {
            fate.free_kept = verdict.ranks_before_cut(blocks.mass_of(block), blocks.order(block))
                                 ? fate.free_rows
                             : is_cut ? verdict.cut_rows
                                      : 0;
        }
        return fate;
    }
    const bool after_cut = block > verdict.cut_block;
    fate.first_free_rows = false;
    if (verdict.form == keep_form::latest_free) {
        fate.free_kept = after_cut ? fate.free_rows : is_cut ? verdict.cut_rows : 0;
    } else {
        fate.forced_kept = after_cut ? fate.forced_kept : is_cut ? verdict.cut_rows : 0;
    }
    return fate;
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
