// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// On the device, too, a row's bits follow from what it reads: not from grid, packing, the other query rows,
// or how a list is spelt. A run makes no calls but launches, and replays with other contents.

#include "gpu_contracts.cuh"
#include "importance/estimate.hpp"
#include "support/cuda_calls.hpp"

#include <uniprefill/select/selector.hpp>

#include <numeric>
#include <random>

using namespace attend_test;
using uniprefill_test::captured_graph;
using uniprefill_test::cuda_calls;

namespace {

enum class kind { dense, by_query_head, by_kv_head, by_query_block };
constexpr kind kinds[] = {kind::dense, kind::by_query_head, kind::by_kv_head, kind::by_query_block};

template <class Case>
scene_of<Case> make(const std::vector<request>& requests, kind lists, bool drop, std::int32_t window = 0) {
    const model shape = shape_of<Case>();
    scene_of<Case> what(shape, requests);
    what.set_window(window);
    if (drop) {
        what.keep_rows(some_rows);
    }
    if (lists == kind::by_query_block) {
        what.list_own_blocks(shape.kv_heads, 40, 48,
                             [](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                std::int32_t query_block, int block) {
                                 return block < 0
                                            ? query_block % 3 != 1
                                            : some_blocks(seed, segment, head + query_block * 10, block);
                             });
    } else if (lists != kind::dense) {
        what.list_blocks(lists == kind::by_query_head ? shape.heads : shape.kv_heads, 40, some_blocks);
    }
    return what;
}

} // namespace

TEMPLATE_TEST_CASE("device attention: any grid and any packing give the same bits", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const std::vector<request> requests = contract_requests();
    for (up::cuda_device device : each_body<true>()) {
        INFO(name_of(device));
        for (const kind lists : kinds) {
            for (const bool drop : {false, true}) {
                if (uniprefill_test::is_scaled_down() && drop == (lists == kind::dense)) {
                    continue; // kernels of all three kinds, and dropped rows, are met
                }
                const std::int32_t window = drop ? 200 : 0;
                auto packed = make<TestType>(requests, lists, drop, window);
                const auto whole = attend_there<TestType>(packed, device);
                for (const std::int32_t ctas : {2, 1, 7, 31}) {
                    if (uniprefill_test::is_scaled_down() && ctas != 2) {
                        continue;
                    }
                    device.max_ctas = ctas;
                    REQUIRE(same_bits(attend_there<TestType>(packed, device), whole));
                }
                device.max_ctas = 0;
                for (std::size_t i = 0; i < requests.size(); ++i) {
                    CAPTURE(i);
                    auto alone = make<TestType>({requests[i]}, lists, drop, window);
                    REQUIRE(of_request(alone, attend_there<TestType>(alone, device), 0) ==
                            of_request(packed, whole, i));
                }
                std::vector<request> reversed(requests.rbegin(), requests.rend());
                auto other = make<TestType>(reversed, lists, drop, window);
                const auto turned = attend_there<TestType>(other, device);
                for (std::size_t i = 0; i < requests.size(); ++i) {
                    CAPTURE(i);
                    REQUIRE(of_request(other, turned, requests.size() - 1 - i) ==
                            of_request(packed, whole, i));
                }
            }
        }
    }
}

TEMPLATE_TEST_CASE("device attention: kept rows have the bits that they have among all rows", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        for (const kind lists : kinds) {
            if (lists == kind::by_query_block) {
                continue; // which follow from the rows that are kept
            }
            for (const std::int32_t window : {0, 130}) {
                auto after = make<TestType>(contract_requests(), lists, false, window);
                auto before = make<TestType>(contract_requests(), lists, true, window);
                const auto all = attend_there<TestType>(after, device);
                const auto kept = attend_there<TestType>(before, device);
                REQUIRE(before.num_queries() < after.num_queries());
                for (std::int32_t query = 0; query < before.num_queries(); ++query) {
                    CAPTURE(query);
                    REQUIRE(kept.bits(query) == all.bits(before.row_of(query)));
                }
            }
        }
    }
}

