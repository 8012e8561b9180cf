// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Lists by query block on every device from compute capability 8.0 on. A thread block takes a group of query
/// blocks at a time: 128 sampled rows, which its four warps keep in registers, meet all keys that they see,
/// tile after tile, and leave one number for each block of keys. From these it makes masses, and picks each
/// list's blocks.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_matrix.cuh>
#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/select/detail/cuda_block_team.cuh>
#include <uniprefill/select/detail/query_list_decision.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Sizes that follow from the head dimension and G.
template <std::int32_t D, std::int32_t G>
struct query_list_shape {
    static constexpr std::int32_t row_tiles = 2; ///< of 16 rows, of each warp
    static constexpr std::int32_t warps = 4;
    static constexpr std::int32_t threads = 32 * warps;
    static constexpr std::int32_t rows = 16 * row_tiles * warps; ///< of a group
    static constexpr std::int32_t tile_keys = D <= 128 ? 64 : 32;
    static constexpr std::int32_t slot_keys = G < tile_keys ? G : tile_keys;
    static constexpr std::int32_t slots = tile_keys / slot_keys; ///< of a tile, each inside one block
    static constexpr std::int32_t block_slots = G / slot_keys;
    /// Rows are an odd number of 16 bytes apart, so that 8 of them lie in different banks.
    static constexpr std::int32_t pitch = 2 * D + 16;
    static constexpr std::int32_t stages = 3;
    static constexpr std::int32_t stage_bytes = tile_keys * pitch;
    static constexpr std::int32_t dynamic_bytes = stages * stage_bytes;
    static constexpr std::int32_t ctas_per_multiprocessor = 2;

    static_assert(rows == threads, "a thread for each row");
    static_assert(pitch / 16 % 2 == 1 && D % 16 == 0 && G % slot_keys == 0 && tile_keys % slot_keys == 0);
};

/// What the plan kernel leaves for the others.
struct query_list_plan {
    std::int32_t* first_item = nullptr; // [num_segments + 1] items of the segments before
    std::int32_t* next_item = nullptr;  // [1] that no thread block has taken yet
};

/// The pieces of a workspace.
struct cuda_query_buffers {
    query_list_marks marks;
    query_list_plan plan;
    float* partials = nullptr;      // [ctas][rows of a group][slots] log2 of a row's weight of a slot
    std::int64_t* masses = nullptr; // [ctas][blocks]
    std::int64_t slots = 0;
    std::int64_t blocks = 0;
    std::int32_t ctas = 0;

    template <class Shape>
    [[nodiscard]] static UNIPREFILL_HOST_API cuda_query_buffers carve(workspace& memory, const limits& bounds,
                                                                      std::int32_t query_rows,
                                                                      std::int32_t group_blocks,
                                                                      const cuda_device& device) noexcept {
        cuda_query_buffers made;
        const std::int64_t places = block_lists::most_query_blocks(bounds, query_rows);
        const std::int64_t items = (places / group_blocks + bounds.max_segments) * bounds.num_kv_heads;
        const std::int32_t most = device.ctas(Shape::ctas_per_multiprocessor);
        made.ctas = items < most ? static_cast<std::int32_t>(items) : most;
        made.slots = std::int64_t{num_blocks(bounds.max_rows, Shape::tile_keys)} * Shape::slots;
        made.blocks = num_blocks(bounds.max_rows, bounds.block_rows);
        made.marks = query_list_marks::carve(memory, bounds, query_rows, bounds.num_heads);
        made.plan.first_item = memory.take<std::int32_t>(std::int64_t{bounds.max_segments} + 1);
        made.plan.next_item = memory.take<std::int32_t>(1);
        made.partials = memory.take<float>(made.ctas * Shape::rows * made.slots);
        made.masses = memory.take<std::int64_t>(made.ctas * made.blocks);
        return made;
    }
};

