// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Floats as matrix instructions take them: two numbers of 11 bits. PTX ISA, section cvt.
#pragma once

#include <uniprefill/core/detail/scalar_math.hpp>
#include <uniprefill/core/element.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// A float as the sum of two numbers of 11 bits, which is what matrix instructions take. |float - high - low|
/// is at most 2^-23 of the float.
struct split_word {
    std::uint32_t high = 0;
    std::uint32_t low = 0;

    [[nodiscard]] static __device__ UNIPREFILL_HIDDEN split_word of(std::uint32_t word) {
        split_word made;
        // Volatile: the parts of query rows, which don't change, would be kept in registers that there
        // aren't.
        asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(made.high) : "r"(word));
        const float rest = add(bit_cast<float>(word), -bit_cast<float>(made.high));
        asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(made.low) : "r"(bit_cast<std::uint32_t>(rest)));
        return made;
    }
};

} // namespace detail

UNIPREFILL_END_NAMESPACE
