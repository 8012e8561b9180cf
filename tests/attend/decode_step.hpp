// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Decode steps: query rows over what a layer's cache holds of some requests.
#pragma once

#include "check.hpp"

#include <uniprefill/attend/decode.hpp>

namespace attend_test {

/// Requests of which so many tokens are cached, and the query rows of a step.
template <class T>
struct decode_step {
    decode_step(const model& shape, const std::vector<std::int32_t>& cached, std::int32_t num_rows,
                std::uint64_t seed = 1)
        : tokens(shape, requests_of(cached, seed))
        , k(tokens.keys)
        , v(tokens.values)
        , rows(num_rows) {
        std::mt19937_64 random(seed);
        std::normal_distribution<float> normal;
        for (std::int64_t i = 0; i < std::int64_t{num_rows} * shape.heads * shape.head_dim; ++i) {
            queries.push_back(up::from_float<T>(normal(random) * 1.5f));
        }
        for (std::int32_t row = 0; row < num_rows; ++row) {
            requests.push_back(row % static_cast<std::int32_t>(cached.size()));
            lens.push_back(cached[static_cast<std::size_t>(requests.back())]);
            first_keys.push_back(0);
        }
    }

    [[nodiscard]] const model& shape() const { return tokens.keys.shape(); }
    [[nodiscard]] up::limits bounds() const {
        up::limits made = tokens.keys.tight_limits();
        made.max_rows = rows;
        return made;
    }
    [[nodiscard]] up::decode_rows view() const {
        up::decode_rows made;
        made.num_rows = rows;
        made.requests = requests.data();
        made.lens = lens.data();
        made.first_keys = first_keys.data();
        made.row_stride = by_head ? shape().kv_heads : 1;
        made.head_stride = by_head ? 1 : 0;
        return made;
    }
    [[nodiscard]] up::head_rows<const T> query_rows() const {
        return {queries.data(),   std::int64_t{shape().heads} * shape().head_dim,
                shape().head_dim, rows,
                shape().heads,    shape().head_dim};
    }
    /// Draws what rows read: all of their tokens or fewer, for all KV heads together or for each.
    void draw_rows(generator& random) {
        by_head = random.chance(40);
        const std::vector<std::int32_t> most = lens;
        lens.clear();
        first_keys.clear();
        for (const std::int32_t all : most) {
            for (std::int32_t head = by_head ? shape().kv_heads : 1; head > 0; --head) {
                lens.push_back(random.chance(50) ? all : random.below(all + 1));
                first_keys.push_back(random.chance(50) ? 0 : random.below(lens.back() + 1));
            }
        }
    }
    /// What a row reads of a KV head: tokens [first, len).
    [[nodiscard]] std::size_t entry(std::int32_t row, std::int32_t kv_head) const {
        return static_cast<std::size_t>(by_head ? row * shape().kv_heads + kv_head : row);
    }

    scene<T> tokens;
    caches<T> k;
    caches<T> v;
    std::int32_t rows;
    bool by_head = false;
    std::vector<T> queries; // [rows][heads][head_dim]
    std::vector<std::int32_t> requests;
    std::vector<std::int32_t> lens;       // [rows], or [rows][kv_heads]
    std::vector<std::int32_t> first_keys; // as lens
    up::attention_params params;

  private:
    static std::vector<request> requests_of(const std::vector<std::int32_t>& cached, std::uint64_t seed) {
        std::vector<request> all;
        for (const std::int32_t count : cached) {
            all.push_back({seed + 100 * all.size(), up::request_tag::chunk, count, {0}});
        }
        return all;
    }
};

template <class Policy = up::decode_policy<>, class T, class Cache>
output<T> decode(const decode_step<T>& what, const Cache& cached_keys, const Cache& cached_values) {
    const model& shape = what.shape();
    const up::decode_attention<Policy> attention(what.bounds());
    output<T> result;
    result.heads = shape.heads;
    result.head_dim = shape.head_dim;
    result.rows.assign(what.queries.size() + 9, up::from_float<T>(77.0f));
    result.lse.assign(static_cast<std::size_t>(what.rows * shape.heads) + 1, 77.0f);
    const guarded_buffer memory(attention.workspace_bytes());
    const up::head_rows<T> out{result.rows.data(), std::int64_t{shape.heads} * shape.head_dim,
                               shape.head_dim,     what.rows,
                               shape.heads,        shape.head_dim};
    const up::status done =
        attention.run(what.query_rows(), cached_keys, cached_values, what.params, what.view(), out,
                      result.lse.data(), up::workspace(memory.data(), attention.workspace_bytes()));
    INFO(message(done));
    REQUIRE(done.ok());
    REQUIRE(memory.is_intact());
    REQUIRE(std::all_of(result.rows.end() - 9, result.rows.end(),
                        [](T value) { return up::to_float(value) == 77.0f; }));
    REQUIRE(result.lse.back() == 77.0f);
    result.rows.resize(what.queries.size());
    result.lse.pop_back();
    return result;
}

template <class T>
output<T> decode(const decode_step<T>& what) {
    return decode(what, what.k.page_table(), what.v.page_table());
}

/// What the definition gives for one row and head.
template <class T>
oracle::attended_row decoded_row(const decode_step<T>& what, std::int32_t row, std::int32_t head) {
    const model& shape = what.shape();
    const auto r = static_cast<std::size_t>(what.requests[static_cast<std::size_t>(row)]);
    const request_tensors tensors(what.tokens, r);
    oracle::tensor q(1, shape.heads, shape.head_dim);
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(q.data.size()); ++i) {
        q.data[static_cast<std::size_t>(i)] = static_cast<double>(up::to_float(
            what.queries[static_cast<std::size_t>(row * static_cast<std::int64_t>(q.data.size()) + i)]));
    }
    const std::size_t at = what.entry(row, head / (shape.heads / shape.kv_heads));
    std::vector<bool> reads(static_cast<std::size_t>(tensors.k.rows), false);
    for (std::int32_t token = what.first_keys[at]; token < what.lens[at]; ++token) {
        reads[static_cast<std::size_t>(token)] = true;
    }
    return oracle::attend_row(q, 0, head, tensors.k, tensors.v, oracle_parameters(what.params, shape), reads,
                              8);
}

template <class T>
void check(const decode_step<T>& what, const output<T>& got) {
    for (std::int32_t row = 0; row < what.rows; ++row) {
        for (std::int32_t head = 0; head < got.heads; ++head) {
            const oracle::attended_row right = decoded_row(what, row, head);
            INFO("row " << row << ", head " << head << ", reads " << right.reads);
            const std::size_t r = static_cast<std::size_t>(what.requests[static_cast<std::size_t>(row)]);
            check_row(right, error_bound(right, what.tokens.keys.cached_lens[r], what.params.softcap > 0),
                      got.at(row, head), got.lse[static_cast<std::size_t>(row * got.heads + head)]);
        }
    }
}

} // namespace attend_test
