// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of one unit of query rows on the host, and its threads' memory.
#pragma once

#include <uniprefill/attend/detail/attention_kernels.hpp>
#include <uniprefill/attend/detail/attention_unit.hpp>
#include <uniprefill/attend/means.hpp>
#include <uniprefill/core/detail/score_factors.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cmath>
#include <cstdint>

#if defined(_OPENMP)
#    include <omp.h>
#endif

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What attends reads and writes, whatever its rows are. Everything has been checked.
template <class T, class Cache>
struct UNIPREFILL_HIDDEN attention_problem {
    head_rows<const T> queries;
    key_source<T, Cache> keys;
    key_source<T, Cache> values;
    head_rows<T> out;
    float* lse = nullptr;
    score_factors scores{};
    block_means<T> means{};
    float mean_weight = 0; ///< log2 G

    void set(const block_means<T>& of_blocks, std::int32_t block_rows) noexcept {
        means = of_blocks;
        mean_weight = static_cast<float>(std::log2(static_cast<double>(block_rows)));
    }
};

/// Threads that are used, at most: each has a part of the workspace.
inline constexpr std::int32_t most_attention_workers = 64;

/// The memory that threads work in.
struct UNIPREFILL_HIDDEN attention_buffers {
    float* memory = nullptr; // [workers][floats of a worker]
    std::int32_t workers = 0;
    std::int32_t head_dim = 0;

    /// @param most_units units of a step: more threads than these have nothing to do
    [[nodiscard]] static UNIPREFILL_HOST_API attention_buffers carve(workspace& memory, std::int32_t head_dim,
                                                                     std::int64_t most_units) noexcept {
        attention_buffers made;
        made.head_dim = head_dim;
        made.workers = static_cast<std::int32_t>(
            most_units < most_attention_workers ? most_units : most_attention_workers);
        made.memory = memory.take<float>(made.workers * made.floats());
        return made;
    }

    // Where each array begins, in floats from the first of a worker's.
    [[nodiscard]] std::int64_t queries() const noexcept { return 0; } // [head_dim][lanes]
    [[nodiscard]] std::int64_t out() const noexcept {                 // [head_dim][lanes]
        return queries() + std::int64_t{head_dim} * attention_lanes;
    }
    [[nodiscard]] std::int64_t run_out() const noexcept { // [head_dim + spare][lanes]
        return out() + std::int64_t{head_dim} * attention_lanes;
    }
    [[nodiscard]] std::int64_t scores() const noexcept { // [tile_keys + spare][lanes]
        return run_out() + std::int64_t{head_dim + attention_spare} * attention_lanes;
    }
    [[nodiscard]] std::int64_t keys() const noexcept { // [tile_keys + spare][head_dim]
        return scores() + std::int64_t{attention_tile_keys + attention_spare} * attention_lanes;
    }
    [[nodiscard]] std::int64_t values() const noexcept { // [tile_keys][head_dim], spare elements
        return keys() + std::int64_t{attention_tile_keys + attention_spare} * head_dim;
    }
    [[nodiscard]] std::int64_t floats() const noexcept { // whole cache lines
        return (values() + std::int64_t{attention_tile_keys} * head_dim + attention_spare + 15) / 16 * 16;
    }
};

/// Attends the query rows of units, one after the other, in one thread's memory.
template <std::int32_t Build, class T, class Cache>
class UNIPREFILL_HIDDEN attention_worker {
    using kernels = attention_kernels<Build>;

  public:
    attention_worker(const attention_problem<T, Cache>& problem, const attention_buffers& buffers,
                     std::int32_t worker) noexcept
        : p_(problem)
        , head_dim_(buffers.head_dim)
        , queries_(buffers.memory + worker * buffers.floats() + buffers.queries())
        , out_(queries_ + buffers.out())
        , run_out_(queries_ + buffers.run_out())
        , scores_(queries_ + buffers.scores())
        , keys_(queries_ + buffers.keys())
        , values_(queries_ + buffers.values()) {}

    void attend(const attention_unit& unit) noexcept {
        begin(unit);
        attention_tile tile;
        std::int64_t run_end = end_of_run(unit.from[0]);
        for (tile_walk walk(unit); walk.next(tile);) {
            if (tile.first >= run_end) {
                end_run(unit.lanes);
                run_end = end_of_run(tile.first);
            }
            read_rows(unit, tile, p_.keys, keys_);
            read_rows(unit, tile, p_.values, values_);
            attend_tile<false>(unit, tile);
        }
        end_run(unit.lanes);
        if (p_.means.keys.data != nullptr) {
            attend_means(unit);
        }
        finish(unit);
    }

  private:
    static std::int64_t end_of_run(std::int64_t key) noexcept {
        return key / attention_run_keys * attention_run_keys + attention_run_keys;
    }

