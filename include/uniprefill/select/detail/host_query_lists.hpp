// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Lists by query block on the host: scores of sampled rows, masses, and the blocks that hold them.
#pragma once

#include <uniprefill/core/detail/host_kernels.hpp>
#include <uniprefill/core/detail/score_factors.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/detail/list_rules.hpp>
#include <uniprefill/select/detail/query_block_work.hpp>
#include <uniprefill/select/detail/rank.hpp>
#include <uniprefill/select/query_sampling.hpp>

#include <cstdint>

#if defined(_OPENMP)
#    include <omp.h>
#endif

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Rows that a group of query blocks fills, on every machine.
inline constexpr std::int32_t query_group_lanes = 64;
/// Rows that a block's keys and scores have beyond G, for the last register tile, whatever its height.
inline constexpr std::int32_t query_spare_keys = 8;
/// Threads that are used, at most: each has a part of the workspace.
inline constexpr std::int32_t most_query_workers = 64;

/// What a thread works in.
struct UNIPREFILL_HIDDEN query_worker_buffers {
    float* queries = nullptr;       // [lanes / panel][head_dim][panel] multiplied by the scale
    float* keys = nullptr;          // [G + spare][head_dim]
    float* scores = nullptr;        // [G + spare][panel]
    float* partials = nullptr;      // [slots][lanes]
    float* reference = nullptr;     // [lanes]
    float* inverse_sum = nullptr;   // [lanes]
    float* sinks = nullptr;         // [lanes] in units of log2
    float* shares = nullptr;        // [lanes]
    std::int32_t* first = nullptr;  // [lanes] keys that a row sees
    std::int32_t* end = nullptr;    // [lanes]
    std::int32_t* worst = nullptr;  // [lanes] the largest magnitude among its scores, as bits
    std::int64_t* masses = nullptr; // [blocks]
    rank_scratch ranks;
};

struct UNIPREFILL_HIDDEN host_query_buffers {
    query_list_marks marks;
    std::int64_t* ends = nullptr;        // [max_segments] units of the segments up to each
    unsigned char* of_workers = nullptr; // [workers][worker_bytes]
    std::int64_t worker_bytes = 0;
    std::int32_t workers = 0;
    std::int32_t lanes = 0;
    std::int64_t slots = 0;
    std::int32_t blocks = 0;
    std::int32_t head_dim = 0;
    std::int32_t block_rows = 0;

    [[nodiscard]] static UNIPREFILL_HOST_API host_query_buffers
    carve(workspace& memory, const limits& bounds, const query_sampling& sampling) noexcept {
        host_query_buffers made;
        const std::int64_t rows =
            (std::int64_t{sampling.query_rows - 1} / sampling.sample + 1) * bounds.group_heads();
        made.lanes =
            static_cast<std::int32_t>((rows + query_group_lanes - 1) / query_group_lanes * query_group_lanes);
        made.slots = (std::int64_t{bounds.max_cached_tokens} + bounds.max_rows) / bounds.block_rows + 3;
        made.blocks = num_blocks(bounds.max_rows, bounds.block_rows) + 1;
        made.head_dim = bounds.head_dim;
        made.block_rows = bounds.block_rows;
        const std::int64_t units =
            block_lists::most_query_blocks(bounds, sampling.query_rows) * bounds.num_kv_heads;
        made.workers = static_cast<std::int32_t>(units < most_query_workers ? units : most_query_workers);
        made.marks = query_list_marks::carve(memory, bounds, sampling.query_rows, bounds.num_heads);
        made.ends = memory.take<std::int64_t>(bounds.max_segments);
        workspace counting;
        static_cast<void>(made.worker(counting));
        made.worker_bytes = static_cast<std::int64_t>(counting.bytes_used());
        made.of_workers = memory.take<unsigned char>(made.workers * made.worker_bytes);
        return made;
    }
    [[nodiscard]] query_worker_buffers of(std::int32_t worker_number) const noexcept {
        workspace pieces(of_workers + worker_number * worker_bytes, static_cast<std::size_t>(worker_bytes));
        return worker(pieces);
    }

