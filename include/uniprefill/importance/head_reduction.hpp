// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How masses of heads become the mass of a block.
#pragma once

#include <uniprefill/core/mass.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Mass of a block = sum over heads: every head has the same say, in proportion to its mass.
struct head_sum {
    static constexpr rank_reduction ranks = rank_reduction::sum;
    /// Folds a head's mass into that of the heads before it.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t combine(std::int64_t all,
                                                                       std::int64_t head) noexcept {
        return all + head;
    }
};

/// Mass of a block = that of the head that cares most for it; free and forced rows are reduced apart.
struct head_max {
    static constexpr rank_reduction ranks = rank_reduction::maximum;
    /// Folds a head's mass into that of the heads before it.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t combine(std::int64_t all,
                                                                       std::int64_t head) noexcept {
        return head > all ? head : all;
    }
};

UNIPREFILL_END_NAMESPACE
