// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The counter counts, and a launch of the library calls nothing that it counts.

#include "support/cuda.cuh"
#include "support/cuda_calls.hpp"

#include <uniprefill/core/cuda.cuh>

#include <cstddef>
#include <string>
#include <thread>

namespace up = uniprefill;
using uniprefill_test::captured_graph;
using uniprefill_test::cuda_calls;
using uniprefill_test::device_array;
using uniprefill_test::has_device;

namespace {

/// Adds 1 to each element; two launches in a row depend on each other.
__global__ void increment(int* values, int count) {
    up::detail::let_next_kernel_start();
    up::detail::wait_for_previous_kernel();
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        ++values[i];
    }
}

up::cuda_device current_device() {
    up::cuda_device device;
    REQUIRE(up::cuda_device::current(device).ok());
    return device;
}

} // namespace

TEST_CASE("the counter sees what a hot path may not call, from any thread") {
    const cuda_calls before = cuda_calls::now();
    CHECK(before.since() == "");
    int value = 0;
    // Without a device these fail, which counts as well.
    static_cast<void>(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 0));
    std::thread([] { static_cast<void>(cudaDeviceSynchronize()); }).join();
    CHECK(before.since() == "cudaDeviceSynchronize x1, cudaDeviceGetAttribute x1");
    const cuda_calls after = cuda_calls::now();
    CHECK(after.since() == "");
    void* memory = nullptr;
    static_cast<void>(cudaMalloc(&memory, 16));
    static_cast<void>(cudaFree(memory));
    CHECK(after.since() == "cudaMalloc x1, cudaFree x1");
    static_cast<void>(cudaGetLastError());
}

TEST_CASE("a launch calls nothing that is forbidden, and launches that overlap keep their order") {
    if (!has_device()) {
        return;
    }
    const up::cuda_device device = current_device();
    const int count = 100000;
    const device_array<int> values(std::vector<int>(count, 0));
    cudaStream_t stream = nullptr;
    uniprefill_test::check_cuda(cudaStreamCreate(&stream), "cudaStreamCreate");

    const auto launch_all = [&](cudaStream_t queue) {
        for (int i = 0; i < 100; ++i) {
            REQUIRE(up::detail::launch(device, increment, dim3((count + 255) / 256), dim3(256), 0, queue,
                                       values.data(), count)
                        .ok());
        }
    };
    const cuda_calls before = cuda_calls::now();
    launch_all(stream);
    CHECK(before.since() == "");
    CHECK(values.get() == std::vector<int>(count, 100));

    captured_graph graph(launch_all);
    graph.replay();
    graph.replay();
    CHECK(values.get() == std::vector<int>(count, 300));
    cudaStreamDestroy(stream);
}

TEST_CASE("a launch that the runtime refuses comes back as a status with the runtime's own code") {
    if (!has_device()) {
        return;
    }
    struct refused_launch {
        const char* what;
        unsigned threads;
        std::size_t shared_bytes;
    };
    int* const nothing = nullptr;
    for (const refused_launch& bad :
         {refused_launch{"too many threads", 100000, 0}, refused_launch{"no threads", 0, 0},
          refused_launch{"too much shared memory", 32, std::size_t{1} << 30}}) {
        INFO(bad.what);
        // Which of its codes it is differs with the runtime: ask it.
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(1);
        config.blockDim = dim3(bad.threads);
        config.dynamicSmemBytes = bad.shared_bytes;
        const cudaError_t told = cudaLaunchKernelEx(&config, increment, nothing, 0);
        static_cast<void>(cudaGetLastError());
        REQUIRE(told != cudaSuccess);

        const up::status refused = up::detail::launch(current_device(), increment, dim3(1), dim3(bad.threads),
                                                      bad.shared_bytes, nullptr, nothing, 0);
        static_cast<void>(cudaGetLastError());
        CHECK(refused.code == up::status_code::backend_error);
        CHECK(std::string(refused.argument) == "launch");
        CHECK(refused.came == told);
    }
    // What was refused left nothing behind.
    const device_array<int> value(std::vector<int>{0});
    CHECK(
        up::detail::launch(current_device(), increment, dim3(1), dim3(32), 0, nullptr, value.data(), 1).ok());
    CHECK(value.get() == std::vector<int>{1});
}
