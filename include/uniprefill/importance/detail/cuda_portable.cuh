// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The score kernel of every device from compute capability 8.0 on. Each warp keeps its query rows in
/// registers; all warps of a thread block fetch tiles of keys into a ring of shared memory, slice by slice,
/// and multiply with them. At most 51 KiB of shared memory, whatever the head dimension.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_matrix.cuh>
#include <uniprefill/importance/detail/cuda_convert.cuh>
#include <uniprefill/importance/detail/cuda_finish.cuh>
#include <uniprefill/importance/detail/cuda_split_word.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Sizes that follow from the head dimension and the element that is multiplied, which is that of the
/// queries.
template <class Q, std::int32_t D>
struct portable_shape {
    static constexpr std::int32_t warps = 8;
    static constexpr std::int32_t threads = 32 * warps;
    static constexpr std::int32_t row_bytes = D * static_cast<std::int32_t>(sizeof(Q));
    static constexpr std::int32_t slices = (row_bytes + 255) / 256; ///< of a row; they are fetched one by one
    static constexpr std::int32_t slice_bytes = row_bytes / slices;
    /// Rows are an odd number of 16 bytes apart, so that 8 of them lie in different banks.
    static constexpr std::int32_t pitch = slice_bytes + 16;
    static constexpr std::int32_t tile_keys = 64;
    static constexpr std::int32_t stages = 3;
    static constexpr std::int32_t stage_bytes = tile_keys * pitch;
    static constexpr std::int32_t dynamic_bytes = stages * stage_bytes;
    /// Tiles of 16 query rows that a warp keeps: as many as registers hold beside their scores.
    static constexpr std::int32_t row_tiles =
        row_bytes <= 256 || (row_bytes <= 384 && sizeof(Q) == 2) ? 2 : 1;
    static constexpr std::int32_t chunk_rows = warps * 16 * row_tiles;
    static constexpr std::int32_t ctas_per_multiprocessor = 1;

    static_assert(slice_bytes % 32 == 0 && slice_bytes * slices == row_bytes);
};

template <std::int32_t Stages, std::int32_t Warps>
struct portable_shared {
    alignas(8) std::uint8_t suspicious[Stages][Warps]; ///< whether a warp saw suspicious keys
    tile_notes notes[2]; ///< of this tile and the next; `suspicious` is not used
    alignas(8) cuda_segment segment;
};

/// Fetches a thread's share of a slice of a tile of keys. Keys of the queries' own type are copied
/// asynchronously; others pass through registers, from begin() to end(), and are converted on the way.
template <class Q, class T, class Cache, std::int32_t D>
class UNIPREFILL_HIDDEN portable_loader {
    using shape = portable_shape<Q, D>;
    using cached_element = typename Cache::element;
    static constexpr bool cached_are_converted = !std::is_same_v<cached_element, Q>;
    static constexpr bool rows_are_converted = !std::is_same_v<T, Q>;
    static constexpr std::int32_t row_parts = shape::slice_bytes / 16;
    static constexpr std::int32_t row_threads = row_parts <= 8 ? 8 : 16;
    static constexpr std::int32_t rows_at_once = shape::threads / row_threads;
    static constexpr std::int32_t pieces = shape::tile_keys / rows_at_once;
    static constexpr std::int32_t part_elements = 16 / static_cast<std::int32_t>(sizeof(Q));
    using cached_piece = converted_piece<cached_element, Q>;
    using rows_piece = converted_piece<T, Q>;
    static constexpr std::int32_t cached_words = cached_are_converted ? cached_piece::words : 0;
    static constexpr std::int32_t rows_words = rows_are_converted ? rows_piece::words : 0;
    static constexpr std::int32_t words = cached_words > rows_words ? cached_words : rows_words;
    static_assert(row_parts <= 16);

  public:
    __device__ portable_loader(const cuda_score_task<Q, T, Cache>& task, std::uint8_t* stages)
        : task_(task)
        , part_(static_cast<std::int32_t>(threadIdx.x) % row_threads)
        , row_(static_cast<std::int32_t>(threadIdx.x) / row_threads)
        , place_(stages + row_ * shape::pitch + part_ * 16) {}

