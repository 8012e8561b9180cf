// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Scenes whose query blocks pick their lists: the host lister in guarded memory, and the definition in
/// double precision.

#include "attend/check.hpp"

#include <uniprefill/select/query_block_lister.hpp>

#include <numeric>

namespace query_list_test {

using namespace attend_test;

/// Lists by query block with their arrays.
struct own_lists {
    up::block_lists out;
    std::vector<std::int64_t> offsets;
    std::vector<std::int32_t> blocks;
    up::block_list_report report;

    own_lists(const up::limits& bounds, std::int32_t heads, std::int32_t query_rows, std::int64_t capacity)
        : offsets(
              static_cast<std::size_t>(up::block_lists::most_query_blocks(bounds, query_rows) * heads + 1),
              INT64_MIN)
        , blocks(static_cast<std::size_t>(capacity), -7) {
        out.block_rows = bounds.block_rows;
        out.max_segments = bounds.max_segments;
        out.num_heads = heads;
        out.query_rows = query_rows;
        out.max_query_blocks = up::block_lists::most_query_blocks(bounds, query_rows);
        out.capacity = capacity;
        point();
    }
    own_lists(const own_lists& other) { *this = other; }
    own_lists& operator=(const own_lists& other) {
        out = other.out;
        offsets = other.offsets;
        blocks = other.blocks;
        report = other.report;
        point();
        return *this;
    }
    /// As a scene has them.
    [[nodiscard]] list_set as_set() const {
        list_set made;
        made.heads = out.num_heads;
        made.window = out.window;
        made.query_rows = out.query_rows;
        made.offsets = offsets;
        made.blocks = blocks;
        made.blocks.reserve(1);
        return made;
    }
    /// The blocks of a list, {-1} where it reads everything.
    [[nodiscard]] std::vector<std::int32_t> of(std::int64_t number) const {
        const up::block_lists::entries list = out.list(number);
        if (list.everything) {
            return {-1};
        }
        return {blocks.begin() + list.begin, blocks.begin() + list.begin + list.count};
    }

