// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The device's lists by query block against the definition and the host's, and what they promise.

#include "attend/gpu_scene.cuh"
#include "query_lists.hpp"
#include "support/cuda_calls.hpp"

#include <uniprefill/select/query_block_lister.cuh>

#include <iostream>

using namespace query_list_test;
using uniprefill_test::captured_graph;
using uniprefill_test::cuda_calls;

namespace {

/// Types, G and D of a test.
struct small_blocks {
    using element = up::bfloat16;
    static constexpr std::int32_t G = 16;
    static constexpr std::int32_t D = 64;
};
struct usual_blocks {
    using element = up::half;
    static constexpr std::int32_t G = 64;
    static constexpr std::int32_t D = 128;
};
struct large_blocks { // several tiles each, and rows of an odd number of 16 bytes
    using element = up::bfloat16;
    static constexpr std::int32_t G = 256;
    static constexpr std::int32_t D = 80;
};
struct long_rows {
    using element = up::bfloat16;
    static constexpr std::int32_t G = 32;
    static constexpr std::int32_t D = 256;
};

template <class Case>
using lister_of = up::query_block_lister<up::query_list_policy<Case::G, Case::D>, up::backend::cuda>;
template <class Case>
using cache_of = up::page_table_cache<typename Case::element>;
template <class Case>
using scene_of = scene<typename Case::element>;

/// Lists in device memory, with nonsense in and behind them until they are written.
class device_lists {
  public:
    explicit device_lists(const own_lists& like)
        : host_(like)
        , offsets_(like.offsets.size() + guard)
        , blocks_(like.blocks.size() + guard)
        , report_(1) {
        forget();
    }
    void forget() {
        forget_lists();
        report_.set({up::block_list_report{}});
    }
    void forget_lists() {
        offsets_.set(std::vector<std::int64_t>(offsets_.size(), INT64_MIN));
        blocks_.set(std::vector<std::int32_t>(blocks_.size(), -7));
    }
    [[nodiscard]] up::block_lists view() const {
        up::block_lists made = host_.out;
        made.space = up::memory_space::device;
        made.offsets = offsets_.data();
        made.blocks = blocks_.data();
        made.report = report_.data();
        return made;
    }
    /// Nothing behind the arrays must have been written, whatever the lists say.
    void check_guards() const {
        const std::vector<std::int64_t> offsets = offsets_.get();
        const std::vector<std::int32_t> blocks = blocks_.get();
        REQUIRE(std::all_of(offsets.end() - guard, offsets.end(),
                            [](std::int64_t offset) { return offset == INT64_MIN; }));
        REQUIRE(
            std::all_of(blocks.end() - guard, blocks.end(), [](std::int32_t block) { return block == -7; }));
    }
    /// What was written; nothing behind the last list's end must have been.
    [[nodiscard]] own_lists get(const up::block_lists& told) const {
        own_lists made = host_;
        const std::vector<std::int64_t> offsets = offsets_.get();
        const std::vector<std::int32_t> blocks = blocks_.get();
        std::copy(offsets.begin(), offsets.end() - guard, made.offsets.begin());
        std::copy(blocks.begin(), blocks.end() - guard, made.blocks.begin());
        made.report = report_.get()[0];
        made.out.window = told.window;
        made.out.num_segments = told.num_segments;
        check_guards();
        const std::int64_t used = std::min(made.report.wanted, made.out.capacity);
        REQUIRE(
            std::all_of(blocks.begin() + used, blocks.end(), [](std::int32_t block) { return block == -7; }));
        return made;
    }

  private:
    static constexpr std::ptrdiff_t guard = 1000;
    own_lists host_;
    device_array<std::int64_t> offsets_;
    device_array<std::int32_t> blocks_;
    device_array<up::block_list_report> report_;
};

/// A lister's call: arrays always lie at the same places.
template <class Case>
class device_call {
    using T = typename Case::element;

