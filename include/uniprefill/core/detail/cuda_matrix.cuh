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

/// Four of @p all, from @p at on, += a * b^T; they begin at 0 where @p first says so.
template <class T, std::int32_t Sums>
__device__ UNIPREFILL_HIDDEN void multiply_and_add(float (&all)[Sums], std::int32_t at,
                                                   const std::uint32_t (&a)[4], std::uint32_t b0,
                                                   std::uint32_t b1, bool first) {
    float sums[4];
#pragma unroll
    for (std::int32_t i = 0; i < 4; ++i) {
        sums[i] = first ? 0.0f : all[at + i];
    }
    multiply_squares<T>(sums, a, b0, b1);
#pragma unroll
    for (std::int32_t i = 0; i < 4; ++i) {
        all[at + i] = sums[i];
    }
}

/// A lane's part of one of the 16 rows of each step of a left factor, as multiply_squares() takes them; zeros
/// where the row isn't there.
/// @param half whether the row is one of the lower eight, @param from what of it the lane begins with
template <class T, std::int32_t Steps>
__device__ UNIPREFILL_HIDDEN void load_row(std::uint32_t (&rows)[Steps][4], std::int32_t half, const T* from,
                                           bool present) {
#pragma unroll
    for (std::int32_t step = 0; step < Steps; ++step) {
#pragma unroll
        for (std::int32_t i = 0; i < 2; ++i) {
            rows[step][half + 2 * i] =
                present ? *reinterpret_cast<const std::uint32_t*>(from + step * 16 + i * 8) : 0u;
        }
    }
}

/// sums = rows * keys^T, for 16 rows of each tile and Sums / 4 times 8 keys, which are @p Pitch bytes apart.
/// @param keys of this lane's for load_squares()
template <class T, std::int32_t Pitch, std::int32_t Tiles, std::int32_t Sums, std::int32_t Steps>
__device__ UNIPREFILL_HIDDEN void multiply_rows_by_keys(float (&sums)[Tiles][Sums],
                                                        const std::uint32_t (&rows)[Tiles][Steps][4],
                                                        std::uint32_t keys) {
#pragma unroll
    for (std::int32_t step = 0; step < Steps; ++step) {
#pragma unroll
        for (std::int32_t j = 0; j < Sums / 8; ++j) {
            std::uint32_t words[4];
            load_squares(words, keys + static_cast<std::uint32_t>(j * 16 * Pitch + step * 32));
#pragma unroll
            for (std::int32_t i = 0; i < Tiles; ++i) {
                multiply_and_add<T>(sums[i], 8 * j, rows[i][step], words[0], words[1], step == 0);
                multiply_and_add<T>(sums[i], 8 * j + 4, rows[i][step], words[2], words[3], step == 0);
            }
        }
    }
}

} // namespace detail

UNIPREFILL_END_NAMESPACE
