// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Where attention has few keys or none, numbers are extreme, or something isn't a number.

#include "check.hpp"

namespace up = uniprefill;
using namespace attend_test;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();
constexpr float not_a_number = std::numeric_limits<float>::quiet_NaN();

const auto nothing = [](std::uint64_t, std::int32_t, std::int32_t, int) { return false; };

/// Keys that all score alike, and values that say which token they are of: element t of token t is 1. A row's
/// output is then 1 / n at the tokens that it reads, and 0 elsewhere.
template <class T>
void tell_tokens_apart(scene<T>& what) {
    const model& shape = what.keys.shape();
    const std::int64_t token = std::int64_t{shape.kv_heads} * shape.head_dim;
    for (std::size_t r = 0; r < what.keys.data.size(); ++r) {
        auto& keys = what.keys.data[r].keys;
        auto& values = what.values.data[r].keys;
        std::fill(keys.begin(), keys.end(), up::from_float<T>(0));
        std::fill(values.begin(), values.end(), up::from_float<T>(0));
        const auto tokens = static_cast<std::int64_t>(values.size()) / token;
        for (std::int64_t i = 0; i < tokens; ++i) {
            for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
                const std::int64_t at = i * token + std::int64_t{head} * shape.head_dim + i % shape.head_dim;
                values[static_cast<std::size_t>(at)] = up::from_float<T>(1);
            }
        }
        const auto row = static_cast<std::ptrdiff_t>(what.keys.cu_seqlens[r] * token);
        const auto cached = static_cast<std::ptrdiff_t>(what.keys.cached_lens[r] * token);
        std::copy(keys.begin() + cached, keys.end(), what.keys.keys.begin() + row);
        std::copy(values.begin() + cached, values.end(), what.values.keys.begin() + row);
    }
}

std::vector<std::int32_t> tokens_read(const output<float>& got, std::int32_t query, std::int32_t head) {
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < got.head_dim; ++i) {
        if (got.at(query, head)[i] > 0) {
            tokens.push_back(i);
        }
    }
    for (const std::int32_t token : tokens) {
        REQUIRE(std::abs(got.at(query, head)[token] * static_cast<float>(tokens.size()) - 1) < 1e-6f);
    }
    return tokens;
}

std::vector<std::int32_t> range(std::int32_t begin, std::int32_t end) {
    std::vector<std::int32_t> all;
    for (; begin < end; ++begin) {
        all.push_back(begin);
    }
    return all;
}

} // namespace

TEST_CASE("attention: what is read, token by token", "[attend]") {
    // 10 cached tokens, a segment of 30 rows, one of 20; blocks of 8.
    scene<float> what({2, 1, 64, 8, 8}, {{1, up::request_tag::chunk, 10, {30, 20}}});
    tell_tokens_apart(what);
    output<float> got = attend(what);
    REQUIRE(tokens_read(got, 0, 0) == range(0, 11));
    REQUIRE(tokens_read(got, 49, 1) == range(0, 60));

    what.list_blocks(2, 0, nothing);
    got = attend(what);
    REQUIRE(tokens_read(got, 0, 0) == range(0, 10)); // not even itself
    REQUIRE(tokens_read(got, 29, 0) == range(0, 10));
    REQUIRE(tokens_read(got, 30, 0) == range(0, 40)); // earlier segments are context
    REQUIRE(tokens_read(got, 49, 0) == range(0, 40));

    what.list_blocks(2, 0, [](auto, std::int32_t segment, std::int32_t head, int block) {
        return segment == 1 && head == 1 && block == 1;
    });
    got = attend(what);
    REQUIRE(tokens_read(got, 49, 0) == range(0, 40));
    auto expected = range(0, 40);
    for (const std::int32_t token : range(48, 56)) {
        expected.push_back(token);
    }
    REQUIRE(tokens_read(got, 49, 1) == expected);
    expected = range(0, 40);
    expected.push_back(48);
    REQUIRE(tokens_read(got, 30 + 8, 1) == expected); // of a listed block, what isn't after it

    what.list_blocks(1, 1, nothing); // own blocks
    got = attend(what);
    expected = range(0, 10);
    for (const std::int32_t token : range(10 + 8, 10 + 14)) {
        expected.push_back(token);
    }
    REQUIRE(tokens_read(got, 13, 0) == expected);
    what.list_blocks(1, 7, nothing); // row 13: positions from 17 on, row 7 is of block 0
    got = attend(what);
    REQUIRE(tokens_read(got, 13, 0) == range(0, 24));
    REQUIRE(tokens_read(got, 14, 0).size() == 10 + 7);
}