TEMPLATE_TEST_CASE("device attention: full lists give the bits of none", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape = shape_of<TestType>();
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        auto what = make<TestType>(contract_requests(), kind::dense, false);
        const auto dense = attend_there<TestType>(what, device);
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            for (const std::int32_t window : {0, 1, 100, 100000}) {
                CAPTURE(heads, window);
                what.list_blocks(heads, window, every_block);
                REQUIRE(same_bits(attend_there<TestType>(what, device), dense));
            }
            what.list_blocks(heads, 100000, no_block); // a window of everything needs no list
            REQUIRE(same_bits(attend_there<TestType>(what, device), dense));
            for (const std::int32_t query_rows :
                 {32, 100}) { // every list of some query blocks, none of others
                what.list_own_blocks(heads, 0, query_rows,
                                     [](auto, auto, auto, std::int32_t query_block, int block) {
                                         return block >= 0 || query_block % 2 == 0;
                                     });
                REQUIRE(same_bits(attend_there<TestType>(what, device), dense));
            }
            what.list_blocks(heads, 40, some_blocks);
            const auto plain = attend_there<TestType>(what, device);
            what.list_own_blocks(
                heads, 40, 48,
                [](std::uint64_t seed, std::int32_t segment, std::int32_t head, auto, int block) {
                    return block < 0 || some_blocks(seed, segment, head, block);
                });
            REQUIRE(same_bits(attend_there<TestType>(what, device), plain));
        }
    }
}

TEMPLATE_TEST_CASE("device attention: lists by KV head are lists of all its query heads", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape = shape_of<TestType>();
    const std::int32_t group = shape.heads / shape.kv_heads;
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        auto by_kv_head = make<TestType>(contract_requests(), kind::by_kv_head, false);
        auto by_query_head = make<TestType>(contract_requests(), kind::dense, false);
        by_query_head.list_blocks(shape.heads, 40,
                                  [&](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                      int block) { return some_blocks(seed, segment, head / group, block); });
        REQUIRE(same_bits(attend_there<TestType>(by_kv_head, device),
                          attend_there<TestType>(by_query_head, device)));
    }
}

TEMPLATE_TEST_CASE("device attention of the rows that a selection keeps", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = typename TestType::element;
    std::vector<request> requests = contract_requests();
    for (request& one : requests) {
        one.spread = 4.0f;
    }
    auto what = make<TestType>(requests, kind::dense, false);
    const up::limits bounds = what.keys.tight_limits();
    const up::batch_view batch = what.keys.batch();
    const caches<T> cached(what.keys);
    importance_test::masses masses = importance_test::estimate(what.keys, cached.contiguous(), {}, bounds);
    const std::vector<up::selection_rule> rules(static_cast<std::size_t>(batch.num_requests),
                                                up::selection_rule::top_p(0.7));
    const up::block_selector<> selector(bounds);
    up::workspace counting;
    static_cast<void>(up::selection::carve(counting, bounds, up::memory_space::host));
    const importance_test::guarded_buffer memory(counting.bytes_used());
    const importance_test::guarded_buffer work(selector.workspace_bytes());
    up::workspace carved(memory.data(), counting.bytes_used());
    up::selection chosen = up::selection::carve(carved, bounds, up::memory_space::host);
    const up::status decided = selector.run(masses.view(), batch, rules.data(), chosen,
                                            up::workspace(work.data(), selector.workspace_bytes()), {});
    INFO(importance_test::message(decided));
    REQUIRE(decided.ok());
    what.kept.identity = false;
    what.kept.cu_segments.assign(chosen.cu_segments, chosen.cu_segments + batch.num_segments + 1);
    what.kept.kept_to_old.assign(chosen.kept_to_old,
                                 chosen.kept_to_old + chosen.cu_segments[batch.num_segments]);
    REQUIRE(what.num_queries() < batch.num_rows);
    std::vector<output<T>> results;
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        results.push_back(attend_there<TestType>(what, device));
    }
    check_on_device(what, results, uniprefill_test::scaled(24, 6));
}

