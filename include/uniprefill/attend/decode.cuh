// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Attention of single query rows on CUDA devices; decode.hpp says what it is.
#pragma once

#include <uniprefill/attend/decode.hpp>
#include <uniprefill/core/cuda.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The CUDA backend, for bf16 and fp16, from compute capability 8.0 on. The policy's D must be a constant:
/// 64, 80, 96, 128, 192 or 256. Nothing is instantiated by inclusion.
///
/// The keys of a (row, KV head) are split among thread blocks by their number and the limits alone, into at
/// most S splits of at least 256 keys, and the splits' states are merged in order of keys. S is 128 /
/// num_kv_heads, twice that where limits.max_rows is below 64, and at least 2.
///
/// Holds limits and a device's description only: cheap to copy, and any number of threads may use one object
/// with workspaces and streams of their own.
template <class Policy>
class decode_attention<Policy, backend::cuda> {
  public:
    /// Keeps @p bounds, which check() judges, and @p device, which cuda_device::current() fills.
    explicit UNIPREFILL_HOST_API decode_attention(const limits& bounds,
                                                  const cuda_device& device = {}) noexcept
        : bounds_(bounds)
        , device_(device) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }
    [[nodiscard]] UNIPREFILL_HOST_API const cuda_device& device() const noexcept { return device_; }

    /// Whether the limits are good and agree with the policy's constant. run() asks too. O(1), deterministic,
    /// thread-safe.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes of device memory that run() needs, 0 where check() fails: rounded up by piece, and no less than
    /// those of 63 rows where there are more,
    /// @code
    ///   max_rows * S * (num_heads * (head_dim + 2) + 1) * 4
    /// @endcode
    /// Pure, needs no device; monotone in rows, query heads and head dimension.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Allows the kernels of these types their shared memory on the calling thread's current device, once for
    /// each device before the first run() there. Thread-safe; not for the hot path. O(1), deterministic.
    /// @return not_supported where no kernel does these types on this device, or an error of the runtime
    template <class T, class Cache>
    [[nodiscard]] UNIPREFILL_HOST_API status prepare() const noexcept;

    /// What the host backend's run() does, with every array in device memory. The device can't check what
    /// rows say: a length beyond the cache is read beyond the cache; a negative one, or a request outside of
    /// limits.max_requests, reads nothing.
    ///
    /// Three launches, no synchronisation, no allocation; capture-safe: replayed with other lengths and
    /// requests. Rows and cache views must start at multiples of 16 bytes, and so must each of their rows.
    /// Deterministic: a row's bits follow from its query and what it reads. A score of minus infinity counts
    /// as a key that isn't read, and a soft-cap makes any infinite score finite; NaN makes its row NaN.
    /// Results differ from the host's by the rounding of products on tensor cores, of probabilities to 16
    /// bits and of exponentials.
    ///
    /// @param params `sink_logits` in device memory
    template <class T, class Cache>
    UNIPREFILL_HOST_API status run(const head_rows<const T>& queries, const Cache& keys, const Cache& values,
                                   const attention_params& params, const decode_rows& rows,
                                   const head_rows<T>& out, float* lse, workspace memory,
                                   backend::cuda::stream stream) const noexcept;

  private:
    limits bounds_;
    cuda_device device_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/attend/detail/cuda_decode.inl>
