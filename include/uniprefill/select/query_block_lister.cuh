// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block lists by query block, on CUDA devices; query_block_lister.hpp says what they are.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/select/query_block_lister.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The CUDA backend, for bf16 and fp16. The policy's G and D must be constants: G 16, 32, 64, 128 or 256; D
/// 64, 80, 96, 128, 192 or 256; its rule the one that ships. Nothing is instantiated by inclusion.
///
/// Holds limits, sampling and a device's description only: cheap to copy, and any number of threads may use
/// one object with workspaces and streams of their own. Sampled rows of a query block, times the query heads
/// of a KV head, are 128 at most; neighbouring query blocks share a thread block's 128 rows.
template <class Policy>
class query_block_lister<Policy, backend::cuda> {
  public:
    using rule = typename Policy::rule;

    /// Keeps @p bounds and @p sampling, which check() judges, and @p device, which cuda_device::current()
    /// fills.
    UNIPREFILL_HOST_API query_block_lister(const limits& bounds, const query_sampling& sampling,
                                           const cuda_device& device) noexcept
        : bounds_(bounds)
        , sampling_(sampling)
        , device_(device) {}

    /// Whether limits and sampling are good and agree with the policy's constants. run() asks too. O(1),
    /// deterministic, thread-safe.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes of device memory that run() needs, 0 where check() fails. Pure, needs no device. With B query
    /// blocks and N blocks of keys as the host backend counts them, and every line rounded up to 256 bytes:
    /// @code
    ///   B * num_heads * 4                        lengths of the lists
    ///   B * num_heads * 4 * ceil(N / 32)         a bit for each of their blocks
    ///   (max_segments + 1) * 4                   groups of query blocks of the segments before each
    ///   4                                        the next group
    ///   ctas * 512 * ceil(max_rows / T) * T / min(G, T)   weights of each group's rows
    ///   ctas * 8 * N                             masses
    /// where
    ///   T     = 64, or 32 where D is above 128
    ///   group = max(1, floor(128 / M)), M the sampled rows of a query block times the query heads of a KV
    ///           head
    ///   ctas  = min(two for each multiprocessor, cuda_device::max_ctas if that is set,
    ///               num_kv_heads * (floor(B / group) + max_segments))
    /// @endcode
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Allows the kernels of these types their shared memory on the calling thread's current device, once for
    /// each device before the first run() there. Thread-safe; not for the hot path. O(1), deterministic.
    /// @return not_supported where the device can't, or an error of the runtime
    template <class T, class Cache = no_cache<T>>
    [[nodiscard]] UNIPREFILL_HOST_API status prepare() const noexcept;

    /// What the host backend's run() does, with every array in device memory, `options` aside. Single offsets
    /// and entries of row maps that lie out of bounds are clamped to what there is, and lists of rows that
    /// they don't name read everything; but segments, and their ranges of kept rows, must not overlap. A
    /// cached length beyond the cache is read beyond the cache.
    ///
    /// At most four launches, no synchronisation, no allocation; capture-safe: replayed with other lengths,
    /// rows, tags and keys. Rows and cache views must start at multiples of 16 bytes, and so must each of
    /// their rows. Deterministic as the host is, for any grid. Masses differ from the host's by the rounding
    /// of products on tensor cores and of exponentials: by about 1e-5 of themselves for scores of a magnitude
    /// below 30; blocks that lie so near the cut may be on either side of it. With a soft-cap an infinite
    /// product is doubt, too.
    /// @return as the host backend, or backend_error; nothing has been launched then, unless it is
    ///         backend_error
    template <class T, class Cache>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const attention_options& attention, const batch_view& batch,
                                   const selection& kept, const list_options<rule>& options, block_lists& out,
                                   workspace memory, backend::cuda::stream stream) const noexcept;

  private:
    limits bounds_;
    query_sampling sampling_;
    cuda_device device_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/select/detail/cuda_query_lister.inl>
