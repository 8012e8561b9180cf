// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Scenes in device memory, attention over them there, and the oracle's opinion of it.

#include "check.hpp"
#include "importance/gpu_step.cuh"
#include "scene.hpp"
#include "support/cuda.cuh"
#include "support/scale.hpp"

#include <uniprefill/attend/attention.cuh>
#include <uniprefill/attend/means.cuh>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <limits>
#include <vector>

namespace attend_test {

using importance_test::device_caches;
using importance_test::device_step;
using importance_test::each_body;
using uniprefill_test::device_array;

inline const char* name_of(const up::cuda_device& device) {
    return device.body == up::cuda_body::sm90 ? "wgmma" : "portable";
}

/// A scene's arrays on the device.
template <class T>
class device_scene {
  public:
    explicit device_scene(scene<T>& what)
        : what_(what)
        , keys_(what.keys)
        , values_(what.values)
        , queries_(packed_queries(what))
        , offsets_(what.lists.offsets)
        , blocks_(what.lists.blocks)
        , kept_to_old_(what.kept.kept_to_old)
        , cu_kept_(what.kept.cu_segments)
        , cached_positions_(what.cached_positions)
        , sinks_(what.sinks)
        , kept_(what.kept.view(what.keys.batch()))
        , lists_(what.lists.view(what.keys.shape().block_rows, what.keys.num_segments())) {
        kept_.space = up::memory_space::device;
        kept_.kept_to_old = kept_.identity ? nullptr : kept_to_old_.data();
        kept_.cu_segments = kept_.identity ? nullptr : cu_kept_.data();
        if (lists_.offsets != nullptr) {
            lists_.space = up::memory_space::device;
            lists_.offsets = offsets_.data();
            lists_.blocks = blocks_.data();
        }
    }

    /// Replaces what arrays hold by another scene that is no larger.
    void assign(const scene<T>& other) {
        keys_.assign(other.keys);
        values_.assign(other.values);
        queries_.set(packed_queries(other));
        offsets_.set(other.lists.offsets);
        blocks_.set(other.lists.blocks);
        assign_rows(other.kept.kept_to_old, other.kept.cu_segments);
    }
    void assign_rows(const std::vector<std::int32_t>& kept_to_old,
                     const std::vector<std::int32_t>& cu_segments) {
        kept_to_old_.set(kept_to_old);
        cu_kept_.set(cu_segments);
    }

    [[nodiscard]] up::batch_view& batch() { return keys_.batch(); }
    [[nodiscard]] up::selection& kept() { return kept_; }
    [[nodiscard]] up::block_lists& lists() { return lists_; }
    [[nodiscard]] device_array<std::int32_t>& blocks() { return blocks_; }
    [[nodiscard]] device_array<std::int64_t>& offsets() { return offsets_; }
    [[nodiscard]] up::attention_options options() const {
        up::attention_options made = what_.options;
        made.cached_positions = made.cached_positions != nullptr ? cached_positions_.data() : nullptr;
        made.params.sink_logits = made.params.sink_logits != nullptr ? sinks_.data() : nullptr;
        return made;
    }
    [[nodiscard]] up::head_rows<const T> query_rows() const {
        const model& shape = what_.keys.shape();
        return {queries_.data(), std::int64_t{shape.heads} * shape.head_dim,
                shape.head_dim,  kept_.kept_bound,
                shape.heads,     shape.head_dim};
    }
    [[nodiscard]] up::head_rows<const T> key_rows() const { return keys_.key_rows(); }
    [[nodiscard]] up::head_rows<const T> value_rows() const { return values_.key_rows(); }

