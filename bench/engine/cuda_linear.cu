// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A linear attention layer on a device but for its products, in Qwen3-Next's sizes: the gated delta rule
// alone, by columns of the state in a thread block and by working memory, and what is done to rows around it.

#include "../support/device_timer.cuh"

#include "engine/cuda/gated_delta.hpp"
#include "engine/cuda/linear_rows.hpp"

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

namespace {

namespace up = uniprefill;
using namespace device_bench;
using engine::cuda::gated_delta_call;

constexpr std::int32_t k_heads = 16;
constexpr std::int32_t v_heads = 32;
constexpr std::int32_t dim = gated_delta_call::head_dim;
constexpr std::int32_t channels = (2 * k_heads + v_heads) * dim;
constexpr std::int32_t elements = channels + v_heads * (dim + 2);

std::size_t count(std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns);
}

/// A layer's rows, of so many requests of one length, behind the input projection.
class layer {
  public:
    layer(std::int32_t rows, std::int32_t requests, std::size_t most)
        : rows_(rows)
        , requests_(requests)
        , in_(count(rows, elements) * sizeof(up::bfloat16))
        , mixed_(count(rows, channels))
        , out_(count(rows, v_heads * dim))
        , weights_(std::vector<float>(count(4, channels), 0.5f))
        , ones_(std::vector<float>(count(v_heads, dim), 1.0f))
        , beta_(count(rows, v_heads))
        , decay_(count(rows, v_heads))
        , state_(count(requests, v_heads * dim * dim))
        , cu_seqlens_(boundaries(rows, requests))
        , memory_bytes_(engine::cuda::gated_delta_bytes(rows, requests, v_heads, most))
        , memory_(memory_bytes_) {
        fill_normal<up::bfloat16>(in_, count(rows, elements), 7);
        before(nullptr);
        device_bench::check(cudaDeviceSynchronize(), "rows");
    }

    void convolve(cudaStream_t on) const {
        engine::cuda::short_convolution_call call;
        call.in = in_.data<up::bfloat16>();
        call.in_stride = elements;
        call.weights = weights_.data();
        call.channels = channels;
        call.unit_channels = 2 * k_heads * dim;
        call.cu_seqlens = cu_seqlens_.data();
        call.requests = requests_;
        call.rows = rows_;
        call.out = mixed_.data();
        engine::cuda::short_convolution(call, on);
    }
    void before(cudaStream_t on) const {
        convolve(on);
        engine::cuda::delta_gates(in_.data<up::bfloat16>() + elements - 2 * v_heads, elements, ones_.data(),
                                  ones_.data(), rows_, v_heads, beta_.data(), decay_.data(), on);
    }
    void rule(std::int32_t state_columns, cudaStream_t on) const {
        gated_delta_call call;
        call.q = mixed_.data();
        call.k = call.q + k_heads * dim;
        call.v = call.k + k_heads * dim;
        call.q_stride = call.k_stride = call.v_stride = channels;
        call.log_decay = decay_.data();
        call.beta = beta_.data();
        call.k_heads = k_heads;
        call.v_heads = v_heads;
        call.cu_seqlens = cu_seqlens_.data();
        call.requests = requests_;
        call.rows = rows_;
        call.state = state_.data();
        call.out = out_.data();
        call.out_stride = v_heads * dim;
        call.state_columns = state_columns;
        engine::cuda::gated_delta(call, memory_.data<void>(), memory_bytes_, on);
    }
    void after(cudaStream_t on) const {
        engine::cuda::gated_norm(out_.data(), in_.data<up::bfloat16>() + channels, elements, ones_.data(),
                                 1e-6f, rows_, v_heads, on);
    }

  private:
    static std::vector<std::int32_t> boundaries(std::int32_t rows, std::int32_t requests) {
        std::vector<std::int32_t> all;
        for (std::int32_t request = 0; request <= requests; ++request) {
            all.push_back(static_cast<std::int32_t>(std::int64_t{rows} * request / requests));
        }
        return all;
    }

    std::int32_t rows_;
    std::int32_t requests_;
    device_bytes in_;
    device_array<up::bfloat16> mixed_, out_;
    device_array<float> weights_, ones_, beta_, decay_, state_;
    device_array<std::int32_t> cu_seqlens_;
    std::size_t memory_bytes_;
    device_bytes memory_;
};

void measure(benchmark::State& state, std::int32_t rows, std::int32_t requests, std::size_t most,
             const std::function<void(const layer&, cudaStream_t)>& work) {
    const layer of(rows, requests, most);
    device_timer timer;
    const auto run = [&](cudaStream_t on) { work(of, on); };
    for (int i = 0; i < 3; ++i) {
        timer.time(run);
    }
    std::vector<float> times;
    for (auto _ : state) {
        times.push_back(timer.time(run));
        state.SetIterationTime(static_cast<double>(times.back()) * 1e-3);
    }
    device_bench::check(cudaGetLastError(), "launch");
    state.counters["median_ms"] = median(times);
}

void add(const std::string& name, std::int32_t rows, std::int32_t requests, std::size_t most,
         const std::function<void(const layer&, cudaStream_t)>& work) {
    benchmark::RegisterBenchmark(name.c_str(),
                                 [=](benchmark::State& state) { measure(state, rows, requests, most, work); })
        ->UseManualTime()
        ->Iterations(20)
        ->Unit(benchmark::kMillisecond);
}

} // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    cudaDeviceProp properties{};
    device_bench::check(cudaGetDeviceProperties(&properties, 0), "device");
    int driver = 0;
    device_bench::check(cudaDriverGetVersion(&driver), "driver");
    benchmark::AddCustomContext("gpu", properties.name);
    benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
    for (const std::int32_t rows : {4096, 32768, 131072, 262144}) {
        for (const std::int32_t requests : {1, 8}) {
            const std::string size = "rows:" + std::to_string(rows) + "/requests:" + std::to_string(requests);
            for (const std::int32_t columns : {32, 64}) {
                for (const std::size_t mebibytes : {256, 1024, 4096}) {
                    add("gated_delta/" + size + "/state_columns:" + std::to_string(columns) +
                            "/memory_MiB:" + std::to_string(mebibytes),
                        rows, requests, mebibytes << 20,
                        [columns](const layer& of, cudaStream_t on) { of.rule(columns, on); });
                }
            }
            add("convolution/" + size, rows, requests, 1,
                [](const layer& of, cudaStream_t on) { of.convolve(on); });
            add("convolution_and_gates/" + size, rows, requests, 1,
                [](const layer& of, cudaStream_t on) { of.before(on); });
            add("gated_norm/" + size, rows, requests, 1,
                [](const layer& of, cudaStream_t on) { of.after(on); });
        }
    }
    benchmark::RunSpecifiedBenchmarks();
    return 0;
}
