// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The facade on a device does what the host's does: eagerly and replayed, cumulative and with revival, alone
// and with ranks.

#include "gpu_facade.cuh"
#include "gpu_ranks.cuh"
#include "support/cuda_calls.hpp"

#include <uniprefill/propagate/add_norm.cuh>

#include <iostream>

using namespace pipeline_test;
using uniprefill_test::captured_graph;
using uniprefill_test::cuda_calls;

namespace pipeline_test {

/// So many ranks with the same heads, one of which reports a fault.
template <class = void>
__global__ void reduce_equal_ranks(std::int64_t* buffer, std::int64_t count, std::int64_t ranks,
                                   std::int64_t faulty_word) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        buffer[i] = buffer[i] * ranks + (i == faulty_word ? up::fault_word(up::mass_fault::rank) : 0);
    }
}
struct equal_ranks {
    std::int64_t ranks;
    std::int64_t faulty_word;

    up::status operator()(std::int64_t* buffer, std::int64_t count, up::rank_reduction how,
                          up::backend::cuda::stream stream) const noexcept {
        if (how != up::rank_reduction::sum) {
            return up::failure(up::status_code::invalid_argument, "how", "a sum over heads", 1);
        }
        reduce_equal_ranks<><<<4, 256, 0, stream>>>(buffer, count, ranks, faulty_word);
        return up::cuda_result(cudaPeekAtLastError(), "reduce_equal_ranks");
    }
};

} // namespace pipeline_test

TEST_CASE("the facade on a device decides and moves as the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    for (const up::propagation mode : modes) {
        for (const up::cuda_device& device : each_body<true>()) {
            INFO((mode == up::propagation::revive ? "revive" : "cumulative"));
            const content what = first_content();
            device_engine engine(what, some_layers(), mode, device);
            engine.load(what);
            const cuda_calls before = cuda_calls::now();
            require_ok(engine.run(nullptr, false));
            CHECK(before.since() == "");
            engine.load(what);
            require_ok(engine.run(nullptr, true));
            const std::int32_t left = compare_with_host(what, engine, engine.recorded());
            CHECK(left > 100);
            CHECK(left < what.rows() - 200);
        }
    }
}

TEST_CASE("a captured step is replayed with other requests and rules", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content contents[] = {first_content(), second_content()};
    for (const up::propagation mode : scaled_modes()) {
        INFO((mode == up::propagation::revive ? "revive" : "cumulative"));
        device_engine engine(contents[0], some_layers(), mode, this_device());
        engine.load(contents[0]);
        captured_graph graph([&](cudaStream_t stream) { require_ok(engine.run(stream, true)); });
        for (const std::size_t which : {1u, 0u, 1u}) {
            CAPTURE(which);
            engine.load(contents[which]);
            graph.replay();
            compare_with_host(contents[which], engine, engine.recorded());
        }
    }
}

TEST_CASE("masses by head are written at every layer, and lists of them are the host's, captured or not",
          "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content contents[] = {first_content(), second_content()};
    for (const up::propagation mode : scaled_modes()) {
        INFO((mode == up::propagation::revive ? "revive" : "cumulative"));
        device_engine engine(contents[0], some_layers(), mode, this_device());
        engine.want_lists();
        const auto compare = [&](const content& what) {
            compare_with_host(what, engine, engine.recorded(), 1, -1,
                              engine.recorded_lists(what.batch().num_segments));
        };
        engine.load(contents[0]);
        const cuda_calls before = cuda_calls::now();
        require_ok(engine.run(nullptr, false));
        CHECK(before.since() == "");
        engine.load(contents[0]);
        require_ok(engine.run(nullptr, true));
        compare(contents[0]);
        captured_graph graph([&](cudaStream_t stream) { require_ok(engine.run(stream, true)); });
        for (const std::size_t which : {1u, 0u, 1u}) {
            CAPTURE(which);
            engine.load(contents[which]);
            graph.replay();
            compare(contents[which]);
        }
    }
}

