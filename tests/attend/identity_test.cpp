// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A row's bits follow from what it reads: not from packing, threads, chunks, the other query rows, or how a
// list is spelt.

#include "check.hpp"

#if defined(_OPENMP)
#    include <omp.h>
#endif

namespace up = uniprefill;
using namespace attend_test;

namespace {

const model shape{6, 2, 40, 16, 24};

std::vector<request> some_requests() {
    std::vector<request> requests;
    requests.push_back({11, up::request_tag::prefill, 0, {333}});
    requests.push_back({12, up::request_tag::prefill, 0, {5}});
    requests.push_back({13, up::request_tag::prefill, 0, {100, 0, 129, 77}});
    requests.push_back({14, up::request_tag::decode, 61, {1}});
    requests.push_back({15, up::request_tag::chunk, 75, {64, 90}});
    requests.push_back({16, up::request_tag::prefill, 0, {400}});
    requests[5].gaps = true;
    return requests;
}

bool some_blocks(std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
    return coin(seed, 1, static_cast<std::uint64_t>(segment * 100 + head), static_cast<std::uint64_t>(block),
                40);
}
bool some_rows(std::uint64_t seed, std::int32_t row) {
    return coin(seed, 2, 0, static_cast<std::uint64_t>(row), 60);
}

/// A list for each query block; where @p of_all_rows, the same for all of a segment.
template <bool of_all_rows>
bool some_own_blocks(std::uint64_t seed, std::int32_t segment, std::int32_t head, std::int32_t query_block,
                     int block) {
    const auto list = static_cast<std::uint64_t>(segment * 100 + head);
    const auto rows = static_cast<std::uint64_t>(of_all_rows ? 0 : query_block);
    return block < 0 ? !coin(seed, 5 + rows, list, 0, 20)
                     : coin(seed, 100 + rows, list, static_cast<std::uint64_t>(block), 40);
}

enum class kind { dense, by_query_head, by_kv_head, by_query_block, with_means };
constexpr std::int32_t query_rows = 24; ///< of a list, where each query block has its own

template <class T>
scene<T> make(const std::vector<request>& requests, kind lists, bool drop) {
    scene<T> what(shape, requests);
    what.set_window(drop ? 200 : 0);
    if (lists != kind::dense && lists != kind::by_query_block) {
        what.list_blocks(lists == kind::by_kv_head ? shape.kv_heads : shape.heads, 20, some_blocks);
    }
    if (drop) {
        what.keep_rows(some_rows);
    }
    if (lists == kind::by_query_block) { // of the rows that are kept
        what.list_own_blocks(shape.heads, 20, query_rows, some_own_blocks<false>);
    }
    if (lists == kind::with_means) {
        what.use_means();
    }
    return what;
}

/// The bits of every query of request @p index.
template <class T>
std::vector<std::vector<std::uint32_t>> of_request(const scene<T>& what, const output<T>& got,
                                                   std::size_t index) {
    std::vector<std::vector<std::uint32_t>> all;
    for (std::int32_t query = 0; query < what.num_queries(); ++query) {
        const std::int32_t row = what.row_of(query);
        if (row >= what.keys.cu_seqlens[index] && row < what.keys.cu_seqlens[index + 1]) {
            all.push_back(got.bits(query));
        }
    }
    return all;
}

} // namespace

TEMPLATE_TEST_CASE("attention: any packing gives the same bits", "[attend]", float, up::bfloat16) {
    const std::vector<request> requests = some_requests();
    for (const kind lists :
         {kind::dense, kind::by_query_head, kind::by_kv_head, kind::by_query_block, kind::with_means}) {
        for (const bool drop : {false, true}) {
            std::vector<std::vector<std::vector<std::uint32_t>>> alone;
            for (const request& one : requests) {
                auto what = make<TestType>({one}, lists, drop);
                alone.push_back(of_request(what, attend(what), 0));
            }
            std::vector<std::size_t> order(requests.size());
            std::iota(order.begin(), order.end(), std::size_t{0});
            std::mt19937 random(static_cast<unsigned>(uniprefill_test::seed()));
            for (int packing = 0; packing < 4; ++packing) {
                std::shuffle(order.begin(), order.end(), random);
                std::vector<request> packed;
                for (const std::size_t i : order) {
                    packed.push_back(requests[i]);
                }
                auto together = make<TestType>(packed, lists, drop);
                const output<TestType> got = attend(together);
                for (std::size_t i = 0; i < order.size(); ++i) {
                    REQUIRE(of_request(together, got, i) == alone[order[i]]);
                }
            }
        }
    }
}