  public:
    device_call(scene_of<Case>& what, const recipe& how, const up::cuda_device& device)
        : what_(what)
        , how_(how)
        , lister_(what.keys.tight_limits(), how.sampling, device)
        , on_device_(what)
        , cached_(what.keys)
        , device_cached_(cached_)
        , lists_(make_room(what, how))
        , memory_(lister_.workspace_bytes() + guard) {
        const up::status ready = lister_.template prepare<T, cache_of<Case>>();
        INFO(message(ready));
        REQUIRE(ready.ok());
        uniprefill_test::check_cuda(cudaMemset(memory_.data() + lister_.workspace_bytes(), 0xa5, guard),
                                    "guard bytes");
    }
    [[nodiscard]] device_scene<T>& on_device() { return on_device_; }
    void put(cudaStream_t stream) {
        told_ = lists_.view();
        told_.report = wants_report_ ? told_.report : nullptr;
        const up::status done =
            lister_.run(on_device_.query_rows(),
                        up::key_source<T, cache_of<Case>>{on_device_.key_rows(), device_cached_.page_table()},
                        on_device_.options(), on_device_.batch(), on_device_.kept(), how_.options, told_,
                        up::workspace(memory_.data(), lister_.workspace_bytes()), stream);
        INFO(message(done));
        REQUIRE(done.ok());
    }
    /// Nothing behind the lists' arrays and the workspace must have been written.
    void check_guards() const {
        lists_.check_guards();
        std::vector<unsigned char> beyond(guard);
        uniprefill_test::check_cuda(cudaMemcpy(beyond.data(), memory_.data() + lister_.workspace_bytes(),
                                               guard, cudaMemcpyDeviceToHost),
                                    "copy from the device");
        REQUIRE(std::all_of(beyond.begin(), beyond.end(), [](unsigned char byte) { return byte == 0xa5; }));
    }
    [[nodiscard]] own_lists get() const {
        own_lists made = lists_.get(told_);
        check_guards();
        return made;
    }
    void forget() { lists_.forget(); }
    /// From now on no report is wanted; what it holds by now stays.
    void forget_lists_and_report_no_more() {
        lists_.forget_lists();
        wants_report_ = false;
    }

  private:
    static constexpr std::size_t guard = 4096;
    scene_of<Case>& what_;
    recipe how_;
    lister_of<Case> lister_;
    device_scene<T> on_device_;
    caches<T> cached_;
    device_caches<T> device_cached_;
    device_lists lists_;
    device_array<unsigned char> memory_;
    up::block_lists told_;
    bool wants_report_ = true;
};

template <class Case>
own_lists list_on_device(scene_of<Case>& what, const recipe& how, const up::cuda_device& device) {
    device_call<Case> call(what, how, device);
    call.put(nullptr);
    return call.get();
}

std::vector<request> ragged_requests(std::int32_t G) {
    std::vector<request> requests{{41, up::request_tag::prefill, 0, {433 + 2 * G}},
                                  {42, up::request_tag::prefill, 0, {5}},
                                  {43, up::request_tag::chunk, 175, {170, 0, 329, 77}},
                                  {44, up::request_tag::decode, 300, {1}},
                                  {45, up::request_tag::prefill, 0, {0}},
                                  {46, up::request_tag::chunk, 700, {3 * G + 64}}};
    requests[2].spread = 4.0f;
    requests[5].gaps = true;
    return requests;
}

/// @param kind which parameters
template <class Case>
scene_of<Case> make_scene(std::int32_t kind, const std::vector<request>& requests, recipe& how) {
    constexpr std::int32_t groups[] = {1, 3, 4, 8, 16};
    const std::int32_t group = groups[kind % 5];
    const std::int32_t kv_heads = group > 4 ? 1 : 2;
    scene_of<Case> what(model{group * kv_heads, kv_heads, Case::D, Case::G, 8}, requests);
    if (kind == 1) {
        what.options.params.softcap = 6.0f;
    } else if (kind == 2) {
        what.sinks.assign(static_cast<std::size_t>(group * kv_heads), 1.5f);
        what.options.params.sink_logits = what.sinks.data();
        what.options.params.scale = 0.15f;
    } else if (kind == 3) {
        what.set_window(150);
    }
    if (kind >= 2) {
        what.keep_rows([](std::uint64_t seed, std::int32_t row) {
            return coin(seed, 2, 0, static_cast<std::uint64_t>(row), 60);
        });
    }
    how.heads = kind % 2 == 0 ? kv_heads : group * kv_heads;
    constexpr up::query_sampling samplings[] = {{64, 8}, {40, 7}, {16, 1}, {100, 8}, {64, 8}};
    how.sampling = samplings[kind % 5];
    how.options.rule = up::selection_rule::top_p(kind == 2 ? 0.99 : 0.9,
                                                 kind % 3 == 1 ? up::mass_scope::free : up::mass_scope::all);
    how.options.sink = kind == 3 ? 0 : 20;
    how.options.window = kind == 4 ? 0 : 60;
    return what;
}

} // namespace

