// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Bulk copies between global and shared memory by the copy engine that multiprocessors have from compute
/// capability 9.0 on (PTX ISA, cp.async.bulk and mbarrier). Addresses and sizes are multiples of 16 bytes.
///
/// Code for older devices can come to run on a new one (a program that holds PTX of theirs alone): there the
/// calling thread copies by itself, at once, and who reads what another thread has copied needs a barrier.
#pragma once

#include <uniprefill/core/cuda.cuh>

#include <cstddef>
#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Whether @p device has bulk copies, and they are wanted.
[[nodiscard]] inline UNIPREFILL_HOST_API bool has_bulk_copies(const cuda_device& device) noexcept {
    return device.compute_capability >= 90 && device.body != cuda_body::portable;
}

/// Whether the copy engine does the work.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN constexpr bool copies_in_bulk() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return true;
#else
    return false;
#endif
}

/// Tells when bulk loads have arrived. In shared memory.
class bulk_arrival {
  public:
    /// By one thread, before others use it behind a barrier.
    __device__ UNIPREFILL_HIDDEN void start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;\n"
                     "fence.mbarrier_init.release.cluster;\n"
                     "fence.proxy.async.shared::cta;" ::"r"(address(&barrier_))
                     : "memory");
#endif
    }
    /// By one thread: @p bytes will arrive.
    __device__ UNIPREFILL_HIDDEN void expect([[maybe_unused]] std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address(&barrier_)),
                     "r"(bytes)
                     : "memory");
#endif
    }
    /// Starts a load that counts as arriving here.
    __device__ UNIPREFILL_HIDDEN void load(std::byte* shared, const std::byte* global, std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                address(shared)),
            "l"(global), "r"(bytes), "r"(address(&barrier_))
            : "memory");
#else
        copy(shared, global, bytes);
#endif
    }
    /// Returns once everything expected has arrived. @p turn counts the waits: 0, 1, 2, ...
    __device__ UNIPREFILL_HIDDEN void wait([[maybe_unused]] std::uint32_t turn) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        std::uint32_t done = 0;
        do {
            asm volatile("{\n.reg .pred p;\n"
                         "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
                         "selp.u32 %0, 1, 0, p;\n}"
                         : "=r"(done)
                         : "r"(address(&barrier_)), "r"(turn % 2)
                         : "memory");
        } while (done == 0);
#endif
    }

    /// Starts a store.
    static __device__ UNIPREFILL_HIDDEN void store(std::byte* global, const std::byte* shared,
                                                   std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n"
                     "cp.async.bulk.commit_group;" ::"l"(global),
                     "r"(address(shared)), "r"(bytes)
                     : "memory");
#else
        copy(global, shared, bytes);
#endif
    }
    /// Returns once the calling thread's stores have read shared memory.
    static __device__ UNIPREFILL_HIDDEN void wait_for_stores_to_read() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    }
    /// Returns once the calling thread's stores are done.
    static __device__ UNIPREFILL_HIDDEN void wait_for_stores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
    }
    /// Lets bulk copies that begin behind a barrier see what the calling thread did with shared memory.
    static __device__ UNIPREFILL_HIDDEN void fence_shared() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
    }
    /// Lets bulk stores come after what the calling thread knows of global memory.
    static __device__ UNIPREFILL_HIDDEN void fence_global() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
        asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
    }

  private:
    static __device__ UNIPREFILL_HIDDEN std::uint32_t address(const void* shared) {
        return static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    }
    static __device__ UNIPREFILL_HIDDEN void copy(std::byte* to, const std::byte* from, std::uint32_t bytes) {
        for (std::uint32_t byte = 0; byte < bytes; byte += 16) {
            *reinterpret_cast<uint4*>(to + byte) = *reinterpret_cast<const uint4*>(from + byte);
        }
    }

    std::uint64_t barrier_;
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
