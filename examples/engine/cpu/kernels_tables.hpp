// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/kernels.hpp"

/// The tables that each instruction set's file defines; kernels.cpp chooses among them.
namespace engine::cpu {

extern const row_kernels rows_portable, rows_avx2, rows_avx512;
extern const attention_kernel attention_portable, attention_avx2, attention_avx512;
extern const attention_kernel attention_amx_bf16, attention_amx_bf16x3;
extern const tile_products products_amx_bf16, products_amx_bf16x3;

} // namespace engine::cpu