  private:
    [[nodiscard]] query_worker_buffers worker(workspace& memory) const noexcept {
        const std::int64_t tile_rows = std::int64_t{block_rows} + query_spare_keys;
        query_worker_buffers made;
        made.queries = memory.take<float>(std::int64_t{head_dim} * lanes);
        made.keys = memory.take<float>(tile_rows * head_dim);
        made.scores = memory.take<float>(tile_rows * query_group_lanes);
        made.partials = memory.take<float>(slots * lanes);
        made.reference = memory.take<float>(lanes);
        made.inverse_sum = memory.take<float>(lanes);
        made.sinks = memory.take<float>(lanes);
        made.shares = memory.take<float>(lanes);
        made.first = memory.take<std::int32_t>(lanes);
        made.end = memory.take<std::int32_t>(lanes);
        made.worst = memory.take<std::int32_t>(lanes);
        made.masses = memory.take<std::int64_t>(blocks);
        made.ranks = rank_scratch::carve(memory, blocks);
        return made;
    }
};

/// What a run reads and writes. Everything has been checked.
template <class T, class Cache, class Rule>
struct UNIPREFILL_HIDDEN host_query_problem {
    limits bounds;
    query_list_step step;
    list_options<Rule> options;
    head_rows<const T> queries;
    key_source<T, Cache> keys;
    host_query_buffers buffers;
    score_factors scores{};
};

/// Marks the lists of groups of query blocks, one after the other, in one thread's memory.
template <std::int32_t Build, class T, class Cache, class Rule>
class UNIPREFILL_HIDDEN query_list_worker {
    using kernels = host_kernels<Build>;
    static_assert(query_group_lanes % kernels::panel == 0 && kernels::keys <= query_spare_keys);

  public:
    query_list_worker(const host_query_problem<T, Cache, Rule>& problem, std::int32_t worker) noexcept
        : p_(problem)
        , step_(problem.step)
        , own_(problem.buffers.of(worker)) {}

    void mark(std::int32_t segment, std::int32_t group, std::int32_t kv_head) noexcept {
        of_ = query_segment_of(step_, segment);
        kv_head_ = kv_head;
        first_block_ = group * step_.group_blocks;
        const std::int32_t left =
            num_blocks(of_.queries.end - of_.queries.begin, step_.query_rows) - first_block_;
        count_ = left < step_.group_blocks ? left : step_.group_blocks;
        if (place_rows()) {
            score();
        }
        for (std::int32_t i = 0; i < count_; ++i) {
            const query_block block = query_block_of(step_, of_, first_block_ + i);
            for (std::int32_t list = 0; list < step_.lists; ++list) {
                decide(block, i, list);
            }
        }
    }

  private:
    /// Where row (sample, head) of query block @p i of the group is.
    [[nodiscard]] std::int32_t lane_of(std::int32_t i, std::int32_t head,
                                       std::int32_t sample) const noexcept {
        return (i * step_.heads + head) * step_.samples + sample;
    }

    /// Packs queries and notes what they see. @return whether there are any
    bool place_rows() noexcept {
        const std::int32_t lanes = p_.buffers.lanes;
        const std::int32_t head_dim = p_.bounds.head_dim;
        used_ = 0;
        least_ = INT32_MAX;
        most_ = 0;
        for (std::int32_t lane = 0; lane < lanes; ++lane) {
            own_.first[lane] = own_.end[lane] = own_.worst[lane] = 0;
            own_.sinks[lane] = no_keys;
        }
        for (std::int32_t i = 0; i < lanes * head_dim; ++i) {
            own_.queries[i] = 0;
        }
        for (std::int32_t i = 0; i < count_; ++i) {
            const query_block block = query_block_of(step_, of_, first_block_ + i);
            for (std::int32_t sample = 0; block.has_choice && sample < block.samples; ++sample) {
                const std::int32_t kept = sampled_row(step_, block, sample);
                const seen_keys seen = seen_by(step_, of_, packed_row_of(step_, of_, kept));
                least_ = seen.first < least_ ? seen.first : least_;
                most_ = seen.end > most_ ? seen.end : most_;
                for (std::int32_t head = 0; head < step_.heads; ++head) {
                    const std::int32_t lane = lane_of(i, head, sample);
                    used_ = lane + 1 > used_ ? lane + 1 : used_;
                    own_.first[lane] = seen.first;
                    own_.end[lane] = seen.end;
                    const std::int32_t query_head = kv_head_ * step_.heads + head;
                    if (p_.scores.sink_logits != nullptr) {
                        own_.sinks[lane] = p_.scores.sink_logits[query_head] * log2_of_e;
                    }
                    const T* row = p_.queries.at(kept, query_head);
                    float* to = own_.queries + lane / kernels::panel * kernels::panel * head_dim +
                                lane % kernels::panel;
                    for (std::int32_t k = 0; k < head_dim; ++k) {
                        to[std::int64_t{k} * kernels::panel] = to_float(row[k]) * p_.scores.factor;
                    }
                }
            }
        }
        return used_ > 0;
    }

