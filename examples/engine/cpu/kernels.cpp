// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/kernels_tables.hpp"

namespace engine::cpu {

const row_kernels& rows_for([[maybe_unused]] simd_level level) {
#if defined(__x86_64__)
    if (level == simd_level::avx512) return rows_avx512;
    if (level == simd_level::avx2) return rows_avx2;
#endif
    return rows_portable;
}

const attention_kernel& attention_for([[maybe_unused]] simd_level level) {
#if defined(__x86_64__)
    if (level == simd_level::avx512) return attention_avx512;
    if (level == simd_level::avx2) return attention_avx2;
#endif
    return attention_portable;
}

const attention_kernel& amx_attention([[maybe_unused]] bool split) {
#if defined(UNIPREFILL_ENGINE_AMX)
    return split ? attention_amx_bf16x3 : attention_amx_bf16;
#else
    return attention_portable;
#endif
}

#if defined(UNIPREFILL_ENGINE_AMX)
const tile_products& amx_products(bool split) {
    return split ? products_amx_bf16x3 : products_amx_bf16;
}
#endif

} // namespace engine::cpu
