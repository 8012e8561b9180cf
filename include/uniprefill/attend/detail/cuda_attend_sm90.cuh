// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention on Hopper. A thread block takes 128 (or 192) packed query rows at a time: two warps prepare
/// the next ones; one warp brings the keys that they read and one their values, by the copy engine where a
/// slot of a tile lies in the step's rows as it is, row by row where it doesn't; groups of four warps
/// multiply 64 rows each and take turns, so that one group's products run under another's exponentials (Shah
/// et al., arXiv 2407.08608).
#pragma once

#include <uniprefill/attend/detail/cuda_attend.cuh>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/detail/cuda_hopper.cuh>
#include <uniprefill/core/detail/cuda_tensor_map.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

inline constexpr std::int32_t attend_sm90_loaders = 128;
inline constexpr std::int32_t attend_sm90_preparers = 64; ///< of them
inline constexpr std::int32_t attend_sm90_max_rows = 192; ///< of an item
inline constexpr std::int32_t attend_sm90_max_stages = 4;
inline constexpr std::int32_t attend_sm90_max_slots = 8;

/// Sizes that follow from the head dimension and G.
template <std::int32_t D, std::int32_t G>
struct attend_sm90_shape {
    static constexpr std::int32_t panels = (D + 63) / 64; ///< 128-byte columns of rows
    static constexpr std::int32_t tile_keys = panels > 2 ? 64 : 128;
    template <bool Means>
    using tile = key_tile<tile_keys, G, Means>;
    /// Groups of four warps that multiply, 64 rows each: as many as registers allow.
    static constexpr std::int32_t groups = D == 64 ? 3 : 2;
    static constexpr std::int32_t rows = 64 * groups; ///< packed query rows of an item
    static constexpr std::int32_t multipliers = 128 * groups;
    static constexpr std::int32_t threads = attend_sm90_loaders + multipliers;
    static constexpr std::int32_t loader_registers = groups == 3 ? 32 : 40;
    static constexpr std::int32_t multiplier_registers = groups == 3 ? 160 : 232;
    static constexpr std::int32_t query_panel = rows * 128;
    static constexpr std::int32_t query_bytes = panels * query_panel;
    static constexpr std::int32_t query_buffers = panels > 3 ? 1 : 2;
    static constexpr std::int32_t key_panel = tile_keys * 128;
    static constexpr std::int32_t stage_bytes = panels * key_panel; ///< of keys; values take as much again
    static constexpr std::int32_t static_bytes = 6144;              ///< for attend_sm90_shared
    static constexpr std::int32_t fitting =
        (227 * 1024 - 1024 - static_bytes - query_buffers * query_bytes) / (2 * stage_bytes);
    static constexpr std::int32_t stages =
        fitting < attend_sm90_max_stages ? fitting : attend_sm90_max_stages;
    static constexpr std::int32_t dynamic_bytes =
        1024 + query_buffers * query_bytes + 2 * stages * stage_bytes;
    static_assert(stages >= 2);
};

template <class T, class Cache, bool Means>
struct attend_sm90_task {
    attend_task<T, Cache> task;
    CUtensorMap keys;
    CUtensorMap values;
};
template <class T, class Cache>
struct attend_sm90_task<T, Cache, true> : attend_sm90_task<T, Cache, false> {
    CUtensorMap mean_keys; ///< of no use where task.mean_keys is null
    CUtensorMap mean_values;
};

/// What multipliers have to know of a tile of keys.
struct attend_tile_notes {
    std::int32_t first[attend_sm90_max_slots];
    std::int32_t end[attend_sm90_max_slots]; ///< of means: the bits of tile_means::skipped
    std::uint32_t unlisted;
    std::int32_t state;
};
inline constexpr std::int32_t attend_no_tile = 0; ///< the item's keys are through
inline constexpr std::int32_t attend_whole = 1;   ///< every row reads every key
inline constexpr std::int32_t attend_masked = 2;
inline constexpr std::int32_t attend_means = 3; ///< of blocks; every row is masked

/// What they have to know of an item.
struct attend_item_notes {
    attend_item item;
    std::int32_t is_end; ///< no item: all are taken
    item_reach bounds;
    row_reach reach[attend_sm90_max_rows];
};

