// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The score kernel of Hopper. A thread block keeps the query rows of one KV head in shared memory and lets
/// tiles of keys stream past: four warps fetch keys from wherever they are, four groups of four warps
/// multiply and take exponentials.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_hopper.cuh>
#include <uniprefill/importance/detail/cuda_finish.cuh>
#include <uniprefill/importance/detail/cuda_score.cuh>

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t sm90_shared_bytes = 227 * 1024;

/// Sizes that follow from the head dimension and the key element.
template <class T, std::int32_t D>
struct sm90_shape {
    static constexpr std::int32_t row_bytes = D * static_cast<std::int32_t>(sizeof(T));
    static constexpr std::int32_t panels = (row_bytes + 127) / 128; ///< 128-byte columns of rows
    static constexpr std::int32_t tile_keys = row_bytes > 384 ? 64 : 128;
    static constexpr std::int32_t chunk_rows = row_bytes > 256 ? 256 : 512;
    static constexpr std::int32_t query_bytes = panels * chunk_rows * 128;
    static constexpr std::int32_t stage_bytes = panels * tile_keys * 128;
    static constexpr std::int32_t scale_bytes = std::is_same_v<T, float8_e4m3> ? chunk_rows * 4 : 0;
    static constexpr std::int32_t static_bytes = 1536;                             ///< for sm90_shared
    static constexpr std::int32_t spare_bytes = 1024 + static_bytes + scale_bytes; ///< 1024 for alignment
    static constexpr std::int32_t fitting = (sm90_shared_bytes - spare_bytes - query_bytes) / stage_bytes;
    static constexpr std::int32_t stages = fitting < 4 ? fitting : 4;
    static constexpr std::int32_t dynamic_bytes = 1024 + query_bytes + stages * stage_bytes + scale_bytes;
    static constexpr std::int32_t row_threads = row_bytes <= 128 ? 8 : row_bytes <= 256 ? 16 : 32;
    static constexpr bool exists = row_bytes % 32 == 0 && stages >= 2;
};

inline constexpr std::int32_t sm90_groups = 4; ///< groups of four warps that multiply
inline constexpr std::int32_t sm90_threads = 128 * (sm90_groups + 1);
inline constexpr std::int32_t sm90_loaders = 128;
inline constexpr std::int32_t sm90_multipliers = 128 * sm90_groups;
inline constexpr std::int32_t sm90_pair = 64; ///< threads that fetch a tile of keys
inline constexpr std::int32_t sm90_max_stages = 4;

struct sm90_shared {
    alignas(8) std::uint64_t full[sm90_max_stages];
    std::uint64_t empty[sm90_max_stages];
    tile_notes notes[sm90_max_stages];
    cuda_segment of_loaders[2]; ///< the segment that each pair of warps fetches keys of
    cuda_segment of_multipliers[sm90_groups];
    score_run runs[sm90_groups];
    std::uint32_t suspicious_queries[sm90_groups];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// The four warps that fetch keys. Two of them fetch every second tile and look at it before they hand it
/// over, so that one tile arrives while the other is looked at. A row is fetched by a power of two of
/// threads, 16 bytes each.
template <class Q, class T, class Cache, std::int32_t D, std::int32_t G>
class UNIPREFILL_HIDDEN sm90_loader {
    using shape = sm90_shape<T, D>;
    static constexpr std::int32_t row_parts = shape::row_bytes / 16;
    static constexpr std::int32_t rows_at_once = sm90_pair / shape::row_threads;
    static constexpr std::int32_t slot_keys = G < shape::tile_keys ? G : shape::tile_keys;

  public:
    __device__ sm90_loader(const cuda_score_task<Q, T, Cache>& task, sm90_shared& shared, std::uint8_t* keys)
        : task_(task)
        , shared_(shared)
        , keys_(keys)
        , thread_(static_cast<std::int32_t>(threadIdx.x) % sm90_pair)
        , pair_(uniform(static_cast<std::int32_t>(threadIdx.x) / sm90_pair)) {}

