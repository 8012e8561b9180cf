// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/features.hpp"
#include "engine/cpu/scratch.hpp"

#include <uniprefill/core/element.hpp>

#include <cstdint>

namespace engine::cpu {

/// Keys or values of one request where its KV store has them: row i, KV head h, dimension c is element
/// `slots[i] * row_stride + h * head_stride + c` of `data`; without `slots`, i takes the place of `slots[i]`.
struct kv_rows {
    const void* data = nullptr;
    uniprefill::element_type type = uniprefill::element_type::f32;
    std::int64_t row_stride = 0;
    std::int64_t head_stride = 0;
    const std::int64_t* slots = nullptr; ///< [key_rows], for paged stores; may be null
};

/// The blocks of keys that each query head reads (uniprefill::block_lists, of one segment). A query reads
/// what it sees of the keys before `first_key`, of listed blocks, and of blocks from the first on that has a
/// key inside its window of `window` positions. With means (uniprefill::block_means) each whole block that it
/// sees before those, and that isn't listed, counts as block_keys times its mean key and value.
struct key_lists {
    const std::int64_t* offsets = nullptr; ///< [query_heads + 1] in `blocks`; null: all keys are read
    const std::int32_t* blocks = nullptr;  ///< [offsets[query_heads]] ascending for each head
    std::int64_t first_key = 0;            ///< with which block 0 begins
    int block_keys = 0;
    int window = 0;                     ///< 0: none, listed blocks alone
    const float* mean_keys = nullptr;   ///< [whole blocks, kv_heads, head_dim] dense; null: no means
    const float* mean_values = nullptr; ///< [whole blocks, kv_heads, head_dim] dense
};

/// Attention of one request's query rows over its keys. All strides count elements.
struct attention_call {
    int query_heads = 0; ///< a multiple of kv_heads; query head h reads KV head h / (query_heads / kv_heads)
    int kv_heads = 0;
    int head_dim = 0; ///< 1 to 256
    float scale = 0;  ///< of the scores, usually 1 / sqrt(head_dim)
    int window = 0;   ///< a query at position p sees positions p - window + 1 to p; 0: all up to p

    std::int64_t query_rows = 0;
    const std::int32_t* query_positions = nullptr; ///< [query_rows], not descending
    const float* queries = nullptr;
    std::int64_t query_row_stride = 0;
    std::int64_t query_head_stride = 0;

    std::int64_t key_rows = 0;
    const std::int32_t* key_positions = nullptr; ///< [key_rows], not descending; may have gaps
    kv_rows keys;
    kv_rows values;
    key_lists lists; ///< which of the keys that a query sees it reads

    float* out = nullptr; ///< must not overlap any input
    std::int64_t out_row_stride = 0;
    std::int64_t out_head_stride = 0;

    arithmetic kind = arithmetic::automatic;
};

/// out = softmax(scale * queries . keys, over the keys each query sees) . values, by one pass with a running
/// maximum over tiles of keys (Milakov and Gimelshein 2018; tiled as in Dao et al. 2022). A query sees keys
/// by position, never by row number; one that reads no key gets zeros. Prefill, chunks over cached keys, kept
/// queries only and decode (one row) are all this one function.
///
/// Tiles that no query of a row tile reads aren't computed, those that none sees aren't even packed. Memory:
/// `memory` grows to a packed copy of as many KV heads as fit in 256 MiB (at least one) and about half a MiB
/// a thread; no query-by-key matrix. Determinism: a query row's bits depend on that row, its position and the
/// keys alone, not on the other query rows, the number of threads or other heads. This assumes finite values:
/// a NaN or infinity among the values of a key tile (64 or 128 consecutive rows) can reach every query that
/// reads any key of the tile. Threads: OpenMP, the caller's current setting. Throws engine::error on wrong
/// arguments, before anything is written.
void attend(const attention_call& call, scratch& memory);

/// The same with fp32 kernels of a given instruction set, for tests and comparison.
void attend_fp32(const attention_call& call, scratch& memory, simd_level level);

/// (query, key) pairs that a call scores, over all query heads; a mean is a key. Throws as attend() does.
std::int64_t attention_pairs(const attention_call& call);

} // namespace engine::cpu