struct attend_sm90_shared {
    alignas(8) std::uint64_t keys_full[attend_sm90_max_stages];
    std::uint64_t keys_empty[attend_sm90_max_stages];
    std::uint64_t values_full[attend_sm90_max_stages];
    std::uint64_t values_empty[attend_sm90_max_stages];
    std::uint64_t items_full[2];   ///< what they are
    std::uint64_t queries_full[2]; ///< and their queries
    std::uint64_t items_empty[2];
    attend_tile_notes tiles[attend_sm90_max_stages + 2]; ///< longer than stages: notes outlive a tile's keys
    attend_item_notes items[2];
    std::int32_t taken_item;
    item_reach bounds[2]; ///< of each preparing warp's rows
};

/// A place in a ring of buffers, and the parity of its turn.
template <std::int32_t Size>
struct ring_place {
    std::int32_t at = 0;
    std::uint32_t parity = 0;
    __device__ UNIPREFILL_HIDDEN void advance() {
        at = at + 1 == Size ? 0 : at + 1;
        parity ^= at == 0 ? 1u : 0u;
    }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

/// The two warps that take items, say what their rows read, and bring their queries, one item ahead.
template <class T, class Cache, std::int32_t D, std::int32_t G>
class UNIPREFILL_HIDDEN attend_sm90_preparer {
    using shape = attend_sm90_shape<D, G>;
    static constexpr std::int32_t row_parts = D / 8; ///< 16 bytes each
    static constexpr std::int32_t threads = attend_sm90_preparers;

  public:
    __device__ attend_sm90_preparer(const attend_task<T, Cache>& task, attend_sm90_shared& shared,
                                    std::uint8_t* memory)
        : task_(task)
        , shared_(shared)
        , queries_(shared_address(memory))
        , thread_(static_cast<std::int32_t>(threadIdx.x) % threads) {}

    __device__ void run() {
        const std::int32_t items = task_.plan.first_item[task_.step.batch.num_segments];
        for (;;) {
            const std::int32_t index = take_item();
            const bool is_end = index >= items;
            const attend_item item = is_end ? attend_item{} : find_item(task_.step, task_.plan, index);
            barrier_wait(&shared_.items_empty[place_.at], place_.parity ^ 1u);
            attend_item_notes& notes = shared_.items[place_.at];
            if (!is_end) {
                fetch_queries(item);
                note_reach(item, notes);
            }
            if (thread_ == 0) {
                notes.item = item;
                notes.is_end = is_end ? 1 : 0;
            }
            barrier_arrive(&shared_.items_full[place_.at]);
            wait_for_copies<0>();
            fence_for_matrix_reads();
            barrier_arrive(&shared_.queries_full[place_.at]);
            if (is_end) {
                return;
            }
            place_.advance();
        }
    }

  private:
    __device__ std::int32_t take_item() {
        if (thread_ == 0) {
            shared_.taken_item = atomicAdd(task_.plan.next_item, 1);
        }
        join_threads<threads>(1);
        const std::int32_t index = shared_.taken_item;
        join_threads<threads>(1);
        return index;
    }

    /// Starts the copies of the item's query rows; zeros where there are none.
    __device__ void fetch_queries(const attend_item& item) {
        const std::uint32_t to = queries_ + static_cast<std::uint32_t>(place_.at * shape::query_bytes);
#    pragma unroll 2
        for (std::int32_t at = thread_; at < shape::rows * row_parts; at += threads) {
            const std::int32_t row = at / row_parts;
            const std::int32_t part = at % row_parts;
            const bool present = row < item.num_rows;
            const item_row where = row_of(task_.step, item, present ? row : 0);
            copy_async_16(to + static_cast<std::uint32_t>(swizzled_place(shape::rows, row, part)),
                          task_.queries.at(where.kept, where.head) + part * 8, present);
        }
        close_copy_group();
    }