TEST_CASE("ranks are reduced between masses and decision, and a fault of one keeps all", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content what = first_content();
    device_engine engine(what, some_layers(), up::propagation::cumulative, this_device());
    engine.load(what);
    constexpr std::int64_t ranks = 3;
    constexpr std::int64_t faulty_segment = 1;
    require_ok(
        engine.run(nullptr, true, equal_ranks{ranks, 2 * engine.bounds().max_blocks() + faulty_segment}));
    const std::vector<seen> recorded = engine.recorded();
    for (const seen& one : recorded) {
        CHECK(one.outcomes[faulty_segment].reason == up::keep_reason::rank);
        CHECK(one.outcomes[faulty_segment].kept == 170);
    }
    compare_with_host(what, engine, recorded, ranks, faulty_segment);
}

TEST_CASE("heads shared by ranks that are threads: masses and keep sets as if one had them all", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content first = first_content();
    for (const up::propagation mode : scaled_modes()) {
        engine_crew ranks(first, some_layers(), mode, places_of_ranks(kv_heads, true));
        thread_ranks group(up::mass_view::rank_buffer_size(first.limits()));
        for (const content& what : {first, second_content(), content_with_fault()}) {
            ranks.load(what);
            ranks.run([&](int rank) { return thread_ranks::reduction{&group, rank}; });
            check_ranks(what, ranks.recorded(), of_one_engine(first, what, mode));
        }
        // The fault was one rank's.
        const std::vector<std::vector<seen>> together = ranks.recorded();
        ranks.load(content_with_fault());
        ranks.run([](int) { return up::no_reduction{}; });
        const std::vector<std::vector<seen>> apart = ranks.recorded();
        for (std::size_t rank = 0; rank < kv_heads; ++rank) {
            const bool is_faulty = rank == kv_heads - 1;
            CHECK((apart[rank][0].outcomes[0].reason == up::keep_reason::non_finite) == is_faulty);
            CHECK(together[rank][0].outcomes[0].reason == up::keep_reason::non_finite);
            CHECK(together[rank][0].outcomes[0].kept == 533);
            CHECK(together[rank][0].outcomes[1].reason == up::keep_reason::selected);
        }
    }
}

TEST_CASE("engines on every device at once, each on a thread, make the same bits as one alone", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content contents[] = {first_content(), second_content()};
    std::vector<engine_place> places;
    for (int device = 0; device < num_devices(); ++device) {
        use_device(device);
        for (int copy = 0; copy < uniprefill_test::scaled(2); ++copy) {
            for (const up::cuda_device& body : each_body<true>()) {
                places.push_back({body});
            }
        }
    }
    use_device(0);
    std::cout << places.size() << " engines on " << num_devices() << " devices" << std::endl;
    const auto alone = [](int) { return up::no_reduction{}; };
    for (const up::propagation mode : scaled_modes()) {
        engine_crew engines(contents[0], some_layers(), mode, places);
        // Bodies round differently: each is compared with itself.
        std::vector<std::vector<std::vector<seen>>> wanted;
        for (const content& what : contents) {
            wanted.emplace_back();
            for (const engine_place& place : places) {
                use_device(0);
                up::cuda_device device = this_device();
                device.body = place.device.body;
                device_engine one(contents[0], some_layers(), mode, device);
                one.load(what);
                require_ok(one.run(nullptr, true));
                wanted.back().push_back(one.recorded());
            }
        }
        const auto compare = [&](std::size_t which) {
            const std::vector<std::vector<seen>> came = engines.recorded();
            for (std::size_t engine = 0; engine < came.size(); ++engine) {
                INFO("engine " << engine << " of " << came.size());
                check_same(contents[which], came[engine], wanted[which][engine]);
            }
        };
        for (const std::size_t which : {0u, 1u, 0u}) {
            engines.load(contents[which]);
            engines.run(alone);
            compare(which);
        }
        // A thread that captures doesn't look at what others do.
        engines.capture(cudaStreamCaptureModeThreadLocal, alone);
        for (const std::size_t which : {1u, 0u}) {
            engines.load(contents[which]);
            engines.replay();
            compare(which);
        }
    }
}

