// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Attention of one request's prefill on a CUDA device, causal, bfloat16, random normal inputs: 32 query heads
// and 8 KV heads, at d 256 half as many. Dense, or with lists of blocks of 64 rows: so many per cent of all
// blocks, others for each list, scattered at random or as a real model's heads weigh them (tiled), and a
// window of 256 positions. Times are of the device (events), with the L2 cache flushed before each run.
// TFLOP/s count 4 d operations for each pair of a query and a key that is read; `pairs` is their share of all
// causal pairs. baseline.py times what there is to compare with.

#include "../support/iterations.cuh"
#include "../support/one_request.cuh"

#include <uniprefill/attend/attention.cuh>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <numeric>
#include <random>
#include <vector>

namespace up = uniprefill;
using namespace device_bench;

namespace {

constexpr std::int32_t block_rows = 64;
constexpr std::int32_t window = 256;

/// Masses of whole blocks as heads of a real model gave them, one head after the other.
constexpr std::int32_t recorded_masses[] = {
#include "head_masses.inc"
};
constexpr std::int32_t recorded_heads = 63;
constexpr auto recorded_blocks = static_cast<std::int32_t>(std::size(recorded_masses)) / recorded_heads;
static_assert(std::size(recorded_masses) == std::size_t{recorded_heads} * recorded_blocks);

/// All blocks, those first that @p head lists first: in any order, or by the masses of recorded heads,
/// another one for each stretch as long as the recorded prompt.
std::vector<std::int32_t> ranked_blocks(std::int32_t count, std::int32_t head, bool recorded) {
    std::vector<std::int32_t> all(static_cast<std::size_t>(count));
    std::iota(all.begin(), all.end(), 0);
    if (!recorded) {
        std::shuffle(all.begin(), all.end(), std::mt19937(static_cast<unsigned>(head)));
        return all;
    }
    const auto mass = [head](std::int32_t block) {
        const std::int32_t from = (head * 13 + block / recorded_blocks * 29) % recorded_heads;
        return recorded_masses[from * recorded_blocks + block % recorded_blocks];
    };
    std::stable_sort(all.begin(), all.end(),
                     [&](std::int32_t a, std::int32_t b) { return mass(a) > mass(b); });
    return all;
}

/// Lists of one segment, and how many (query, key) pairs a list's head reads on average.
struct lists_of_heads {
    std::vector<std::int64_t> offsets{0};
    std::vector<std::int32_t> blocks;
    double pairs = 0;