    /// Notes what each row reads, and bounds over all rows.
    __device__ void note_reach(const attend_item& item, attend_item_notes& notes) {
        constexpr std::uint32_t everyone = 0xffffffffu;
        row_reach least{INT32_MAX, INT32_MAX, INT32_MAX};
        row_reach most{0, 0, 0};
#    pragma unroll 1
        for (std::int32_t row = thread_; row < shape::rows; row += threads) {
            row_reach mine{0, 0, INT32_MAX};
            if (row < item.num_rows) {
                mine = reach_of(task_.step, item, row);
                least = {min(least.first, mine.first), min(least.end, mine.end),
                         min(least.window, mine.window)};
                most = {max(most.first, mine.first), max(most.end, mine.end), max(most.window, mine.window)};
            }
            notes.reach[row] = mine;
        }
        least = {__reduce_min_sync(everyone, least.first), __reduce_min_sync(everyone, least.end),
                 __reduce_min_sync(everyone, least.window)};
        most = {__reduce_max_sync(everyone, most.first), __reduce_max_sync(everyone, most.end),
                __reduce_max_sync(everyone, most.window)};
        if (thread_ % 32 == 0) {
            shared_.bounds[thread_ / 32] = {least, most};
        }
        join_threads<threads>(1);
        if (thread_ == 0) {
            const item_reach& a = shared_.bounds[0];
            const item_reach& b = shared_.bounds[1];
            notes.bounds = {{min(a.least.first, b.least.first), min(a.least.end, b.least.end),
                             min(a.least.window, b.least.window)},
                            {max(a.most.first, b.most.first), max(a.most.end, b.most.end),
                             max(a.most.window, b.most.window)}};
        }
    }

    const attend_task<T, Cache>& task_;
    attend_sm90_shared& shared_;
    std::uint32_t queries_;
    std::int32_t thread_; ///< of the two warps
    ring_place<shape::query_buffers> place_;
};

/// The warp that brings keys, or the one that brings values.
template <class T, class Cache, std::int32_t D, std::int32_t G, bool Means, bool IsKeys>
class UNIPREFILL_HIDDEN attend_sm90_bringer {
    using shape = attend_sm90_shape<D, G>;
    using tile = typename shape::template tile<Means>;
    using task_type = attend_sm90_task<T, Cache, Means>;
    static constexpr std::int32_t row_parts = D / 8; ///< 16 bytes each