  private:
    void point() {
        out.offsets = offsets.data();
        out.blocks = blocks.data();
        out.report = &report;
    }
};

using dynamic_lister = up::query_block_lister<up::query_list_policy<up::dynamic, up::dynamic>>;

/// How a scene's lists are made.
struct recipe {
    std::int32_t heads = 1;
    up::query_sampling sampling;
    up::list_options<> options;
    std::int64_t capacity = -1; ///< -1: enough
};

template <class T>
own_lists make_room(const scene<T>& what, const recipe& how) {
    const up::limits bounds = what.keys.tight_limits();
    return {bounds, how.heads, how.sampling.query_rows,
            how.capacity >= 0 ? how.capacity
                              : up::block_lists::most_blocks(bounds, how.heads, how.sampling.query_rows)};
}

template <class T>
own_lists list_there(scene<T>& what, const recipe& how, bool want_report = true) {
    own_lists made = make_room(what, how);
    made.out.report = want_report ? made.out.report : nullptr;
    const up::batch_view batch = what.keys.batch();
    const dynamic_lister lister(what.keys.tight_limits(), how.sampling);
    const std::vector<T> queries = packed_queries(what);
    const model& shape = what.keys.shape();
    const up::head_rows<const T> q{queries.data(), std::int64_t{shape.heads} * shape.head_dim,
                                   shape.head_dim, what.num_queries(),
                                   shape.heads,    shape.head_dim};
    const caches<T> cached(what.keys);
    const guarded_buffer memory(lister.workspace_bytes());
    const up::status done =
        lister.run(q, up::key_source<T, up::page_table_cache<T>>{what.keys.key_rows(), cached.page_table()},
                   what.options, batch, what.kept.view(batch), how.options, made.out,
                   up::workspace(memory.data(), lister.workspace_bytes()));
    INFO(message(done));
    REQUIRE(done.ok());
    REQUIRE(memory.is_intact());
    return made;
}

/// What one list should be.
struct right_list {
    std::int64_t number = 0;
    bool everything = false;
    std::vector<bool> always;    // [blocks up to the query block's last row] listed whatever they weigh
    std::vector<double> masses;  // [blocks] over the list's heads and samples
    std::vector<bool> candidate; // [blocks]
};

/// The lists of a segment by the definition, one key after the other.
template <class T>
std::vector<right_list> right_lists(const scene<T>& what, const recipe& how, std::int32_t segment) {
    const model& shape = what.keys.shape();
    const std::size_t r = what.request_of(segment);
    const request_tensors tensors(what, r);
    const request& request = what.keys.requests()[r];
    const auto at = [](const std::vector<std::int32_t>& numbers, std::int32_t i) {
        return numbers[static_cast<std::size_t>(i)];
    };
    const std::int32_t begin = at(what.keys.cu_segments, segment);
    const std::int32_t rows = at(what.keys.cu_segments, segment + 1) - begin;
    const std::int32_t request_begin = what.keys.cu_seqlens[r];
    const int context = what.keys.cached_lens[r] + begin - request_begin;
    const std::int32_t first_query = what.kept.identity ? begin : at(what.kept.cu_segments, segment);
    const std::int32_t queries =
        what.kept.identity ? rows : at(what.kept.cu_segments, segment + 1) - first_query;
    const std::int32_t Q = how.sampling.query_rows;
    const int G = shape.block_rows;
    const bool scored = (request.tag == up::request_tag::prefill || request.tag == up::request_tag::chunk) &&
                        request.options.enabled != 0 && rows >= request.options.min_length;
    const std::int32_t heads_of_list = shape.heads / how.heads;
    std::vector<right_list> made;
    for (std::int32_t j = 0; j * Q < queries; ++j) {
        const std::int32_t count = std::min(Q, queries - j * Q);
        const std::int32_t last = what.row_of(first_query + j * Q + count - 1);
        const int position = at(what.keys.positions, last);
        const auto blocks = static_cast<std::size_t>((last - begin) / G + 1);
        std::vector<bool> windowed(blocks, false); // for every row of the query block
        bool in_window = false;
        std::vector<bool> sinks(blocks, false);
        for (std::int32_t row = begin; row <= last; ++row) {
            const auto block = static_cast<std::size_t>((row - begin) / G);
            const int there = at(what.keys.positions, row);
            in_window = in_window || (how.options.window > 0 && there > position - how.options.window);
            if (in_window) {
                windowed[block] = true;
            }
            if (there < how.options.sink) {
                sinks[block] = true;
            }
        }
        bool choice = false;
        for (std::size_t block = 0; block < blocks; ++block) {
            choice = choice || (!sinks[block] && !windowed[block]);
        }
        // Softmax shares by block: attention over values that say which block a key is of.
        std::vector<int> samples;
        for (std::int32_t i = count - 1; i >= 0; i -= how.sampling.sample) {
            samples.push_back(what.row_of(first_query + j * Q + i));
        }
        oracle::tensor q(static_cast<int>(samples.size()), shape.heads, shape.head_dim);
        std::vector<int> positions;
        for (std::size_t i = 0; i < samples.size(); ++i) {
            positions.push_back(at(what.keys.positions, samples[i]));
            for (int head = 0; head < shape.heads; ++head) {
                for (int k = 0; k < shape.head_dim; ++k) {
                    q.at(static_cast<int>(i), head, k) = tensors.q.at(samples[i] - request_begin, head, k);
                }
            }
        }
        oracle::tensor shares;
        if (scored && choice) {
            const int keys = tensors.k.rows;
            oracle::tensor indicator(keys, shape.kv_heads, static_cast<int>(blocks));
            for (int key = context; key < keys; ++key) {
                const int block = (key - context) / G;
                for (int head = 0; head < shape.kv_heads && block < static_cast<int>(blocks); ++head) {
                    indicator.at(key, head, block) = 1;
                }
            }
            shares = oracle::masked_attention(
                q, tensors.k, indicator, oracle_parameters(what.options.params, shape),
                oracle::stored_causal_mask(positions, tensors.key_positions, tensors.key_positions,
                                           what.options.window));
        }
        for (std::int32_t list = 0; list < how.heads; ++list) {
            right_list one;
            one.number = std::int64_t{first_query / Q + segment + j} * how.heads + list;
            one.everything = !scored || !choice;
            one.always = sinks;
            one.masses.assign(blocks, 0.0);
            one.candidate.assign(blocks, true);
            for (std::size_t block = 0; block < blocks; ++block) {
                if (how.options.rule.scope == up::mass_scope::free) {
                    one.candidate[block] = !sinks[block] && !windowed[block];
                }
                for (std::int32_t head = list * heads_of_list;
                     !one.everything && head < (list + 1) * heads_of_list; ++head) {
                    for (int i = 0; i < q.rows; ++i) {
                        one.masses[block] += shares.at(i, head, static_cast<int>(block));
                    }
                }
            }
            made.push_back(one);
        }
    }
    return made;
}

/// How near the cut a block's mass may lie and be on either side, as a share of the sampled rows and heads:
/// a score's error makes of each share at most 1e-5 of itself.
inline double cut_tolerance(const recipe& how, const model& shape) {
    const std::int32_t samples = (how.sampling.query_rows - 1) / how.sampling.sample + 1;
    return 2e-5 * samples * (shape.heads / how.heads);
}

/// Whether a top-p list is the right one, blocks within @p tolerance of the cut aside.
/// @return how many of those there are
inline int check_list(const right_list& right, const std::vector<std::int32_t>& came, double p,
                      double tolerance) {
    std::vector<bool> listed(right.masses.size(), false);
    for (const std::int32_t block : came) {
        REQUIRE((block >= 0 && block < static_cast<std::int32_t>(listed.size())));
        listed[static_cast<std::size_t>(block)] = true;
    }
    REQUIRE(std::is_sorted(came.begin(), came.end()));
    // The fewest that hold p, heaviest first.
    std::vector<std::size_t> order;
    double total = 0;
    for (std::size_t block = 0; block < listed.size(); ++block) {
        if (right.candidate[block]) {
            order.push_back(block);
            total += right.masses[block];
        }
    }
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return right.masses[a] > right.masses[b]; });
    double held = 0;
    std::size_t chosen = 0;
    while (chosen < order.size() && held < p * total) {
        held += right.masses[order[chosen++]];
    }
    const double cut = chosen > 0 ? right.masses[order[chosen - 1]] : 0.0;
    const double next = chosen < order.size() ? right.masses[order[chosen]] : 0.0;
    const bool is_tight = held - cut + tolerance >= p * total || held - tolerance < p * total;
    int near = 0;
    for (std::size_t k = 0; k < order.size(); ++k) {
        const std::size_t block = order[k];
        const bool wanted = k < chosen;
        if (right.always[block] || listed[block] == wanted) {
            continue;
        }
        const bool at_cut = right.masses[block] <= cut + tolerance && right.masses[block] >= next - tolerance;
        CAPTURE(block, right.masses[block], cut, next, total, held, wanted, tolerance);
        REQUIRE((at_cut && (is_tight || std::abs(cut - next) <= tolerance)));
        ++near;
    }
    for (std::size_t block = 0; block < listed.size(); ++block) {
        CAPTURE(block);
        if (right.always[block]) {
            REQUIRE(listed[block]);
        } else {
            REQUIRE((right.candidate[block] || !listed[block]));
        }
    }
    return near;
}