TEST_CASE("attention: any number of threads gives the same bits", "[attend]") {
#if defined(_OPENMP)
    std::vector<request> requests = some_requests();
    requests[0].segments = {1500};
    const int before = omp_get_max_threads();
    for (const kind lists : {kind::dense, kind::by_query_head, kind::by_query_block, kind::with_means}) {
        auto what = make<float>(requests, lists, false);
        omp_set_num_threads(1);
        const output<float> expected = attend(what);
        for (const int threads : {2, 3, 7}) {
            omp_set_num_threads(threads);
            for (int repeat = 0; repeat < 2; ++repeat) {
                REQUIRE(same_bits(attend(what), expected));
            }
        }
    }
    omp_set_num_threads(before);
#else
    uniprefill_test::skip("built without OpenMP");
#endif
}

TEMPLATE_TEST_CASE("attention: kept rows have the bits that they have among all rows", "[attend]", float,
                   up::half) {
    for (const kind lists :
         {kind::dense, kind::by_query_head, kind::by_kv_head, kind::by_query_block, kind::with_means}) {
        auto after = make<TestType>(some_requests(), lists, false);
        after.set_window(200);
        auto before = make<TestType>(some_requests(), lists, true);
        if (lists == kind::by_query_block) { // which have other rows here and there
            after.list_own_blocks(shape.heads, 20, query_rows, some_own_blocks<true>);
            before.list_own_blocks(shape.heads, 20, query_rows, some_own_blocks<true>);
        }
        const output<TestType> all = attend(after);
        const output<TestType> kept = attend(before);
        REQUIRE(before.num_queries() > 0);
        REQUIRE(before.num_queries() < after.num_queries());
        for (std::int32_t query = 0; query < before.num_queries(); ++query) {
            REQUIRE(kept.bits(query) == all.bits(before.row_of(query)));
        }
    }
}

TEST_CASE("attention: full lists give the bits of none", "[attend]") {
    for (const std::int32_t window : {0, 1, 30, 100000}) {
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            auto dense = make<float>(some_requests(), kind::dense, false);
            auto listed = make<float>(some_requests(), kind::dense, false);
            listed.list_blocks(heads, window, [](auto, auto, auto, auto) { return true; });
            REQUIRE(same_bits(attend(dense), attend(listed)));
        }
    }
    // A window of everything needs no list.
    auto dense = make<float>(some_requests(), kind::dense, false);
    auto windowed = make<float>(some_requests(), kind::dense, false);
    windowed.list_blocks(shape.heads, 100000, [](auto, auto, auto, auto) { return false; });
    REQUIRE(same_bits(attend(dense), attend(windowed)));
}

TEST_CASE("attention: lists by KV head are lists of all its query heads", "[attend]") {
    const std::int32_t group = shape.heads / shape.kv_heads;
    auto by_kv_head = make<float>(some_requests(), kind::by_kv_head, false);
    auto by_query_head = make<float>(some_requests(), kind::dense, false);
    by_query_head.list_blocks(shape.heads, 20,
                              [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
                                  return some_blocks(seed, segment, head / group, block);
                              });
    REQUIRE(by_query_head.lists.blocks.size() ==
            static_cast<std::size_t>(group) * by_kv_head.lists.blocks.size());
    const output<float> shared = attend(by_kv_head);
    REQUIRE(same_bits(shared, attend(by_query_head)));
    // One head reads one block more: the others' bits stay, though they are now worked on one by one.
    auto one_more = make<float>(some_requests(), kind::dense, false);
    one_more.list_blocks(
        shape.heads, 20, [&](std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
            return some_blocks(seed, segment, head / group, block) || (head == 4 && block == 0);
        });
    const output<float> got = attend(one_more);
    bool differs = false;
    for (std::int32_t query = 0; query < one_more.num_queries(); ++query) {
        for (std::int32_t head = 0; head < shape.heads; ++head) {
            const bool same = std::memcmp(got.at(query, head), shared.at(query, head),
                                          static_cast<std::size_t>(shape.head_dim) * sizeof(float)) == 0;
            differs = differs || !same;
            REQUIRE((same || head == 4));
        }
    }
    REQUIRE(differs);
}