  public:
    __device__ attend_sm90_bringer(const task_type& all, attend_sm90_shared& shared, std::uint8_t* memory)
        : all_(all)
        , shared_(shared)
        , stages_(shared_address(memory) +
                  static_cast<std::uint32_t>(shape::query_buffers * shape::query_bytes +
                                             (IsKeys ? 0 : shape::stages * shape::stage_bytes)))
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32)) {}

    __device__ void run() {
        for (;;) {
            barrier_wait(&shared_.items_full[item_.at], item_.parity);
            const attend_item_notes& notes = shared_.items[item_.at];
            if (notes.is_end != 0) {
                return;
            }
            const attend_item item = notes.item;
            const item_reach bounds = notes.bounds;
            __syncwarp();
            if (lane_ == 0) {
                barrier_arrive(&shared_.items_empty[item_.at]);
            }
            item_.advance();
            bring(item, bounds);
        }
    }

  private:
    /// All tiles of an item.
    __device__ void bring(const attend_item& item, const item_reach& bounds) {
        const block_lists& lists = all_.task.step.lists;
        key_walk<shape::tile_keys, G, warp_list, Means> walk(
            item, bounds, item.has_list, warp_list(lists.blocks + item.list_begin, item.list_entries),
            item.has_list && all_.task.mean_keys.data != nullptr);
        const std::int32_t kv_head = item.unit / all_.task.step.kv_units;
        std::uint64_t* const full = IsKeys ? shared_.keys_full : shared_.values_full;
        std::uint64_t* const empty = IsKeys ? shared_.keys_empty : shared_.values_empty;
        for (;;) {
            tile now;
            const bool exists = walk.next(now);
            if (!exists && !IsKeys) {
                return;
            }
            bool by_engine[tile::slots];
            std::uint32_t engine_slots = 0;
#    pragma unroll
            for (std::int32_t i = 0; i < tile::slots; ++i) {
                by_engine[i] = now.end[i] - now.first[i] == tile::slot_keys &&
                               (now.of_means || now.first[i] >= item.cached);
                engine_slots += by_engine[i] ? 1u : 0u;
            }
            barrier_wait(&empty[stage_.at], stage_.parity ^ 1u);
            if constexpr (IsKeys) {
                note(now, exists);
            }
            const std::uint32_t to = stages_ + static_cast<std::uint32_t>(stage_.at * shape::stage_bytes);
            if (exists && engine_slots < tile::slots) {
                bring_rows(item, kv_head, now, by_engine, to);
            }
            __syncwarp();
            if (lane_ == 0) {
                std::uint64_t* const barrier = &full[stage_.at];
                if (!exists) {
                    barrier_arrive(barrier);
                } else {
                    barrier_arrive_expecting(barrier, engine_slots * tile::slot_keys * 128 * shape::panels);
#    pragma unroll
                    for (std::int32_t i = 0; i < tile::slots; ++i) {
                        if (by_engine[i]) {
                            const std::int32_t row =
                                now.first[i] +
                                (now.of_means ? first_mean_of<G>(item) : item.request_begin - item.cached);
#    pragma unroll
                            for (std::int32_t panel = 0; panel < shape::panels; ++panel) {
                                load_box(to + static_cast<std::uint32_t>(panel * shape::key_panel +
                                                                         i * tile::slot_keys * 128),
                                         map_of(now), barrier, panel * 64, kv_head, row);
                            }
                        }
                    }
                }
            }
            stage_.advance();
            if (!exists) {
                return;
            }
        }
    }

    [[nodiscard]] __device__ const CUtensorMap& map_of(const tile& what) const {
        if constexpr (Means) {
            if (what.of_means) {
                return IsKeys ? all_.mean_keys : all_.mean_values;
            }
        }
        return IsKeys ? all_.keys : all_.values;
    }

    /// Tells multipliers of a tile.
    __device__ void note(const tile& what, bool exists) {
        if (lane_ == 0) {
            attend_tile_notes& notes = shared_.tiles[note_.at];
#    pragma unroll
            for (std::int32_t i = 0; i < tile::slots; ++i) {
                notes.first[i] = what.first[i];
                notes.end[i] = what.end[i];
            }
            notes.unlisted = what.unlisted;
            notes.state = !exists ? attend_no_tile : what.masked ? attend_masked : attend_whole;
            if constexpr (Means) {
                if (exists && what.of_means) {
                    notes.state = attend_means;
#    pragma unroll
                    for (std::int32_t i = 0; i < tile::words; ++i) {
                        notes.end[i] = static_cast<std::int32_t>(what.skipped[i]);
                    }
                }
            }
        }
        note_.advance();
    }

    /// Copies slots that the copy engine can't row by row: cached keys, and the last ones of a segment.
    __device__ void bring_rows(const attend_item& item, std::int32_t kv_head, const tile& what,
                               const bool (&by_engine)[tile::slots], std::uint32_t to) {
#    pragma unroll 1
        for (std::int32_t i = 0; i < tile::slots; ++i) { // once in the code: the slot's bounds are picked out
            std::int32_t first = what.first[0];
            std::int32_t end = what.end[0];
            bool skipped = by_engine[0];
#    pragma unroll
            for (std::int32_t j = 1; j < tile::slots; ++j) {
                first = i == j ? what.first[j] : first;
                end = i == j ? what.end[j] : end;
                skipped = i == j ? by_engine[j] : skipped;
            }
            if (!skipped) {
                bring_slot(item, kv_head, first, end, what.of_means,
                           to + static_cast<std::uint32_t>(i * tile::slot_keys * 128));
            }
        }
        close_copy_group();
        wait_for_copies<0>();
        fence_for_matrix_reads();
    }
    /// Copies keys [first, end), zeros behind them.
    __device__ void bring_slot(const attend_item& item, std::int32_t kv_head, std::int32_t first,
                               std::int32_t end, bool of_means, std::uint32_t to) {
        const head_rows<const T>& rows = IsKeys ? all_.task.keys : all_.task.values;
        const head_rows<const T>& means = IsKeys ? all_.task.mean_keys : all_.task.mean_values;
        const Cache& cache = IsKeys ? all_.task.cached_keys : all_.task.cached_values;
#    pragma unroll 4
        for (std::int32_t at = lane_; at < tile::slot_keys * row_parts; at += 32) {
            const std::int32_t row = at / row_parts;
            const std::int32_t part = at % row_parts;
            const std::int32_t key = first + row;
            const T* from = rows.data;
            if (key < end) {
                from = Means && of_means ? means.at(first_mean_of<G>(item) + key, kv_head) + part * 8
                       : key < item.cached
                           ? cache.row(item.request, key, kv_head) + part * 8
                           : rows.at(item.request_begin + key - item.cached, kv_head) + part * 8;
            }
            copy_async_16(to + static_cast<std::uint32_t>(part / 8 * shape::key_panel + row * 128 +
                                                          ((part % 8) ^ (row % 8)) * 16),
                          from, key < end);
        }
    }

    const task_type& all_;
    attend_sm90_shared& shared_;
    std::uint32_t stages_;
    std::int32_t lane_;
    ring_place<shape::query_buffers> item_;
    ring_place<shape::stages> stage_;
    ring_place<shape::stages + 2> note_;
};

