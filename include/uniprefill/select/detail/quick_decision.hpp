// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The decision of the common case with few instructions: each is run once or twice, so fetching them is what
/// it costs.
#pragma once

#include <uniprefill/select/detail/cut_search.hpp>
#include <uniprefill/select/detail/outcome_rules.hpp>
#include <uniprefill/select/detail/step_view.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Digits of masses below `end` that depend on nothing else, so that they can be counted while masses are
/// summed: those of a floating-point number with a 5-bit exponent, of the mass in units.
template <std::int32_t Bits>
struct quick_digits {
    UNIPREFILL_HIDDEN static constexpr std::int32_t bits = Bits;
    UNIPREFILL_HIDDEN static constexpr std::int32_t fraction = Bits - 5;
    UNIPREFILL_HIDDEN static constexpr std::int32_t unit = 31; ///< log2
    UNIPREFILL_HIDDEN static constexpr std::uint64_t end =
        (std::uint64_t{1} << 63) - (std::uint64_t{1} << (unit - 1)); ///< in units, rounded, 2^32

    /// A mass in units, to the nearest.
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint32_t scaled(std::uint64_t mass) noexcept {
        return static_cast<std::uint32_t>((mass + (std::uint64_t{1} << (unit - 1))) >> unit);
    }
    [[nodiscard]] static UNIPREFILL_API std::uint32_t digit(std::uint32_t scaled) noexcept {
#if defined(__CUDA_ARCH__)
        const std::int32_t digit =
            (__float_as_int(__uint2float_rz(scaled)) >> (23 - fraction)) - (127 << fraction);
        return static_cast<std::uint32_t>(digit > 0 ? digit : 0);
#else
        const std::int32_t exponent = bit_length(scaled) - 1;
        return exponent <= 0
                   ? 0
                   : (static_cast<std::uint32_t>(exponent - 1) << fraction) +
                         static_cast<std::uint32_t>((std::uint64_t{scaled} << fraction) >> exponent);
#endif
    }
    /// The least mass whose digit is no lower.
    [[nodiscard]] static UNIPREFILL_API constexpr std::uint64_t first_mass(std::uint32_t digit) noexcept {
        const std::uint32_t mantissa = (1u << fraction) + (digit & ((1u << fraction) - 1));
        const std::uint64_t units =
            ((std::uint64_t{mantissa} << (digit >> fraction)) + (1u << fraction) - 1) >> fraction;
        return digit == 0 ? 0 : (units << unit) - (std::uint64_t{1} << (unit - 1));
    }
};

/// The blocks of a thread block's stretch: the ones whose rows it writes. Those of a cluster lie one after
/// the other.
struct block_stretch {
    std::int32_t of_cluster = 0; ///< first block
    std::int32_t own = 0;        ///< first block
    std::int32_t ctas = 1;       ///< of the cluster
    block_size size{};           ///< blocks of a thread block

    /// How many of a block's rows lie before the cluster's stretch; rows in it are counted by @p team.
    UNIPREFILL_ANY_TEAM
    template <class Team>
    [[nodiscard]] UNIPREFILL_API std::uint32_t rows_before(Team& team, std::int32_t block,
                                                           std::uint32_t rows) const noexcept {
        if (block < of_cluster) {
            return rows;
        }
        if (ctas > 1 && block < of_cluster + ctas * size.rows) {
            team.add_near(size.whole(block - of_cluster), rows);
        }
        return 0;
    }
};

/// Decides a segment whose blocks rank by the mass of their free rows, which no span forces, by top-p or a
/// budget. Whatever else there is, and where few rounds don't part masses, or where rounding leads to a
/// neighbour of the right bin, it gives up and says so. The same verdict as team_decision, bit for bit.
/// @tparam Only whether the step has no other segment
template <class Team, bool Only>
class quick_decision {
    UNIPREFILL_HIDDEN static constexpr std::int32_t held = Team::held_blocks;
    using digits = quick_digits<Team::digit_bits>;