TEMPLATE_TEST_CASE("device lists by query block: against the definition and the host", "[gpu]", small_blocks,
                   usual_blocks, large_blocks, long_rows) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const up::cuda_device device = importance_test::this_device();
    for (const std::uint32_t number : uniprefill_test::spread_cases(5, 2)) {
        recipe how;
        auto what =
            make_scene<TestType>(static_cast<std::int32_t>(number), ragged_requests(TestType::G), how);
        INFO(described(what.keys.shape(), how, number));
        const own_lists came = list_on_device<TestType>(what, how, device);
        const auto counted = check_lists(what, how, came, 5);
        const own_lists host = list_there(what, how);
        std::int64_t blocks = 0;
        std::int64_t differ = 0;
        const std::int64_t lists = (what.num_queries() / how.sampling.query_rows + what.keys.num_segments()) *
                                   std::int64_t{how.heads};
        for (std::int64_t list = 0; list < lists; ++list) {
            const auto a = came.of(list);
            const auto b = host.of(list);
            std::vector<std::int32_t> apart;
            std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(apart));
            blocks += static_cast<std::int64_t>(b.size());
            differ += static_cast<std::int64_t>(apart.size());
        }
        std::cout << "D " << TestType::D << " G " << TestType::G << " case " << number << ": "
                  << counted.first << " blocks at a cut in " << counted.second << " lists; " << differ
                  << " of " << blocks << " blocks not as the host's" << std::endl;
        REQUIRE(counted.second > 0);
        REQUIRE(counted.first * 10 <= counted.second);
        REQUIRE(differ * 100 <= blocks);
    }
}

TEMPLATE_TEST_CASE("device lists by query block: any grid and any packing give the same", "[gpu]",
                   small_blocks, usual_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    up::cuda_device device = importance_test::this_device();
    const std::vector<request> requests = ragged_requests(TestType::G);
    for (const std::int32_t kind : {0, 3}) {
        recipe how;
        auto what = make_scene<TestType>(kind, requests, how);
        const own_lists whole = list_on_device<TestType>(what, how, device);
        for (const std::int32_t ctas : {1, 2, 7}) {
            if (uniprefill_test::is_scaled_down() && ctas != 2) {
                continue;
            }
            CAPTURE(kind, ctas);
            device.max_ctas = ctas;
            const own_lists came = list_on_device<TestType>(what, how, device);
            REQUIRE(came.offsets == whole.offsets);
            REQUIRE(came.blocks == whole.blocks);
        }
        device.max_ctas = 0;
        std::int32_t segment = 0;
        for (std::size_t i = 0; i < requests.size(); ++i) {
            auto alone = make_scene<TestType>(kind, {requests[i]}, how);
            const own_lists own = list_on_device<TestType>(alone, how, device);
            for (std::int32_t s = 0; s < alone.keys.num_segments(); ++s, ++segment) {
                const auto there = right_lists(what, how, segment);
                const auto here = right_lists(alone, how, s);
                REQUIRE(there.size() == here.size());
                for (std::size_t k = 0; k < here.size(); ++k) {
                    CAPTURE(kind, i, s, k);
                    REQUIRE(whole.of(there[k].number) == own.of(here[k].number));
                }
            }
        }
    }
}

