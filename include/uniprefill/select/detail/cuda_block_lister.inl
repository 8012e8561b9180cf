// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/select/detail/check_arguments.hpp>
#include <uniprefill/select/detail/cuda_block_team.cuh>
#include <uniprefill/select/detail/list_decision.hpp>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Threads of a thread block that decides a list, or writes some.
inline constexpr std::int32_t list_threads = 512;
/// Threads of those that decide short lists.
inline constexpr std::int32_t short_list_threads = 128;

/// What the deciding kernel is given.
template <class Rule>
struct lister_call {
    list_step step{};
    Rule rule{};
    sort_buffers buffers{}; ///< for rules of one's own
};

/// Decides all lists, one after the other for each thread block.
template <class Rule, std::int32_t Threads>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(Threads)
    decide_lists(const __grid_constant__ lister_call<Rule> call) {
    using team_type = block_team<Threads, false>;
    auto& memory = shared_memory<typename team_type::memory>();
    team_type::clear(memory);
    let_next_kernel_start();
    team_type team(memory);
    team.sync();
    wait_for_previous_kernel();
    step_order order;
#pragma unroll 1
    for (auto list = static_cast<std::int32_t>(blockIdx.x); list < call.step.num_lists();
         list += static_cast<std::int32_t>(gridDim.x)) {
        list_decision<team_type, Rule>(team, call.step, call.rule, call.buffers, list).run(order);
    }
}

/// A thread block that writes lists.
template <std::int32_t Threads>
class list_writer_team {
  public:
    struct memory {
        std::uint32_t of_warps[32];
        std::int64_t sums[32];
    };

    __device__ UNIPREFILL_HIDDEN explicit list_writer_team(memory& shared)
        : shared_(shared) {}
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static std::int32_t rank() {
        return static_cast<std::int32_t>(threadIdx.x);
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN static constexpr std::int32_t size() { return Threads; }
    /// Once in a kernel.
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::int64_t sum(std::int64_t mine) const {
        const unsigned lane = threadIdx.x % 32;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            mine += __shfl_xor_sync(~0u, mine, step);
        }
        if (lane == 0) {
            shared_.sums[threadIdx.x / 32] = mine;
        }
        __syncthreads();
        std::int64_t all = lane < Threads / 32 ? shared_.sums[lane] : 0;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            all += __shfl_xor_sync(~0u, all, step);
        }
        return all;
    }
    [[nodiscard]] __device__ UNIPREFILL_HIDDEN std::uint32_t prefix(std::uint32_t mine,
                                                                    std::uint32_t& total) const {
        __syncthreads(); // others may still read the last ones
        return block_prefix<Threads>(mine, threadIdx.x / 32, shared_.of_warps, total);
    }

  private:
    memory& shared_;
};

/// Writes the lists that have been decided, a few for each thread block.
template <class = void>
__global__ UNIPREFILL_HIDDEN void __launch_bounds__(list_threads)
    write_decided_lists(const __grid_constant__ list_step step, const list_arrays out,
                        std::int32_t lists_of_cta) {
    using team_type = list_writer_team<list_threads>;
    let_next_kernel_start();
    wait_for_previous_kernel();
    team_type team(shared_memory<typename team_type::memory>());
    const std::int64_t first = std::int64_t{blockIdx.x} * lists_of_cta;
    const std::int32_t lists = step.num_lists();
    write_lists(team, step, out, static_cast<std::int32_t>(first < lists ? first : lists),
                static_cast<std::int32_t>(first + lists_of_cta < lists ? first + lists_of_cta : lists));
}

/// The pieces of a workspace.
struct cuda_list_buffers {
    std::int32_t* lengths = nullptr;
    std::uint8_t* marks = nullptr;
    sort_buffers sorting{};

    [[nodiscard]] static UNIPREFILL_HOST_API cuda_list_buffers carve(workspace& memory, const limits& bounds,
                                                                     bool sorts) noexcept {
        cuda_list_buffers made;
        made.lengths = memory.take<std::int32_t>(std::int64_t{bounds.max_segments} * bounds.num_heads);
        made.marks = memory.take<std::uint8_t>(bounds.max_blocks() * bounds.num_heads);
        if (sorts) {
            made.sorting = sort_buffers::carve(memory, bounds.max_blocks() * bounds.num_heads);
        }
        return made;
    }
};

} // namespace detail