/// One of the groups of four warps that multiply.
template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap, bool Means>
class UNIPREFILL_HIDDEN attend_sm90_multiplier {
    using shape = attend_sm90_shape<D, G>;
    using tile = typename shape::template tile<Means>;
    static constexpr std::int32_t tile_keys = shape::tile_keys;
    static constexpr std::int32_t steps = tile_keys / 16; ///< of a product with values

  public:
    __device__ attend_sm90_multiplier(const attend_sm90_task<T, Cache, Means>& all,
                                      attend_sm90_shared& shared, std::uint8_t* memory, std::int32_t group)
        : task_(all.task)
        , shared_(shared)
        , queries_(shared_address(memory))
        , group_(group)
        , lane_(static_cast<std::int32_t>(threadIdx.x % 32))
        , warp_(static_cast<std::int32_t>(threadIdx.x / 32 % 4)) {}

    __device__ void run() {
        if (group_ == shape::groups - 1) {
            let_multiply(0);
        }
        for (;;) {
            barrier_wait(&shared_.queries_full[query_.at], query_.parity);
            if (shared_.items[query_.at].is_end != 0) {
                break;
            }
            attend();
            barrier_arrive(&shared_.items_empty[query_.at]);
            query_.advance();
        }
        if (group_ == 0) {
            wait_for_turn(); // nobody else will
        }
    }

  private:
    using scores = float[tile_keys / 2];
    using outputs = float[D / 2];

    static constexpr std::int32_t first_turn = 2; ///< named barriers: group g's is first_turn + g

    __device__ void wait_for_turn() { join_threads<256>(first_turn + group_); }
    __device__ void let_multiply(std::int32_t group) { let_threads_join<256>(first_turn + group); }

    /// All keys of an item.
    __device__ void attend() {
        outputs out;
        scores now;
        std::uint32_t weights[steps][4];
#    pragma unroll
        for (std::int32_t i = 0; i < D / 2; ++i) {
            out[i] = 0;
        }
        rows_[0] = {};
        rows_[1] = {};
        const std::int32_t row = warp_ * 16 + lane_ / 4 + group_ * 64;
        reach_[0] = shared_.items[query_.at].reach[row];
        reach_[1] = shared_.items[query_.at].reach[row + 8];

        if (has_next_keys()) {
            wait_for_turn();
            matrix_begin();
            multiply_keys(now);
            let_multiply((group_ + 1) % shape::groups);
            matrix_wait<0>();
            pin(now);
            release_keys();
            float factors[2];
            take_exponentials(now, factors);
            round_weights(now, weights);
            bool more = has_next_keys();
            while (more) {
                wait_for_turn();
                matrix_begin();
                multiply_keys(now);
                barrier_wait(&shared_.values_full[value_.at], value_.parity);
                multiply_values(out, weights);
                let_multiply((group_ + 1) % shape::groups);
                matrix_wait<1>();
                pin(now);
                release_keys();
                take_exponentials(now, factors);
                pin(now);
                // Between the exponentials and the wait for the values' products, which they run under: ptxas
                // would move that wait up, but not across a loop.
                more = has_next_keys();
                matrix_wait<0>();
                pin(out);
                release_values();
                if (__any_sync(0xffffffffu, factors[0] != 1.0f || factors[1] != 1.0f)) {
                    scale(out, factors);
                }
                round_weights(now, weights);
            }
            barrier_wait(&shared_.values_full[value_.at], value_.parity);
            matrix_begin();
            multiply_values(out, weights);
            matrix_wait<0>();
            pin(out);
            release_values();
        }
        release_keys(); // the end's note
        write(out);
    }

    /// Waits for the next tile's keys. @return false: there is none
    [[nodiscard]] __device__ bool has_next_keys() {
        barrier_wait(&shared_.keys_full[key_.at], key_.parity);
        return shared_.tiles[note_.at].state != attend_no_tile;
    }
    __device__ void release_keys() {
        release(shared_.keys_empty[key_.at]);
        key_.advance();
        note_.advance();
    }
    __device__ void release_values() {
        release(shared_.values_empty[value_.at]);
        value_.advance();
    }
    /// Once for a warp, of which all lanes are through.
    __device__ void release(std::uint64_t& barrier) {
        __syncwarp();
        if (lane_ == 0) {
            barrier_arrive(&barrier);
        }
    }

