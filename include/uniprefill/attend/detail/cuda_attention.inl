// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/attend/detail/check_arguments.hpp>
#include <uniprefill/attend/detail/cuda_attend_bodies.cuh>
#include <uniprefill/core/detail/check_device_batch.hpp>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::cuda>::check() const noexcept {
    static_assert(Policy::block_rows::is_static && Policy::head_dim::is_static,
                  "prefill_attention<Policy, backend::cuda>: G and D must be constants");
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    static_assert(G == 16 || G == 32 || G == 64 || G == 128 || G == 256, "G must be 16, 32, 64, 128 or 256");
    static_assert(D == 64 || D == 80 || D == 96 || D == 128 || D == 192 || D == 256,
                  "D must be 64, 80, 96, 128, 192 or 256");
    return detail::check_attention_bounds<Policy>(bounds_);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t prefill_attention<Policy, backend::cuda>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(detail::attend_plan::carve(counting, bounds_.max_segments));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache, bool Means>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::cuda>::prepare() const noexcept {
    UNIPREFILL_TRY(check());
    return detail::attend_bodies<T, Cache, Policy::head_dim::value(), Policy::block_rows::value(),
                                 Means>::prepare(device_);
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::cuda>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const key_source<T, Cache>& values,
    const attention_options& options, const batch_view& batch, const selection& kept,
    const block_lists& lists, const head_rows<T>& out, float* lse, workspace memory,
    backend::cuda::stream stream) const noexcept {
    return run_with<false, T, Cache>(queries, keys, values, options, batch, kept, lists, {}, out, lse, memory,
                                     stream);
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::cuda>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const key_source<T, Cache>& values,
    const attention_options& options, const batch_view& batch, const selection& kept,
    const block_lists& lists, const block_means<T>& means, const head_rows<T>& out, float* lse,
    workspace memory, backend::cuda::stream stream) const noexcept {
    return run_with<true, T, Cache>(queries, keys, values, options, batch, kept, lists, means, out, lse,
                                    memory, stream);
}

template <class Policy>
template <bool Means, class T, class Cache>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::cuda>::run_with(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const key_source<T, Cache>& values,
    const attention_options& options, const batch_view& batch, const selection& kept,
    const block_lists& lists, const block_means<T>& means, const head_rows<T>& out, float* lse,
    workspace memory, backend::cuda::stream stream) const noexcept {
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::check_device_segments(batch, bounds_));
    UNIPREFILL_TRY(detail::check_kept_shape(kept, batch, memory_space::device));
    UNIPREFILL_TRY(detail::check_query_rows(queries, bounds_, kept.kept_bound, "queries",
                                            "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(detail::check_rows(values.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "values.rows", "limits.num_kv_heads heads"));
    const bool has_cache = batch.cached_lens != nullptr;
    if (has_cache) {
        UNIPREFILL_TRY(detail::check_caches(keys.cached, values.cached));
    }
    UNIPREFILL_TRY(detail::check_params(options.params));
    UNIPREFILL_TRY(detail::require_no_key_scales(options.params));
    UNIPREFILL_TRY(detail::check_window_shape(options, detail::names_in_options));
    if (lists.offsets != nullptr) {
        UNIPREFILL_TRY(detail::check_list_shape(lists, batch, kept, bounds_, memory_space::device));
        if (lists.capacity > 0) {
            UNIPREFILL_TRY(detail::require_pointer(lists.blocks, "lists.blocks"));
        }
    }
    UNIPREFILL_TRY(
        detail::check_query_rows(out, bounds_, kept.kept_bound, "out", "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(detail::check_attention_alignment(queries, keys, values, out, has_cache));
    const bool has_means = lists.offsets != nullptr && means.keys.data != nullptr;
    if (has_means) {
        UNIPREFILL_TRY(detail::check_means(means, batch, bounds_));
        UNIPREFILL_TRY(detail::check_mean_alignment(means));
    }
    UNIPREFILL_TRY(memory.check(workspace_bytes()));
    using bodies = detail::attend_bodies<T, Cache, D, G, Means>;
    UNIPREFILL_TRY(bodies::check(device_));
    if (batch.num_segments == 0 || batch.num_rows == 0 || kept.kept_bound == 0) {
        return success();
    }

    workspace carved(memory.data(), memory.bytes());
    const std::int32_t units = lists.offsets != nullptr ? lists.num_heads : bounds_.num_kv_heads;
    UNIPREFILL_TRY(detail::check_item_count(kept.kept_bound, bounds_.num_heads / units, units,
                                            batch.num_segments, bodies::tile_rows(device_), lists));
    detail::attend_task<T, Cache> task;
    task.step.batch = batch;
    if (!kept.identity) {
        task.step.kept_to_old = kept.kept_to_old;
        task.step.cu_kept = kept.cu_segments;
    }
    task.step.units = units;
    task.step.unit_heads = bounds_.num_heads / units;
    task.step.kv_units = units / bounds_.num_kv_heads;
    task.step.window = options.window;
    task.step.cached_positions = options.cached_positions;
    task.step.cached_positions_stride = options.cached_positions_stride;
    task.step.kept_bound = kept.kept_bound;
    task.step.tile_rows = bodies::tile_rows(device_);
    task.step.cut_by(lists);
    task.step.key_bytes = 2 * D * static_cast<std::int32_t>(sizeof(T));
    task.plan = detail::attend_plan::carve(carved, bounds_.max_segments);
    task.scores = detail::attend_scores::of<D>(options.params);
    task.queries = queries;
    task.keys = keys.rows;
    task.values = values.rows;
    if (has_means) {
        task.mean_keys = detail::read_only(means.keys);
        task.mean_values = detail::read_only(means.values);
    }
    task.cached_keys = keys.cached;
    task.cached_values = values.cached;
    task.out = out;
    task.lse = lse;

    return bodies::launch(device_, task, stream);
}

UNIPREFILL_END_NAMESPACE