TEMPLATE_TEST_CASE("attention: cached context, chunks and context in the step give the same bits", "[attend]",
                   float, up::half) {
    for (const std::int32_t context : {1, 15, 16, 63, 64, 65, 100}) {
        const request whole{31, up::request_tag::prefill, 0, {context, 150}};
        const request chunk{31, up::request_tag::chunk, context, {150}};
        const request half_cached{31, up::request_tag::chunk, context / 2, {context - context / 2, 150}};
        const request one_segment{31, up::request_tag::prefill, 0, {context + 150}};
        for (const bool listed : {false, true}) {
            std::vector<std::vector<std::vector<std::uint32_t>>> seen;
            for (const request& one : {whole, chunk, half_cached, one_segment}) {
                scene<TestType> what(shape, {one});
                what.set_window(listed ? 0 : 170);
                if (listed) {
                    // Block 3 of the last segment, and the window.
                    what.list_blocks(
                        shape.heads, 20,
                        [&](std::uint64_t, std::int32_t, std::int32_t, int block) { return block == 3; });
                }
                auto all = of_request(what, attend(what), 0);
                seen.emplace_back(all.end() - 150, all.end());
            }
            INFO("context " << context << (listed ? ", listed" : ""));
            REQUIRE(seen[0] == seen[1]);
            REQUIRE(seen[0] == seen[2]);
            REQUIRE((listed || seen[0] == seen[3]));
        }
    }
}

TEST_CASE("attention: other query rows don't matter", "[attend]") {
    for (const kind lists : {kind::by_query_head, kind::by_query_block}) {
        auto what = make<float>(some_requests(), lists, false);
        const output<float> expected = attend(what);
        const std::int64_t wide = std::int64_t{shape.heads} * shape.head_dim;
        for (std::int32_t row = 0; row < what.keys.num_rows(); ++row) {
            if (row % 3 != 0) {
                std::fill_n(what.keys.queries.begin() + row * wide, wide,
                            row % 3 == 1 ? 1e4f : std::numeric_limits<float>::quiet_NaN());
            }
        }
        const output<float> got = attend(what);
        for (std::int32_t row = 0; row < what.keys.num_rows(); row += 3) {
            REQUIRE(got.bits(row) == expected.bits(row));
        }
    }
}

TEST_CASE("attention: runs of keys don't begin where the rows of a tile do", "[attend]") {
    const model small{2, 1, 16, 64, 8};
    const std::vector<request> requests{{6, up::request_tag::chunk, 6000, {100}}};
    scene<float> all(small, requests);
    scene<float> some(small, requests);
    all.set_window(5000);
    some.set_window(5000);
    some.keep_rows([](std::uint64_t, std::int32_t row) { return row > 20 && row % 7 == 3; });
    const output<float> expected = attend(all);
    const output<float> got = attend(some);
    for (std::int32_t query = 0; query < some.num_queries(); ++query) {
        REQUIRE(got.bits(query) == expected.bits(some.row_of(query)));
    }
}

TEST_CASE("attention: constants and run-time extents give the same bits", "[attend]") {
    const model round{4, 2, 64, 64, 8};
    const std::vector<request> requests{{5, up::request_tag::chunk, 20, {170}}};
    scene<float> what(round, requests);
    what.list_blocks(4, 30, some_blocks);
    REQUIRE(same_bits(attend(what), attend<up::attention_policy<64, 64>>(what)));
    REQUIRE(same_bits(attend(what), attend<up::attention_policy<>>(what)));
}

TEST_CASE("attention: larger limits give the same bits", "[attend]") {
    scene<float> what(shape, {{22, up::request_tag::prefill, 0, {300}}});
    const output<float> tight = attend(what);
    up::limits roomy = what.keys.tight_limits();
    roomy.max_rows += 5000;
    roomy.max_requests += 3;
    roomy.max_segments += 30;
    const up::prefill_attention<dynamic_policy> attention(roomy);
    const guarded_buffer memory(attention.workspace_bytes());
    output<float> wide = tight;
    std::fill(wide.rows.begin(), wide.rows.end(), 0.0f);
    std::fill(wide.lse.begin(), wide.lse.end(), 0.0f);
    const up::batch_view batch = what.keys.batch();
    const up::head_rows<float> out{wide.rows.data(), std::int64_t{shape.heads} * shape.head_dim,
                                   shape.head_dim,   300,
                                   shape.heads,      shape.head_dim};
    REQUIRE(attention
                .run(what.keys.query_rows(), up::key_source<float>{what.keys.key_rows(), {}},
                     up::key_source<float>{what.values.key_rows(), {}}, {}, batch, what.kept.view(batch), {},
                     out, wide.lse.data(), up::workspace(memory.data(), attention.workspace_bytes()))
                .ok());
    REQUIRE(same_bits(tight, wide));
}
