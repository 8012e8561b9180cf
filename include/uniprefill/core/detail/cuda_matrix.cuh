// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Matrix instructions that every device from compute capability 8.0 on has, for one warp at a time: PTX ISA,
/// sections ldmatrix and mma. Both kinds take 32 bytes of each row: 16 elements of 16 bits, or 8 floats.
#pragma once

#include <uniprefill/core/element.hpp>

#include <cstdint>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Four squares of 8 rows and 16 bytes. @p address of lane l: row l mod 8 of square l / 8. Of each square, a
/// lane gets the 4 bytes at row l / 4, 4 * (l mod 4).
__device__ UNIPREFILL_HIDDEN inline void load_squares(std::uint32_t (&words)[4], std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

/// The same, each square turned over its diagonal: a lane gets elements 2 * (l mod 4) and the next of column
/// l / 4. Elements of 16 bits.
__device__ UNIPREFILL_HIDDEN inline void load_squares_transposed(std::uint32_t (&words)[4],
                                                                 std::uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                 : "r"(address)
                 : "memory");
}

/// sums += a * b^T for 16 rows of a and 8 of b. Of lane l, a[i] is row l / 4 + 8 * (i mod 2), bytes 16 * (i /
/// 2) + 4 * (l mod 4); b0 and b1 are row l / 4 and the same bytes; sums[i] is row l / 4 + 8 * (i / 2) of a,
/// row 2 * (l mod 4) + i mod 2 of b.
template <class T>
__device__ UNIPREFILL_HIDDEN inline void multiply_squares(float (&sums)[4], const std::uint32_t (&a)[4],
                                                          std::uint32_t b0, std::uint32_t b1) {
    if constexpr (std::is_same_v<T, bfloat16>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
            "%9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else if constexpr (std::is_same_v<T, half>) {
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
        static_assert(std::is_same_v<T, float>, "multiply_squares: no such instruction");
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, "
            "%9}, "
            "{%0, %1, %2, %3};"
            : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