    lists_of_heads(std::int32_t length, std::int32_t heads, std::int32_t percent, bool recorded) {
        const std::int32_t count = up::num_blocks(length, block_rows);
        for (std::int32_t head = 0; head < heads; ++head) {
            const std::vector<std::int32_t> ranked = ranked_blocks(count, head, recorded);
            std::vector<std::int32_t> listed_before(static_cast<std::size_t>(count) + 1, 0);
            for (std::int32_t i = 0; i < std::int64_t{count} * percent / 100; ++i) {
                const std::int32_t block = ranked[static_cast<std::size_t>(i)];
                blocks.push_back(block);
                ++listed_before[static_cast<std::size_t>(block) + 1];
            }
            std::sort(blocks.begin() + offsets.back(), blocks.end());
            offsets.push_back(static_cast<std::int64_t>(blocks.size()));
            std::partial_sum(listed_before.begin(), listed_before.end(), listed_before.begin());
            for (std::int32_t row = 0; row < length; ++row) {
                const std::int32_t from = std::max(row - window + 1, 0) / block_rows;
                pairs += double(listed_before[static_cast<std::size_t>(from)]) * block_rows +
                         (row + 1 - from * block_rows);
            }
        }
        pairs /= std::max(heads, 1);
    }
};

/// Arguments: tokens, lists (0: dense), per cent of blocks listed, whether by recorded masses.
template <std::int32_t D, up::cuda_body Body>
void attention(benchmark::State& state) {
    using T = up::bfloat16;
    using policy = up::attention_policy<block_rows, D>;
    constexpr std::int32_t heads = D == 256 ? 16 : 32;
    constexpr std::int32_t kv_heads = D == 256 ? 4 : 8;
    const auto length = static_cast<std::int32_t>(state.range(0));
    const auto num_lists = static_cast<std::int32_t>(state.range(1));
    up::cuda_device device;
    check(up::cuda_device::current(device));
    device.body = Body;
    up::limits bounds;
    bounds.max_rows = length;
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = D;
    bounds.block_rows = block_rows;
    const up::prefill_attention<policy, up::backend::cuda> attend(bounds, device);
    check(attend.template prepare<T>());

    const std::size_t query_count = std::size_t(length) * heads * D;
    const std::size_t key_count = std::size_t(length) * kv_heads * D;
    const device_bytes queries(query_count * sizeof(T));
    const device_bytes keys(key_count * sizeof(T));
    const device_bytes values(key_count * sizeof(T));
    const device_bytes out(query_count * sizeof(T));
    const device_array<float> lse(std::size_t(length) * heads);
    fill_normal<T>(queries, query_count, 1);
    fill_normal<T>(keys, key_count, 2);
    fill_normal<T>(values, key_count, 3);
    const one_request request(length, up::request_tag::prefill);

    const double all_pairs = double(length) * (double(length) + 1) / 2;
    const lists_of_heads chosen(length, num_lists, static_cast<std::int32_t>(state.range(2)),
                                state.range(3) != 0);
    const device_array<std::int64_t> list_offsets(chosen.offsets);
    const device_array<std::int32_t> list_blocks(chosen.blocks);
    up::block_lists lists;
    if (num_lists > 0) {
        lists.space = up::memory_space::device;
        lists.block_rows = block_rows;
        lists.window = window;
        lists.max_segments = lists.num_segments = 1;
        lists.num_heads = num_lists;
        lists.offsets = list_offsets.data();
        lists.blocks = list_blocks.data();
        lists.capacity = static_cast<std::int64_t>(chosen.blocks.size());
    }
    const double pairs = num_lists > 0 ? chosen.pairs : all_pairs;

    const device_bytes memory(attend.workspace_bytes());
    const up::head_rows<const T> query_rows{queries.data<const T>(), heads * D, D, length, heads, D};
    const up::key_source<T> key_rows{{keys.data<const T>(), kv_heads * D, D, length, kv_heads, D}};
    const up::key_source<T> value_rows{{values.data<const T>(), kv_heads * D, D, length, kv_heads, D}};
    const up::head_rows<T> out_rows{out.data<T>(), heads * D, D, length, heads, D};
    const auto once = [&](cudaStream_t stream) {
        check(attend.run(query_rows, key_rows, value_rows, {}, request.batch(),
                         up::selection::keep_all(1, 1, length, up::memory_space::device), lists, out_rows,
                         lse.data(), up::workspace(memory.data(), attend.workspace_bytes()), stream));
    };
    device_timer timer;
    const double ms = median_ms(state, timer, once);
    const double operations = 4.0 * heads * D * pairs;
    state.counters["median_us"] = 1000 * ms;
    state.counters["TFLOP/s"] = operations / ms / 1e9;
    state.counters["pairs"] = pairs / all_pairs;
}

} // namespace

#define UNIPREFILL_BENCH(D, BODY, ITERATIONS)                                                                \
    BENCHMARK_TEMPLATE(attention, D, up::cuda_body::BODY)                                                    \
        ->ArgNames({"tokens", "lists", "percent", "recorded"})                                               \
        ->UseManualTime()                                                                                    \
        ->Unit(benchmark::kMicrosecond)                                                                      \
        ->Iterations(ITERATIONS)

UNIPREFILL_BENCH(128, automatic, 30)
    ->Args({4096, 0, 100, 0})
    ->Args({8192, 0, 100, 0})
    ->Args({32768, 0, 100, 0});
UNIPREFILL_BENCH(128, automatic, 9)->Args({131072, 0, 100, 0});
UNIPREFILL_BENCH(64, automatic, 30)->Args({8192, 0, 100, 0})->Args({32768, 0, 100, 0});
UNIPREFILL_BENCH(256, automatic, 30)->Args({8192, 0, 100, 0})->Args({32768, 0, 100, 0});
// Lists by KV head, then by query head.
UNIPREFILL_BENCH(128, automatic, 30)
    ->Args({32768, 8, 100, 0})
    ->Args({32768, 8, 25, 0})
    ->Args({32768, 8, 10, 0})
    ->Args({32768, 32, 100, 0})
    ->Args({32768, 32, 25, 0})
    ->Args({32768, 32, 10, 0});
UNIPREFILL_BENCH(128, automatic, 9)
    ->Args({131072, 8, 25, 0})
    ->Args({131072, 8, 10, 0})
    ->Args({131072, 32, 25, 0})
    ->Args({131072, 32, 10, 0});
UNIPREFILL_BENCH(128, automatic, 30)
    ->Args({32768, 8, 25, 1})
    ->Args({32768, 8, 10, 1})
    ->Args({32768, 32, 25, 1})
    ->Args({32768, 32, 10, 1});
UNIPREFILL_BENCH(128, automatic, 9)->Args({131072, 8, 25, 1})->Args({131072, 8, 10, 1});
UNIPREFILL_BENCH(64, portable, 20)->Args({32768, 0, 100, 0});
UNIPREFILL_BENCH(128, portable, 20)
    ->Args({32768, 0, 100, 0})
    ->Args({32768, 8, 10, 0})
    ->Args({32768, 32, 10, 0});
UNIPREFILL_BENCH(256, portable, 20)->Args({32768, 0, 100, 0});
