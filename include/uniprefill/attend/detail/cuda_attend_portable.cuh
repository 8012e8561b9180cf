// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention on every device from compute capability 8.0 on. Each warp keeps 16 or 32 packed query rows,
/// their scores and their outputs in registers; all warps of a thread block bring tiles of keys and values in
/// turns into a ring of shared memory and multiply with them (Dao, arXiv 2307.08691).
#pragma once

#include <uniprefill/attend/detail/cuda_attend.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_matrix.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Sizes that follow from the head dimension and G.
template <std::int32_t D, std::int32_t G>
struct attend_portable_shape {
    /// Tiles of 16 rows that a warp keeps: as many as registers hold beside its scores.
    static constexpr std::int32_t row_tiles = D <= 80 ? 2 : 1;
    static constexpr std::int32_t warps = row_tiles == 2 ? 4 : 8;
    static constexpr std::int32_t threads = 32 * warps;
    static constexpr std::int32_t tile_rows = 16 * row_tiles * warps; ///< packed query rows of an item
    static constexpr std::int32_t tile_keys = D <= 128 ? 64 : 32;
    template <bool Means>
    using tile = key_tile<tile_keys, G, Means>;
    /// Rows are an odd number of 16 bytes apart, so that 8 of them lie in different banks.
    static constexpr std::int32_t pitch = 2 * D + 16;
    static constexpr std::int32_t stages = 3; ///< of keys, then of their values, then of the next keys
    static constexpr std::int32_t stage_bytes = tile_keys * pitch;
    static constexpr std::int32_t dynamic_bytes = stages * stage_bytes;
    static constexpr std::int32_t ctas_per_multiprocessor = row_tiles == 2 ? 2 : 1;

    static_assert(pitch / 16 % 2 == 1 && D % 16 == 0);
    static_assert(dynamic_bytes <= 96 * 1024);
};

/// What the warps of a thread block tell each other of an item.
template <std::int32_t Rows, std::int32_t Warps>
struct attend_portable_shared {
    attend_item item;
    row_reach reach[Rows];
    item_reach bounds[Warps];
    std::int32_t taken_item;
};

/// A thread of a thread block.
template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap, bool Means>
class UNIPREFILL_HIDDEN attend_portable_worker {
    using shape = attend_portable_shape<D, G>;
    using tile = typename shape::template tile<Means>;
    using shared_type = attend_portable_shared<shape::tile_rows, shape::warps>;
    static constexpr std::int32_t tile_keys = shape::tile_keys;
    static constexpr std::int32_t row_tiles = shape::row_tiles;
    static constexpr std::int32_t row_parts = D / 8; ///< 16 bytes each
    static constexpr std::int32_t query_steps = D / 16;
    static constexpr std::int32_t key_steps = tile_keys / 16;

  public:
    __device__ attend_portable_worker(const attend_task<T, Cache>& task, shared_type& shared,
                                      const std::uint8_t* stages)
        : task_(task)
        , shared_(shared)
        , stages_(shared_address(stages))
        , thread_(static_cast<std::int32_t>(threadIdx.x))
        , lane_(thread_ % 32)
        , warp_row_(thread_ / 32 * 16 * row_tiles)
        , key_squares_(
              static_cast<std::uint32_t>((lane_ / 16 * 8 + lane_ % 8) * shape::pitch + lane_ / 8 % 2 * 16))
        , value_squares_(static_cast<std::uint32_t>(lane_ % 16 * shape::pitch + lane_ / 16 * 16)) {}

    __device__ void run() {
        const std::int32_t items = task_.plan.first_item[task_.step.batch.num_segments];
        for (;;) {
            __syncthreads(); // everyone is done with the item before
            if (thread_ == 0) {
                shared_.taken_item = atomicAdd(task_.plan.next_item, 1);
            }
            __syncthreads();
            const std::int32_t index = shared_.taken_item;
            if (index >= items) {
                return;
            }
            const attend_item item = find_item(task_.step, task_.plan, index);
            const item_reach bounds = note_reach(item);
            const block_lists& lists = task_.step.lists;
            attend(walk_type(item, bounds, item.has_list,
                             warp_list(lists.blocks + item.list_begin, item.list_entries),
                             item.has_list && task_.mean_keys.data != nullptr));
        }
    }

  private:
    using scores = float[row_tiles][tile_keys / 2];
    using outputs = float[row_tiles][D / 2];
    using weights = std::uint32_t[row_tiles][key_steps][4];
    using walk_type = key_walk<tile_keys, G, warp_list, Means>;