TEST_CASE("device lists by query block: what doesn't fit, and doubt, read everything", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const up::cuda_device device = importance_test::this_device();
    recipe how;
    auto what = make_scene<small_blocks>(0, ragged_requests(16), how);
    const own_lists whole = list_on_device<small_blocks>(what, how, device);
    REQUIRE(whole.report.wanted > 100);
    const std::int64_t lists =
        std::int64_t{what.num_queries() / how.sampling.query_rows + what.keys.num_segments()} * how.heads;
    for (const std::int64_t capacity :
         {whole.report.wanted, whole.report.wanted - 1, std::int64_t{57}, std::int64_t{0}}) {
        CAPTURE(capacity);
        recipe less_room = how;
        less_room.capacity = capacity;
        const own_lists less = list_on_device<small_blocks>(what, less_room, device);
        REQUIRE(less.report.wanted == whole.report.wanted);
        std::int64_t before = 0;
        std::int64_t unfitting = 0;
        for (std::int64_t number = 0; number < lists; ++number) {
            const std::vector<std::int32_t> right = whole.of(number);
            const bool names = !right.empty() && right[0] >= 0;
            before += names ? static_cast<std::int64_t>(right.size()) : 0;
            const bool fits = !names || before <= capacity;
            REQUIRE(less.of(number) == (fits ? right : std::vector<std::int32_t>{-1}));
            unfitting += fits ? 0 : 1;
        }
        REQUIRE(less.report.unfitting == unfitting);
        REQUIRE((unfitting == 0) == (capacity == whole.report.wanted));
    }
    using T = small_blocks::element;
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
                            -std::numeric_limits<float>::infinity()}) {
        scene<T> spoilt({2, 2, 64, 16, 8}, {{1, up::request_tag::prefill, 0, {200}}});
        recipe plain;
        plain.heads = 2;
        plain.sampling = {32, 8};
        plain.options.rule = up::selection_rule::top_p(0.8, up::mass_scope::all);
        plain.options.sink = 10;
        plain.options.window = 0;
        const own_lists good = list_on_device<small_blocks>(spoilt, plain, device);
        spoilt.keys.keys[std::size_t{100} * 128 + 64 + 3] = up::from_float<T>(bad);
        const own_lists came = list_on_device<small_blocks>(spoilt, plain, device);
        std::int64_t untrusted = 0;
        for (std::int64_t number = 0; number < 14; ++number) {
            CAPTURE(bad, number);
            const bool sees = number % 2 == 1 && number / 2 >= 3;
            REQUIRE(came.of(number) == (sees ? std::vector<std::int32_t>{-1} : good.of(number)));
            untrusted += sees ? 1 : 0;
        }
        REQUIRE(came.report.untrusted == untrusted);
    }
    // Row maps that name no row of their segment: those lists read everything, and nothing else happens.
    auto mapped = make_scene<small_blocks>(2, ragged_requests(16), how);
    const own_lists good = list_on_device<small_blocks>(mapped, how, device);
    for (const std::int32_t row : {-1, 2147483647, -2147483647 - 1, 1 << 20}) {
        CAPTURE(row);
        device_call<small_blocks> call(mapped, how, device);
        std::vector<std::int32_t> rows = mapped.kept.kept_to_old;
        rows[static_cast<std::size_t>(mapped.kept.cu_segments[1]) - 1] = row;
        call.on_device().assign_rows(rows, mapped.kept.cu_segments);
        call.put(nullptr);
        const own_lists came = call.get();
        const std::int64_t last = (mapped.kept.cu_segments[1] - 1) / how.sampling.query_rows;
        for (std::int64_t number = 0; number < last * how.heads; ++number) {
            REQUIRE(came.of(number) == good.of(number));
        }
        for (std::int32_t head = 0; head < how.heads; ++head) {
            REQUIRE(came.of(last * how.heads + head) == std::vector<std::int32_t>{-1});
        }
        rows = mapped.kept.cu_segments;
        rows[3] = row;
        call.on_device().assign_rows(mapped.kept.kept_to_old, rows);
        call.put(nullptr);
        uniprefill_test::check_cuda(cudaDeviceSynchronize(), "nonsense in kept.cu_segments");
        call.check_guards();
    }
}

TEST_CASE("device lists by query block: replayed with other contents, without a call but launches", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const up::cuda_device device = importance_test::this_device();
    recipe how;
    const std::vector<request> long_ones{{51, up::request_tag::prefill, 0, {500}},
                                         {52, up::request_tag::prefill, 0, {300, 130}},
                                         {53, up::request_tag::prefill, 0, {70}}};
    const std::vector<request> short_ones{{54, up::request_tag::chunk, 0, {200}},
                                          {55, up::request_tag::prefill, 0, {90, 310}},
                                          {56, up::request_tag::decode, 0, {60}}};
    auto what = make_scene<small_blocks>(2, long_ones, how);
    device_call<small_blocks> call(what, how, device);
    call.put(nullptr);
    const own_lists first = call.get();
    const cuda_calls before = cuda_calls::now();
    call.put(nullptr);
    REQUIRE(before.since() == "");
    captured_graph graph([&](cudaStream_t stream) { call.put(stream); });
    call.forget();
    graph.replay();
    REQUIRE(call.get().offsets == first.offsets);
    REQUIRE(call.get().blocks == first.blocks);
    device_call<small_blocks> silent(what, how, device);
    silent.put(nullptr);
    REQUIRE(silent.get().report.wanted == first.report.wanted);
    silent.forget_lists_and_report_no_more();
    silent.put(nullptr);
    REQUIRE(silent.get().offsets == first.offsets);
    REQUIRE(silent.get().blocks == first.blocks);
    auto other = make_scene<small_blocks>(2, short_ones, how);
    call.on_device().assign(other);
    call.forget();
    graph.replay();
    const own_lists came = call.get();
    const own_lists right = list_on_device<small_blocks>(other, how, device);
    const std::int64_t lists =
        std::int64_t{other.num_queries() / how.sampling.query_rows + other.keys.num_segments()} * how.heads;
    std::int64_t alike = 0;
    for (std::int64_t number = 0; number < lists; ++number) {
        alike += came.of(number) == right.of(number) ? 1 : 0;
    }
    REQUIRE(alike == lists);
}

