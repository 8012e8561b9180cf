// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CUDA estimator gives the same bits for any grid, packing and number of ranks, in a graph, and from any
// thread and device; a run makes no calls but launches.

#include "gpu_contracts.cuh"
#include "support/cuda_calls.hpp"
#include "support/scale.hpp"

#include <algorithm>
#include <atomic>
#include <iostream>
#include <memory>
#include <thread>

using namespace importance_test;
using uniprefill_test::captured_graph;
using uniprefill_test::check_cuda;
using uniprefill_test::cuda_calls;

TEST_CASE("device masses are the same bits for any grid and any packing", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{8, 2, D, G, N};
    both all(shape, some_requests());
    for (up::cuda_device device : each_body<has_sm90>()) {
        INFO(name_of(device));
        masses packed = all.estimate_here(device);
        for (const std::int32_t ctas : {1, 2, 7, 31}) {
            device.max_ctas = ctas;
            const masses again = all.estimate_here(device);
            CHECK((again.buffer == packed.buffer));
            CHECK((again.heads == packed.heads));
        }
        device.max_ctas = 0;
        std::int32_t segment = 0;
        for (const request& one : some_requests()) {
            both alone(shape, {one});
            masses single = alone.estimate_here(device);
            for (std::int32_t s = 0; s < static_cast<std::int32_t>(one.segments.size()); ++s, ++segment) {
                CAPTURE(segment);
                CHECK((of_segment(single, alone.host.batch(), s) ==
                       of_segment(packed, all.host.batch(), segment)));
            }
        }
    }
}

TEST_CASE("rank buffers add up to that of one rank", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{16, 8, D, G, N};
    both all(shape, some_requests());
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        const masses whole = all.estimate_here(device);
        for (const std::int32_t ranks : {2, 4, 8}) {
            up::limits bounds = all.bounds;
            bounds.num_global_heads = bounds.num_heads;
            bounds.num_heads /= ranks;
            bounds.num_kv_heads /= ranks;
            std::vector<std::int64_t> sum(whole.buffer.size(), 0);
            for (std::int32_t rank = 0; rank < ranks; ++rank) {
                auto queries = all.device.query_rows();
                queries.data += rank * bounds.num_heads * D;
                queries.num_heads = bounds.num_heads;
                auto keys = all.device.key_rows();
                keys.data += rank * bounds.num_kv_heads * D;
                keys.num_heads = bounds.num_kv_heads;
                auto cached = all.device_cached.contiguous();
                cached.data += rank * bounds.num_kv_heads * D;
                const masses part =
                    run_on_device<policy>(queries, up::key_source<bf16, cache_view>{keys, cached}, {},
                                          all.device.batch(), bounds, device);
                for (std::size_t i = 0; i < sum.size(); ++i) {
                    sum[i] += part.buffer[i];
                }
            }
            CAPTURE(ranks);
            const auto faults = sum.end() - bounds.max_segments;
            CHECK(std::equal(sum.begin(), faults, whole.buffer.begin()));
            CHECK(std::equal(faults, sum.end(), whole.buffer.end() - bounds.max_segments,
                             [](std::int64_t a, std::int64_t b) { return (a != 0) == (b != 0); }));
        }
    }
}

TEST_CASE("a run makes no calls but launches, and replays with other lengths and switches", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    const model shape{4, 2, D, G, N};
    const std::vector<request> first = some_requests();
    std::vector<request> second = first;
    second[0].segments = {200};
    second[0].forced = {{10, 20}, {30, 40}};
    second[1].options.enabled = 0;
    second[2].segments = {40, 300, 1};
    second[2].cached = 12;
    second[3].tag = up::request_tag::verify;
    second[4].segments = {40};
    second[5].seed = 61;
    second[5].cached = 600;
    const step<bf16> steps[] = {step<bf16>(shape, first), step<bf16>(shape, second)};
    const up::limits bounds = steps[0].tight_limits();
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        INFO(name_of(device));
        device_step<bf16> on_device(steps[0]);
        const caches<bf16> cached[] = {caches<bf16>(steps[0]), caches<bf16>(steps[1])};
        device_array<bf16> rows(cached[0].rows());
        cache_view view = cached[0].contiguous();
        view.data = rows.data();
        const up::importance_estimator<policy, up::backend::cuda> estimator(bounds, device);
        REQUIRE(estimator.template prepare<bf16, bf16, cache_view>().ok());
        const std::size_t bytes = estimator.workspace_bytes();
        const device_array<unsigned char> memory(bytes);
        const device_masses result(bounds);
        const auto run = [&](up::backend::cuda::stream stream) {
            const up::status done = estimator.run(
                on_device.query_rows(), up::key_source<bf16, cache_view>{on_device.key_rows(), view}, {},
                on_device.batch(), result.view(), result.head_view(), up::workspace(memory.data(), bytes),
                stream);
            REQUIRE(done.ok());
        };
        const cuda_calls before = cuda_calls::now();
        run(nullptr);
        CHECK(before.since() == "");
        masses eager = result.get();

        captured_graph graph(run);
        for (const std::int32_t which : {1, 0, 1}) {
            on_device.assign(steps[which]);
            // The second step's cache rows lie as far apart as the first's.
            std::vector<bf16> moved(cached[0].rows().size());
            const std::int64_t from = cached[which].contiguous().request_stride;
            for (std::int64_t r = 0; r < 6; ++r) {
                std::copy_n(cached[which].rows().begin() + r * from, from,
                            moved.begin() + r * view.request_stride);
            }
            rows.set(moved);
            graph.replay();
            masses replayed = result.get();
            run(nullptr);
            CHECK((replayed.buffer == result.get().buffer));
            masses host = estimate(steps[which], cached[which].contiguous(), {}, bounds);
            CHECK(worst_difference(replayed, host, steps[which].batch()) < 1);
            if (which == 0) {
                CHECK((replayed.buffer == eager.buffer));
                CHECK((replayed.heads == eager.heads));
            }
        }
    }
}

