// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// One run of the host estimator: which thread does what, in which order.
#pragma once

#include <uniprefill/core/detail/host_kernels.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/importance/detail/host_plan.hpp>

#include <cstdint>

#if defined(_OPENMP)
#    include <omp.h>
#endif

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// What a run reads and writes. Everything has been checked.
template <class T, class Cache>
struct UNIPREFILL_HIDDEN host_problem {
    limits bounds;
    batch_view batch;
    head_rows<const T> queries;
    head_rows<const T> keys;
    Cache cached;
    float query_factor = 1;             ///< turns q.k into units of log2, or into x / cap
    float softcap = 0;                  ///< 0: none
    const float* sink_logits = nullptr; // [num_heads]
    mass_view out;
    head_mass_view per_head;
    host_buffers buffers;
    std::int32_t num_scored = 0; ///< entries of buffers.segments
};

/// A (segment, KV head) pair of a wave. Units of work are counted through all items of the wave.
struct UNIPREFILL_HIDDEN wave_item {
    const scored_segment* what = nullptr;
    float* queries = nullptr;
    float* partials = nullptr;
    float* reference = nullptr;
    float* inverse_sum = nullptr;
    std::int32_t index = 0; ///< of the segment in host_buffers::segments
    std::int32_t kv_head = 0;
    std::int64_t panels_end = 0; ///< units of one panel, up to and including this item's
    std::int64_t blocks_end = 0; ///< units of one block of keys
    std::int64_t masses_end = 0; ///< units of one own block, counted at the first item of each segment
};

/// The pairs between two barriers: as many as the workspace holds partials for, at least one.
struct UNIPREFILL_HIDDEN wave {
    wave_item items[max_wave_items];
    std::int32_t count = 0;
    std::int64_t panels = 0;
    std::int64_t blocks = 0;
    std::int64_t masses = 0;
};

template <class T, class Cache, class HeadReduction, std::int32_t Build>
class UNIPREFILL_HIDDEN host_estimate {
    using kernels = host_kernels<Build>;

  public:
    explicit host_estimate(const host_problem<T, Cache>& problem) noexcept
        : p_(problem)
        , group_(problem.bounds.group_heads()) {}

    void run() noexcept {
#if defined(_OPENMP)
        const std::int64_t useful = multiply_adds() / work_of_a_thread + 1;
        const std::int64_t wanted = omp_get_max_threads() < useful ? omp_get_max_threads() : useful;
        const int threads = static_cast<int>(wanted < p_.buffers.workers ? wanted : p_.buffers.workers);
#    pragma omp parallel num_threads(threads)
        work(omp_get_thread_num());
#else
        work(0);
#endif
    }

  private:
    /// Less than this (some 0.1 ms) isn't worth waking a thread and waiting for it, least of all on a busy
    /// machine.
    static constexpr std::int64_t work_of_a_thread = std::int64_t{1} << 22;

    std::int64_t multiply_adds() const noexcept {
        std::int64_t sum = 0;
        for (std::int32_t i = 0; i < p_.num_scored; ++i) {
            const scored_segment& what = p_.buffers.segments[i];
            sum += (what.context + what.rows) * what.query_rows;
        }
        return sum * p_.bounds.num_kv_heads * p_.bounds.head_dim;
    }

    /// Calls @p body for 0..count-1, spread over the team, and waits for all of them.
    template <class Body>
    static void share_out(std::int64_t count, Body body) noexcept {
#if defined(_OPENMP)
#    pragma omp for schedule(dynamic)
#endif
        for (std::int64_t unit = 0; unit < count; ++unit) {
            body(unit);
        }
    }

    void work(std::int32_t worker) noexcept {
        const std::int64_t pairs = std::int64_t{p_.num_scored} * p_.bounds.num_kv_heads;
        for (std::int64_t next = 0; next < pairs;) {
            const wave now = next_wave(next);
            share_out(now.panels, [&](std::int64_t unit) { pack_panel(now, unit); });
            share_out(now.blocks, [&](std::int64_t unit) { score_block(now, unit, worker); });
            share_out(now.panels, [&](std::int64_t unit) { sum_panel(now, unit); });
            share_out(now.masses, [&](std::int64_t unit) { sum_masses(now, unit); });
        }
    }

