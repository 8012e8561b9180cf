// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block lists by query block: each block of query rows picks its own blocks of keys, from a sample of its
/// rows.
///
/// For query block j of a segment, with the rows S that are sampled of it, and each of its lists' query
/// heads:
/// @code
///   A[h,r,i]  = softmax over the keys i that row r sees of (scale * q[h,r].k[kv(h),i])
///   mass[g]   = sum over h of the list, r in S, i in block g of A[h,r,i]                    (fixed point)
///   list      = the heaviest blocks, as many as the rule says, and the sinks' blocks
/// @endcode
/// Keys before the segment, cached or not, are part of the softmax and of no block: every query reads them.
/// (Lists by query block: MInference, arXiv 2407.02490, and FlexPrefill, arXiv 2502.20766, choose theirs by
/// the shape of a head's attention or from pooled rows; here a sample of rows is scored in full.)
#pragma once

#include <uniprefill/core/attention_options.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/query_sampling.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Makes the block lists of a step's query blocks; specialised for each backend: backend::host here,
/// backend::cuda in query_block_lister.cuh.
template <class Policy = query_list_policy<>, class Backend = backend::host>
class query_block_lister;

/// On the host.
///
/// Of list_options, `sink` and `window` mean what they do for block_lister. The rule's scope is about blocks:
/// `all` ranks every block up to that of the query block's last row, and p is a share of their mass; `free`
/// leaves out blocks that all rows of the query block read anyway, sinks and those in the window of its last
/// row. Ties as the rule says; row counts of the rule (a budget, min_kept_rows, max_kept_rows) as
/// list_options says.
///
/// **When everything is read.** A list has no entries but the mark that block_lists describes, where no block
/// is left to choose, where the request isn't a prefill, is switched off or its segment shorter than its
/// min_length; and, counted in block_list_report::untrusted, where a score that a sampled row sees isn't
/// finite, or the candidates have no mass.
///
/// Deterministic: a list follows from its sampled rows' queries, what they see, and where its segment begins
/// among the request's keys; not from threads, packing or the other lists, unless there is too little room
/// for all. Cost: 2 * head_dim floating-point operations for each (sampled row, key) pair; threads are
/// OpenMP's, at most 64, where the including project compiles with it. Thread-safe: the object is immutable;
/// concurrent calls need workspaces and outputs of their own.
template <class Policy>
class query_block_lister<Policy, backend::host> {
  public:
    using rule = typename Policy::rule;

    /// Keeps @p bounds and @p sampling, which check() judges.
    UNIPREFILL_HOST_API query_block_lister(const limits& bounds, const query_sampling& sampling) noexcept
        : bounds_(bounds)
        , sampling_(sampling) {}

    /// Whether limits and sampling are good and agree with the policy's constants. run() asks too. O(1),
    /// deterministic, thread-safe.
    /// @return the first field that is wrong: invalid_argument
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that run() needs, 0 where check() fails. Pure, the same on every machine, monotone in rows,
    /// cached tokens, segments, heads and head dimension. With B = floor(max_rows / query_rows) +
    /// max_segments query blocks, N = ceil(max_rows / G) blocks of keys, M the sampled rows of a query block
    /// times the query heads of a KV head, rounded up to 64, and every array rounded up to 256 bytes:
    /// @code
    ///   B * num_heads * (4 + 4 * ceil(N / 32))   lengths of the lists, and a bit for each of their blocks
    ///   max_segments * 8                         units of work of the segments
    ///   workers * (M * (4 * head_dim + 4 * slots + 28) + 4 * (G + 8) * (head_dim + 64) + 32 * (N + 1))
    /// where
    ///   workers = min(64, num_kv_heads * B)
    ///   slots   = floor((max_cached_tokens + max_rows) / G) + 3
    /// @endcode
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Writes the lists of all query blocks, `window` and `num_segments` of @p out, and its report.
    /// O(sampled rows * keys * head_dim + query blocks * blocks * log(blocks)).
    /// @param queries [kept.kept_bound, num_heads, head_dim], rotated, not scaled, as attention reads them
    /// @param keys    of every row of the batch, rotated, and of what the layer's cache holds before them
    /// @param attention what attention is given: scale, soft-cap, sink logits and the model's window count
    /// @param kept    which rows have queries, kept_bound at most max_rows; query blocks count these
    /// @param out     made by block_lists::carve with the same limits, this sampling's query_rows and any
    ///                capacity, a list for each query head or for each KV head
    /// @param memory  workspace_bytes() bytes, only used during the call
    /// @return invalid_argument, out_of_range, not_supported, workspace_too_small or misaligned, naming the
    ///         first argument that is wrong; nothing has been written then
    /// @tparam Build names the compiler flags of the calling translation unit; leave it alone
    template <class T, class Cache, std::int32_t Build = detail::host_build>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const attention_options& attention, const batch_view& batch,
                                   const selection& kept, const list_options<rule>& options, block_lists& out,
                                   workspace memory, host_stream stream = {}) const noexcept;

  private:
    limits bounds_;
    query_sampling sampling_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/host_query_lister.inl>
