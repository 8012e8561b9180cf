// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The CUDA estimator's plan, denominators and masses, run by one thread that takes the part of every thread
/// of every thread block in turn. Between plan and denominators, somebody has to write the partials.
#pragma once

#include "estimate.hpp"

#include <uniprefill/importance/detail/block_masses.hpp>
#include <uniprefill/importance/detail/denominators.hpp>
#include <uniprefill/importance/detail/segment_plan.hpp>

#include <array>
#include <cstdint>
#include <vector>

namespace importance_test {

namespace detail = uniprefill::detail;

/// A warp of one lane, as detail::mass_adder asks for it.
struct one_lane {
    static constexpr std::int32_t size = 1;
    [[nodiscard]] std::int32_t rank() const { return 0; }
    [[nodiscard]] std::int32_t first(bool mine) const { return mine ? 0 : -1; }
    [[nodiscard]] std::int64_t sum(std::int64_t mine) const { return mine; }
};

class serial_estimator {
  public:
    /// @param batch, and what it views, must outlive this
    serial_estimator(const up::limits& bounds, const up::batch_view& batch, const detail::cuda_tiling& tiling)
        : memory_(workspace_bytes(bounds)) {
        up::workspace carved(memory_.data(), workspace_bytes(bounds));
        plan_.bounds = bounds;
        plan_.batch = batch;
        plan_.tiling = tiling;
        plan_.buffers =
            detail::cuda_buffers::carve(carved, bounds, detail::cuda_tiling::largest(bounds.block_rows));
    }

    [[nodiscard]] const detail::cuda_plan_task& task() const { return plan_; }
    [[nodiscard]] const detail::cuda_buffers& buffers() const { return plan_.buffers; }
    [[nodiscard]] const detail::cuda_segment& segment(std::int32_t index) const {
        return plan_.buffers.segments[index];
    }
    /// Whether nothing was written around the workspace.
    [[nodiscard]] bool is_intact() const { return memory_.is_intact(); }

    void plan() {
        const std::int32_t count = plan_.batch.num_segments;
        bool ascending = true;
        for (std::int32_t s = 0; s < count; ++s) {
            ascending = ascending && detail::segment_ascends(plan_.batch, s);
        }
        detail::plan_sums before;
        for (std::int32_t s = 0; s < count; ++s) {
            detail::segment_planner planner(plan_, s, ascending);
            detail::cuda_segment made =
                planner.plan(buffers().observations + std::int64_t{s} * plan_.bounds.num_observations);
            const detail::plan_sums mine = detail::work_of(plan_, made);
            planner.place(made, before, mine);
            before = before + mine;
        }
        detail::write_totals(buffers(), count, before);
    }

    /// How many strands a row's slots are taken by.
    enum class strands { of_a_warp, of_a_thread_block, as_the_kernel };

    /// @param ctas thread blocks of each kernel
    /// @param by_head whether the kernel is the one that knows each head's mass
    template <class HeadReduction>
    void combine(const float* sink_logits, masses& out, bool by_head, std::uint32_t ctas,
                 strands how = strands::as_the_kernel) {
        const detail::cuda_combine_task task{plan_.bounds,
                                             plan_.batch,
                                             plan_.tiling,
                                             plan_.buffers,
                                             sink_logits,
                                             out.view(),
                                             by_head ? out.head_view() : up::head_mass_view{}};
        add_denominators(task, ctas, how);
        for (std::int32_t s = 0; s < task.out.num_segments; ++s) {
            task.out.faults[s] = detail::fault_of(task, s);
        }
        for (std::uint32_t cta = 0; cta < ctas; ++cta) {
            if (by_head) {
                add_masses<detail::mass_adder<HeadReduction, true, one_lane>>(task, cta, ctas);
            } else {
                add_masses<detail::mass_adder<HeadReduction, false, one_lane>>(task, cta, ctas);
            }
        }
    }

