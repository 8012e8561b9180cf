// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Steps with values, block lists and kept rows, and attention over them in guarded memory.
#pragma once

#include "importance/caches.hpp"
#include "importance/estimate.hpp"
#include "importance/random_step.hpp"

#include <uniprefill/attend/attention.hpp>

#include <functional>
#include <limits>

namespace attend_test {

namespace up = uniprefill;
using importance_test::caches;
using importance_test::generator;
using importance_test::guarded_buffer;
using importance_test::message;
using importance_test::model;
using importance_test::request;
using importance_test::step;

/// Block lists with their arrays.
struct list_set {
    std::int32_t heads = 0; ///< 0: no lists
    std::int32_t window = 0;
    std::int32_t query_rows = 0; ///< of a list; 0: all of a segment
    std::vector<std::int64_t> offsets{0};
    std::vector<std::int32_t> blocks;

    [[nodiscard]] up::block_lists view(std::int32_t block_rows, std::int32_t segments) {
        up::block_lists made;
        if (heads > 0) {
            made.block_rows = block_rows;
            made.window = window;
            made.max_segments = made.num_segments = segments;
            made.num_heads = heads;
            made.offsets = offsets.data();
            made.blocks = blocks.data();
            made.capacity = static_cast<std::int64_t>(blocks.size());
            made.query_rows = query_rows;
            made.max_query_blocks = static_cast<std::int64_t>(offsets.size() - 1) / heads;
        }
        return made;
    }
};

/// A selection with its arrays.
struct kept_set {
    bool identity = true;
    std::vector<std::int32_t> kept_to_old;
    std::vector<std::int32_t> cu_segments{0};

    [[nodiscard]] up::selection view(const up::batch_view& batch) {
        up::selection made = up::selection::keep_all(batch.num_requests, batch.num_segments, batch.num_rows,
                                                     up::memory_space::host);
        if (!identity) {
            made.identity = false;
            made.kept_bound = static_cast<std::int32_t>(kept_to_old.size());
            made.kept_to_old = kept_to_old.data();
            made.cu_segments = cu_segments.data();
        }
        return made;
    }
};

/// Which choice: a segment counts from its request's first, which its seed names wherever it is packed.
using pick_block =
    std::function<bool(std::uint64_t seed, std::int32_t segment, std::int32_t head, int block)>;
/// The same for a query block's own list; block -1 asks whether there is a list at all.
using pick_own_block = std::function<bool(std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                          std::int32_t query_block, int block)>;
using pick_row = std::function<bool(std::uint64_t seed, std::int32_t row)>;

/// Something like a coin that falls the same for the same numbers.
inline bool coin(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d, std::uint32_t percent) {
    std::uint64_t z = a * 0x9e3779b97f4a7c15u + b * 0xbf58476d1ce4e5b9u + c * 0x94d049bb133111ebu + d;
    for (int i = 0; i < 3; ++i) {
        z = (z ^ (z >> 31)) * 0xd6e8feb86659fd93u;
    }
    return (z >> 33) % 100 < percent;
}

template <class T>
struct scene {
    scene(const model& shape, const std::vector<request>& requests)
        : keys(shape, requests)
        , values(shape, reseeded(requests)) {
        for (const auto& one : keys.data) {
            cached_stride = std::max(cached_stride, static_cast<std::int64_t>(one.cached_positions.size()));
        }
        for (const auto& one : keys.data) {
            cached_positions.insert(cached_positions.end(), one.cached_positions.begin(),
                                    one.cached_positions.end());
            cached_positions.resize(cached_positions.size() + static_cast<std::size_t>(cached_stride) -
                                    one.cached_positions.size());
        }
    }

    void set_window(std::int32_t window) {
        options.window = window;
        options.cached_positions = cached_positions.data();
        options.cached_positions_stride = cached_stride;
    }

    void list_blocks(std::int32_t heads, std::int32_t window, const pick_block& pick) {
        lists = {};
        lists.heads = heads;
        lists.window = window;
        const up::batch_view batch = keys.batch();
        for (std::int32_t s = 0; s < batch.num_segments; ++s) {
            const std::uint64_t seed = keys.requests()[request_of(s)].seed;
            const int blocks =
                up::num_blocks(batch.segment_end(s) - batch.segment_begin(s), keys.shape().block_rows);
            for (std::int32_t head = 0; head < heads; ++head) {
                for (int block = 0; block < blocks; ++block) {
                    if (pick(seed, segment_in_request(s), head, block)) {
                        lists.blocks.push_back(block);
                    }
                }
                lists.offsets.push_back(static_cast<std::int64_t>(lists.blocks.size()));
            }
        }
        lists.blocks.reserve(1); // an address even where all are empty
    }