    __device__ void begin(const cuda_segment& what, const cuda_tile& at, std::int32_t kv_head,
                          std::int32_t slice, std::int32_t stage) {
        held_cached_ = held_rows_ = 0;
        if (part_ >= row_parts) {
            return;
        }
        const std::uint32_t to = shared_address(place_ + stage * shape::stage_bytes);
        const std::int32_t offset =
            slice * (shape::slice_bytes / static_cast<std::int32_t>(sizeof(Q))) + part_ * part_elements;
#pragma unroll
        for (std::int32_t i = 0; i < pieces; ++i) {
            const std::int32_t row = row_ + i * rows_at_once;
            const std::int64_t key = at.first_key + row;
            const bool present = row < at.num_keys;
            const bool cached = present && key < what.cached;
            if (cached) {
                const cached_element* from =
                    task_.cached.row(what.request, static_cast<std::int32_t>(key), kv_head) + offset;
                if constexpr (cached_are_converted) {
                    cached_piece::load(raw_[i], from);
                    held_cached_ |= 1u << i;
                } else {
                    copy_async_16(to + i * step, from, true);
                }
                continue;
            }
            const T* from = present ? task_.keys.at(what.request_row + key - what.cached, kv_head) + offset
                                    : task_.keys.data;
            if constexpr (rows_are_converted) {
                if (present) {
                    rows_piece::load(raw_[i], from);
                    held_rows_ |= 1u << i;
                } else {
                    copy_async_16(to + i * step, from, false);
                }
            } else {
                copy_async_16(to + i * step, from, present);
            }
        }
    }

    /// After begin(), with the same stage.
    __device__ void end(std::int32_t stage) {
        if constexpr (cached_are_converted || rows_are_converted) {
#pragma unroll
            for (std::int32_t i = 0; i < pieces; ++i) {
                uint4* const to = reinterpret_cast<uint4*>(place_ + stage * shape::stage_bytes + i * step);
                if constexpr (cached_are_converted) {
                    if ((held_cached_ >> i & 1u) != 0) {
                        *to = cached_piece::convert(raw_[i]);
                    }
                }
                if constexpr (rows_are_converted) {
                    if ((held_rows_ >> i & 1u) != 0) {
                        *to = rows_piece::convert(raw_[i]);
                    }
                }
            }
        }
    }

    /// Whether there is anything suspicious in what this thread put into a stage, and waited for.
    [[nodiscard]] __device__ bool is_suspicious(std::int32_t stage) const {
        suspicious_elements<Q> seen;
        if (part_ < row_parts) {
#pragma unroll
            for (std::int32_t i = 0; i < pieces; ++i) {
                seen.look_at(*reinterpret_cast<const uint4*>(place_ + stage * shape::stage_bytes + i * step));
            }
        }
        return seen.found();
    }

  private:
    static constexpr std::int32_t step = rows_at_once * shape::pitch;

    const cuda_score_task<Q, T, Cache>& task_;
    std::int32_t part_; ///< of a slice of a row, 16 bytes each
    std::int32_t row_;  ///< the first of this thread's rows
    std::uint8_t* place_;
    std::uint32_t held_cached_ = 0; ///< a bit for each piece in raw_
    std::uint32_t held_rows_ = 0;
    std::uint32_t raw_[pieces][words > 0 ? words : 1];
};