    /// The means of blocks that lanes skip, in runs of their own.
    void attend_means(const attention_unit& unit) noexcept {
        attention_tile tile;
        std::int64_t run_end = 0;
        for (mean_walk walk(unit); walk.next(tile);) {
            if (tile.first >= run_end && run_end > 0) {
                end_run(unit.lanes);
            }
            run_end = end_of_run(tile.first);
            for (std::int32_t i = 0; i < tile.num_keys; ++i) {
                const std::int64_t row = unit.first_mean + tile.first + tile.numbers[i];
                kernels::convert_row(p_.means.keys.at(row, unit.kv_head), head_dim_, keys_ + i * head_dim_);
                kernels::convert_row(p_.means.values.at(row, unit.kv_head), head_dim_,
                                     values_ + i * head_dim_);
            }
            attend_tile<true>(unit, tile);
        }
        if (run_end > 0) {
            end_run(unit.lanes);
        }
    }

    /// A tile that has been read.
    template <bool IsMeans>
    void attend_tile(const attention_unit& unit, const attention_tile& tile) noexcept {
        pad(tile.num_keys);
        const bool finite = kernels::all_finite(values_, tile.num_keys * head_dim_);
        for (std::int32_t lane = 0; lane < unit.lanes; lane += kernels::panel) {
            const std::int32_t left = unit.lanes - lane;
            const std::int32_t used = left < kernels::panel ? left : kernels::panel;
            if (used > kernels::width) {
                attend_panel<IsMeans, kernels::panel_vectors>(unit, tile, lane, used, finite);
            } else {
                attend_panel<IsMeans, 1>(unit, tile, lane, used, finite);
            }
        }
    }

    void begin(const attention_unit& unit) noexcept {
        // Lanes of the last panel that are no query rows are read too.
        const std::int32_t panels = (unit.lanes + kernels::panel - 1) / kernels::panel;
        filled_ = unit.lanes <= kernels::width ? kernels::width : panels * kernels::panel;
        for (std::int32_t lane = 0; lane < filled_; ++lane) {
            const bool is_row = lane < unit.lanes;
            const T* row = is_row ? p_.queries.at(unit.row[lane], unit.head[lane]) : nullptr;
            for (std::int32_t i = 0; i < head_dim_; ++i) {
                queries_[i * attention_lanes + lane] = is_row ? to_float(row[i]) * p_.scores.factor : 0;
            }
            const bool has_sink = is_row && p_.scores.sink_logits != nullptr;
            top_[lane] = has_sink ? p_.scores.sink_logits[unit.head[lane]] * log2_of_e : no_keys;
            sum_[lane] = has_sink ? 1.0f : 0.0f;
            worst_[lane] = 0;
        }
        clear(out_, head_dim_);
        begin_run();
    }

    void begin_run() noexcept {
        for (std::int32_t lane = 0; lane < filled_; ++lane) {
            run_top_[lane] = no_keys;
            run_sum_[lane] = 0;
        }
        clear(run_out_, head_dim_ + attention_spare);
    }

    void end_run(std::int32_t lanes) noexcept {
        kernels::add_run(lanes, head_dim_, run_top_, run_sum_, run_out_, top_, sum_, out_);
        begin_run();
    }

    void clear(float* rows, std::int32_t count) const noexcept {
        for (std::int32_t i = 0; i < count; ++i) {
            for (std::int32_t lane = 0; lane < filled_; ++lane) {
                rows[i * attention_lanes + lane] = 0;
            }
        }
    }

    /// Rows of a tile as floats.
    void read_rows(const attention_unit& unit, const attention_tile& tile, const key_source<T, Cache>& source,
                   float* to) const noexcept {
        for (std::int32_t i = 0; i < tile.num_keys; ++i, to += head_dim_) {
            const std::int64_t key = tile.first + tile.numbers[i];
            if (key < unit.cached) {
                kernels::convert_row(
                    source.cached.row(unit.request, static_cast<std::int32_t>(key), unit.kv_head), head_dim_,
                    to);
            } else {
                kernels::convert_row(source.rows.at(unit.first_row + key - unit.cached, unit.kv_head),
                                     head_dim_, to);
            }
        }
    }

    /// What the last register tiles read beyond a tile's keys and values.
    void pad(std::int32_t num_keys) noexcept {
        for (std::int32_t i = 0; i < attention_spare * head_dim_; ++i) {
            keys_[num_keys * head_dim_ + i] = 0;
        }
        for (std::int32_t i = 0; i < attention_spare; ++i) {
            values_[num_keys * head_dim_ + i] = 0;
        }
    }