  private:
    scene<T>& what_;
    device_step<T> keys_, values_;
    device_array<T> queries_;
    device_array<std::int64_t> offsets_;
    device_array<std::int32_t> blocks_, kept_to_old_, cu_kept_, cached_positions_;
    device_array<float> sinks_;
    up::selection kept_;
    up::block_lists lists_;
};

/// Outputs in device memory, rows a little apart, with nonsense in and behind them until they are written.
template <class T>
class device_output {
  public:
    device_output(const model& shape, std::int32_t count)
        : shape_(shape)
        , count_(count)
        , wide_(std::int64_t{shape.heads} * shape.head_dim + gap)
        , rows_(static_cast<std::size_t>((count + 1) * wide_))
        , lse_(static_cast<std::size_t>((count + 1) * shape.heads)) {
        forget();
    }
    void forget() {
        rows_.set(std::vector<T>(rows_.size(), up::from_float<T>(77.0f)));
        lse_.set(std::vector<float>(lse_.size(), 77.0f));
    }
    [[nodiscard]] up::head_rows<T> rows() const {
        return {rows_.data(), wide_, shape_.head_dim, count_, shape_.heads, shape_.head_dim};
    }
    [[nodiscard]] float* lse() const { return lse_.data(); }

    /// Of the first @p written queries; nothing else must have been written.
    [[nodiscard]] output<T> get(std::int32_t written) const {
        output<T> made;
        made.heads = shape_.heads;
        made.head_dim = shape_.head_dim;
        const std::vector<T> all = rows_.get();
        const auto untouched = [](auto from, auto to) {
            return std::all_of(from, to, [](auto value) { return up::to_float(value) == 77.0f; });
        };
        for (std::int32_t query = 0; query < written; ++query) {
            const auto from = all.begin() + query * wide_;
            made.rows.insert(made.rows.end(), from, from + (wide_ - gap));
            REQUIRE(untouched(from + (wide_ - gap), from + wide_));
        }
        REQUIRE(untouched(all.begin() + written * wide_, all.end()));
        made.lse = lse_.get();
        REQUIRE(untouched(made.lse.begin() + written * shape_.heads, made.lse.end()));
        made.lse.resize(static_cast<std::size_t>(written * shape_.heads));
        return made;
    }

  private:
    static constexpr std::int32_t gap = 8;
    model shape_;
    std::int32_t count_;
    std::int64_t wide_;
    device_array<T> rows_;
    device_array<float> lse_;
};

/// Means of blocks in device memory: NaN until they are averaged there.
template <class T>
class device_means {
  public:
    explicit device_means(const up::limits& bounds)
        : bounds_(bounds)
        , keys_(size_of(bounds))
        , values_(size_of(bounds)) {
        forget();
    }
    void forget() {
        const T nan = up::from_float<T>(std::numeric_limits<float>::quiet_NaN());
        keys_.set(std::vector<T>(keys_.size(), nan));
        values_.set(std::vector<T>(values_.size(), nan));
    }
    [[nodiscard]] up::block_means<T> view() const { return {rows_of(keys_), rows_of(values_)}; }
    [[nodiscard]] up::status average(device_scene<T>& from, const up::cuda_device& device,
                                     up::backend::cuda::stream stream) const {
        return up::average_blocks(device, from.key_rows(), from.value_rows(), from.batch(), bounds_, view(),
                                  stream);
    }
    /// Those of a scene that use_means() has averaged on the host, bit for bit; nothing else is written.
    void check(const scene<T>& what) const {
        check(keys_.get(), what.mean_keys, "keys");
        check(values_.get(), what.mean_values, "values");
    }

  private:
    static std::size_t size_of(const up::limits& bounds) {
        return static_cast<std::size_t>(bounds.max_blocks() * bounds.num_kv_heads * bounds.head_dim);
    }
    static void check(const std::vector<T>& came, const std::vector<T>& right, const char* which) {
        REQUIRE(came.size() >= right.size());
        for (std::size_t i = 0; i < right.size(); ++i) {
            if (std::memcmp(&came[i], &right[i], sizeof(T)) != 0) {
                CAPTURE(which, i, up::to_float(came[i]), up::to_float(right[i]));
                FAIL("another mean than the host's");
            }
        }
    }
    [[nodiscard]] up::head_rows<T> rows_of(const device_array<T>& from) const {
        const std::int64_t row = std::int64_t{bounds_.num_kv_heads} * bounds_.head_dim;
        return {from.data(),          row,
                bounds_.head_dim,     static_cast<std::int32_t>(bounds_.max_blocks()),
                bounds_.num_kv_heads, bounds_.head_dim};
    }

