// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Lists by query block of one request's prefill on a CUDA device, bfloat16, random normal inputs: 32 query
// heads and 8 KV heads, d 128, blocks of 64 keys. `lists` of a query block: 8 (by KV head) or 32. Times are
// of the device (events), with the L2 cache flushed before each run. TFLOP/s count 2 d operations for each
// pair of a sampled row and a key that it sees; `listed` is the share of all causal blocks that lists name,
// `MiB` the workspace.

#include "../support/iterations.cuh"
#include "../support/one_request.cuh"

#include <uniprefill/select/query_block_lister.cuh>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <vector>

namespace up = uniprefill;
using namespace device_bench;

namespace {

/// Arguments: tokens, lists of a query block, query rows, every how many is sampled, tokens before them.
void query_lists(benchmark::State& state) {
    using T = up::bfloat16;
    using policy = up::query_list_policy<64, 128>;
    using cache = up::contiguous_cache<T>;
    constexpr std::int32_t heads = 32, kv_heads = 8, D = 128;
    const auto length = static_cast<std::int32_t>(state.range(0));
    const auto num_lists = static_cast<std::int32_t>(state.range(1));
    const up::query_sampling sampling{static_cast<std::int32_t>(state.range(2)),
                                      static_cast<std::int32_t>(state.range(3))};
    const auto cached = static_cast<std::int32_t>(state.range(4));
    up::cuda_device device;
    check(up::cuda_device::current(device));
    up::limits bounds;
    bounds.max_rows = length;
    bounds.max_cached_tokens = cached;
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = D;
    bounds.block_rows = 64;
    const up::query_block_lister<policy, up::backend::cuda> lister(bounds, sampling, device);
    check(lister.prepare<T, cache>());

    const std::size_t query_count = std::size_t(length) * heads * D;
    const std::size_t key_count = std::size_t(length + cached) * kv_heads * D;
    const device_bytes queries(query_count * sizeof(T));
    const device_bytes keys(key_count * sizeof(T));
    fill_normal<T>(queries, query_count, 1);
    fill_normal<T>(keys, key_count, 2);
    const one_request request(length, up::request_tag::chunk, cached);

    const std::int64_t capacity = up::block_lists::most_blocks(bounds, num_lists, sampling.query_rows);
    up::workspace counting;
    static_cast<void>(up::block_lists::carve(counting, bounds, num_lists, up::memory_space::device,
                                             sampling.query_rows, capacity));
    const device_bytes list_memory(counting.bytes_used());
    up::workspace pieces(list_memory.data(), counting.bytes_used());
    up::block_lists lists = up::block_lists::carve(pieces, bounds, num_lists, up::memory_space::device,
                                                   sampling.query_rows, capacity);
    const device_bytes memory(lister.workspace_bytes());
    const up::head_rows<const T> query_rows{queries.data<const T>(), heads * D, D, length, heads, D};
    const T* const first_key = keys.data<const T>();
    const up::key_source<T, cache> key_rows{
        {first_key + std::int64_t{cached} * kv_heads * D, kv_heads * D, D, length, kv_heads, D},
        {first_key, std::int64_t{length + cached} * kv_heads * D, kv_heads * D, D}};
    up::list_options<> options;
    options.rule = up::selection_rule::top_p(0.95, up::mass_scope::all);
    const auto once = [&](cudaStream_t stream) {
        check(lister.run(query_rows, key_rows, {}, request.batch(),
                         up::selection::keep_all(1, 1, length, up::memory_space::device), options, lists,
                         up::workspace(memory.data(), lister.workspace_bytes()), stream));
    };
    device_timer timer;
    const double ms = median_ms(state, timer, once);
    double pairs = 0;
    double blocks = 0;
    for (std::int32_t first = 0; first < length; first += sampling.query_rows) {
        const std::int32_t last =
            (first + sampling.query_rows < length ? first + sampling.query_rows : length) - 1;
        for (std::int32_t row = last; row >= first; row -= sampling.sample) {
            pairs += cached + row + 1;
        }
        blocks += num_lists * (last / 64 + 1);
    }
    up::block_list_report report;
    check(cudaMemcpy(&report, lists.report, sizeof report, cudaMemcpyDeviceToHost), "report");
    state.counters["median_us"] = 1000 * ms;
    state.counters["TFLOP/s"] = 2.0 * heads * D * pairs / ms / 1e9;
    state.counters["listed"] = static_cast<double>(report.wanted) / blocks;
    state.counters["MiB"] = static_cast<double>(lister.workspace_bytes()) / 1048576;
}

} // namespace

#define UNIPREFILL_BENCH(ITERATIONS)                                                                         \
    BENCHMARK(query_lists)                                                                                   \
        ->ArgNames({"tokens", "lists", "query_rows", "sample", "cached"})                                    \
        ->UseManualTime()                                                                                    \
        ->Unit(benchmark::kMicrosecond)                                                                      \
        ->Iterations(ITERATIONS)

UNIPREFILL_BENCH(20)
    ->Args({8192, 8, 64, 8, 0})
    ->Args({8192, 32, 64, 8, 0})
    ->Args({32768, 8, 64, 8, 0})
    ->Args({32768, 32, 64, 8, 0})
    ->Args({32768, 8, 64, 16, 0})
    ->Args({32768, 8, 128, 8, 0})
    ->Args({8192, 8, 64, 8, 122880});
UNIPREFILL_BENCH(7)->Args({131072, 8, 64, 8, 0})->Args({131072, 32, 64, 8, 0});