    /// Starts now = queries * keys^T.
    __device__ void multiply_keys(scores& now) {
        constexpr std::uint32_t descriptor_bytes = 16;
        const std::uint64_t queries = matrix_descriptor(
            (queries_ + static_cast<std::uint32_t>(query_.at * shape::query_bytes + group_ * 64 * 128)) /
            descriptor_bytes);
        const std::uint64_t keys = matrix_descriptor(
            (queries_ + static_cast<std::uint32_t>(shape::query_buffers * shape::query_bytes +
                                                   key_.at * shape::stage_bytes)) /
            descriptor_bytes);
#    pragma unroll
        for (std::int32_t step = 0; step < D / 16; ++step) {
            const std::int32_t in_panel = step % 4 * 32;
            matrix_step<T, tile_keys>(
                now, queries + static_cast<std::uint64_t>((step / 4 * shape::query_panel + in_panel) >> 4),
                keys + static_cast<std::uint64_t>((step / 4 * shape::key_panel + in_panel) >> 4),
                step > 0 ? 1 : 0);
        }
        matrix_close_group();
    }

    /// Starts out += weights * values.
    __device__ void multiply_values(outputs& out, const std::uint32_t (&weights)[steps][4]) {
        const std::uint64_t values = value_descriptor<tile_keys>(
            (queries_ + static_cast<std::uint32_t>(shape::query_buffers * shape::query_bytes +
                                                   (shape::stages + value_.at) * shape::stage_bytes)) /
            16);
#    pragma unroll
        for (std::int32_t step = 0; step < steps; ++step) {
            const std::uint64_t at = values + static_cast<std::uint64_t>((step * 16 * 128) >> 4);
            constexpr std::uint64_t panel = shape::key_panel >> 4;
            if constexpr (D == 256) {
                value_step<T, 128, 0>(out, weights[step], at);
                value_step<T, 128, 64>(out, weights[step], at + 2 * panel);
            } else if constexpr (D == 192) {
                value_step<T, 128, 0>(out, weights[step], at);
                value_step<T, 64, 64>(out, weights[step], at + 2 * panel);
            } else if constexpr (D == 96 || D == 80) {
                value_step<T, 64, 0>(out, weights[step], at);
                value_step<T, D - 64, 32>(out, weights[step], at + panel);
            } else {
                value_step<T, D, 0>(out, weights[step], at);
            }
        }
        matrix_close_group();
    }

    /// Keeps the compiler from moving accesses of accumulators across.
    template <std::int32_t Size>
    static __device__ void pin(float (&sums)[Size]) {
#    pragma unroll
        for (std::int32_t i = 0; i < Size; ++i) {
            asm volatile("" : "+f"(sums[i])::"memory");
        }
    }

    /// Scores that their row doesn't read become -infinity.
    __device__ void mask(scores& now, const attend_tile_notes& notes) {
#    pragma unroll
        for (std::int32_t slot = 0; slot < tile::slots; ++slot) {
            const bool unlisted = (notes.unlisted >> slot & 1u) != 0;
            const std::int32_t origin = notes.first[slot] + 2 * (lane_ % 4);
            std::int32_t first[2];
            std::uint32_t count[2];
#    pragma unroll
            for (std::int32_t half = 0; half < 2; ++half) {
                const row_reach& reach = reach_[half];
                const std::int32_t from = unlisted ? max(reach.first, reach.window) : reach.first;
                const std::int32_t to = min(reach.end, notes.end[slot]);
                first[half] = from - origin;
                count[half] = static_cast<std::uint32_t>(max(to - from, 0));
            }
#    pragma unroll
            for (std::int32_t in_slot = 0; in_slot < tile::slot_keys; in_slot += 8) {
                const std::int32_t at = (slot * tile::slot_keys + in_slot) / 2;
#    pragma unroll
                for (std::int32_t i = 0; i < 4; ++i) {
                    const auto place = static_cast<std::uint32_t>(in_slot + i % 2 - first[i / 2]);
                    now[at + i] = place < count[i / 2] ? now[at + i] : nothing_read;
                }
            }
        }
    }

