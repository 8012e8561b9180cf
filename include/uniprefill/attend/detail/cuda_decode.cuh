// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of single rows on CUDA: split over keys (Flash-Decoding; Dao et al., 2023), each split's state
/// merged in order of keys. How a row is split follows from its length and the limits alone.
#pragma once

#include <uniprefill/attend/decode.hpp>
#include <uniprefill/attend/detail/cuda_attend.cuh>
#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_matrix.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t decode_warps = 4;
inline constexpr std::int32_t decode_threads = 32 * decode_warps;
inline constexpr std::int32_t decode_heads = 16; ///< query heads of a KV head that are multiplied together
inline constexpr std::int32_t decode_chunk = 16; ///< keys that a warp takes at a time
inline constexpr std::int32_t decode_least_split = 256; ///< keys
inline constexpr std::int32_t decode_plan_threads = 1024;

/// Sizes that follow from the head dimension.
template <std::int32_t D>
struct decode_shape {
    static constexpr std::int32_t row_bytes = 2 * D;
    static constexpr std::int32_t parts = D / 8; ///< 16 bytes each
    static constexpr std::int32_t chunk_bytes =
        decode_chunk * row_bytes; ///< of keys; values take as much again
    static constexpr std::int32_t stages = D > 128 ? 2 : 3;
    static constexpr std::int32_t ring_bytes = stages * 2 * chunk_bytes; ///< of a warp
    static constexpr std::int32_t query_bytes = decode_heads * row_bytes;
    static constexpr std::int32_t dynamic_bytes = query_bytes + decode_warps * ring_bytes;
    static constexpr std::int32_t ctas_per_multiprocessor = 2 * dynamic_bytes <= 224 * 1024 ? 2 : 1;
    static_assert(decode_heads * D * 4 <= ring_bytes, "a warp's outputs fit its ring");
};

/// Splits that a row of any length has at most: enough for a few rows alone to keep a device busy, and states
/// of many rows in bounds.
[[nodiscard]] UNIPREFILL_API constexpr std::int32_t most_splits(const limits& bounds) noexcept {
    const std::int32_t wanted = (bounds.max_rows < 64 ? 256 : 128) / bounds.num_kv_heads;
    return wanted > 2 ? wanted : 2;
}

/// Splits of all rows: row * most_splits() + split is below it. Monotone in rows, though splits get fewer.
[[nodiscard]] UNIPREFILL_API constexpr std::int64_t all_splits(const limits& bounds) noexcept {
    limits few = bounds;
    few.max_rows = bounds.max_rows < 63 ? bounds.max_rows : 63;
    const std::int64_t of_few = std::int64_t{few.max_rows} * most_splits(few);
    const std::int64_t of_all = std::int64_t{bounds.max_rows} * most_splits(bounds);
    return of_few > of_all ? of_few : of_all;
}

/// How the keys of a (row, KV head) are split: evenly, in whole chunks.
struct decode_splits {
    std::int32_t first = 0;
    std::int32_t end = 0;
    std::int32_t count = 0;
    std::int32_t keys = 0; ///< of a split, of which the last may have fewer

    [[nodiscard]] static UNIPREFILL_API decode_splits of(std::int32_t first, std::int32_t end,
                                                         std::int32_t most) noexcept {
        decode_splits made;
        made.first = first > 0 ? first : 0;
        made.end = end > made.first ? end : made.first;
        const std::int32_t all = made.end - made.first;
        const std::int32_t wanted = all / decode_least_split + (all % decode_least_split != 0 ? 1 : 0);
        const std::int32_t splits = wanted < most ? wanted : most;
        if (splits > 0) {
            const std::int32_t even = (all - 1) / splits + 1;
            made.keys = (even + decode_chunk - 1) / decode_chunk * decode_chunk;
            made.count = (all - 1) / made.keys + 1;
        }
        return made;
    }
};

/// Device memory of a call.
template <class T>
struct decode_buffers {
    std::int32_t* num_items = nullptr; // [1]
    std::int32_t* items = nullptr;     // [max_rows * most_splits] row * most_splits + split
    float* outputs = nullptr;          // [max_rows, most_splits, num_heads, head_dim] not yet divided
    softmax_row<T>* sums = nullptr;    // [max_rows, most_splits, num_heads]

