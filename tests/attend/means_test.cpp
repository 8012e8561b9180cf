// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Means of blocks: what they are, and attention that meets them in place of the blocks that it skips.

#include "check.hpp"
#include "support/scale.hpp"

namespace up = uniprefill;
using namespace attend_test;

namespace {

/// Steps whose lists leave blocks out, with means.
template <class T>
scene<T> any_scene(generator& random, std::uint64_t number) {
    model shape;
    shape.kv_heads = random.among({1, 1, 2});
    shape.heads = shape.kv_heads * random.among({1, 3, 4, 8});
    shape.head_dim = random.among({64, 128, 256, 1, 7, 33, 100});
    shape.block_rows = random.among({8, 16, 23, 32, 64});
    std::vector<request> requests;
    for (std::int32_t r = 1 + random.below(3); r > 0; --r) {
        request one = random.any_request(shape);
        one.segments.push_back(5 * shape.block_rows + random.below(90));
        requests.push_back(one);
    }
    scene<T> what(shape, requests);
    what.options.params = random.any_params(shape, what.sinks);
    if (random.chance(40)) {
        what.set_window(random.among({1, 17, 64, 150, 1000000000}));
    }
    if (random.chance(50)) {
        what.keep_rows([&](std::uint64_t seed, std::int32_t row) {
            return coin(seed + number, 2, 0, static_cast<std::uint64_t>(row), 40);
        });
    }
    const std::int32_t heads = random.chance(60) ? shape.heads : shape.kv_heads;
    const auto percent = static_cast<std::uint32_t>(random.among({0, 10, 40, 80}));
    const std::int32_t window = random.among({0, 1, 20, 64});
    const auto pick = [&](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                          std::int32_t query_block, int block) {
        const auto list = static_cast<std::uint64_t>((query_block * 100 + segment) * 1000 + head);
        return block < 0 ? !coin(seed + number, 5, list, 0, 20)
                         : coin(seed + number, 1, list, static_cast<std::uint64_t>(block), percent);
    };
    if (random.chance(50)) {
        what.list_own_blocks(heads, window, random.among({1, 7, 16, 40, 64, 100, 1000}), pick);
    } else {
        what.list_blocks(heads, window,
                         [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                             return pick(seed, segment, head, 0, block);
                         });
    }
    what.use_means();
    return what;
}

} // namespace

TEMPLATE_TEST_CASE("means of blocks are their rows' means", "[attend]", float, up::half, up::bfloat16) {
    for (const std::uint32_t number : uniprefill_test::spread_cases(30, 5)) {
        generator random(uniprefill_test::seed() * 1000 + number);
        scene<TestType> what = any_scene<TestType>(random, number);
        const model& shape = what.keys.shape();
        INFO("case " << number << ", seed " << uniprefill_test::seed() << ", d " << shape.head_dim << ", G "
                     << shape.block_rows);
        const std::int32_t row = shape.kv_heads * shape.head_dim;
        std::vector<bool> whole(what.mean_keys.size() / static_cast<std::size_t>(row), false);
        for (std::size_t s = 0; s + 1 < what.keys.cu_segments.size(); ++s) {
            const std::int32_t begin = what.keys.cu_segments[s];
            const std::int32_t blocks = (what.keys.cu_segments[s + 1] - begin) / shape.block_rows;
            for (std::int32_t block = 0; block < blocks; ++block) {
                const std::size_t at =
                    static_cast<std::size_t>(begin / shape.block_rows) + s + static_cast<std::size_t>(block);
                REQUIRE(!whole[at]);
                whole[at] = true;
                for (const bool of_keys : {true, false}) {
                    const auto& rows = of_keys ? what.keys.keys : what.values.keys;
                    const auto& means = of_keys ? what.mean_keys : what.mean_values;
                    for (std::int32_t i = 0; i < row; ++i) {
                        double sum = 0;
                        double size = 0;
                        for (std::int32_t in_block = 0; in_block < shape.block_rows; ++in_block) {
                            const std::int64_t from = begin + block * shape.block_rows + in_block;
                            const auto one = static_cast<double>(
                                up::to_float(rows[static_cast<std::size_t>(from * row + i)]));
                            sum += one;
                            size += std::abs(one);
                        }
                        const double right = sum / shape.block_rows;
                        const double most = rounding<TestType>() * std::abs(right) + 0x1p-23 * size + 0x1p-25;
                        const auto came = static_cast<double>(up::to_float(
                            means[at * static_cast<std::size_t>(row) + static_cast<std::size_t>(i)]));
                        if (!(std::abs(came - right) <= most)) {
                            CAPTURE(s, block, i, came, right, most);
                            REQUIRE(std::abs(came - right) <= most);
                        }
                    }
                }
            }
        }
        for (std::size_t at = 0; at < whole.size(); ++at) { // nothing else was written
            const float first = up::to_float(what.mean_keys[at * static_cast<std::size_t>(row)]);
            REQUIRE(up::is_non_finite(first) == !whole[at]);
        }
    }
}

