// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// The upper bounds that sizes are computed from.
#pragma once

#include <uniprefill/core/status.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What an object must be able to hold. Known to the host, fixed for the life of an object; everything that
/// varies from step to step is an array. Workspace sizes are monotone in rows, cached tokens, requests,
/// segments, head_dim, n and heads of a group, so an engine may size once for its maximum; a larger G needs
/// less. On CUDA that takes a max_context_keys of the engine's own: the default follows from whether there
/// are more segments than requests.
struct limits {
    std::int32_t max_requests = 1;       ///< requests in one step
    std::int32_t max_segments = 1;       ///< (request, span) pairs in one step, >= max_requests
    std::int32_t max_rows = 0;           ///< packed rows in one step, all requests together
    std::int32_t max_cached_tokens = 0;  ///< cached keys of all requests of a step together
    std::int32_t num_layers = 1;         ///< layers of the model
    std::int32_t num_heads = 1;          ///< query heads of this rank
    std::int32_t num_kv_heads = 1;       ///< key/value heads of this rank; divides num_heads
    std::int32_t head_dim = 64;          ///< elements of a query or key row of one head, 1..256
    std::int32_t block_rows = 64;        ///< G: alive rows of a block, 8..256
    std::int32_t num_observations = 128; ///< n: observation queries of a segment, 1..512
    /// Query heads of all ranks together; 0 means num_heads. The fixed-point scale follows from it, so that
    /// masses are the same for every tensor-parallel degree.
    std::int32_t num_global_heads = 0;
    /// Keys before the segments of a step (cached ones, and rows of earlier segments of the request), summed
    /// over its segments; 0: max_cached_tokens, and max_rows more where max_segments exceeds max_requests,
    /// which is enough while no request has more than two segments in a step. Only the CUDA backend has to
    /// know: a segment beyond it is kept whole, with the fault `overflow`.
    std::int64_t max_context_keys = 0;
    /// Named spans of all requests of a step, forced ones or observed ones. Only the CUDA backend has to
    /// know: beyond it a request with forced spans is kept whole, as above, and observed spans count as none.
    std::int32_t max_forced_spans = 64;

    [[nodiscard]] UNIPREFILL_API constexpr std::int64_t context_keys() const noexcept {
        return max_context_keys > 0
                   ? max_context_keys
                   : std::int64_t{max_cached_tokens} + (max_segments > max_requests ? max_rows : 0);
    }
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t global_heads() const noexcept {
        return num_global_heads > 0 ? num_global_heads : num_heads;
    }
    [[nodiscard]] UNIPREFILL_API constexpr std::int32_t group_heads() const noexcept {
        return num_heads / num_kv_heads;
    }
    /// Upper bound of the blocks of all segments of a step, as block_offset() lays them out.
    [[nodiscard]] UNIPREFILL_API constexpr std::int64_t max_blocks() const noexcept {
        return block_rows > 0 ? static_cast<std::int64_t>(max_rows) / block_rows + max_segments : 0;
    }
};

/// Checks every field. @return the first field that is wrong.
[[nodiscard]] inline UNIPREFILL_HOST_API status validate(const limits& l) noexcept {
    const auto require = [](bool good, const char* argument, const char* expected, std::int64_t came) {
        return good ? success() : failure(status_code::invalid_argument, argument, expected, came);
    };
    UNIPREFILL_TRY(require(l.max_requests >= 1, "limits.max_requests", ">= 1", l.max_requests));
    UNIPREFILL_TRY(
        require(l.max_segments >= l.max_requests, "limits.max_segments", ">= max_requests", l.max_segments));
    // Where a last block would end has to fit, too.
    UNIPREFILL_TRY(require(l.max_rows >= 0 && l.max_rows < INT32_MAX - 1024, "limits.max_rows",
                           "0..2^31 - 1026", l.max_rows));
    UNIPREFILL_TRY(
        require(l.max_cached_tokens >= 0, "limits.max_cached_tokens", ">= 0", l.max_cached_tokens));
    UNIPREFILL_TRY(require(l.num_layers >= 1, "limits.num_layers", ">= 1", l.num_layers));
    UNIPREFILL_TRY(require(l.num_kv_heads >= 1, "limits.num_kv_heads", ">= 1", l.num_kv_heads));
    UNIPREFILL_TRY(require(l.num_heads >= 1 && l.num_heads <= 65536 && l.num_heads % l.num_kv_heads == 0,
                           "limits.num_heads", "a multiple of num_kv_heads, at most 65536", l.num_heads));
    UNIPREFILL_TRY(require(l.head_dim >= 1 && l.head_dim <= 256, "limits.head_dim", "1..256", l.head_dim));
    UNIPREFILL_TRY(
        require(l.block_rows >= 8 && l.block_rows <= 256, "limits.block_rows (G)", "8..256", l.block_rows));
    UNIPREFILL_TRY(require(l.num_observations >= 1 && l.num_observations <= 512,
                           "limits.num_observations (n)", "1..512", l.num_observations));
    UNIPREFILL_TRY(require(l.max_context_keys >= 0, "limits.max_context_keys", ">= 0", l.max_context_keys));
    UNIPREFILL_TRY(require(l.max_forced_spans >= 0, "limits.max_forced_spans", ">= 0", l.max_forced_spans));
    return require(l.num_global_heads == 0 || l.num_global_heads >= l.num_heads, "limits.num_global_heads",
                   "0 or >= num_heads", l.num_global_heads);
}

UNIPREFILL_END_NAMESPACE
