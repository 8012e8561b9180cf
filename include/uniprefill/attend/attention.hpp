// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of a prefill's rows: kept queries over all keys that entered the layer, dense or by block lists.
///
/// For every query row r, at original position pos(r), and query head h:
/// @code
///   reads[h,r] = keys i of r's request with pos(i) <= pos(r), inside the model's window,
///                and before r's segment, or in a block that h's list names, or in r's own window of blocks
///   out[h,r]   = sum over i in reads of softmax(scale * q[h,r].k[kv(h),i]) * v[kv(h),i]
///   lse[r,h]   = log of the softmax's denominator (natural)
/// @endcode
/// With means (means.hpp), reads[h,r] has one key more for each block that lies whole inside the model's
/// window and before r's window of blocks (before r's own block where lists have none) and that the list
/// doesn't name: the block's mean key, whose score is raised by log G, after a soft-cap, and its mean value.
/// Sink logits are one more term of the denominator, and so of lse: out * exp(lse) is always the sum of
/// exp(score) * v, which is what merge.hpp adds up. block_lists.hpp says which blocks a list and its window
/// are. Without lists every key that a query sees is read. One pass with a running maximum over tiles of keys
/// (Milakov and Gimelshein, arXiv 1805.02867; tiled as in Dao et al., arXiv 2205.14135).
#pragma once

#include <uniprefill/attend/means.hpp>
#include <uniprefill/core/attention_options.hpp>
#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What is settled at compile time. Replace it by any struct with the same members.
/// @tparam G rows of a block of the lists, 8..256, or `dynamic`: limits.block_rows
/// @tparam D elements of a head, or `dynamic`: limits.head_dim. The CUDA backend needs both constant.
template <std::int32_t G = 64, std::int32_t D = dynamic>
struct attention_policy {
    static_assert(G == dynamic || (G >= 8 && G <= 256), "attention_policy: G must be 8..256 or dynamic");
    static_assert(D == dynamic || (D >= 1 && D <= 256), "attention_policy: D must be 1..256 or dynamic");
    using block_rows = extent<G>;
    using head_dim = extent<D>;
};

/// Attends; specialised for each backend.
template <class Policy = attention_policy<>, class Backend = backend::host>
class prefill_attention;

/// The host backend. Holds limits only: cheap to copy, and any number of threads may use one object with
/// workspaces of their own.
template <class Policy>
class prefill_attention<Policy, backend::host> {
  public:
    /// Keeps @p bounds, which check() judges.
    explicit UNIPREFILL_HOST_API prefill_attention(const limits& bounds) noexcept
        : bounds_(bounds) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }

    /// Whether the limits are good and agree with the policy's constants. run() asks too. O(1),
    /// deterministic, thread-safe.
    /// @return the first field that is wrong: invalid_argument
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that run() needs, 0 where check() fails. Pure, the same on every machine, monotone in rows,
    /// segments, heads and head dimension; there is no buffer of queries x keys. With S = max_segments, and
    /// every line rounded up to 256 bytes, the sum of
    /// @code
    ///   S * 8                                       units of work of the segments
    ///   S                                           whether heads are worked on together
    ///   workers * floats * 4                        tiles of queries, keys, scores and outputs of each
    ///   thread
    /// where
    ///   workers = min(64, num_heads * (floor(max_rows / 64) + S))
    ///   floats  = 328 * head_dim + 5128, rounded up to 16
    /// @endcode
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Attends with the queries that @p kept keeps.
    ///
    /// A query that reads no key gets zeros and an lse of -infinity, or its sink logit where there is one.
    /// NaN or infinity among a request's keys or values can reach any of its own queries, never another
    /// request's; here, only those that read them. A score that isn't finite makes its row NaN.
    ///
    /// Deterministic: a row's bits follow from its query, its position, its list and the keys and values that
    /// it reads, not from threads, packing, the other query rows, or which of the keys are cached; and so not
    /// from the chunks that a request without lists is prefilled in. Cost: 4 * head_dim floating-point
    /// operations for each (query, key) pair that is read. Threads: OpenMP's, at most 64 and one for every
    /// 2^22 multiply-adds, where the including project compiles with it. Thread-safe.
    ///
    /// @param queries [kept.kept_bound, num_heads, head_dim], rotated, not scaled: row i is row
    ///                kept.kept_to_old[i] of the batch, or row i where @p kept is the identity
    /// @param keys    of every row of the batch, rotated, and of what the layer's cache holds before them
    /// @param values  of the same rows
    /// @param batch   the rows that entered the layer, in host memory; checked with validate(). Its
    ///                cached_lens are this layer's. Tags don't matter: decode rows may be among them.
    /// @param kept    which rows have queries
    /// @param lists   null `offsets`: every key is read. Otherwise of the same segments, by query head or by
    /// KV
    ///                head, checked before anything is read: O(list entries).
    /// @param out     [kept.kept_bound, num_heads, head_dim]; no row beyond the kept ones is written. Must
    /// not
    ///                overlap any input.
    /// @param lse     [kept.kept_bound, num_heads] natural logarithms; null: not wanted
    /// @param memory  at least workspace_bytes() bytes, only used during the call
    /// @return the first argument that is wrong; nothing has been written then
    /// @tparam Build names the compiler flags of the calling translation unit; leave it alone
    template <class T, class Cache, std::int32_t Build = detail::host_build>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const key_source<T, Cache>& values, const attention_options& options,
                                   const batch_view& batch, const selection& kept, const block_lists& lists,
                                   const head_rows<T>& out, float* lse, workspace memory,
                                   host_stream stream = {}) const noexcept;

    /// The same with means of the blocks that lists skip, in all that is said above: errors, complexity (a
    /// mean costs what a key does), determinism. A row whose list has every block has the bits that it has
    /// without means. NaN or infinity in a block can reach every query of its request that takes its mean.
    /// @param means of this step's rows, by average_blocks() or the caller's own; null `keys`, or null
    ///              `offsets` of @p lists: none
    template <class T, class Cache, std::int32_t Build = detail::host_build>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const key_source<T, Cache>& values, const attention_options& options,
                                   const batch_view& batch, const selection& kept, const block_lists& lists,
                                   const block_means<T>& means, const head_rows<T>& out, float* lse,
                                   workspace memory, host_stream stream = {}) const noexcept;

  private:
    limits bounds_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/host_attention.inl>
