// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Hopper's warpgroup-wide matrix instruction and its barriers, as functions. sm_90a only: other
/// architectures compile empty bodies, which are never launched. PTX ISA, sections wgmma and mbarrier.
#pragma once

#include <uniprefill/core/config.hpp>
#include <uniprefill/core/detail/cuda_copy.cuh>
#include <uniprefill/core/element.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

__device__ UNIPREFILL_HIDDEN inline void barrier_init(std::uint64_t* barrier, std::uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals)
                 : "memory");
}
__device__ UNIPREFILL_HIDDEN inline void barrier_arrive(std::uint64_t* barrier) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" ::"r"(shared_address(barrier))
        : "memory");
}
/// Arrives, and has the phase wait for @p bytes more that the copy engine brings.
__device__ UNIPREFILL_HIDDEN inline void barrier_arrive_expecting(std::uint64_t* barrier,
                                                                  std::uint32_t bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n.reg .b64 state;\n"
        "mbarrier.arrive.expect_tx.shared::cta.b64 state, [%0], %1;\n}" ::"r"(shared_address(barrier)),
        "r"(bytes)
        : "memory");
#else
    static_cast<void>(barrier);
    static_cast<void>(bytes);
#endif
}
/// A value that all lanes of a warp have in common, told so that the compiler knows it.
__device__ UNIPREFILL_HIDDEN inline std::int32_t uniform(std::int32_t value) {
    return __shfl_sync(0xffffffffu, value, 0);
}
/// Waits for the end of the phase of this parity.
__device__ UNIPREFILL_HIDDEN inline void barrier_wait(std::uint64_t* barrier, std::uint32_t parity) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra finished;\n"
                 "bra again;\n"
                 "finished:\n}" ::"r"(shared_address(barrier)),
                 "r"(parity)
                 : "memory");
#else
    static_cast<void>(barrier);
    static_cast<void>(parity);
#endif
}
/// Makes this thread's writes to shared memory visible to matrix instructions.
__device__ UNIPREFILL_HIDDEN inline void fence_for_matrix_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

/// Waits for @p Threads threads that name the same barrier, 1 to 15.
template <std::int32_t Threads>
__device__ UNIPREFILL_HIDDEN inline void join_threads(std::int32_t barrier) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}
/// The same; tells whether @p mine is true for any of them.
template <std::int32_t Threads>
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline bool join_threads_or(std::int32_t barrier, bool mine) {
    std::int32_t any;
    asm volatile("{\n.reg .pred mine;\n.reg .pred any;\nsetp.ne.b32 mine, %3, 0;\n"
                 "bar.red.or.pred any, %1, %2, mine;\nselp.b32 %0, 1, 0, any;\n}"
                 : "=r"(any)
                 : "r"(barrier), "n"(Threads), "r"(mine ? 1 : 0)
                 : "memory");
    return any != 0;
}
/// Arrives at a barrier that @p Threads threads in all wait for or arrive at.
template <std::int32_t Threads>
__device__ UNIPREFILL_HIDDEN inline void let_threads_join(std::int32_t barrier) {
    asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(Threads) : "memory");
}
/// Where 16 bytes of a row are in the swizzled layout of @p rows rows.
[[nodiscard]] __device__ UNIPREFILL_HIDDEN inline std::int32_t
swizzled_place(std::int32_t rows, std::int32_t row, std::int32_t part) {
    return part / 8 * rows * 128 + row * 128 + ((part % 8) ^ (row % 8)) * 16;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

template <int Registers>
__device__ UNIPREFILL_HIDDEN inline void raise_register_limit() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ UNIPREFILL_HIDDEN inline void lower_register_limit() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}
__device__ UNIPREFILL_HIDDEN inline void matrix_begin() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ UNIPREFILL_HIDDEN inline void matrix_close_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int Pending>
__device__ UNIPREFILL_HIDDEN inline void matrix_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/// Describes rows of 128 bytes in the 128-byte swizzle, both operands K-major: 8 rows are 1,024 bytes apart.
/// @param place the address in shared memory, in 16 bytes
__device__ UNIPREFILL_HIDDEN inline std::uint64_t matrix_descriptor(std::uint32_t place) {
    constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62;
    constexpr std::uint64_t stride = std::uint64_t{1024 >> 4} << 32;
    constexpr std::uint64_t leading = std::uint64_t{1} << 16;
    return swizzle_128 | stride | leading | place;
}

