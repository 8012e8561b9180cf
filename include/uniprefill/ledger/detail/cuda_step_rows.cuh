// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The rows that one request brings into one layer in a step, whatever stage the step is at.
#pragma once

#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/held_rows.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Where they are known from. Kernels that open a step or append to it tell of rows that other thread blocks
/// are just writing into the state: they take them from what came in.
enum class rows_source : std::int32_t {
    staged,   ///< from the state
    arriving, ///< all positions after the last one that is committed
    entering, ///< those that cuda_step::rows names
};

class UNIPREFILL_HIDDEN step_rows {
  public:
    /// No rows.
    step_rows() = default;
    __device__ step_rows(rows_source source, const request_record& state, std::int32_t set,
                         const cuda_step& step, std::int32_t r)
        : before_(state.length_before(set)) {
        if (source == rows_source::staged) {
            held_ = held_rows_maker::make(state, set);
            count_ = state.length(set) - before_;
        } else {
            count_ = step.count(r);
            const bool arriving = source == rows_source::arriving;
            held_ = held_rows_maker::make_committed(state, set, arriving ? count_ : 0);
            positions_ = arriving ? nullptr : step.rows.positions + step.begin(r);
        }
    }

    /// Keys that the layer held before.
    [[nodiscard]] __device__ std::int32_t before() const { return before_; }
    [[nodiscard]] __device__ std::int32_t count() const { return count_; }
    [[nodiscard]] __device__ std::int32_t length() const { return before_ + count_; }
    [[nodiscard]] __device__ std::int32_t position(std::int32_t index) const {
        return positions_ != nullptr ? positions_[index] : held_.position_of(before_ + index);
    }
    /// As held_rows::window_row().
    [[nodiscard]] __device__ std::int32_t window_row(std::int32_t position, std::int32_t window) const {
        const std::int32_t first = position - window + 1;
        if (positions_ == nullptr || window <= 0 || position < window || first < held_.num_tokens()) {
            return held_.window_row(position, window);
        }
        return before_ + first_row_at(positions_, 0, count_, first);
    }

  private:
    held_rows held_;
    const std::int32_t* positions_ = nullptr;
    std::int32_t before_ = 0;
    std::int32_t count_ = 0;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
