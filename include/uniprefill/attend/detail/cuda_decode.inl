// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/attend/detail/check_arguments.hpp>
#include <uniprefill/attend/detail/cuda_decode.cuh>

#include <cmath>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

template <class Policy>
UNIPREFILL_HOST_API status decode_attention<Policy, backend::cuda>::check() const noexcept {
    static_assert(Policy::head_dim::is_static,
                  "decode_attention<Policy, backend::cuda>: D must be a constant");
    constexpr std::int32_t D = Policy::head_dim::value();
    static_assert(D == 64 || D == 80 || D == 96 || D == 128 || D == 192 || D == 256,
                  "D must be 64, 80, 96, 128, 192 or 256");
    UNIPREFILL_TRY(validate(bounds_));
    return detail::require(bounds_.head_dim == D, status_code::invalid_argument, "limits.head_dim",
                           "the policy's D", bounds_.head_dim);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t decode_attention<Policy, backend::cuda>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(detail::decode_buffers<bfloat16>::carve(counting, bounds_));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status decode_attention<Policy, backend::cuda>::prepare() const noexcept {
    constexpr std::int32_t D = Policy::head_dim::value();
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::require(device_.compute_capability >= 80, status_code::not_supported, "device",
                                   "compute capability 8.0 or higher", device_.compute_capability));
    constexpr std::size_t bytes = detail::decode_shape<D>::dynamic_bytes;
    UNIPREFILL_TRY(detail::allow_shared_memory(detail::decode_split_kernel<T, Cache, D, false>, bytes));
    return detail::allow_shared_memory(detail::decode_split_kernel<T, Cache, D, true>, bytes);
}

template <class Policy>
template <class T, class Cache>
UNIPREFILL_HOST_API status decode_attention<Policy, backend::cuda>::run(
    const head_rows<const T>& queries, const Cache& keys, const Cache& values, const attention_params& params,
    const decode_rows& rows, const head_rows<T>& out, float* lse, workspace memory,
    backend::cuda::stream stream) const noexcept {
    static_assert(std::is_same_v<T, bfloat16> || std::is_same_v<T, half>,
                  "decode_attention<Policy, backend::cuda>: bf16 or fp16 rows expected");
    static_assert(std::is_same_v<typename Cache::element, T>,
                  "decode_attention<Policy, backend::cuda>: a cache of the rows' element type expected");
    constexpr std::int32_t D = Policy::head_dim::value();
    constexpr auto range = status_code::out_of_range;
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::require(rows.space == memory_space::device, status_code::not_supported,
                                   "rows.space", "device memory", static_cast<std::int32_t>(rows.space)));
    UNIPREFILL_TRY(detail::require(rows.num_rows >= 0 && rows.num_rows <= bounds_.max_rows, range,
                                   "rows.num_rows", "0..limits.max_rows", rows.num_rows));
    UNIPREFILL_TRY(
        detail::check_query_rows(queries, bounds_, rows.num_rows, "queries", "at least rows.num_rows rows"));
    UNIPREFILL_TRY(
        detail::check_query_rows(out, bounds_, rows.num_rows, "out", "at least rows.num_rows rows"));
    UNIPREFILL_TRY(detail::check_params(params));
    UNIPREFILL_TRY(detail::require_no_key_scales(params));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));
    if (rows.num_rows == 0) {
        return success();
    }
    UNIPREFILL_TRY(detail::require_pointer(rows.lens, "rows.lens"));
    UNIPREFILL_TRY(detail::check_caches(keys, values));
    UNIPREFILL_TRY(detail::require_aligned(queries.data, queries.row_stride, queries.head_stride, 0,
                                           sizeof(T), "queries"));
    UNIPREFILL_TRY(detail::check_cache_alignment(keys));
    const status of_values = detail::check_cache_alignment(values);
    UNIPREFILL_TRY(detail::require(of_values.ok(), of_values.code, "values.cached",
                                   "rows that start at multiples of 16 bytes", 1));

    detail::decode_task<T, Cache> task;
    workspace carved(memory.data(), memory.bytes());
    task.bounds = bounds_;
    task.rows = rows;
    task.scores = detail::attend_scores::of<D>(params);
    task.buffers = detail::decode_buffers<T>::carve(carved, bounds_);
    task.queries = queries;
    task.keys = keys;
    task.values = values;
    task.out = out;
    task.lse = lse;

    const auto smaller = [](std::int64_t a, std::int64_t b) { return static_cast<unsigned>(a < b ? a : b); };
    const std::int64_t heads = std::int64_t{rows.num_rows} * bounds_.num_heads;
    UNIPREFILL_TRY(detail::launch(device_, detail::decode_plan_kernel<T, Cache>, 1,
                                  detail::decode_plan_threads, 0, stream, task));
    UNIPREFILL_TRY(
        detail::launch(device_,
                       params.softcap > 0 ? detail::decode_split_kernel<T, Cache, D, true>
                                          : detail::decode_split_kernel<T, Cache, D, false>,
                       static_cast<unsigned>(device_.ctas(detail::decode_shape<D>::ctas_per_multiprocessor)),
                       detail::decode_threads,
                       static_cast<std::size_t>(detail::decode_shape<D>::dynamic_bytes), stream, task));
    return detail::launch(device_, detail::decode_merge_kernel<T, Cache, D>,
                          smaller((heads + detail::decode_warps - 1) / detail::decode_warps, device_.ctas(8)),
                          detail::decode_threads, 0, stream, task);
}

UNIPREFILL_END_NAMESPACE
