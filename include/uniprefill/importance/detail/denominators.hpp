// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The softmax denominators of query rows, as the threads of the device add them up.
#pragma once

#include <uniprefill/core/detail/any_team.hpp>
#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/importance/detail/combine_task.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t denominator_threads = 1024;
inline constexpr std::int32_t denominator_warps = denominator_threads / 32;
inline constexpr std::int32_t denominator_batch = 8; ///< slots that a thread loads at once
/// A warp sums the denominators of segments of up to this many slots by itself.
inline constexpr std::int32_t denominator_few_slots = 256;

/// A sum of powers of 2, as sum * 2^top.
struct scaled_sum {
    /// Where tops start: 2^(no_visible_keys - this) is 0.
    static constexpr float below_all_scores = -1.0e37f;

    float top = below_all_scores;
    float sum = 0;

    /// Commutes, bit for bit.
    [[nodiscard]] friend UNIPREFILL_API scaled_sum operator+(const scaled_sum& a,
                                                             const scaled_sum& b) noexcept {
        const float largest = larger(a.top, b.top);
        return {largest, add(multiply(a.sum, exp2_of(add(a.top, -largest))),
                             multiply(b.sum, exp2_of(add(b.top, -largest))))};
    }
};

/// What one strand has of 4 neighbouring rows.
class UNIPREFILL_HIDDEN strand_sums {
  public:
    using batch = four_floats[denominator_batch];

    UNIPREFILL_API void add_batch(const batch& values) noexcept {
        add_row<0>([&](std::int32_t i) { return values[i].x; });
        add_row<1>([&](std::int32_t i) { return values[i].y; });
        add_row<2>([&](std::int32_t i) { return values[i].z; });
        add_row<3>([&](std::int32_t i) { return values[i].w; });
    }
    [[nodiscard]] UNIPREFILL_API scaled_sum of_row(std::int32_t row) const noexcept {
        return {tops_[row], static_cast<float>(sums_[row])};
    }

  private:
    /// @param number the row's in each slot of a batch
    template <std::int32_t Row, class Number>
    UNIPREFILL_API void add_row(Number number) noexcept {
        float top = tops_[Row];
        UNIPREFILL_UNROLL
        for (std::int32_t i = 0; i < denominator_batch; ++i) {
            top = larger(top, number(i));
        }
        float sum = 0;
        UNIPREFILL_UNROLL
        for (std::int32_t i = 0; i < denominator_batch; ++i) {
            sum = add(sum, exp2_of(add(number(i), -top)));
        }
        sums_[Row] = multiply_add(sums_[Row], static_cast<double>(exp2_of(add(tops_[Row], -top))),
                                  static_cast<double>(sum));
        tops_[Row] = top;
    }

    float tops_[4] = {scaled_sum::below_all_scores, scaled_sum::below_all_scores,
                      scaled_sum::below_all_scores, scaled_sum::below_all_scores};
    double sums_[4] = {0, 0, 0, 0};
};

/// A group of 32 query rows, of all KV heads of a segment in one list, and the steps by which threads find
/// their denominators. A thread takes 4 rows, and of their slots those of one strand, in order; then strands
/// are added in an order that follows from their number. That is the 4 of a warp where there are few slots,
/// else the 128 of a thread block.
class UNIPREFILL_HIDDEN denominator_group {
  public:
    static constexpr std::int32_t row_threads = denominator_rows / 4;
    static constexpr std::int32_t warp_strands = 32 / row_threads;
    /// What warps have, for each other.
    using warp_sums = scaled_sum[denominator_warps][denominator_rows];

    /// Groups of all segments.
    [[nodiscard]] static UNIPREFILL_API std::int64_t count(const cuda_combine_task& task) noexcept {
        return task.buffers.totals->stats / denominator_rows;
    }
    /// As many neighbouring groups at once for each of @p ctas thread blocks as leave none of the others
    /// idle.
    [[nodiscard]] static UNIPREFILL_API std::int32_t at_once(std::int64_t groups,
                                                             std::uint32_t ctas) noexcept {
        const std::int64_t share = (groups + ctas - 1) / ctas;
        return static_cast<std::int32_t>(share < denominator_warps ? share : denominator_warps);
    }