    /// A list for each @p query_rows of the rows that are kept by now.
    void list_own_blocks(std::int32_t heads, std::int32_t window, std::int32_t query_rows,
                         const pick_own_block& pick) {
        lists = {};
        lists.heads = heads;
        lists.window = window;
        lists.query_rows = query_rows;
        const up::batch_view batch = keys.batch();
        const auto begin = [&](std::int32_t segment) {
            return kept.identity ? keys.cu_segments[static_cast<std::size_t>(segment)]
                                 : kept.cu_segments[static_cast<std::size_t>(segment)];
        };
        for (std::int32_t s = 0; s < batch.num_segments; ++s) {
            const std::uint64_t seed = keys.requests()[request_of(s)].seed;
            const int blocks =
                up::num_blocks(batch.segment_end(s) - batch.segment_begin(s), keys.shape().block_rows);
            const std::int32_t place = begin(s) / query_rows + s;
            lists.offsets.resize(static_cast<std::size_t>(place * heads) + 1, lists.offsets.back());
            const std::int32_t queries = begin(s + 1) - begin(s);
            for (std::int32_t query_block = 0; query_block * query_rows < queries; ++query_block) {
                for (std::int32_t head = 0; head < heads; ++head) {
                    const bool everything = !pick(seed, segment_in_request(s), head, query_block, -1);
                    if (everything) {
                        lists.offsets.back() = ~lists.offsets.back();
                    }
                    for (int block = 0; !everything && block < blocks; ++block) {
                        if (pick(seed, segment_in_request(s), head, query_block, block)) {
                            lists.blocks.push_back(block);
                        }
                    }
                    lists.offsets.push_back(static_cast<std::int64_t>(lists.blocks.size()));
                }
            }
        }
        const std::int32_t places = num_queries() / query_rows + batch.num_segments;
        lists.offsets.resize(static_cast<std::size_t>(places * heads) + 1, lists.offsets.back());
        lists.blocks.reserve(1);
    }

    /// Gives attention the means of its blocks. What nobody averages is NaN, and must not be read.
    void use_means() {
        means = true;
        const up::limits bounds = keys.tight_limits();
        const auto row = static_cast<std::size_t>(bounds.num_kv_heads * bounds.head_dim);
        const T nan = up::from_float<T>(std::numeric_limits<float>::quiet_NaN());
        mean_keys.assign(static_cast<std::size_t>(bounds.max_blocks()) * row, nan);
        mean_values = mean_keys;
        const up::status done =
            up::average_blocks(keys.key_rows(), values.key_rows(), keys.batch(), bounds, mean_rows());
        INFO(message(done));
        REQUIRE(done.ok());
    }
    /// Null ones where they aren't used.
    [[nodiscard]] up::block_means<T> mean_rows() {
        if (!means) {
            return {};
        }
        const model& shape = keys.shape();
        const std::int64_t row = std::int64_t{shape.kv_heads} * shape.head_dim;
        const auto blocks = static_cast<std::int32_t>(keys.tight_limits().max_blocks());
        return {{mean_keys.data(), row, shape.head_dim, blocks, shape.kv_heads, shape.head_dim},
                {mean_values.data(), row, shape.head_dim, blocks, shape.kv_heads, shape.head_dim}};
    }

    /// @param pick told the row's index among those of its request
    void keep_rows(const pick_row& pick) {
        kept = {};
        kept.identity = false;
        const up::batch_view batch = keys.batch();
        for (std::int32_t s = 0; s < batch.num_segments; ++s) {
            const std::size_t r = request_of(s);
            for (std::int32_t row = batch.segment_begin(s); row < batch.segment_end(s); ++row) {
                if (pick(keys.requests()[r].seed, row - keys.cu_seqlens[r])) {
                    kept.kept_to_old.push_back(row);
                }
            }
            kept.cu_segments.push_back(static_cast<std::int32_t>(kept.kept_to_old.size()));
        }
        kept.kept_to_old.reserve(1);
    }

    [[nodiscard]] std::size_t request_of(std::int32_t segment) const {
        return static_cast<std::size_t>(keys.segment_request[static_cast<std::size_t>(segment)]);
    }
    [[nodiscard]] std::int32_t segment_in_request(std::int32_t segment) const {
        std::int32_t first = segment;
        while (first > 0 && request_of(first - 1) == request_of(segment)) {
            --first;
        }
        return segment - first;
    }
    [[nodiscard]] std::int32_t num_queries() const {
        return kept.identity ? keys.num_rows() : static_cast<std::int32_t>(kept.kept_to_old.size());
    }
    /// The packed row that a query is of.
    [[nodiscard]] std::int32_t row_of(std::int32_t query) const {
        return kept.identity ? query : kept.kept_to_old[static_cast<std::size_t>(query)];
    }

    step<T> keys;
    step<T> values;
    std::vector<std::int32_t> cached_positions; // [requests][cached_stride]
    std::int64_t cached_stride = 0;
    up::attention_options options;
    std::vector<float> sinks; ///< options.params names them
    list_set lists;
    kept_set kept;
    bool means = false;
    std::vector<T> mean_keys, mean_values; // [max_blocks, kv_heads, head_dim]

