// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The arithmetic by which the host scores query rows. They are lanes of vectors, keys are a loop: nothing is
/// ever summed across lanes, so a row's numbers don't depend on which lane it has or who its neighbours are.
#pragma once

#include <uniprefill/core/detail/vector_math.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Partials of a row are summed in runs of this many, so that 2 million keys lose no more digits than a few.
inline constexpr std::int64_t sum_run = 64;

template <std::int32_t Build>
struct UNIPREFILL_HIDDEN host_kernels : vector_math<Build> {
    using math = vector_math<Build>;
    using math::panel;
    using math::panel_vectors;
    using math::splat;
    using math::width;
    using typename math::floats;
    using typename math::ints;

    /// Scores of `keys` keys against one panel of query rows: one register tile.
    /// @param queries [head_dim][panel], already multiplied by the scale
    /// @param key_rows [keys][head_dim]
    /// @param scores [keys][panel]
    /// @param largest the largest magnitude among the scores so far, as bits
    static ints score_tile(const float* queries, const float* key_rows, std::int32_t head_dim, float* scores,
                           ints largest) noexcept {
        floats sums[math::keys][panel_vectors];
        unroll<math::keys>(
            [&](auto key) { unroll<panel_vectors>([&](auto v) { sums[key][v] = splat(0.0f); }); });
        for (std::int32_t i = 0; i < head_dim; ++i) {
            floats query[panel_vectors];
            unroll<panel_vectors>(
                [&](auto v) { query[v] = math::load(queries + std::int64_t{i} * panel + v * width); });
            unroll<math::keys>([&](auto key) {
                const floats element = splat(key_rows[key * head_dim + i]);
                unroll<panel_vectors>([&](auto v) { sums[key][v] = sums[key][v] + query[v] * element; });
            });
        }
        unroll<math::keys>([&](auto key) {
            unroll<panel_vectors>([&](auto v) {
                largest = math::larger_magnitude(largest, sums[key][v]);
                math::store(scores + key * panel + v * width, sums[key][v]);
            });
        });
        return largest;
    }

    /// x -> cap * tanh(x / cap), from scores that are x / cap to scores in units of log2.
    static void soft_cap(float* scores, std::int32_t num_keys, float cap) noexcept {
        for (std::int32_t i = 0; i < num_keys * panel; i += width) {
            math::store(scores + i, math::tanh(math::load(scores + i)) * splat(cap * log2_of_e));
        }
    }

    /// Takes away the keys that a query row doesn't see: those from visible[lane] on.
    static void mask(float* scores, std::int32_t num_keys, const std::int32_t* visible) noexcept {
        for (std::int32_t key = 0; key < num_keys; ++key) {
            for (std::int32_t v = 0; v < panel; v += width) {
                float* score = scores + key * panel + v;
                const ints sees = math::load(visible + v) > splat(key);
                math::store(score, math::select(sees, math::load(score), splat(no_keys)));
            }
        }
    }

    /// Takes away the keys before unseen[lane].
    static void mask_first(float* scores, std::int32_t num_keys, const std::int32_t* unseen) noexcept {
        for (std::int32_t key = 0; key < num_keys; ++key) {
            for (std::int32_t v = 0; v < panel; v += width) {
                float* score = scores + key * panel + v;
                const ints hides = math::load(unseen + v) > splat(key);
                math::store(score, math::select(hides, splat(no_keys), math::load(score)));
            }
        }
    }

    /// The largest magnitude among a row's scores so far, as bits.
    static void note_worst(const float* scores, std::int32_t num_keys, std::int32_t* worst) noexcept {
        for (std::int32_t v = 0; v < panel; v += width) {
            ints largest = math::load(worst + v);
            for (std::int32_t key = 0; key < num_keys; ++key) {
                largest = math::larger_magnitude(largest, math::load(scores + key * panel + v));
            }
            math::store(worst + v, largest);
        }
    }

