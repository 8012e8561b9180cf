// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The stored sets of one request: bit planes over positions and cumulative counts, in borrowed memory.
#pragma once

#include <uniprefill/ledger/detail/bits.hpp>
#include <uniprefill/ledger/ledger_limits.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Positions between two cumulative counts.
inline constexpr std::int32_t rank_positions = 512;
inline constexpr std::int64_t rank_words = rank_positions / word_positions;

/// Bits that tell the sets of a position apart. Set 0 holds everything and needs none.
[[nodiscard]] inline UNIPREFILL_API std::int32_t count_planes(std::int32_t num_sets,
                                                              set_relation relation) noexcept {
    if (relation == set_relation::independent) {
        return num_sets - 1;
    }
    std::int32_t planes = 0;
    while (planes < 31 && (std::int64_t{1} << planes) < num_sets) {
        ++planes;
    }
    return planes;
}

/// Words, or requests, that one of several threads takes: every step-th one from its own on. By default there
/// is one thread, which takes them all.
struct thread_share {
    std::int32_t thread = 0;
    std::int32_t step = 1;
};

/// Nested: the planes hold, for each position, the number of the last set that has it. Independent: plane
/// s - 1 holds the bits of set s. Planes and counts describe a prefix of the positions whose length the owner
/// keeps; behind it everything is 0.
struct position_sets {
    std::uint64_t* planes = nullptr; // [num_planes, num_words]
    std::uint32_t* counts = nullptr; // [num_sets - 1, num_counts] positions of the set before i * 512
    std::int64_t num_words = 0;
    std::int64_t num_counts = 0;
    std::int32_t num_planes = 0;
    std::int32_t num_sets = 1;
    set_relation relation = set_relation::nested;

    [[nodiscard]] UNIPREFILL_API std::uint64_t& plane(std::int32_t p, std::int64_t w) const noexcept {
        return planes[p * num_words + w];
    }
    [[nodiscard]] UNIPREFILL_API std::uint32_t& count(std::int32_t set, std::int64_t i) const noexcept {
        return counts[(set - 1) * num_counts + i];
    }

    /// The positions of word @p w that @p set holds. @pre set >= 1
    [[nodiscard]] UNIPREFILL_API std::uint64_t word(std::int32_t set, std::int64_t w) const noexcept {
        if (relation == set_relation::independent) {
            return plane(set - 1, w);
        }
        std::uint64_t above = 0; // positions whose number exceeds `set`, as far as the planes read tell
        std::uint64_t equal = ~std::uint64_t{0};
        for (std::int32_t p = num_planes - 1; p >= 0; --p) {
            const std::uint64_t bits = plane(p, w);
            if (((set >> p) & 1) != 0) {
                equal &= bits;
            } else {
                above |= equal & bits;
                equal &= ~bits;
            }
        }
        return above | equal;
    }

    [[nodiscard]] UNIPREFILL_API bool holds(std::int32_t set, std::int32_t position) const noexcept {
        return ((word(set, position / word_positions) >> (position % word_positions)) & 1u) != 0;
    }

    /// Every set holds positions [begin, end), which are 0 so far. Counts are left to recount().
    UNIPREFILL_API void fill(std::int64_t begin, std::int64_t end, thread_share mine = {}) const noexcept {
        for (std::int32_t p = 0; p < num_planes; ++p) {
            if (relation == set_relation::nested && (((num_sets - 1) >> p) & 1) == 0) {
                continue;
            }
            for (std::int64_t w = begin / word_positions + mine.thread; w < end_word(end); w += mine.step) {
                plane(p, w) |= range_mask(w, begin, end);
            }
        }
    }

    /// Back to 0, counts included.
    UNIPREFILL_API void clear(std::int64_t begin, std::int64_t end, thread_share mine = {}) const noexcept {
        for (std::int32_t p = 0; p < num_planes; ++p) {
            for (std::int64_t w = begin / word_positions + mine.thread; w < end_word(end); w += mine.step) {
                plane(p, w) &= ~range_mask(w, begin, end);
            }
        }
        const std::int64_t first = (begin + rank_positions - 1) / rank_positions;
        const std::int64_t last = (end + rank_positions - 1) / rank_positions;
        for (std::int32_t set = 1; set < num_sets; ++set) {
            for (std::int64_t i = first + mine.thread; i < last; i += mine.step) {
                count(set, i) = 0;
            }
        }
    }

    /// Takes positions [0, end) of @p from, an equally large one; these here are 0 so far.
    UNIPREFILL_API void copy_prefix(const position_sets& from, std::int64_t end,
                                    thread_share mine = {}) const noexcept {
        for (std::int32_t p = 0; p < num_planes; ++p) {
            for (std::int64_t w = mine.thread; w < end_word(end); w += mine.step) {
                plane(p, w) = from.plane(p, w);
            }
        }
        for (std::int32_t set = 1; set < num_sets; ++set) {
            for (std::int64_t i = mine.thread; i * rank_positions < end; i += mine.step) {
                count(set, i) = from.count(set, i);
            }
        }
    }

