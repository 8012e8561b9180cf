// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block masses: what importance writes, ranks reduce, and select reads.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/limits.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The fixed-point format of masses: a softmax probability of 1 is 2^fraction_bits.
///
/// A segment's masses over all heads of all ranks sum to at most global_heads * n probabilities, so the
/// number of fraction bits is the largest that keeps that sum below 2^61. It follows from `limits` alone,
/// never from ranks or packing, and integer sums don't depend on order.
struct mass_format {
    std::int32_t fraction_bits = 0;

    /// The format that @p bounds settle.
    [[nodiscard]] static UNIPREFILL_API constexpr mass_format of(const limits& bounds) noexcept {
        const std::int64_t rows = static_cast<std::int64_t>(bounds.global_heads()) * bounds.num_observations;
        std::int32_t bits = 61;
        while (bits > 0 && (rows >> (61 - bits)) > 0) {
            --bits;
        }
        return {bits};
    }
    /// The fixed-point number as a double, for reports.
    [[nodiscard]] UNIPREFILL_API constexpr double to_double(std::int64_t mass) const noexcept {
        return static_cast<double>(mass) / static_cast<double>(std::int64_t{1} << fraction_bits);
    }
};

/// The integer operator by which tensor-parallel ranks reduce their masses.
enum class rank_reduction : std::int32_t { sum, maximum };

/// Why masses of a segment can't be trusted, one 16-bit lane each in a 64-bit fault word. Adding the words of
/// ranks (or taking their maximum) keeps a word non-zero that was non-zero on any rank.
enum class mass_fault : std::int32_t { non_finite = 0, unscored = 1, overflow = 2, rank = 3 };

/// The fault word with one fault of this kind.
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t fault_word(mass_fault fault) noexcept {
    return std::int64_t{1} << (16 * static_cast<std::int32_t>(fault));
}

/// Masses of all segments of a step, one after another in one buffer of 64-bit integers: the buffer that
/// ranks reduce as integers, by the operator that the head reduction names.
///
/// Block b of a segment is at [block_offset(segment, first row, G) + b]. Rows that are forced keep their own
/// number, so that both scopes of p come from one pass; a block that no forced boundary cuts has one that is
/// 0.
struct mass_view {
    memory_space space = memory_space::host;
    std::int64_t* free = nullptr;   // [num_blocks] mass of the rows that may be dropped
    std::int64_t* forced = nullptr; // [num_blocks] mass of the forced rows
    std::int64_t* faults = nullptr; // [num_segments] fault words, 0 when the masses can be trusted
    std::int64_t num_blocks = 0;
    std::int32_t num_segments = 0;
    mass_format format{};

    /// 64-bit integers in the rank buffer of @p bounds, which starts at `free`.
    [[nodiscard]] static UNIPREFILL_API constexpr std::int64_t
    rank_buffer_size(const limits& bounds) noexcept {
        return 2 * bounds.max_blocks() + bounds.max_segments;
    }
    /// The view of a rank buffer of rank_buffer_size(bounds) integers at @p buffer.
    [[nodiscard]] static UNIPREFILL_API mass_view over(std::int64_t* buffer, const limits& bounds,
                                                       memory_space space) noexcept {
        const std::int64_t blocks = bounds.max_blocks();
        return {space,
                buffer,
                buffer + blocks,
                buffer + 2 * blocks,
                blocks,
                bounds.max_segments,
                mass_format::of(bounds)};
    }
};

/// Masses by head, before any reduction: the second use of the same look (block lists), and head policies.
/// Head h of the segments lies at [h * head_stride + block]; blocks as in mass_view.
struct head_mass_view {
    std::int64_t* free = nullptr;   // [num_heads, num_blocks]
    std::int64_t* forced = nullptr; // [num_heads, num_blocks]
    std::int64_t head_stride = 0;
    std::int32_t num_heads = 0;
};

UNIPREFILL_END_NAMESPACE
