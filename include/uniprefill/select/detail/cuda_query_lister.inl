// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/select/detail/check_query_lists.hpp>
#include <uniprefill/select/detail/cuda_query_lists.cuh>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The sizes of a policy.
template <class Policy>
using query_list_shape_of = query_list_shape<Policy::head_dim::value(), Policy::block_rows::value()>;

/// Query blocks that a thread block works on together.
template <class Shape>
[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int32_t
query_group_blocks(const limits& bounds, const query_sampling& sampling) noexcept {
    return blocks_of_group((sampling.query_rows - 1) / sampling.sample + 1, bounds.group_heads(),
                           Shape::rows);
}

} // namespace detail

template <class Policy>
UNIPREFILL_HOST_API status query_block_lister<Policy, backend::cuda>::check() const noexcept {
    static_assert(Policy::block_rows::is_static && Policy::head_dim::is_static,
                  "query_block_lister<Policy, backend::cuda>: G and D must be constants");
    static_assert(std::is_same_v<typename Policy::rule, selection_rule>,
                  "query_block_lister<Policy, backend::cuda>: the rule that ships expected");
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    static_assert(G == 16 || G == 32 || G == 64 || G == 128 || G == 256, "G must be 16, 32, 64, 128 or 256");
    static_assert(D == 64 || D == 80 || D == 96 || D == 128 || D == 192 || D == 256,
                  "D must be 64, 80, 96, 128, 192 or 256");
    constexpr auto invalid = status_code::invalid_argument;
    UNIPREFILL_TRY(detail::check_query_sampling<Policy>(bounds_, sampling_));
    const std::int32_t rows = ((sampling_.query_rows - 1) / sampling_.sample + 1) * bounds_.group_heads();
    UNIPREFILL_TRY(detail::require(rows <= detail::query_list_shape_of<Policy>::rows, invalid,
                                   "sampling.sample",
                                   "at most 128 sampled rows and query heads of a query block", rows));
    return detail::require(bounds_.max_rows / G < 1 << 21, status_code::out_of_range, "limits.max_rows",
                           "fewer than 2^21 blocks", bounds_.max_rows);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t query_block_lister<Policy, backend::cuda>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    using shape = detail::query_list_shape_of<Policy>;
    workspace counting;
    static_cast<void>(detail::cuda_query_buffers::carve<shape>(
        counting, bounds_, sampling_.query_rows, detail::query_group_blocks<shape>(bounds_, sampling_),
        device_));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status query_block_lister<Policy, backend::cuda>::prepare() const noexcept {
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    constexpr std::size_t bytes = detail::query_list_shape_of<Policy>::dynamic_bytes;
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::require(device_.compute_capability >= 80, status_code::not_supported, "device",
                                   "compute capability 8.0 or higher", device_.compute_capability));
    UNIPREFILL_TRY(
        detail::allow_shared_memory(detail::mark_query_lists_kernel<T, Cache, D, G, false>, bytes));
    return detail::allow_shared_memory(detail::mark_query_lists_kernel<T, Cache, D, G, true>, bytes);
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status query_block_lister<Policy, backend::cuda>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const attention_options& attention,
    const batch_view& batch, const selection& kept, const list_options<rule>& options, block_lists& out,
    workspace memory, backend::cuda::stream stream) const noexcept {
    static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, half>,
                  "query_block_lister<Policy, backend::cuda>: bf16 or fp16 rows expected");
    static_assert(std::is_same_v<typename Cache::element, T>,
                  "query_block_lister<Policy, backend::cuda>: a cache of the rows' element type expected");
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    using shape = detail::query_list_shape<D, G>;
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::check_device_segments(batch, bounds_));
    UNIPREFILL_TRY(detail::check_kept_shape(kept, batch, memory_space::device));
    UNIPREFILL_TRY(detail::require(kept.kept_bound <= bounds_.max_rows, status_code::out_of_range,
                                   "kept.kept_bound", "<= limits.max_rows", kept.kept_bound));
    UNIPREFILL_TRY(detail::check_query_rows(queries, bounds_, kept.kept_bound, "queries",
                                            "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    const bool has_cache = batch.cached_lens != nullptr;
    if (has_cache) {
        UNIPREFILL_TRY(detail::check_cache(keys.cached));
    }
    UNIPREFILL_TRY(detail::check_params(attention.params));
    UNIPREFILL_TRY(detail::require_no_key_scales(attention.params));
    UNIPREFILL_TRY(detail::check_window_shape(attention, detail::names_in_attention));
    UNIPREFILL_TRY(validate(options));
    UNIPREFILL_TRY(detail::check_query_lists(out, bounds_, sampling_, memory_space::device));
    UNIPREFILL_TRY(detail::require_aligned(queries.data, queries.row_stride, queries.head_stride, 0,
                                           sizeof(T), "queries"));
    UNIPREFILL_TRY(detail::require_aligned(keys.rows.data, keys.rows.row_stride, keys.rows.head_stride, 0,
                                           sizeof(T), "keys.rows"));
    if (has_cache) {
        UNIPREFILL_TRY(detail::check_cache_alignment(keys.cached));
    }
    UNIPREFILL_TRY(memory.check(workspace_bytes()));
    UNIPREFILL_TRY(detail::require(device_.compute_capability >= 80, status_code::not_supported, "device",
                                   "compute capability 8.0 or higher", device_.compute_capability));

    workspace carved(memory.data(), memory.bytes());
    detail::query_list_task<T, Cache> task;
    task.buffers = detail::cuda_query_buffers::carve<shape>(
        carved, bounds_, sampling_.query_rows, detail::query_group_blocks<shape>(bounds_, sampling_),
        device_);
    task.buffers.marks.capacity = out.capacity;
    task.step.set(bounds_, batch, kept, attention, out, sampling_.sample, shape::rows);
    task.step.sink = options.sink;
    task.step.list_window = options.window;
    task.step.scope = options.rule.scope;
    task.rule = options.rule;
    task.queries = queries;
    task.keys = keys.rows;
    task.cached = keys.cached;
    task.set_scores(attention.params, D);
    task.one = static_cast<float>(
        std::int64_t{1} << detail::query_mass_format(task.step.samples, task.step.heads).fraction_bits);

    const detail::query_list_marks& marks = task.buffers.marks;
    const std::int64_t lists = task.step.num_lists();
    UNIPREFILL_TRY(detail::launch(device_, detail::plan_query_lists_kernel<>, 1, detail::query_list_threads,
                                  0, stream, task.step, marks, task.buffers.plan));
    if (batch.num_segments > 0 && batch.num_rows > 0 && kept.kept_bound > 0) {
        UNIPREFILL_TRY(detail::launch(device_,
                                      attention.params.softcap > 0
                                          ? detail::mark_query_lists_kernel<T, Cache, D, G, true>
                                          : detail::mark_query_lists_kernel<T, Cache, D, G, false>,
                                      static_cast<unsigned>(task.buffers.ctas), shape::threads,
                                      static_cast<std::size_t>(shape::dynamic_bytes), stream, task));
    }
    UNIPREFILL_TRY(detail::launch(device_, detail::place_query_lists_kernel<>, 1, detail::query_list_threads,
                                  0, stream, marks, lists, out.offsets, out.report));
    if (lists > 0 && out.capacity > 0) {
        const std::int64_t wanted =
            (lists * 32 + detail::query_list_writers - 1) / detail::query_list_writers;
        const std::int32_t most = device_.ctas(4);
        UNIPREFILL_TRY(detail::launch(
            device_, detail::write_query_lists_kernel<>, static_cast<unsigned>(wanted < most ? wanted : most),
            detail::query_list_writers, 0, stream, marks, lists, out.offsets, out.blocks));
    }
    out.window = options.window;
    out.num_segments = batch.num_segments;
    return success();
}

UNIPREFILL_END_NAMESPACE