    /// Of the positions [begin, end), @p set holds those @p num_kept ascending ones at @p positions and no
    /// others. Nested: the sets above follow, and the positions lie within the set. Independent: this set
    /// alone.
    UNIPREFILL_API void keep(std::int32_t set, std::int64_t begin, std::int64_t end,
                             const std::int32_t* positions, std::int32_t num_kept) const noexcept {
        std::int32_t next = 0;
        for (std::int64_t w = begin / word_positions; w < end_word(end); ++w) {
            std::uint64_t kept = 0;
            for (; next < num_kept && positions[next] / word_positions == w; ++next) {
                kept |= std::uint64_t{1} << (positions[next] % word_positions);
            }
            keep_word(set, w, range_mask(w, begin, end), kept);
        }
    }
    /// The same for the positions @p range of one word.
    UNIPREFILL_API void keep_word(std::int32_t set, std::int64_t w, std::uint64_t range,
                                  std::uint64_t kept) const noexcept {
        if (relation == set_relation::independent) {
            plane(set - 1, w) = (plane(set - 1, w) & ~range) | kept;
            return;
        }
        const std::uint64_t dropped = word(set, w) & range & ~kept;
        for (std::int32_t p = 0; p < num_planes; ++p) {
            if ((((set - 1) >> p) & 1) != 0) {
                plane(p, w) |= dropped;
            } else {
                plane(p, w) &= ~dropped;
            }
        }
    }

    /// Writes the counts of @p set for [begin, end), of which @p before positions lie before begin.
    /// @return the positions of the set before end
    UNIPREFILL_API std::int32_t recount(std::int32_t set, std::int64_t begin, std::int64_t end,
                                        std::int32_t before) const noexcept {
        std::int32_t counted = before;
        for (std::int64_t w = begin / word_positions; w < end_word(end); ++w) {
            if (w % rank_words == 0 && w * word_positions >= begin) {
                count(set, w / rank_words) = static_cast<std::uint32_t>(counted);
            }
            counted += count_bits(word(set, w) & range_mask(w, begin, end));
        }
        return counted;
    }

    /// Whether positions [0, end) of the planes could have come about: sets that exist, and nothing behind
    /// them in the last word. Says a thread of its share.
    [[nodiscard]] UNIPREFILL_API bool well_formed(std::int64_t end, thread_share mine = {}) const noexcept {
        for (std::int64_t w = mine.thread; w < end_word(end); w += mine.step) {
            const std::uint64_t behind = ~range_mask(w, 0, end);
            std::uint64_t above = 0; // nested: positions whose number exceeds that of the last set
            std::uint64_t equal = ~std::uint64_t{0};
            for (std::int32_t p = num_planes - 1; p >= 0; --p) {
                const std::uint64_t bits = plane(p, w);
                if ((bits & behind) != 0) {
                    return false;
                }
                if ((((num_sets - 1) >> p) & 1) != 0) {
                    equal &= bits;
                } else {
                    above |= equal & bits;
                    equal &= ~bits;
                }
            }
            if (relation == set_relation::nested && above != 0) {
                return false;
            }
        }
        return true;
    }

    /// Positions of @p set before @p position, which lies inside the described prefix.
    [[nodiscard]] UNIPREFILL_API std::int32_t rank(std::int32_t set, std::int32_t position) const noexcept {
        const std::int64_t from = position / rank_positions;
        auto ranked = static_cast<std::int32_t>(count(set, from));
        const std::int64_t last = position / word_positions;
        for (std::int64_t w = from * rank_words; w < last; ++w) {
            ranked += count_bits(word(set, w));
        }
        return ranked + count_bits(word(set, last) & range_mask(last, 0, position));
    }

    /// The position of row @p row of @p set, which has more rows than that in the prefix of @p length.
    [[nodiscard]] UNIPREFILL_API std::int32_t select(std::int32_t set, std::int32_t row,
                                                     std::int32_t length) const noexcept {
        // The last count that is not beyond the row.
        std::int64_t low = 0;
        std::int64_t high = (std::int64_t{length} + rank_positions - 1) / rank_positions;
        while (high - low > 1) {
            const std::int64_t middle = (low + high) / 2;
            if (static_cast<std::int32_t>(count(set, middle)) <= row) {
                low = middle;
            } else {
                high = middle;
            }
        }
        std::int32_t left = row - static_cast<std::int32_t>(count(set, low));
        std::int64_t w = low * rank_words;
        std::uint64_t bits = word(set, w);
        for (std::int32_t here = count_bits(bits); left >= here; here = count_bits(bits)) {
            left -= here;
            bits = word(set, ++w);
        }
        for (; left > 0; --left) {
            bits &= bits - 1;
        }
        return static_cast<std::int32_t>(w * word_positions) + lowest_bit(bits);
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
