// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/pair_counts.hpp"

#include "engine/cuda/runtime.hpp"

namespace engine::cuda {

namespace {

constexpr unsigned threads = 256;

/// How many of the ascending @p values are below @p bound.
template <class Index>
__device__ Index count_below(const std::int32_t* values, Index count, std::int32_t bound) {
    Index low = 0;
    for (Index high = count; low < high;) {
        const Index middle = low + (high - low) / 2;
        if (values[middle] < bound) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/// Keys that row @p row of the keys reads under list @p head of its segment, itself among them.
__device__ std::int64_t keys_read(const pair_count_call& call, std::int32_t row, std::int32_t head) {
    if (call.offsets == nullptr) {
        if (call.window == 0) return std::int64_t{row} + 1;
        return row + 1 - count_below(call.positions, row + 1, call.positions[row] - call.window + 1);
    }
    const std::int32_t segment = count_below(call.bounds + 1, call.segments, row + 1);
    if (segment >= call.segments) return 0;
    const std::int32_t first = call.bounds[segment];
    const std::int64_t list = std::int64_t{segment} * call.heads + head;
    const std::int32_t* const blocks = call.blocks + call.offsets[list];
    const auto listed = static_cast<std::int32_t>(call.offsets[list + 1] - call.offsets[list]);
    const std::int32_t own = row - first;
    const std::int32_t oldest = call.positions[row] - call.window + 1;
    const std::int32_t nearest = count_below(call.positions + first, own + 1, oldest);
    const std::int32_t block = nearest / call.block_rows; // the first that is read whatever is listed
    const std::int32_t before = count_below(blocks, listed, block);
    std::int64_t keys = first + std::int64_t{before} * call.block_rows;
    if (nearest <= own) {
        if (call.means) keys += block - before;
        return keys + own + 1 - std::int64_t{block} * call.block_rows;
    }
    // No window: of its own block it reads what the list says. Blocks before that are whole.
    const std::int32_t last = own / call.block_rows;
    const std::int32_t whole = count_below(blocks, listed, last);
    keys = first + std::int64_t{whole} * call.block_rows;
    if (call.means) keys += last - whole;
    const bool last_listed = whole < listed && blocks[whole] == last;
    return keys + (last_listed ? own % call.block_rows + 1 : 0);
}

__global__ void __launch_bounds__(threads)
    count_pairs_kernel(const __grid_constant__ pair_count_call call, pair_count* out) {
    const std::int32_t alive = min(*call.alive, call.rows);
    if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) out->queries = alive;
    const std::int64_t query = std::int64_t{blockIdx.x} * threads + threadIdx.x;
    unsigned long long keys = 0;
    if (query < alive) {
        const std::int32_t row =
            call.kept_to_old != nullptr ? call.kept_to_old[query] : static_cast<std::int32_t>(query);
        if (row >= 0) {
            keys =
                static_cast<unsigned long long>(keys_read(call, row, static_cast<std::int32_t>(blockIdx.y)));
        }
    }
    for (int apart = 16; apart > 0; apart /= 2) {
        keys += __shfl_down_sync(0xffffffffu, keys, static_cast<unsigned>(apart));
    }
    // Whole numbers: the same in any order.
    if (threadIdx.x % 32 == 0 && keys > 0) atomicAdd(&out->pairs, keys);
}

} // namespace

void count_pairs(const pair_count_call& call, pair_count* out, cudaStream_t on) {
    if (call.rows <= 0) return;
    const dim3 grid((static_cast<unsigned>(call.rows) + threads - 1) / threads,
                    call.offsets == nullptr ? 1u : static_cast<unsigned>(call.heads));
    count_pairs_kernel<<<grid, threads, 0, on>>>(call, out);
    check(cudaGetLastError(), "launch");
}

} // namespace engine::cuda
