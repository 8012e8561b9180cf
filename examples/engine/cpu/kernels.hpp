// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/features.hpp"

#include <cstddef>
#include <cstdint>

/// Inner loops, compiled once for each instruction set and reached through tables of functions chosen at run
/// time. The threads, the shapes and the checks are elsewhere: everything here works on one row or one tile.
namespace engine::cpu {

/// Loops over the elements of one row. Sums are taken in an order that depends on the length alone.
struct row_kernels {
    /// y = x / sqrt(mean(x^2) + epsilon) * weight
    void (*rms_norm)(const float* x, const float* weight, int n, float epsilon, float* y);
    /// y = gate / (1 + exp(-gate)) * up
    void (*swiglu)(const float* gate, const float* up, int n, float* y);
    /// Rotates the pairs (x[2i], x[2i+1]) by angle i, whose cosine and sine are cos_sin[2i] and
    /// cos_sin[2i+1].
    void (*rotate_pairs)(float* x, const float* cos_sin, int pairs);
    /// y += x
    void (*add)(const float* x, int n, float* y);
    /// high = bf16(x), low = bf16(x - high), both rounded to nearest even; low may be null.
    void (*split_bf16)(const float* x, int n, std::uint16_t* high, std::uint16_t* low);
    /// y = 2^x; relative error below 2e-7 for x in [-126, 127], 0 below -126.
    void (*exp2)(const float* x, int n, float* y);
};

/// One row tile of queries against one tile of keys.
struct attention_tile {
    int row_blocks;           ///< blocks of `rows_per_block` rows
    int dim;                  ///< padded head dimension
    const void* queries;      ///< packed blocks
    const void* keys;         ///< one packed tile
    const void* values;       ///< one packed tile
    std::int64_t first_key;   ///< index of the tile's first key
    const std::int64_t* from; ///< by row: the first key it may see, and
    const std::int64_t* to;   ///< the one after the last
    float* maximum;           ///< [rows]: largest score yet (base 2), -infinity at first
    float* sum;               ///< [rows, sum_parts]: parts of the sum of 2^(score - maximum), 0 at first
    float* out;               ///< [rows, dim]: the sum of 2^(score - maximum) * value, 0 at first
};

/// Attention in one arithmetic. The packed forms are private to it; their sizes are all that others need. A
/// row's state after a tile depends on that row, its limits and the tile's keys; a row that sees no key of
/// the tile keeps its bits.
struct attention_kernel {
    int rows_per_block;
    int keys_per_tile;
    int dim_multiple; ///< head dimensions are padded with zeros to a multiple of this
    int sum_parts;
    std::size_t (*query_block_bytes)(int dim);
    std::size_t (*key_tile_bytes)(int dim);
    std::size_t (*value_tile_bytes)(int dim);
    /// rows: dense fp32 [rows_per_block or keys_per_tile, dim], missing rows and dimensions zero.
    void (*pack_queries)(const float* rows, int dim, void* packed);
    void (*pack_keys)(const float* rows, int dim, void* packed);
    void (*pack_values)(const float* rows, int dim, void* packed);
    void (*attend)(const attention_tile& tile);
};

/// Products with bf16 matrix tiles. `depth` is the length of a row of either operand, any number above 0; the
/// operands are packed by 32 rows, missing rows and depths as zeros. Each sum is taken in the order of depth
/// alone.
struct tile_products {
    static constexpr int rows = 32; ///< of the left operand in a block, and of the right one
    std::size_t (*block_bytes)(int depth);
    /// Up to 32 rows of fp32 with a stride in elements.
    void (*pack_left)(const float* from, std::int64_t stride, int count, int depth, void* packed);
    void (*pack_right)(const float* from, std::int64_t stride, int count, int depth, void* packed);
    /// y[i, j] (+)= left row i . right row j for `count` rows i of consecutive left blocks and `columns` rows
    /// j of one right block.
    void (*multiply)(const void* left, std::int64_t count, const void* right, int columns, int depth,
                     float* y, std::int64_t y_stride, bool add);
};

/// Tables for a level that this processor runs (best_simd() or lower).
const row_kernels& rows_for(simd_level level);
const attention_kernel& attention_for(simd_level level);
/// Matrix tiles; only where has_amx_bf16(). `split`: operands as two bf16 parts (arithmetic::bf16x3).
const attention_kernel& amx_attention(bool split);
const tile_products& amx_products(bool split);

} // namespace engine::cpu