    [[nodiscard]] static UNIPREFILL_HOST_API decode_buffers carve(workspace& memory,
                                                                  const limits& bounds) noexcept {
        decode_buffers made;
        const std::int64_t items = all_splits(bounds);
        made.num_items = memory.take<std::int32_t>(1);
        made.items = memory.take<std::int32_t>(items);
        made.sums = memory.template take<softmax_row<T>>(items * bounds.num_heads);
        made.outputs = memory.take<float>(items * bounds.num_heads * bounds.head_dim);
        return made;
    }
};

template <class T, class Cache>
struct decode_task {
    limits bounds;
    decode_rows rows;
    attend_scores scores;
    decode_buffers<T> buffers;
    head_rows<const T> queries;
    Cache keys;
    Cache values;
    head_rows<T> out;
    float* lse = nullptr;

    [[nodiscard]] __device__ UNIPREFILL_HIDDEN decode_splits splits_of(std::int32_t row,
                                                                       std::int32_t kv_head) const {
        const std::int32_t len = rows.len(row, kv_head);
        const std::int32_t request = rows.request_of(row);
        const bool good = request >= 0 && request < bounds.max_requests;
        return decode_splits::of(rows.first_key(row, kv_head), good ? len : 0, most_splits(bounds));
    }
};

/// Lists the splits of all rows: a row has as many as the KV head of which it reads most. One thread block.
template <class T, class Cache>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(decode_plan_threads)
    decode_plan_kernel(const decode_task<T, Cache> task) {
    __shared__ std::int32_t of_warps[32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t most = most_splits(task.bounds);
    const std::int32_t kv_heads = task.rows.head_stride != 0 ? task.bounds.num_kv_heads : 1;
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int32_t warp = static_cast<std::int32_t>(threadIdx.x / 32);
    std::int32_t before = 0;
    for (std::int32_t begin = 0; begin < task.rows.num_rows; begin += decode_plan_threads) {
        const std::int32_t row = begin + static_cast<std::int32_t>(threadIdx.x);
        std::int32_t mine = 0;
        for (std::int32_t head = 0; row < task.rows.num_rows && head < kv_heads; ++head) {
            mine = max(mine, task.splits_of(row, head).count);
        }
        std::int32_t sum = mine;
        for (std::int32_t distance = 1; distance < 32; distance *= 2) {
            const std::int32_t other = __shfl_up_sync(0xffffffffu, sum, static_cast<unsigned>(distance));
            sum += lane >= distance ? other : 0;
        }
        if (lane == 31) {
            of_warps[warp] = sum;
        }
        __syncthreads();
        std::int32_t all = 0;
        for (std::int32_t i = 0; i < 32; ++i) {
            sum += i < warp ? of_warps[i] : 0;
            all += of_warps[i];
        }
        for (std::int32_t split = 0; split < mine; ++split) {
            task.buffers.items[before + sum - mine + split] = row * most + split;
        }
        before += all;
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        *task.buffers.num_items = before;
    }
}

/// One split of one KV head of one row: each warp takes every fourth chunk of keys, brought into a ring of
/// its own; then the warps' states are added in order.
template <class T, class Cache, std::int32_t D, bool Softcap>
class UNIPREFILL_HIDDEN decode_split {
    using shape = decode_shape<D>;
    static constexpr std::int32_t steps = D / 16;

  public:
    __device__ decode_split(const decode_task<T, Cache>& task, std::uint8_t* memory)
        : task_(task)
        , queries_(shared_address(memory))
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32))
        , ring_(queries_ + static_cast<std::uint32_t>(shape::query_bytes + warp_ * shape::ring_bytes))
        , state_(reinterpret_cast<float*>(memory + shape::query_bytes)) {}

    __device__ void run(std::int32_t row, std::int32_t split, std::int32_t kv_head, std::int32_t first_head,
                        softmax_row<T> (&sums)[decode_warps][decode_heads]) {
        const decode_splits all = task_.splits_of(row, kv_head);
        if (split >= all.count) {
            return; // another KV head of the row has more
        }
        row_ = row;
        request_ = task_.rows.request_of(row);
        kv_head_ = kv_head;
        begin_ = all.first + split * all.keys;
        end_ = min(begin_ + all.keys, all.end);
        heads_ = min(task_.bounds.group_heads() - first_head, decode_heads);
        first_head_ = kv_head * task_.bounds.group_heads() + first_head;
        fetch_queries();
        attend();
        add_up(split, sums);
    }

  private:
    /// Where 16 bytes of a row are: rows are whole, parts swizzled so that eight rows' same parts lie in
    /// different banks.
    [[nodiscard]] static __device__ std::uint32_t place(std::int32_t row, std::int32_t part) {
        constexpr std::int32_t swizzled = shape::parts % 8 == 0 ? 7 : shape::parts % 4 == 0 ? 3 : 1;
        const std::int32_t turn = shape::parts % 8 == 0 ? row : shape::parts % 4 == 0 ? row / 2 : row / 4;
        return static_cast<std::uint32_t>(row * shape::row_bytes + (part ^ (turn & swizzled)) * 16);
    }

    __device__ void fetch_queries() {
        for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x); at < decode_heads * shape::parts;
             at += decode_threads) {
            const std::int32_t head = at / shape::parts;
            const std::int32_t part = at % shape::parts;
            const bool present = head < heads_;
            copy_async_16(queries_ + place(head, part),
                          task_.queries.at(row_, first_head_ + (present ? head : 0)) + part * 8, present);
        }
        close_copy_group();
        wait_for_copies<0>();
        __syncthreads();
    }

    /// The first key of the warp's chunk @p count.
    [[nodiscard]] __device__ std::int32_t chunk_begin(std::int32_t count) const {
        return begin_ + (count * decode_warps + warp_) * decode_chunk;
    }
    /// Looks up where the rows of chunk @p count are: half of the warp its keys, half its values, one each.
    __device__ void look_up(std::int32_t count) {
        const std::int32_t token = chunk_begin(count) + lane_ % decode_chunk;
        if (token < end_) {
            row_address_ = lane_ < decode_chunk ? task_.keys.row(request_, token, kv_head_)
                                                : task_.values.row(request_, token, kv_head_);
        }
    }
    /// Starts the copies of the warp's chunk @p count, which was looked up, and looks up the next.
    __device__ void fetch_chunk(std::int32_t count) {
        const std::int32_t first = chunk_begin(count);
        if (first < end_) {
            const std::uint32_t to =
                ring_ + static_cast<std::uint32_t>(count % shape::stages * 2 * shape::chunk_bytes);
            const auto mine = reinterpret_cast<std::uint64_t>(row_address_);
#pragma unroll
            for (std::int32_t i = 0; i < decode_chunk * shape::parts / 32; ++i) {
                const std::int32_t at = i * 32 + lane_;
                const std::int32_t key = at / shape::parts;
                const std::int32_t part = at % shape::parts;
                const bool present = first + key < end_;
                const std::uint64_t k = __shfl_sync(0xffffffffu, mine, present ? key : 0);
                const std::uint64_t v = __shfl_sync(0xffffffffu, mine, decode_chunk + (present ? key : 0));
                copy_once_async_16(to + place(key, part), reinterpret_cast<const T*>(k) + part * 8, present);
                copy_once_async_16(to + shape::chunk_bytes + place(key, part),
                                   reinterpret_cast<const T*>(v) + part * 8, present);
            }
            look_up(count + 1);
        }
        close_copy_group();
    }

    __device__ void attend() {
#pragma unroll
        for (std::int32_t i = 0; i < D / 8; ++i) {
            out_[i][0] = out_[i][1] = out_[i][2] = out_[i][3] = 0;
        }
        rows_[0] = {};
        rows_[1] = {};
        look_up(0);
#pragma unroll
        for (std::int32_t stage = 0; stage < shape::stages - 1; ++stage) {
            fetch_chunk(stage);
        }
        for (std::int32_t count = 0;; ++count) {
            const std::int32_t first = chunk_begin(count);
            if (first >= end_) {
                break;
            }
            fetch_chunk(count + shape::stages - 1);
            wait_for_copies<shape::stages - 1>();
            __syncwarp();
            take_chunk(ring_ + static_cast<std::uint32_t>(count % shape::stages * 2 * shape::chunk_bytes),
                       end_ - first);
            __syncwarp();
        }
        wait_for_copies<0>();
    }

    /// @param keys  of the chunk that are present
    __device__ void take_chunk(std::uint32_t at, std::int32_t keys) {
        float scores[2][4] = {};
#pragma unroll
        for (std::int32_t step = 0; step < steps; ++step) {
            std::uint32_t q[4];
            std::uint32_t k[4];
            load_squares(q, queries_ + place(lane_ % 16, 2 * step + lane_ / 16));
            load_squares(k, at + place(lane_ % 8 + lane_ / 16 * 8, 2 * step + lane_ / 8 % 2));
            multiply_squares<T>(scores[0], q, k[0], k[1]);
            multiply_squares<T>(scores[1], q, k[2], k[3]);
        }
        float largest[2] = {nothing_read, nothing_read};
#pragma unroll
        for (std::int32_t i = 0; i < 8; ++i) {
            const std::int32_t key = i / 4 * 8 + lane_ % 4 * 2 + i % 2;
            float& score = scores[i / 4][i % 4];
            score = key < keys ? score : nothing_read;
            largest[i / 2 % 2] = larger(largest[i / 2 % 2], score);
        }
        float factors[2];
        float subtrahend[2];
#pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            largest[half] = larger(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
            largest[half] = larger(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
            factors[half] = rows_[half].raise(on_grid<Softcap>(largest[half], task_.scores));
            subtrahend[half] = -rows_[half].subtrahend();
        }
#pragma unroll
        for (std::int32_t i = 0; i < 8; ++i) {
            float& score = scores[i / 4][i % 4];
            const std::int32_t half = i / 2 % 2;
            score = exp2_of(add(on_grid<Softcap>(score, task_.scores), subtrahend[half]));
            rows_[half].sum = add(rows_[half].sum, score);
        }
        if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
#pragma unroll
            for (std::int32_t i = 0; i < D / 2; ++i) {
                out_[i / 4][i % 4] = multiply(out_[i / 4][i % 4], factors[i / 2 % 2]);
            }
        }
        const std::uint32_t weights[4] = {
            rounded_pair<T>(scores[0][0], scores[0][1]), rounded_pair<T>(scores[0][2], scores[0][3]),
            rounded_pair<T>(scores[1][0], scores[1][1]), rounded_pair<T>(scores[1][2], scores[1][3])};
        const std::uint32_t values = at + shape::chunk_bytes;
