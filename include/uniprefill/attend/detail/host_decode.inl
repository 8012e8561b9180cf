// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/attend/detail/check_arguments.hpp>
#include <uniprefill/attend/detail/host_attention.hpp>

#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Units of one row: those of a KV head, which takes more than one beyond 64 query heads each.
[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int64_t decode_units_of_head(const limits& bounds) noexcept {
    return (bounds.group_heads() + attention_lanes - 1) / attention_lanes;
}

[[nodiscard]] UNIPREFILL_HOST_API constexpr std::int64_t decode_units(const limits& bounds,
                                                                      std::int32_t rows) noexcept {
    return std::int64_t{rows} * bounds.num_kv_heads * decode_units_of_head(bounds);
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_decode_rows(const decode_rows& rows,
                                                                  const limits& bounds) noexcept {
    constexpr auto invalid = status_code::invalid_argument;
    constexpr auto range = status_code::out_of_range;
    UNIPREFILL_TRY(require(rows.space == memory_space::host, status_code::not_supported, "rows.space",
                           "host memory", static_cast<std::int32_t>(rows.space)));
    UNIPREFILL_TRY(require(rows.num_rows >= 0 && rows.num_rows <= bounds.max_rows, range, "rows.num_rows",
                           "0..limits.max_rows", rows.num_rows));
    if (rows.num_rows == 0) {
        return success();
    }
    UNIPREFILL_TRY(require_pointer(rows.lens, "rows.lens"));
    const std::int32_t heads = rows.head_stride != 0 ? bounds.num_kv_heads : 1;
    for (std::int32_t row = 0; row < rows.num_rows; ++row) {
        const std::int32_t request = rows.request_of(row);
        UNIPREFILL_TRY(require(request >= 0 && request < bounds.max_requests, range, "rows.requests",
                               "0..limits.max_requests - 1", request)
                           .at_request(row));
        for (std::int32_t head = 0; head < heads; ++head) {
            const std::int32_t len = rows.len(row, head);
            const std::int32_t first = rows.first_key(row, head);
            UNIPREFILL_TRY(require(len >= 0, invalid, "rows.lens", ">= 0", len).at_request(row));
            UNIPREFILL_TRY(require(len <= bounds.max_cached_tokens, range, "rows.lens",
                                   "at most limits.max_cached_tokens", len)
                               .at_request(row));
            UNIPREFILL_TRY(
                require(first >= 0 && first <= len, invalid, "rows.first_keys", "0..the row's length", first)
                    .at_request(row));
        }
    }
    return success();
}

/// Fills @p unit, made new, with unit @p index of a step.
inline UNIPREFILL_HOST_API void make_decode_unit(const limits& bounds, const decode_rows& rows,
                                                 std::int64_t index, attention_unit& unit) noexcept {
    const std::int64_t of_head = decode_units_of_head(bounds);
    const std::int32_t group = bounds.group_heads();
    const auto first = static_cast<std::int32_t>(index % of_head) * attention_lanes;
    const auto row = static_cast<std::int32_t>(index / of_head / bounds.num_kv_heads);
    unit.request = rows.request_of(row);
    unit.kv_head = static_cast<std::int32_t>(index / of_head % bounds.num_kv_heads);
    unit.lanes = group - first < attention_lanes ? group - first : attention_lanes;
    unit.cached = rows.len(row, unit.kv_head);
    for (std::int32_t lane = 0; lane < unit.lanes; ++lane) {
        unit.from[lane] = rows.first_key(row, unit.kv_head);
        unit.to[lane] = unit.cached;
        unit.row[lane] = row;
        unit.head[lane] = unit.kv_head * group + first + lane;
    }
}

} // namespace detail

template <class Policy>
UNIPREFILL_HOST_API status decode_attention<Policy, backend::host>::check() const noexcept {
    using head_dim = typename Policy::head_dim;
    UNIPREFILL_TRY(validate(bounds_));
    return detail::require(head_dim(bounds_.head_dim).value() == bounds_.head_dim,
                           status_code::invalid_argument, "limits.head_dim", "the policy's D",
                           bounds_.head_dim);
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t decode_attention<Policy, backend::host>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace counting;
    static_cast<void>(detail::attention_buffers::carve(counting, bounds_.head_dim,
                                                       detail::decode_units(bounds_, bounds_.max_rows)));
    return counting.bytes_used();
}

template <class Policy>
template <class T, class Cache, std::int32_t Build>
UNIPREFILL_HOST_API status decode_attention<Policy, backend::host>::run(
    const head_rows<const T>& queries, const Cache& keys, const Cache& values, const attention_params& params,
    const decode_rows& rows, const head_rows<T>& out, float* lse, workspace memory,
    host_stream) const noexcept {
    static_assert(is_element_v<T>, "decode_attention: rows must be float, half or bfloat16");
    static_assert(is_element_v<std::remove_const_t<typename Cache::element>>,
                  "decode_attention: cached keys must be float, half or bfloat16");
    UNIPREFILL_TRY(check());
    UNIPREFILL_TRY(detail::check_decode_rows(rows, bounds_));
    UNIPREFILL_TRY(
        detail::check_query_rows(queries, bounds_, rows.num_rows, "queries", "at least rows.num_rows rows"));
    std::int64_t tokens = 0;
    for (std::int32_t row = 0; row < rows.num_rows; ++row) {
        for (std::int32_t head = 0; head < bounds_.num_kv_heads; ++head) {
            tokens += rows.len(row, head) - rows.first_key(row, head);
        }
    }
    if (tokens > 0) {
        UNIPREFILL_TRY(detail::check_caches(keys, values));
    }
    UNIPREFILL_TRY(detail::check_attention_params(params, bounds_.num_heads));
    UNIPREFILL_TRY(
        detail::check_query_rows(out, bounds_, rows.num_rows, "out", "at least rows.num_rows rows"));
    UNIPREFILL_TRY(memory.check(workspace_bytes()));

    detail::attention_problem<T, Cache> problem{queries, {{}, keys}, {{}, values}, out, lse};
    problem.scores.set(params, bounds_.head_dim);
    workspace carved(memory.data(), memory.bytes());
    const auto buffers = detail::attention_buffers::carve(carved, bounds_.head_dim,
                                                          detail::decode_units(bounds_, bounds_.max_rows));
    detail::attend_units<Build>(problem, buffers, detail::decode_units(bounds_, rows.num_rows),
                                tokens * bounds_.group_heads() * bounds_.head_dim * 2,
                                [&](std::int64_t index, detail::attention_unit& unit) {
                                    detail::make_decode_unit(bounds_, rows, index, unit);
                                });
    return success();
}

UNIPREFILL_END_NAMESPACE
