// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What score kernels leave, from scores in double precision: each number at the place that the plan gives
/// it.
#pragma once

#include "naive.hpp"
#include "serial_estimator.hpp"

#include <cmath>
#include <vector>

namespace importance_test {

/// Writes the partials of one scored segment, and checks that it is planned as the definition has it.
template <class T>
class naive_partials {
  public:
    naive_partials(const step<T>& from, const up::attention_params& params, const serial_estimator& estimator,
                   std::int32_t segment)
        : shape_(from.shape())
        , right_(from, segment, params)
        , task_(estimator.task())
        , plan_(estimator.segment(segment))
        , index_(segment) {}

    void write() {
        check_rows();
        check_cuts();
        const std::int32_t group = shape_.heads / shape_.kv_heads;
        for (std::int32_t kv_head = 0; kv_head < shape_.kv_heads; ++kv_head) {
            for (std::int32_t lane = 0; lane < plan_.query_rows; ++lane) {
                write_row(kv_head, lane, kv_head * group + lane / plan_.num_observations,
                          right_.observers()[static_cast<std::size_t>(lane % plan_.num_observations)]);
            }
            // Lanes of no row: whatever a matrix product of zeros leaves.
            for (std::int32_t lane = plan_.query_rows; lane < plan_.lanes; ++lane) {
                for (std::int64_t slot = 0; slot < plan_.slots(); ++slot) {
                    put(slot, kv_head, lane, static_cast<float>(slot % 7));
                }
            }
        }
        REQUIRE(written_ == plan_.slots() * shape_.kv_heads * plan_.lanes);
    }

  private:
    void check_rows() {
        REQUIRE(right_.is_decided());
        REQUIRE(plan_.rows == right_.rows());
        REQUIRE(plan_.context == right_.context());
        REQUIRE(static_cast<std::size_t>(plan_.num_observations) == right_.observers().size());
        for (std::int32_t i = 0; i < plan_.num_observations; ++i) {
            REQUIRE(detail::observation_row(task_.buffers, plan_, index_, shape_.num_observations, i) ==
                    right_.observers()[static_cast<std::size_t>(i)]);
        }
        for (std::int32_t row = 0; row < plan_.rows; ++row) {
            forced_.push_back(right_.is_forced(row));
            REQUIRE(detail::is_forced(task_.batch, plan_, row) == forced_.back());
        }
    }

    /// Every block with rows of both kinds has to be among those that a boundary cuts; others may be.
    void check_cuts() {
        const std::int32_t blocks = up::num_blocks(plan_.rows, shape_.block_rows);
        cut_of_block_.assign(static_cast<std::size_t>(blocks), -1);
        std::int32_t last = -1;
        for (std::int32_t cut = 0; cut < plan_.num_cuts; ++cut) {
            const std::int32_t block = task_.buffers.cut_blocks[plan_.first_cut + cut];
            REQUIRE(block > last);
            REQUIRE(block < blocks);
            cut_of_block_[static_cast<std::size_t>(block)] = cut;
            last = block;
        }
        for (std::int32_t row = 1; row < plan_.rows; ++row) {
            const auto at = static_cast<std::size_t>(row);
            if (row % shape_.block_rows != 0 && forced_[at] != forced_[at - 1]) {
                REQUIRE(cut_of_block_[static_cast<std::size_t>(row / shape_.block_rows)] >= 0);
            }
        }
    }

    void write_row(std::int32_t kv_head, std::int32_t lane, std::int32_t head, std::int64_t row) {
        scores_.clear();
        for (std::int64_t key = 0; key < plan_.context + plan_.rows; ++key) {
            const double product = right_.product(head, row, key);
            if (!std::isfinite(product)) { // a fault even where the row doesn't see the key
                task_.buffers.faulty[index_] = 1;
            }
            scores_.push_back(right_.capped(product) * 1.44269504088896340736); // in units of log2
        }
        const std::int64_t slot_keys = task_.tiling.slot_keys();
        const std::int64_t parts = task_.tiling.slots_of_a_block();
        for (std::int64_t slot = 0; slot < plan_.context_slots; ++slot) {
            const std::int64_t end = std::min((slot + 1) * slot_keys, plan_.context);
            put(slot, kv_head, lane, log_sum(slot * slot_keys, end, [](std::int64_t) { return true; }));
        }
        for (std::int64_t slot = 0; slot < plan_.own_slots; ++slot) {
            const std::int64_t begin = plan_.context + slot * slot_keys;
            const std::int64_t end = std::min(begin + slot_keys, plan_.context + plan_.rows);
            const std::int64_t block = slot / parts;
            const std::int32_t cut = cut_of_block_[static_cast<std::size_t>(block)];
            const auto part = [&](bool forced) {
                return log_sum(begin, end, [&](std::int64_t key) {
                    const std::int64_t own = key - plan_.context;
                    return own <= row && (cut < 0 || forced_[static_cast<std::size_t>(own)] == forced);
                });
            };
            put(plan_.context_slots + slot, kv_head, lane, part(false));
            if (cut >= 0) {
                put(plan_.context_slots + plan_.own_slots + cut * parts + slot % parts, kv_head, lane,
                    part(true));
            }
        }
    }

    template <class Counts>
    [[nodiscard]] float log_sum(std::int64_t begin, std::int64_t end, Counts counts) const {
        double top = -HUGE_VAL;
        for (std::int64_t key = begin; key < end; ++key) {
            top = counts(key) ? std::max(top, scores_[static_cast<std::size_t>(key)]) : top;
        }
        double sum = 0;
        for (std::int64_t key = begin; key < end; ++key) {
            sum += counts(key) ? std::exp2(scores_[static_cast<std::size_t>(key)] - top) : 0.0;
        }
        return top > -HUGE_VAL ? static_cast<float>(top + std::log2(sum)) : detail::no_visible_keys;
    }

    void put(std::int64_t slot, std::int32_t kv_head, std::int32_t lane, float value) {
        REQUIRE(slot < plan_.slots());
        const std::int64_t at = plan_.first_partial + (slot * shape_.kv_heads + kv_head) * plan_.lanes + lane;
        REQUIRE(at < task_.buffers.max_partials);
        float& place = task_.buffers.partials[at];
        REQUIRE(up::bit_cast<std::uint32_t>(place) == 0xffffffffu); // as guarded_buffer fills memory
        place = value;
        ++written_;
    }

    const model& shape_;
    naive_segment<T> right_;
    const detail::cuda_plan_task& task_;
    const detail::cuda_segment& plan_;
    std::int32_t index_;
    std::vector<bool> forced_;               ///< [rows]
    std::vector<std::int32_t> cut_of_block_; ///< -1 where no boundary cuts it
    std::vector<double> scores_;             ///< of one query row, by key
    std::int64_t written_ = 0;
};

} // namespace importance_test