    __device__ void attend(walk_type walk) {
        tile now;
        bool exists = walk.next(now);
        bring(task_.keys, task_.mean_keys, task_.cached_keys, now, exists, 0);
        bring(task_.values, task_.mean_values, task_.cached_values, now, exists, 1);

        outputs out;
#pragma unroll
        for (std::int32_t i = 0; i < row_tiles; ++i) {
            load_queries(i);
            rows_[i][0] = {};
            rows_[i][1] = {};
#pragma unroll
            for (std::int32_t j = 0; j < D / 2; ++j) {
                out[i][j] = 0;
            }
        }
        std::int32_t stage = 0; // of the keys
#pragma unroll 1
        while (exists) {
            wait_for_copies<1>();
            __syncthreads();
            // Into the stage that everyone has just left, here and below.
            tile next;
            const bool more = walk.next(next);
            bring(task_.keys, task_.mean_keys, task_.cached_keys, next, more, after(after(stage)));
            scores sums;
            multiply_keys(sums, stage);
            weights probabilities;
            take_exponentials(sums, now, out, probabilities);
            wait_for_copies<1>();
            __syncthreads();
            bring(task_.values, task_.mean_values, task_.cached_values, next, more, stage);
            multiply_values(out, probabilities, after(stage));
            stage = after(after(stage));
            now = next;
            exists = more;
        }
        wait_for_copies<0>();
        write(out);
    }

    [[nodiscard]] static __device__ std::int32_t after(std::int32_t stage) {
        return stage == shape::stages - 1 ? 0 : stage + 1;
    }

    /// Notes the item and what each of its rows reads. @return bounds over all rows
    [[nodiscard]] __device__ item_reach note_reach(const attend_item& item) {
        constexpr std::uint32_t everyone = 0xffffffffu;
        row_reach least{INT32_MAX, INT32_MAX, INT32_MAX};
        row_reach most{0, 0, 0};
        if (thread_ < shape::tile_rows) {
            row_reach mine{0, 0, INT32_MAX};
            if (thread_ < item.num_rows) {
                mine = reach_of(task_.step, item, thread_);
                least = mine;
                most = mine;
            }
            shared_.reach[thread_] = mine;
        }
        least = {__reduce_min_sync(everyone, least.first), __reduce_min_sync(everyone, least.end),
                 __reduce_min_sync(everyone, least.window)};
        most = {__reduce_max_sync(everyone, most.first), __reduce_max_sync(everyone, most.end),
                __reduce_max_sync(everyone, most.window)};
        if (lane_ == 0) {
            shared_.bounds[thread_ / 32] = {least, most};
        }
        if (thread_ == 0) {
            shared_.item = item;
        }
        __syncthreads();
#pragma unroll 1
        for (std::int32_t i = 0; i < shape::warps; ++i) {
            const item_reach& other = shared_.bounds[i];
            least = {min(least.first, other.least.first), min(least.end, other.least.end),
                     min(least.window, other.least.window)};
            most = {max(most.first, other.most.first), max(most.end, other.most.end),
                    max(most.window, other.most.window)};
        }
        return {least, most};
    }

    /// Starts the copies of a tile of keys or values; zeros behind the end of each slot.
    __device__ void bring(const head_rows<const T>& rows, const head_rows<const T>& means, const Cache& cache,
                          const tile& what, bool exists, std::int32_t stage) {
        const attend_item& item = shared_.item;
        constexpr std::int32_t parts = tile_keys * row_parts;
        const std::uint32_t to = stages_ + static_cast<std::uint32_t>(stage * shape::stage_bytes);
        if (exists) {
            const std::int32_t kv_head = item.unit / task_.step.kv_units;
#pragma unroll 2
            for (std::int32_t at = thread_; at < parts; at += shape::threads) {
                const std::int32_t row = at / row_parts;
                const std::int32_t part = at % row_parts;
                const std::int32_t slot = row / tile::slot_keys;
                std::int32_t key = what.first[0];
                std::int32_t end = what.end[0];
#pragma unroll
                for (std::int32_t i = 1; i < tile::slots; ++i) {
                    key = slot == i ? what.first[i] : key;
                    end = slot == i ? what.end[i] : end;
                }
                key += row % tile::slot_keys;
                const T* from = rows.data;
                if (key < end) {
                    from = what.of_means       ? means.at(first_mean_of<G>(item) + key, kv_head)
                           : key < item.cached ? cache.row(item.request, key, kv_head)
                                               : rows.at(item.request_begin + key - item.cached, kv_head);
                    from += part * 8;
                }
                copy_async_16(to + static_cast<std::uint32_t>(row * shape::pitch + part * 16), from,
                              key < end);
            }
        }
        close_copy_group();
    }

