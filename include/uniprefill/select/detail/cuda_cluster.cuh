// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Thread block clusters (compute capability 9.0 and up; elsewhere every thread block is a cluster of its
/// own).
#pragma once

#include <uniprefill/core/config.hpp>

#include <cuda_runtime.h>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t rank_in_cluster() {
    std::uint32_t rank = 0;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
    return static_cast<std::int32_t>(rank);
}

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t cluster_ctas() {
    std::uint32_t size = 1;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
#endif
    return static_cast<std::int32_t>(size);
}

/// Tells the cluster that this thread's writes to shared memory are done.
__device__ UNIPREFILL_HIDDEN inline void arrive_at_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
#endif
}

/// Tells the cluster that this thread is there; of what it wrote, only mailboxes that it made are.
__device__ UNIPREFILL_HIDDEN inline void come_to_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

/// Waits until every thread of the cluster has arrived.
__device__ UNIPREFILL_HIDDEN inline void wait_for_cluster() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/// The address of this thread block's @p word in the shared memory of thread block @p rank of the cluster.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t address_in_cluster(const void* word,
                                                                                   std::int32_t rank) {
    auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(word));
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(address), "r"(rank));
#else
    static_cast<void>(rank);
#endif
    return address;
}

/// What lies at this thread block's @p word in thread block @p rank of the cluster. Loads needn't wait for
/// each other, but stay behind the barriers that they follow.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint64_t load_from_cluster(const std::uint64_t* word,
                                                                                  std::int32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    std::uint64_t value = 0;
    asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(address_in_cluster(word, rank)));
    return value;
#else
    static_cast<void>(rank);
    return *word;
#endif
}
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::uint32_t load_from_cluster(const std::uint32_t* word,
                                                                                  std::int32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    std::uint32_t value = 0;
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(address_in_cluster(word, rank)));
    return value;
#else
    static_cast<void>(rank);
    return *word;
#endif
}

[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline uint4 load_four_from_cluster(const uint4* words,
                                                                               std::int32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    uint4 value{};
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address_in_cluster(words, rank)));
    return value;
#else
    static_cast<void>(rank);
    return *words;
#endif
}

/// A place in the shared memory of thread blocks that others send to. It opens once as many bytes have come
/// as were said to be expected.
using mailbox = std::uint64_t;

/// By one thread; other thread blocks may send after the next barrier of the cluster.
template <std::int32_t Count>
__device__ UNIPREFILL_HIDDEN inline void make_mailboxes(mailbox (&boxes)[Count]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    for (mailbox& box : boxes) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
                     :
                     : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(&box)))
                     : "memory");
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    static_cast<void>(boxes);
#endif
}

/// By one thread, once for each time that it opens.
__device__ UNIPREFILL_HIDDEN inline void expect_bytes(mailbox* box, std::int32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :
                 : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(box))), "r"(bytes)
                 : "memory");
#else
    static_cast<void>(box);
    static_cast<void>(bytes);
#endif
}

/// Waits until it has opened for the first time (@p turn 0), for the second (1), the third (0) and so on.
__device__ UNIPREFILL_HIDDEN inline void wait_for_mail(mailbox* box, std::uint32_t turn) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    std::uint32_t done = 0;
    while (done == 0) {
        asm volatile("{\n\t.reg .pred p;\n\t"
                     "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
                     "selp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done)
                     : "r"(static_cast<std::uint32_t>(__cvta_generic_to_shared(box))), "r"(turn)
                     : "memory");
    }
#else
    static_cast<void>(box);
    static_cast<void>(turn);
#endif
}

/// Sends to where thread block @p rank of the cluster has what @p place is here.
__device__ UNIPREFILL_HIDDEN inline void send(std::uint32_t value, const std::uint32_t* place, mailbox* box,
                                              std::int32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];"
                 :
                 : "r"(address_in_cluster(place, rank)), "r"(value), "r"(address_in_cluster(box, rank))
                 : "memory");
#else
    static_cast<void>(value);
    static_cast<void>(place);
    static_cast<void>(box);
    static_cast<void>(rank);
#endif
}
__device__ UNIPREFILL_HIDDEN inline void send(std::uint64_t value, const std::uint64_t* place, mailbox* box,
                                              std::int32_t rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u64 [%0], %1, [%2];"
                 :
                 : "r"(address_in_cluster(place, rank)), "l"(value), "r"(address_in_cluster(box, rank))
                 : "memory");
#else
    static_cast<void>(value);
    static_cast<void>(place);
    static_cast<void>(box);
    static_cast<void>(rank);
#endif
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