TEMPLATE_TEST_CASE("attention with means of random steps", "[attend]", float, up::half, up::bfloat16) {
    for (const std::uint32_t number : uniprefill_test::spread_cases(60, 8)) {
        generator random(uniprefill_test::seed() * 1000 + 300 + number);
        scene<TestType> what = any_scene<TestType>(random, number);
        const model& shape = what.keys.shape();
        INFO("case " << number << ", seed " << uniprefill_test::seed() << ": " << shape.heads << '/'
                     << shape.kv_heads << " heads, d " << shape.head_dim << ", G " << shape.block_rows
                     << ", window " << what.options.window << ", lists " << what.lists.heads << " of "
                     << what.lists.window << " by " << what.lists.query_rows << " rows, kept "
                     << what.num_queries() << '/' << what.keys.num_rows() << ", softcap "
                     << what.options.params.softcap);
        check(what, attend(what), 24);
    }
}

TEST_CASE("attention with means: blocks by the hundred", "[attend]") {
    // More than a tile of means, and lists that leave some of their tiles nothing.
    scene<float> what({3, 1, 24, 8, 8}, {{4, up::request_tag::chunk, 30, {1500}}});
    what.list_blocks(3, 20, [](std::uint64_t, std::int32_t, std::int32_t head, int block) {
        return head == 0 ? block / 64 == 1 : head == 1 ? block % 3 == 0 : block < 70;
    });
    what.use_means();
    check(what, attend(what), 60);
}

TEST_CASE("attention with means: full lists give the bits of none", "[attend]") {
    const model shape{6, 2, 40, 16, 8};
    const std::vector<request> requests{{11, up::request_tag::prefill, 0, {333}},
                                        {13, up::request_tag::chunk, 50, {100, 0, 129, 77}}};
    scene<float> dense(shape, requests);
    for (const std::int32_t window : {0, 30, 100000}) {
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            scene<float> listed(shape, requests);
            listed.list_blocks(heads, window, [](auto, auto, auto, auto) { return true; });
            listed.use_means();
            REQUIRE(same_bits(attend(dense), attend(listed)));
            // Nor are they looked at.
            listed.mean_keys.assign(listed.mean_keys.size(), std::numeric_limits<float>::quiet_NaN());
            REQUIRE(same_bits(attend(dense), attend(listed)));
        }
    }
    // Nor are they where every list of a query block reads everything, or all of them do by name.
    for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
        for (const bool by_name : {false, true}) {
            scene<float> everything(shape, requests);
            everything.list_own_blocks(heads, 30, 48, [&](auto, auto, auto, auto, int) { return by_name; });
            everything.use_means();
            everything.mean_keys.assign(everything.mean_keys.size(), std::numeric_limits<float>::quiet_NaN());
            everything.mean_values = everything.mean_keys;
            CAPTURE(heads, by_name);
            REQUIRE(same_bits(attend(dense), attend(everything)));
        }
    }
    // Without lists nothing is skipped.
    scene<float> unlisted(shape, requests);
    unlisted.use_means();
    REQUIRE(same_bits(attend(dense), attend(unlisted)));
    // A list without means is another matter.
    scene<float> some(shape, requests);
    some.list_blocks(shape.heads, 30, [](auto, auto, auto, int block) { return block % 2 == 0; });
    const output<float> without = attend(some);
    some.use_means();
    REQUIRE(!same_bits(attend(some), without));
}