    /// Every thread computes the same wave for itself.
    wave next_wave(std::int64_t& next) const noexcept {
        const host_buffers& buffers = p_.buffers;
        const std::int64_t pairs = std::int64_t{p_.num_scored} * p_.bounds.num_kv_heads;
        wave made;
        std::int64_t used = 0;
        for (; next < pairs && made.count < buffers.items; ++next) {
            const auto index = static_cast<std::int32_t>(next / p_.bounds.num_kv_heads);
            const scored_segment& what = buffers.segments[index];
            const std::int64_t needed = what.slots() * what.lanes;
            if (used + needed > buffers.num_partials) {
                break;
            }
            const bool first_of_segment = made.count == 0 || made.items[made.count - 1].index != index;
            made.panels += (what.query_rows + kernels::panel - 1) / kernels::panel;
            made.blocks += what.num_observations > 0 ? what.blocks() : 0;
            made.masses += first_of_segment && what.num_observations > 0 ? what.own_blocks : 0;
            wave_item& item = made.items[made.count];
            item.what = &what;
            item.queries = buffers.queries + made.count * buffers.lanes * p_.bounds.head_dim;
            item.partials = buffers.partials + used;
            item.reference = buffers.reference + made.count * buffers.lanes;
            item.inverse_sum = buffers.inverse_sum + made.count * buffers.lanes;
            item.index = index;
            item.kv_head = static_cast<std::int32_t>(next % p_.bounds.num_kv_heads);
            item.panels_end = made.panels;
            item.blocks_end = made.blocks;
            item.masses_end = made.masses;
            used += needed;
            ++made.count;
        }
        return made;
    }

    /// The item that a unit belongs to; the unit is then counted from the end of that item's.
    static const wave_item& item_of(const wave& now, std::int64_t wave_item::*end,
                                    std::int64_t& unit) noexcept {
        std::int32_t i = 0;
        while (now.items[i].*end <= unit) {
            ++i;
        }
        unit -= i > 0 ? now.items[i - 1].*end : 0;
        return now.items[i];
    }

    /// The query rows of a panel, transposed and multiplied by the scale: [head_dim][panel].
    void pack_panel(const wave& now, std::int64_t unit) const noexcept {
        const wave_item& item = item_of(now, &wave_item::panels_end, unit);
        const scored_segment& what = *item.what;
        const std::int32_t head_dim = p_.bounds.head_dim;
        float* packed = item.queries + unit * kernels::panel * head_dim;
        const auto first = static_cast<std::int32_t>(unit) * kernels::panel;
        for (std::int32_t lane = 0; lane < kernels::panel; ++lane) {
            if (first + lane >= what.query_rows) {
                for (std::int32_t i = 0; i < head_dim; ++i) {
                    packed[i * kernels::panel + lane] = 0;
                }
                continue;
            }
            const std::int32_t head = (first + lane) / what.num_observations;
            const T* row =
                p_.queries.at(what.first_row + observation(what, first + lane), item.kv_head * group_ + head);
            for (std::int32_t i = 0; i < head_dim; ++i) {
                packed[i * kernels::panel + lane] = to_float(row[i]) * p_.query_factor;
            }
        }
    }

    /// The observation row, counted from its segment's first, of a query row: heads of the group first.
    std::int32_t observation(const scored_segment& what, std::int32_t query_row) const noexcept {
        return p_.buffers.observations[what.first_observation + query_row % what.num_observations];
    }

    /// One block of keys against all query rows of its KV head. Context comes first, in blocks of G keys that
    /// count from the request's first, whether cached or not; then the segment's own blocks.
    void score_block(const wave& now, std::int64_t unit, std::int32_t worker) const noexcept {
        const wave_item& item = item_of(now, &wave_item::blocks_end, unit);
        const scored_segment& what = *item.what;
        const std::int32_t block_rows = p_.bounds.block_rows;
        const std::int32_t head_dim = p_.bounds.head_dim;
        const bool own = unit >= what.context_blocks;
        const std::int64_t block = own ? unit - what.context_blocks : unit;
        const std::int64_t begin = block * block_rows;
        const std::int64_t left = (own ? what.rows : what.context) - begin;
        const auto num_keys = static_cast<std::int32_t>(left < block_rows ? left : block_rows);

        float* keys = p_.buffers.tiles + worker * p_.buffers.tile_size;
        float* scores = keys + p_.buffers.tile_size / (head_dim + padded_lanes) * head_dim;
        read_keys(what, own ? what.context + begin : begin, num_keys, item.kv_head, keys);

        bool forced[256] = {};
        const bool has_forced =
            own && mark_forced(what, static_cast<std::int32_t>(begin), num_keys, forced) > 0;
        const bool has_free = !own || num_forced(forced, num_keys) < num_keys;
        const bool sees_all = !own || observation(what, 0) + 1 >= begin + num_keys;
        float* free_partials = item.partials + (own ? what.context_blocks + 2 * block : block) * what.lanes;
        float* forced_partials = free_partials + what.lanes;

        auto largest = kernels::splat(std::int32_t{0});
        for (std::int32_t first = 0; first < what.query_rows; first += kernels::panel) {
            const float* queries = item.queries + std::int64_t{first} * head_dim;
            for (std::int32_t key = 0; key < num_keys; key += kernels::keys) {
                largest = kernels::score_tile(queries, keys + key * head_dim, head_dim,
                                              scores + key * kernels::panel, largest);
            }
            if (p_.softcap > 0) {
                kernels::soft_cap(scores, num_keys, p_.softcap);
            }
            if (!sees_all) {
                std::int32_t visible[kernels::panel];
                count_visible(what, first, begin, num_keys, visible);
                kernels::mask(scores, num_keys, visible);
            }
            if (has_free) {
                kernels::log_sum(scores, num_keys, forced, false, free_partials + first);
            } else {
                kernels::fill_no_keys(free_partials + first);
            }
            if (has_forced) {
                kernels::log_sum(scores, num_keys, forced, true, forced_partials + first);
            } else if (own) {
                kernels::fill_no_keys(forced_partials + first);
            }
        }
        if (kernels::any_non_finite(largest)) {
            p_.buffers.faulty[worker * std::int64_t{p_.bounds.max_segments} + item.index] = 1;
        }
    }