// The instruction names its registers one by one. Registers 0 to n / 2 - 1 are the sums for n columns.
// clang-format off
#    define UNIPREFILL_NAMES_8   "%0, %1, %2, %3, %4, %5, %6, %7"
#    define UNIPREFILL_NAMES_16  UNIPREFILL_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#    define UNIPREFILL_NAMES_32  UNIPREFILL_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23, "                 \
                                 "%24, %25, %26, %27, %28, %29, %30, %31"
#    define UNIPREFILL_NAMES_64  UNIPREFILL_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39, "                 \
                                 "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, "    \
                                 "%55, %56, %57, %58, %59, %60, %61, %62, %63"
#    define UNIPREFILL_SUMS_8(at)                                                                           \
        "+f"(sums[(at) + 0]), "+f"(sums[(at) + 1]), "+f"(sums[(at) + 2]), "+f"(sums[(at) + 3]),             \
        "+f"(sums[(at) + 4]), "+f"(sums[(at) + 5]), "+f"(sums[(at) + 6]), "+f"(sums[(at) + 7])
#    define UNIPREFILL_SUMS_16(at) UNIPREFILL_SUMS_8(at), UNIPREFILL_SUMS_8((at) + 8)
#    define UNIPREFILL_SUMS_32(at) UNIPREFILL_SUMS_16(at), UNIPREFILL_SUMS_16((at) + 16)
#    define UNIPREFILL_SUMS_64(at) UNIPREFILL_SUMS_32(at), UNIPREFILL_SUMS_32((at) + 32)
/// Both factors in shared memory. @p n registers; %a, %b, %c: the next numbers
#    define UNIPREFILL_MATRIX_STEP(n, a, b, c, instruction, options)                                        \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned." instruction " "                                        \
                     "{" UNIPREFILL_NAMES_##n "}, %" #a ", %" #b ", p, " options ";\n}"                     \
                     : UNIPREFILL_SUMS_##n(0)                                                               \
                     : "l"(queries), "l"(keys), "r"(accumulate))
/// The left factor in registers, the right one stored row by row of the inner dimension.
#    define UNIPREFILL_VALUE_STEP(n, a0, a1, a2, a3, b, c, instruction)                                     \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #c ", 0;\n"                                       \
                     "wgmma.mma_async.sync.aligned." instruction " "                                        \
                     "{" UNIPREFILL_NAMES_##n "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b           \
                     ", p, 1, 1, 1;\n}"                                                                     \
                     : UNIPREFILL_SUMS_##n(First)                                                           \
                     : "r"(weights[0]), "r"(weights[1]), "r"(weights[2]), "r"(weights[3]), "l"(values), "r"(1))
// clang-format on

/// sums += queries * keys^T for 64 query rows, @p Keys keys and 32 bytes of each row; sums = where @p
/// accumulate is 0. Of thread t, sums[4 j + i] is row 16 (t / 32 mod 4) + t / 4 mod 8 + 8 (i / 2), key 8 j +
/// 2 (t mod 4) + i mod 2.
template <class T, int Keys>
__device__ UNIPREFILL_HIDDEN inline void matrix_step(float (&sums)[Keys / 2], std::uint64_t queries,
                                                     std::uint64_t keys, std::int32_t accumulate) {
    constexpr bool is_bfloat16 = std::is_same_v<T, bfloat16>;
    constexpr bool is_half = std::is_same_v<T, half>;
    static_assert(is_bfloat16 || is_half || std::is_same_v<T, float8_e4m3>,
                  "matrix_step: no such instruction");
    static_assert(Keys == 128 || Keys == 64, "matrix_step: no such instruction");
    if constexpr (Keys == 128 && is_bfloat16) {
        UNIPREFILL_MATRIX_STEP(64, 64, 65, 66, "m64n128k16.f32.bf16.bf16", "1, 1, 0, 0");
    } else if constexpr (Keys == 128 && is_half) {
        UNIPREFILL_MATRIX_STEP(64, 64, 65, 66, "m64n128k16.f32.f16.f16", "1, 1, 0, 0");
    } else if constexpr (Keys == 128) {
        UNIPREFILL_MATRIX_STEP(64, 64, 65, 66, "m64n128k32.f32.e4m3.e4m3", "1, 1");
    } else if constexpr (is_bfloat16) {
        UNIPREFILL_MATRIX_STEP(32, 32, 33, 34, "m64n64k16.f32.bf16.bf16", "1, 1, 0, 0");
    } else if constexpr (is_half) {
        UNIPREFILL_MATRIX_STEP(32, 32, 33, 34, "m64n64k16.f32.f16.f16", "1, 1, 0, 0");
    } else {
        UNIPREFILL_MATRIX_STEP(32, 32, 33, 34, "m64n64k32.f32.e4m3.e4m3", "1, 1");
    }
}

