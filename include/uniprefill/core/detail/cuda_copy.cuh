// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Shared memory by its own addresses, and asynchronous copies into it. PTX ISA, section cp.async.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// The address of shared memory as instructions take it.
__device__ UNIPREFILL_HIDDEN inline std::uint32_t shared_address(const void* pointer) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ UNIPREFILL_HIDDEN inline uint4 load_shared_16(std::uint32_t address) {
    uint4 words;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
                 : "r"(address)
                 : "memory");
    return words;
}

/// 16 bytes from global to shared memory, asynchronously; zeros where @p present is false.
__device__ UNIPREFILL_HIDDEN inline void copy_async_16(std::uint32_t to, const void* from, bool present) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
/// The same for what nobody reads again: it needn't stay in the L2 cache.
__device__ UNIPREFILL_HIDDEN inline void copy_once_async_16(std::uint32_t to, const void* from,
                                                            bool present) {
    asm volatile("{\n.reg .b64 policy;\ncreatepolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
                 "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n}" ::"r"(to),
                 "l"(from), "r"(present ? 16 : 0)
                 : "memory");
}
__device__ UNIPREFILL_HIDDEN inline void close_copy_group() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until at most @p Pending of this thread's groups of copies are under way.
template <int Pending>
__device__ UNIPREFILL_HIDDEN inline void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