#pragma unroll
        for (std::int32_t step = 0; step < steps; ++step) {
            std::uint32_t v[4];
            load_squares_transposed(v, values + place(lane_ % 16, 2 * step + lane_ / 16));
            multiply_squares<T>(out_[2 * step], weights, v[0], v[1]);
            multiply_squares<T>(out_[2 * step + 1], weights, v[2], v[3]);
        }
    }

    /// The warps' states in order of warps, to the row's buffers.
    __device__ void add_up(std::int32_t split, softmax_row<T> (&sums)[decode_warps][decode_heads]) {
#pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            rows_[half].sum = add(rows_[half].sum, __shfl_xor_sync(0xffffffffu, rows_[half].sum, 1));
            rows_[half].sum = add(rows_[half].sum, __shfl_xor_sync(0xffffffffu, rows_[half].sum, 2));
            if (lane_ % 4 == 0) {
                sums[warp_][lane_ / 4 + 8 * half] = rows_[half];
            }
        }
        float* const mine = state_ + warp_ * (shape::ring_bytes / 4);
#pragma unroll
        for (std::int32_t i = 0; i < D / 2; ++i) {
            const std::int32_t head = lane_ / 4 + 8 * (i / 2 % 2);
            mine[head * D + i / 4 * 8 + lane_ % 4 * 2 + i % 2] = out_[i / 4][i % 4];
        }
        __syncthreads();
        const std::int64_t first =
            (std::int64_t{row_} * most_splits(task_.bounds) + split) * task_.bounds.num_heads + first_head_;
        for (std::int32_t at = static_cast<std::int32_t>(threadIdx.x); at < heads_ * D;
             at += decode_threads) {
            const std::int32_t head = at / D;
            softmax_row<T> all = sums[0][head];
            float sum = state_[at];
#pragma unroll
            for (std::int32_t warp = 1; warp < decode_warps; ++warp) {
                const state_factors how = combine(all, sums[warp][head]);
                sum = add(multiply(sum, how.first),
                          multiply(state_[warp * (shape::ring_bytes / 4) + at], how.second));
            }
            task_.buffers.outputs[first * D + at] = sum;
            if (at % D == 0) {
                task_.buffers.sums[first + head] = all;
            }
        }
        __syncthreads();
    }

    const decode_task<T, Cache>& task_;
    std::uint32_t queries_;
    std::int32_t lane_;
    std::int32_t warp_;
    std::uint32_t ring_;
    float* state_;
    std::int32_t row_ = 0;
    std::int32_t request_ = 0;
    std::int32_t kv_head_ = 0;
    std::int32_t begin_ = 0;
    std::int32_t end_ = 0;
    std::int32_t heads_ = 0;
    std::int32_t first_head_ = 0;
    const T* row_address_ = nullptr; ///< of this lane's key or value of the chunk that is fetched next
    softmax_row<T> rows_[2];
    float out_[D / 8][4];
};

