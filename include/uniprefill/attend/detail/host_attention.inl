// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/attend/detail/attention_plan.hpp>
#include <uniprefill/attend/detail/check_arguments.hpp>
#include <uniprefill/attend/detail/host_attention.hpp>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::host>::check() const noexcept {
    return detail::check_attention_bounds<Policy>(bounds_);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t prefill_attention<Policy, backend::host>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    const batch_view batch;
    const selection kept;
    const block_lists lists;
    const attention_options options;
    detail::attention_plan(bounds_, batch, kept, lists, options).carve(counting);
    static_cast<void>(detail::attention_buffers::carve(counting, bounds_.head_dim,
                                                       detail::attention_plan::most_units(bounds_)));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache, std::int32_t Build>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::host>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const key_source<T, Cache>& values,
    const attention_options& options, const batch_view& batch, const selection& kept,
    const block_lists& lists, const block_means<T>& means, const head_rows<T>& out, float* lse,
    workspace memory, host_stream) const noexcept {
    static_assert(is_element_v<T>, "prefill_attention: rows must be float, half or bfloat16");
    static_assert(is_element_v<std::remove_const_t<typename Cache::element>>,
                  "prefill_attention: cached keys must be float, half or bfloat16");
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(validate(batch, bounds_));
    UNIPREFILL_TRY(detail::check_kept(kept, batch));
    UNIPREFILL_TRY(detail::check_query_rows(queries, bounds_, kept.kept_bound, "queries",
                                            "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    UNIPREFILL_TRY(detail::check_rows(values.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "values.rows", "limits.num_kv_heads heads"));
    for (std::int32_t request = 0; request < batch.num_requests; ++request) {
        if (batch.cached_len(request) > 0) {
            UNIPREFILL_TRY(detail::check_caches(keys.cached, values.cached).at_request(request));
        }
    }
    UNIPREFILL_TRY(detail::check_attention_params(options.params, bounds_.num_heads));
    UNIPREFILL_TRY(detail::check_window(options, batch, detail::names_in_options));
    UNIPREFILL_TRY(detail::check_lists(lists, batch, kept, bounds_));
    const bool has_means = lists.offsets != nullptr && means.keys.data != nullptr;
    if (has_means) {
        UNIPREFILL_TRY(detail::check_means(means, batch, bounds_));
    }
    UNIPREFILL_TRY(
        detail::check_query_rows(out, bounds_, kept.kept_bound, "out", "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    detail::attention_problem<T, Cache> problem{queries, keys, values, out, lse};
    problem.scores.set(options.params, bounds_.head_dim);
    if (has_means) {
        problem.set(means, bounds_.block_rows);
    }
    workspace carved(memory.data(), memory.bytes());
    detail::attention_plan plan(bounds_, batch, kept, lists, options);
    plan.carve(carved);
    const auto buffers = detail::attention_buffers::carve(carved, bounds_.head_dim,
                                                          detail::attention_plan::most_units(bounds_));
    detail::attend_units<Build>(
        problem, buffers, plan.count_units(), plan.multiply_adds(),
        [&](std::int64_t index, detail::attention_unit& unit) { plan.make(index, unit); });
    return success();
}

template <class Policy>
template <class T, class Cache, std::int32_t Build>
UNIPREFILL_HOST_API status prefill_attention<Policy, backend::host>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const key_source<T, Cache>& values,
    const attention_options& options, const batch_view& batch, const selection& kept,
    const block_lists& lists, const head_rows<T>& out, float* lse, workspace memory,
    host_stream stream) const noexcept {
    return run<T, Cache, Build>(queries, keys, values, options, batch, kept, lists, block_means<T>{}, out,
                                lse, memory, stream);
}

UNIPREFILL_END_NAMESPACE
