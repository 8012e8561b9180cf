// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The kernels of the selector: everything at once, or decisions first and rows after them.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/detail/cuda_write_rows.cuh>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Threads of the thread blocks that do everything at once: the fewer, the sooner is done what all of them do
/// alike.
inline constexpr std::int32_t at_once_threads = 256;
/// Threads of those that only decide, or only write.
inline constexpr std::int32_t select_threads = 512;
/// Threads of those that decide small ones: as many as collect every block of a segment.
inline constexpr std::int32_t small_select_threads = 128;

/// Segments of up to this many blocks are decided by a thread block for itself even where there are clusters.
inline constexpr std::int32_t lone_blocks = 4096;

/// Segments of a step that is decided and written in one launch, whose verdicts lie in shared memory.
inline constexpr std::int32_t max_segments_at_once = 256;

/// What the kernels are given.
template <class Rule>
struct selector_call {
    step_view step{};
    selection_arrays out{};
    const Rule* rules = nullptr;
    sort_buffers buffers{};              ///< for rules of one's own
    segment_verdict* verdicts = nullptr; ///< [num_segments], not used at once
};

struct at_once_memory {
    using team = block_team<at_once_threads, false>;

    writer_memory<team> work; // its team decides
    segment_verdict verdicts[max_segments_at_once];
};
static_assert(sizeof(at_once_memory) <= 48 * 1024, "more needs a permission for each function and device");

/// Every thread block decides all segments for itself, then writes its own stretch of rows. None waits for
/// another.
template <class Rule>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(at_once_threads, 1)
    select_at_once(const __grid_constant__ selector_call<Rule> call) {
    using team_type = at_once_memory::team;
    alignas(16) __shared__ unsigned char storage[sizeof(at_once_memory)];
    auto& memory = *reinterpret_cast<at_once_memory*>(storage);
    team_type::clear(memory.work.team);
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    team_type team(memory.work.team);
    row_writer<team_type> writer(call.step, call.out, memory.verdicts, memory.work);
    tally mine;
    std::int32_t segment = 0;
#pragma unroll 1
    for (std::int32_t s = 0; s < call.step.batch.num_segments; ++s) {
        team_decision<team_type, Rule> decision(team, call.step, call.rules, call.buffers, s);
        const segment_verdict verdict = decision.run();
        if (s == 0) {
            writer.find_stretch();
        }
        mine.rows += decision.kept_before(writer.blocks_before_cluster(s));
        segment = writer.blocks_before(s) >= 0 ? s : segment;
        if (threadIdx.x == 0) {
            memory.verdicts[s] = verdict;
            mine.blocks += static_cast<std::uint32_t>(verdict.kept);
        }
    }
    mine.bits = writer.find_disorder();
    writer.run(team, mine, segment);
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
                const segment_verdict verdict =
                    team_decision<team_type, Rule>(team, call.step, call.rules, call.buffers, s).run();
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
