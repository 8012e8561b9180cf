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

/// Threads of the thread blocks that decide large segments, and that write.
inline constexpr std::int32_t select_threads = 512;
/// Threads of those that decide small ones: as many as collect every block of a segment.
inline constexpr std::int32_t small_select_threads = 128;

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
    std::int32_t lone_blocks = 0;        ///< segments of up to this many blocks are decided without clusters
};

struct at_once_memory {
    writer_memory<select_threads> work; // its team decides
    segment_verdict verdicts[max_segments_at_once];
};
static_assert(sizeof(at_once_memory) <= 48 * 1024, "more needs a permission for each function and device");

/// Every cluster decides all segments for itself, then writes its own stretch of rows. No thread block waits
/// for one of another cluster.
template <class Rule>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads, 1)
    select_at_once(const __grid_constant__ selector_call<Rule> call) {
    alignas(16) __shared__ unsigned char storage[sizeof(at_once_memory)];
    auto& memory = *reinterpret_cast<at_once_memory*>(storage);
    block_team<select_threads>::clear(memory.work.team);
    row_writer<select_threads>::clear(memory.work);
    let_next_kernel_start();
    block_team<select_threads> team(memory.work.team);
    team.together();
    team.sync(); // all must have started before anybody looks at another's shared memory
    wait_for_previous_kernel();
#pragma unroll 1
    for (std::int32_t s = 0; s < call.step.batch.num_segments; ++s) {
        const segment_verdict verdict = team_decision(team, call.step, call.rules, call.buffers, s).run();
        if (threadIdx.x == 0) {
            memory.verdicts[s] = verdict;
        }
    }
    team.alone();
    __syncthreads();
    row_writer(call.step, call.out, memory.verdicts, memory.work).run(team);
}

/// Decides all segments, each once.
template <class Rule, std::int32_t Threads>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(Threads)
    decide_segments(const __grid_constant__ selector_call<Rule> call) {
    alignas(16) __shared__ unsigned char storage[sizeof(block_team_memory<Threads>)];
    auto& memory = *reinterpret_cast<block_team_memory<Threads>*>(storage);
    block_team<Threads>::clear(memory);
    let_next_kernel_start();
    block_team<Threads> team(memory);
    const std::int32_t ctas = cluster_ctas();
    team.together();
    team.sync();
    wait_for_previous_kernel();
    // With clusters, first the large segments, each by a cluster.
#pragma unroll 1
    for (std::int32_t together = ctas > 1 ? 1 : 0; together >= 0; --together) {
        const auto stride = static_cast<std::int32_t>(gridDim.x) / (together != 0 ? ctas : 1);
        auto s = static_cast<std::int32_t>(blockIdx.x) / (together != 0 ? ctas : 1);
#pragma unroll 1
        for (; s < call.step.batch.num_segments; s += stride) {
            const std::int32_t blocks =
                call.step.block.blocks(rows_of_segment(call.step.batch, s).size());
            if (ctas == 1 || (blocks > call.lone_blocks) == (together != 0)) {
                const segment_verdict verdict =
                    team_decision(team, call.step, call.rules, call.buffers, s).run();
                if (team.rank() == 0) {
                    call.verdicts[s] = verdict;
                }
            }
        }
        team.sync(); // nobody leaves, or goes on alone, while others look at its shared memory
        team.alone();
    }
}

/// Writes the rows that verdicts keep.
template <class = void>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(select_threads)
    write_selection(const __grid_constant__ step_view step, const __grid_constant__ selection_arrays out,
                    const segment_verdict* verdicts) {
    alignas(16) __shared__ unsigned char storage[sizeof(writer_memory<select_threads>)];
    auto& memory = *reinterpret_cast<writer_memory<select_threads>*>(storage);
    block_team<select_threads>::clear(memory.team);
    row_writer<select_threads>::clear(memory);
    __syncthreads();
    let_next_kernel_start();
    wait_for_previous_kernel();
    block_team<select_threads> team(memory.team);
    row_writer(step, out, verdicts, memory).run(team);
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