TEMPLATE_TEST_CASE("device lists by query block: attention reads them", "[gpu]", small_blocks, usual_blocks) {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = typename TestType::element;
    for (const std::int32_t kind : {0, 1, 3}) {
        recipe how;
        auto what = make_scene<TestType>(kind, ragged_requests(TestType::G), how);
        const own_lists made = list_on_device<TestType>(what, how, importance_test::this_device());
        what.lists = made.as_set();
        device_scene<T> on_device(what);
        const caches<T> k(what.keys);
        const caches<T> v(what.values);
        const device_caches<T> device_k(k);
        const device_caches<T> device_v(v);
        std::vector<output<T>> results;
        for (const up::cuda_device& device : each_body<true>()) {
            results.push_back(attend_on_device<up::attention_policy<TestType::G, TestType::D>>(
                what, on_device, device_k.page_table(), device_v.page_table(), device));
        }
        static_cast<void>(check_on_device(what, results, uniprefill_test::scaled(24, 6)));
    }
}

TEST_CASE("device lists by query block: workspaces are as documented") { // needs no device
    up::limits bounds;
    bounds.max_rows = 5000;
    bounds.max_cached_tokens = 700;
    bounds.max_segments = 300;
    bounds.num_heads = 12;
    bounds.num_kv_heads = 2;
    const up::query_sampling sampling{48, 5}; // 10 samples of 6 heads: groups of two query blocks
    up::cuda_device device;
    device.num_multiprocessors = 100;
    const auto rounded = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
    constexpr std::int64_t B = 5000 / 48 + 300;
    const auto check_of = [&](auto of, std::int64_t N, std::int64_t slots) {
        using of_case = decltype(of);
        bounds.head_dim = of_case::D;
        bounds.block_rows = of_case::G;
        const auto bytes = [&](const up::cuda_device& on) {
            return static_cast<std::int64_t>(lister_of<of_case>(bounds, sampling, on).workspace_bytes());
        };
        const auto documented = [&](std::int64_t ctas) {
            return rounded(B * 12 * 4) + rounded(B * 12 * 4 * ((N + 31) / 32)) + rounded(301 * 4) +
                   rounded(4) + rounded(ctas * 512 * slots) + rounded(ctas * 8 * N);
        };
        CAPTURE(N, slots);
        REQUIRE(bytes(device) == documented(200));
        up::cuda_device other = device;
        other.max_ctas = 7;
        REQUIRE(bytes(other) == documented(7));
        other.max_ctas = 0;
        other.num_multiprocessors = 1000;
        REQUIRE(bytes(other) == documented(2 * (B / 2 + 300)));
    };
    check_of(small_blocks{}, 313, 79 * 4); // tiles of 64 keys, four blocks each
    check_of(usual_blocks{}, 79, 79);
    check_of(large_blocks{}, 20, 79); // blocks of four tiles
    check_of(long_rows{}, 157, 157);  // tiles of 32
}

