// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

/// Instructions of compute capability 8.0 for one warp, on bf16. Lane l has group g = l / 4 and place t = l
/// % 4. A square is 8 rows of 8 numbers; of each, a lane holds row g, columns 2t and 2t + 1 in one word.
namespace engine::cuda {

/// Address of shared memory as instructions take it.
__device__ inline std::uint32_t shared_address(const void* of) {
    return static_cast<std::uint32_t>(__cvta_generic_to_shared(of));
}

/// Four squares; lane l names row l % 8 of square l / 8.
__device__ inline void load_squares(std::uint32_t (&words)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}
/// The same, each transposed.
__device__ inline void load_transposed(std::uint32_t (&words)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}
/// A square, transposed.
__device__ inline std::uint32_t transposed(std::uint32_t square) {
    std::uint32_t out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(square));
    return out;
}

/// sums += a * b^T for 16 rows of a and 8 of b, 16 columns each. a: squares (rows 0-7, columns 0-7),
/// (8-15, 0-7), (0-7, 8-15), (8-15, 8-15); b: columns 0-7, then 8-15; sums: row g, columns 2t and 2t + 1,
/// then the same of row g + 8.
__device__ inline void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/// 16 bytes on their way to shared memory; zeros where @p there is false.
__device__ inline void copy16(std::uint32_t to, const void* from, bool there = true) {
    const std::uint32_t bytes = there ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/// What this thread has sent since the last call is one batch.
__device__ inline void end_batch() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
/// Waits until no more than @p Batches of this thread's are on their way.
template <int Batches>
__device__ inline void wait_for_batches() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Batches) : "memory");
}

/// Two numbers in one word, the first one low.
__device__ inline std::uint32_t packed(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
}
__device__ inline float2 unpacked(std::uint32_t word) {
    return __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&word));
}

} // namespace engine::cuda