    up::limits bounds_;
    device_array<T> keys_, values_;
};

/// Attends on the device, between guard bytes; with means of its own where the scene uses means.
/// @param average false: means stay NaN
template <class Policy, bool Means = false, class T, class Cache>
output<T> attend_on_device(scene<T>& what, device_scene<T>& on_device, const Cache& cached_keys,
                           const Cache& cached_values, const up::cuda_device& device, bool average = true) {
    const up::prefill_attention<Policy, up::backend::cuda> attention(what.keys.tight_limits(), device);
    const up::status ready = attention.template prepare<T, Cache, Means>();
    INFO(message(ready));
    REQUIRE(ready.ok());
    constexpr std::size_t guard = 4096;
    const std::size_t bytes = attention.workspace_bytes();
    const device_array<unsigned char> memory(bytes + guard);
    uniprefill_test::check_cuda(cudaMemset(memory.data() + bytes, 0xa5, guard), "guard bytes");
    const device_output<T> out(what.keys.shape(), what.num_queries());
    const up::key_source<T, Cache> keys{on_device.key_rows(), cached_keys};
    const up::key_source<T, Cache> values{on_device.value_rows(), cached_values};
    const up::workspace scratch(memory.data(), bytes);
    up::status done;
    if constexpr (Means) {
        const device_means<T> means(what.keys.tight_limits());
        if (what.means && average) {
            const up::status averaged = means.average(on_device, device, nullptr);
            INFO(message(averaged));
            REQUIRE(averaged.ok());
            means.check(what);
        }
        done = attention.run(on_device.query_rows(), keys, values, on_device.options(), on_device.batch(),
                             on_device.kept(), on_device.lists(),
                             what.means ? means.view() : up::block_means<T>{}, out.rows(), out.lse(), scratch,
                             nullptr);
    } else {
        done = attention.run(on_device.query_rows(), keys, values, on_device.options(), on_device.batch(),
                             on_device.kept(), on_device.lists(), out.rows(), out.lse(), scratch, nullptr);
    }
    INFO(message(done));
    REQUIRE(done.ok());
    output<T> made = out.get(what.num_queries());
    std::vector<unsigned char> beyond(guard);
    uniprefill_test::check_cuda(
        cudaMemcpy(beyond.data(), memory.data() + bytes, guard, cudaMemcpyDeviceToHost),
        "copy from the device");
    REQUIRE(std::all_of(beyond.begin(), beyond.end(), [](unsigned char byte) { return byte == 0xa5; }));
    return made;
}

/// What results may differ by from the oracle's. With u = 2^-24:
/// - a score: tensor cores cut each product, and each sum of 16, off at 2 u of the sum of |q k| at most; the
///   factor and the grid of exponents round by 1536 u and 3 u of the exponent's size, in units of log2; a
///   soft-cap adds 6e-7 of itself
/// - a probability: what its score's error makes of it, 2^-22 of exp2, and its rounding to T
/// - sums of probabilities: u for each of a quarter of the keys, which a lane adds one by one
/// - products with values: cut off at 2 u of the sum of magnitudes, for each key and each sum of 16
struct device_bound {
    double score = 0; ///< of an exponential, relative
    double keys = 0;

    device_bound(const oracle::attended_row& row, double softcap) {
        const double exponent = row.largest_score * 1.4427;
        score = 2 * u * row.score_magnitude + 0.6932 * u * (1536 + 4 * exponent) + 4 * u +
                (softcap > 0 ? 6e-7 * (row.largest_score + 1) : 0.0);
        keys = row.reads;
    }
    template <class T>
    [[nodiscard]] double of_out(const oracle::attended_row& row, std::size_t i) const {
        const double relative =
            std::expm1(2 * score) + rounding<T>() + u * (keys / 4 + 16) + 2 * u * (keys * 17 / 16 + 32);
        const double inside = relative * row.magnitude[i];
        return inside + rounding<T>() * (std::abs(row.out[i]) + inside) + 0x1p-24;
    }
    [[nodiscard]] double of_lse(const oracle::attended_row& row) const {
        return score + u * (keys / 4 + 32) + 4 * u * (std::abs(row.lse) + 1);
    }

