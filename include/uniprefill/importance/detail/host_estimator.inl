// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/importance/detail/check_arguments.hpp>
#include <uniprefill/importance/detail/host_estimate.hpp>

#include <cmath>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status importance_estimator<Policy, backend::host>::check() const noexcept {
    return detail::check_bounds<Policy>(bounds_);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t
importance_estimator<Policy, backend::host>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(detail::host_buffers::carve(counting, bounds_));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache, std::int32_t Build>
UNIPREFILL_HOST_API status importance_estimator<Policy, backend::host>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const attention_params& params,
    const batch_view& batch, const mass_view& out, const head_mass_view& per_head, workspace memory,
    host_stream) const noexcept {
    static_assert(is_element_v<T>, "importance_estimator: rows must be float, half or bfloat16");
    static_assert(is_element_v<std::remove_const_t<typename Cache::element>>,
                  "importance_estimator: cached keys must be float, half or bfloat16");
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(validate(batch, bounds_));
    UNIPREFILL_TRY(detail::check_rows(queries, bounds_.num_heads, bounds_.head_dim, batch.num_rows, "queries",
                                      "limits.num_heads heads"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    for (std::int32_t request = 0; request < batch.num_requests; ++request) {
        if (batch.is_prefill(request) && batch.cached_len(request) > 0) {
            if (const status cache = detail::check_cache(keys.cached); !cache.ok()) {
                return cache.at_request(request);
            }
        }
    }
    UNIPREFILL_TRY(detail::check_params(params));
    UNIPREFILL_TRY(detail::check_outputs(out, per_head, memory_space::host, batch.num_segments,
                                         used_blocks(batch, bounds_.block_rows), bounds_));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    detail::host_problem<T, Cache> problem;
    problem.bounds = bounds_;
    problem.batch = batch;
    problem.queries = queries;
    problem.keys = keys.rows;
    problem.cached = keys.cached;
    const float scale =
        params.scale > 0 ? params.scale : 1.0f / std::sqrt(static_cast<float>(bounds_.head_dim));
    problem.query_factor = params.softcap > 0 ? scale / params.softcap : scale * detail::log2_of_e;
    problem.softcap = params.softcap;
    problem.sink_logits = params.sink_logits;
    problem.out = out;
    problem.per_head = per_head;
    workspace carved(memory.data(), memory.bytes());
    problem.buffers = detail::host_buffers::carve(carved, bounds_);
    detail::estimate_on_host<typename Policy::head_reduction, Build>(problem);
    return success();
}

UNIPREFILL_END_NAMESPACE
