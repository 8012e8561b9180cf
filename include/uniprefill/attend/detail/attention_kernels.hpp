// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The arithmetic of attention on the host. Query rows are lanes of vectors, keys are a loop: nothing is ever
/// summed across lanes, and what a row doesn't read adds exact zeros. So a row's bits follow from what it
/// reads, whoever its neighbours are and whatever they read.
#pragma once

#include <uniprefill/core/detail/vector_math.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Query rows that are worked on together, on every machine.
inline constexpr std::int32_t attention_lanes = 64;
/// Keys of a tile: key i of a request is in tile i / 64, whatever is cached, listed or packed.
inline constexpr std::int32_t attention_tile_keys = 64;
/// Tiles are summed in runs of so many keys, so that 2 million of them lose no more digits than a few.
inline constexpr std::int64_t attention_run_keys = 4096;
/// Rows and elements that tiles have beyond their own, for the last register tile, whatever its height.
inline constexpr std::int32_t attention_spare = 8;

template <std::int32_t Build>
struct UNIPREFILL_HIDDEN attention_kernels : vector_math<Build> {
    using math = vector_math<Build>;
    using math::panel;
    using math::panel_vectors;
    using math::splat;
    using math::width;
    using typename math::floats;
    using typename math::ints;

    static_assert(attention_lanes % panel == 0 && attention_tile_keys % width == 0 &&
                  math::keys <= attention_spare);

    /// From one key, or element of a head, to the next in arrays of lanes.
    static constexpr std::int32_t stride = attention_lanes;

    /// 2^x for x <= 0, and 0 below 2^-125.
    static floats weight(floats x) noexcept {
        return math::select(splat(-125.0f) > x, splat(0.0f), math::exp2_of_negative(x));
    }

    /// One register tile of products: sums[out][lane] = sum over i of left[i][lane] * right[out, i].
    /// @param right element (out, i) is right[out * out_step + i * inner_step]
    /// @tparam Careful an element of the right that isn't finite only reaches lanes of a left that isn't 0
    template <std::int32_t Vectors, bool Careful>
    static void multiply(const float* left, const float* right, std::int64_t out_step,
                         std::int64_t inner_step, std::int32_t count,
                         floats (&result)[math::keys][Vectors]) noexcept {
        floats sums[math::keys][Vectors];
        unroll<math::keys>([&](auto out) { unroll<Vectors>([&](auto v) { sums[out][v] = splat(0.0f); }); });
        for (std::int32_t i = 0; i < count; ++i) {
            floats row[Vectors];
            unroll<Vectors>(
                [&](auto v) { row[v] = math::load(left + std::int64_t{i} * stride + v * width); });
            unroll<math::keys>([&](auto out) {
                const floats element = splat(right[out * out_step + i * inner_step]);
                unroll<Vectors>([&](auto v) {
                    const floats sum = sums[out][v] + row[v] * element;
                    if constexpr (Careful) {
                        sums[out][v] = math::select(row[v] > splat(0.0f), sum, sums[out][v]);
                    } else {
                        sums[out][v] = sum;
                    }
                });
            });
        }
        unroll<math::keys>(
            [&](auto out) { unroll<Vectors>([&](auto v) { result[out][v] = sums[out][v]; }); });
    }

    /// scores[key][lane] of so many keys; a few more are written, up to a full register tile.
    /// @param queries [head_dim][lane], already multiplied by the scale
    /// @param keys [num_keys + attention_spare][head_dim]
    template <std::int32_t Vectors>
    static void score(const float* queries, const float* keys, std::int32_t head_dim, std::int32_t num_keys,
                      float* scores) noexcept {
        for (std::int32_t key = 0; key < num_keys; key += math::keys) {
            floats sums[math::keys][Vectors];
            multiply<Vectors, false>(queries, keys + std::int64_t{key} * head_dim, head_dim, 1, head_dim,
                                     sums);
            unroll<math::keys>([&](auto out) {
                unroll<Vectors>(
                    [&](auto v) { math::store(scores + (key + out) * stride + v * width, sums[out][v]); });
            });
        }
    }

    /// x -> cap * tanh(x / cap), from scores that are x / cap to scores in units of log2.
    template <std::int32_t Vectors>
    static void soft_cap(float* scores, std::int32_t num_keys, float cap) noexcept {
        for (std::int32_t key = 0; key < num_keys; ++key) {
            unroll<Vectors>([&](auto v) {
                float* score = scores + key * stride + v * width;
                math::store(score, math::tanh(math::load(score)) * splat(cap * log2_of_e));
            });
        }
    }

    /// Adds to scores.
    template <std::int32_t Vectors>
    static void raise(float* scores, std::int32_t num_keys, float by) noexcept {
        for (std::int32_t key = 0; key < num_keys; ++key) {
            unroll<Vectors>([&](auto v) {
                float* score = scores + key * stride + v * width;
                math::store(score, math::load(score) + splat(by));
            });
        }
    }

    /// Takes keys [begin, end) away from the lanes that don't read them: key i of the arrays is key
    /// numbers[i] of the tile, and a lane reads those in [from, to) of the tile.
    template <std::int32_t Vectors>
    static void mask(float* scores, const std::int32_t* numbers, std::int32_t begin, std::int32_t end,
                     const std::int32_t* from, const std::int32_t* to) noexcept {
        for (std::int32_t key = begin; key < end; ++key) {
            unroll<Vectors>([&](auto v) {
                float* score = scores + key * stride + v * width;
                const ints reads = (splat(numbers[key] + 1) > math::load(from + v * width)) &
                                   (math::load(to + v * width) > splat(numbers[key]));
                math::store(score, math::select(reads, math::load(score), splat(no_keys)));
            });
        }
    }

