// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>
#include <uniprefill/importance/detail/check_arguments.hpp>
#include <uniprefill/importance/detail/cuda_bodies.cuh>
#include <uniprefill/importance/detail/cuda_denominators.cuh>
#include <uniprefill/importance/detail/cuda_masses.cuh>
#include <uniprefill/importance/detail/cuda_plan.cuh>

#include <cmath>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status importance_estimator<Policy, backend::cuda>::check() const noexcept {
    static_assert(Policy::block_rows::is_static && Policy::num_observations::is_static &&
                      Policy::head_dim::is_static,
                  "importance_estimator<Policy, backend::cuda>: G, N and D must be constants");
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    static_assert(G == 16 || G == 32 || G == 64 || G == 128 || G == 256, "G must be 16, 32, 64, 128 or 256");
    static_assert(D == 64 || D == 80 || D == 96 || D == 128 || D == 192 || D == 256,
                  "D must be 64, 80, 96, 128, 192 or 256");
    return detail::check_bounds<Policy>(bounds_);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t
importance_estimator<Policy, backend::cuda>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(
        detail::cuda_buffers::carve(counting, bounds_, detail::cuda_tiling::largest(bounds_.block_rows)));
    return counting.bytes_used();
}

template <class Policy>
template <class Q, class T, class Cache>
UNIPREFILL_HOST_API status importance_estimator<Policy, backend::cuda>::prepare() const noexcept {
    UNIPREFILL_TRY(check());
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    return detail::score_bodies<Q, T, Cache, D, G>::prepare(device_);
}

template <class Policy>
template <class Q, class T, class Cache>
UNIPREFILL_HOST_API status importance_estimator<Policy, backend::cuda>::run(
    const head_rows<const Q>& queries, const key_source<T, Cache>& keys, const attention_params& params,
    const batch_view& batch, const mass_view& out, const head_mass_view& per_head, workspace memory,
    backend::cuda::stream stream) const noexcept {
    constexpr std::int32_t G = Policy::block_rows::value();
    constexpr std::int32_t D = Policy::head_dim::value();
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::check_device_batch(batch, bounds_));
    UNIPREFILL_TRY(detail::check_rows(queries, bounds_.num_heads, bounds_.head_dim, batch.num_rows, "queries",
                                      "limits.num_heads heads"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(detail::require_aligned(queries.data, queries.row_stride, queries.head_stride, 0,
                                           sizeof(Q), "queries"));
    UNIPREFILL_TRY(detail::require_aligned(keys.rows.data, keys.rows.row_stride, keys.rows.head_stride, 0,
                                           sizeof(T), "keys.rows"));
    if (batch.cached_lens != nullptr) {
        UNIPREFILL_TRY(detail::check_cache(keys.cached));
        UNIPREFILL_TRY(detail::check_cache_alignment(keys.cached));
    }
    UNIPREFILL_TRY(detail::check_params(params));
    UNIPREFILL_TRY(detail::check_outputs(out, per_head, memory_space::device, batch.num_segments,
                                         std::int64_t{batch.num_rows} / G + batch.num_segments, bounds_));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));
    using bodies = detail::score_bodies<Q, T, Cache, D, G>;
    UNIPREFILL_TRY(bodies::check(device_));

    workspace carved(memory.data(), memory.bytes());
    detail::cuda_plan_task plan;
    plan.bounds = bounds_;
    plan.batch = batch;
    plan.tiling = bodies::tiling(device_);
    plan.ctas = bodies::ctas(device_);
    plan.buffers =
        detail::cuda_buffers::carve(carved, bounds_, detail::cuda_tiling::largest(bounds_.block_rows));

    detail::cuda_score_task<Q, T, Cache> score{bounds_, batch,     plan.tiling, plan.buffers,
                                               queries, keys.rows, keys.cached};
    const float scale = params.scale > 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(D));
    score.key_scales = params.key_scales;
    score.query_factor = params.softcap > 0 ? scale / params.softcap : scale * detail::log2_of_euler;
    score.softcap = params.softcap;

    const detail::cuda_combine_task combine{bounds_, batch,   plan.tiling, plan.buffers, params.sink_logits,
                                            out,     per_head};

    const auto smaller = [](std::int64_t a, std::int64_t b) { return static_cast<unsigned>(a < b ? a : b); };
    UNIPREFILL_TRY(detail::launch(
        device_, detail::plan_kernel<>, 1,
        smaller((std::int64_t{batch.num_segments} / 32 + 1) * 32, detail::plan_threads), 0, stream, plan));
    if (batch.num_segments > 0 && batch.num_rows > 0) {
        UNIPREFILL_TRY(bodies::launch(device_, score, stream));
        UNIPREFILL_TRY(
            detail::launch(device_, detail::denominator_kernel<>,
                           smaller(plan.buffers.max_stats / detail::denominator_rows, device_.ctas(1)),
                           detail::denominator_threads, 0, stream, combine));
    }
    const bool by_head = !std::is_same_v<head_reduction, head_sum> || per_head.free != nullptr;
    return detail::launch(
        device_, by_head ? detail::mass_kernel<head_reduction, true> : detail::mass_kernel<head_sum, false>,
        smaller(out.num_blocks + 1, device_.ctas(detail::mass_ctas)), detail::mass_warps * 32, 0, stream,
        combine);
}

UNIPREFILL_END_NAMESPACE
