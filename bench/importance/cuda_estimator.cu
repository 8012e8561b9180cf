// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CUDA estimator by itself: 32 query heads, 8 KV heads, random normal inputs. Times are of the device
// (events), with the L2 cache flushed before each run.

#include "../support/iterations.cuh"

#include <uniprefill/importance/importance.cuh>

#include <benchmark/benchmark.h>

#include <vector>

namespace up = uniprefill;
using namespace device_bench;

namespace {

/// @tparam Q element of queries, @tparam T element of keys
template <class Q, class T, std::int32_t D, up::cuda_body Body>
void estimator(benchmark::State& state) {
    constexpr std::int32_t heads = D == 256 ? 16 : 32;
    constexpr std::int32_t kv_heads = D == 256 ? 4 : 8;
    using policy = up::estimator_policy<64, 128, up::head_sum, D>;
    const auto requests = static_cast<std::int32_t>(state.range(0));
    const auto length = static_cast<std::int32_t>(state.range(1));
    const std::int32_t rows = requests * length;
    up::cuda_device device;
    check(up::cuda_device::current(device));
    device.body = Body;
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

    const std::size_t query_count = std::size_t(rows) * heads * D;
    const std::size_t key_count = std::size_t(rows) * kv_heads * D;
    const device_bytes queries(query_count * sizeof(Q));
    const device_bytes keys(key_count * sizeof(T));
    fill_normal<Q>(queries, query_count, 1);
    fill_normal<T>(keys, key_count, 2);
    std::vector<std::int32_t> offsets, positions;
    for (std::int32_t r = 0; r <= requests; ++r) {
        offsets.push_back(r * length);
    }
    for (std::int32_t row = 0; row < rows; ++row) {
        positions.push_back(row % length);
    }
    const std::vector<up::request_tag> tags(std::size_t(requests), up::request_tag::prefill);
    const device_bytes tag_bytes(tags.size() * sizeof(tags[0]));
    const device_bytes offset_bytes(offsets.size() * sizeof(offsets[0]));
    const device_bytes position_bytes(positions.size() * sizeof(positions[0]));
    upload(tag_bytes, tags);
    upload(offset_bytes, offsets);
    upload(position_bytes, positions);
    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = requests;
    batch.num_rows = rows;
    batch.tags = tag_bytes.template data<up::request_tag>();
    batch.cu_seqlens = offset_bytes.template data<std::int32_t>();
    batch.positions = position_bytes.template data<std::int32_t>();
    const device_bytes memory(run.workspace_bytes());
    const device_bytes buffer(std::size_t(up::mass_view::rank_buffer_size(bounds)) * sizeof(std::int64_t));
    const up::mass_view masses =
        up::mass_view::over(buffer.template data<std::int64_t>(), bounds, up::memory_space::device);
    const up::head_rows<const Q> query_rows{queries.template data<const Q>(), heads * D, D, rows, heads, D};
    const up::head_rows<const T> key_rows{keys.template data<const T>(), kv_heads * D, D, rows, kv_heads, D};
    const auto once = [&](cudaStream_t stream) {
        check(run.run(query_rows, up::key_source<T>{key_rows}, {}, batch, masses, {},
                      up::workspace(memory.data(), run.workspace_bytes()), stream));
    };
    device_timer timer;
    state.counters["median_us"] = 1000 * median_ms(state, timer, once);
    const double operations = 2.0 * heads * 128 * double(rows) * D;
    state.counters["TFLOP/s"] =
        benchmark::Counter(operations / 1e12 * double(state.iterations()), benchmark::Counter::kIsRate);
    state.counters["workspace_MB"] = double(run.workspace_bytes()) / 1e6;
}

} // namespace

#define UNIPREFILL_BENCH(Q, T, D, BODY)                                                                      \
    BENCHMARK_TEMPLATE(estimator, up::Q, up::T, D, up::cuda_body::BODY)                                      \
        ->UseManualTime()                                                                                    \
        ->Unit(benchmark::kMicrosecond)                                                                      \
        ->Iterations(40)

UNIPREFILL_BENCH(bfloat16, bfloat16, 128, automatic)
    ->Args({1, 4096})
    ->Args({1, 32768})
    ->Args({1, 65536})
    ->Args({1, 131072})
    ->Args({1, 262144})
    ->Args({1, 1048576})
    ->Args({16, 4096})
    ->Args({4, 16384});
UNIPREFILL_BENCH(bfloat16, bfloat16, 256, automatic)->Args({1, 131072});
UNIPREFILL_BENCH(bfloat16, float8_e4m3, 128, automatic)->Args({1, 131072});
UNIPREFILL_BENCH(bfloat16, bfloat16, 128, portable)->Args({1, 131072});
