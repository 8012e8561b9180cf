// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Means of blocks on the device, and attention that meets them in place of the blocks that it skips: against
// the oracle, and what must not change a bit.

#include "gpu_contracts.cuh"
#include "importance/estimate.hpp"
#include "support/cuda_calls.hpp"

using namespace attend_test;
using uniprefill_test::captured_graph;
using uniprefill_test::cuda_calls;

namespace {

struct wide_heads {
    using element = up::bfloat16;
    using policy = up::attention_policy<64, 256>;
    static constexpr std::int32_t G = 64;
    static constexpr std::int32_t D = 256;
};

/// As contract_requests(), with one request of more blocks of 16 than a tile has keys.
template <class Case>
std::vector<request> mean_requests() {
    std::vector<request> requests = contract_requests();
    requests.push_back({27, up::request_tag::prefill, 0, {Case::G == 16 ? 2300 : 700}});
    return requests;
}

/// Attends with means on the device, and copies of its own of all arrays.
/// @param average false: they stay NaN
template <class Case>
output_of<Case> attend_with_means(scene_of<Case>& what, const up::cuda_device& device, bool average = true) {
    using T = typename Case::element;
    device_scene<T> on_device(what);
    const caches<T> k(what.keys);
    const caches<T> v(what.values);
    const device_caches<T> device_k(k);
    const device_caches<T> device_v(v);
    return attend_on_device<typename Case::policy, true>(what, on_device, device_k.contiguous(),
                                                         device_v.contiguous(), device, average);
}

template <class Case>
scene_of<Case> make(const std::vector<request>& requests, bool by_kv_head, bool drop, std::int32_t window,
                    bool by_query_block = false) {
    const model shape = shape_of<Case>();
    scene_of<Case> what(shape, requests);
    what.set_window(window);
    what.list_blocks(by_kv_head ? shape.kv_heads : shape.heads, by_kv_head ? 0 : 40, some_blocks);
    if (drop) {
        what.keep_rows(some_rows);
    }
    if (by_query_block) { // of the rows that are kept
        what.list_own_blocks(what.lists.heads, what.lists.window, 48,
                             [](std::uint64_t seed, std::int32_t segment, std::int32_t head,
                                std::int32_t query_block, int block) {
                                 return block < 0
                                            ? query_block % 3 != 1
                                            : some_blocks(seed, segment, head + query_block * 10, block);
                             });
    }
    what.use_means();
    return what;
}

} // namespace

TEMPLATE_TEST_CASE("device means have the host's bits", "[gpu]", float, up::half, up::bfloat16) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    up::cuda_device device = each_body<true>().front();
    for (const std::int32_t G : {8, 23, 64, 256}) {
        for (const std::int32_t head_dim : {8, 80, 256}) {
            for (const std::int32_t ctas : {0, 1}) {
                device.max_ctas = ctas;
                CAPTURE(G, head_dim, ctas);
                scene<TestType> what({2, 2, head_dim, G, 8},
                                     {{1, up::request_tag::prefill, 0, {3 * G + 1, 0, G, G - 1}},
                                      {2, up::request_tag::chunk, 20, {2 * G}},
                                      {3, up::request_tag::decode, 9, {1}},
                                      {4, up::request_tag::prefill, 0, {0}},
                                      {5, up::request_tag::prefill, 0, {5 * G + 7}}});
                what.use_means();
                device_scene<TestType> on_device(what);
                const device_means<TestType> means(what.keys.tight_limits());
                const cuda_calls before = cuda_calls::now();
                const up::status done = means.average(on_device, device, nullptr);
                CHECK(before.since() == "");
                INFO(message(done));
                REQUIRE(done.ok());
                means.check(what);
            }
        }
    }
}

TEMPLATE_TEST_CASE("device attention with means agrees with the oracle", "[gpu]", small_blocks, large_blocks,
                   wide_heads) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    for (const std::uint32_t number : uniprefill_test::spread_cases(5, 3)) { // from 3 on lists by query block
        const std::uint32_t kind = number < 3 ? number : number - 2;
        auto what =
            make<TestType>(mean_requests<TestType>(), kind == 1, kind == 2, kind == 2 ? 350 : 0, number >= 3);
        if (kind == 1) {
            what.options.params.softcap = 6.0f;
        } else if (kind == 2) {
            what.sinks = {0.5f, -3.0f, 4.0f, 0.0f, 2.0f, 1.0f, -1.0f, 7.0f};
            what.options.params.sink_logits = what.sinks.data();
            what.options.params.scale = 0.15f;
        }
        std::vector<output_of<TestType>> results;
        for (const up::cuda_device& device : each_body<true>()) {
            INFO(name_of(device) << ", case " << number);
            results.push_back(attend_with_means<TestType>(what, device));
        }
        INFO("case " << number);
        if (results.size() == 2) {
            check_agreement(results[0], results[1]);
        }
        const double worst = check_on_device(what, results, uniprefill_test::scaled(60, 8));
        std::cout << "means, D " << TestType::D << " G " << TestType::G << " case " << number << ": " << worst
                  << " of the bound" << std::endl;
        what.means = false; // which the oracle would tell
        std::size_t body = 0;
        for (const up::cuda_device& device : each_body<true>()) {
            REQUIRE(!same_bits(attend_with_means<TestType>(what, device), results[body++]));
        }
    }
}

