// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernels of the selector: everything at once, or decisions first and rows after them.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/detail/cuda_write_rows.cuh>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Threads of a thread block.
inline constexpr std::int32_t select_threads = 512;
/// Threads of those that decide small segments.
inline constexpr std::int32_t small_select_threads = 128;

/// Segments of up to this many blocks are decided by a thread block for itself even where there are clusters.
inline constexpr std::int32_t lone_blocks = 8192;

/// What the kernels are given.
template <class Rule>
struct selector_call {
    step_view step{};
    selection_arrays out{};
    const Rule* rules = nullptr;
    sort_buffers buffers{}; ///< for rules of one's own
    // Not used at once.
    segment_verdict* verdicts = nullptr; // [num_segments]
    block_place* places = nullptr;       // [blocks of all segments] laid out by block_offset()
};

/// The team that decides and writes at once.
template <bool Clustered>
using team_at_once = block_team<select_threads, Clustered>;

/// What select_at_once() does where the step is not the common case. Out of its way: instructions that lie
/// between those of the common case would be fetched too.
template <class Rule, bool Clustered>
__device__ UNIPREFILL_HIDDEN __noinline__ void
select_otherwise(const selector_call<Rule>& call, typename team_at_once<Clustered>::memento state) {
    using team_type = team_at_once<Clustered>;
    auto& memory = shared_memory<writer_memory<team_type>>();
    team_type team(memory.team);
    team.go_on(state);
    team_decision<team_type, Rule> decision(team, call.step, call.rules, call.buffers, 0);
    const segment_verdict verdict = decision.run();
    row_writer<team_type>(call.step, call.out, memory).run_alone(team, decision, verdict);
}

/// Every thread block, or every cluster, decides the only segment for itself, then writes its own stretch of
/// rows. None waits for another.
template <class Rule, bool Clustered>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads, Clustered ? 2 : 1) // 16 clusters must fit
    select_at_once(const __grid_constant__ selector_call<Rule> call) {
    using team_type = team_at_once<Clustered>;
    auto& memory = shared_memory<writer_memory<team_type>>();
    team_type::clear(memory.team);
    team_type team(memory.team);
    team.together();
    team.meet();
    let_next_kernel_start();
    wait_for_previous_kernel();
    quick_decision<team_type, true> decision(team, call.step, call.rules, 0);
    row_writer<team_type> writer(call.step, call.out, memory);
    auto first = writer.load_first();
    team.have_met();
    if (UNIPREFILL_LIKELY(
            decision.run(writer.stretch(), [&] { writer.look_at_first(decision.blocks(), first); }))) {
        writer.run_quickly(decision, first);
    } else {
        select_otherwise<Rule, Clustered>(call, team.remembered());
    }
}

/// Tells the places of blocks @p begin to @p end - 1 in a segment, and beyond its last block that there are
/// none. @p place: of the first one. @p place_of(block): what becomes of a block.
template <class Team, class Place>
__device__ UNIPREFILL_HIDDEN void write_places(Team& team, std::int32_t count, std::int32_t begin,
                                               std::int32_t end, std::int32_t place, block_place* out,
                                               Place place_of) {
#pragma unroll 1
    for (std::int32_t from = begin; from < end; from += Team::near_size()) {
        const std::int32_t block = from + Team::near_rank();
        block_place held;
        if (block < count && block < end) {
            held = place_of(block);
        }
        std::uint32_t kept = 0;
        held.place = place + static_cast<std::int32_t>(team.prefix(held.kept, kept)) - held.kept;
        place += static_cast<std::int32_t>(kept);
        if (block < end) {
            out[block] = held;
        }
    }
}

/// A segment that is to be decided, and the blocks of it whose places this thread block tells.
struct segment_part {
    std::int32_t segment = 0;
    std::int32_t end = 0; ///< of the part
    block_stretch stretch{};
    block_place* places = nullptr; ///< of the segment
};

