// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Attention of decode rows on a CUDA device: one row a request over its cache, bfloat16, 32 query and 8 KV
// heads of 128. Ragged lengths are spread evenly from a quarter of the longest up, as requests that have
// dropped different shares have them. Times are of the device (events), with the L2 cache flushed before each
// run. GB/s count the keys and values that are read; `of_copy` is their share of what a device copy of as
// many bytes reads and writes in this run. baseline.py times PyTorch's.

#include "../support/iterations.cuh"

#include <uniprefill/attend/decode.cuh>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

namespace up = uniprefill;
using namespace device_bench;

namespace {

using T = up::bfloat16;
constexpr std::int32_t head_dim = 128;
constexpr std::int32_t heads = 32;
constexpr std::int32_t kv_heads = 8;
constexpr std::int32_t page_tokens = 16;
constexpr std::int64_t token_elements = std::int64_t{kv_heads} * head_dim;

/// Milliseconds that a device copy takes whose reads and writes together are @p bytes.
double copy_ms(device_timer& timer, std::size_t bytes) {
    const device_bytes from(bytes / 2);
    const device_bytes to(bytes / 2);
    std::vector<float> times;
    for (int i = 0; i < 12; ++i) {
        times.push_back(timer.time([&](cudaStream_t stream) {
            check(cudaMemcpyAsync(to.data(), from.data(), bytes / 2, cudaMemcpyDeviceToDevice, stream),
                  "copy");
        }));
    }
    return median(times);
}

up::contiguous_cache<T> stretches(const device_bytes& memory, std::int32_t longest, const std::int32_t*) {
    return {memory.data<const T>(), longest * token_elements, token_elements, head_dim};
}
up::page_table_cache<T> pages(const device_bytes& memory, std::int32_t longest, const std::int32_t* table) {
    return {memory.data<const T>(),
            page_tokens * token_elements,
            token_elements,
            head_dim,
            table,
            longest / page_tokens,
            page_tokens};
}

/// Arguments: requests, tokens of the longest, whether lengths are ragged.
template <class MakeCache>
void decode(benchmark::State& state, MakeCache make) {
    const auto requests = static_cast<std::int32_t>(state.range(0));
    const auto longest = static_cast<std::int32_t>(state.range(1));
    const bool ragged = state.range(2) != 0;
    up::cuda_device device;
    check(up::cuda_device::current(device));
    up::limits bounds;
    bounds.max_requests = bounds.max_segments = requests;
    bounds.max_rows = requests;
    bounds.max_cached_tokens = longest;
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = head_dim;
    const up::decode_attention<up::decode_policy<head_dim>, up::backend::cuda> attend(bounds, device);

    const std::size_t elements = static_cast<std::size_t>(requests * (longest * token_elements));
    const device_bytes queries(std::size_t(requests) * heads * head_dim * sizeof(T));
    const device_bytes keys(elements * sizeof(T));
    const device_bytes values(elements * sizeof(T));
    const device_bytes out(std::size_t(requests) * heads * head_dim * sizeof(T));
    fill_normal<T>(queries, std::size_t(requests) * heads * head_dim, 1);
    fill_normal<T>(keys, elements, 2);
    fill_normal<T>(values, elements, 3);
    std::vector<std::int32_t> lens(static_cast<std::size_t>(requests), longest);
    for (std::int32_t i = 0; ragged && i < requests; ++i) {
        lens[static_cast<std::size_t>(i)] =
            longest / 4 + static_cast<std::int32_t>(std::int64_t{longest} * 3 / 4 * (i + 1) / requests);
    }
    std::shuffle(lens.begin(), lens.end(), std::mt19937(4));
    std::vector<std::int32_t> order(static_cast<std::size_t>(requests) *
                                    static_cast<std::size_t>(longest / page_tokens));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(5));
    const device_array<std::int32_t> lengths(lens);
    const device_array<std::int32_t> table(order);

    const auto k = make(keys, longest, table.data());
    const auto v = make(values, longest, table.data());
    using cache = std::decay_t<decltype(k)>;
    check(attend.template prepare<T, cache>());
    const device_bytes memory(attend.workspace_bytes());
    const up::head_rows<const T> query_rows{
        queries.data<const T>(), heads * head_dim, head_dim, requests, heads, head_dim};
    const up::head_rows<T> out_rows{out.data<T>(), heads * head_dim, head_dim, requests, heads, head_dim};
    up::decode_rows rows;
    rows.space = up::memory_space::device;
    rows.num_rows = requests;
    rows.lens = lengths.data();
    const auto once = [&](cudaStream_t stream) {
        check(attend.template run<T>(query_rows, k, v, {}, rows, out_rows, nullptr,
                                     up::workspace(memory.data(), attend.workspace_bytes()), stream));
    };
    device_timer timer;
    const double ms = median_ms(state, timer, once);
    const double bytes = 2.0 * static_cast<double>(token_elements * static_cast<std::int64_t>(sizeof(T))) *
                         std::accumulate(lens.begin(), lens.end(), 0.0);
    state.counters["median_us"] = 1000 * ms;
    state.counters["GB/s"] = bytes / ms / 1e6;
    state.counters["of_copy"] = copy_ms(timer, static_cast<std::size_t>(bytes)) / ms;
}

void shapes(benchmark::internal::Benchmark* bench) {
    bench->ArgNames({"requests", "tokens", "ragged"})
        ->UseManualTime()
        ->Unit(benchmark::kMicrosecond)
        ->Iterations(30);
    bench->Args({1, 8192, 0})
        ->Args({1, 131072, 0})
        ->Args({16, 32768, 0})
        ->Args({64, 8192, 0})
        ->Args({64, 8192, 1});
    bench->Args({256, 2048, 0})->Args({256, 2048, 1});
}

} // namespace

BENCHMARK_CAPTURE(decode, contiguous, stretches)->Apply(shapes);
BENCHMARK_CAPTURE(decode, pages_of_16, pages)->Apply(shapes);