template <class Rule>
UNIPREFILL_HOST_API std::size_t block_lister<Rule, backend::cuda>::workspace_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(
        detail::cuda_list_buffers::carve(counting, bounds_, !std::is_same_v<Rule, selection_rule>));
    return counting.bytes_used();
}

template <class Rule>
UNIPREFILL_HOST_API status block_lister<Rule, backend::cuda>::run(
    const head_mass_view& per_head, const std::int64_t* faults, const batch_view& batch,
    const list_options<Rule>& options, block_lists& out, workspace memory,
    backend::cuda::stream stream) const noexcept {
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(detail::check_device_segments(batch, bounds_));
    UNIPREFILL_TRY(validate(options));
    UNIPREFILL_TRY(detail::check_lists(out, bounds_, memory_space::device));
    const std::int64_t blocks = std::int64_t{batch.num_rows} / bounds_.block_rows + batch.num_segments;
    const std::int64_t lists = std::int64_t{batch.num_segments} * out.num_heads;
    if (batch.num_segments > 0) {
        UNIPREFILL_TRY(detail::check_head_masses(per_head, bounds_, blocks));
        if (faults == nullptr) {
            return failure(status_code::invalid_argument, "faults", "an array, not a null pointer", 0);
        }
        if (lists >= std::int64_t{1} << 30) {
            return failure(status_code::out_of_range, "batch.num_segments", "fewer than 2^30 lists", lists);
        }
    }
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    constexpr bool sorts = !std::is_same_v<Rule, selection_rule>;
    workspace pieces(memory.data(), memory.bytes());
    const auto buffers = detail::cuda_list_buffers::carve(pieces, bounds_, sorts);
    detail::lister_call<Rule> call;
    call.rule = options.rule;
    call.buffers = buffers.sorting;
    detail::list_step& step = call.step;
    step.batch = batch;
    step.free_mass = per_head.free;
    step.forced_mass = per_head.forced;
    step.head_stride = per_head.head_stride;
    step.faults = faults;
    step.block = detail::block_size::of(bounds_.block_rows);
    step.max_spans = bounds_.max_forced_spans;
    step.sink = options.sink;
    step.num_heads = out.num_heads;
    step.group = bounds_.num_heads / out.num_heads;
    step.max_blocks = bounds_.max_blocks();
    step.lengths = buffers.lengths;
    step.marks = buffers.marks;

    const auto ctas_for = [&](std::int32_t of_multiprocessor) {
        const std::int32_t most = device_.ctas(of_multiprocessor);
        return lists < most ? static_cast<std::int32_t>(lists) : most;
    };
    if (lists > 0) {
        const bool is_short = !sorts && blocks / batch.num_segments <= detail::short_list_threads + 1;
        const std::int32_t threads = is_short ? detail::short_list_threads : detail::list_threads;
        const auto kernel = is_short ? &detail::decide_lists<Rule, detail::short_list_threads>
                                     : &detail::decide_lists<Rule, detail::list_threads>;
        UNIPREFILL_TRY(detail::launch(device_, kernel,
                                      dim3(static_cast<unsigned>(ctas_for(is_short ? 5 : 1))),
                                      dim3(static_cast<unsigned>(threads)), 0, stream, call));
    }
    const std::int32_t most = lists > 0 ? ctas_for(4) : 1;
    const auto lists_of_cta = static_cast<std::int32_t>((lists + most - 1) / most);
    UNIPREFILL_TRY(detail::launch(device_, &detail::write_decided_lists<>, dim3(static_cast<unsigned>(most)),
                                  dim3(detail::list_threads), 0, stream, step,
                                  detail::list_arrays{out.offsets, out.blocks, out.capacity}, lists_of_cta));
    out.window = options.window;
    out.num_segments = batch.num_segments;
    return success();
}

UNIPREFILL_END_NAMESPACE
