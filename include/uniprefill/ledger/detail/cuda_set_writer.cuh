// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// position_sets as a thread block writes them.
#pragma once

#include <uniprefill/core/detail/row_search.hpp>
#include <uniprefill/ledger/detail/cuda_ledger_state.cuh>
#include <uniprefill/ledger/detail/cuda_scan.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Words of positions that a thread block works on at once.
inline constexpr std::int32_t staged_words = 1024;

/// The sets of one request, and ascending positions. All threads of a thread block call its functions, which
/// end with a barrier.
class UNIPREFILL_HIDDEN set_writer {
  public:
    struct room {
        unsigned long long kept[staged_words];
        ledger_scan::room scan;
    };

    __device__ set_writer(const position_sets& sets, const std::int32_t* positions, std::int32_t count,
                          room& shared)
        : sets_(sets)
        , positions_(positions)
        , shared_(shared)
        , count_(count) {}

    /// position_sets::keep() for positions [begin, end), of each set from @p set on for which takes(set).
    template <class Takes>
    __device__ void keep(std::int32_t set, std::int32_t begin, std::int32_t end, Takes takes) {
        for (std::int64_t first = begin / word_positions; first < end_word(end); first += staged_words) {
            for (std::int32_t i = ledger_thread(); i < staged_words; i += ledger_threads) {
                shared_.kept[i] = 0;
            }
            __syncthreads();
            const std::int64_t behind = (first + staged_words) * word_positions;
            const std::int64_t last = behind < end ? behind : end;
            const auto begins = static_cast<std::int32_t>(first * word_positions);
            for (std::int32_t i = first_row_at(positions_, 0, count_, begins) + ledger_thread();
                 i < count_ && positions_[i] < last; i += ledger_threads) {
                const std::int64_t in_room = positions_[i] - first * word_positions;
                atomicOr(&shared_.kept[in_room / word_positions], 1ull << (in_room % word_positions));
            }
            __syncthreads();
            for (std::int64_t w = first + ledger_thread(); w < first + staged_words && w < end_word(end);
                 w += ledger_threads) {
                for (std::int32_t other = set; other < sets_.num_sets; ++other) {
                    if (takes(other)) {
                        sets_.keep_word(other, w, range_mask(w, begin, end), shared_.kept[w - first]);
                    }
                }
            }
            __syncthreads();
        }
    }

    /// position_sets::recount(): a thread takes the words between two counts.
    [[nodiscard]] __device__ std::int32_t recount(std::int32_t set, std::int32_t begin, std::int32_t end,
                                                  std::int32_t before) {
        for (std::int64_t first = begin / rank_positions; first * rank_positions < end;
             first += ledger_threads) {
            const std::int64_t mine = first + ledger_thread();
            std::int32_t here = 0;
            for (std::int64_t w = mine * rank_words; w < (mine + 1) * rank_words && w < end_word(end); ++w) {
                here += count_bits(sets_.word(set, w) & range_mask(w, begin, end));
            }
            std::int32_t offset = 0;
            std::int32_t all = 0;
            ledger_scan(shared_.scan).exclusive_sum(here, offset, all);
            if (mine * rank_positions >= begin && mine * rank_positions < end) {
                sets_.count(set, mine) = static_cast<std::uint32_t>(before + offset);
            }
            before += all;
            __syncthreads();
        }
        return before;
    }

  private:
    position_sets sets_;
    const std::int32_t* positions_;
    room& shared_;
    std::int32_t count_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
