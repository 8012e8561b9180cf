// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/kernels_tables.hpp"

namespace engine::cpu {

namespace {

constexpr int lanes = 8;
constexpr int tile_vectors = 2;
#include "engine/cpu/simd_kernels.inl"

} // namespace

const row_kernels rows_avx2 = rows_table;
const attention_kernel attention_avx2 = attention_table;

} // namespace engine::cpu