    /// Keys are cut into blocks of G, each with its slot: those before the segment from the request's first
    /// on, then its own.
    [[nodiscard]] std::int32_t context_slots() const noexcept {
        return num_blocks(of_.context, step_.block_rows);
    }

    /// What every lane has of a slot, as log2.
    [[nodiscard]] float* partials_of(std::int32_t slot) const noexcept {
        return own_.partials + std::int64_t{slot} * p_.buffers.lanes;
    }

    void score() noexcept {
        const std::int32_t G = step_.block_rows;
        first_slot_ = least_ < of_.context ? least_ / G : context_slots() + (least_ - of_.context) / G;
        end_slot_ = context_slots() + (most_ - of_.context - 1) / G + 1;
        // Sums run over slots as they are numbered, not from the first that the group sees: a row's
        // denominator doesn't hang on its neighbours.
        const auto first_run = static_cast<std::int32_t>(first_slot_ / sum_run * sum_run);
        for (std::int32_t slot = first_run; slot < first_slot_; ++slot) {
            for (std::int32_t lane = 0; lane < used_; lane += kernels::panel) {
                kernels::fill_no_keys(partials_of(slot) + lane);
            }
        }
        for (std::int32_t slot = first_slot_; slot < end_slot_; ++slot) {
            const bool own = slot >= context_slots();
            const std::int32_t begin = own ? of_.context + (slot - context_slots()) * G : slot * G;
            const std::int32_t limit = own ? most_ : of_.context;
            const std::int32_t keys = limit - begin < G ? limit - begin : G;
            read_keys(begin, keys);
            for (std::int32_t lane = 0; lane < used_; lane += kernels::panel) {
                score_panel(slot, begin, keys, lane);
            }
        }
        for (std::int32_t lane = 0; lane < used_; lane += kernels::width) {
            kernels::sum_row(partials_of(first_run) + lane, end_slot_ - first_run, p_.buffers.lanes,
                             p_.scores.sink_logits != nullptr ? own_.sinks + lane : nullptr,
                             own_.reference + lane, own_.inverse_sum + lane);
        }
    }

    void read_keys(std::int32_t begin, std::int32_t count) noexcept {
        const std::int32_t head_dim = p_.bounds.head_dim;
        float* to = own_.keys;
        for (std::int32_t key = begin; key < begin + count; ++key, to += head_dim) {
            if (key < of_.cached) {
                kernels::convert_row(p_.keys.cached.row(of_.request, key, kv_head_), head_dim, to);
            } else {
                kernels::convert_row(p_.keys.rows.at(of_.request_begin + key - of_.cached, kv_head_),
                                     head_dim, to);
            }
        }
        for (std::int32_t i = 0; i < query_spare_keys * head_dim; ++i) {
            to[i] = 0;
        }
    }

    void score_panel(std::int32_t slot, std::int32_t begin, std::int32_t keys, std::int32_t lane) noexcept {
        const std::int32_t head_dim = p_.bounds.head_dim;
        auto unused = kernels::splat(std::int32_t{0});
        for (std::int32_t key = 0; key < keys; key += kernels::keys) {
            unused = kernels::score_tile(own_.queries + std::int64_t{lane} * head_dim,
                                         own_.keys + std::int64_t{key} * head_dim, head_dim,
                                         own_.scores + key * kernels::panel, unused);
        }
        std::int32_t unseen[kernels::panel];
        std::int32_t visible[kernels::panel];
        bool all = true;
        for (std::int32_t i = 0; i < kernels::panel; ++i) {
            unseen[i] = clamped(own_.first[lane + i] - begin, 0, keys);
            visible[i] = clamped(own_.end[lane + i] - begin, 0, keys);
            all = all && unseen[i] == 0 && visible[i] == keys;
        }
        const auto mask = [&] {
            if (!all) {
                kernels::mask(own_.scores, keys, visible);
                kernels::mask_first(own_.scores, keys, unseen);
            }
        };
        mask();
        kernels::note_worst(own_.scores, keys, own_.worst + lane);
        if (p_.scores.softcap > 0) {
            kernels::soft_cap(own_.scores, keys, p_.scores.softcap);
            mask();
        }
        constexpr bool one_part[256] = {};
        kernels::log_sum(own_.scores, keys, one_part, false, partials_of(slot) + lane);
    }