  private:
    using group_type = detail::denominator_group;

    static std::size_t workspace_bytes(const up::limits& bounds) {
        up::workspace counting;
        static_cast<void>(
            detail::cuda_buffers::carve(counting, bounds, detail::cuda_tiling::largest(bounds.block_rows)));
        return counting.bytes_used();
    }

    static void add_denominators(const detail::cuda_combine_task& task, std::uint32_t ctas, strands how) {
        const std::int64_t groups = group_type::count(task);
        const std::int32_t at_once = group_type::at_once(groups, ctas);
        std::int64_t done = 0;
        for (std::uint32_t cta = 0; cta < ctas; ++cta) {
            for (std::int64_t first = std::int64_t{cta} * at_once; first < groups;
                 first += std::int64_t{ctas} * at_once) {
                for (std::int32_t i = 0; i < at_once && first + i < groups; ++i) {
                    group_type group(task);
                    group.enter(first + i);
                    if (group.is_scored()) {
                        add_group(group, how == strands::of_a_thread_block ||
                                             (how == strands::as_the_kernel && group.is_long()));
                    }
                    ++done;
                }
            }
        }
        REQUIRE(done == groups);
    }
    /// @param together whether the 32 warps of a thread block share the slots
    static void add_group(const group_type& group, bool together) {
        const std::int32_t warps = together ? detail::denominator_warps : 1;
        group_type::warp_sums of_warps;
        for (std::int32_t warp = 0; warp < warps; ++warp) {
            std::array<detail::strand_sums, 32> of_lanes;
            for (std::int32_t lane = 0; lane < 32; ++lane) {
                of_lanes[static_cast<std::size_t>(lane)] = group.add_strand(
                    lane % group_type::row_threads, (warp * 32 + lane) / group_type::row_threads,
                    group_type::warp_strands * warps);
            }
            for (std::int32_t row = 0; row < 4; ++row) {
                std::array<detail::scaled_sum, 32> sums;
                for (std::size_t lane = 0; lane < 32; ++lane) {
                    sums[lane] = of_lanes[lane].of_row(row);
                }
                for (std::size_t distance = group_type::row_threads; distance < 32; distance *= 2) {
                    const std::array<detail::scaled_sum, 32> others = sums;
                    for (std::size_t lane = 0; lane < 32; ++lane) {
                        sums[lane] = sums[lane] + others[lane ^ distance];
                    }
                }
                for (std::int32_t lane = 0; lane < group_type::row_threads; ++lane) {
                    of_warps[warp][lane * 4 + row] = sums[static_cast<std::size_t>(lane)];
                }
            }
        }
        for (std::int32_t row = 0; row < detail::denominator_rows; ++row) {
            group.finish(row, together ? group_type::add_warps(of_warps, row) : of_warps[0][row]);
        }
    }

    template <class Adder>
    static void add_masses(const detail::cuda_combine_task& task, std::uint32_t cta, std::uint32_t ctas) {
        std::vector<Adder> warps;
        for (std::int32_t warp = 0; warp < detail::mass_warps; ++warp) {
            warps.emplace_back(task, one_lane(), warp);
        }
        typename Adder::warp_masses of_warps;
        const std::int64_t end = task.out.num_blocks * (cta + std::int64_t{1}) / ctas;
        std::int64_t first = task.out.num_blocks * cta / ctas;
        while (first < end) {
            std::int32_t count = 0;
            for (Adder& warp : warps) {
                count = warp.enter(first, end);
                REQUIRE(count > 0);
                warp.add_blocks(first, count, of_warps);
            }
            for (std::int32_t thread = 0; thread < 32 * detail::mass_warps; ++thread) {
                warps[static_cast<std::size_t>(thread / 32)].store(first, count, of_warps, thread);
            }
            first += count;
        }
    }

    guarded_buffer memory_;
    detail::cuda_plan_task plan_;
};

} // namespace importance_test
