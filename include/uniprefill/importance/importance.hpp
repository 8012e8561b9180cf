// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// How much softmax mass the last queries of a prompt give to each block of its keys.
///
/// For a segment (a span of one request), every head h of it and its observation rows j:
/// @code
///   A[h,j,i]   = softmax over keys i with position(i) <= position(j) of scale * q[h,j].k[kv(h),i]
///   mass[h,g]  = sum over j, and over i in block g, of A[h,j,i]
///   mass[g]    = the head reduction (a sum by default) of mass[h,g]
/// @endcode
/// UniPrefill, arXiv 2605.06221, equations 3 and 4, with sums in place of means and the softmax over all keys
/// of the request, cached ones included. Only one number for each (row, block) is ever stored: the
/// log-sum-exp of the block, from which its share of the row is exp(lse[row,block] - lse[row]).
#pragma once

#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>
#include <uniprefill/importance/head_reduction.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What is settled at compile time. Replace it by any struct with the same members.
/// @tparam G rows of a block, 8..256, or `dynamic`: limits.block_rows
/// @tparam N observation rows of a segment, 1..512, or `dynamic`: limits.num_observations
/// @tparam HeadReduction combine(all, head) folds masses of heads, any order, starting from 0; `ranks` names
///         the operator that does the same between ranks
/// @tparam D elements of a head, or `dynamic`: limits.head_dim. The CUDA backend needs G, N and D constant.
template <std::int32_t G = 64, std::int32_t N = 128, class HeadReduction = head_sum, std::int32_t D = dynamic>
struct estimator_policy {
    static_assert(G == dynamic || (G >= 8 && G <= 256), "estimator_policy: G must be 8..256 or dynamic");
    static_assert(N == dynamic || (N >= 1 && N <= 512), "estimator_policy: N must be 1..512 or dynamic");
    static_assert(D == dynamic || (D >= 1 && D <= 256), "estimator_policy: D must be 1..256 or dynamic");
    using block_rows = extent<G>;
    using num_observations = extent<N>;
    using head_dim = extent<D>;
    using head_reduction = HeadReduction;
};

/// Estimates block masses; specialised for each backend.
template <class Policy = estimator_policy<>, class Backend = backend::host>
class importance_estimator;

/// The host backend. Holds limits only: cheap to copy, and any number of threads may use one object with
/// workspaces of their own.
template <class Policy>
class importance_estimator<Policy, backend::host> {
  public:
    using policy = Policy;
    using head_reduction = typename Policy::head_reduction;

    /// Keeps @p bounds, which check() judges.
    explicit UNIPREFILL_HOST_API importance_estimator(const limits& bounds) noexcept
        : bounds_(bounds) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }

    /// Whether the limits are good and agree with the policy's constants. run() asks too. Deterministic.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that run() needs, 0 where check() fails. Pure, the same on every machine and for every compiler
    /// flag, monotone in max_requests, max_segments, max_rows, max_cached_tokens, head_dim, num_observations
    /// and the query heads of a KV head, and linear in blocks: there is no buffer of n x keys. With
    /// R = max_rows, C = max_cached_tokens, S = max_segments, and every line rounded up to 256 bytes, the sum
    /// of
    /// @code
    ///   S * 64                                      segments
    ///   min(S * n, R) * 4                           observation rows
    ///   items * lanes * head_dim * 4                queries, transposed
    ///   partials * 4                                log-sum-exps by block
    ///   items * lanes * 4, twice                    denominators
    ///   workers * keys * (head_dim + 64) * 4        keys and scores of one block for each thread
    ///   workers * S                                 faults
    /// where
    ///   lanes    = num_heads / num_kv_heads * min(n, R), rounded up to 64
    ///   slots    = floor((R + C) / G) + floor(R / G) + 3
    ///   items    = min(16, S * num_kv_heads)
    ///   partials = max(slots * lanes, min(items * slots * lanes, 2^21))
    ///   workers  = min(64, floor((R + C) / G) + 2)
    ///   keys     = G + 8, rounded up to 16
    /// @endcode
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Fills the masses of a step.
    ///
    /// A segment is scored when it belongs to a prefill or chunk request that is enabled, has at least
    /// min_length rows and one that isn't forced. All others get zero masses and no fault; their reason is in
    /// the batch. Observation rows are the segment's last min(n, rows), or those that batch.observed names;
    /// where it names none that is alive, the segment's fault word is `unscored`. NaN or infinity in any
    /// score of a segment (seen or masked, told by its bits) makes it `non_finite`. The masses of a segment
    /// with a fault are zero, and no other segment notices.
    ///
    /// Cost: 2 * num_heads * observations * keys * head_dim floating-point operations for each segment; the
    /// keys of a KV head are read once for all its query heads. Threads: OpenMP's, at most 64 and one for
    /// every 2^22 multiply-adds, where the including project compiles with it.
    ///
    /// Deterministic: masses are the same bits for any thread count and any packing of requests, and whether
    /// context is cached or in the step, within one build. Log-sum-exps are floats in units of log2, so a
    /// mass is right to about 1e-6 of itself plus half a unit in the last place of its row's largest score.
    ///
    /// @param queries [batch.num_rows, num_heads, head_dim], rotated, not scaled
    /// @param keys rows of this step and the cache (the same layer's); see key_source
    /// @param params scale, soft-cap and sink logits of the layer
    /// @param batch the step, in host memory; checked with validate(), O(rows)
    /// @param out every block of every segment is written, and every segment's fault word; `format` must be
    ///            mass_format::of(limits)
    /// @param per_head masses by head, not reduced; not wanted where `free` is null
    /// @param memory at least workspace_bytes() bytes, aligned to workspace::alignment; its contents mean
    /// nothing
    ///               before or after
    /// @return the first argument that is wrong; then nothing has been written
    /// @tparam Build names the compiler flags of the calling translation unit; leave it alone
    template <class T, class Cache, std::int32_t Build = detail::host_build>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const attention_params& params, const batch_view& batch,
                                   const mass_view& out, const head_mass_view& per_head, workspace memory,
                                   host_stream stream = {}) const noexcept;

  private:
    limits bounds_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/importance/detail/host_estimator.inl>