    /// Masses of the candidates, summed over a list's rows. @return whether they can be trusted
    bool weigh(const query_block& block, std::int32_t i, std::int32_t list) noexcept {
        const std::int32_t heads = step_.heads / step_.lists;
        const std::int32_t begin = lane_of(i, list * heads, 0);
        const std::int32_t end = lane_of(i, list * heads + heads, 0);
        bool sound = true;
        for (std::int32_t lane = begin; lane < end; ++lane) {
            sound = sound && own_.worst[lane] < 0x7f800000;
        }
        const std::int32_t from = begin / kernels::width * kernels::width;
        const auto one = static_cast<float>(std::int64_t{1}
                                            << query_mass_format(step_.samples, step_.heads).fraction_bits);
        for (std::int32_t b = block.candidate_begin; sound && b < block.candidate_end; ++b) {
            std::int64_t mass = 0;
            const std::int32_t slot = context_slots() + b;
            if (slot >= first_slot_) {
                const float* partials = partials_of(slot);
                for (std::int32_t lane = from; lane < end; lane += kernels::width) {
                    kernels::store_shares(partials + lane, own_.reference + lane, own_.inverse_sum + lane,
                                          one, own_.shares + lane);
                }
                for (std::int32_t lane = begin; lane < end; ++lane) {
                    const bool is_row = (lane - begin) % step_.samples < block.samples;
                    mass += is_row ? static_cast<std::int64_t>(own_.shares[lane]) : 0;
                }
            }
            own_.masses[b] = mass;
        }
        return sound;
    }

    void decide(const query_block& block, std::int32_t i, std::int32_t list) noexcept {
        const query_list_marks& marks = p_.buffers.marks;
        const std::int64_t number = block.place * step_.list_heads() + kv_head_ * step_.lists + list;
        if (!block.has_choice) {
            marks.lengths[number] = query_list_marks::no_choice;
            return;
        }
        const std::int32_t candidates = block.candidate_end - block.candidate_begin;
        ranked_blocks ranked;
        bool sound = weigh(block, i, list);
        if (sound) {
            for (std::int32_t b = 0; b < candidates; ++b) {
                own_.ranks.free_rows[b] = 1;
            }
            sound = rank_blocks({own_.masses + block.candidate_begin, nullptr, mass_scope::free}, candidates,
                                p_.options.rule.ties, own_.ranks, ranked);
        }
        if (!sound || ranked.total == 0) {
            marks.lengths[number] = query_list_marks::untrusted;
            return;
        }
        const Rule& rule = p_.options.rule;
        const std::int32_t wanted = rule.exact_rows() > 0 ? ranked.count : rule.keep_count(ranked);
        const std::int32_t chosen = bounded_blocks(rule, wanted, ranked.count, step_.block_rows);
        std::uint32_t* const bits = marks.bits_of(number);
        for (std::int32_t word = 0; word * 32 < block.blocks; ++word) {
            bits[word] = 0;
        }
        for (std::int32_t b = 0; b < block.sink_blocks; ++b) {
            bits[b / 32] |= std::uint32_t{1} << b % 32;
        }
        std::int32_t length = block.sink_blocks;
        for (std::int32_t k = 0; k < chosen; ++k) {
            const std::int32_t b = block.candidate_begin + own_.ranks.order[k];
            length += b >= block.sink_blocks ? 1 : 0;
            bits[b / 32] |= std::uint32_t{1} << b % 32;
        }
        marks.lengths[number] = length;
    }

    const host_query_problem<T, Cache, Rule>& p_;
    const query_list_step& step_;
    query_worker_buffers own_;
    query_segment of_{};
    std::int32_t kv_head_ = 0;
    std::int32_t first_block_ = 0; ///< of the group
    std::int32_t count_ = 0;       ///< query blocks of the group
    std::int32_t used_ = 0;        ///< lanes up to the last one with a row
    std::int32_t least_ = 0;       ///< keys that any row sees
    std::int32_t most_ = 0;
    std::int32_t first_slot_ = 0; ///< that was scored
    std::int32_t end_slot_ = 0;
};

