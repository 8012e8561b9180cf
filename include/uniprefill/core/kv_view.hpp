// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Five ways to find a cached key (or value) row, one for each layout that engines use.
///
/// All answer `row(request, token, head)` with the address of `head_dim` contiguous elements, where `token`
/// counts the tokens that this layer's cache holds for the request, in order of position. Element layout is
/// three 64-bit strides, so NHD, HND and layer-interleaved pools are not different types. The views own
/// nothing and are copied by value into kernels.
#pragma once

#include <uniprefill/core/config.hpp>
#include <uniprefill/core/rows.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// Nothing cached: the whole context is in this step's rows.
template <class T>
struct no_cache {
    using element = T;
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t, std::int32_t, std::int32_t) const noexcept {
        return nullptr;
    }
};

/// One contiguous stretch for each request (llama.cpp's streams, static caches).
template <class T>
struct contiguous_cache {
    using element = T;
    const T* data = nullptr;         // [num_requests, max_tokens, num_kv_heads, head_dim]
    std::int64_t request_stride = 0; ///< elements
    std::int64_t token_stride = 0;   ///< elements
    std::int64_t head_stride = 0;    ///< elements
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t request, std::int32_t token,
                                              std::int32_t head) const noexcept {
        return data + request * request_stride + token * token_stride + head * head_stride;
    }
};

/// Pages named by a padded table (vLLM's block table).
template <class T>
struct page_table_cache {
    using element = T;
    const T* data = nullptr;             // [num_pages, page_tokens, num_kv_heads, head_dim], any order
    std::int64_t page_stride = 0;        ///< elements
    std::int64_t token_stride = 0;       ///< elements, inside a page
    std::int64_t head_stride = 0;        ///< elements
    const std::int32_t* table = nullptr; // [num_requests, table_stride]
    std::int64_t table_stride = 0;       ///< entries from one request to the next
    std::int32_t page_tokens = 1;
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t request, std::int32_t token,
                                              std::int32_t head) const noexcept {
        const std::int64_t page = table[request * table_stride + token / page_tokens];
        return data + page * page_stride + (token % page_tokens) * token_stride + head * head_stride;
    }
};

/// Pages named by a compressed list (FlashInfer's indptr and indices).
template <class T>
struct csr_page_cache {
    using element = T;
    const T* data = nullptr;               // [num_pages, page_tokens, num_kv_heads, head_dim], any order
    std::int64_t page_stride = 0;          ///< elements
    std::int64_t token_stride = 0;         ///< elements, inside a page
    std::int64_t head_stride = 0;          ///< elements
    const std::int32_t* indptr = nullptr;  // [num_requests + 1]
    const std::int32_t* indices = nullptr; // [indptr[num_requests]]
    std::int32_t page_tokens = 1;
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t request, std::int32_t token,
                                              std::int32_t head) const noexcept {
        const std::int64_t page = indices[indptr[request] + token / page_tokens];
        return data + page * page_stride + (token % page_tokens) * token_stride + head * head_stride;
    }
};

/// One slot for each token (SGLang's req_to_token, LightLLM, llama.cpp's cell lists).
template <class T, class Index = std::int32_t>
struct token_slot_cache {
    using element = T;
    const T* data = nullptr;       // [num_slots, num_kv_heads, head_dim]
    std::int64_t token_stride = 0; ///< elements from one slot to the next
    std::int64_t head_stride = 0;  ///< elements
    const Index* slots = nullptr;  // [num_requests, table_stride]
    std::int64_t table_stride = 0; ///< entries from one request to the next
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t request, std::int32_t token,
                                              std::int32_t head) const noexcept {
        const std::int64_t slot = slots[request * table_stride + token];
        return data + slot * token_stride + head * head_stride;
    }
};

/// Pages named by their addresses (LMDeploy's block pointers, TensorRT-LLM's pools after adding offsets).
template <class T>
struct page_pointer_cache {
    using element = T;
    const void* const* pages = nullptr; // [num_requests, table_stride]
    std::int64_t table_stride = 0;      ///< entries from one request to the next
    std::int64_t byte_offset = 0;       ///< of this layer's K (or V) inside a page
    std::int64_t token_stride = 0;      ///< elements, inside a page
    std::int64_t head_stride = 0;       ///< elements
    std::int32_t page_tokens = 1;
    /// Address of the row of @p head of a request\'s @p token.
    [[nodiscard]] UNIPREFILL_API const T* row(std::int32_t request, std::int32_t token,
                                              std::int32_t head) const noexcept {
        const void* page = pages[request * table_stride + token / page_tokens];
        const T* base = reinterpret_cast<const T*>(static_cast<const char*>(page) + byte_offset);
        return base + (token % page_tokens) * token_stride + head * head_stride;
    }
};

/// The keys (or values) of a step: this step's rows, and those that the layer's cache already holds. The
/// cache may have another element type than the rows.
template <class T, class Cache = no_cache<T>>
struct key_source {
    head_rows<const T> rows; // [batch.num_rows, num_kv_heads, head_dim], rotated as the queries are
    Cache cached{};          ///< tokens 0..cached_lens[request] - 1, all before the request's rows
};

UNIPREFILL_END_NAMESPACE