/// All lists of a scene. @param tolerance in units of cut_tolerance() @return how many blocks lie at a cut,
/// and how many lists were compared
template <class T>
std::pair<int, int> check_lists(const scene<T>& what, const recipe& how, const own_lists& came,
                                double tolerance = 1) {
    std::pair<int, int> counted{0, 0};
    std::int64_t massless = 0;
    std::vector<bool> met(came.offsets.size() - 1, false);
    const double p =
        static_cast<double>(how.options.rule.p.value) / static_cast<double>(up::unit_fraction::one);
    for (std::int32_t segment = 0; segment < what.keys.num_segments(); ++segment) {
        for (const right_list& right : right_lists(what, how, segment)) {
            INFO("segment " << segment << ", list " << right.number << " of " << how.heads << " heads");
            const std::vector<std::int32_t> list = came.of(right.number);
            met[static_cast<std::size_t>(right.number)] = true;
            const bool everything = list == std::vector<std::int32_t>{-1};
            double total = 0;
            for (std::size_t block = 0; block < right.masses.size(); ++block) {
                total += right.candidate[block] ? right.masses[block] : 0;
            }
            const bool is_massless = !right.everything && total < 1e-9;
            REQUIRE(everything == (right.everything || is_massless));
            massless += is_massless ? 1 : 0;
            if (!everything) {
                counted.first +=
                    check_list(right, list, p, tolerance * cut_tolerance(how, what.keys.shape()));
                ++counted.second;
            }
        }
    }
    const std::int64_t numbers =
        (what.num_queries() / how.sampling.query_rows + what.keys.num_segments()) * how.heads;
    for (std::int64_t number = 0; number < numbers; ++number) {
        REQUIRE((met[static_cast<std::size_t>(number)] || came.of(number).empty()));
    }
    REQUIRE(came.out.place_of(came.offsets[static_cast<std::size_t>(numbers)]) == came.report.wanted);
    REQUIRE(came.report.unfitting == 0);
    REQUIRE(came.report.untrusted == massless);
    return counted;
}

template <class T>
scene<T> any_scene(generator& random, std::uint64_t number, recipe& how, bool any_shape = true) {
    model shape;
    shape.kv_heads = random.among({1, 2, 3});
    shape.heads = shape.kv_heads * random.among({1, 3, 4, 8});
    if (any_shape) {
        shape.head_dim = random.among({1, 7, 16, 64});
        shape.block_rows = random.among({8, 16, 23, 64});
    }
    scene<T> what = any_rows<T>(random, shape, number);
    how.heads = random.chance(50) ? shape.heads : shape.kv_heads;
    how.sampling = {random.among({1, 5, 16, 64, 100}), random.among({1, 3, 8, 1000})};
    how.options.rule = up::selection_rule::top_p(
        random.among({0.3, 0.9, 0.99}), random.chance(50) ? up::mass_scope::all : up::mass_scope::free);
    how.options.sink = random.among({0, 4, 40});
    how.options.window = random.among({0, 1, 20, 64});
    return what;
}

inline std::string described(const model& shape, const recipe& how, std::uint64_t number) {
    return "case " + std::to_string(number) + ", seed " + std::to_string(uniprefill_test::seed()) + ": " +
           std::to_string(shape.heads) + "/" + std::to_string(shape.kv_heads) + " heads, d " +
           std::to_string(shape.head_dim) + ", G " + std::to_string(shape.block_rows) + ", one of " +
           std::to_string(how.sampling.sample) + " of " + std::to_string(how.sampling.query_rows) +
           " rows, sink " + std::to_string(how.options.sink) + ", window " +
           std::to_string(how.options.window) + ", lists of " + std::to_string(how.heads) + " heads";
}

} // namespace query_list_test