/// One thread block's part of the scores.
///
/// Scores of 16-bit elements are sums of exact products. Floats are split into a high and a low part of 11
/// bits each, and of the four products of parts that of the low ones is left out: an error of at most 2^-21
/// of the sum of |q_i k_i|, about 2^-24 on average. Sums of 8 products each are added in fp32, rounded to
/// nearest, as tensor cores round their own sums towards zero.
template <class Q, class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
class UNIPREFILL_HIDDEN portable_scorer {
    using task_type = cuda_score_task<Q, T, Cache>;
    using shape = portable_shape<Q, D>;
    using shared_type = portable_shared<shape::stages, shape::warps>;
    using finisher = score_finisher<task_type, shape::tile_keys, G, Softcap>;
    static constexpr std::int32_t tile_keys = shape::tile_keys;
    static constexpr std::int32_t slot_keys = G < tile_keys ? G : tile_keys;
    static constexpr std::int32_t steps = shape::row_bytes / 32; ///< matrix instructions along a row
    static constexpr std::int32_t slice_steps = shape::slice_bytes / 32;
    static constexpr bool cached_are_float8 = std::is_same_v<typename Cache::element, float8_e4m3>;
    static constexpr bool rows_are_float8 = std::is_same_v<T, float8_e4m3>;
    static_assert(std::is_same_v<T, Q> || (rows_are_float8 && sizeof(Q) == 2),
                  "keys have the queries' element type, or are FP8 where queries have 16 bits");

  public:
    __device__ portable_scorer(const task_type& task, shared_type& shared, std::uint8_t* stages)
        : task_(task)
        , shared_(shared)
        , loader_(task, stages)
        , thread_(static_cast<std::int32_t>(threadIdx.x))
        , lane_(thread_ % 32)
        , warp_(thread_ / 32)
        , squares_(
              shared_address(stages) +
              static_cast<std::uint32_t>((lane_ / 16 * 8 + lane_ % 8) * shape::pitch + lane_ / 8 % 2 * 16)) {}

    __device__ void run() {
        cuda_share share(task_.buffers, task_.tiling, task_.batch.num_segments, blockIdx.x, gridDim.x);
        cuda_run now;
        while (share.next(now)) {
            __syncthreads(); // everyone is done with the run before
            copy_segment(shared_.segment, task_.buffers.segments[now.segment], thread_);
            __syncthreads();
            score(now);
        }
    }

  private:
    __device__ void score(const cuda_run& now) {
        const cuda_segment& what = shared_.segment;
#pragma unroll
        for (std::int32_t ahead = 0; ahead < shape::stages - 1; ++ahead) {
            fetch(now, now.tile_begin + ahead / shape::slices, ahead % shape::slices, ahead);
            loader_.end(ahead);
        }
        const std::int32_t first_row = warp_ * 16 * shape::row_tiles;
        const bool active = now.first_row + first_row < what.lanes;
        const bool suspicious_queries = __any_sync(0xffffffffu, active && load_queries(now, first_row));
        const float key_scale = scale_of_keys(now);
        const score_run run = finisher::share(task_, what, now);
        const finisher finish(task_, what, run);
        std::int32_t stage = 0;
#pragma unroll 1
        for (std::int32_t tile = now.tile_begin; tile < now.tile_end; ++tile) {
            const cuda_tile at = cuda_tile::at(what, tile, tile_keys, slot_keys);
            tile_notes& notes = shared_.notes[tile & 1];
            typename finisher::scores scores[shape::row_tiles] = {};
            bool suspicious = suspicious_queries;
#pragma unroll
            for (std::int32_t slice = 0; slice < shape::slices; ++slice) {
                wait_for_copies<shape::stages - 2>();
                const bool any = __any_sync(0xffffffffu, loader_.is_suspicious(stage));
                if (lane_ == 0) {
                    shared_.suspicious[stage][warp_] = any ? 1 : 0;
                }
                if (slice == 0) {
                    note(what, at, notes);
                }
                __syncthreads();
                // Into the stage that everyone has just left.
                const std::int32_t next_stage = stage == 0 ? shape::stages - 1 : stage - 1;
                constexpr std::int32_t lead = shape::stages - 1;
                fetch(now, tile + (slice + lead) / shape::slices, (slice + lead) % shape::slices, next_stage);
                suspicious =
                    suspicious || *reinterpret_cast<const std::uint64_t*>(shared_.suspicious[stage]) != 0;
                if (active) {
                    multiply_slice(scores, slice, stage);
                }
                loader_.end(next_stage);
                stage = stage == shape::stages - 1 ? 0 : stage + 1;
            }
            if (active) {
                const float factor = apply_scale(scores, what, at, key_scale);
                const tile_notes* cuts = notes.has_cuts != 0 ? &notes : nullptr;
                const typename finisher::place place = finish.place_of(tile, suspicious, cuts);
                const float factors[2] = {factor, factor};
#pragma unroll
                for (std::int32_t i = 0; i < shape::row_tiles; ++i) {
                    finish.finish(scores[i], place, first_row + 16 * i, factors);
                }
            }
        }
        wait_for_copies<0>();
    }