TEST_CASE("fixed budgets give bounds that the host knows", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const content what({{21, up::request_tag::prefill, 0, {533}, {1, 20, 40, 0}}}, {rule{}});
    device_engine engine(what, {{1, rule::fixed_budget(200), nullptr}, {4, rule::fixed_budget(200), nullptr}},
                         up::propagation::cumulative, this_device());
    engine.load(what);
    require_ok(engine.run(nullptr, true, up::no_reduction{}, 200));
    CHECK(compare_with_host(what, engine, engine.recorded()) == 200);
}

TEST_CASE("an engine's own fused add and norm takes the step's scratch, between decision and leave()",
          "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    constexpr std::int32_t width = 64;
    const content what = first_content();
    const up::cuda_device device = this_device();
    const up::selecting_layer<rule> layers[] = {{0, rule::top_p(0.9), nullptr}};
    const device_sparsifier sparsifier(what.limits(), {layers, 1, up::propagation::cumulative, {}}, device);
    require_ok(sparsifier.prepare<bf16, bf16, cache_view>());
    device_step<bf16> arrays(what.layers[0]);
    const device_caches<bf16> cached(what.cached[0]);
    const std::vector<bf16> values(what.layers[0].queries.begin(),
                                   what.layers[0].queries.begin() + std::ptrdiff_t{what.rows()} * width);
    const device_array<bf16> hidden(values), residual(values), out(values.size()),
        out_residual(values.size());
    const device_array<bf16> weight(std::vector<bf16>(values.begin(), values.begin() + width));
    const device_array<unsigned char> memory(sparsifier.workspace_bytes());
    const auto rows = [&](const device_array<bf16>& tensor) {
        return up::element_rows<bf16>{tensor.data(), width, width, what.rows()};
    };
    const auto read = [](const up::element_rows<bf16>& tensor) {
        return up::element_rows<const bf16>{tensor.data, tensor.row_stride, tensor.row_elements,
                                            tensor.num_rows};
    };
    cudaStream_t stream = nullptr;
    check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");
    up::prefill_step<policy, up::backend::cuda> step(sparsifier);
    up::selection kept;
    require_ok(step.begin(arrays.batch(), {memory.data(), memory.size()}, stream));
    require_ok(step.decide(0, arrays.query_rows(),
                           up::key_source<bf16, cache_view>{arrays.key_rows(), cached.contiguous()}, {},
                           arrays.batch().cached_lens, kept, stream));
    up::add_norm<bf16> norm{read(rows(hidden)), read(rows(residual)), rows(out), rows(out_residual),
                            weight.data()};
    require_ok(up::compact_add_norm(kept, norm, {}, device, stream)); // elsewhere, which needs no scratch
    norm.out_hidden = rows(hidden);
    norm.out_residual = rows(residual);
    require_ok(up::compact_add_norm(kept, norm, step.scratch(), device, stream));
    require_ok(step.leave(kept, nullptr, 0, stream));
    check_cuda(cudaStreamSynchronize(stream), "the step");
    cudaStreamDestroy(stream);

    std::int32_t left = 0;
    check_cuda(cudaMemcpy(&left, step.rows().cu_seqlens + step.rows().num_requests, sizeof left,
                          cudaMemcpyDeviceToHost),
               "rows left");
    CHECK(left > 100);
    CHECK(left < what.rows());
    const auto same = [&](const device_array<bf16>& a, const device_array<bf16>& b) {
        const auto count = static_cast<std::size_t>(left) * width; // nothing was written beyond
        const std::vector<bf16> these = a.get(count), those = b.get(count);
        return std::equal(these.begin(), these.end(), those.begin(),
                          [](bf16 x, bf16 y) { return x.bits == y.bits; });
    };
    CHECK(same(hidden, out));
    CHECK(same(residual, out_residual));
}