    /// Turns scores into weights relative to the new largest score.
    /// @param top [lane] the largest score so far
    /// @param sum [lane] of weights, relative to it
    /// @param worst [lane] the largest magnitude among scores, as bits
    /// @param shrink [lane] what earlier sums are multiplied by
    template <std::int32_t Vectors>
    static void weigh(float* scores, std::int32_t num_keys, float* top, float* sum, std::int32_t* worst,
                      float* shrink) noexcept {
        floats largest[Vectors];
        ints seen[Vectors];
        unroll<Vectors>([&](auto v) {
            largest[v] = math::load(top + v * width);
            seen[v] = math::load(worst + v * width);
        });
        for (std::int32_t key = 0; key < num_keys; ++key) {
            unroll<Vectors>([&](auto v) {
                const floats score = math::load(scores + key * stride + v * width);
                largest[v] = math::larger(score, largest[v]);
                seen[v] = math::larger_magnitude(seen[v], score);
            });
        }
        floats least[Vectors]; // a score below it weighs nothing; so does a key that isn't read
        floats total[Vectors];
        unroll<Vectors>([&](auto v) {
            least[v] = math::larger(largest[v] - splat(125.0f), splat(above_no_keys));
            total[v] = splat(0.0f);
        });
        for (std::int32_t key = 0; key < num_keys; ++key) {
            unroll<Vectors>([&](auto v) {
                float* at = scores + key * stride + v * width;
                const floats score = math::load(at);
                const floats part =
                    math::select(least[v] > score, splat(0.0f), math::exp2_of_negative(score - largest[v]));
                total[v] = total[v] + part;
                math::store(at, part);
            });
        }
        unroll<Vectors>([&](auto v) {
            const floats less = weight(math::load(top + v * width) - largest[v]);
            math::store(sum + v * width, math::load(sum + v * width) * less + total[v]);
            math::store(shrink + v * width, less);
            math::store(top + v * width, largest[v]);
            math::store(worst + v * width, seen[v]);
        });
    }

    /// out[element][lane] = out * shrink + sum over keys of weight * value.
    /// @param values [num_keys][value_stride], followed by attention_spare elements
    template <std::int32_t Vectors, bool Careful>
    static void add_values(const float* weights, const float* values, std::int32_t value_stride,
                           std::int32_t num_keys, std::int32_t head_dim, const float* shrink,
                           float* out) noexcept {
        for (std::int32_t i = 0; i < head_dim; i += math::keys) {
            floats sums[math::keys][Vectors];
            multiply<Vectors, Careful>(weights, values + i, 1, value_stride, num_keys, sums);
            unroll<math::keys>([&](auto element) {
                unroll<Vectors>([&](auto v) {
                    float* at = out + (i + element) * stride + v * width;
                    math::store(at, math::load(at) * math::load(shrink + v * width) + sums[element][v]);
                });
            });
        }
    }

    /// Adds the sums of a run of keys to those before it.
    /// @param lanes how many of the lanes are in use
    static void add_run(std::int32_t lanes, std::int32_t head_dim, const float* run_top, const float* run_sum,
                        const float* run_out, float* top, float* sum, float* out) noexcept {
        for (std::int32_t v = 0; v < lanes; v += width) {
            const floats before = math::load(top + v);
            const floats now = math::load(run_top + v);
            const floats largest = math::larger(now, before);
            const floats old_share = weight(before - largest);
            const floats new_share = weight(now - largest);
            math::store(top + v, largest);
            math::store(sum + v, math::load(sum + v) * old_share + math::load(run_sum + v) * new_share);
            for (std::int32_t i = 0; i < head_dim; ++i) {
                float* at = out + i * stride + v;
                math::store(at,
                            math::load(at) * old_share + math::load(run_out + i * stride + v) * new_share);
            }
        }
    }

    /// Divides by the denominators, which become natural logarithms of themselves.
    static void finish(std::int32_t lanes, std::int32_t head_dim, const float* top, float* sum,
                       float* out) noexcept {
        for (std::int32_t v = 0; v < lanes; v += width) {
            const floats total = math::load(sum + v);
            const floats inverse = splat(1.0f) / total;
            for (std::int32_t i = 0; i < head_dim; ++i) {
                float* at = out + i * stride + v;
                math::store(at, math::load(at) * inverse + splat(0.0f)); // no -0 of a product that vanished
            }
            math::store(sum + v, (math::load(top + v) + math::log2_of_positive(total)) * splat(ln_of_2));
        }
    }

    /// Whether all of @p count floats are finite, told by their bits.
    static bool all_finite(const float* values, std::int32_t count) noexcept {
        ints largest = splat(std::int32_t{0});
        std::int32_t i = 0;
        for (; i + width <= count; i += width) {
            largest = math::larger_magnitude(largest, math::load(values + i));
        }
        bool good = !math::any_non_finite(largest);
        for (; i < count; ++i) {
            good = good && !is_non_finite(values[i]);
        }
        return good;
    }

  private:
    static constexpr float ln_of_2 = 0.69314718055994530942f;
    static constexpr float above_no_keys = -0x1.fffffcp127f;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