    __device__ void run() {
        cuda_share share(task_.buffers, task_.tiling, task_.batch.num_segments, blockIdx.x, gridDim.x);
        cuda_run now;
        std::int32_t tiles_before = 0;
        cuda_segment& what = shared_.of_loaders[pair_];
        while (share.next(now)) {
            copy_segment(what, task_.buffers.segments[now.segment], thread_);
            join_threads<sm90_pair>(1 + pair_);
            const std::int32_t tiles = now.tile_end - now.tile_begin;
            for (std::int32_t tile = (pair_ ^ tiles_before) & 1; tile < tiles; tile += 2) {
                const auto count = static_cast<std::uint32_t>(tiles_before + tile);
                fetch_keys(now, what, now.tile_begin + tile, count);
                close_copy_group();
                wait_for_copies<0>();
                hand_over_keys(what, now.tile_begin + tile, count % shape::stages);
            }
            tiles_before += tiles;
            join_threads<sm90_pair>(1 + pair_);
        }
    }

  private:
    [[nodiscard]] __device__ std::uint32_t stage_address(std::uint32_t stage) const {
        return shared_address(keys_) + stage * shape::stage_bytes;
    }
    /// The same as swizzled_place(), @p further rows on: a multiple of a power of two that is above the row.
    [[nodiscard]] static __device__ std::uint32_t further_place(std::uint32_t place, std::int32_t further) {
        return (place ^ static_cast<std::uint32_t>(further % 8 * 16)) +
               static_cast<std::uint32_t>(further * 128);
    }
    [[nodiscard]] __device__ std::int32_t row() const { return thread_ / shape::row_threads; }
    [[nodiscard]] __device__ std::int32_t part() const { return thread_ % shape::row_threads; }

    /// @param count of the tile, among those that this thread block has gone through
    __device__ void fetch_keys(const cuda_run& now, const cuda_segment& what, std::int32_t tile,
                               std::uint32_t count) {
        const std::uint32_t stage = count % shape::stages;
        barrier_wait(&shared_.empty[stage], ((count / shape::stages) & 1u) ^ 1u);
        if (part() >= row_parts) {
            return;
        }
        const cuda_tile at = cuda_tile::at(what, tile, shape::tile_keys, slot_keys);
        const std::int32_t first = row();
        // Panels start at multiples of 1,024 bytes, so bits 4 to 6 of an address are those of its place.
        const std::uint32_t to = stage_address(stage) +
                                 static_cast<std::uint32_t>(swizzled_place(shape::tile_keys, first, part()));
        if (at.first_key >= what.cached) {
            const T* from = task_.key(what, at.first_key + first, now.kv_head) + part() * (16 / sizeof(T));
            const std::int64_t step = rows_at_once * task_.keys.row_stride;
            const std::int32_t left = at.num_keys - first;
#    pragma unroll
            for (std::int32_t further = 0; further < shape::tile_keys; further += rows_at_once) {
                copy_once_async_16(further_place(to, further), from, further < left);
                from += step;
            }
        } else {
#    pragma unroll 4
            for (std::int32_t further = 0; further < shape::tile_keys; further += rows_at_once) {
                const bool present = first + further < at.num_keys;
                const T* from =
                    present ? task_.key(what, at.first_key + first + further, now.kv_head) : task_.keys.data;
                copy_once_async_16(further_place(to, further), from + part() * (16 / sizeof(T)), present);
            }
        }
    }