TEST_CASE("what the host can see is refused before anything is launched") {
    up::limits bounds;
    bounds.max_rows = 100;
    bounds.num_layers = 2;
    bounds.head_dim = D;
    bounds.block_rows = G;
    bounds.num_observations = N;
    const up::selecting_layer<rule> layers[] = {{1, rule::top_p(0.9), nullptr}};
    const auto made = [&](const up::sparsifier_options<rule>& options) {
        return device_sparsifier(bounds, options);
    };
    const device_sparsifier good = made({layers, 1, up::propagation::cumulative, {}});
    REQUIRE(good.check().ok());
    CHECK(good.selects(1));
    CHECK_FALSE(good.selects(0));

    up::sparsifier_options<rule> observed{layers, 1, up::propagation::cumulative, {}};
    observed.observer.on_decision = [](void*, const up::decision_metrics&) {};
    CHECK(made(observed).check().code == up::status_code::not_supported);
    CHECK(made(observed).workspace_bytes() == 0);
    const up::selecting_layer<rule> beyond[] = {{2, rule::top_p(0.9), nullptr}};
    CHECK(made({beyond, 1, up::propagation::cumulative, {}}).check().code == up::status_code::out_of_range);
    const up::selecting_layer<rule> bad_rule[] = {{0, rule::top_p(2.0), nullptr}};
    CHECK(made({bad_rule, 1, up::propagation::cumulative, {}}).check().layer == 0);

    // Sizes grow with every bound.
    const std::size_t bytes = good.workspace_bytes();
    CHECK(bytes > 0);
    for (std::int32_t up::limits::*bound :
         {&up::limits::max_rows, &up::limits::max_segments, &up::limits::max_cached_tokens}) {
        up::limits more = bounds;
        more.*bound += 1000;
        CHECK(device_sparsifier(more, {layers, 1, up::propagation::cumulative, {}}).workspace_bytes() >
              bytes);
    }

    up::prefill_step<policy, up::backend::cuda> step(good);
    const auto code_of = [](const up::status& done) { return done.code; };
    up::selection kept;
    const up::head_rows<const bf16> q{nullptr, D, D, 0, 1, D};
    const up::key_source<bf16> keys{q};
    up::batch_view batch;
    batch.space = up::memory_space::device;
    const guarded_buffer memory(bytes);
    up::workspace enough(memory.data(), bytes);
    CHECK(code_of(step.decide(1, q, keys, {}, nullptr, kept, nullptr)) == up::status_code::wrong_state);
    CHECK(code_of(step.leave(kept, nullptr, 0, nullptr)) == up::status_code::wrong_state);
    CHECK(code_of(step.begin(batch, {}, nullptr)) == up::status_code::invalid_argument);
    CHECK(code_of(step.begin(batch, {memory.data(), bytes - 1}, nullptr)) ==
          up::status_code::workspace_too_small);
    batch.space = up::memory_space::host;
    CHECK(code_of(step.begin(batch, enough, nullptr)) == up::status_code::not_supported);
    batch.space = up::memory_space::device;
    batch.num_rows = 101;
    CHECK(code_of(step.begin(batch, enough, nullptr)) == up::status_code::out_of_range);
    batch.num_rows = 0;
    // A step of nothing is a step, and launches nothing.
    require_ok(step.begin(batch, enough, nullptr));
    CHECK(code_of(step.decide(2, q, keys, {}, nullptr, kept, nullptr)) == up::status_code::out_of_range);
    CHECK(code_of(step.decide(1, q, keys, {}, nullptr, 101, kept, nullptr)) == up::status_code::out_of_range);
    CHECK(step.decide(1, q, keys, {}, nullptr, 101, kept, nullptr).layer == 1);
    require_ok(step.decide(1, q, keys, {}, nullptr, kept, nullptr));
    CHECK(kept.identity);
    require_ok(step.leave(kept, nullptr, 0, nullptr));
    // Masses by head are asked for at a layer that doesn't select, too.
    std::int64_t masses[4] = {};
    step.want_head_masses({masses, masses + 2, 2, 3});
    const up::status wrong = step.decide(0, q, keys, {}, nullptr, kept, nullptr);
    CHECK(wrong.argument == std::string("per_head.num_heads"));
    CHECK(wrong.layer == 0);
    step.want_head_masses({});
    require_ok(step.decide(0, q, keys, {}, nullptr, kept, nullptr));
    CHECK(kept.identity);
    kept.space = up::memory_space::host;
    CHECK(code_of(step.leave(kept, nullptr, 0, nullptr)) == up::status_code::not_supported);
    CHECK(memory.is_unwritten());
}
