// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention over the union of disjoint sets of keys, from the attention over each.
///
/// For every row r and head h:
/// @code
///   lse[r,h] = log of the sum over parts of exp(lse of the part)
///   out[h,r] = sum over parts of exp(lse of the part - lse[r,h]) * out of the part
/// @endcode
/// Parts may come from any mixture of prefill_attention, decode_attention and an engine's own kernels, as
/// long as lse is the natural logarithm of the denominator that out was divided by. Sink logits belong to
/// exactly one part. Source: the merge of partial softmaxes of Milakov and Gimelshein (arXiv 1805.02867); as
/// a library's operation in FlashInfer (arXiv 2501.01005, 2.2).
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/detail/host_build.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The attention of some rows over some of their keys.
template <class T>
struct attention_state {
    head_rows<const T> out;     // [num_rows, num_heads, head_dim]
    const float* lse = nullptr; // [num_rows, num_heads] -infinity: the row read none of these keys
};

/// Merges @p count states, on the host.
///
/// A part whose lse is -infinity isn't read at all; where all are, or there are none, the row gets zeros and
/// an lse of -infinity. A row that one part alone has comes out as it was. NaN stays in its row and head.
///
/// Errors: invalid_argument, with nothing written; `request` of the status holds the part's index.
/// Complexity: O(parts * elements), no workspace. Sums are in double precision, in the order of parts: exact
/// but for the rounding to T. Deterministic for any number of threads (OpenMP's, where the including project
/// compiles with it). Thread-safe.
///
/// @param parts [count] each with at least out.num_rows rows, and the heads and elements of @p out
/// @param out   [num_rows, num_heads, head_dim] may be the memory of one of the parts; overlaps nothing else
/// @param lse   [num_rows, num_heads] may be that of one of the parts; null: not wanted
/// @return the first argument that is wrong
/// @tparam Build names the compiler flags of the calling translation unit; leave it alone
template <class T, std::int32_t Build = detail::host_build>
UNIPREFILL_HOST_API status merge_attention(const attention_state<T>* parts, std::int32_t count,
                                           const head_rows<T>& out, float* lse,
                                           host_stream stream = {}) noexcept;

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/host_merge.inl>