TEST_CASE("attention: what rows of a query block read, token by token", "[attend]") {
    // 10 cached tokens, segments of 30 and 20 rows; blocks of 8; lists of 12 query rows each.
    scene<float> what({2, 1, 64, 8, 8}, {{1, up::request_tag::chunk, 10, {30, 20}}});
    tell_tokens_apart(what);
    // Query block j of a segment lists block j, but block 1 of the second segment has no list.
    const auto own = [](auto, std::int32_t segment, std::int32_t, std::int32_t query_block, int block) {
        return block < 0 ? segment == 0 || query_block == 0 : block == query_block;
    };
    const auto expected = [](std::int32_t context, std::int32_t begin, std::int32_t end) {
        auto tokens = range(0, context);
        for (const std::int32_t token : range(begin, end)) {
            tokens.push_back(token);
        }
        return tokens;
    };
    for (const std::int32_t heads : {1, 2}) {
        what.list_own_blocks(heads, 0, 12, own);
        const output<float> got = attend(what);
        REQUIRE(tokens_read(got, 11, 0) == range(0, 18));
        REQUIRE(tokens_read(got, 12, 1) == expected(10, 18, 23));
        REQUIRE(tokens_read(got, 23, 1) == expected(10, 18, 26));
        REQUIRE(tokens_read(got, 24, 0) == expected(10, 26, 34)); // the block of its own and all of it
        REQUIRE(tokens_read(got, 30 + 11, 0) == range(0, 48));
        REQUIRE(tokens_read(got, 30 + 12, 0) == range(0, 53)); // no list
        REQUIRE(tokens_read(got, 30 + 19, 1) == range(0, 60));
    }
    // Query blocks count the rows that are kept: here rows 0, 3, 6, ... of each segment.
    what.keep_rows([](auto, std::int32_t row) { return (row < 30 ? row : row - 30) % 3 == 0; });
    what.list_own_blocks(1, 1, 4, own);
    const output<float> got = attend(what);
    REQUIRE(tokens_read(got, 4, 0) == expected(10, 18, 23)); // row 12
    REQUIRE(tokens_read(got, 9, 1) == expected(10, 26, 38)); // row 27: listed block 2, and its own block 3
    REQUIRE(tokens_read(got, 10 + 3, 0) == expected(48, 48, 50)); // row 9 of the second: block 1 is its own
}

TEST_CASE("attention: lists by query block that are all alike are those of a segment", "[attend]") {
    scene<up::half> what({6, 2, 72, 16, 8}, {{1, up::request_tag::chunk, 40, {130, 0, 75}},
                                             {2, up::request_tag::prefill, 0, {7}},
                                             {3, up::request_tag::prefill, 0, {200}}});
    const auto pick = [](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
        return coin(seed, static_cast<std::uint64_t>(segment), static_cast<std::uint64_t>(head),
                    static_cast<std::uint64_t>(block), 50);
    };
    const output<up::half> dense = attend(what);
    for (const bool drop : {false, true}) {
        if (drop) {
            what.keep_rows([](std::uint64_t seed, std::int32_t row) {
                return coin(seed, 9, 0, static_cast<std::uint64_t>(row), 60);
            });
        }
        for (const std::int32_t heads : {2, 6}) {
            what.list_blocks(heads, 20, pick);
            const output<up::half> plain = attend(what);
            for (const std::int32_t query_rows : {1, 16, 33, 1000}) {
                CAPTURE(drop, heads, query_rows);
                what.list_own_blocks(
                    heads, 20, query_rows,
                    [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, auto, int block) {
                        return block < 0 || pick(seed, segment, head, block);
                    });
                REQUIRE(same_bits(attend(what), plain));
                what.list_own_blocks(heads, 20, query_rows,
                                     [](auto, auto, auto, auto, int) { return false; });
                REQUIRE((drop || same_bits(attend(what), dense)));
            }
        }
    }
}

TEST_CASE("attention: a window covers original positions", "[attend]") {
    // Tokens at positions 0, 10, 20, ...: 3 cached, 20 rows.
    scene<float> what({1, 1, 64, 8, 8}, {{1, up::request_tag::chunk, 3, {20}}});
    tell_tokens_apart(what);
    for (std::int32_t i = 0; i < 20; ++i) {
        what.keys.positions[static_cast<std::size_t>(i)] = 30 + 10 * i;
    }
    what.cached_positions = {0, 10, 20};
    what.set_window(1);
    REQUIRE(tokens_read(attend(what), 5, 0) == range(8, 9));
    what.set_window(10);
    REQUIRE(tokens_read(attend(what), 5, 0) == range(8, 9));
    what.set_window(11);
    REQUIRE(tokens_read(attend(what), 5, 0) == range(7, 9));
    what.set_window(61);
    REQUIRE(tokens_read(attend(what), 5, 0) == range(2, 9));
    what.set_window(81);
    REQUIRE(tokens_read(attend(what), 5, 0) == range(0, 9));
    what.set_window(INT32_MAX);
    REQUIRE(tokens_read(attend(what), 19, 0) == range(0, 23));
    // The lists' window counts positions too: rows 8 to 12 are at 110 to 150.
    what.set_window(0);
    what.list_blocks(1, 51, nothing);
    auto expected = range(0, 3);
    for (const std::int32_t token : range(3, 3 + 13)) {
        expected.push_back(token);
    }
    REQUIRE(tokens_read(attend(what), 12, 0) == expected); // row 7 is in it, so all of block 0
    what.list_blocks(1, 41, nothing);
    expected = range(0, 3);
    for (const std::int32_t token : range(3 + 8, 3 + 13)) {
        expected.push_back(token);
    }
    REQUIRE(tokens_read(attend(what), 12, 0) == expected);
    // Both: the model's window cuts blocks, and context.
    what.set_window(21);
    REQUIRE(tokens_read(attend(what), 12, 0) == range(3 + 10, 3 + 13));
}

