// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention against the oracle, within a bound that follows from the arithmetic.
#pragma once

#include "oracle/oracle.hpp"
#include "scene.hpp"

#include <type_traits>

namespace attend_test {

/// One unit in the last place of 1 in T, halved.
template <class T>
double rounding() {
    return std::is_same_v<T, float> ? 0x1p-24 : std::is_same_v<T, up::half> ? 0x1p-11 : 0x1p-8;
}

/// What the library's numbers may differ by from the oracle's. With u = 2^-24:
/// - a score: scaling a query and the products' sum, (products + 8) u of the sum of |q k|; a soft-cap 6e-7 of
///   itself more (tanh); its difference from the largest, of which at most 125 in units of log2 matter, u
///   each
/// - a weight: what its score's error makes of it, and 3 u of exp2
/// - sums of weights, and of values: 64 u in a tile, 6 u for each tile and run before
/// Weights are off by at most a factor, then, above and below the line; and the result is rounded to T.
struct error_bound {
    double relative = 0;

    error_bound(const oracle::attended_row& row, int keys, bool capped) {
        constexpr double u = 0x1p-24;
        const double score =
            u * (row.score_magnitude + row.largest_score + 90) + (capped ? 6e-7 * row.largest_score : 0.0);
        const double tiles = keys / 64.0 + 2;
        relative = score + u * (3 + 64 + 12 * tiles + 8);
    }
    template <class T>
    [[nodiscard]] double of_out(const oracle::attended_row& row, std::size_t i) const {
        const double inside = std::expm1(2 * relative) * row.magnitude[i];
        return inside + rounding<T>() * (std::abs(row.out[i]) + inside) + 0x1p-25;
    }
    [[nodiscard]] double of_lse(const oracle::attended_row& row) const {
        return relative + 4 * 0x1p-24 * (std::abs(row.lse) + 1);
    }
};

/// One request as the oracle sees it.
struct request_tensors {
    oracle::tensor q, k, v;
    std::vector<int> key_positions; // [cached + rows]

    template <class T>
    request_tensors(const scene<T>& what, std::size_t index) {
        const model& shape = what.keys.shape();
        const auto fill = [](const std::vector<T>& from, int heads, int dim) {
            oracle::tensor to(static_cast<int>(from.size()) / heads / dim, heads, dim);
            for (std::size_t i = 0; i < from.size(); ++i) {
                to.data[i] = static_cast<double>(up::to_float(from[i]));
            }
            return to;
        };
        q = fill(what.keys.data[index].queries, shape.heads, shape.head_dim);
        k = fill(what.keys.data[index].keys, shape.kv_heads, shape.head_dim);
        v = fill(what.values.data[index].keys, shape.kv_heads, shape.head_dim);
        key_positions = what.keys.data[index].cached_positions;
        key_positions.insert(key_positions.end(), what.keys.data[index].positions.begin(),
                             what.keys.data[index].positions.end());
    }
};

inline oracle::score_parameters oracle_parameters(const up::attention_params& params, const model& shape) {
    oracle::score_parameters made;
    made.scale = params.scale > 0 ? static_cast<double>(params.scale) : 1.0 / std::sqrt(shape.head_dim);
    made.softcap = static_cast<double>(params.softcap);
    if (params.sink_logits != nullptr) {
        made.sink_logits.assign(params.sink_logits, params.sink_logits + shape.heads);
    }
    return made;
}

template <class T>
void check_row(const oracle::attended_row& right, const error_bound& bound, const T* out, float lse) {
    if (right.reads == 0 && right.lse < -1e300) { // told by bits, so that -ffast-math has no say
        REQUIRE(up::bit_cast<std::uint32_t>(lse) == 0xff800000u);
    } else {
        CAPTURE(lse, right.lse, bound.of_lse(right));
        REQUIRE(std::abs(static_cast<double>(lse) - right.lse) <= bound.of_lse(right));
    }
    for (std::size_t i = 0; i < right.out.size(); ++i) {
        const double came = static_cast<double>(up::to_float(out[i]));
        const double most = bound.of_out<T>(right, i);
        if (right.reads == 0) {
            REQUIRE(came == 0);
        } else if (!(std::abs(came - right.out[i]) <= most)) {
            CAPTURE(i, came, right.out[i], most);
            REQUIRE(std::abs(came - right.out[i]) <= most);
        }
    }
}

/// The keys of its request that the query of a row reads, from the definition alone.
template <class T>
std::vector<bool> reads_of(const scene<T>& what, const request_tensors& tensors, std::int32_t segment,
                           std::int32_t row, std::int32_t head) {
    const model& shape = what.keys.shape();
    const int position = what.keys.positions[static_cast<std::size_t>(row)];
    std::vector<bool> reads = oracle::stored_causal_mask({position}, tensors.key_positions,
                                                         tensors.key_positions, what.options.window)[0];
    if (what.lists.heads > 0) {
        const std::size_t r = what.request_of(segment);
        oracle::block_list list;
        const std::int32_t begin = what.keys.cu_segments[static_cast<std::size_t>(segment)];
        list.first_key = what.keys.cached_lens[r] + begin - what.keys.cu_seqlens[r];
        list.block_rows = shape.block_rows;
        list.window = what.lists.window;
        list.listed.assign(tensors.key_positions.size() + 1, false);
        const std::int32_t of =
            what.lists.heads == shape.heads ? head : head / (shape.heads / shape.kv_heads);
        std::int32_t number = segment;
        if (what.lists.query_rows > 0) {
            const std::vector<std::int32_t>& kept = what.kept.kept_to_old;
            const auto first = static_cast<std::size_t>(segment);
            const std::int32_t first_query =
                what.kept.identity ? what.keys.cu_segments[first] : what.kept.cu_segments[first];
            const std::int32_t query =
                what.kept.identity ? row
                                   : static_cast<std::int32_t>(
                                         std::lower_bound(kept.begin(), kept.end(), row) - kept.begin());
            number =
                first_query / what.lists.query_rows + segment + (query - first_query) / what.lists.query_rows;
        }
        const auto entry = static_cast<std::size_t>(number * what.lists.heads + of);
        if (what.lists.offsets[entry] < 0) {
            return reads;
        }
        const std::int64_t next = what.lists.offsets[entry + 1];
        for (std::int64_t i = what.lists.offsets[entry]; i < (next < 0 ? ~next : next); ++i) {
            list.listed[static_cast<std::size_t>(what.lists.blocks[static_cast<std::size_t>(i)])] = true;
        }
        reads = oracle::listed_keys(reads, position, tensors.key_positions, list);
    }
    return reads;
}

/// What the query of a row meets: keys of its request and, where it takes them, means of blocks behind them.
struct met_keys {
    oracle::tensor k, v;
    std::vector<double> log_weights; // [keys]
    std::int32_t segment = -1;
    int first_key = 0; ///< of the segment
    int blocks = 0;    ///< whole ones

