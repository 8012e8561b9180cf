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

#ifndef AO_THREADS
#    define AO_THREADS 512
#endif
inline constexpr std::int32_t at_once_threads = AO_THREADS;
/// Threads of a thread block.
inline constexpr std::int32_t select_threads = 512;
/// Threads of those that decide small segments: as many as collect every block of a segment.
inline constexpr std::int32_t small_select_threads = 128;

/// Segments of up to this many blocks are decided by a thread block for itself even where there are clusters.
inline constexpr std::int32_t lone_blocks = 4096;

/// What the kernels are given.
template <class Rule>
struct selector_call {
    step_view step{};
    selection_arrays out{};
    const Rule* rules = nullptr;
    sort_buffers buffers{};              ///< for rules of one's own
    segment_verdict* verdicts = nullptr; ///< [num_segments], not used at once
};

/// What a thread block shares that decides and writes.
template <bool Clustered>
struct at_once_memory {
    using team = block_team<Clustered ? select_threads : at_once_threads, Clustered>;

    writer_memory<team> work; // its team decides
    segment_verdict verdict;
};
static_assert(sizeof(at_once_memory<true>) <= 48 * 1024,
              "more needs a permission for each function and device");

/// What select_at_once() does where the step is not the common case. Out of its way: instructions that lie
/// between those of the common case would be fetched too.
template <class Rule, bool Clustered>
__device__ UNIPREFILL_HIDDEN __noinline__ void
select_otherwise(const selector_call<Rule>& call, at_once_memory<Clustered>& memory,
                 typename at_once_memory<Clustered>::team team) {
    using team_type = typename at_once_memory<Clustered>::team;
    team_decision<team_type, Rule> decision(team, call.step, call.rules, call.buffers, 0);
    const segment_verdict verdict = decision.run();
    if (threadIdx.x == 0) {
        memory.verdict = verdict;
    }
    row_writer<team_type> writer(call.step, call.out, &memory.verdict, memory.work);
    writer.find_stretch();
    tally mine;
    mine.rows = decision.kept_before(writer.blocks_before_cluster(0));
    team.alone();
    mine.blocks = threadIdx.x == 0 ? static_cast<std::uint32_t>(verdict.kept) : 0;
    mine.bits = writer.find_disorder();
    writer.run(team, mine, 0);
}

/// Every thread block, or every cluster, decides the only segment for itself, then writes its own stretch of
/// rows. None waits for another.
template <class Rule, bool Clustered>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(Clustered ? select_threads : at_once_threads,
                                                    Clustered ? 2 : 1)
    select_at_once(const __grid_constant__ selector_call<Rule> call) {
    using team_type = typename at_once_memory<Clustered>::team;
    alignas(16) __shared__ unsigned char storage[sizeof(at_once_memory<Clustered>)];
    auto& memory = *reinterpret_cast<at_once_memory<Clustered>*>(storage);
    team_type::clear(memory.work.team);
    let_next_kernel_start();
    wait_for_previous_kernel();
    team_type team(memory.work.team);
    team.together();
    quick_decision<team_type, true> decision(team, call.step, call.rules, 0);
    row_writer<team_type> writer(call.step, call.out, &memory.verdict, memory.work);
    const std::uint64_t mass = writer.first_mass();
    __syncthreads();
    if (UNIPREFILL_LIKELY(decision.run(writer.stretch()))) {
        writer.run_quickly(team, decision, mass);
    } else {
        select_otherwise(call, memory, team);
    }
}

/// Decides a segment that isn't the common case. @return the team as it is then
template <class Rule, class Team>
__device__ UNIPREFILL_HIDDEN __noinline__ Team decide_otherwise(const selector_call<Rule>& call,
                                                                std::int32_t segment, Team team,
                                                                segment_verdict* verdict) {
    *verdict = team_decision<Team, Rule>(team, call.step, call.rules, call.buffers, segment).run();
    return team;
}

/// Decides a segment.
template <class Rule, class Team>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN segment_verdict decide(const selector_call<Rule>& call,
                                                                  std::int32_t segment, Team& team) {
    if constexpr (std::is_same_v<Rule, selection_rule>) {
        quick_decision<Team, false> decision(team, call.step, call.rules, segment);
        if (UNIPREFILL_LIKELY(decision.run({}))) {
            return decision.verdict();
        }
    }
    segment_verdict other;
    team = decide_otherwise(call, segment, team, &other);
    return other;
}

/// Decides all segments, each once: large ones by clusters where there are any.
template <class Rule, std::int32_t Threads, bool Clustered>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(Threads)
    decide_segments(const __grid_constant__ selector_call<Rule> call) {
    using team_type = block_team<Threads, Clustered>;
    alignas(16) __shared__ unsigned char storage[sizeof(typename team_type::memory)];
    auto& memory = *reinterpret_cast<typename team_type::memory*>(storage);
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
        auto s = static_cast<std::int32_t>(blockIdx.x) / (together != 0 ? ctas : 1);
#pragma unroll 1
        for (; s < call.step.batch.num_segments; s += stride) {
            const std::int32_t blocks = call.step.block.blocks(rows_of_segment(call.step.batch, s).size());
            if (!Clustered || (blocks > lone_blocks) == (together != 0)) {
                const segment_verdict verdict = decide(call, s, team);
                if (team.rank() == 0) {
                    call.verdicts[s] = verdict;
                }
            }
        }
        team.sync_cluster(); // nobody leaves, or goes on alone, while others look at its shared memory
        team.alone();
    }
}

/// Writes the rows that verdicts keep.
template <bool Clustered>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads)
    write_selection(const __grid_constant__ step_view step, const __grid_constant__ selection_arrays out,
                    const segment_verdict* verdicts) {
    using team_type = block_team<select_threads, Clustered>;
    alignas(16) __shared__ unsigned char storage[sizeof(writer_memory<team_type>)];
    auto& memory = *reinterpret_cast<writer_memory<team_type>*>(storage);
    team_type::clear(memory.team);
    row_writer<team_type>::clear(memory);
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    team_type team(memory.team);
    row_writer<team_type> writer(step, out, verdicts, memory);
    std::int32_t segment = 0;
    const tally mine = writer.count_kept(team, segment);
    writer.run(team, mine, segment);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