/// Threads that are worth waking: with less work than this for each (some 0.1 ms) waiting for them takes
/// longer.
/// @param pairs of sampled rows and keys, for each of @p num_heads query heads
[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int64_t
useful_query_workers(std::int64_t pairs, std::int32_t num_heads, std::int32_t head_dim) noexcept {
    constexpr std::int64_t work_of_a_worker = std::int64_t{1} << 22;
    return pairs * num_heads / (work_of_a_worker / head_dim) + 1;
}

/// Marks the lists of all query blocks, spread over threads; the last are begun first, as they see most.
template <std::int32_t Build, class T, class Cache, class Rule>
UNIPREFILL_HOST_API void mark_query_lists(const host_query_problem<T, Cache, Rule>& problem) noexcept {
    const query_list_step& step = problem.step;
    const host_query_buffers& buffers = problem.buffers;
    const batch_view& batch = step.batch;
    for (std::int64_t list = 0; list < step.num_lists(); ++list) {
        buffers.marks.lengths[list] = 0;
    }
    std::int64_t units = 0;
    std::int64_t pairs = 0;
    for (std::int32_t segment = 0; segment < batch.num_segments; ++segment) {
        const query_segment of = query_segment_of(step, segment);
        units += std::int64_t{groups_of(step, segment)} * step.num_kv_heads;
        pairs += (std::int64_t{of.context} + of.rows) * (of.queries.end - of.queries.begin) / step.sample;
        buffers.ends[segment] = units; // NOLINT(clang-analyzer-core.NullDereference): carved by run()
    }
    const auto work = [&](std::int32_t number) {
        query_list_worker<Build, T, Cache, Rule> worker(problem, number);
#if defined(_OPENMP)
#    pragma omp for schedule(dynamic)
#endif
        for (std::int64_t i = 0; i < units; ++i) {
            const std::int64_t unit = units - 1 - i;
            std::int32_t segment = 0;
            std::int32_t last = batch.num_segments - 1;
            while (segment < last) {
                const std::int32_t middle = segment + (last - segment) / 2;
                if (buffers.ends[middle] > unit) {
                    last = middle;
                } else {
                    segment = middle + 1;
                }
            }
            const std::int64_t within = unit - (segment > 0 ? buffers.ends[segment - 1] : 0);
            worker.mark(segment, static_cast<std::int32_t>(within / step.num_kv_heads),
                        static_cast<std::int32_t>(within % step.num_kv_heads));
        }
    };
#if defined(_OPENMP)
    const std::int64_t useful =
        useful_query_workers(pairs, problem.bounds.num_heads, problem.bounds.head_dim);
    const std::int64_t wanted = omp_get_max_threads() < useful ? omp_get_max_threads() : useful;
    const int threads = static_cast<int>(wanted < buffers.workers ? wanted : buffers.workers);
#    pragma omp parallel num_threads(threads)
    work(omp_get_thread_num());
#else
    static_cast<void>(pairs);
    work(0);
#endif
}

/// Writes the lists that are marked. O(list entries + lists * blocks / 32).
inline UNIPREFILL_HOST_API void write_query_lists(const query_list_step& step, const query_list_marks& marks,
                                                  const block_lists& out) noexcept {
    block_list_report report;
    const std::int64_t lists = step.num_lists();
    for (std::int64_t list = 0; list < lists; ++list) {
        const std::int32_t length = marks.lengths[list];
        const bool unfitting = marks.is_unfitting(length, report.wanted);
        out.offsets[list] = marks.offset(length, report.wanted);
        report.untrusted += length == query_list_marks::untrusted ? 1 : 0;
        report.unfitting += unfitting ? 1 : 0;
        if (length > 0 && !unfitting) {
            std::int32_t* to = out.blocks + report.wanted;
            std::int32_t* const end = to + length;
            const std::uint32_t* const bits = marks.bits_of(list);
            for (std::int32_t b = 0; to != end; ++b) {
                if ((bits[b / 32] >> b % 32 & 1u) != 0) {
                    *to++ = b;
                }
            }
        }
        report.wanted += length > 0 ? length : 0;
    }
    out.offsets[lists] = marks.offset(0, report.wanted);
    if (out.report != nullptr) {
        *out.report = report;
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