    __device__ void fetch(const cuda_run& now, std::int32_t tile, std::int32_t slice, std::int32_t stage) {
        cuda_tile at{};
        if (tile < now.tile_end) {
            at = cuda_tile::at(shared_.segment, tile, tile_keys, slot_keys);
        }
        loader_.begin(shared_.segment, at, now.kv_head, slice, stage);
        close_copy_group();
    }

    /// This warp's query rows, in the layout of multiply_squares(). @return whether a lane saw suspicious
    /// ones
    [[nodiscard]] __device__ bool load_queries(const cuda_run& now, std::int32_t first_row) {
        const cuda_segment& what = shared_.segment;
        suspicious_elements<Q> suspicious;
#pragma unroll
        for (std::int32_t upper = 0; upper < 2 * shape::row_tiles; ++upper) {
            const std::int32_t row = now.first_row + first_row + 8 * upper + lane_ / 4;
            const bool present = row < what.query_rows;
            const std::uint8_t* from = nullptr;
            if (present) {
                const std::int32_t head = row / what.num_observations;
                const std::int32_t observed =
                    observation_row(task_.buffers, what, now.segment, task_.bounds.num_observations,
                                    row - head * what.num_observations);
                from = reinterpret_cast<const std::uint8_t*>(task_.queries.at(
                           what.first_row + observed, now.kv_head * task_.bounds.group_heads() + head)) +
                       lane_ % 4 * 4;
            }
#pragma unroll
            for (std::int32_t step = 0; step < steps; ++step) {
#pragma unroll
                for (std::int32_t i = 0; i < 2; ++i) {
                    const std::uint32_t word =
                        present ? *reinterpret_cast<const std::uint32_t*>(from + step * 32 + i * 16) : 0u;
                    suspicious.look_at(word);
                    queries_[upper / 2][step][upper % 2 + 2 * i] = word;
                }
            }
        }
        return suspicious.found();
    }

    __device__ void multiply_slice(typename finisher::scores (&scores)[shape::row_tiles], std::int32_t slice,
                                   std::int32_t stage) const {
        const std::uint32_t squares = squares_ + static_cast<std::uint32_t>(stage * shape::stage_bytes);
#pragma unroll
        for (std::int32_t step = 0; step < slice_steps; ++step) {
            operand queries[shape::row_tiles];
#pragma unroll
            for (std::int32_t i = 0; i < shape::row_tiles; ++i) {
                queries[i] = operand(queries_[i][slice * slice_steps + step]);
            }
#pragma unroll
            for (std::int32_t j = 0; j < tile_keys / 8; j += 2) {
                std::uint32_t words[4];
                load_squares(words, squares + static_cast<std::uint32_t>(j * 8 * shape::pitch + step * 32));
                const operand keys(words);
#pragma unroll
                for (std::int32_t i = 0; i < shape::row_tiles; ++i) {
                    multiply_and_add(scores[i], 4 * j, queries[i], keys, 0);
                    multiply_and_add(scores[i], 4 * j + 4, queries[i], keys, 2);
                }
            }
        }
    }

    /// Words of an operand of the matrix instruction: as they are, or floats split in two.
    struct operand {
        static constexpr bool is_split = std::is_same_v<Q, float>;
        std::uint32_t high[4];
        std::uint32_t low[is_split ? 4 : 1];