  public:
    /// Starts all loads at once.
    UNIPREFILL_ANY_TEAM
    UNIPREFILL_API quick_decision(Team& team, const step_view& step, const selection_rule* rules,
                                  std::int32_t segment) noexcept
        : team_(team)
        , positions_(step.batch.positions) {
        const batch_view& batch = step.batch;
        const std::int32_t request = Only ? 0 : request_of_segment(batch, segment);
        row_range loaded{0, batch.num_rows}; // the only segment begins at row 0, or nothing is decided
        if constexpr (Only) {
            blocks_.rows = {batch.cu_seqlens[0], batch.cu_seqlens[1]};
            ordered_ = (batch.cu_segments == nullptr ||
                        (batch.cu_segments[0] == 0 && batch.cu_segments[1] == blocks_.rows.end)) &&
                       (batch.segment_request == nullptr || batch.segment_request[0] == 0);
            ordered_ = ordered_ & (blocks_.rows.begin == 0) & (blocks_.rows.end <= batch.num_rows);
        } else {
            loaded = blocks_.rows = rows_of_segment(batch, segment);
        }
        const request_options options = batch.options_of(request);
        sink_ = options.sink;
        tail_ = options.tail;
        blocks_.block_rows = step.block.rows;
        blocks_.free_mass = step.free_mass + (Only ? 0 : step.block.offset(segment, loaded.begin));
        load(0, step.block.blocks(loaded.size()));
        position_ =
            team.near_rank() < loaded.size() ? positions_[loaded.begin + team.near_rank()] : INT32_MAX;
        blocks_.count = step.block.blocks(blocks_.rows.size());
        if (team.group_rank() == 0) { // one warp looks for all: loads by all of them get in each other's way
            row_range spans{};
            if (batch.forced.offsets != nullptr) {
                spans = {batch.forced.offsets[request], batch.forced.offsets[request + 1]};
            }
            const quick_note note = look_at(rules[request], static_cast<std::uint32_t>(batch.tags[request]),
                                            options, step.faults[segment], spans);
            if (team.near_rank() == 0) {
                team.note() = note;
            }
        }
    }

    /// @param stretch whose rows before it place() is to tell
    /// @param meanwhile what threads do that have to wait, once their segment's blocks() are known
    /// @return whether the segment is decided
    UNIPREFILL_ANY_TEAM
    template <class Meanwhile>
    [[nodiscard]] UNIPREFILL_API bool run(const block_stretch& stretch, Meanwhile meanwhile) noexcept {
        const row_range rows = blocks_.rows;
        row_range& free = blocks_.forced.free;
        // As first_row_beyond_sink(): the rows that can be in the sink are no more than there are threads.
        const std::int32_t row = team_.near_rank();
        free.begin = rows.begin + team_.count((row < rows.size()) & (row < sink_) & (position_ < sink_));
        note_ = &team_.noted();
        free.end = tail_ < rows.end - free.begin ? rows.end - tail_ : free.begin;
        forced_ = rows.size() - free.size();
        by_rows_ = note_->by_rows;
        const bool within = !by_rows_ | ((note_->budget_rows > forced_) & (note_->budget_rows < rows.size()));
        if (!(note_->is_common & within & (free.size() > 0))) {
            return false;
        }
        blocks_.ties = note_->ties;
        make(0);
        return find_cut(stretch, meanwhile);
    }