TEMPLATE_TEST_CASE("attention with means of blocks of equal rows is dense attention", "[attend]", float,
                   up::half) {
    const model shape{6, 2, 64, 16, 8};
    const std::vector<request> requests{{11, up::request_tag::prefill, 0, {333}},
                                        {13, up::request_tag::chunk, 50, {100, 0, 129, 77}}};
    for (const float softcap : {0.0f, 5.0f}) {
        for (const std::int32_t window : {1, 50}) {
            scene<TestType> what(shape, requests);
            what.options.params.softcap = softcap;
            flatten_blocks(what.keys);
            flatten_blocks(what.values);
            const output<TestType> dense = attend(what);
            what.list_blocks(shape.heads, window,
                             [](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                                 return coin(seed, 3, static_cast<std::uint64_t>(segment * 10 + head),
                                             static_cast<std::uint64_t>(block), 30);
                             });
            const output<TestType> without = attend(what);
            what.use_means();
            const output<TestType> with = attend(what);
            double worst = 0, uncorrected = 0;
            for (std::size_t i = 0; i < dense.rows.size(); ++i) {
                const auto right = static_cast<double>(up::to_float(dense.rows[i]));
                worst = std::max(worst, std::abs(static_cast<double>(up::to_float(with.rows[i])) - right));
                uncorrected = std::max(uncorrected,
                                       std::abs(static_cast<double>(up::to_float(without.rows[i])) - right));
            }
            for (std::size_t i = 0; i < dense.lse.size(); ++i) {
                worst = std::max(worst, static_cast<double>(std::abs(with.lse[i] - dense.lse[i])));
            }
            CAPTURE(worst, uncorrected, softcap, window);
            // Rows of half are equal to a rounding; their sums are off by as much as single precision is.
            REQUIRE(worst <= 8 * rounding<TestType>() + 2e-5);
            REQUIRE(uncorrected > 0.1);
        }
    }
}

TEST_CASE("means that don't fit are refused", "[attend]") {
    scene<float> what({2, 1, 16, 16, 8}, {{3, up::request_tag::prefill, 0, {50}}});
    what.list_blocks(2, 0, [](auto, auto, auto, int block) { return block == 1; });
    what.use_means();
    const up::limits bounds = what.keys.tight_limits();
    const up::prefill_attention<dynamic_policy> attention(bounds);
    const guarded_buffer memory(attention.workspace_bytes());
    const std::vector<float> queries = packed_queries(what);
    std::vector<float> out(queries.size(), 77.0f);
    const up::batch_view batch = what.keys.batch();
    const auto run = [&](const up::block_means<float>& means) {
        const up::head_rows<const float> q{queries.data(), 32, 16, 50, 2, 16};
        return attention.run(q, up::key_source<float>{what.keys.key_rows(), {}},
                             up::key_source<float>{what.values.key_rows(), {}}, what.options, batch,
                             what.kept.view(batch), what.lists.view(16, 1), means,
                             {out.data(), 32, 16, 50, 2, 16}, nullptr,
                             up::workspace(memory.data(), attention.workspace_bytes()));
    };
    const auto average = [&](const up::block_means<float>& means) {
        return up::average_blocks(what.keys.key_rows(), what.values.key_rows(), batch, bounds, means);
    };
    const auto names = [](const up::status& came, const char* argument) {
        return came.code == up::status_code::invalid_argument && std::strcmp(came.argument, argument) == 0;
    };
    const auto refused = [&](const up::block_means<float>& means, const char* argument) {
        CAPTURE(argument);
        REQUIRE(names(run(means), argument));
        REQUIRE(names(average(means), argument));
    };
    const up::block_means<float> good = what.mean_rows();
    for (const bool of_keys : {true, false}) {
        const char* const argument = of_keys ? "means.keys" : "means.values";
        const auto changed = [&](auto change) {
            up::block_means<float> means = good;
            change(of_keys ? means.keys : means.values);
            return means;
        };
        refused(changed([](auto& rows) { rows.num_rows -= 1; }), argument);
        refused(changed([](auto& rows) { rows.num_heads = 2; }), argument);
        refused(changed([](auto& rows) { rows.head_dim = 8; }), argument);
    }
    up::block_means<float> null = good;
    null.values.data = nullptr;
    refused(null, "means.values");
    null.keys.data = nullptr;
    REQUIRE(names(average(null), "means.keys"));
    REQUIRE(std::all_of(out.begin(), out.end(), [](float value) { return value == 77.0f; }));
    up::head_rows<const float> short_rows = what.values.key_rows();
    short_rows.num_rows = 49;
    REQUIRE(names(up::average_blocks(what.keys.key_rows(), short_rows, batch, bounds, good), "values"));
    REQUIRE(run(null).ok()); // none
    REQUIRE(run(good).ok());
    // What carve() takes is enough for the limits.
    up::workspace counting;
    static_cast<void>(up::block_means<float>::carve(counting, bounds));
    const guarded_buffer carved(counting.bytes_used());
    up::workspace pieces(carved.data(), counting.bytes_used());
    const auto means = up::block_means<float>::carve(pieces, bounds);
    REQUIRE(average(means).ok());
    REQUIRE(carved.is_intact());
    REQUIRE(std::memcmp(means.values.data, good.values.data, 3 * 16 * sizeof(float)) == 0);
}
