// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CUDA estimator by itself: 32 query heads, 8 KV heads, random normal inputs. Times are of the device
// (events), with the L2 cache flushed before each run.

#include <uniprefill/importance/importance.cuh>

#include <benchmark/benchmark.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

namespace up = uniprefill;

namespace {

void check(cudaError_t code) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(code));
        std::exit(1);
    }
}
void check(const up::status& what) {
    if (!what.ok()) {
        char text[256];
        static_cast<void>(up::format(what, text, sizeof text));
        std::fprintf(stderr, "%s\n", text);
        std::exit(1);
    }
}

template <class T>
T* on_device(const std::vector<T>& values) {
    T* data = nullptr;
    check(cudaMalloc(&data, values.size() * sizeof(T) + 1));
    check(cudaMemcpy(data, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
    return data;
}
template <class T>
T* on_device(std::size_t count) {
    T* data = nullptr;
    check(cudaMalloc(&data, count * sizeof(T)));
    return data;
}

template <class T>
T rounded(float value) {
    if constexpr (std::is_same_v<T, up::float8_e4m3>) {
        return {__nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3)};
    } else {
        return up::from_float<T>(value);
    }
}

/// Normal numbers, a table of 2^20 of them repeated with a shift.
template <class T>
T* normal_numbers(std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<T> table(1u << 20);
    for (T& value : table) {
        value = rounded<T>(normal(random));
    }
    std::vector<T> values(count);
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = table[(i + (i >> 20) * 7919) & (table.size() - 1)];
    }
    return on_device(values);
}

/// @tparam Q element of queries, @tparam T element of keys
template <class Q, class T, std::int32_t D>
void estimator(benchmark::State& state) {
    constexpr std::int32_t heads = D == 256 ? 16 : 32;
    constexpr std::int32_t kv_heads = D == 256 ? 4 : 8;
    using policy = up::estimator_policy<64, 128, up::head_sum, D>;
    const auto requests = static_cast<std::int32_t>(state.range(0));
    const auto length = static_cast<std::int32_t>(state.range(1));
    const std::int32_t rows = requests * length;
    up::cuda_device device;
    check(up::cuda_device::current(device));
    up::limits bounds;
    bounds.max_requests = bounds.max_segments = requests;
    bounds.max_rows = rows;
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = D;
    bounds.block_rows = 64;
    bounds.num_observations = 128;
    const up::importance_estimator<policy, up::backend::cuda> run(bounds, device);
    check(run.template prepare<Q, T>());

    Q* const q = normal_numbers<Q>(std::size_t(rows) * heads * D, 1);
    T* const k = normal_numbers<T>(std::size_t(rows) * kv_heads * D, 2);
    std::vector<std::int32_t> offsets, positions;
    for (std::int32_t r = 0; r <= requests; ++r) {
        offsets.push_back(r * length);
    }
    for (std::int32_t row = 0; row < rows; ++row) {
        positions.push_back(row % length);
    }
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = requests;
    batch.num_rows = rows;
    batch.tags = on_device(std::vector<up::request_tag>(std::size_t(requests), up::request_tag::prefill));
    batch.cu_seqlens = on_device(offsets);
    batch.positions = on_device(positions);
    std::byte* const memory = on_device<std::byte>(run.workspace_bytes());
    std::int64_t* const buffer =
        on_device<std::int64_t>(std::size_t(up::mass_view::rank_buffer_size(bounds)));
    constexpr std::size_t flush_bytes = std::size_t{256} << 20;
    std::byte* const flush = on_device<std::byte>(flush_bytes);
    cudaEvent_t start, stop;
    check(cudaEventCreate(&start));
    check(cudaEventCreate(&stop));
    const auto once = [&] {
        check(run.run(up::head_rows<const Q>{q, heads * D, D, rows, heads, D},
                      up::key_source<T>{up::head_rows<const T>{k, kv_heads * D, D, rows, kv_heads, D}}, {},
                      batch, up::mass_view::over(buffer, bounds, up::memory_space::device), {},
                      up::workspace(memory, run.workspace_bytes()), nullptr));
    };
    once();
    check(cudaDeviceSynchronize());
    std::vector<double> times;
    for (auto _ : state) {
        check(cudaMemsetAsync(flush, 0, flush_bytes));
        check(cudaEventRecord(start));
        once();
        check(cudaEventRecord(stop));
        check(cudaEventSynchronize(stop));
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, start, stop));
        state.SetIterationTime(milliseconds / 1000);
        times.push_back(milliseconds * 1000);
    }
    std::nth_element(times.begin(), times.begin() + std::ptrdiff_t(times.size() / 2), times.end());
    state.counters["median_us"] = times[times.size() / 2];
    const double operations = 2.0 * heads * 128 * double(rows) * D;
    state.counters["TFLOP/s"] =
        benchmark::Counter(operations / 1e12 * double(state.iterations()), benchmark::Counter::kIsRate);
    state.counters["workspace_MB"] = double(run.workspace_bytes()) / 1e6;
    for (void* memory_of_case : {static_cast<void*>(q), static_cast<void*>(k), static_cast<void*>(memory),
                                 static_cast<void*>(buffer), static_cast<void*>(flush)}) {
        check(cudaFree(memory_of_case));
    }
}

} // namespace

#define UNIPREFILL_BENCH(Q, T, D)                                                                            \
    BENCHMARK_TEMPLATE(estimator, Q, T, D)->UseManualTime()->Unit(benchmark::kMicrosecond)->Iterations(40)

UNIPREFILL_BENCH(up::bfloat16, up::bfloat16, 128)
    ->Args({1, 4096})
    ->Args({1, 32768})
    ->Args({1, 65536})
    ->Args({1, 131072})
    ->Args({1, 262144})
    ->Args({1, 1048576})
    ->Args({16, 4096})
    ->Args({4, 16384});
UNIPREFILL_BENCH(up::bfloat16, up::bfloat16, 256)->Args({1, 131072});
UNIPREFILL_BENCH(up::bfloat16, up::float8_e4m3, 128)->Args({1, 131072});