    explicit UNIPREFILL_API denominator_group(const cuda_combine_task& task) noexcept
        : task_(task) {}

    UNIPREFILL_API void enter(std::int64_t group) noexcept {
        segment_ =
            find_segment(task_.buffers.first_stats, task_.batch.num_segments, group * denominator_rows);
        what_ = task_.buffers.segments + segment_;
        first_row_ = static_cast<std::int32_t>(group * denominator_rows - what_->first_stat);
    }
    [[nodiscard]] UNIPREFILL_API bool is_scored() const noexcept { return what_->num_observations > 0; }
    /// Whether a warp by itself would take too long.
    [[nodiscard]] UNIPREFILL_API bool is_long() const noexcept {
        return what_->num_observations > 0 && what_->slots() > denominator_few_slots;
    }

    /// @param row_thread which 4 rows, 0 <= row_thread < row_threads
    [[nodiscard]] UNIPREFILL_API strand_sums add_strand(std::int32_t row_thread, std::int32_t strand,
                                                        std::int32_t strands) const noexcept {
        const std::int64_t slot_floats = std::int64_t{task_.bounds.num_kv_heads} * what_->lanes;
        const float* partial = task_.buffers.partials + what_->first_partial + first_row_ + row_thread * 4 +
                               strand * slot_floats;
        const std::int64_t step = strands * slot_floats;
        auto left = static_cast<std::int32_t>((what_->slots() - strand + strands - 1) / strands);
        strand_sums sums;
        for (; left > 0; left -= denominator_batch) {
            strand_sums::batch values;
            UNIPREFILL_UNROLL
            for (std::int32_t i = 0; i < denominator_batch; ++i) {
                values[i] = i < left ? load_four(partial)
                                     : four_floats{no_visible_keys, no_visible_keys, no_visible_keys,
                                                   no_visible_keys};
                partial += step;
            }
            sums.add_batch(values);
        }
        return sums;
    }
    /// The sum of all warps' strands of a row, warp after warp.
    [[nodiscard]] static UNIPREFILL_API scaled_sum add_warps(const warp_sums& of_warps,
                                                             std::int32_t row) noexcept {
        scaled_sum all;
        UNIPREFILL_EIGHT_COPIES
        for (const auto& of_warp : of_warps) {
            all.top = larger(all.top, of_warp[row].top);
        }
        UNIPREFILL_EIGHT_COPIES
        for (const auto& of_warp : of_warps) {
            const scaled_sum mine = of_warp[row];
            all.sum = multiply_add(mine.sum, exp2_of(add(mine.top, -all.top)), all.sum);
        }
        return all;
    }

    /// Writes the denominator of a row of the group.
    UNIPREFILL_API void finish(std::int32_t row_of_group, const scaled_sum& sum) const noexcept {
        const std::int32_t row = first_row_ + row_of_group;
        const std::int32_t in_head = row % what_->lanes;
        float& denominator = task_.buffers.denominators[what_->first_stat + row];
        if (in_head >= what_->query_rows) {
            denominator = of_no_row;
            return;
        }
        scaled_sum sink{no_visible_keys, 1};
        if (task_.sink_logits != nullptr) {
            const std::int32_t head =
                row / what_->lanes * task_.bounds.group_heads() + in_head / what_->num_observations;
            sink.top = multiply(task_.sink_logits[head], log2_of_euler);
            if (is_non_finite(sink.top)) {
                task_.buffers.faulty[segment_] = 1;
                sink.top = no_visible_keys;
            }
        }
        const scaled_sum all = sum + sink;
        denominator = add(all.top, log2_of(all.sum));
        if (is_non_finite(denominator)) { // finite scores beyond all measure: no share of them makes sense
            task_.buffers.faulty[segment_] = 1;
        }
    }

  private:
    const cuda_combine_task& task_;
    const cuda_segment* what_ = nullptr;
    std::int32_t segment_ = 0;
    std::int32_t first_row_ = 0; ///< among those of the segment
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