TEMPLATE_TEST_CASE("device attention with means: full lists, or none, give the bits of no means", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape = shape_of<TestType>();
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        scene_of<TestType> what(shape, contract_requests());
        const auto dense = attend_there<TestType>(what, device); // by kernels without means
        what.use_means();
        REQUIRE(same_bits(attend_with_means<TestType>(what, device), dense));
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            for (const std::int32_t window : {0, 100}) {
                CAPTURE(heads, window);
                what.list_blocks(heads, window, every_block);
                REQUIRE(same_bits(attend_with_means<TestType>(what, device), dense));
            }
        }
        // Lists of query blocks that all read everything, by their mark or by name, and means that nobody may
        // look at.
        for (const std::int32_t heads : {shape.heads, shape.kv_heads}) {
            for (const bool by_name : {false, true}) {
                CAPTURE(heads, by_name);
                what.list_own_blocks(heads, 40, 48, [&](auto, auto, auto, auto, int) { return by_name; });
                REQUIRE(same_bits(attend_with_means<TestType>(what, device, false), dense));
            }
        }
        // Lists that skip blocks, without means.
        what.means = false;
        what.list_blocks(shape.heads, 40, some_blocks);
        REQUIRE(same_bits(attend_with_means<TestType>(what, device), attend_there<TestType>(what, device)));
    }
}

TEMPLATE_TEST_CASE("device attention with means of blocks of equal rows is dense attention", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        scene_of<TestType> what(shape_of<TestType>(), mean_requests<TestType>());
        flatten_blocks(what.keys);
        flatten_blocks(what.values);
        const auto dense = attend_there<TestType>(what, device);
        what.list_blocks(shape_of<TestType>().heads, 40, some_blocks);
        what.use_means();
        check_agreement(attend_with_means<TestType>(what, device), dense);
    }
}

TEMPLATE_TEST_CASE("device attention with means: grids, packings and other rows don't show", "[gpu]",
                   small_blocks, large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const std::vector<request> requests = contract_requests();
    for (up::cuda_device device : each_body<true>()) {
        INFO(name_of(device));
        for (const bool by_kv_head : {false, true}) {
            CAPTURE(by_kv_head);
            auto packed = make<TestType>(requests, by_kv_head, false, 200);
            const auto whole = attend_with_means<TestType>(packed, device);
            for (const std::int32_t ctas : {2, 7}) {
                device.max_ctas = ctas;
                REQUIRE(same_bits(attend_with_means<TestType>(packed, device), whole));
            }
            device.max_ctas = 0;
            for (std::size_t i = 0; i < requests.size(); ++i) {
                CAPTURE(i);
                auto alone = make<TestType>({requests[i]}, by_kv_head, false, 200);
                REQUIRE(of_request(alone, attend_with_means<TestType>(alone, device), 0) ==
                        of_request(packed, whole, i));
            }
            auto dropped = make<TestType>(requests, by_kv_head, true, 200);
            const auto kept = attend_with_means<TestType>(dropped, device);
            for (std::int32_t query = 0; query < dropped.num_queries(); ++query) {
                CAPTURE(query);
                REQUIRE(kept.bits(query) == whole.bits(dropped.row_of(query)));
            }
        }
    }
}