TEST_CASE("attention: where cached tokens are when nothing says so", "[attend]") {
    scene<float> what({1, 1, 64, 8, 8}, {{1, up::request_tag::chunk, 30, {20}}});
    tell_tokens_apart(what);
    what.options.window = 15;
    const output<float> got = attend(what);
    REQUIRE(tokens_read(got, 0, 0) == range(16, 31));
    REQUIRE(tokens_read(got, 19, 0) == range(35, 50));
}

TEST_CASE("attention: rows that read nothing", "[attend]") {
    scene<float> what({2, 1, 20, 8, 8}, {{1, up::request_tag::prefill, 0, {30}}});
    what.list_blocks(2, 0, [](auto, auto, std::int32_t head, int block) { return head == 1 && block == 1; });
    output<float> got = attend(what);
    for (std::int32_t row = 0; row < 30; ++row) {
        for (const std::int32_t head : {0, 1}) {
            if (head == 1 && row >= 8) {
                continue;
            }
            for (std::int32_t i = 0; i < 20; ++i) {
                REQUIRE(up::bit_cast<std::uint32_t>(got.at(row, head)[i]) == 0);
            }
            REQUIRE(got.lse[static_cast<std::size_t>(2 * row + head)] == -infinity);
        }
    }
    check(what, got);
    what.sinks = {1.5f, -80.0f};
    what.options.params.sink_logits = what.sinks.data();
    got = attend(what);
    REQUIRE(std::abs(got.lse[0] - 1.5f) < 1e-6f);
    REQUIRE(std::abs(got.lse[1] + 80.0f) < 1e-4f);
    REQUIRE(got.at(0, 0)[3] == 0);
    check(what, got);
}

TEST_CASE("attention: a sink takes its share", "[attend]") {
    scene<float> what({2, 1, 64, 8, 8}, {{1, up::request_tag::prefill, 0, {4}}});
    tell_tokens_apart(what);
    what.sinks = {0.0f, -1e4f};
    what.options.params.sink_logits = what.sinks.data();
    const output<float> got = attend(what);
    REQUIRE(std::abs(got.at(3, 0)[0] - 0.2f) < 1e-6f); // four keys and a sink, all of logit 0
    REQUIRE(std::abs(got.at(3, 1)[0] - 0.25f) < 1e-6f);
    REQUIRE(std::abs(got.lse[6] - std::log(5.0f)) < 1e-6f);
    what.sinks = {1e4f, 100.0f};
    const output<float> swallowed = attend(what);
    REQUIRE(swallowed.at(3, 0)[0] == 0);
    REQUIRE(swallowed.lse[6] == 1e4f);
    check(what, swallowed);
}

TEST_CASE("attention: steps of nothing", "[attend]") {
    scene<float> no_requests({2, 1, 20, 8, 8}, {});
    REQUIRE(attend(no_requests).rows.empty());
    scene<float> no_rows({2, 1, 20, 8, 8},
                         {{1, up::request_tag::prefill, 0, {0}}, {2, up::request_tag::chunk, 9, {0, 0}}});
    no_rows.list_blocks(2, 3, nothing);
    REQUIRE(attend(no_rows).rows.empty());
    scene<float> none_kept({2, 1, 20, 8, 8}, {{1, up::request_tag::prefill, 0, {40}}});
    none_kept.keep_rows([](auto, auto) { return false; });
    REQUIRE(attend(none_kept).rows.empty());
}