    __device__ void hand_over_keys(const cuda_segment& what, std::int32_t tile, std::uint32_t stage) {
        tile_notes& notes = shared_.notes[stage];
        suspicious_elements<T> suspicious;
        if (part() < row_parts) {
            const std::uint32_t from =
                stage_address(stage) +
                static_cast<std::uint32_t>(swizzled_place(shape::tile_keys, row(), part()));
#    pragma unroll
            for (std::int32_t further = 0; further < shape::tile_keys; further += rows_at_once) {
                suspicious.look_at(load_shared_16(further_place(from, further)));
            }
        }
        const bool any = __any_sync(0xffffffffu, suspicious.found());
        if (thread_ % 32 == 0) {
            notes.suspicious[thread_ / 32] = any ? 1 : 0;
        }
        if (what.num_cuts > 0 && tile >= what.context_tiles) {
            note_cuts<shape::tile_keys, G, sm90_pair>(task_.batch, task_.buffers, what,
                                                      cuda_tile::at(what, tile, shape::tile_keys, slot_keys),
                                                      thread_, notes);
        } else if (thread_ == 0) {
            notes.has_cuts = 0;
        }
        fence_for_matrix_reads();
        barrier_arrive(&shared_.full[stage]);
    }

    const cuda_score_task<Q, T, Cache>& task_;
    sm90_shared& shared_;
    std::uint8_t* keys_;
    std::int32_t thread_; ///< of the pair
    std::int32_t pair_;
};

/// One of the four groups of four warps that multiply. The (tile, 64 query rows) pairs of a run are dealt out
/// to them in turn. A group waits for its own products; that there are four keeps the tensor cores busy
/// meanwhile.
template <class Q, class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
class UNIPREFILL_HIDDEN sm90_multiplier {
    using shape = sm90_shape<T, D>;
    static constexpr std::int32_t tile_keys = shape::tile_keys;
    static constexpr std::int32_t slot_keys = G < tile_keys ? G : tile_keys;
    using finisher = score_finisher<cuda_score_task<Q, T, Cache>, tile_keys, G, Softcap>;
    using accumulators = typename finisher::scores;