    /// After run(), if that decided.
    [[nodiscard]] UNIPREFILL_API segment_verdict verdict() const noexcept {
        segment_verdict made;
        made.total_mass = static_cast<std::int64_t>(total_);
        made.dropped_mass = static_cast<std::int64_t>(total_ - cut_.mass_before);
        made.cut_mass = static_cast<std::int64_t>(cut_.at.mass);
        made.cut_order = cut_.at.order + (cut_.rows_gone == 0 ? 1 : 0);
        if (cut_.rows_gone != 0) {
            made.cut_block = cut_.block;
            made.cut_rows = cut_.rows - cut_.rows_gone;
            made.dropped_mass += share_rounded_up(made.cut_mass, cut_.rows_gone, cut_.rows);
        }
        made.kept = kept();
        made.free = blocks_.forced.free;
        made.form = keep_form::ranked;
        made.higher_first = blocks_.ties == tie_order::higher_block_first;
        return made;
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t kept() const noexcept { return forced_ + cut_.kept; }
    /// Rows that stay of those before the stretch.
    [[nodiscard]] UNIPREFILL_API std::int32_t place() const noexcept { return cut_.place; }
    [[nodiscard]] UNIPREFILL_API const segment_blocks& blocks() const noexcept { return blocks_; }
    /// Rows that go of a block, of which @p free_rows may.
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_that_go(const block_rank& rank,
                                                           std::int32_t free_rows) const noexcept {
        return rank.before(cut_.at) ? 0 : rank.order == cut_.at.order ? cut_.rows_gone : free_rows;
    }
    [[nodiscard]] UNIPREFILL_API std::int32_t rows_that_go(std::int32_t block) const noexcept {
        return rows_that_go({static_cast<std::uint64_t>(blocks_.free_mass[block]), blocks_.order(block)},
                            blocks_.free_rows_outside_spans(block));
    }

  private:
    /// One comparison after the other, no branches.
    [[nodiscard]] UNIPREFILL_API quick_note look_at(const selection_rule& rule, std::uint32_t tag,
                                                    const request_options& options, std::int64_t fault,
                                                    row_range spans) const noexcept {
        quick_note note;
        note.share = rule.p;
        note.budget_rows = rule.budget_rows;
        note.min_kept_rows = rule.min_kept_rows;
        note.max_kept_rows = rule.max_kept_rows;
        note.ties = rule.ties;
        note.by_rows = rule.kind == rule_kind::fixed_budget;
        note.must_exceed = rule.crossing == crossing::published;
        const bool by_mass = (rule.kind == rule_kind::top_p) & (rule.p.value - 1 < unit_fraction::one - 1);
        const bool by_rows = note.by_rows & (rule.budget_rows >= rule.min_kept_rows) &
                             (rule.budget_rows <= rule.max_kept_rows);
        const bool common_rule = (by_mass | by_rows) & (rule.scope == mass_scope::free) &
                                 (static_cast<std::uint32_t>(rule.ties) <= 1) &
                                 (static_cast<std::uint32_t>(rule.crossing) <= 1) &
                                 (rule.min_kept_rows >= 0) & (rule.max_kept_rows >= 1) &
                                 (rule.max_kept_rows >= rule.min_kept_rows);
        const bool common_request =
            (tag <= static_cast<std::uint32_t>(request_tag::chunk)) & (options.enabled != 0) &
            ((options.sink | options.tail | options.min_length) >= 0) & (options.sink <= team_.near_size()) &
            (options.sink <= sink_rows_counted) & (spans.begin >= 0) & (spans.begin == spans.end);
        note.is_common = ordered_ & common_rule & common_request & (fault == 0) &
                         (blocks_.rows.size() >= options.min_length);
        return note;
    }

    UNIPREFILL_API void load(std::int32_t chunk, std::int32_t count) noexcept {
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < held; ++k) {
            const std::int32_t b = chunk + team_.rank() + k * team_.size();
            mass_[k] = b < count ? static_cast<std::uint64_t>(blocks_.free_mass[b]) : 0;
        }
    }
    UNIPREFILL_API void make(std::int32_t chunk) noexcept {
        UNIPREFILL_UNROLL
        for (std::int32_t k = 0; k < held; ++k) {
            rows_[k] = blocks_.free_rows_outside_spans(chunk + team_.rank() + k * team_.size());
            mass_[k] = rows_[k] > 0 ? mass_[k] : 0;
            const std::uint32_t scaled = digits::scaled(mass_[k]);
            digit_[k] = rows_[k] > 0 ? static_cast<std::int32_t>(digits::digit(scaled)) : -1;
            weight_[k] = by_rows_ ? static_cast<std::uint32_t>(rows_[k]) : scaled;
        }
        if (shift_ >= 0) { // linear ones of a narrow range
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < held; ++k) {
                digit_[k] = rows_[k] <= 0 || mass_[k] < low_ ? -1
                            : mass_[k] >= end_               ? INT32_MAX
                                               : static_cast<std::int32_t>((mass_[k] - low_) >> shift_);
                weight_[k] = by_rows_ ? static_cast<std::uint32_t>(rows_[k]) : weight_of(mass_[k]);
            }
        }
        chunk_ = chunk;
    }
    /// A mass in units that suit what is left, to the nearest.
    [[nodiscard]] UNIPREFILL_API std::uint32_t weight_of(std::uint64_t mass) const noexcept {
        return static_cast<std::uint32_t>((mass + ((std::uint64_t{1} << unit_) >> 1)) >> unit_);
    }
    /// Calls @p visit(k, block) for each of this thread's blocks and some beyond the last; blocks without
    /// free rows have no mass, 0 rows and the digit -1.
    UNIPREFILL_ANY_TEAM
    template <class Visit>
    UNIPREFILL_API void each(Visit visit) noexcept {
        std::int32_t chunk = 0;
        UNIPREFILL_ONE_COPY
        do {
            if (chunk != chunk_) {
                load(chunk, blocks_.count);
                make(chunk);
            }
            UNIPREFILL_UNROLL
            for (std::int32_t k = 0; k < held; ++k) {
                visit(k, chunk + team_.rank() + k * team_.size());
            }
            chunk += held * team_.size();
        } while (chunk < blocks_.count);
    }

    /// Fills cut_ and total_. @return whether the cut was found
    UNIPREFILL_ANY_TEAM
    template <class Meanwhile>
    [[nodiscard]] UNIPREFILL_API bool find_cut(const block_stretch& stretch, Meanwhile meanwhile) noexcept {
        team_.start_search(true);
        quick_sums before; // what ranks before the bin
        std::uint64_t target = 0;
        UNIPREFILL_ONE_COPY
        for (std::int32_t round = 0;; ++round) {
            std::uint64_t mass = 0;
            std::uint64_t top = 0; // its highest bit: a mass that is none, or too many of them
            each([&](std::int32_t k, std::int32_t) {
                mass += mass_[k];
                top |= mass | mass_[k];
                if (static_cast<std::uint32_t>(digit_[k]) < 1u << digits::bits) {
                    team_.add(static_cast<std::uint32_t>(digit_[k]), weight_[k]);
                }
            });
            const found_bin found = team_.find(
                top >> 63 != 0 ? tally::full : mass,
                [&](found_bin& told) {
                    told.target = by_rows_ ? static_cast<std::uint64_t>(note_->budget_rows - forced_)
                                           : mass_target(told.total, note_->share, note_->must_exceed);
                    const std::uint64_t left = told.target - (by_rows_ ? before.rows : before.mass);
                    const std::uint32_t need = by_rows_ ? static_cast<std::uint32_t>(left) : weight_of(left);
                    return need > 0 ? need : 1u;
                },
                meanwhile);
            total_ = found.total;
            target = found.target;
            if (total_ - 1 >= digits::end - 1) {
                return false;
            }
            const auto digit = static_cast<std::int32_t>(found.digit);
            before = {};
            each([&](std::int32_t k, std::int32_t block) {
                if (digit_[k] > digit) {
                    before.mass += mass_[k];
                    before.rows += static_cast<std::uint32_t>(rows_[k]);
                    before.ahead += stretch.rows_before(team_, block, static_cast<std::uint32_t>(rows_[k]));
                }
                if (digit_[k] == digit) {
                    team_.quick_collect({mass_[k], blocks_.order(block), rows_[k]});
                }
            });
            team_.sum(before);
            if ((by_rows_ ? before.rows : before.mass) >= target || before.collected == 0) {
                return false;
            }
            if (UNIPREFILL_LIKELY(before.collected <= static_cast<std::uint32_t>(Team::capacity))) {
                break;
            }
            // The same again among the blocks of this bin.
            const std::uint64_t first =
                shift_ < 0 ? digits::first_mass(found.digit) : low_ + (std::uint64_t{found.digit} << shift_);
            const std::uint64_t next =
                shift_ < 0 ? digits::first_mass(found.digit + 1) : first + (std::uint64_t{1} << shift_);
            end_ = shift_ < 0 || next < end_ ? next : end_;
            low_ = first;
            if (round == 3 || end_ - low_ == 1) {
                return false;
            }
            const std::int32_t length = bit_length(end_ - low_ - 1);
            shift_ = length > digits::bits ? length - digits::bits : 0;
            const std::int32_t of_rest = bit_length(total_ - before.mass);
            unit_ = of_rest > 31 ? of_rest - 31 : 0;
            team_.start_search(true);
            make(chunk_);
        }
        team_.quick_gather(static_cast<std::int32_t>(before.collected));
        cut_ = cut_among(before, target, stretch.own);
        return cut_.at.order >= 0;
    }

    /// The block at which the running sum of weights reaches @p target, among the collected ones: each is
    /// compared with each.
    UNIPREFILL_ANY_TEAM
    [[nodiscard]] UNIPREFILL_API quick_cut cut_among(const quick_sums& sums, std::uint64_t target,
                                                     std::int32_t stretch) noexcept {
        const auto count = static_cast<std::int32_t>(sums.collected);
        const std::int32_t share = team_.near_rank() % Team::group_size;
        UNIPREFILL_ONE_COPY
        for (std::int32_t mine = team_.near_rank() / Team::group_size; mine < count;
             mine += team_.near_size() / Team::group_size) {
            const quick_block block = team_.quick_collected(mine);
            quick_sums before;
            UNIPREFILL_ONE_COPY
            for (std::int32_t i = share; i < count; i += Team::group_size) {
                const quick_block other = team_.quick_collected(i);
                const bool is_before = other.rank().before(block.rank());
                const std::uint32_t rows = is_before ? static_cast<std::uint32_t>(other.rows) : 0;
                before.mass += is_before ? other.mass : 0;
                before.rows += rows;
                before.ahead += blocks_.order(other.order) < stretch ? rows : 0;
            }
            team_.sum_group(before);
            before.mass += sums.mass;
            before.rows += sums.rows;
            const std::uint64_t reached = by_rows_ ? before.rows : before.mass;
            const std::uint64_t weight = by_rows_ ? static_cast<std::uint64_t>(block.rows) : block.mass;
            if (share == 0 && reached < target && reached + weight >= target) {
                before.ahead += sums.ahead;
                tell(block, before, target, stretch);
            }
        }
        return team_.quick_told();
    }
    /// @p block is the one at the cut.
    UNIPREFILL_API void tell(const quick_block& block, const quick_sums& before, std::uint64_t target,
                             std::int32_t stretch) noexcept {
        quick_cut cut;
        cut.at = block.rank();
        cut.block = blocks_.order(block.order);
        cut.rows = block.rows;
        cut.kept = by_rows_ ? static_cast<std::int32_t>(target)
                            : static_cast<std::int32_t>(before.rows) + block.rows;
        cut.rows_gone = static_cast<std::int32_t>(before.rows) + block.rows - cut.kept;
        cut.mass_before = before.mass + block.mass;
        // Of the rows before the stretch, all but the free ones that go.
        const row_range& free = blocks_.forced.free;
        const std::int32_t ahead =
            stretch < blocks_.count ? stretch * blocks_.block_rows : blocks_.rows.size();
        const std::int32_t free_near = clamped(blocks_.rows.begin + ahead, free.begin, free.end) - free.begin;
        cut.place = ahead - free_near + static_cast<std::int32_t>(before.ahead) +
                    (cut.block < stretch ? block.rows - cut.rows_gone : 0);
        const bool within = (cut.kept != free.size()) & (cut.kept + forced_ >= note_->min_kept_rows) &
                            (cut.kept + forced_ <= note_->max_kept_rows);
        if (by_rows_ || within) {
            team_.quick_tell(cut);
        }
    }

    Team& team_;
    const std::int32_t* positions_;
    segment_blocks blocks_{};
    bool ordered_ = true; ///< the only segment lies as it must
    std::int32_t sink_ = 0;
    std::int32_t tail_ = 0;
    const quick_note* note_ = nullptr;
    std::int32_t position_ = 0; ///< of this thread's row among the first ones
    std::uint64_t mass_[held];
    std::int32_t rows_[held];
    std::int32_t chunk_ = -1; ///< first block of the team that is held
    std::int32_t digit_[held];
    std::uint32_t weight_[held];
    std::int32_t unit_ = digits::unit; ///< log2 of the mass that weighs 1
    std::int32_t shift_ = -1;          ///< of linear digits, of masses from low_ to end_ - 1
    std::uint64_t low_ = 0;
    std::uint64_t end_ = 0;
    bool by_rows_ = false; ///< rows are what is summed up, else masses
    std::int32_t forced_ = 0;
    std::uint64_t total_ = 0;
    quick_cut cut_{};
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