    met_keys() = default;
    template <class T>
    met_keys(const scene<T>& what, const request_tensors& tensors, std::int32_t of_segment)
        : k(tensors.k)
        , v(tensors.v)
        , log_weights(static_cast<std::size_t>(tensors.k.rows), 0.0)
        , segment(of_segment) {
        const model& shape = what.keys.shape();
        const std::size_t r = what.request_of(segment);
        const std::int32_t begin = what.keys.cu_segments[static_cast<std::size_t>(segment)];
        const std::int32_t end = what.keys.cu_segments[static_cast<std::size_t>(segment) + 1];
        first_key = what.keys.cached_lens[r] + begin - what.keys.cu_seqlens[r];
        if (!what.means || what.lists.heads == 0) {
            return;
        }
        blocks = (end - begin) / shape.block_rows;
        const auto append = [&](oracle::tensor& to, const std::vector<T>& means) {
            const std::int64_t row = std::int64_t{to.heads} * to.dim;
            const std::int64_t first = (begin / shape.block_rows + segment) * row; // block_offset()
            for (std::int64_t i = 0; i < blocks * row; ++i) {
                to.data.push_back(
                    static_cast<double>(up::to_float(means[static_cast<std::size_t>(first + i)])));
            }
            to.rows += blocks;
        };
        append(k, what.mean_keys);
        append(v, what.mean_values);
        log_weights.resize(static_cast<std::size_t>(k.rows), std::log(shape.block_rows));
    }

    /// Adds the means to what a row reads, by the definition: blocks that it sees whole, reads nothing of and
    /// isn't in.
    template <class T>
    void add_means(const scene<T>& what, const request_tensors& tensors, std::int32_t row,
                   std::vector<bool>& reads) const {
        const std::int32_t G = what.keys.shape().block_rows;
        const int position = what.keys.positions[static_cast<std::size_t>(row)];
        const std::vector<bool> seen = oracle::stored_causal_mask(
            {position}, tensors.key_positions, tensors.key_positions, what.options.window)[0];
        const std::vector<bool> keys_read = reads;
        for (int block = 0; block < blocks; ++block) {
            bool skipped = true;
            for (int key = first_key + block * G; key < first_key + (block + 1) * G; ++key) {
                const auto at = static_cast<std::size_t>(key);
                skipped = skipped && seen[at] && !keys_read[at] && tensors.key_positions[at] != position;
            }
            reads.push_back(skipped);
        }
    }
};

/// Compares a share of the queries with the oracle's rows.
template <class T>
void check(const scene<T>& what, const output<T>& got, std::int32_t most_rows = 1 << 30) {
    const model& shape = what.keys.shape();
    const oracle::score_parameters parameters = oracle_parameters(what.options.params, shape);
    std::vector<request_tensors> tensors;
    for (std::size_t r = 0; r < what.keys.data.size(); ++r) {
        tensors.emplace_back(what, r);
    }
    met_keys met;
    const std::int32_t every = (what.num_queries() + most_rows - 1) / std::max(most_rows, 1);
    for (std::int32_t query = 0; query < what.num_queries(); query += std::max(every, 1)) {
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
                                   parameters, reads, 8, met.log_weights);
            const error_bound bound(right, met.k.rows, parameters.softcap > 0);
            INFO("query " << query << ", row " << row << " of segment " << segment << ", head " << head
                          << ", reads " << right.reads);
            check_row(right, bound, got.at(query, head),
                      got.lse[static_cast<std::size_t>(query * shape.heads + head)]);
        }
    }
}

/// One to three requests with keys and values, parameters, perhaps a window, and perhaps not all rows kept;
/// no lists.
template <class T>
scene<T> any_rows(generator& random, const model& shape, std::uint64_t number) {
    std::vector<request> requests;
    for (std::int32_t r = 1 + random.below(3); r > 0; --r) {
        requests.push_back(random.any_request(shape));
    }
    scene<T> what(shape, requests);
    what.options.params = random.any_params(shape, what.sinks);
    if (random.chance(30)) {
        what.set_window(random.among({1, 2, 17, 64, 150, 1000000000}));
    }
    if (random.chance(50)) {
        const auto percent = static_cast<std::uint32_t>(random.among({0, 5, 50, 95}));
        what.keep_rows([&](std::uint64_t seed, std::int32_t row) {
            return coin(seed + number, 2, 0, static_cast<std::uint64_t>(row), percent);
        });
    }
    return what;
}

} // namespace attend_test