  public:
    __device__ sm90_multiplier(const cuda_score_task<Q, T, Cache>& task, sm90_shared& shared,
                               std::uint8_t* queries, std::int32_t group)
        : task_(task)
        , shared_(shared)
        , queries_(queries)
        , scales_(reinterpret_cast<float*>(queries + shape::query_bytes + shape::stages * shape::stage_bytes))
        , query_place_(shared_address(queries) >> 4)
        , key_place_(shared_address(queries + shape::query_bytes) >> 4)
        , group_(group)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32 % 4)) {
        asm volatile("" : "+r"(query_place_), "+r"(key_place_));
    }

    __device__ void run() {
        cuda_share share(task_.buffers, task_.tiling, task_.batch.num_segments, blockIdx.x, gridDim.x);
        std::int32_t next = group_; // 64 query rows that are this group's next, counted from the tile's first
        if (group_ == sm90_groups - 1) {
            let_multiply(0);
        }
        while (share.next(now_)) {
            join_threads<sm90_multipliers>(3); // nobody reads the queries of the run before any more
            if (warp_ == 0) {
                copy_segment(shared_.of_multipliers[group_], task_.buffers.segments[now_.segment], lane_);
            }
            join_threads<128>(first_own + group_);
            const cuda_segment& what = segment();
            const std::int32_t left = what.lanes - now_.first_row;
            const std::int32_t rows = left < shape::chunk_rows ? left : shape::chunk_rows;
            row_tiles_ = rows / row_tile;
            if (warp_ == 0 && lane_ == 0) {
                shared_.runs[group_] = finisher::share(task_, what, now_);
            }
            const bool suspicious = fetch_queries(rows);
            fence_for_matrix_reads();
            const bool any_suspicious = join_threads_or<sm90_multipliers>(3, suspicious);
            if (warp_ == 0 && lane_ == 0) {
                shared_.suspicious_queries[group_] = any_suspicious ? 1 : 0;
            }
            join_threads<128>(first_own + group_);
            const finisher finish(task_, what, shared_.runs[group_]);
            for (std::int32_t tile = now_.tile_begin; tile < now_.tile_end; ++tile) {
                next = multiply_tile(finish, tile, next);
            }
        }
        if (next == 0) {
            wait_for_turn(); // nobody else will
        }
    }

  private:
    [[nodiscard]] __device__ std::int32_t thread() const {
        return static_cast<std::int32_t>(threadIdx.x) - sm90_loaders;
    }
    [[nodiscard]] __device__ const cuda_segment& segment() const { return shared_.of_multipliers[group_]; }
    /// The row, counted from the segment's first, of an observation.
    [[nodiscard]] __device__ std::int32_t observation(std::int32_t index) const {
        return observation_row(task_.buffers, segment(), now_.segment, task_.bounds.num_observations, index);
    }
    /// A query row of the KV head; null beyond the last.
    [[nodiscard]] __device__ const Q* query(std::int32_t row) const {
        const cuda_segment& what = segment();
        return row < what.query_rows
                   ? task_.queries.at(what.first_row + observation(row % what.num_observations),
                                      now_.kv_head * task_.bounds.group_heads() + row / what.num_observations)
                   : nullptr;
    }

    /// @return whether this thread saw elements that could make a score NaN or infinite
    [[nodiscard]] __device__ bool fetch_queries(std::int32_t rows) {
        if constexpr (std::is_same_v<Q, T>) {
            constexpr std::int32_t at_once = sm90_multipliers / shape::row_threads;
            static_assert(at_once % 8 == 0, "rows of a thread have the same place among 8");
            const cuda_segment& what = segment();
            const std::int32_t part = thread() % shape::row_threads;
            const std::int32_t first = thread() / shape::row_threads;
            if (part >= shape::row_bytes / 16) {
                return false;
            }
            const std::int32_t n = what.num_observations;
            const std::int32_t present = what.query_rows - now_.first_row;
            const std::int32_t first_head = now_.kv_head * task_.bounds.group_heads();
            std::int32_t head = (now_.first_row + first) / n;
            std::int32_t observed = (now_.first_row + first) % n;
            const auto address = [&] {
                return task_.queries.at(what.first_row + observation(observed), first_head + head) +
                       part * static_cast<std::int32_t>(16 / sizeof(Q));
            };
            const Q* from = first < present ? address() : task_.queries.data;
            const std::uint32_t begin =
                shared_address(queries_) +
                static_cast<std::uint32_t>(swizzled_place(shape::chunk_rows, first, part));
            std::uint32_t to = begin;
#    pragma unroll 1
            for (std::int32_t row = first; row < rows; row += at_once, to += at_once * 128) {
                copy_async_16(to, row < present ? from : task_.queries.data, row < present);
                observed += at_once;
                from += at_once * task_.queries.row_stride;
                while (observed >= n) {
                    observed -= n;
                    ++head;
                    from += task_.queries.head_stride - n * task_.queries.row_stride;
                }
                if (what.named != 0 && row + at_once < present) { // observations may be any rows
                    from = address();
                }
            }
            close_copy_group();
            wait_for_copies<0>();
            suspicious_elements<Q> suspicious;
            to = begin;
#    pragma unroll 4
            for (std::int32_t row = first; row < rows; row += at_once, to += at_once * 128) {
                suspicious.look_at(load_shared_16(to));
            }
            return suspicious.found();
        } else {
            convert_queries(rows);
            return false;
        }
    }

    /// Queries for FP8 keys: each row is scaled so that its largest element is 448, the largest of e4m3. A
    /// lane takes 16 elements of a row.
    __device__ void convert_queries(std::int32_t rows) {
        constexpr std::int32_t parts = D / 16;
        constexpr std::int32_t lanes = parts <= 4 ? 4 : parts <= 8 ? 8 : 16;
        const float key_scale = task_.key_scales != nullptr ? task_.key_scales[now_.kv_head] : 1.0f;
        const std::int32_t part = thread() % lanes;
        bool suspicious = is_non_finite(key_scale);
        // As many rows for each thread, so that shuffles find all lanes.
        for (std::int32_t row = thread() / lanes; row < rows; row += sm90_multipliers / lanes) {
            const Q* from = part < parts ? query(now_.first_row + row) : nullptr;
            uint4 words[2] = {};
            if (from != nullptr) {
                words[0] = reinterpret_cast<const uint4*>(from + part * 16)[0];
                words[1] = reinterpret_cast<const uint4*>(from + part * 16)[1];
            }
            float elements[16];
            float largest = 0;
#    pragma unroll
            for (std::int32_t i = 0; i < 16; ++i) {
                const std::uint32_t word = (&words[i / 8].x)[i / 2 % 4];
                elements[i] =
                    to_float(Q{static_cast<std::uint16_t>(i % 2 == 0 ? word & 0xffffu : word >> 16)});
                suspicious = suspicious || is_non_finite(elements[i]);
                largest =
                    larger(largest, bit_cast<float>(bit_cast<std::uint32_t>(elements[i]) & 0x7fffffffu));
            }
#    pragma unroll
            for (std::int32_t offset = lanes / 2; offset > 0; offset /= 2) {
                largest = larger(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
            }
            // Rows of next to nothing count as zero.
            const float down = largest > 1.0e-30f ? detail::multiply(448.0f, reciprocal(largest)) : 0.0f;
            uint4 converted{0, 0, 0, 0};
#    pragma unroll
            for (std::int32_t i = 0; i < 16; ++i) {
                const std::uint32_t bits =
                    __nv_cvt_float_to_fp8(detail::multiply(elements[i], down), __NV_SATFINITE, __NV_E4M3);
                (&converted.x)[i / 4] |= bits << (i % 4 * 8);
            }
            if (part < parts) {
                *reinterpret_cast<uint4*>(queries_ + swizzled_place(shape::chunk_rows, row, part)) =
                    converted;
            }
            if (part == 0) {
                scales_[row] = detail::multiply(detail::multiply(largest, 1.0f / 448.0f),
                                                detail::multiply(key_scale, task_.query_factor));
            }
        }
        if (suspicious) {
            task_.buffers.faulty[now_.segment] = 1;
        }
    }

    /// This group's pairs of one tile. @return the first one of the next tile
    __device__ std::int32_t multiply_tile(const finisher& finish, std::int32_t index, std::int32_t rows) {
        const std::uint32_t stage = stage_;
        barrier_wait(&shared_.full[stage], phase_);
        stage_ = stage + 1 == shape::stages ? 0 : stage + 1;
        phase_ ^= stage_ == 0 ? 1u : 0u;
        if (rows >= row_tiles_) {
            release(stage);
            return rows - row_tiles_;
        }
        const tile_notes& notes = shared_.notes[stage];
        const bool suspicious = shared_.suspicious_queries[group_] != 0 || notes.any_suspicious();
        const tile_notes* const cuts = notes.has_cuts != 0 ? &notes : nullptr;
        const typename finisher::place place = finish.place_of(index, suspicious, cuts);
        for (; rows < row_tiles_; rows += sm90_groups) {
            accumulators scores;
            multiply(scores, stage, rows);
            const bool last = rows + sm90_groups >= row_tiles_;
            if (last && cuts == nullptr) {
                release(stage);
            }
            const std::int32_t row = rows * row_tile + warp_ * 16;
            float factors[2] = {task_.query_factor, task_.query_factor};
            if constexpr (std::is_same_v<T, float8_e4m3>) {
                factors[0] = scales_[row + lane_ / 4];
                factors[1] = scales_[row + lane_ / 4 + 8];
            }
            finish.finish(scores, place, row, factors);
            if (last && cuts != nullptr) {
                release(stage);
            }
        }
        return rows - row_tiles_;
    }
    __device__ void release(std::uint32_t stage) {
        barrier_arrive(&shared_.empty[stage]); // each lane for itself: racecheck sees that it has read
    }

    /// Groups multiply one after another, in turn: one that has the tensor cores to itself is done earlier
    /// than one that shares them, and takes exponentials while the next multiplies.
    __device__ void wait_for_turn() const { join_threads<2 * 128>(first_turn + group_); }
    /// Lets a group have its turn.
    __device__ void let_multiply(std::int32_t group) const {
        asm volatile("bar.arrive %0, %1;" ::"r"(first_turn + group), "n"(2 * 128) : "memory");
    }
    static constexpr std::int32_t first_turn = 4;                       ///< barrier of the first group's
    static constexpr std::int32_t first_own = first_turn + sm90_groups; ///< of the first group by itself

    __device__ void multiply(accumulators& scores, std::uint32_t stage, std::int32_t rows) {
        constexpr std::int32_t steps = shape::row_bytes / 32;
        // Made before the turn comes, and kept from being made anew for each product.
        std::uint32_t query_place = query_place_ + static_cast<std::uint32_t>(rows) * (row_tile * 128 >> 4);
        std::uint32_t key_place = key_place_ + stage * (shape::stage_bytes >> 4);
        asm volatile("" : "+r"(query_place), "+r"(key_place));
        const std::uint64_t queries = matrix_descriptor(query_place);
        const std::uint64_t keys = matrix_descriptor(key_place);
        wait_for_turn();
        pin(scores);
        matrix_begin();
#    pragma unroll
        for (std::int32_t step = 0; step < steps; ++step) {
            const std::int32_t in_panel = step % 4 * (32 >> 4);
            matrix_step<T, tile_keys>(
                scores,
                queries + static_cast<std::uint64_t>(step / 4 * (shape::chunk_rows * 128 >> 4) + in_panel),
                keys + static_cast<std::uint64_t>(step / 4 * (tile_keys * 128 >> 4) + in_panel),
                step > 0 ? 1 : 0);
            if (step == steps / 2 - 1) {
                matrix_close_group();
            }
        }
        matrix_close_group();
        matrix_wait<1>();
        let_multiply((group_ + 1) % sm90_groups); // its first products queue up behind these
        matrix_wait<0>();
        pin(scores);
    }
    /// Keeps the compiler from moving accesses of accumulators across.
    static __device__ void pin(accumulators& scores) {
#    pragma unroll
        for (std::int32_t i = 0; i < tile_keys / 2; ++i) {
            asm volatile("" : "+f"(scores[i])::"memory");
        }
    }

    const cuda_score_task<Q, T, Cache>& task_;
    sm90_shared& shared_;
    std::uint8_t* queries_;
    float* scales_;             ///< of query rows, where they were converted
    std::uint32_t query_place_; ///< in 16 bytes, as descriptors have it
    std::uint32_t key_place_;
    cuda_run now_{};
    std::uint32_t stage_ = 0; ///< of the next tile
    std::uint32_t phase_ = 0;
    std::int32_t row_tiles_ = 0;
    std::int32_t group_;
    std::int32_t lane_;
    std::int32_t warp_;
};