    /// log2 of the sum of 2^score over the keys of one part, relative to the largest score of that part.
    /// @param forced [num_keys] the part of each key
    static void log_sum(const float* scores, std::int32_t num_keys, const bool* forced, bool part,
                        float* partials) noexcept {
        floats top[panel_vectors];
        floats sum[panel_vectors];
        unroll<panel_vectors>([&](auto v) {
            top[v] = splat(no_keys);
            sum[v] = splat(0.0f);
        });
        for (std::int32_t key = 0; key < num_keys; ++key) {
            if (forced[key] == part) {
                unroll<panel_vectors>([&](auto v) {
                    top[v] = math::larger(math::load(scores + key * panel + v * width), top[v]);
                });
            }
        }
        for (std::int32_t key = 0; key < num_keys; ++key) {
            if (forced[key] == part) {
                unroll<panel_vectors>([&](auto v) {
                    const floats score = math::load(scores + key * panel + v * width);
                    sum[v] = sum[v] + math::exp2_of_negative(score - top[v]);
                });
            }
        }
        unroll<panel_vectors>(
            [&](auto v) { math::store(partials + v * width, top[v] + math::log2_of_positive(sum[v])); });
    }

    static void fill_no_keys(float* partials) noexcept {
        for (std::int32_t v = 0; v < panel; v += width) {
            math::store(partials + v, splat(no_keys));
        }
    }

    /// The softmax denominator of one vector of query rows, from their partials in the order of blocks.
    /// @param partials [slots] vectors, @p stride floats apart
    /// @param sinks one more term for each row, in units of log2, or null
    static void sum_row(const float* partials, std::int64_t slots, std::int64_t stride, const float* sinks,
                        float* reference, float* inverse_sum) noexcept {
        floats top = sinks != nullptr ? math::load(sinks) : splat(no_keys);
        for (std::int64_t slot = 0; slot < slots; ++slot) {
            top = math::larger(math::load(partials + slot * stride), top);
        }
        floats total = sinks != nullptr ? math::exp2_of_negative(math::load(sinks) - top) : splat(0.0f);
        for (std::int64_t begin = 0; begin < slots; begin += sum_run) {
            const std::int64_t end = begin + sum_run < slots ? begin + sum_run : slots;
            floats run = splat(0.0f);
            for (std::int64_t slot = begin; slot < end; ++slot) {
                run = run + math::exp2_of_negative(math::load(partials + slot * stride) - top);
            }
            total = total + run;
        }
        math::store(reference, top);
        math::store(inverse_sum, splat(1.0f) / total);
    }

    /// One block's share of each row's softmax, times @p one, of one vector of rows.
    static void store_shares(const float* partials, const float* reference, const float* inverse_sum,
                             float one, float* shares) noexcept {
        math::store(shares, math::exp2_of_negative(math::load(partials) - math::load(reference)) *
                                math::load(inverse_sum) * splat(one));
    }

    /// The fixed-point masses of one block by head: sums of its share of each row's softmax.
    /// @param add called with (head of the group, mass), once for each head
    template <class Add>
    static void sum_heads(const float* partials, const float* reference, const float* inverse_sum,
                          std::int32_t query_rows, std::int32_t rows_per_head, float one, Add add) noexcept {
        std::int32_t head = 0;
        std::int32_t head_end = rows_per_head;
        std::int64_t mass = 0;
        for (std::int32_t begin = 0; begin < query_rows; begin += width) {
            float shares[width];
            store_shares(partials + begin, reference + begin, inverse_sum + begin, one, shares);
            const std::int32_t end = begin + width < query_rows ? begin + width : query_rows;
            for (std::int32_t row = begin; row < end;) {
                const std::int32_t stop = head_end < end ? head_end : end;
                for (; row < stop; ++row) {
                    mass += static_cast<std::int64_t>(shares[row - begin]);
                }
                if (row == head_end) {
                    add(head, mass);
                    mass = 0;
                    ++head;
                    head_end += rows_per_head;
                }
            }
        }
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