    /// Keys [begin, begin + num_keys) of the request as floats, followed by rows of zeros up to a full
    /// register tile.
    void read_keys(const scored_segment& what, std::int64_t begin, std::int32_t num_keys,
                   std::int32_t kv_head, float* keys) const noexcept {
        const std::int32_t head_dim = p_.bounds.head_dim;
        const std::int64_t cached = p_.batch.cached_len(what.request);
        const std::int64_t first_row = p_.batch.cu_seqlens[what.request];
        for (std::int32_t i = 0; i < num_keys; ++i) {
            const std::int64_t key = begin + i;
            float* to = keys + i * head_dim;
            if (key < cached) {
                kernels::convert_row(p_.cached.row(what.request, static_cast<std::int32_t>(key), kv_head),
                                     head_dim, to);
            } else {
                kernels::convert_row(p_.keys.at(first_row + key - cached, kv_head), head_dim, to);
            }
        }
        const auto padded = static_cast<std::int32_t>(round_up(num_keys, kernels::keys));
        for (std::int32_t i = num_keys * head_dim; i < padded * head_dim; ++i) {
            keys[i] = 0;
        }
    }

    /// How many keys of an own block each query row of a panel sees: those up to its own row.
    void count_visible(const scored_segment& what, std::int32_t first, std::int64_t begin,
                       std::int32_t num_keys, std::int32_t* visible) const noexcept {
        for (std::int32_t lane = 0; lane < kernels::panel; ++lane) {
            const bool is_row = first + lane < what.query_rows;
            const std::int64_t seen = is_row ? observation(what, first + lane) + 1 - begin : num_keys;
            visible[lane] = seen <= 0 ? 0 : seen >= num_keys ? num_keys : static_cast<std::int32_t>(seen);
        }
    }

    /// Marks the forced rows of an own block. @return how many there are.
    std::int32_t mark_forced(const scored_segment& what, std::int32_t begin, std::int32_t count,
                             bool* forced) const noexcept {
        const std::int32_t row = what.first_row + begin;
        forced_row_scan is_forced(p_.batch, what.segment, row);
        for (std::int32_t i = 0; i < count; ++i) {
            forced[i] = is_forced(row + i);
        }
        return num_forced(forced, count);
    }

    static std::int32_t num_forced(const bool* forced, std::int32_t count) noexcept {
        std::int32_t marked = 0;
        for (std::int32_t i = 0; i < count; ++i) {
            marked += forced[i] ? 1 : 0;
        }
        return marked;
    }

    /// The softmax denominators of a panel of query rows.
    void sum_panel(const wave& now, std::int64_t unit) const noexcept {
        const wave_item& item = item_of(now, &wave_item::panels_end, unit);
        const scored_segment& what = *item.what;
        const auto first = static_cast<std::int32_t>(unit) * kernels::panel;
        float sinks[kernels::panel] = {};
        if (p_.sink_logits != nullptr) {
            for (std::int32_t lane = 0; lane < kernels::panel && first + lane < what.query_rows; ++lane) {
                const std::int32_t head = (first + lane) / what.num_observations;
                sinks[lane] = p_.sink_logits[item.kv_head * group_ + head] * log2_of_e;
            }
        }
        for (std::int32_t lane = 0; lane < kernels::panel; lane += kernels::width) {
            kernels::sum_row(item.partials + first + lane, what.slots(), what.lanes,
                             p_.sink_logits != nullptr ? sinks + lane : nullptr,
                             item.reference + first + lane, item.inverse_sum + first + lane);
        }
    }

