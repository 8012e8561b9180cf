// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/select/detail/check_query_lists.hpp>
#include <uniprefill/select/detail/host_query_lists.hpp>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status query_block_lister<Policy, backend::host>::check() const noexcept {
    return detail::check_query_sampling<Policy>(bounds_, sampling_);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t query_block_lister<Policy, backend::host>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(detail::host_query_buffers::carve(counting, bounds_, sampling_));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache, std::int32_t Build>
UNIPREFILL_HOST_API status query_block_lister<Policy, backend::host>::run(
    const head_rows<const T>& queries, const key_source<T, Cache>& keys, const attention_options& attention,
    const batch_view& batch, const selection& kept, const list_options<rule>& options, block_lists& out,
    workspace memory, host_stream) const noexcept {
    static_assert(is_element_v<T>, "query_block_lister: rows must be float, half or bfloat16");
    static_assert(is_element_v<std::remove_const_t<typename Cache::element>>,
                  "query_block_lister: cached keys must be float, half or bfloat16");
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(validate(batch, bounds_));
    UNIPREFILL_TRY(detail::check_kept(kept, batch));
    UNIPREFILL_TRY(detail::require(kept.kept_bound <= bounds_.max_rows, status_code::out_of_range,
                                   "kept.kept_bound", "<= limits.max_rows", kept.kept_bound));
    UNIPREFILL_TRY(detail::check_query_rows(queries, bounds_, kept.kept_bound, "queries",
                                            "at least kept.kept_bound rows"));
    UNIPREFILL_TRY(detail::check_rows(keys.rows, bounds_.num_kv_heads, bounds_.head_dim, batch.num_rows,
                                      "keys.rows", "limits.num_kv_heads heads"));
    for (std::int32_t request = 0; request < batch.num_requests; ++request) {
        if (batch.cached_len(request) > 0) {
            UNIPREFILL_TRY(detail::check_cache(keys.cached).at_request(request));
        }
    }
    UNIPREFILL_TRY(detail::check_attention_params(attention.params, bounds_.num_heads));
    UNIPREFILL_TRY(detail::check_window(attention, batch, detail::names_in_attention));
    UNIPREFILL_TRY(validate(options));
    UNIPREFILL_TRY(detail::check_query_lists(out, bounds_, sampling_, memory_space::host));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    workspace pieces(memory.data(), memory.bytes());
    detail::host_query_problem<T, Cache, rule> problem{
        bounds_, detail::query_list_step{},
        options, queries,
        keys,    detail::host_query_buffers::carve(pieces, bounds_, sampling_)};
    problem.buffers.marks.capacity = out.capacity;
    problem.step.set(bounds_, batch, kept, attention, out, sampling_.sample, detail::query_group_lanes);
    problem.step.sink = options.sink;
    problem.step.list_window = options.window;
    problem.step.scope = options.rule.scope;
    problem.scores.set(attention.params, bounds_.head_dim);
    detail::mark_query_lists<Build>(problem);
    out.window = options.window;
    out.num_segments = batch.num_segments;
    detail::write_query_lists(problem.step, problem.buffers.marks, out);
    return success();
}

UNIPREFILL_END_NAMESPACE
