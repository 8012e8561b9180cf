// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Block masses on CUDA devices; importance.hpp says what they are.
///
/// One pass over the keys: the keys of a KV head are multiplied with all its query heads' observation rows on
/// the tensor cores, and of each (query row, block) one number leaves the chip: log2 of the sum of 2^score,
/// which depends on that row and block alone. Two small kernels turn these into shares of each row's softmax
/// and sum them in fixed point, so that neither grid, packing nor ranks can change a bit of the result.
#pragma once

#include <uniprefill/core/cuda.cuh>
#include <uniprefill/importance/importance.hpp>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// The CUDA backend. The policy's G, N and D must be constants: G 16, 32, 64, 128 or 256; D 64, 80, 96, 128,
/// 192 or 256. Nothing is instantiated by inclusion: run() instantiates the kernels of its element types and
/// cache view.
///
/// Holds limits and a device's description only: cheap to copy, and any number of threads may use one object
/// with workspaces and streams of their own. Two bodies: on compute capability 9.0, where the program was
/// compiled for sm_90a, warp-specialised wgmma; elsewhere from 8.0 on, mma.sync. cuda_device::body forces
/// one, and has to where the program has code for plain sm_90: prepare() refuses `automatic` there.
template <class Policy>
class importance_estimator<Policy, backend::cuda> {
  public:
    using policy = Policy;
    using head_reduction = typename Policy::head_reduction;

    /// Keeps @p bounds, which check() judges, and @p device, which cuda_device::current() fills.
    explicit UNIPREFILL_HOST_API importance_estimator(const limits& bounds,
                                                      const cuda_device& device = {}) noexcept
        : bounds_(bounds)
        , device_(device) {}

    [[nodiscard]] UNIPREFILL_HOST_API const limits& bounds() const noexcept { return bounds_; }
    [[nodiscard]] UNIPREFILL_HOST_API const cuda_device& device() const noexcept { return device_; }

    /// Whether the limits are good and agree with the policy's constants. run() asks too. O(1),
    /// deterministic.
    [[nodiscard]] UNIPREFILL_HOST_API status check() const noexcept;

    /// Bytes that run() needs, 0 where check() fails. Pure, needs no device, monotone as limits says. Nearly
    /// all of it is one float for each (query row, block): with s = min(G, 64), heads H and KV heads K, about
    /// @code
    ///   4 * H * n * (max_rows + context_keys()) / s
    /// @endcode
    /// 33.6 MB for 128K rows of 32 heads at n 128, G 64.
    [[nodiscard]] UNIPREFILL_HOST_API std::size_t workspace_bytes() const noexcept;

    /// Allows the kernels of these types their shared memory on the calling thread's current device, once for
    /// each device before the first run() there. Thread-safe; not for the hot path. O(1), deterministic.
    /// @return not_supported where no body does these types on this device, or an error of the runtime
    template <class Q, class T = Q, class Cache = no_cache<T>>
    [[nodiscard]] UNIPREFILL_HOST_API status prepare() const noexcept;

    /// Fills the masses of a step: what the host backend's run() does, with every array in device memory.
    ///
    /// All of `out` is written, places that no block uses with zeros, so that ranks can reduce the whole
    /// buffer. Segments whose offsets make no sense, or that exceed limits.max_context_keys or
    /// limits.max_forced_spans, have zero masses and the fault word `overflow`.
    ///
    /// Four launches, no synchronisation, no allocation; capture-safe. Rows and cache views must start at
    /// multiples of 16 bytes, and so must each of their rows. Deterministic: the same bits for any grid,
    /// packing, number of ranks and compiler flags. Masses differ from the host backend's by the rounding of
    /// products on tensor cores (bf16 and fp16 inputs: exact products, fp32 sums in another order) and of ex2
    /// and lg2: a relative error of about 1e-6 and half a unit in the last place of the row's largest score.
    ///
    /// FP8 keys (float8_e4m3, for queries of 16 bits): each query row is scaled to e4m3's range and rounded
    /// to it in the kernel; params.key_scales are the cache's.
    ///
    /// @param queries [batch.num_rows, num_heads, head_dim], rotated, not scaled
    /// @param keys rows of this step and the cache (the same layer's); see key_source
    /// @param params `sink_logits` and `key_scales` in device memory
    /// @param batch the step, in device memory
    /// @param out `format` must be mass_format::of(limits)
    /// @param per_head masses by head, not reduced; not wanted where `free` is null
    /// @param memory at least workspace_bytes() bytes of device memory, in use until the stream is past this
    /// call
    /// @return the first argument that is wrong, as far as the host can tell; nothing is launched then
    template <class Q, class T, class Cache>
    UNIPREFILL_HOST_API status run(const head_rows<const Q>& queries, const key_source<T, Cache>& keys,
                                   const attention_params& params, const batch_view& batch,
                                   const mass_view& out, const head_mass_view& per_head, workspace memory,
                                   backend::cuda::stream stream) const noexcept;

  private:
    limits bounds_;
    cuda_device device_;
};

UNIPREFILL_END_NAMESPACE

#include <uniprefill/importance/detail/cuda_estimator.inl>