template <class T, class Cache, std::int32_t D, bool Softcap>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(decode_threads, decode_shape<D>::ctas_per_multiprocessor)
    decode_split_kernel(const __grid_constant__ decode_task<T, Cache> task) {
    extern __shared__ uint4 decode_memory[];
    __shared__ softmax_row<T> sums[decode_warps][decode_heads];
    let_next_kernel_start();
    wait_for_previous_kernel();
    decode_split<T, Cache, D, Softcap> split(task, reinterpret_cast<std::uint8_t*>(decode_memory));
    const std::int32_t tiles = (task.bounds.group_heads() + decode_heads - 1) / decode_heads;
    const std::int32_t of_item = task.bounds.num_kv_heads * tiles;
    const std::int32_t most = most_splits(task.bounds);
    const std::int64_t pieces = std::int64_t{*task.buffers.num_items} * of_item;
    for (std::int64_t piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const std::int32_t item = task.buffers.items[piece / of_item];
        const auto within = static_cast<std::int32_t>(piece % of_item);
        split.run(item / most, item % most, within / tiles, within % tiles * decode_heads, sums);
    }
}

/// The states of a (row, head)'s splits in order of keys: one warp each.
template <class T, class Cache, std::int32_t D>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(decode_threads)
    decode_merge_kernel(const __grid_constant__ decode_task<T, Cache> task) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t heads = task.bounds.num_heads;
    const std::int32_t most = most_splits(task.bounds);
    const std::int32_t lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int64_t warps = std::int64_t{gridDim.x} * decode_warps;
    const std::int64_t all = std::int64_t{task.rows.num_rows} * heads;
    for (std::int64_t at = std::int64_t{blockIdx.x} * decode_warps + threadIdx.x / 32; at < all;
         at += warps) {
        const auto row = static_cast<std::int32_t>(at / heads);
        const auto head = static_cast<std::int32_t>(at % heads);
        const std::int32_t count = task.splits_of(row, head / task.bounds.group_heads()).count;
        softmax_row<T> sum{};
        float out[(D + 31) / 32] = {};
#pragma unroll 4
        for (std::int32_t split = 0; split < count; ++split) {
            const std::int64_t state = (std::int64_t{row} * most + split) * heads + head;
            const state_factors how = combine(sum, task.buffers.sums[state]);
#pragma unroll
            for (std::int32_t i = 0; i < (D + 31) / 32; ++i) {
                if (i * 32 + lane < D) {
                    out[i] = add(multiply(out[i], how.first),
                                 multiply(task.buffers.outputs[state * D + i * 32 + lane], how.second));
                }
            }
        }
        const row_end end = finish_row(sum, task.scores, head);
#pragma unroll
        for (std::int32_t i = 0; i < (D + 31) / 32; ++i) {
            if (i * 32 + lane < D) {
                task.out.at(row, head)[i * 32 + lane] = {
                    static_cast<std::uint16_t>(rounded_pair<T>(multiply(out[i], end.factor), 0))};
            }
        }
        if (lane == 0 && task.lse != nullptr) {
            task.lse[at] = end.lse;
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