#endif // __CUDA_ARCH_FEAT_SM90_ALL

template <class Q, class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(sm90_threads, 1)
    sm90_score_kernel(const __grid_constant__ cuda_score_task<Q, T, Cache> task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using shape = sm90_shape<T, D>;
    extern __shared__ std::uint8_t dynamic_memory[];
    __shared__ sm90_shared shared;
    static_assert(sizeof(sm90_shared) <= shape::static_bytes);
    const std::uint32_t misaligned = shared_address(dynamic_memory) % 1024;
    std::uint8_t* const queries = dynamic_memory + (misaligned == 0 ? 0 : 1024 - misaligned);
    if (threadIdx.x == 0) {
        for (std::int32_t stage = 0; stage < shape::stages; ++stage) {
            barrier_init(&shared.full[stage], sm90_pair);
            barrier_init(&shared.empty[stage], sm90_multipliers);
        }
        for (tile_notes& notes : shared.notes) {
            notes = {};
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t group = uniform(static_cast<std::int32_t>(threadIdx.x / 128));
    if (group == 0) {
        lower_register_limit<32>();
        sm90_loader<Q, T, Cache, D, G>(task, shared, queries + shape::query_bytes).run();
    } else {
        raise_register_limit<112>();
        sm90_multiplier<Q, T, Cache, D, G, Softcap>(task, shared, queries, group - 1).run();
    }
#else
    static_cast<void>(task);
#endif
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