TEST_CASE("device lists by query block: wrong arguments are refused, and nothing is launched", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    using T = usual_blocks::element;
    const up::cuda_device device = importance_test::this_device();
    recipe how;
    auto what = make_scene<usual_blocks>(0, ragged_requests(64), how);
    device_scene<T> on_device(what);
    const caches<T> cached(what.keys);
    const device_caches<T> device_cached(cached);
    const device_lists lists(make_room(what, how));
    const device_array<std::int32_t> row_map(1);
    const device_array<float> key_scales(1);
    struct arguments {
        up::limits bounds;
        up::query_sampling sampling;
        up::cuda_device device;
        up::head_rows<const T> queries;
        up::key_source<T, up::page_table_cache<T>> keys;
        up::attention_options attention;
        up::batch_view batch;
        up::selection kept;
        up::list_options<> options;
        up::block_lists out;
        std::size_t bytes_less = 0;
    };
    const auto refuse = [&](const std::string& argument, up::status_code code, auto spoil) {
        arguments with{what.keys.tight_limits(),
                       how.sampling,
                       device,
                       on_device.query_rows(),
                       {on_device.key_rows(), device_cached.page_table()},
                       on_device.options(),
                       on_device.batch(),
                       on_device.kept(),
                       how.options,
                       lists.view()};
        const std::size_t bytes =
            lister_of<usual_blocks>(with.bounds, with.sampling, device).workspace_bytes();
        const device_array<unsigned char> memory(bytes);
        spoil(with);
        const up::status done =
            lister_of<usual_blocks>(with.bounds, with.sampling, with.device)
                .run(with.queries, with.keys, with.attention, with.batch, with.kept, with.options, with.out,
                     up::workspace(memory.data(), bytes - with.bytes_less), nullptr);
        INFO(argument << ": " << message(done));
        REQUIRE(done.argument == argument);
        REQUIRE(done.code == code);
        REQUIRE(lists.get(with.out).offsets[0] == INT64_MIN);
    };
    constexpr auto invalid = up::status_code::invalid_argument;
    constexpr auto range = up::status_code::out_of_range;
    constexpr auto unsupported = up::status_code::not_supported;
    refuse("queries", invalid, [](arguments& a) { a.queries.data = nullptr; });
    refuse("queries", up::status_code::misaligned, [](arguments& a) { ++a.queries.data; });
    refuse("keys.rows", up::status_code::misaligned, [](arguments& a) { ++a.keys.rows.row_stride; });
    refuse("keys.cached.table", invalid, [](arguments& a) { a.keys.cached.table = nullptr; });
    refuse("params.scale", invalid, [](arguments& a) { a.attention.params.scale = -1; });
    refuse("params.key_scales", unsupported,
           [&](arguments& a) { a.attention.params.key_scales = key_scales.data(); });
    refuse("attention.window", invalid, [](arguments& a) { a.attention.window = -1; });
    refuse("attention.cached_positions_stride", invalid, [&](arguments& a) {
        a.attention.cached_positions = a.batch.positions;
        a.attention.cached_positions_stride = -1;
    });
    refuse("options.window", invalid, [](arguments& a) { a.options.window = -1; });
    refuse("options.sink", invalid, [](arguments& a) { a.options.sink = -1; });
    refuse("rule.p", invalid, [](arguments& a) { a.options.rule.p = {0}; });
    refuse("kept.kept_bound", range, [&](arguments& a) {
        a.kept.identity = false;
        a.kept.cu_segments = a.kept.kept_to_old = row_map.data();
        a.kept.kept_bound = a.bounds.max_rows + 1;
    });
    refuse("limits.max_rows", range, [](arguments& a) { a.bounds.max_rows = 64 << 21; });
    refuse("kept.space", unsupported, [](arguments& a) { a.kept.space = up::memory_space::host; });
    refuse("batch.space", unsupported, [](arguments& a) { a.batch.space = up::memory_space::host; });
    refuse("sampling.sample", invalid, [](arguments& a) { a.sampling = {1024, 4}; });
    refuse("out.query_rows", invalid, [](arguments& a) { a.sampling = {32, 8}; });
    refuse("out.num_heads", invalid, [](arguments& a) { ++a.out.num_heads; });
    refuse("out.capacity", invalid, [](arguments& a) { a.out.capacity = -1; });
    refuse("out", invalid, [](arguments& a) { a.out.blocks = nullptr; });
    refuse("out.space", unsupported, [](arguments& a) { a.out.space = up::memory_space::host; });
    refuse("out.max_query_blocks", range, [](arguments& a) { --a.out.max_query_blocks; });
    refuse("device", unsupported, [](arguments& a) { a.device.compute_capability = 75; });
    refuse("workspace", up::status_code::workspace_too_small, [](arguments& a) { a.bytes_less = 1; });
}
