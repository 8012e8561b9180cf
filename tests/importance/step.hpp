// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Steps of made-up requests: what each request holds follows from its own seed, wherever it is packed.
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace importance_test {

namespace up = uniprefill;

/// Heads and sizes that all requests of a step share.
struct model {
    std::int32_t heads = 3;
    std::int32_t kv_heads = 1;
    std::int32_t head_dim = 16;
    std::int32_t block_rows = 16;
    std::int32_t num_observations = 8;
};

struct request {
    std::uint64_t seed = 1;
    up::request_tag tag = up::request_tag::prefill;
    std::int32_t cached = 0;
    std::vector<std::int32_t> segments{}; // rows of each
    up::request_options options{1, 4, 8, 0};
    std::vector<up::position_span> forced{};
    std::vector<up::position_span> observed{};
    float spread = 1.5f; ///< standard deviation of queries: how uneven the softmax is
    bool gaps = false;   ///< positions with holes, as after a drop

    [[nodiscard]] std::int32_t rows() const {
        std::int32_t sum = 0;
        for (const std::int32_t count : segments) {
            sum += count;
        }
        return sum;
    }
};

/// The values of one request, rounded to T.
template <class T>
struct request_data {
    std::vector<T> queries;                     // [rows][heads][head_dim]
    std::vector<T> keys;                        // [cached + rows][kv_heads][head_dim]
    std::vector<std::int32_t> positions;        // [rows]
    std::vector<std::int32_t> cached_positions; // [cached]

    request_data(const request& what, const model& shape) {
        std::mt19937_64 random(what.seed);
        std::normal_distribution<float> normal;
        const auto fill = [&](std::vector<T>& values, std::int64_t count, float spread) {
            values.resize(static_cast<std::size_t>(count));
            for (T& value : values) {
                value = up::from_float<T>(normal(random) * spread);
            }
        };
        const std::int64_t rows = what.rows();
        // Keys first: a request that has some of them cached is then the same text as one that has none.
        fill(keys, (rows + what.cached) * shape.kv_heads * shape.head_dim, 1.0f);
        fill(queries, (rows + what.cached) * shape.heads * shape.head_dim, what.spread);
        queries.erase(queries.begin(),
                      queries.begin() + std::int64_t{what.cached} * shape.heads * shape.head_dim);
        std::int32_t position = -1;
        for (std::int64_t token = 0; token < what.cached + rows; ++token) {
            position += what.gaps ? 1 + static_cast<std::int32_t>(random() % 3) : 1;
            (token < what.cached ? cached_positions : positions).push_back(position);
        }
    }
};

/// A step with its arrays.
template <class T>
class step {
  public:
    step(const model& shape, const std::vector<request>& requests)
        : shape_(shape)
        , requests_(requests) {
        for (const request& what : requests) {
            data.emplace_back(what, shape);
            const request_data<T>& one = data.back();
            tags.push_back(what.tag);
            cached_lens.push_back(what.cached);
            options.push_back(what.options);
            for (const std::int32_t rows : what.segments) {
                segment_request.push_back(static_cast<std::int32_t>(data.size()) - 1);
                cu_segments.push_back(cu_segments.back() + rows);
            }
            cu_seqlens.push_back(cu_segments.back());
            positions.insert(positions.end(), one.positions.begin(), one.positions.end());
            queries.insert(queries.end(), one.queries.begin(), one.queries.end());
            const auto cached = static_cast<std::ptrdiff_t>(what.cached) * shape.kv_heads * shape.head_dim;
            keys.insert(keys.end(), one.keys.begin() + cached, one.keys.end());
            add(forced_spans, forced_offsets, what.forced);
            add(observed_spans, observed_offsets, what.observed);
        }
    }

    [[nodiscard]] std::int32_t num_rows() const { return cu_seqlens.back(); }
    [[nodiscard]] std::int32_t num_segments() const {
        return static_cast<std::int32_t>(segment_request.size());
    }
    [[nodiscard]] const std::vector<request>& requests() const { return requests_; }
    [[nodiscard]] const model& shape() const { return shape_; }

    /// Limits that just hold this step.
    [[nodiscard]] up::limits tight_limits() const {
        up::limits bounds;
        bounds.max_requests = std::max<std::int32_t>(1, static_cast<std::int32_t>(requests_.size()));
        bounds.max_segments = std::max(bounds.max_requests, num_segments());
        bounds.max_rows = num_rows();
        for (const std::int32_t cached : cached_lens) {
            bounds.max_cached_tokens += cached;
        }
        bounds.num_heads = shape_.heads;
        bounds.num_kv_heads = shape_.kv_heads;
        bounds.head_dim = shape_.head_dim;
        bounds.block_rows = shape_.block_rows;
        bounds.num_observations = shape_.num_observations;
        return bounds;
    }

    [[nodiscard]] up::batch_view batch() const {
        up::batch_view view;
        view.num_requests = static_cast<std::int32_t>(requests_.size());
        view.num_segments = num_segments();
        view.num_rows = num_rows();
        view.tags = tags.data();
        view.cu_seqlens = cu_seqlens.data();
        view.positions = positions.data();
        view.cached_lens = cached_lens.data();
        view.options = options.data();
        view.cu_segments = cu_segments.data();
        view.segment_request = segment_request.data();
        view.forced = {forced_offsets.data(), forced_spans.data()};
        view.observed = {observed_offsets.data(), observed_spans.data()};
        return view;
    }

    [[nodiscard]] up::head_rows<const T> query_rows() const {
        return {queries.data(),  std::int64_t{shape_.heads} * shape_.head_dim,
                shape_.head_dim, num_rows(),
                shape_.heads,    shape_.head_dim};
    }
    [[nodiscard]] up::head_rows<const T> key_rows() const {
        return {keys.data(),     std::int64_t{shape_.kv_heads} * shape_.head_dim,
                shape_.head_dim, num_rows(),
                shape_.kv_heads, shape_.head_dim};
    }

    std::vector<request_data<T>> data;
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu_seqlens{0};
    std::vector<std::int32_t> positions;
    std::vector<std::int32_t> cached_lens;
    std::vector<up::request_options> options;
    std::vector<std::int32_t> cu_segments{0};
    std::vector<std::int32_t> segment_request;
    std::vector<std::int32_t> forced_offsets{0};
    std::vector<up::position_span> forced_spans;
    std::vector<std::int32_t> observed_offsets{0};
    std::vector<up::position_span> observed_spans;
    std::vector<T> queries;
    std::vector<T> keys;

  private:
    static void add(std::vector<up::position_span>& spans, std::vector<std::int32_t>& offsets,
                    const std::vector<up::position_span>& more) {
        spans.insert(spans.end(), more.begin(), more.end());
        offsets.push_back(static_cast<std::int32_t>(spans.size()));
    }

    model shape_;
    std::vector<request> requests_;
};

} // namespace importance_test