    /// The masses of one own block, over the KV heads of its segment that are in this wave.
    void sum_masses(const wave& now, std::int64_t unit) const noexcept {
        const wave_item* item = &item_of(now, &wave_item::masses_end, unit);
        const scored_segment& what = *item->what;
        if (is_faulty(item->index)) {
            return;
        }
        const auto begin = static_cast<std::int32_t>(unit) * p_.bounds.block_rows;
        const std::int32_t left = what.rows - begin;
        const std::int32_t num_keys = left < p_.bounds.block_rows ? left : p_.bounds.block_rows;
        bool forced[256];
        const std::int32_t marked = mark_forced(what, begin, num_keys, forced);
        const float one = static_cast<float>(std::int64_t{1} << p_.out.format.fraction_bits);
        const auto sum_part = [&](const wave_item& from, std::int64_t slot, std::int64_t* masses,
                                  std::int64_t* head_masses) {
            kernels::sum_heads(from.partials + slot * what.lanes, from.reference, from.inverse_sum,
                               what.query_rows, what.num_observations, one,
                               [&](std::int32_t head, std::int64_t mass) {
                                   const std::int64_t block = what.out_block + unit;
                                   masses[block] = HeadReduction::combine(masses[block], mass);
                                   if (head_masses != nullptr) {
                                       const std::int64_t row = from.kv_head * group_ + head;
                                       head_masses[row * p_.per_head.head_stride + block] = mass;
                                   }
                               });
        };
        for (const wave_item* const end = now.items + now.count; item != end && item->what == &what; ++item) {
            const std::int64_t slot = what.context_blocks + 2 * unit;
            if (marked < num_keys) {
                sum_part(*item, slot, p_.out.free, p_.per_head.free);
            }
            if (marked > 0) {
                sum_part(*item, slot + 1, p_.out.forced,
                         p_.per_head.free != nullptr ? p_.per_head.forced : nullptr);
            }
        }
    }

    bool is_faulty(std::int32_t index) const noexcept {
        bool faulty = false;
        for (std::int32_t worker = 0; worker < p_.buffers.workers; ++worker) {
            faulty = faulty || p_.buffers.faulty[worker * std::int64_t{p_.bounds.max_segments} + index] != 0;
        }
        return faulty;
    }

    const host_problem<T, Cache>& p_;
    std::int32_t group_;
};

/// Sets the masses of blocks [begin, end) to zero, all heads.
inline UNIPREFILL_HOST_API void clear_masses(const mass_view& out, const head_mass_view& per_head,
                                             std::int64_t begin, std::int64_t end) noexcept {
    for (std::int64_t block = begin; block < end; ++block) {
        out.free[block] = 0;
        out.forced[block] = 0;
    }
    if (per_head.free != nullptr) {
        for (std::int32_t head = 0; head < per_head.num_heads; ++head) {
            for (std::int64_t block = begin; block < end; ++block) {
                per_head.free[head * per_head.head_stride + block] = 0;
                per_head.forced[head * per_head.head_stride + block] = 0;
            }
        }
    }
}

/// Plans, scores and reports faults: importance_estimator::run() after its checks.
template <class HeadReduction, std::int32_t Build, class T, class Cache>
UNIPREFILL_HOST_API void estimate_on_host(host_problem<T, Cache>& problem) noexcept {
    const limits& bounds = problem.bounds;
    const host_buffers& buffers = problem.buffers;
    const mass_view& out = problem.out;
    clear_masses(out, problem.per_head, 0, used_blocks(problem.batch, bounds.block_rows));
    for (std::int32_t segment = 0; segment < problem.batch.num_segments; ++segment) {
        out.faults[segment] = 0;
    }
    problem.num_scored = plan_segments(problem.batch, bounds, buffers);
    for (std::int64_t i = 0; i < buffers.workers * std::int64_t{bounds.max_segments}; ++i) {
        buffers.faulty[i] = 0;
    }

    bool sinks_are_finite = true;
    for (std::int32_t head = 0; problem.sink_logits != nullptr && head < bounds.num_heads; ++head) {
        sinks_are_finite = sinks_are_finite && !is_non_finite(problem.sink_logits[head] * log2_of_e);
    }
    if (sinks_are_finite) {
        host_estimate<T, Cache, HeadReduction, Build>(problem).run();
    }

    for (std::int32_t i = 0; i < problem.num_scored; ++i) {
        const scored_segment& what = buffers.segments[i];
        bool faulty = !sinks_are_finite;
        for (std::int32_t worker = 0; worker < buffers.workers; ++worker) {
            faulty = faulty || buffers.faulty[worker * std::int64_t{bounds.max_segments} + i] != 0;
        }
        if (what.num_observations == 0) {
            out.faults[what.segment] = fault_word(mass_fault::unscored);
        } else if (faulty) {
            out.faults[what.segment] = fault_word(mass_fault::non_finite);
            // KV heads that were done before the fault came up have left their masses.
            clear_masses(out, problem.per_head, what.out_block, what.out_block + what.own_blocks);
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
