// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/select/detail/check_arguments.hpp>
#include <uniprefill/select/detail/cuda_kernels.cuh>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// How a step is launched.
struct select_plan {
    bool at_once = false;
    bool few_blocks = false; ///< segments are decided by few threads each
    std::int32_t cluster = 1;
    dim3 grid{1};     ///< of the one kernel, or of the one that writes
    dim3 deciding{1}; ///< of the kernel that only decides
    std::int32_t words_of_cta = 1;

    /// For @p segments segments of at most @p blocks blocks together.
    [[nodiscard]] static UNIPREFILL_HOST_API select_plan of(const cuda_device& device,
                                                            const cuda_selector_options& options, bool sorts,
                                                            std::int32_t segments,
                                                            std::int64_t blocks) noexcept {
        using launch_count = cuda_selector_options::launch_count;
        select_plan made;
        const std::int64_t average = blocks / (segments > 0 ? segments : 1);
        made.at_once = !sorts && segments == 1 && options.launches != launch_count::two;
        const std::int32_t ctas = device.ctas(1);
        // Eight thread blocks that have to wait for each other take longer for some thousand blocks than one.
        if (!sorts) {
            made.cluster = options.cluster_ctas > 0 ? options.cluster_ctas : average > lone_blocks ? 8 : 1;
        }
        while (made.cluster > 1 && made.cluster > (device.compute_capability >= 90 ? ctas : 1)) {
            made.cluster /= 2;
        }
        made.few_blocks = !sorts && average <= small_select_threads + 1;
        const auto whole_clusters = [&](std::int64_t wanted, std::int32_t most) {
            const std::int64_t clusters = (most < wanted ? most : wanted) / made.cluster;
            return dim3(static_cast<unsigned>((clusters > 0 ? clusters : 1) * made.cluster));
        };
        const std::int64_t words = (blocks + 31) / 32;
        made.grid = made.at_once ? whole_clusters(words + made.cluster - 1, ctas)
                                 : dim3(static_cast<unsigned>(words < ctas ? (words > 0 ? words : 1) : ctas));
        made.words_of_cta =
            words > 0 ? static_cast<std::int32_t>((words + made.grid.x - 1) / made.grid.x) : 1;
        made.deciding =
            whole_clusters(std::int64_t{segments} * made.cluster, device.ctas(made.few_blocks ? 8 : 2));
        return made;
    }
};

/// As launch(), with clusters.
template <class... Parameters, class... Arguments>
[[nodiscard]] UNIPREFILL_HOST_API status launch_clusters(const cuda_device& device, std::int32_t cluster,
                                                         void (*kernel)(Parameters...), dim3 grid,
                                                         std::int32_t threads, backend::cuda::stream stream,
                                                         const Arguments&... arguments) noexcept {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = !device.overlaps_launches() ? 0 : cluster > 1 ? 2 : 1;
    return cuda_result(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launch");
}

/// The pieces of a workspace.
struct cuda_select_buffers {
    segment_verdict* verdicts = nullptr;
    block_place* places = nullptr;
    sort_buffers sorting{};

    [[nodiscard]] static UNIPREFILL_HOST_API cuda_select_buffers carve(workspace& memory,
                                                                       const limits& bounds,
                                                                       bool sorts) noexcept {
        cuda_select_buffers made;
        made.verdicts = memory.take<segment_verdict>(bounds.max_segments);
        made.places = memory.take<block_place>(bounds.max_blocks());
        if (sorts) {
            made.sorting = sort_buffers::carve(memory, bounds.max_blocks());
        }
        return made;
    }
};

} // namespace detail