    /// The same for means.
    __device__ void mask_means(scores& now, const attend_tile_notes& notes) {
        const std::int32_t context = shared_.items[query_.at].item.context;
        std::int32_t first[2];
        std::uint32_t count[2];
#    pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            const mean_range range = means_of<G>(reach_[half], context);
            first[half] = range.from - (notes.first[0] + 2 * (lane_ % 4));
            count[half] = static_cast<std::uint32_t>(max(range.to - range.from, 0));
        }
#    pragma unroll
        for (std::int32_t in_tile = 0; in_tile < tile_keys; in_tile += 8) {
            const std::uint32_t skipped =
                static_cast<std::uint32_t>(notes.end[in_tile / 32]) >> (in_tile % 32 + 2 * (lane_ % 4));
#    pragma unroll
            for (std::int32_t i = 0; i < 4; ++i) {
                const bool meets =
                    static_cast<std::uint32_t>(in_tile + i % 2 - first[i / 2]) < count[i / 2] &&
                    (skipped >> (i % 2) & 1u) != 0;
                now[in_tile / 2 + i] = meets ? now[in_tile / 2 + i] : nothing_read;
            }
        }
    }

    /// Scores become probabilities against each row's reference. @param factors what outputs are scaled by
    __device__ void take_exponentials(scores& now, float (&factors)[2]) {
        const attend_tile_notes& notes = shared_.tiles[note_before()];
        float weight = 0; // of the tile's keys, log2
        if (notes.state == attend_masked) {
            mask(now, notes);
        }
        if constexpr (Means) {
            if (notes.state == attend_means) {
                mask_means(now, notes);
                weight = mean_weight<G>;
            }
        }
        float largest_of[4] = {now[0], now[1], now[2], now[3]};
#    pragma unroll
        for (std::int32_t i = 4; i < tile_keys / 2; ++i) {
            largest_of[i % 4] = larger(largest_of[i % 4], now[i]);
        }
        float largest[2] = {larger(largest_of[0], largest_of[1]), larger(largest_of[2], largest_of[3])};
        float subtrahend[2];
#    pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            largest[half] = larger(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 1));
            largest[half] = larger(largest[half], __shfl_xor_sync(0xffffffffu, largest[half], 2));
            factors[half] =
                rows_[half].raise(weighed<Means>(on_grid<Softcap>(largest[half], task_.scores), weight));
            subtrahend[half] = weighed<Means>(-rows_[half].subtrahend(), weight);
        }
#    pragma unroll
        for (std::int32_t i = 0; i < tile_keys / 2; ++i) {
            const std::int32_t half = i / 2 % 2;
            now[i] = exp2_of(add(on_grid<Softcap>(now[i], task_.scores), subtrahend[half]));
            rows_[half].sum = add(rows_[half].sum, now[i]);
        }
    }
    /// Where the notes of the tile are whose keys have just been released.
    [[nodiscard]] __device__ std::int32_t note_before() const {
        return note_.at == 0 ? shape::stages + 1 : note_.at - 1;
    }

    static __device__ void round_weights(const scores& now, std::uint32_t (&weights)[steps][4]) {
#    pragma unroll
        for (std::int32_t step = 0; step < steps; ++step) {
#    pragma unroll
            for (std::int32_t i = 0; i < 4; ++i) {
                weights[step][i] = rounded_pair<T>(now[8 * step + 2 * i], now[8 * step + 2 * i + 1]);
            }
        }
    }

    static __device__ void scale(outputs& out, const float (&factors)[2]) {
#    pragma unroll
        for (std::int32_t i = 0; i < D / 2; ++i) {
            out[i] = multiply(out[i], factors[i / 2 % 2]);
        }
    }

    /// Outputs, through the place of this warp's own query rows, which nobody reads any more.
    __device__ void write(outputs& out) {
        const attend_item& item = shared_.items[query_.at].item;
        const std::int32_t first = group_ * 64 + warp_ * 16;
        const std::uint32_t place = queries_ + static_cast<std::uint32_t>(query_.at * shape::query_bytes);
        row_end ends[2];
#    pragma unroll
        for (std::int32_t half = 0; half < 2; ++half) {
            softmax_row<T> row = rows_[half];
            row.sum = add(row.sum, __shfl_xor_sync(0xffffffffu, row.sum, 1));
            row.sum = add(row.sum, __shfl_xor_sync(0xffffffffu, row.sum, 2));
            const std::int32_t at = first + lane_ / 4 + 8 * half;
            const item_row where = row_of(task_.step, item, at < item.num_rows ? at : 0);
            ends[half] = finish_row(row, task_.scores, where.head);
            if (task_.lse != nullptr && lane_ % 4 == 0 && at < item.num_rows) {
                task_.lse[std::int64_t{where.kept} * task_.out.num_heads + where.head] = ends[half].lse;
            }
        }
#    pragma unroll
        for (std::int32_t i = 0; i < D / 2; i += 2) {
            const std::int32_t half = i / 2 % 2;
            const std::int32_t at = first + lane_ / 4 + 8 * half;
            const std::int32_t part = i / 4;
            const std::uint32_t to =
                place + static_cast<std::uint32_t>(swizzled_place(shape::rows, at, part) + lane_ % 4 * 4);
            asm volatile("st.shared.u32 [%0], %1;" ::"r"(to),
                         "r"(rounded_pair<T>(multiply(out[i], ends[half].factor),
                                             multiply(out[i + 1], ends[half].factor)))
                         : "memory");
        }
        __syncwarp();
        constexpr std::int32_t parts = D / 8;
#    pragma unroll 1
        for (std::int32_t i = lane_; i < 16 * parts; i += 32) {
            const std::int32_t at = first + i / parts;
            const std::int32_t part = i % parts;
            if (at < item.num_rows) {
                const item_row where = row_of(task_.step, item, at);
                const uint4 words =
                    load_shared_16(place + static_cast<std::uint32_t>(swizzled_place(shape::rows, at, part)));
                *reinterpret_cast<uint4*>(task_.out.at(where.kept, where.head) + part * 8) = words;
            }
        }
        __syncwarp();
    }

    const attend_task<T, Cache>& task_;
    attend_sm90_shared& shared_;
    std::uint32_t queries_;
    std::int32_t group_;
    std::int32_t lane_;
    std::int32_t warp_;
    ring_place<shape::query_buffers> query_;
    ring_place<shape::stages> key_;
    ring_place<shape::stages> value_;
    ring_place<shape::stages + 2> note_;
    softmax_row<T> rows_[2];
    row_reach reach_[2];
};

