// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What all CUDA operations share: the device they were planned for, errors, launches that may overlap.
#pragma once

#include <uniprefill/core/backend.hpp>
#include <uniprefill/core/status.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// A runtime error as a status; `came` holds the runtime's code. @p what must be a string literal.
[[nodiscard]] inline UNIPREFILL_HOST_API status cuda_result(cudaError_t code, const char* what) noexcept {
    return code == cudaSuccess ? success()
                               : failure(status_code::backend_error, what, "success of the CUDA runtime",
                                         static_cast<std::int32_t>(code));
}

/// Which of an operation's bodies runs.
enum class cuda_body : std::int32_t {
    automatic, ///< the best that the device has
    portable,  ///< for every device from compute capability 8.0 on
    sm90,      ///< wgmma; only on devices of compute capability 9.0
};

/// What operations have to know of a device, asked once, so that no launch asks again. Plain data.
struct cuda_device {
    std::int32_t ordinal = 0;
    std::int32_t num_multiprocessors = 1;
    std::int32_t compute_capability = 80; ///< 10 * major + minor
    /// The architecture that the program's code for this device was compiled for, as 10 * major + minor:
    /// below compute_capability where the driver makes it from the PTX of an older one.
    std::int32_t code_architecture = 80;
    cuda_body body = cuda_body::automatic;
    /// Thread blocks that a kernel with a free choice launches at most; 0: as many as fit the device at once.
    /// Results don't depend on it.
    std::int32_t max_ctas = 0;
    /// The driver's cuTensorMapEncodeTiled where the device has a copy engine for tensors, else null.
    void* encode_tensor_map = nullptr;

    /// Fills @p out with what the calling thread's current device is. Thread-safe, O(1), deterministic; not
    /// for the hot path. @return an error of the runtime; @p out is unchanged then.
    template <class = void>
    [[nodiscard]] static UNIPREFILL_HOST_API status current(cuda_device& out) noexcept;

    /// Thread blocks for a kernel of which @p per_multiprocessor fit a multiprocessor.
    [[nodiscard]] UNIPREFILL_HOST_API constexpr std::int32_t
    ctas(std::int32_t per_multiprocessor) const noexcept {
        const std::int32_t fit = num_multiprocessors * per_multiprocessor;
        return max_ctas > 0 && max_ctas < fit ? max_ctas : fit;
    }
    /// Whether kernels can start while the one before them in the stream still runs.
    [[nodiscard]] UNIPREFILL_HOST_API constexpr bool overlaps_launches() const noexcept {
        return compute_capability >= 90 && code_architecture >= 90;
    }
};

namespace detail {

/// Never launched: its attributes tell what this translation unit was compiled for.
template <class = void>
UNIPREFILL_HIDDEN __global__ void architecture_probe() {}

/// Lets the next kernel of the stream start its own beginning already. Every kernel launched by launch()
/// calls wait_for_previous_kernel() in every thread block before it touches memory that others write or read.
__device__ UNIPREFILL_HIDDEN inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// Returns once every kernel before this one in the stream is done and its writes can be seen.
__device__ UNIPREFILL_HIDDEN inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Launches @p kernel; where the device can, its beginning overlaps the end of the kernel before it.
template <class... Parameters, class... Arguments>
[[nodiscard]] UNIPREFILL_HOST_API status launch(const cuda_device& device, void (*kernel)(Parameters...),
                                                dim3 grid, dim3 block, std::size_t shared_bytes,
                                                backend::cuda::stream stream,
                                                const Arguments&... arguments) noexcept {
    cudaLaunchAttribute overlap{};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = device.overlaps_launches() ? 1 : 0;
    return cuda_result(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), "launch");
}

/// The address of the driver's function that makes tensor maps; null where the driver has none.
template <class = void>
[[nodiscard]] UNIPREFILL_HOST_API status find_tensor_map_encoder(void*& out) noexcept {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult answer = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t code =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &answer);
#else
    const cudaError_t code =
        cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &answer);
#endif
    UNIPREFILL_TRY(cuda_result(code, "device"));
    out = answer == cudaDriverEntryPointSuccess ? found : nullptr;
    return success();
}

/// Allows @p kernel its dynamic shared memory on the current device. Thread-safe; for plan time.
template <class... Parameters>
[[nodiscard]] UNIPREFILL_HOST_API status allow_shared_memory(void (*kernel)(Parameters...),
                                                             std::size_t shared_bytes) noexcept {
    return cuda_result(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                            cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared_bytes)),
                       "shared memory");
}

/// Whether @p kernel, of sm_90a, was compiled for it: code for sm_90 without sm_90a's instructions has an
/// empty kernel, which has no shared memory either. For plan time.
template <class... Parameters>
[[nodiscard]] UNIPREFILL_HOST_API status require_sm90a_code(void (*kernel)(Parameters...)) noexcept {
    cudaFuncAttributes attributes{};
    UNIPREFILL_TRY(cuda_result(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
                               "device.body"));
    return attributes.sharedSizeBytes > 0
               ? success()
               : failure(status_code::not_supported, "device.body",
                         "portable, as the program isn't compiled for sm_90a", attributes.ptxVersion);
}

} // namespace detail

template <class>
UNIPREFILL_HOST_API status cuda_device::current(cuda_device& out) noexcept {
    cuda_device found;
    int ordinal = 0;
    int multiprocessors = 0;
    int major = 0;
    int minor = 0;
    cudaFuncAttributes code{};
    UNIPREFILL_TRY(cuda_result(cudaGetDevice(&ordinal), "device"));
    UNIPREFILL_TRY(cuda_result(
        cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, ordinal), "device"));
    UNIPREFILL_TRY(
        cuda_result(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, ordinal), "device"));
    UNIPREFILL_TRY(
        cuda_result(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, ordinal), "device"));
    UNIPREFILL_TRY(cuda_result(
        cudaFuncGetAttributes(&code, reinterpret_cast<const void*>(&detail::architecture_probe<>)),
        "device"));
    found.ordinal = ordinal;
    found.num_multiprocessors = multiprocessors;
    found.compute_capability = 10 * major + minor;
    found.code_architecture = code.ptxVersion;
    if (major >= 9) {
        UNIPREFILL_TRY(detail::find_tensor_map_encoder<>(found.encode_tensor_map));
    }
    out = found;
    return success();
}

UNIPREFILL_END_NAMESPACE