/// Decides a segment that isn't the common case. @return what the team remembers then
template <class Rule, class Team>
__device__ UNIPREFILL_HIDDEN __noinline__ typename Team::memento
decide_otherwise(const selector_call<Rule>& call, segment_part part, typename Team::memento state) {
    Team team(shared_memory<typename Team::memory>());
    team.go_on(state);
    team_decision<Team, Rule> decision(team, call.step, call.rules, call.buffers, part.segment);
    const segment_verdict verdict = decision.run();
    if (team.rank() == 0) {
        call.verdicts[part.segment] = verdict;
    }
    const segment_blocks blocks = decision.blocks();
    std::int32_t place = 0;
    if (part.stretch.ctas > 1) {
        team.sync(); // others may still look at this thread block's sums
        team.alone();
        held_blocks<Team> held;
        tally mine;
        mine.rows = kept_rows_before(team, blocks, held, verdict, part.stretch.own);
        place = static_cast<std::int32_t>(team.combine(mine, false).rows);
        team.together();
    }
    write_places(team, blocks.count, part.stretch.own, part.end, place, part.places,
                 [&](std::int32_t block) { return place_of(part.segment, blocks, verdict, block); });
    return team.remembered();
}

/// Decides a segment.
template <class Rule, class Team>
__device__ UNIPREFILL_HIDDEN void decide(const selector_call<Rule>& call, const segment_part& part,
                                         Team& team) {
    if constexpr (std::is_same_v<Rule, selection_rule>) {
        quick_decision<Team, false> decision(team, call.step, call.rules, part.segment);
        if (UNIPREFILL_LIKELY(decision.run(part.stretch, [] {}))) {
            if (team.rank() == 0) {
                call.verdicts[part.segment] = decision.verdict();
            }
            const segment_blocks& blocks = decision.blocks();
            write_places(team, blocks.count, part.stretch.own, part.end, decision.place(), part.places,
                         [&](std::int32_t block) {
                             const row_range rows = blocks.rows_of(block);
                             const std::int32_t kept = rows.size() - decision.rows_that_go(block);
                             return block_place{rows.begin, 0, part.segment,
                                                static_cast<std::uint16_t>(rows.size()),
                                                static_cast<std::uint16_t>(kept)};
                         });
            return;
        }
    }
    team.go_on(decide_otherwise<Rule, Team>(call, part, team.remembered()));
}

/// Decides all segments, each once: large ones by clusters where there are any.
template <class Rule, std::int32_t Threads, bool Clustered>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(Threads)
    decide_segments(const __grid_constant__ selector_call<Rule> call) {
    using team_type = block_team<Threads, Clustered>;
    auto& memory = shared_memory<typename team_type::memory>();
    team_type::clear(memory);
    let_next_kernel_start();
    team_type team(memory);
    team.together();
    team.sync();
    wait_for_previous_kernel();
    const std::int32_t ctas = cluster_ctas();
#pragma unroll 1
    for (std::int32_t together = Clustered ? 1 : 0; together >= 0; --together) {
        const auto stride = static_cast<std::int32_t>(gridDim.x) / (together != 0 ? ctas : 1);
        segment_part part;
        part.segment = static_cast<std::int32_t>(blockIdx.x) / (together != 0 ? ctas : 1);
#pragma unroll 1
        for (; part.segment < call.step.batch.num_segments; part.segment += stride) {
            const row_range rows = rows_of_segment(call.step.batch, part.segment);
            const std::int64_t offset = call.step.block.offset(part.segment, rows.begin);
            const auto entries =
                static_cast<std::int32_t>(call.step.block.offset(part.segment + 1, rows.end) - offset);
            if (Clustered && (entries - 1 > lone_blocks) != (together != 0)) {
                continue;
            }
            part.places = call.places + offset;
            part.end = entries;
            part.stretch = {};
            if (Clustered && together != 0) { // a power of two of blocks for each
                const std::int32_t bits = bit_length(static_cast<std::uint32_t>((entries - 1) / ctas));
                part.stretch.ctas = ctas;
                part.stretch.size = {1 << bits, 31 + bits, 1u << 31};
                const std::int64_t own = std::int64_t{rank_in_cluster()} << bits;
                part.stretch.own = static_cast<std::int32_t>(own < entries ? own : entries);
                part.end =
                    static_cast<std::int32_t>(own + (1 << bits) < entries ? own + (1 << bits) : entries);
            }
            decide(call, part, team);
        }
        team.sync_cluster(); // nobody leaves, or goes on alone, while others look at its shared memory
        team.alone();
    }
}

/// Writes the rows that verdicts keep.
template <class = void>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads)
    write_selection(const __grid_constant__ step_view step, const __grid_constant__ selection_arrays out,
                    const segment_verdict* verdicts, const block_place* places) {
    using team_type = block_team<select_threads, false>;
    auto& memory = shared_memory<writer_memory<team_type>>();
    let_next_kernel_start();
    wait_for_previous_kernel();
    row_writer<team_type>(step, out, memory).run(verdicts, places);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