namespace {

int num_devices() {
    int count = 0;
    check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return count;
}
void use_device(int ordinal) {
    check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
}

/// What a thread works on: memory and a stream of its own on one device, and inputs that all share.
struct worker {
    int ordinal;
    up::cuda_device device;
    both& inputs;
    device_masses result;
    device_array<unsigned char> memory;
    cudaStream_t stream = nullptr;
    up::status prepared{}, done{};
    cudaError_t finished = cudaErrorUnknown;

    worker(int on, const up::cuda_device& what, both& all)
        : ordinal(on)
        , device(what)
        , inputs(all)
        , result(all.bounds)
        , memory(cuda_estimator(all.bounds).workspace_bytes()) {
        check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    worker(const worker&) = delete;
    worker& operator=(const worker&) = delete;
    ~worker() { cudaStreamDestroy(stream); }

    /// Like run() it judges nothing: assertions belong to the test's own thread.
    void prepare_and_run() {
        const cudaError_t chosen = cudaSetDevice(ordinal);
        prepared = cuda_estimator(inputs.bounds, device).prepare<bf16, bf16, cache_view>();
        run();
        finished = chosen != cudaSuccess ? chosen : finished;
    }
    void run() {
        done = cuda_estimator(inputs.bounds, device)
                   .run(inputs.device.query_rows(),
                        up::key_source<bf16, cache_view>{inputs.device.key_rows(),
                                                         inputs.device_cached.contiguous()},
                        {}, inputs.device.batch(), result.view(), result.head_view(),
                        up::workspace(memory.data(), memory.size()), stream);
        finished = cudaStreamSynchronize(stream);
    }
};

/// All of them at once, each on a thread of its own.
void run_together(std::vector<std::unique_ptr<worker>>& workers) {
    std::atomic<int> missing{static_cast<int>(workers.size())};
    std::vector<std::thread> threads;
    for (const std::unique_ptr<worker>& one : workers) {
        threads.emplace_back([&missing, &one] {
            for (--missing; missing.load() > 0;) { // so that they start together
            }
            one->prepare_and_run();
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

} // namespace

TEST_CASE("threads prepare and run at once, on every device", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    constexpr std::size_t num_threads = 8;
    const int devices = num_devices();
    std::cout << "devices: " << devices << (devices == 1 ? " (threads have no others to choose from)" : "")
              << std::endl;
    // Inputs, and what one thread alone makes of them, on each device in turn.
    std::vector<std::unique_ptr<both>> inputs;
    std::vector<std::vector<up::cuda_device>> bodies;
    std::vector<std::vector<masses>> alone;
    for (int d = 0; d < devices; ++d) {
        use_device(d);
        inputs.push_back(std::make_unique<both>(model{8, 2, D, G, N}, some_requests()));
        bodies.push_back(each_body<has_sm90>());
        alone.emplace_back();
        for (const up::cuda_device& device : bodies.back()) {
            CHECK(device.ordinal == d);
            alone.back().push_back(inputs.back()->estimate_here(device));
        }
        if (bodies[static_cast<std::size_t>(d)].size() == bodies[0].size()) {
            for (std::size_t b = 0; b < bodies[0].size(); ++b) {
                CHECK((alone.back()[b].buffer == alone[0][b].buffer));
                CHECK((alone.back()[b].heads == alone[0][b].heads));
            }
        }
    }
    for (int round = 0; round < uniprefill_test::scaled(5); ++round) {
        CAPTURE(round);
        std::vector<std::unique_ptr<worker>> workers;
        for (std::size_t t = 0; t < num_threads * static_cast<std::size_t>(devices); ++t) {
            const std::size_t d = t % static_cast<std::size_t>(devices);
            const auto& device = bodies[d][t / static_cast<std::size_t>(devices) % bodies[d].size()];
            use_device(static_cast<int>(d));
            workers.push_back(std::make_unique<worker>(static_cast<int>(d), device, *inputs[d]));
        }
        // As in a new process: nobody has prepared yet, so that the threads do it at the same time.
        for (int d = 0; d < devices; ++d) {
            use_device(d);
            for (const up::cuda_device& device : bodies[static_cast<std::size_t>(d)]) {
                if (forget_shared_memory(device)) {
                    worker unprepared(d, device, *inputs[static_cast<std::size_t>(d)]);
                    unprepared.run();
                    CHECK(unprepared.done.code == up::status_code::backend_error);
                    static_cast<void>(cudaGetLastError());
                    CHECK(unprepared.finished == cudaSuccess); // what had been launched before
                }
            }
        }
        run_together(workers);
        for (const std::unique_ptr<worker>& one : workers) {
            INFO("device " << one->ordinal << ", " << name_of(one->device));
            INFO(message(one->prepared) << ", " << message(one->done));
            REQUIRE(one->prepared.ok());
            REQUIRE(one->done.ok());
            REQUIRE(one->finished == cudaSuccess);
            use_device(one->ordinal);
            const auto which = static_cast<std::size_t>(one->ordinal);
            const masses& wanted = alone[which][one->device.body == up::cuda_body::sm90 ? 1 : 0];
            const masses came = one->result.get();
            CHECK((came.buffer == wanted.buffer));
            CHECK((came.heads == wanted.heads));
        }
    }
    use_device(0);
}