  private:
    static std::vector<request> reseeded(std::vector<request> requests) {
        for (request& what : requests) {
            what.seed += 0x5eed;
        }
        return requests;
    }
};

/// Makes every row of a block its first. Attention sees that, the oracle doesn't.
template <class T>
void flatten_blocks(step<T>& what) {
    const std::int64_t row = std::int64_t{what.shape().kv_heads} * what.shape().head_dim;
    for (std::size_t s = 0; s + 1 < what.cu_segments.size(); ++s) {
        for (std::int32_t i = what.cu_segments[s]; i < what.cu_segments[s + 1]; ++i) {
            const std::int32_t in_block = (i - what.cu_segments[s]) % what.shape().block_rows;
            std::copy_n(what.keys.begin() + (i - in_block) * row, row, what.keys.begin() + i * row);
        }
    }
}

template <class T>
struct output {
    std::vector<T> rows; // [queries][heads][head_dim]
    std::vector<float> lse;
    std::int32_t heads = 0;
    std::int32_t head_dim = 0;

    [[nodiscard]] const T* at(std::int32_t query, std::int32_t head) const {
        return rows.data() + (std::int64_t{query} * heads + head) * head_dim;
    }
    /// Everything about one query, as bits.
    [[nodiscard]] std::vector<std::uint32_t> bits(std::int32_t query) const {
        std::vector<std::uint32_t> all;
        for (std::int32_t i = 0; i < heads * head_dim; ++i) {
            all.push_back(up::bit_cast<std::uint32_t>(up::to_float(at(query, 0)[i])));
        }
        for (std::int32_t head = 0; head < heads; ++head) {
            all.push_back(up::bit_cast<std::uint32_t>(lse[static_cast<std::size_t>(query * heads + head)]));
        }
        return all;
    }
};

template <class T>
bool same_bits(const output<T>& a, const output<T>& b) {
    return a.rows.size() == b.rows.size() && a.lse.size() == b.lse.size() &&
           (a.rows.empty() || (std::memcmp(a.rows.data(), b.rows.data(), a.rows.size() * sizeof(T)) == 0 &&
                               std::memcmp(a.lse.data(), b.lse.data(), a.lse.size() * sizeof(float)) == 0));
}

/// The queries of the kept rows, packed.
template <class T>
std::vector<T> packed_queries(const scene<T>& what) {
    const std::int64_t row = std::int64_t{what.keys.shape().heads} * what.keys.shape().head_dim;
    std::vector<T> packed;
    for (std::int32_t query = 0; query < what.num_queries(); ++query) {
        const T* from = what.keys.queries.data() + what.row_of(query) * row;
        packed.insert(packed.end(), from, from + row);
    }
    return packed;
}

using dynamic_policy = up::attention_policy<up::dynamic, up::dynamic>;

template <class Policy = dynamic_policy, class T, class Cache>
output<T> attend(scene<T>& what, const Cache& cached_keys, const Cache& cached_values) {
    const model& shape = what.keys.shape();
    const up::batch_view batch = what.keys.batch();
    const up::prefill_attention<Policy> attention(what.keys.tight_limits());
    const std::int32_t count = what.num_queries();
    const std::vector<T> queries = packed_queries(what);
    const std::int64_t wide = std::int64_t{shape.heads} * shape.head_dim + 3; // rows apart
    std::vector<T> rows(static_cast<std::size_t>((count + 1) * wide), up::from_float<T>(77.0f));
    output<T> result;
    result.heads = shape.heads;
    result.head_dim = shape.head_dim;
    result.lse.assign(static_cast<std::size_t>((count + 1) * shape.heads), 77.0f);
    const guarded_buffer memory(attention.workspace_bytes());
    const up::head_rows<const T> q{queries.data(), wide - 3,    shape.head_dim,
                                   count,          shape.heads, shape.head_dim};
    const up::head_rows<T> out{rows.data(), wide, shape.head_dim, count, shape.heads, shape.head_dim};
    const up::status done = attention.run(
        q, up::key_source<T, Cache>{what.keys.key_rows(), cached_keys},
        up::key_source<T, Cache>{what.values.key_rows(), cached_values}, what.options, batch,
        what.kept.view(batch), what.lists.view(shape.block_rows, batch.num_segments), what.mean_rows(), out,
        result.lse.data(), up::workspace(memory.data(), attention.workspace_bytes()));
    INFO(message(done));
    REQUIRE(done.ok());
    REQUIRE(memory.is_intact());
    for (std::int32_t query = 0; query <= count; ++query) { // what lies between and behind is as it was
        const auto from = rows.begin() + query * wide;
        const auto gap = query < count ? from + (wide - 3) : from;
        result.rows.insert(result.rows.end(), from, gap);
        REQUIRE(std::all_of(gap, from + wide, [](T value) { return up::to_float(value) == 77.0f; }));
    }
    REQUIRE(std::all_of(result.lse.begin() + count * shape.heads, result.lse.end(),
                        [](float value) { return value == 77.0f; }));
    result.lse.resize(static_cast<std::size_t>(count * shape.heads));
    return result;
}

/// With what is cached in pages of a table.
template <class Policy = dynamic_policy, class T>
output<T> attend(scene<T>& what) {
    const caches<T> k(what.keys);
    const caches<T> v(what.values);
    return attend<Policy>(what, k.page_table(), v.page_table());
}

} // namespace attend_test