/// Describes @p Keys rows of 128 bytes in the 128-byte swizzle as a factor whose columns are contiguous: 8
/// rows are 1,024 bytes apart, 64 columns a panel of all rows.
template <std::int32_t Keys>
__device__ UNIPREFILL_HIDDEN inline std::uint64_t value_descriptor(std::uint32_t place) {
    constexpr std::uint64_t swizzle_128 = std::uint64_t{1} << 62;
    constexpr std::uint64_t eight_rows = std::uint64_t{1024 >> 4} << 32;
    constexpr std::uint64_t panel = std::uint64_t{(Keys * 128) >> 4} << 16;
    return swizzle_128 | eight_rows | panel | place;
}

/// sums += weights * values for 64 rows of weights, 16 keys and @p Columns columns, of which the sums are
/// those from @p First on. Weights of a thread are those that matrix_step() gave it as sums of 16 keys:
/// rounded to T, two neighbours in a word.
template <class T, int Columns, int First, int Sums>
__device__ UNIPREFILL_HIDDEN inline void value_step(float (&sums)[Sums], const std::uint32_t (&weights)[4],
                                                    std::uint64_t values) {
    constexpr bool is_bfloat16 = std::is_same_v<T, bfloat16>;
    static_assert(is_bfloat16 || std::is_same_v<T, half>, "value_step: no such instruction");
    static_assert(Columns == 128 || Columns == 64 || Columns == 32 || Columns == 16);
    static_assert(First + Columns / 2 <= Sums);
    if constexpr (Columns == 128 && is_bfloat16) {
        UNIPREFILL_VALUE_STEP(64, 64, 65, 66, 67, 68, 69, "m64n128k16.f32.bf16.bf16");
    } else if constexpr (Columns == 128) {
        UNIPREFILL_VALUE_STEP(64, 64, 65, 66, 67, 68, 69, "m64n128k16.f32.f16.f16");
    } else if constexpr (Columns == 64 && is_bfloat16) {
        UNIPREFILL_VALUE_STEP(32, 32, 33, 34, 35, 36, 37, "m64n64k16.f32.bf16.bf16");
    } else if constexpr (Columns == 64) {
        UNIPREFILL_VALUE_STEP(32, 32, 33, 34, 35, 36, 37, "m64n64k16.f32.f16.f16");
    } else if constexpr (Columns == 32 && is_bfloat16) {
        UNIPREFILL_VALUE_STEP(16, 16, 17, 18, 19, 20, 21, "m64n32k16.f32.bf16.bf16");
    } else if constexpr (Columns == 32) {
        UNIPREFILL_VALUE_STEP(16, 16, 17, 18, 19, 20, 21, "m64n32k16.f32.f16.f16");
    } else if constexpr (is_bfloat16) {
        UNIPREFILL_VALUE_STEP(8, 8, 9, 10, 11, 12, 13, "m64n16k16.f32.bf16.bf16");
    } else {
        UNIPREFILL_VALUE_STEP(8, 8, 9, 10, 11, 12, 13, "m64n16k16.f32.f16.f16");
    }
}
#    undef UNIPREFILL_MATRIX_STEP
#    undef UNIPREFILL_VALUE_STEP
#    undef UNIPREFILL_NAMES_8
#    undef UNIPREFILL_NAMES_16
#    undef UNIPREFILL_NAMES_32
#    undef UNIPREFILL_NAMES_64
#    undef UNIPREFILL_SUMS_8
#    undef UNIPREFILL_SUMS_16
#    undef UNIPREFILL_SUMS_32
#    undef UNIPREFILL_SUMS_64

#endif // __CUDA_ARCH_FEAT_SM90_ALL

} // namespace detail

UNIPREFILL_END_NAMESPACE