    /// This warp's query rows, in the layout of multiply_squares(); zeros where there are none.
    __device__ void load_queries(std::int32_t row_tile) {
        const attend_item& item = shared_.item;
#pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            const std::int32_t row = warp_row_ + 16 * row_tile + 8 * half + lane_ / 4;
            const bool present = row < item.num_rows;
            const item_row where = row_of(task_.step, item, present ? row : 0);
            const T* const from = task_.queries.at(where.kept, where.head) + lane_ % 4 * 2;
            load_row(queries_[row_tile], half, from, present);
        }
    }

    /// sums = queries * keys^T.
    __device__ void multiply_keys(scores& sums, std::int32_t stage) const {
        multiply_rows_by_keys<T, shape::pitch>(
            sums, queries_, stages_ + key_squares_ + static_cast<std::uint32_t>(stage * shape::stage_bytes));
    }

    /// out += probabilities * values.
    __device__ void multiply_values(outputs& out, const weights& probabilities, std::int32_t stage) const {
        const std::uint32_t values =
            stages_ + value_squares_ + static_cast<std::uint32_t>(stage * shape::stage_bytes);
#pragma unroll
        for (std::int32_t step = 0; step < key_steps; ++step) {
#pragma unroll
            for (std::int32_t j = 0; j < query_steps; ++j) {
                std::uint32_t words[4];
                load_squares_transposed(
                    words, values + static_cast<std::uint32_t>(step * 16 * shape::pitch + j * 32));
#pragma unroll
                for (std::int32_t i = 0; i < row_tiles; ++i) {
                    multiply_and_add<T>(out[i], 8 * j, probabilities[i][step], words[0], words[1], false);
                    multiply_and_add<T>(out[i], 8 * j + 4, probabilities[i][step], words[2], words[3], false);
                }
            }
        }
    }

    /// Scores that their row doesn't read become -infinity.
    __device__ void mask(scores& sums, const tile& what) const {
#pragma unroll
        for (std::int32_t i = 0; i < 2 * row_tiles; ++i) {
            const row_reach reach = shared_.reach[warp_row_ + 8 * i + lane_ / 4];
#pragma unroll
            for (std::int32_t slot = 0; slot < tile::slots; ++slot) {
                const bool unlisted = (what.unlisted >> slot & 1u) != 0;
                const std::int32_t from = unlisted ? max(reach.first, reach.window) : reach.first;
                const std::int32_t to = min(reach.end, what.end[slot]);
                const std::int32_t first = from - (what.first[slot] + 2 * (lane_ % 4));
                const auto count = static_cast<std::uint32_t>(max(to - from, 0));
#pragma unroll
                for (std::int32_t in_slot = 0; in_slot < tile::slot_keys; in_slot += 8) {
                    const std::int32_t at = (slot * tile::slot_keys + in_slot) / 2 + i % 2 * 2;
#pragma unroll
                    for (std::int32_t j = 0; j < 2; ++j) {
                        float& score = sums[i / 2][at + j];
                        score =
                            static_cast<std::uint32_t>(in_slot + j - first) < count ? score : nothing_read;
                    }
                }
            }
        }
    }

    /// The same for means.
    __device__ void mask_means(scores& sums, const tile& what) const {
#pragma unroll
        for (std::int32_t i = 0; i < 2 * row_tiles; ++i) {
            const mean_range range =
                means_of<G>(shared_.reach[warp_row_ + 8 * i + lane_ / 4], shared_.item.context);
            const std::int32_t first = range.from - (what.first[0] + 2 * (lane_ % 4));
            const auto count = static_cast<std::uint32_t>(max(range.to - range.from, 0));
#pragma unroll
            for (std::int32_t in_tile = 0; in_tile < tile_keys; in_tile += 8) {
                const std::uint32_t skipped = what.skipped[in_tile / 32] >> (in_tile % 32 + 2 * (lane_ % 4));
                const std::int32_t at = in_tile / 2 + i % 2 * 2;
#pragma unroll
                for (std::int32_t j = 0; j < 2; ++j) {
                    float& score = sums[i / 2][at + j];
                    const bool meets =
                        static_cast<std::uint32_t>(in_tile + j - first) < count && (skipped >> j & 1u) != 0;
                    score = meets ? score : nothing_read;
                }
            }
        }
    }

    /// Scores become probabilities against each row's reference; outputs so far are scaled to it.
    __device__ void take_exponentials(scores& sums, const tile& what, outputs& out, weights& probabilities) {
        float weight = 0; // of the tile's keys, log2
        if constexpr (Means) {
            if (what.of_means) {
                mask_means(sums, what);
                weight = mean_weight<G>;
            }
        }
        if (what.masked && !what.of_means) {
            mask(sums, what);
        }
#pragma unroll
        for (std::int32_t i = 0; i < row_tiles; ++i) {
            float factors[2];
            float subtrahend[2];
#pragma unroll
            for (std::int32_t half = 0; half < 2; ++half) {
                float largest = larger(sums[i][2 * half], sums[i][2 * half + 1]);
#pragma unroll
                for (std::int32_t j = 4; j < tile_keys / 2; j += 4) {
                    largest = larger(largest, larger(sums[i][j + 2 * half], sums[i][j + 2 * half + 1]));
                }
                largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
                largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
                factors[half] =
                    rows_[i][half].raise(weighed<Means>(on_grid<Softcap>(largest, task_.scores), weight));
                subtrahend[half] = weighed<Means>(-rows_[i][half].subtrahend(), weight);
            }
#pragma unroll
            for (std::int32_t j = 0; j < tile_keys / 2; ++j) {
                const std::int32_t half = j / 2 % 2;
                sums[i][j] = exp2_of(add(on_grid<Softcap>(sums[i][j], task_.scores), subtrahend[half]));
                rows_[i][half].sum = add(rows_[i][half].sum, sums[i][j]);
            }
#pragma unroll
            for (std::int32_t step = 0; step < key_steps; ++step) {
#pragma unroll
                for (std::int32_t j = 0; j < 4; ++j) {
                    probabilities[i][step][j] =
                        rounded_pair<T>(sums[i][8 * step + 2 * j], sums[i][8 * step + 2 * j + 1]);
                }
            }
            if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
                for (std::int32_t j = 0; j < D / 2; ++j) {
                    out[i][j] = multiply(out[i][j], factors[j / 2 % 2]);
                }
            }
        }
    }

    __device__ void write(const outputs& out) const {
        const attend_item& item = shared_.item;
#pragma unroll
        for (std::int32_t i = 0; i < 2 * row_tiles; ++i) {
            softmax_row<T> row = rows_[i / 2][i % 2];
            row.sum = add(row.sum, __shfl_xor_sync(0xffffffffu, row.sum, 1));
            row.sum = add(row.sum, __shfl_xor_sync(0xffffffffu, row.sum, 2));
            const std::int32_t at = warp_row_ + 8 * i + lane_ / 4;
            if (at < item.num_rows) {
                const item_row where = row_of(task_.step, item, at);
                const row_end end = finish_row(row, task_.scores, where.head);
                if (task_.lse != nullptr && lane_ % 4 == 0) {
                    task_.lse[std::int64_t{where.kept} * task_.out.num_heads + where.head] = end.lse;
                }
                T* const to = task_.out.at(where.kept, where.head) + 2 * (lane_ % 4);
#pragma unroll
                for (std::int32_t j = 0; j < D / 8; ++j) {
                    const float low = out[i / 2][4 * j + 2 * (i % 2)];
                    const float high = out[i / 2][4 * j + 2 * (i % 2) + 1];
                    *reinterpret_cast<std::uint32_t*>(to + 8 * j) =
                        rounded_pair<T>(multiply(low, end.factor), multiply(high, end.factor));
                }
            }
        }
    }

    const attend_task<T, Cache>& task_;
    shared_type& shared_;
    std::uint32_t stages_;
    std::int32_t thread_;
    std::int32_t lane_;
    std::int32_t warp_row_;       ///< the first of this warp's rows
    std::uint32_t key_squares_;   ///< of this lane in a stage, for load_squares()
    std::uint32_t value_squares_; ///< and for load_squares_transposed()
    softmax_row<T> rows_[row_tiles][2];
    std::uint32_t queries_[row_tiles][query_steps][4];
};

template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap, bool Means>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(attend_portable_shape<D, G>::threads,
                                                    attend_portable_shape<D, G>::ctas_per_multiprocessor)
    attend_portable_kernel(const __grid_constant__ attend_task<T, Cache> task) {
    using shape = attend_portable_shape<D, G>;
    extern __shared__ uint4 attend_portable_stages[];
    __shared__ attend_portable_shared<shape::tile_rows, shape::warps> shared;
    let_next_kernel_start();
    wait_for_previous_kernel();
    attend_portable_worker<T, Cache, D, G, Softcap, Means>(
        task, shared, reinterpret_cast<const std::uint8_t*>(attend_portable_stages))
        .run();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