TEMPLATE_TEST_CASE("attention: logits of 10^4, either sign", "[attend]", float, up::bfloat16) {
    // Products of few elements, so that the scores are sharp and the bound is too.
    for (const float size : {1e4f, -1e4f}) {
        scene<TestType> what({3, 1, 64, 16, 8}, {{7, up::request_tag::prefill, 0, {200}}});
        for (std::size_t i = 0; i < what.keys.queries.size(); ++i) {
            what.keys.queries[i] = up::from_float<TestType>(i % 64 == 5 ? size : 0.0f);
        }
        for (std::size_t i = 0; i < what.keys.keys.size(); ++i) {
            if (i % 64 == 5) {
                what.keys.keys[i] = up::from_float<TestType>(static_cast<float>(i / 64 * 7 % 32) / 16 - 1);
            }
        }
        what.keys.data[0].queries = what.keys.queries;
        what.keys.data[0].keys = what.keys.keys;
        what.options.params.scale = 1;
        check(what, attend(what), 60);
        what.list_blocks(3, 20, [](auto, auto, std::int32_t head, int block) { return block % 3 == head; });
        check(what, attend(what), 60);
    }
}

TEST_CASE("attention: a long context, in runs", "[attend]") {
    scene<float> what({2, 1, 16, 64, 8}, {{7, up::request_tag::chunk, 9000, {70}}});
    check(what, attend(what), 4);
    what.keys.data[0].keys[4096 * 16] = 50.0f; // the largest score stands in the middle
    what.set_window(6000);
    check(what, attend(what), 4);
    scene<float> rows({2, 1, 16, 64, 8}, {{8, up::request_tag::prefill, 0, {8500}}});
    rows.list_blocks(2, 100, [](auto, auto, auto, int block) { return block == 0 || block == 64; });
    rows.keep_rows([](auto, std::int32_t row) { return row % 700 == 699 || row == 4095 || row == 4096; });
    check(rows, attend(rows));
}

TEST_CASE("attention: what isn't a number stays in its request", "[attend]") {
    const model shape{4, 2, 24, 16, 8};
    const std::vector<request> requests{{1, up::request_tag::prefill, 0, {100}},
                                        {2, up::request_tag::chunk, 50, {90}},
                                        {3, up::request_tag::prefill, 0, {80}}};
    for (const bool listed : {false, true}) {
        for (const bool in_values : {false, true}) {
            for (const float bad : {not_a_number, infinity, -infinity}) {
                scene<float> what(shape, requests);
                if (listed) {
                    what.list_blocks(4, 20, [](auto, auto, std::int32_t head, int block) {
                        return block % 3 == head % 3;
                    });
                }
                const output<float> good = attend(what);
                auto& part = in_values ? what.values : what.keys;
                // KV head 1 of the second request's row 33.
                std::fill_n(part.keys.begin() + (133 * 2 + 1) * 24, 24, bad);
                const output<float> got = attend(what);
                int spoilt = 0;
                for (std::int32_t row = 0; row < 270; ++row) {
                    for (std::int32_t head = 0; head < 4; ++head) {
                        const bool same =
                            std::memcmp(got.at(row, head), good.at(row, head), 24 * sizeof(float)) == 0;
                        const bool reads = row >= 133 && row < 190 && head >= 2 &&
                                           (!listed || 2 % 3 == head % 3 || row < 100 + 67);
                        INFO("row " << row << ", head " << head);
                        REQUIRE((same || (row >= 133 && row < 190 && head >= 2)));
                        REQUIRE((reads || same));
                        if (!same) {
                            ++spoilt;
                            REQUIRE(up::is_non_finite(got.at(row, head)[7]));
                        }
                    }
                }
                REQUIRE(spoilt > 0);
            }
        }
    }
}

TEST_CASE("attention: a score that isn't finite makes its row NaN", "[attend]") {
    scene<float> what({1, 1, 24, 16, 8}, {{1, up::request_tag::prefill, 0, {20}}});
    what.keys.keys[10 * 24] = 3e38f;
    what.keys.queries[15 * 24] = 3e38f;
    const output<float> got = attend(what);
    REQUIRE(std::isnan(got.lse[15]));
    REQUIRE(std::isnan(got.at(15, 0)[23]));
    REQUIRE_FALSE(std::isnan(got.lse[9]));
}

TEST_CASE("attention: lse isn't wanted", "[attend]") {
    scene<float> what({2, 1, 20, 8, 8}, {{1, up::request_tag::prefill, 0, {30}}});
    const output<float> with = attend(what);
    const up::prefill_attention<dynamic_policy> attention(what.keys.tight_limits());
    const guarded_buffer memory(attention.workspace_bytes());
    std::vector<float> rows(30 * 40);
    const up::batch_view batch = what.keys.batch();
    REQUIRE(attention
                .run(what.keys.query_rows(), up::key_source<float>{what.keys.key_rows(), {}},
                     up::key_source<float>{what.values.key_rows(), {}}, {}, batch, what.kept.view(batch), {},
                     up::head_rows<float>{rows.data(), 40, 20, 30, 2, 20}, nullptr,
                     up::workspace(memory.data(), attention.workspace_bytes()))
                .ok());
    REQUIRE(rows == with.rows);
}