#endif // __CUDA_ARCH_FEAT_SM90_ALL

template <class T, class Cache, std::int32_t D, std::int32_t G, bool Softcap, bool Means>
__global__ void UNIPREFILL_HIDDEN __launch_bounds__(attend_sm90_shape<D, G>::threads, 1)
    attend_sm90_kernel(const __grid_constant__ attend_sm90_task<T, Cache, Means> all) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    using shape = attend_sm90_shape<D, G>;
    extern __shared__ std::uint8_t dynamic_memory[];
    __shared__ attend_sm90_shared shared;
    static_assert(sizeof(attend_sm90_shared) <= shape::static_bytes);
    const std::uint32_t misaligned = shared_address(dynamic_memory) % 1024;
    std::uint8_t* const memory = dynamic_memory + (misaligned == 0 ? 0 : 1024 - misaligned);
    if (threadIdx.x == 0) {
        prefetch_tensor_map(all.keys);
        prefetch_tensor_map(all.values);
        if constexpr (Means) {
            if (all.task.mean_keys.data != nullptr) {
                prefetch_tensor_map(all.mean_keys);
                prefetch_tensor_map(all.mean_values);
            }
        }
        for (std::int32_t stage = 0; stage < shape::stages; ++stage) {
            barrier_init(&shared.keys_full[stage], 1);
            barrier_init(&shared.keys_empty[stage], shape::multipliers / 32);
            barrier_init(&shared.values_full[stage], 1);
            barrier_init(&shared.values_empty[stage], shape::multipliers / 32);
        }
        for (std::int32_t i = 0; i < 2; ++i) {
            barrier_init(&shared.items_full[i], attend_sm90_preparers);
            barrier_init(&shared.queries_full[i], attend_sm90_preparers);
            barrier_init(&shared.items_empty[i], shape::multipliers + 2);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    const std::int32_t group = uniform(static_cast<std::int32_t>(threadIdx.x / 128));
    if (group == 0) {
        lower_register_limit<shape::loader_registers>();
        const std::int32_t warp = uniform(static_cast<std::int32_t>(threadIdx.x / 32));
        if (warp == 0) {
            attend_sm90_bringer<T, Cache, D, G, Means, true>(all, shared, memory).run();
        } else if (warp == 1) {
            attend_sm90_bringer<T, Cache, D, G, Means, false>(all, shared, memory).run();
        } else {
            attend_sm90_preparer<T, Cache, D, G>(all.task, shared, memory).run();
        }
    } else {
        raise_register_limit<shape::multiplier_registers>();
        attend_sm90_multiplier<T, Cache, D, G, Softcap, Means>(all, shared, memory, group - 1).run();
    }
#else
    static_cast<void>(all);
#endif
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