        operand() = default;
        explicit __device__ operand(const std::uint32_t (&words)[4]) {
#pragma unroll
            for (std::int32_t i = 0; i < 4; ++i) {
                if constexpr (is_split) {
                    const split_word parts = split_word::of(words[i]);
                    high[i] = parts.high;
                    low[i] = parts.low;
                } else {
                    high[i] = words[i];
                }
            }
        }
    };
    /// @param at the first of four scores, @param key the first of two words
    static __device__ void multiply_and_add(typename finisher::scores& scores, std::int32_t at,
                                            const operand& queries, const operand& keys, std::int32_t key) {
        constexpr bool is_split = operand::is_split;
        float sums[4];
#pragma unroll
        for (std::int32_t i = 0; i < 4; ++i) {
            sums[i] = is_split ? 0.0f : scores[at + i];
        }
        if constexpr (is_split) {
            multiply_squares<Q>(sums, queries.low, keys.high[key], keys.high[key + 1]);
            multiply_squares<Q>(sums, queries.high, keys.low[key], keys.low[key + 1]);
        }
        multiply_squares<Q>(sums, queries.high, keys.high[key], keys.high[key + 1]);
#pragma unroll
        for (std::int32_t i = 0; i < 4; ++i) {
            scores[at + i] = is_split ? add(scores[at + i], sums[i]) : sums[i];
        }
    }

    /// What FP8 keys of a KV head are multiplied by. Raises the segment's flag where that isn't finite.
    [[nodiscard]] __device__ float scale_of_keys(const cuda_run& now) const {
        if constexpr (cached_are_float8 || rows_are_float8) {
            if (task_.key_scales != nullptr && (rows_are_float8 || shared_.segment.cached > 0)) {
                const float scale = task_.key_scales[now.kv_head];
                if (is_non_finite(scale)) {
                    task_.buffers.faulty[now.segment] = 1;
                }
                return scale;
            }
        }
        return 1.0f;
    }
    /// @return the factor that all scores of the tile have in common.
    [[nodiscard]] __device__ float apply_scale(typename finisher::scores (&scores)[shape::row_tiles],
                                               const cuda_segment& what, const cuda_tile& at,
                                               float scale) const {
        if constexpr (cached_are_float8 != rows_are_float8) {
            const std::int64_t cached = what.cached - at.first_key;
            if (cached > 0 && cached < at.num_keys) {
#pragma unroll
                for (std::int32_t i = 0; i < tile_keys / 2; ++i) {
                    const std::int32_t key = 8 * (i / 4) + 2 * (lane_ % 4) + (i & 1);
                    const float own = (key < cached) == cached_are_float8 ? scale : 1.0f;
#pragma unroll
                    for (std::int32_t tile = 0; tile < shape::row_tiles; ++tile) {
                        scores[tile][i] = multiply(scores[tile][i], own);
                    }
                }
                return task_.query_factor;
            }
            return (cached > 0) == cached_are_float8 ? multiply(scale, task_.query_factor)
                                                     : task_.query_factor;
        } else {
            return cached_are_float8 ? multiply(scale, task_.query_factor) : task_.query_factor;
        }
    }

    __device__ void note(const cuda_segment& what, const cuda_tile& at, tile_notes& notes) const {
        if (what.num_cuts > 0 && at.own) {
            note_cuts<tile_keys, G, tile_keys>(task_.batch, task_.buffers, what, at, thread_, notes);
        } else if (thread_ == 0) {
            notes.has_cuts = 0;
        }
    }

    const task_type& task_;
    shared_type& shared_;
    portable_loader<Q, T, Cache, D> loader_;
    std::int32_t thread_;
    std::int32_t lane_;
    std::int32_t warp_;
    std::uint32_t squares_; ///< of this lane in stage 0, for load_squares()
    std::uint32_t queries_[shape::row_tiles][steps][4];
};

template <class Q, class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(portable_shape<Q, D>::threads, 1)
    portable_score_kernel(const __grid_constant__ cuda_score_task<Q, T, Cache> task) {
    using shape = portable_shape<Q, D>;
    extern __shared__ uint4 portable_stages[];
    __shared__ portable_shared<shape::stages, shape::warps> shared;
    let_next_kernel_start();
    wait_for_previous_kernel();
    portable_scorer<Q, T, Cache, D, G, Softcap>(task, shared,
                                                reinterpret_cast<std::uint8_t*>(portable_stages))
        .run();
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