TEMPLATE_TEST_CASE("device attention makes no calls but launches, and replays with other contents", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = typename TestType::element;
    const std::vector<request> first = contract_requests();
    std::vector<request> second = first;
    second[0].segments = {200};
    second[2].segments = {40, 300, 1};
    second[2].cached = 12;
    second[4].segments = {40};
    second[5].seed = 61;
    second[5].cached = 350;
    for (const kind lists : {kind::by_query_head, kind::by_query_block}) {
        auto whole = make<TestType>(first, lists, true);
        auto part = make<TestType>(second, kind::dense, false);
        part.keep_rows([](std::uint64_t seed, std::int32_t row) {
            return coin(seed, 3, 0, static_cast<std::uint64_t>(row), 30);
        });
        if (lists == kind::by_query_block) {
            part.list_own_blocks(shape_of<TestType>().kv_heads, 40, 48,
                                 [](auto, auto, std::int32_t head, std::int32_t query_block, int block) {
                                     return block < 0 ? query_block != 2
                                                      : block % 7 == (head + query_block) % 4;
                                 });
        } else {
            part.list_blocks(shape_of<TestType>().heads, 40,
                             [](auto, auto, std::int32_t head, int block) { return block % 7 == head % 4; });
        }
        scene<T>* const scenes[] = {&whole, &part};
        const up::limits bounds = whole.keys.tight_limits();
        for (const up::cuda_device& device : each_body<true>()) {
            INFO(name_of(device));
            device_scene<T> on_device(whole);
            const caches<T> k[] = {caches<T>(whole.keys), caches<T>(part.keys)};
            const caches<T> v[] = {caches<T>(whole.values), caches<T>(part.values)};
            device_array<T> key_rows(k[0].rows());
            device_array<T> value_rows(v[0].rows());
            auto key_cache = k[0].contiguous();
            auto value_cache = v[0].contiguous();
            key_cache.data = key_rows.data();
            value_cache.data = value_rows.data();
            const attention_of<TestType> attention(bounds, device);
            const up::status ready = attention.template prepare<T, cache_of<TestType>>();
            INFO(message(ready));
            REQUIRE(ready.ok());
            const std::size_t bytes = attention.workspace_bytes();
            const device_array<unsigned char> memory(bytes);
            device_output<T> out(whole.keys.shape(), whole.num_queries());
            const auto run = [&](up::backend::cuda::stream stream) {
                const up::status done =
                    attention.run(on_device.query_rows(),
                                  up::key_source<T, cache_of<TestType>>{on_device.key_rows(), key_cache},
                                  up::key_source<T, cache_of<TestType>>{on_device.value_rows(), value_cache},
                                  on_device.options(), on_device.batch(), on_device.kept(), on_device.lists(),
                                  out.rows(), out.lse(), up::workspace(memory.data(), bytes), stream);
                REQUIRE(done.ok());
            };
            const cuda_calls before = cuda_calls::now();
            run(nullptr);
            CHECK(before.since() == "");
            const output<T> eager = out.get(whole.num_queries());

            captured_graph graph(run);
            for (const std::size_t which : {1u, 0u, 1u}) {
                CAPTURE(which);
                scene<T>& now = *scenes[which];
                on_device.assign(now);
                const auto spread_out = [&](const caches<T>& from, device_array<T>& to) {
                    // The second step's cache rows lie as far apart as the first's.
                    std::vector<T> moved(k[0].rows().size());
                    const std::int64_t stride = from.contiguous().request_stride;
                    for (std::int64_t r = 0; r < 6; ++r) {
                        std::copy_n(from.rows().begin() + r * stride, stride,
                                    moved.begin() + r * key_cache.request_stride);
                    }
                    to.set(moved);
                };
                spread_out(k[which], key_rows);
                spread_out(v[which], value_rows);
                out.forget();
                graph.replay();
                const output<T> replayed = out.get(now.num_queries());
                check_on_device(now, {replayed}, uniprefill_test::scaled(12, 4));
                REQUIRE(same_bits(replayed, attend_there<TestType>(now, device)));
                if (which == 0) {
                    REQUIRE(same_bits(replayed, eager));
                }
            }
        }
    }
}
