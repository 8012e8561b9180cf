// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// What the host kernels take from the compiler's flags: widths, tile heights, and a name for the
/// combination.
#pragma once

#include <uniprefill/core/config.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Vector width, and the tile that fills the register file: `panel_vectors` vectors of query rows times
/// `keys` keys are accumulated at once.
struct UNIPREFILL_HIDDEN vector_tuning {
    std::int32_t bytes;
    std::int32_t panel_vectors;
    std::int32_t keys;
};

#if defined(__AVX512F__)
constexpr vector_tuning host_vectors{64, 4, 6}; // 24 of 32 registers accumulate
#elif defined(__AVX2__)
constexpr vector_tuning host_vectors{32, 2, 6}; // 12 of 16
#elif defined(__aarch64__)
constexpr vector_tuning host_vectors{16, 4, 6}; // 24 of 32
#else
constexpr vector_tuning host_vectors{16, 2, 4}; // 8 of 16; a product needs one of its own without FMA
#endif

/// Names what the compiler was told about this translation unit. Kernels carry it as a template argument, so
/// that two units of one program built with different flags don't share (and the linker doesn't mix) code.
constexpr std::int32_t host_build = host_vectors.bytes
#if defined(__FMA__)
                                    + 1
#endif
#if defined(__FAST_MATH__)
                                    + 2
#endif
#if defined(_OPENMP)
                                    + 4
#endif
#if defined(UNIPREFILL_ARRAY_VECTORS)
                                    + 8
#endif
    ;

} // namespace detail

UNIPREFILL_END_NAMESPACE