    /// @param lane the first of the panel's
    /// @param used how many of them are query rows
    template <bool IsMeans, std::int32_t Vectors>
    void attend_panel(const attention_unit& unit, const attention_tile& tile, std::int32_t lane,
                      std::int32_t used, bool finite) noexcept {
        const std::int32_t last = lane + used - 1;
        const std::int32_t count = tile.num_keys;
        const std::int64_t* from = IsMeans ? unit.mean_from : unit.from;
        const std::int64_t* to = IsMeans ? unit.mean_to : unit.to;
        if (tile.first + tile.numbers[0] >= to[last] || tile.first + tile.numbers[count - 1] < from[lane]) {
            return;
        }
        kernels::template score<Vectors>(queries_ + lane, keys_, head_dim_, count, scores_);
        if (p_.scores.softcap > 0) {
            kernels::template soft_cap<Vectors>(scores_, count, p_.scores.softcap);
        }
        if constexpr (IsMeans) {
            kernels::template raise<Vectors>(scores_, count, p_.mean_weight);
        }
        for (std::int32_t i = 0; i < tile.num_pieces; ++i) {
            const tile_piece& piece = tile.pieces[i];
            mask_piece<Vectors>(tile, piece, piece.windowed ? unit.window : from, to, lane, used);
        }
        float shrink[attention_lanes];
        kernels::template weigh<Vectors>(scores_, count, run_top_ + lane, run_sum_ + lane, worst_ + lane,
                                         shrink);
        if (finite) {
            kernels::template add_values<Vectors, false>(scores_, values_, head_dim_, count, head_dim_,
                                                         shrink, run_out_ + lane);
        } else {
            kernels::template add_values<Vectors, true>(scores_, values_, head_dim_, count, head_dim_, shrink,
                                                        run_out_ + lane);
        }
    }

    /// Of a piece, lanes read what is in [begins, ends).
    template <std::int32_t Vectors>
    void mask_piece(const attention_tile& tile, const tile_piece& piece, const std::int64_t* begins,
                    const std::int64_t* ends, std::int32_t lane, std::int32_t used) noexcept {
        const std::int32_t last = lane + used - 1;
        if (begins[last] <= tile.first + tile.numbers[piece.begin] &&
            ends[lane] > tile.first + tile.numbers[piece.end - 1]) {
            return;
        }
        std::int32_t from[attention_lanes] = {};
        std::int32_t to[attention_lanes] = {};
        for (std::int32_t i = 0; i < used; ++i) {
            from[i] = in_tile(begins[lane + i] - tile.first);
            to[i] = in_tile(ends[lane + i] - tile.first);
        }
        kernels::template mask<Vectors>(scores_, tile.numbers, piece.begin, piece.end, from, to);
    }

    static std::int32_t in_tile(std::int64_t key) noexcept {
        return key <= 0                     ? 0
               : key >= attention_tile_keys ? attention_tile_keys
                                            : static_cast<std::int32_t>(key);
    }

    void finish(const attention_unit& unit) noexcept {
        const float nan = bit_cast<float>(std::uint32_t{0x7fc00000u});
        const float minus_infinity = bit_cast<float>(std::uint32_t{0xff800000u});
        kernels::finish(unit.lanes, head_dim_, top_, sum_, out_);
        for (std::int32_t lane = 0; lane < unit.lanes; ++lane) {
            const bool is_nan = worst_[lane] >= 0x7f800000;
            const bool is_empty = !is_nan && !(top_[lane] > no_keys);
            T* row = p_.out.at(unit.row[lane], unit.head[lane]);
            for (std::int32_t i = 0; i < head_dim_; ++i) {
                row[i] = from_float<T>(is_nan ? nan : is_empty ? 0.0f : out_[i * attention_lanes + lane]);
            }
            if (p_.lse != nullptr) {
                p_.lse[std::int64_t{unit.row[lane]} * p_.queries.num_heads + unit.head[lane]] =
                    is_nan     ? nan
                    : is_empty ? minus_infinity
                               : sum_[lane];
            }
        }
    }

    const attention_problem<T, Cache>& p_;
    std::int32_t head_dim_;
    std::int32_t filled_ = 0; ///< lanes that hold numbers
    float* queries_;
    float* out_;
    float* run_out_;
    float* scores_;
    float* keys_;
    float* values_;
    float top_[attention_lanes];
    float sum_[attention_lanes];
    std::int32_t worst_[attention_lanes];
    float run_top_[attention_lanes];
    float run_sum_[attention_lanes];
};

/// Attends units 0 to count - 1 of @p make, spread over threads; the last are begun first, as they read most.
/// @param make called with (unit, attention_unit&), by any thread
/// @param multiply_adds about how many there are
template <std::int32_t Build, class T, class Cache, class Make>
UNIPREFILL_HOST_API void attend_units(const attention_problem<T, Cache>& problem,
                                      const attention_buffers& buffers, std::int64_t count,
                                      std::int64_t multiply_adds, const Make& make) noexcept {
    if (count == 0) {
        return;
    }
    const auto work = [&](std::int32_t worker) {
        attention_worker<Build, T, Cache> attends(problem, buffers, worker);
#if defined(_OPENMP)
#    pragma omp for schedule(dynamic)
#endif
        for (std::int64_t i = 0; i < count; ++i) {
            attention_unit unit;
            make(count - 1 - i, unit);
            attends.attend(unit);
        }
    };
#if defined(_OPENMP)
    // Less than this (some 0.1 ms) isn't worth waking a thread and waiting for it.
    constexpr std::int64_t work_of_a_thread = std::int64_t{1} << 22;
    const std::int64_t useful = multiply_adds / work_of_a_thread + 1;
    const std::int64_t wanted = omp_get_max_threads() < useful ? omp_get_max_threads() : useful;
    const int threads = static_cast<int>(wanted < buffers.workers ? wanted : buffers.workers);
#    pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
#else
    static_cast<void>(multiply_adds);
    work(0);
#endif
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
