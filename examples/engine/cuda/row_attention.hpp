// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/core/batch.hpp>
#include <uniprefill/core/block_lists.hpp>
#include <uniprefill/core/element.hpp>
#include <uniprefill/core/rows.hpp>
#include <uniprefill/core/selection.hpp>

#include <cuda_runtime.h>

#include <cstdint>
#include <memory>

namespace engine::cuda {

using uniprefill::bfloat16;

/// One layer's attention.
struct attention_call {
    uniprefill::head_rows<const bfloat16> queries; ///< of the rows that `kept` keeps
    uniprefill::head_rows<const bfloat16> keys;    ///< of the rows of `batch`
    uniprefill::head_rows<const bfloat16> values;
    uniprefill::batch_view batch; ///< with this layer's cached_lens
    uniprefill::selection kept;
    uniprefill::block_lists lists;      ///< null offsets: every key is read
    bool means = false;                 ///< blocks that lists skip are met by their means; nothing is cached
    std::int32_t window = 0;            ///< original positions that a query sees; 0: all before
    const bfloat16* cached_k = nullptr; ///< [tokens, KV heads, head_dim], dense; null: nothing cached
    const bfloat16* cached_v = nullptr;
    /// Not null: one query row over a cache that holds its own token too, and [1] tokens of it in device
    /// memory. The library's decode attention; nothing but queries, cache and `out` is looked at then.
    const std::int32_t* decode_len = nullptr;
    uniprefill::head_rows<bfloat16> out; ///< rows as the queries'
};

/// The library's attention, behind an interface so that nvcc compiles it in one file. Nothing waits; calls
/// can be captured.
class row_attention {
  public:
    virtual ~row_attention() = default;
    virtual void run(const attention_call& call, cudaStream_t on) = 0;
};

/// Throws `uniprefill::error` on limits out of range, `error` for a head dimension other than 64, 128 and
/// 256.
/// @param means whether calls may ask for them
std::unique_ptr<row_attention> make_row_attention(const uniprefill::limits& bounds, bool means = false);

} // namespace engine::cuda
