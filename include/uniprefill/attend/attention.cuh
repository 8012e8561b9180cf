// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of a prefill's rows on CUDA devices; attention.hpp says what it is.
#pragma once

#include <uniprefill/attend/attention.hpp>
#include <uniprefill/core/cuda.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The CUDA backend, for bf16 and fp16. The policy's G and D must be constants: G 16, 32, 64, 128 or 256; D
/// 64, 80, 96, 128, 192 or 256. Nothing is instantiated by inclusion: run() instantiates the kernels of its
/// element type and cache view.
///
/// Holds limits and a device's description only: cheap to copy, and any number of threads may use one object
/// with workspaces and streams of their own. Two bodies: on compute capability 9.0, where the program was
/// compiled for sm_90a, warp-specialised wgmma fed by TMA; elsewhere from 8.0 on, mma.sync. cuda_device::body
/// forces one, and has to where the program has code for plain sm_90: prepare() refuses `automatic` there.
///
/// The query heads that share a list are packed into one tile of query rows: lists by KV head are read once
/// for all its query heads, lists by query head once for each.
template <class Policy>
class prefill_attention<Policy, backend::cuda> {
  public:
    /// Keeps @p bounds, which check() judges, and @p device, which cuda_device::current() fills.
    explicit UNIPREFILL_HOST_API prefill_attention(const limits& bounds,
                                                   const cuda_device& device = {}) noexcept
        : bounds_(bounds)
        , device_(device) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }
    [[nodiscard]] UNIPREFILL_HOST_API const cuda_device& device() const noexcept { return device_; }

    /// Whether the limits are good and agree with the policy's constants. run() asks too. O(1),
    /// deterministic, thread-safe.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes of device memory that run() needs, 0 where check() fails: 4 for each segment and 8 more, each of
    /// the two pieces rounded up to 256. Pure, needs no device.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Allows the kernels of these types their shared memory on the calling thread's current device, once for
    /// each device before the first run() there. Thread-safe; not for the hot path. O(1), deterministic.
    /// @tparam Means those of the run() that takes means, which are kernels of their own
    /// @return not_supported where no body does these types on this device, or an error of the runtime
    template <class T, class Cache = no_cache<T>, bool Means = false>
    [[nodiscard]] UNIPREFILL_HOST_API status prepare() const noexcept;

    /// What the host backend's run() does, with every array in device memory. Offsets, row maps and lists
    /// that make no sense are clamped to what there is: no row of the step is read or written out of bounds.
    /// A cached length beyond the cache is read beyond the cache.
    ///
    /// Two launches, no synchronisation, no allocation; capture-safe: replayed with other lengths, lists and
    /// rows. Rows and cache views must start at multiples of 16 bytes, and so must each of their rows.
    /// Deterministic: a row's bits follow from its query, its position, its list, what it reads, and where
    /// its segment begins among the request's keys, not from packing, grid, or the other rows: another split
    /// into chunks or spans may change last bits. A score of minus infinity counts as a key that isn't read,
    /// and a soft-cap makes any infinite score finite; NaN makes its row NaN. Results differ from the host's
    /// by the rounding of products on tensor cores, of probabilities to 16 bits and of exponentials.
    ///
    /// @param options `params.sink_logits` and `cached_positions` in device memory
    template <class T, class Cache>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const key_source<T, Cache>& values, const attention_options& options,
                                   const batch_view& batch, const selection& kept, const block_lists& lists,
                                   const head_rows<T>& out, float* lse, workspace memory,
                                   backend::cuda::stream stream) const noexcept;

    /// The same with means, as the host backend has them, in device memory: by average_blocks() in the same
    /// stream, or the caller's own. Their rows must start at multiples of 16 bytes. As deterministic as the
    /// other run(), and of the same complexity, a mean counted as a key. These are other kernels: programs
    /// that never call this don't have them.
    template <class T, class Cache>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                   const key_source<T, Cache>& values, const attention_options& options,
                                   const batch_view& batch, const selection& kept, const block_lists& lists,
                                   const block_means<T>& means, const head_rows<T>& out, float* lse,
                                   workspace memory, backend::cuda::stream stream) const noexcept;

  private:
    template <bool Means, class T, class Cache>
    UNIPREFILL_HOST_API status run_with(const head_rows<const T>& queries, const key_source<T, Cache>& keys,
                                        const key_source<T, Cache>& values, const attention_options& options,
                                        const batch_view& batch, const selection& kept,
                                        const block_lists& lists, const block_means<T>& means,
                                        const head_rows<T>& out, float* lse, workspace memory,
                                        backend::cuda::stream stream) const noexcept;

    limits bounds_;
    cuda_device device_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/cuda_attention.inl>