  private:
    static constexpr double u = 0x1p-24;
};

/// Compares a share of the queries of each result with the oracle's rows. @return the largest share of a
/// bound
template <class T>
double check_on_device(const scene<T>& what, const std::vector<output<T>>& results,
                       std::int32_t most_rows = 1 << 30) {
    const model& shape = what.keys.shape();
    const oracle::score_parameters parameters = oracle_parameters(what.options.params, shape);
    std::vector<request_tensors> tensors;
    for (std::size_t r = 0; r < what.keys.data.size(); ++r) {
        tensors.emplace_back(what, r);
    }
    double worst = 0;
    met_keys met;
    const std::int32_t every = std::max((what.num_queries() + most_rows - 1) / most_rows, 1);
    for (std::int32_t query = 0; query < what.num_queries(); query += every) {
        const std::int32_t row = what.row_of(query);
        std::int32_t segment = 0;
        while (what.keys.cu_segments[static_cast<std::size_t>(segment) + 1] <= row) {
            ++segment;
        }
        const std::size_t r = what.request_of(segment);
        if (met.segment != segment) {
            met = met_keys(what, tensors[r], segment);
        }
        for (std::int32_t head = 0; head < shape.heads; ++head) {
            std::vector<bool> reads = reads_of(what, tensors[r], segment, row, head);
            met.add_means(what, tensors[r], row, reads);
            const oracle::attended_row right =
                oracle::attend_row(tensors[r].q, row - what.keys.cu_seqlens[r], head, met.k, met.v,
                                   parameters, reads, shape.head_dim / 16 + 8, met.log_weights);
            const device_bound bound(right, parameters.softcap);
            for (std::size_t k = 0; k < results.size(); ++k) {
                INFO("result " << k << ", query " << query << ", row " << row << " of segment " << segment
                               << ", head " << head << ", reads " << right.reads);
                const float lse = results[k].lse[static_cast<std::size_t>(query * shape.heads + head)];
                if (std::isinf(right.lse)) {
                    REQUIRE(lse == -std::numeric_limits<float>::infinity());
                } else {
                    const double off = std::abs(static_cast<double>(lse) - right.lse);
                    CAPTURE(lse, right.lse, bound.of_lse(right));
                    REQUIRE(off <= bound.of_lse(right));
                    worst = std::max(worst, off / bound.of_lse(right));
                }
                const T* const out = results[k].at(query, head);
                for (std::size_t i = 0; i < right.out.size(); ++i) {
                    const double came = static_cast<double>(up::to_float(out[i]));
                    const double off = std::abs(came - right.out[i]);
                    const double most = right.reads == 0 ? 0 : bound.of_out<T>(right, i);
                    if (!(off <= most)) {
                        CAPTURE(i, came, right.out[i], most);
                        REQUIRE(off <= most);
                    }
                    worst = most > 0 ? std::max(worst, off / most) : worst;
                }
            }
        }
    }
    return worst;
}

/// Two bodies of one scene, row by row, closely enough that no row can have read other keys than its own.
template <class T>
void check_agreement(const output<T>& a, const output<T>& b) {
    REQUIRE(a.lse.size() == b.lse.size());
    for (std::size_t i = 0; i < a.lse.size(); ++i) {
        if (!(std::abs(a.lse[i] - b.lse[i]) <= 1e-3f + 1e-5f * std::abs(a.lse[i]))) {
            CAPTURE(i);
            REQUIRE(a.lse[i] == b.lse[i]); // where nothing is read, or to tell them
        }
    }
    const auto most = static_cast<float>(16 * rounding<T>());
    for (std::size_t i = 0; i < a.rows.size(); ++i) {
        const float left = up::to_float(a.rows[i]);
        const float right = up::to_float(b.rows[i]);
        if (!(std::abs(left - right) <= most * (1 + std::abs(left)))) {
            CAPTURE(i, left, right);
            REQUIRE(std::abs(left - right) <= most * (1 + std::abs(left)));
        }
    }
}

} // namespace attend_test