TEMPLATE_TEST_CASE("device attention with means: a graph replays with other contents", "[gpu]", small_blocks,
                   large_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = typename TestType::element;
    const std::vector<request> first{{31, up::request_tag::prefill, 0, {533}},
                                     {32, up::request_tag::prefill, 0, {170, 0, 229}},
                                     {33, up::request_tag::prefill, 0, {300}}};
    std::vector<request> second = first;
    second[0].segments = {200};
    second[1].segments = {40, 300, 1};
    second[2].segments = {450};
    auto whole = make<TestType>(first, false, false, 0);
    auto part = make<TestType>(second, false, false, 0);
    scene<T>* const scenes[] = {&whole, &part};
    const up::limits bounds = whole.keys.tight_limits();
    for (const up::cuda_device& device : each_body<true>()) {
        INFO(name_of(device));
        device_scene<T> on_device(whole);
        on_device.batch().cached_lens = nullptr;
        device_means<T> means(bounds);
        const attention_of<TestType> attention(bounds, device);
        const up::status ready = attention.template prepare<T, cache_of<TestType>, true>();
        INFO(message(ready));
        REQUIRE(ready.ok());
        const std::size_t bytes = attention.workspace_bytes();
        const device_array<unsigned char> memory(bytes);
        device_output<T> out(whole.keys.shape(), whole.num_queries());
        const auto run = [&](up::backend::cuda::stream stream) {
            up::status done = means.average(on_device, device, stream);
            REQUIRE(done.ok());
            done = attention.run(
                on_device.query_rows(), up::key_source<T, cache_of<TestType>>{on_device.key_rows(), {}},
                up::key_source<T, cache_of<TestType>>{on_device.value_rows(), {}}, on_device.options(),
                on_device.batch(), on_device.kept(), on_device.lists(), means.view(), out.rows(), out.lse(),
                up::workspace(memory.data(), bytes), stream);
            INFO(message(done));
            REQUIRE(done.ok());
        };
        const cuda_calls before = cuda_calls::now();
        run(nullptr);
        CHECK(before.since() == "");
        captured_graph graph(run);
        for (const std::size_t which : {1u, 0u, 1u}) {
            CAPTURE(which);
            scene<T>& now = *scenes[which];
            on_device.assign(now);
            means.forget();
            out.forget();
            graph.replay();
            means.check(now);
            const output<T> replayed = out.get(now.num_queries());
            check_on_device(now, {replayed}, uniprefill_test::scaled(12, 4));
            REQUIRE(same_bits(replayed, attend_with_means<TestType>(now, device)));
        }
    }
}

TEST_CASE("device means that don't fit are refused", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = up::bfloat16;
    const up::cuda_device device = each_body<true>().front();
    auto what = make<small_blocks>({{3, up::request_tag::prefill, 0, {50}}}, false, false, 0);
    device_scene<T> on_device(what);
    const up::limits bounds = what.keys.tight_limits();
    const device_means<T> good(bounds);
    REQUIRE(good.average(on_device, device, nullptr).ok());
    const attention_of<small_blocks> attention(bounds, device);
    const device_array<unsigned char> memory(attention.workspace_bytes());
    const device_output<T> out(what.keys.shape(), what.num_queries());
    const auto refused = [&](up::status_code code, const char* argument, auto change) {
        CAPTURE(argument);
        up::block_means<T> means = good.view();
        change(means);
        const up::status averaged = up::average_blocks(device, on_device.key_rows(), on_device.value_rows(),
                                                       on_device.batch(), bounds, means, nullptr);
        REQUIRE(averaged.code == code);
        REQUIRE(std::strcmp(averaged.argument, argument) == 0);
        const up::status attended = attention.run(
            on_device.query_rows(), up::key_source<T, cache_of<small_blocks>>{on_device.key_rows(), {}},
            up::key_source<T, cache_of<small_blocks>>{on_device.value_rows(), {}}, on_device.options(),
            on_device.batch(), on_device.kept(), on_device.lists(), means, out.rows(), out.lse(),
            up::workspace(memory.data(), memory.size()), nullptr);
        REQUIRE(attended.code == code);
        REQUIRE(std::strcmp(attended.argument, argument) == 0);
    };
    on_device.batch().cached_lens = nullptr;
    constexpr auto invalid = up::status_code::invalid_argument;
    refused(invalid, "means.keys", [](auto& means) { means.keys.num_rows -= 1; });
    refused(invalid, "means.values", [](auto& means) { means.values.num_heads = 1; });
    refused(invalid, "means.values", [](auto& means) { means.values.data = nullptr; });
    refused(up::status_code::misaligned, "means.keys", [](auto& means) { means.keys.data += 1; });
    refused(up::status_code::misaligned, "means.values", [](auto& means) { means.values.row_stride += 1; });
    REQUIRE(out.get(0).rows.empty()); // nothing was written
    up::limits narrow = bounds;
    narrow.head_dim = 12;
    const auto twelve = [](auto rows) {
        rows.head_dim = 12;
        return rows;
    };
    const up::status odd = up::average_blocks(
        device, twelve(on_device.key_rows()), twelve(on_device.value_rows()), on_device.batch(), narrow,
        up::block_means<T>{twelve(good.view().keys), twelve(good.view().values)}, nullptr);
    REQUIRE(odd.code == up::status_code::not_supported);
}