template <class T, class Cache>
struct query_list_task {
    query_list_step step;
    selection_rule rule;
    cuda_query_buffers buffers;
    head_rows<const T> queries;
    head_rows<const T> keys;
    Cache cached;
    float factor = 0;  ///< scores to log2 units; with a soft-cap, scores to its argument
    float softcap = 0; ///< the soft-cap in log2 units; 0: none
    const float* sink_logits = nullptr;
    float one = 0; ///< the mass of a share of 1

    UNIPREFILL_HOST_API void set_scores(const attention_params& params, std::int32_t head_dim) noexcept {
        const float scale = params.scale > 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(head_dim));
        factor = params.softcap > 0 ? scale / params.softcap : scale * log2_of_euler;
        softcap = params.softcap * log2_of_euler;
        sink_logits = params.sink_logits;
    }
};

inline constexpr std::int32_t query_list_threads = 1024; ///< of kernels that count

/// Counts items, and empties all lists. One thread block. O(segments + lists).
template <class = void>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(query_list_threads)
    plan_query_lists_kernel(const __grid_constant__ query_list_step step, const query_list_marks marks,
                            const query_list_plan plan) {
    __shared__ std::uint32_t of_warps[32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    for (std::int64_t list = thread; list < step.num_lists(); list += query_list_threads) {
        marks.lengths[list] = 0;
    }
    if (thread == 0) {
        *plan.next_item = 0;
        plan.first_item[0] = 0;
    }
    std::uint32_t before = 0;
    for (std::int32_t begin = 0; begin < step.batch.num_segments; begin += query_list_threads) {
        const std::int32_t segment = begin + thread;
        const bool exists = segment < step.batch.num_segments;
        const std::int32_t items = exists ? groups_of(step, segment) * step.num_kv_heads : 0;
        std::uint32_t all = 0;
        const std::uint32_t sum = block_prefix<query_list_threads>(static_cast<std::uint32_t>(items),
                                                                   threadIdx.x / 32, of_warps, all);
        if (exists) {
            plan.first_item[segment + 1] = static_cast<std::int32_t>(before + sum);
        }
        before += all;
        __syncthreads();
    }
}

/// What the threads of a thread block tell each other of a group.
template <std::int32_t Rows, std::int32_t Warps>
struct query_list_shared {
    block_team_memory<32 * Warps> team;
    query_block blocks[Rows]; ///< as many as the group has
    seen_keys seen[Rows];
    seen_keys least[Warps]; ///< over the rows of each warp
    seen_keys most[Warps];
    float log_sum[Rows]; ///< log2 of a row's denominator
    std::uint8_t faulty[Rows];
    std::int32_t taken_item;
};

/// A thread of a thread block.
template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
class UNIPREFILL_HIDDEN query_list_cta {
    using shape = query_list_shape<D, G>;
    using shared_type = query_list_shared<shape::rows, shape::warps>;
    using team_type = block_team<shape::threads, false>;
    static constexpr std::int32_t tile_keys = shape::tile_keys;
    static constexpr std::int32_t row_tiles = shape::row_tiles;
    static constexpr std::int32_t own_rows = 2 * row_tiles; ///< that a thread has a part of
    static constexpr std::int32_t row_parts = D / 8;        ///< 16 bytes each
    static constexpr std::int32_t query_steps = D / 16;
    static constexpr float unseen = -INFINITY;
    static_assert(team_type::held_blocks == 1, "neighbouring lanes mark neighbouring blocks");

  public:
    __device__ query_list_cta(const query_list_task<T, Cache>& task, shared_type& shared,
                              const std::uint8_t* stages)
        : task_(task)
        , step_(task.step)
        , shared_(shared)
        , stages_(shared_address(stages))
        , thread_(static_cast<std::int32_t>(threadIdx.x))
        , lane_(thread_ % 32)
        , warp_row_(thread_ / 32 * 16 * row_tiles)
        , key_squares_(
              static_cast<std::uint32_t>((lane_ / 16 * 8 + lane_ % 8) * shape::pitch + lane_ / 8 % 2 * 16))
        , partials_(task.buffers.partials + blockIdx.x * (shape::rows * task.buffers.slots))
        , masses_(task.buffers.masses + blockIdx.x * task.buffers.blocks) {}

    __device__ void run(team_type& team) {
        const query_list_plan& plan = task_.buffers.plan;
        const std::int32_t items = plan.first_item[step_.batch.num_segments];
        for (;;) {
            __syncthreads(); // everyone is done with the group before
            if (thread_ == 0) {
                shared_.taken_item = atomicAdd(plan.next_item, 1);
            }
            __syncthreads();
            const std::int32_t index = shared_.taken_item;
            if (index >= items) {
                return;
            }
            const std::int32_t segment =
                first_row_at(plan.first_item, 1, step_.batch.num_segments + 1, index + 1) - 1;
            take(segment, index - plan.first_item[segment]);
            if (note_rows()) {
                score();
            }
            __syncthreads();
#pragma unroll 1
            for (std::int32_t list = 0; list < count_ * step_.lists; ++list) {
                decide(team, list / step_.lists, list % step_.lists);
            }
        }
    }

  private:
    using scores = float[row_tiles][tile_keys / 2];

    /// The group that is item @p index of a segment: heads one after the other, the last rows first, as they
    /// see most.
    __device__ void take(std::int32_t segment, std::int32_t index) {
        of_ = query_segment_of(step_, segment);
        const std::int32_t blocks = num_blocks(of_.queries.end - of_.queries.begin, step_.query_rows);
        const std::int32_t groups = num_blocks(blocks, step_.group_blocks);
        kv_head_ = index / groups;
        const std::int32_t first = (groups - 1 - index % groups) * step_.group_blocks;
        count_ = min(blocks - first, step_.group_blocks);
        if (thread_ < count_) {
            shared_.blocks[thread_] = query_block_of(step_, of_, first + thread_);
        }
        __syncthreads();
    }

    /// Where a row of the group is: of which sampled row of which query block, and of which query head.
    struct row_place {
        std::int32_t block;
        std::int32_t sample;
        std::int32_t head; ///< of the KV head's
    };
    [[nodiscard]] __device__ row_place place_of(std::int32_t row) const {
        const std::int32_t block = row / step_.rows_of_block();
        const std::int32_t rest = row - block * step_.rows_of_block();
        return {block, rest / step_.heads, rest % step_.heads};
    }
    [[nodiscard]] __device__ bool is_row(const row_place& place) const {
        return place.block < count_ && shared_.blocks[place.block].has_choice &&
               place.sample < shared_.blocks[place.block].samples;
    }

    /// Notes what each row sees, and bounds over all of them. @return whether there is any
    [[nodiscard]] __device__ bool note_rows() {
        constexpr std::uint32_t everyone = 0xffffffffu;
        seen_keys mine{0, 0};
        seen_keys least{INT32_MAX, INT32_MAX};
        bool faulty = false;
        const row_place place = place_of(thread_);
        if (is_row(place)) {
            const std::int32_t row =
                packed_row_of(step_, of_, sampled_row(step_, shared_.blocks[place.block], place.sample));
            faulty = row < 0;
            if (!faulty) {
                least = mine = seen_by(step_, of_, row);
            }
        }
        shared_.seen[thread_] = mine;
        shared_.faulty[thread_] = faulty ? 1 : 0;
        least = {__reduce_min_sync(everyone, least.first), __reduce_min_sync(everyone, least.end)};
        const seen_keys most{__reduce_max_sync(everyone, mine.first), __reduce_max_sync(everyone, mine.end)};
        if (lane_ == 0) {
            shared_.least[thread_ / 32] = least;
            shared_.most[thread_ / 32] = most;
        }
        __syncthreads();
        least_ = shared_.least[0];
        most_ = shared_.most[0];
#pragma unroll
        for (std::int32_t i = 1; i < shape::warps; ++i) {
            least_ = {min(least_.first, shared_.least[i].first), min(least_.end, shared_.least[i].end)};
            most_ = {max(most_.first, shared_.most[i].first), max(most_.end, shared_.most[i].end)};
        }
        return most_.end > 0;
    }

    /// Keys that are multiplied together: those before the segment are cut from the request's first on, those
    /// of the segment from its first.
    struct key_tile {
        std::int32_t first;
        std::int32_t end;
    };
    [[nodiscard]] __device__ key_tile tile_at(std::int32_t tile) const {
        const bool own = tile >= context_tiles_;
        const std::int32_t first = own ? of_.context + (tile - context_tiles_) * tile_keys : tile * tile_keys;
        const std::int32_t limit = own ? of_.context + of_.rows : of_.context;
        return {first, min(first + tile_keys, limit)};
    }

    __device__ void score() {
        context_tiles_ = num_blocks(of_.context, tile_keys);
        const std::int32_t before = least_.first - of_.context;
        const std::int32_t begin =
            before < 0 ? least_.first / tile_keys : context_tiles_ + before / tile_keys;
        const std::int32_t end = context_tiles_ + num_blocks(most_.end - of_.context, tile_keys);
        first_slot_ = max(begin - context_tiles_, 0) * shape::slots;
        end_slot_ = (end - context_tiles_) * shape::slots;
        bring(begin, end, 0);
        bring(begin + 1, end, 1);
        load_queries();
#pragma unroll
        for (std::int32_t i = 0; i < own_rows; ++i) {
            reference_[i] = lowest;
            total_[i] = 0;
            worst_[i] = 0;
        }
        std::int32_t stage = 0;
#pragma unroll 1
        for (std::int32_t tile = begin; tile < end; ++tile) {
            wait_for_copies<1>();
            __syncthreads();
            bring(tile + 2, end, stage == 0 ? 2 : stage - 1); // into the stage that everyone has just left
            scores sums;
            multiply_keys(sums, stage);
            const key_tile keys = tile_at(tile);
            const std::int32_t slot = (tile - context_tiles_) * shape::slots;
            if (keys.end - keys.first == tile_keys && keys.first >= most_.first && keys.end <= least_.end) {
                take_in<false>(sums, keys, slot);
            } else {
                take_in<true>(sums, keys, slot);
            }
            stage = stage == shape::stages - 1 ? 0 : stage + 1;
        }
        wait_for_copies<0>();
        finish_rows();
    }

    /// Starts the copies of a tile of keys; zeros behind its end.
    __device__ void bring(std::int32_t tile, std::int32_t tiles_end, std::int32_t stage) {
        if (tile < tiles_end) {
            constexpr std::int32_t parts = tile_keys * row_parts;
            const std::uint32_t to = stages_ + static_cast<std::uint32_t>(stage * shape::stage_bytes);
            const key_tile keys = tile_at(tile);
#pragma unroll 2
            for (std::int32_t at = thread_; at < parts; at += shape::threads) {
                const std::int32_t row = at / row_parts;
                const std::int32_t part = at % row_parts;
                const std::int32_t key = keys.first + row;
                const bool present = key < keys.end;
                const T* from = task_.keys.data;
                if (present) {
                    from = key < of_.cached ? task_.cached.row(of_.request, key, kv_head_)
                                            : task_.keys.at(of_.request_begin + key - of_.cached, kv_head_);
                    from += part * 8;
                }
                copy_async_16(to + static_cast<std::uint32_t>(row * shape::pitch + part * 16), from, present);
            }
        }
        close_copy_group();
    }

    /// This warp's rows, in the layout of multiply_squares(); zeros where there are none.
    __device__ void load_queries() {
#pragma unroll
        for (std::int32_t i = 0; i < own_rows; ++i) {
            const std::int32_t row = warp_row_ + 8 * i + lane_ / 4;
            const row_place place = place_of(row);
            const bool present = is_row(place);
            const std::int32_t kept =
                present ? sampled_row(step_, shared_.blocks[place.block], place.sample) : 0;
            const T* const from = task_.queries.at(kept, kv_head_ * step_.heads + place.head) + lane_ % 4 * 2;
            load_row(queries_[i / 2], i % 2, from, present);
        }
    }

    /// sums = queries * keys^T.
    __device__ void multiply_keys(scores& sums, std::int32_t stage) const {
        multiply_rows_by_keys<T, shape::pitch>(
            sums, queries_, stages_ + key_squares_ + static_cast<std::uint32_t>(stage * shape::stage_bytes));
    }

    /// Leaves one number for each row and slot of a tile, and adds it to the row's denominator. Each follows
    /// from the row and the slot alone.
    /// @tparam Masked some row doesn't see some key, or there is none
    /// @param slot of the segment's, negative before it
    template <bool Masked>
    __device__ void take_in(scores& sums, const key_tile& keys, std::int32_t slot) {
#pragma unroll
        for (std::int32_t i = 0; i < own_rows; ++i) {
            const std::int32_t row = warp_row_ + 8 * i + lane_ / 4;
            std::int32_t first = 0; // of the keys that this thread's numbers of the row are of
            std::uint32_t count = 0;
            if (Masked) {
                const seen_keys seen = shared_.seen[row];
                const std::int32_t from = max(seen.first, keys.first);
                first = from - (keys.first + 2 * (lane_ % 4));
                count = static_cast<std::uint32_t>(max(min(seen.end, keys.end) - from, 0));
            }
#pragma unroll
            for (std::int32_t s = 0; s < shape::slots; ++s) {
                float top = unseen;
#pragma unroll
                for (std::int32_t k = 0; k < shape::slot_keys; k += 8) {
#pragma unroll
                    for (std::int32_t j = 0; j < 2; ++j) {
                        const std::int32_t key = s * shape::slot_keys + k;
                        float& score = sums[i / 2][key / 2 + i % 2 * 2 + j];
                        const bool sees = !Masked || static_cast<std::uint32_t>(key + j - first) < count;
                        worst_[i] = larger(worst_[i], sees ? size_of(score) : 0.0f);
                        if constexpr (Softcap) {
                            score = multiply(task_.softcap, tanh_of(multiply(score, task_.factor)));
                        }
                        score = sees ? score : unseen;
                        top = larger(top, score);
                    }
                }
                top = larger(top, __shfl_xor_sync(0xffffffffu, top, 1));
                top = larger(top, __shfl_xor_sync(0xffffffffu, top, 2));
                const float factor = Softcap ? 1.0f : task_.factor;
                const float reference = top == unseen ? 0.0f : multiply(top, factor);
                float sum = 0;
#pragma unroll
                for (std::int32_t k = 0; k < shape::slot_keys; k += 8) {
#pragma unroll
                    for (std::int32_t j = 0; j < 2; ++j) {
                        const std::int32_t key = s * shape::slot_keys + k;
                        const float score = sums[i / 2][key / 2 + i % 2 * 2 + j];
                        sum = add(sum, exp2_of(multiply_add(score, factor, -reference)));
                    }
                }
                sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
                sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
                add_to_total(i, top == unseen ? lowest : reference, sum);
                if (slot >= 0 && lane_ % 4 == 0) {
                    partials_[row * task_.buffers.slots + slot + s] = add(reference, log2_of(sum));
                }
            }
        }
    }
    __device__ void add_to_total(std::int32_t i, float reference, float sum) {
        const float next = larger(reference_[i], reference);
        total_[i] = add(multiply(total_[i], exp2_of(add(reference_[i], -next))),
                        multiply(sum, exp2_of(add(reference, -next))));
        reference_[i] = next;
    }

    /// Denominators, and which rows can't be trusted.
    __device__ void finish_rows() {
#pragma unroll
        for (std::int32_t i = 0; i < own_rows; ++i) {
            const std::int32_t row = warp_row_ + 8 * i + lane_ / 4;
            if (task_.sink_logits != nullptr) {
                const std::int32_t head = kv_head_ * step_.heads + place_of(row).head;
                add_to_total(i, multiply(task_.sink_logits[head], log2_of_euler), 1.0f);
            }
            float worst = larger(worst_[i], __shfl_xor_sync(0xffffffffu, worst_[i], 1));
            worst = larger(worst, __shfl_xor_sync(0xffffffffu, worst, 2));
            const bool good = !is_non_finite(worst) && !is_non_finite(total_[i]) && total_[i] > 0;
            if (lane_ % 4 == 0) {
                shared_.log_sum[row] = add(reference_[i], log2_of(total_[i]));
                if (!good) {
                    shared_.faulty[row] = 1;
                }
            }
        }
    }

    /// Picks the blocks of list @p list of query block @p index of the group.
    __device__ void decide(team_type& team, std::int32_t index, std::int32_t list) {
        const query_block& block = shared_.blocks[index];
        const query_list_marks& marks = task_.buffers.marks;
        const std::int64_t number = block.place * step_.list_heads() + kv_head_ * step_.lists + list;
        std::int32_t length = query_list_marks::no_choice;
        if (block.has_choice) {
            const std::int32_t heads = step_.heads / step_.lists;
            const row_place place = place_of(thread_);
            const bool is_own = is_row(place) && place.block == index && place.head / heads == list;
            if (__syncthreads_or(is_own && shared_.faulty[thread_] != 0 ? 1 : 0) != 0) {
                length = query_list_marks::untrusted;
            } else {
                weigh(block, index, list * heads, heads);
                std::uint32_t* const bits = marks.bits_of(number);
                length =
                    pick_query_list(team,
                                    weighed_blocks{masses_, block.blocks, block.candidate_begin,
                                                   block.candidate_end, task_.rule.ties},
                                    task_.rule, G, block.sink_blocks, [&](std::int32_t b, bool is_listed) {
                                        const std::uint32_t word = __ballot_sync(0xffffffffu, is_listed);
                                        if (lane_ == 0 && b < block.blocks) {
                                            bits[b / 32] = word;
                                        }
                                    });
                // Words are read 32 at a time.
                const std::int32_t words = num_blocks(block.blocks, 32);
                const std::int64_t word = std::int64_t{words} + thread_;
                if (word < marks.words && word < num_blocks(words, 32) * 32) {
                    bits[word] = 0;
                }
            }
        }
        if (thread_ == 0) {
            marks.lengths[number] = length;
        }
    }

    /// Masses of a list's candidates, summed over its rows.
    __device__ void weigh(const query_block& block, std::int32_t index, std::int32_t first_head,
                          std::int32_t heads) {
        const std::int64_t slots = task_.buffers.slots;
        const std::int32_t first_row = index * step_.rows_of_block() + first_head;
#pragma unroll 1
        for (std::int32_t b = thread_; b < block.blocks; b += shape::threads) {
            std::int64_t mass = 0;
            const bool counts = b >= block.candidate_begin && b < block.candidate_end;
            const std::int32_t from = max(b * shape::block_slots, first_slot_);
            const std::int32_t to = counts ? min((b + 1) * shape::block_slots, end_slot_) : 0;
            for (std::int32_t slot = from; slot < to; ++slot) {
                for (std::int32_t sample = 0; sample < block.samples; ++sample) {
                    const std::int32_t row = first_row + sample * step_.heads;
#pragma unroll 4
                    for (std::int32_t head = 0; head < heads; ++head) {
                        const float weight = partials_[(row + head) * slots + slot];
                        const float share = exp2_of(add(weight, -shared_.log_sum[row + head]));
                        mass += truncate(multiply(share, task_.one));
                    }
                }
            }
            masses_[b] = mass;
        }
    }

    /// Below every exponent that isn't told by is_non_finite(), nearly; no infinity, so that it has a
    /// difference from itself.
    static constexpr float lowest = -1e38f;

    const query_list_task<T, Cache>& task_;
    const query_list_step& step_;
    shared_type& shared_;
    std::uint32_t stages_;
    std::int32_t thread_;
    std::int32_t lane_;
    std::int32_t warp_row_;     ///< the first of this warp's rows
    std::uint32_t key_squares_; ///< of this lane in a stage, for load_squares()
    float* partials_;           // [rows][slots]
    std::int64_t* masses_;      // [blocks]
    query_segment of_{};
    std::int32_t kv_head_ = 0;
    std::int32_t count_ = 0; ///< query blocks of the group
    seen_keys least_{};
    seen_keys most_{};
    std::int32_t context_tiles_ = 0;
    std::int32_t first_slot_ = 0; ///< of the segment's that was scored
    std::int32_t end_slot_ = 0;
    float reference_[own_rows]; ///< of a row's denominator, an exponent of 2
    float total_[own_rows];     ///< the denominator, relative to it
    float worst_[own_rows];     ///< the largest magnitude among products that a row sees
    std::uint32_t queries_[row_tiles][query_steps][4];
};

template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(query_list_shape<D, G>::threads,
                                                    query_list_shape<D, G>::ctas_per_multiprocessor)
    mark_query_lists_kernel(const __grid_constant__ query_list_task<T, Cache> task) {
    using shape = query_list_shape<D, G>;
    using team_type = block_team<shape::threads, false>;
    extern __shared__ uint4 query_list_stages[];
    auto& shared = shared_memory<query_list_shared<shape::rows, shape::warps>>();
    team_type::clear(shared.team);
    let_next_kernel_start();
    team_type team(shared.team);
    team.sync();
    wait_for_previous_kernel();
    query_list_cta<T, Cache, D, G, Softcap>(task, shared,
                                            reinterpret_cast<const std::uint8_t*>(query_list_stages))
        .run(team);
}

/// Where each list goes. One thread block. O(lists).
template <class = void>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(query_list_threads)
    place_query_lists_kernel(const query_list_marks marks, std::int64_t lists, std::int64_t* offsets,
                             block_list_report* report) {
    __shared__ std::uint32_t of_warps[32];
    let_next_kernel_start();
    wait_for_previous_kernel();
    block_list_report told;
    for (std::int64_t begin = 0; begin < lists; begin += query_list_threads) {
        const std::int64_t list = begin + threadIdx.x;
        const std::int32_t length = list < lists ? marks.lengths[list] : 0;
        const std::uint32_t own = length > 0 ? static_cast<std::uint32_t>(length) : 0;
        std::uint32_t all = 0;
        const std::uint32_t sum = block_prefix<query_list_threads>(own, threadIdx.x / 32, of_warps, all);
        const std::int64_t before = told.wanted + sum - own;
        if (list < lists) {
            offsets[list] = marks.offset(length, before);
        }
        told.unfitting += __syncthreads_count(marks.is_unfitting(length, before) ? 1 : 0);
        told.untrusted += __syncthreads_count(length == query_list_marks::untrusted ? 1 : 0);
        told.wanted += all;
    }
    if (threadIdx.x == 0) {
        offsets[lists] = marks.offset(0, told.wanted);
        if (report != nullptr) {
            *report = told;
        }
    }
}

inline constexpr std::int32_t query_list_writers = 256; ///< threads of a thread block that writes lists

/// Writes the blocks of the lists that have a place, a warp for each.
template <class = void>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(query_list_writers)
    write_query_lists_kernel(const query_list_marks marks, std::int64_t lists, const std::int64_t* offsets,
                             std::int32_t* blocks) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const auto lane = static_cast<std::int32_t>(threadIdx.x % 32);
    const std::int64_t warps = std::int64_t{gridDim.x} * (query_list_writers / 32);
    for (std::int64_t list = (std::int64_t{blockIdx.x} * query_list_writers + threadIdx.x) / 32; list < lists;
         list += warps) {
        const std::int32_t length = marks.lengths[list];
        const std::int64_t offset = offsets[list];
        if (length <= 0 || offset < 0) {
            continue;
        }
        const std::uint32_t* const bits = marks.bits_of(list);
        std::int32_t written = 0;
        for (std::int64_t base = 0; written < length; base += 32) {
            std::uint32_t word = base + lane < marks.words ? bits[base + lane] : 0;
            const std::int32_t own = __popc(word);
            const std::int32_t sum = warp_prefix(own);
            std::int32_t* to = blocks + offset + written + sum - own;
            const auto first = static_cast<std::int32_t>((base + lane) * 32);
            for (; word != 0; word &= word - 1) {
                *to++ = first + __ffs(static_cast<int>(word)) - 1;
            }
            written += __shfl_sync(0xffffffffu, sum, 31);
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