template <class Rule>
UNIPREFILL_HOST_API std::size_t block_selector<Rule, backend::cuda>::workspace_bytes() const noexcept {
    if (!validate(bounds_).ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(
        detail::cuda_select_buffers::carve(counting, bounds_, !std::is_same_v<Rule, selection_rule>));
    return counting.bytes_used();
}

template <class Rule>
UNIPREFILL_HOST_API status block_selector<Rule, backend::cuda>::run(
    const mass_view& masses, const batch_view& batch, const Rule* rules, std::int32_t kept_bound,
    selection& out, workspace memory, backend::cuda::stream stream) const noexcept {
    constexpr bool sorts = !std::is_same_v<Rule, selection_rule>;
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(detail::check_device_segments(batch, bounds_));
    const std::int64_t blocks = std::int64_t{batch.num_rows} / bounds_.block_rows + batch.num_segments;
    UNIPREFILL_TRY(detail::check_masses(masses, batch.num_segments, blocks, memory_space::device));
    if (rules == nullptr && batch.num_requests > 0) {
        return failure(status_code::invalid_argument, "rules", "an array, not a null pointer", 0);
    }
    if (kept_bound < 0 || kept_bound > bounds_.max_rows) {
        return failure(status_code::out_of_range, "kept_bound", "0..limits.max_rows", kept_bound);
    }
    UNIPREFILL_TRY(detail::check_output(out, bounds_, memory_space::device));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));
    const std::int32_t cluster = options_.cluster_ctas;
    if (cluster < 0 || cluster > 8 || (cluster & (cluster - 1)) != 0) {
        return failure(status_code::invalid_argument, "options.cluster_ctas", "0, 1, 2, 4 or 8", cluster);
    }

    workspace pieces(memory.data(), memory.bytes());
    const auto buffers = detail::cuda_select_buffers::carve(pieces, bounds_, sorts);
    detail::selector_call<Rule> call;
    call.step.batch = batch;
    call.step.free_mass = masses.free;
    call.step.forced_mass = masses.forced;
    call.step.faults = masses.faults;
    call.step.block = detail::block_size::of(bounds_.block_rows);
    call.step.max_spans = bounds_.max_forced_spans;
    call.out = {out.keep_bits,
                out.kept_to_old,
                out.old_to_kept,
                out.cu_seqlens,
                out.cu_segments,
                out.outcomes,
                (bounds_.max_blocks() + 31) / 32,
                kept_bound};
    call.out.fours = detail::block_size::of((bounds_.block_rows + 3) / 4);
    call.rules = rules;
    call.buffers = buffers.sorting;
    call.verdicts = buffers.verdicts;
    call.places = buffers.places;
    const auto plan = detail::select_plan::of(device_, options_, sorts, batch.num_segments, blocks);
    call.out.words_of_cta = plan.words_of_cta;
    call.out.stretch = detail::block_size::of(32 * plan.words_of_cta);

    const auto launch = [&](auto kernel, std::int32_t cluster, dim3 grid, std::int32_t threads,
                            const auto&... arguments) {
        return detail::launch_clusters(device_, cluster, kernel, grid, threads, stream, arguments...);
    };
    constexpr std::int32_t threads = detail::select_threads;
    bool written = false;
    if constexpr (sorts) {
        UNIPREFILL_TRY(
            launch(&detail::decide_segments<Rule, threads, false>, 1, plan.deciding, threads, call));
    } else if (plan.at_once) {
        UNIPREFILL_TRY(launch(plan.cluster > 1 ? &detail::select_at_once<Rule, true>
                                               : &detail::select_at_once<Rule, false>,
                              plan.cluster, plan.grid, threads, call));
        written = true;
    } else if (plan.few_blocks) {
        constexpr std::int32_t few = detail::small_select_threads;
        UNIPREFILL_TRY(launch(&detail::decide_segments<Rule, few, false>, 1, plan.deciding, few, call));
    } else {
        UNIPREFILL_TRY(launch(plan.cluster > 1 ? &detail::decide_segments<Rule, threads, true>
                                               : &detail::decide_segments<Rule, threads, false>,
                              plan.cluster, plan.deciding, threads, call));
    }
    if (!written) {
        UNIPREFILL_TRY(launch(&detail::write_selection<>, 1, plan.grid, threads, call.step, call.out,
                              buffers.verdicts, buffers.places));
    }
    out.identity = false;
    out.num_requests = batch.num_requests;
    out.num_segments = batch.num_segments;
    out.num_rows = batch.num_rows;
    out.kept_bound = kept_bound;
    return success();
}

UNIPREFILL_END_NAMESPACE
