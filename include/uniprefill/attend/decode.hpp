// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of single query rows over caches of their own lengths: decode steps and verification, after
/// layers have come to hold different tokens of a request.
///
/// For every query row r, query head h and its KV head g:
/// @code
///   reads[h,r] = tokens first_key(r,g) to len(r,g) - 1 of r's request in the layer's cache
///   out[h,r]   = sum over i in reads of softmax(scale * q[h,r].k[g,i]) * v[g,i]
///   lse[r,h]   = log of the softmax's denominator (natural)
/// @endcode
/// A row sees what its length says: no position is asked for. The ledger knows lengths, and the first row in
/// a window, of every layer. See attention.hpp for sink logits, lse and the source.
#pragma once

#include <uniprefill/core/attention_params.hpp>
#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/extent.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/limits.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>
#include <uniprefill/core/workspace.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What the query rows of a step read of one layer's cache. Arrays live in `space`; nothing is kept.
struct decode_rows {
    memory_space space = memory_space::host;
    std::int32_t num_rows = 0;              ///< query rows, or an upper bound where only the device knows
    const std::int32_t* requests = nullptr; // [num_rows] as the cache view counts them; null: row i is of i
    const std::int32_t* lens = nullptr; // [num_rows, num_kv_heads] tokens that a row sees, its own included
    /// The first token that is read, at most the length: where the row's window begins. Null: 0. Strided as
    /// `lens` is.
    const std::int32_t* first_keys = nullptr; // [num_rows, num_kv_heads]
    std::int64_t row_stride = 1;              ///< entries from one row to the next
    std::int64_t head_stride = 0; ///< entries from one KV head to the next; 0: all hold the same tokens

    /// The request of a row.
    [[nodiscard]] UNIPREFILL_API std::int32_t request_of(std::int32_t row) const noexcept {
        return requests != nullptr ? requests[row] : row;
    }
    /// One past the last token that a row reads of a KV head.
    [[nodiscard]] UNIPREFILL_API std::int32_t len(std::int32_t row, std::int32_t kv_head) const noexcept {
        return lens[row * row_stride + kv_head * head_stride];
    }
    /// The first token that a row reads of a KV head.
    [[nodiscard]] UNIPREFILL_API std::int32_t first_key(std::int32_t row,
                                                        std::int32_t kv_head) const noexcept {
        return first_keys != nullptr ? first_keys[row * row_stride + kv_head * head_stride] : 0;
    }
};

/// What is settled at compile time. Replace it by any struct with the same members.
/// @tparam D elements of a head, or `dynamic`: limits.head_dim
template <std::int32_t D = dynamic>
struct decode_policy {
    static_assert(D == dynamic || (D >= 1 && D <= 256), "decode_policy: D must be 1..256 or dynamic");
    using head_dim = extent<D>;
};

/// Attends; specialised for each backend.
template <class Policy = decode_policy<>, class Backend = backend::host>
class decode_attention;

/// The host backend. Holds limits only: cheap to copy, and any number of threads may use one object with
/// workspaces of their own.
template <class Policy>
class decode_attention<Policy, backend::host> {
  public:
    /// Keeps @p bounds, which check() judges. Only max_requests, max_rows, max_cached_tokens, heads and head
    /// dimension matter: query rows of a step, and the tokens that one of them may read.
    explicit UNIPREFILL_HOST_API decode_attention(const limits& bounds) noexcept
        : bounds_(bounds) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }

    /// Whether the limits are good and agree with the policy's constant. run() asks too. O(1), deterministic,
    /// thread-safe.
    /// @return the first field that is wrong: invalid_argument
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that run() needs, 0 where check() fails. Pure, the same on every machine, monotone in rows,
    /// heads and head dimension: as prefill_attention says, with workers = min(64, num_kv_heads * max_rows *
    /// ceil(num_heads / num_kv_heads / 64)) and no segments.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Attends with every row.
    ///
    /// A row that reads no key gets zeros and an lse of -infinity, or its sink logit where there is one. NaN
    /// or infinity reaches the rows that read it, no others; a score that isn't finite makes its row NaN.
    ///
    /// Deterministic: a row's bits follow from its query and the keys and values that it reads, not from
    /// threads or other rows; they are those of prefill_attention's row that reads the same tokens. Cost: 4 *
    /// head_dim floating-point operations for each (query head, key) pair. Threads: OpenMP's, at most 64 and
    /// one for every 2^22 multiply-adds, where the including project compiles with it. Thread-safe.
    ///
    /// @param queries [rows.num_rows, num_heads, head_dim], rotated, not scaled
    /// @param keys    the layer's cache, the rows' own tokens included
    /// @param values  of the same tokens
    /// @param params  scale, soft-cap and sink logits of the layer; `key_scales` must be null
    /// @param rows    in host memory; checked before anything is read: O(rows * KV heads)
    /// @param out     [rows.num_rows, num_heads, head_dim]; must not overlap any input
    /// @param lse     [rows.num_rows, num_heads] natural logarithms; null: not wanted
    /// @param memory  at least workspace_bytes() bytes, only used during the call
    /// @return the first argument that is wrong, `request` being the row's index; nothing has been written
    /// then
    /// @tparam Build names the compiler flags of the calling translation unit; leave it alone
    template <class T, class Cache, std::int32_t Build = detail::host_build>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const Cache& keys, const Cache& values,
                                   const attention_params& params, const decode_rows& rows,
                                   const head_rows<T>& out, float* lse, workspace memory,
                                   host_stream stream = {}) const noexcept;

  private:
    limits bounds_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/host_decode.inl>
