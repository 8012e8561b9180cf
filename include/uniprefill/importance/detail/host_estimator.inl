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
    using block_rows = typename Policy::block_rows;
    using num_observations = typename Policy::num_observations;
    UNIPREFILL_TRY(validate(bounds_));
    UNIPREFILL_TRY(detail::require(block_rows(bounds_.block_rows).value() == bounds_.block_rows,
                                   status_code::invalid_argument, "limits.block_rows (G)", "the policy's G",
                                   bounds_.block_rows));
    return detail::require(num_observations(bounds_.num_observations).value() == bounds_.num_observations,
                           status_code::invalid_argument, "limits.num_observations (n)", "the policy's n",
                           bounds_.num_observations);
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
    constexpr auto invalid = status_code::invalid_argument;
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
    if (is_non_finite(params.scale) || params.scale < 0) {
        return failure(invalid, "params.scale", "finite and >= 0", params.scale);
    }
    if (is_non_finite(params.softcap) || params.softcap < 0) {
        return failure(invalid, "params.softcap", "finite and >= 0", params.softcap);
    }
    UNIPREFILL_TRY(detail::check_outputs(out, per_head, batch, bounds_));
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
