// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Attention with bf16 matrix tiles (AMX). A block is 32 query rows, two tiles high; a key tile is 128 keys.
// Products run on 2 x 2 tiles of 16 x 16 sums; the softmax between them in AVX-512. With split operands, x =
// high + low in bf16 each, high*high + low*high + high*low go into the same sums. Compiled for Sapphire
// Rapids and later, reached only through the table: see simd_kernels.inl on inline functions of other
// headers.

#include "engine/cpu/kernels_tables.hpp"

#include <immintrin.h>

namespace engine::cpu {

namespace {

constexpr int block_rows = 32;
constexpr int tile_keys = 128;
constexpr int dim_multiple = 32;
constexpr std::size_t tile_bytes = 1024; // 16 rows of 64 bytes
constexpr int half_tile = tile_keys / 2;

// All eight tiles are 16 rows of 64 bytes.
struct alignas(64) tile_shapes {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(tile_shapes) == 64);
constexpr tile_shapes shapes{};

// Packed left operand [32 rows, depth]: for each 32 of depth, two tiles (rows 0-15, 16-31) whose row holds 32
// depths. Packed right operand [depth, columns]: for each 16 columns a strip of one tile for each 32 of
// depth, whose row r holds the pairs (depth 2r, 2r + 1) of its columns. Split operands: the high part of the
// left operand or of a strip, then the low part.

inline void multiply_step() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

// c[32, 32] = left * right for two neighbouring strips of `depth_tiles` tiles, of which [from, to) are
// multiplied; c_bytes is its row stride.
template <bool split>
inline void multiply(const std::byte* left, const std::byte* right, int depth_tiles, int from, int to,
                     float* c, std::size_t c_bytes) {
    const std::size_t part = static_cast<std::size_t>(depth_tiles) * tile_bytes;
    const std::size_t strip = split ? 2 * part : part;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = from; k < to; ++k) {
        const std::byte* a = left + static_cast<std::size_t>(k) * 2 * tile_bytes;
        const std::byte* b = right + static_cast<std::size_t>(k) * tile_bytes;
        _tile_loadd(6, b, 64);
        _tile_loadd(7, b + strip, 64);
        if (split) {
            _tile_loadd(4, a + 2 * part, 64);
            _tile_loadd(5, a + 2 * part + tile_bytes, 64);
            multiply_step();
        }
        _tile_loadd(4, a, 64);
        _tile_loadd(5, a + tile_bytes, 64);
        multiply_step();
        if (split) {
            _tile_loadd(6, b + part, 64);
            _tile_loadd(7, b + strip + part, 64);
            multiply_step();
        }
    }
    std::byte* const lower = reinterpret_cast<std::byte*>(c) + 16 * c_bytes;
    _tile_stored(0, c, c_bytes);
    _tile_stored(1, c + 16, c_bytes);
    _tile_stored(2, lower, c_bytes);
    _tile_stored(3, lower + 64, c_bytes);
}
template <bool split>
inline void multiply(const std::byte* left, const std::byte* right, int depth_tiles, float* c,
                     std::size_t c_bytes) {
    multiply<split>(left, right, depth_tiles, 0, depth_tiles, c, c_bytes);
}

// 2^x for x <= 0, exact at 0: 2^n * p(f), n the nearest integer, p with the smallest maximal relative error
// on
// [-1/2, 1/2]. Degree 4 (2.8e-06) is finer than split products are, degree 3 (1.0e-04) than bf16 weights.
template <bool split>
inline __m512 exp2_of(__m512 x) {
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p;
    if (split) {
        p = _mm512_fmadd_ps(_mm512_set1_ps(0.009582852944731712f), f, _mm512_set1_ps(0.055906426161527634f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.24024099111557007f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931241750717163f));
    } else {
        p = _mm512_fmadd_ps(_mm512_set1_ps(0.05500893294811249f), f, _mm512_set1_ps(0.24221095442771912f));
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6932829022407532f));
    }
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

inline int within_tile(std::int64_t key) {
    return key < 0 ? 0 : key > tile_keys ? tile_keys : static_cast<int>(key);
}

inline __mmask16 visible(int from, int to, int vector) {
    const int a = from - vector * 16 < 0 ? 0 : from - vector * 16 > 16 ? 16 : from - vector * 16;
    const int b = to - vector * 16 < 0 ? 0 : to - vector * 16 > 16 ? 16 : to - vector * 16;
    return static_cast<__mmask16>(((1u << b) - 1u) & ~((1u << a) - 1u));
}

// One number for each of 16 vectors: the largest of its lanes.
inline __m512 max_of_each(const __m512 (&v)[16]) {
    // Each step halves the vectors: it joins two, a and b, into one that holds for every pair of lane groups
    // the maximum, a's in the even groups and b's in the odd ones. Four steps leave lane i for vector i.
    __m512 a[8], b[4], c[2];
    for (int i = 0; i < 8; ++i) {
        const __m512 x = v[i], y = v[i + 8];
        a[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x44), _mm512_shuffle_f32x4(x, y, 0xee));
    }
    for (int i = 0; i < 4; ++i) {
        const __m512 x = a[i], y = a[i + 4];
        b[i] = _mm512_max_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
    }
    for (int i = 0; i < 2; ++i) {
        const __m512 x = b[i], y = b[i + 2];
        c[i] = _mm512_max_ps(_mm512_shuffle_ps(x, y, 0x44), _mm512_shuffle_ps(x, y, 0xee));
    }
    const __m512 d = _mm512_max_ps(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xdd));
    // Lane 4 g + l of d belongs to vector 8 * bit0(g) + 4 * bit1(g) + 2 * bit0(l) + bit1(l).
    const __m512i order = _mm512_set_epi32(15, 13, 14, 12, 7, 5, 6, 4, 11, 9, 10, 8, 3, 1, 2, 0);
    return _mm512_permutexvar_ps(order, d);
}

// Scores of a row, with -infinity for keys that it doesn't see.
template <bool whole, int vectors>
inline void load_scores(const float* scores, int from, int to, __m512 (&s)[vectors]) {
    const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
        s[j] = whole ? _mm512_load_ps(scores + j * 16)
                     : _mm512_mask_load_ps(lowest, visible(from, to, j), scores + j * 16);
    }
}
inline __m512 max_by_lane(const __m512 (&v)[4]) {
    return _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
}
inline __m512 max_by_lane(const __m512 (&v)[8]) {
    const __m512 a = _mm512_max_ps(_mm512_max_ps(v[0], v[1]), _mm512_max_ps(v[2], v[3]));
    const __m512 b = _mm512_max_ps(_mm512_max_ps(v[4], v[5]), _mm512_max_ps(v[6], v[7]));
    return _mm512_max_ps(a, b);
}
inline __m512 sum_by_lane(const __m512 (&v)[4]) {
    return _mm512_add_ps(_mm512_add_ps(v[0], v[1]), _mm512_add_ps(v[2], v[3]));
}
inline __m512 sum_by_lane(const __m512 (&v)[8]) {
    const __m512 a = _mm512_add_ps(_mm512_add_ps(v[0], v[1]), _mm512_add_ps(v[2], v[3]));
    const __m512 b = _mm512_add_ps(_mm512_add_ps(v[4], v[5]), _mm512_add_ps(v[6], v[7]));
    return _mm512_add_ps(a, b);
}

// Puts 32 weights where the left operand has them.
template <bool split>
inline void store_weights(__m512 first, __m512 second, std::byte* at, std::size_t low_part) {
    if (split) {
        // The high part is cut off, not rounded: the low part takes up the rest, and the pair is as good.
        const __m512i cut = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
        const __m512i a = _mm512_castps_si512(first), b = _mm512_castps_si512(second);
        const __m512 a_low = _mm512_sub_ps(first, _mm512_castsi512_ps(_mm512_and_si512(a, cut)));
        const __m512 b_low = _mm512_sub_ps(second, _mm512_castsi512_ps(_mm512_and_si512(b, cut)));
        const __m512i upper = _mm512_set_epi32(
            0x003f003d, 0x003b0039, 0x00370035, 0x00330031, 0x002f002d, 0x002b0029, 0x00270025, 0x00230021,
            0x001f001d, 0x001b0019, 0x00170015, 0x00130011, 0x000f000d, 0x000b0009, 0x00070005, 0x00030001);
        _mm512_store_si512(at, _mm512_permutex2var_epi16(a, upper, b));
        const __m512bh low = _mm512_cvtne2ps_pbh(b_low, a_low);
        __builtin_memcpy(at + low_part, &low, sizeof low);
    } else {
        const __m512bh rounded = _mm512_cvtne2ps_pbh(second, first);
        __builtin_memcpy(at, &rounded, sizeof rounded);
    }
}

// One row of scores to packed weights; adds them up by lane.
template <bool split, bool whole, int vectors>
inline void soften(const float* scores, int from, int to, float maximum, float factor, float* sum,
                   std::byte* weights, std::size_t weights_low) {
    __m512 s[vectors];
    load_scores<whole>(scores, from, to, s);
    const __m512 reference = _mm512_set1_ps(maximum);
#pragma GCC unroll 8
    for (int j = 0; j < vectors; ++j) {
        s[j] = exp2_of<split>(_mm512_sub_ps(s[j], reference));
        if (!whole) s[j] = _mm512_maskz_mov_ps(visible(from, to, j), s[j]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < vectors; j += 2) { // two tiles for each two vectors
        store_weights<split>(s[j], s[j + 1], weights + static_cast<std::size_t>(j) * tile_bytes, weights_low);
    }
    _mm512_storeu_ps(sum, _mm512_fmadd_ps(_mm512_loadu_ps(sum), _mm512_set1_ps(factor), sum_by_lane(s)));
}

// New maxima of 16 rows, and the factors for what was summed under the old ones. Rows that see no key keep
// theirs.
template <int vectors>
inline void raise_maxima(const float* scores, const int* from, const int* to, float* maximum, float* factor) {
    __m512 top[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) {
        __m512 s[vectors];
        if (from[r] == 0 && to[r] == vectors * 16) {
            load_scores<true>(scores + r * tile_keys, 0, to[r], s);
        } else {
            load_scores<false>(scores + r * tile_keys, from[r], to[r], s);
        }
        top[r] = max_by_lane(s);
    }
    const __m512 before = _mm512_loadu_ps(maximum);
    const __m512 after = _mm512_max_ps(max_of_each(top), before);
    const __mmask16 first = _mm512_cmp_ps_mask(before, _mm512_set1_ps(-__builtin_inff()), _CMP_EQ_OQ);
    const __m512 ratio = exp2_of<true>(_mm512_sub_ps(before, after));
    _mm512_storeu_ps(maximum, after);
    _mm512_storeu_ps(factor, _mm512_maskz_mov_ps(static_cast<__mmask16>(~first), ratio));
}

// Bytes of the strips of `columns` columns.
template <bool split>
inline std::size_t strips_bytes(int columns, int depth) {
    return static_cast<std::size_t>(columns) * static_cast<std::size_t>(depth) * (split ? 4 : 2);
}

// The keys that the rows of a block see of a tile.
struct seen_keys {
    int from[block_rows], to[block_rows];
    int first_row = block_rows, last_row = -1; // that see any
    int first = tile_keys, last = 0;           // that any sees

    seen_keys(const attention_tile& tile, std::int64_t row) {
        for (int r = 0; r < block_rows; ++r) {
            from[r] = within_tile(tile.from[row + r] - tile.first_key);
            to[r] = within_tile(tile.to[row + r] - tile.first_key);
            if (from[r] < to[r]) {
                first_row = r < first_row ? r : first_row;
                last_row = r;
                first = from[r] < first ? from[r] : first;
                last = to[r] > last ? to[r] : last;
            }
        }
    }
    bool sees(int row) const { return from[row] < to[row]; }
};

// Scores of a block to weights, of `vectors` vectors of keys from `base` on, which are all that any row sees.
// A row's numbers are the same as over the whole tile: keys that it doesn't see add zeros.
template <bool split, int vectors>
inline void weigh(const attention_tile& tile, std::int64_t row, const seen_keys& seen, int base,
                  const float* scores, float* factor, std::byte* weights, std::size_t weight_bytes) {
    int from[block_rows], to[block_rows];
    for (int r = 0; r < block_rows; ++r) {
        from[r] = seen.sees(r) ? seen.from[r] - base : 0;
        to[r] = seen.sees(r) ? seen.to[r] - base : 0;
    }
    scores += base;
    weights += static_cast<std::size_t>(base / 16) * tile_bytes;
    for (int half = 0; half < block_rows; half += 16) {
        raise_maxima<vectors>(scores + half * tile_keys, from + half, to + half, tile.maximum + row + half,
                              factor + half);
    }
    for (int r = seen.first_row; r <= seen.last_row; ++r) {
        if (!seen.sees(r)) continue;
        std::byte* at =
            weights + static_cast<std::size_t>(r / 16) * tile_bytes + static_cast<std::size_t>(r % 16) * 64;
        const float* s = scores + r * tile_keys;
        float* sum = tile.sum + (row + r) * 16;
        if (from[r] == 0 && to[r] == vectors * 16) {
            soften<split, true, vectors>(s, 0, to[r], tile.maximum[row + r], factor[r], sum, at,
                                         weight_bytes);
        } else {
            soften<split, false, vectors>(s, from[r], to[r], tile.maximum[row + r], factor[r], sum, at,
                                          weight_bytes);
        }
    }
}

template <bool split>
void attend(const attention_tile& tile) {
    constexpr std::size_t weight_bytes = static_cast<std::size_t>(block_rows) * tile_keys * 2;
    alignas(64) float scores[block_rows * tile_keys];
    alignas(64) float products[block_rows * 32];
    alignas(64) std::byte weights[weight_bytes * (split ? 2 : 1)];
    const int dim = tile.dim, dim_tiles = dim / 32;
    const std::size_t query_bytes = static_cast<std::size_t>(block_rows) * static_cast<std::size_t>(dim) * 2;
    const auto* keys = static_cast<const std::byte*>(tile.keys);
    const auto* values = static_cast<const std::byte*>(tile.values);
    // Rows without a key in this tile leave theirs as they are: whatever is there is multiplied and thrown
    // away.
    __builtin_memset(weights, 0, sizeof weights);
    _tile_loadconfig(&shapes);
    for (int block = 0; block < tile.row_blocks; ++block) {
        const std::int64_t row = static_cast<std::int64_t>(block) * block_rows;
        const seen_keys seen(tile, row);
        if (seen.last_row < 0) continue;
        const int first = seen.first / 32,
                  last = (seen.last + 31) / 32; // of 32 keys each: no row sees others
        const std::byte* queries = static_cast<const std::byte*>(tile.queries) +
                                   static_cast<std::size_t>(block) * query_bytes * (split ? 2 : 1);
        for (int i = first; i < last; ++i) {
            multiply<split>(queries, keys + strips_bytes<split>(i * 32, dim), dim_tiles, scores + i * 32,
                            tile_keys * sizeof(float));
        }
        alignas(64) float factor[block_rows];
        if (seen.last <= half_tile) {
            weigh<split, 4>(tile, row, seen, 0, scores, factor, weights, weight_bytes);
        } else if (seen.first >= half_tile) {
            weigh<split, 4>(tile, row, seen, half_tile, scores, factor, weights, weight_bytes);
        } else {
            weigh<split, 8>(tile, row, seen, 0, scores, factor, weights, weight_bytes);
        }
        for (int column = 0; column < dim; column += 32) {
            multiply<split>(weights, values + strips_bytes<split>(column, tile_keys), tile_keys / 32, first,
                            last, products, 32 * sizeof(float));
            for (int r = seen.first_row; r <= seen.last_row; ++r) {
                if (!seen.sees(r)) continue;
                float* out = tile.out + (row + r) * dim + column;
                const __m512 scale = _mm512_set1_ps(factor[r]);
                const float* p = products + r * 32;
                _mm512_storeu_ps(out, _mm512_fmadd_ps(_mm512_loadu_ps(out), scale, _mm512_load_ps(p)));
                _mm512_storeu_ps(out + 16,
                                 _mm512_fmadd_ps(_mm512_loadu_ps(out + 16), scale, _mm512_load_ps(p + 16)));
            }
        }
    }
    _tile_release();
}

// 32 numbers, of which the first `count` are at x and the others zero, as two bf16 parts. Rounds to nearest
// even and flushes subnormal numbers, as the tiles themselves do.
inline void to_bf16(const float* x, int count, std::uint16_t (&high)[32], std::uint16_t (&low)[32]) {
    const std::uint32_t some = count >= 32 ? 0xffffffffu : (1u << count) - 1u;
    const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some), x);
    const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(some >> 16), x + 16);
    const __m512bh h = _mm512_cvtne2ps_pbh(b, a);
    __builtin_memcpy(high, &h, sizeof h);
    __m256i halves[2];
    __builtin_memcpy(halves, &h, sizeof h);
    const __m512 a_high = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves[0]), 16));
    const __m512 b_high = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves[1]), 16));
    const __m512bh l = _mm512_cvtne2ps_pbh(_mm512_sub_ps(b, b_high), _mm512_sub_ps(a, a_high));
    __builtin_memcpy(low, &l, sizeof l);
}

inline int tiles_of(int depth) {
    return (depth + 31) / 32;
}

// `count` rows of 32 that exist: the others become zeros.
template <bool split>
void pack_left(const float* from, std::int64_t stride, int count, int depth, void* packed) {
    auto* out = static_cast<std::byte*>(packed);
    const std::size_t low_part = static_cast<std::size_t>(tiles_of(depth)) * 2 * tile_bytes;
    if (count < 32) __builtin_memset(out, 0, split ? 2 * low_part : low_part);
    std::uint16_t high[32], low[32];
    for (int r = 0; r < count; ++r) {
        for (int k = 0; k < tiles_of(depth); ++k) {
            to_bf16(from + r * stride + k * 32, depth - k * 32, high, low);
            std::byte* at = out + static_cast<std::size_t>(2 * k + r / 16) * tile_bytes +
                            static_cast<std::size_t>(r % 16) * 64;
            __builtin_memcpy(at, high, sizeof high);
            if (split) __builtin_memcpy(at + low_part, low, sizeof low);
        }
    }
}

// The right operand's columns come as `count` rows: `columns` of them, a multiple of 16, are packed.
template <bool split>
void pack_right_columns(const float* from, std::int64_t stride, int count, int columns, int depth,
                        void* packed) {
    auto* out = static_cast<std::byte*>(packed);
    const std::size_t low_part = static_cast<std::size_t>(tiles_of(depth)) * tile_bytes;
    const std::size_t strip = split ? 2 * low_part : low_part;
    if (count < columns) __builtin_memset(out, 0, static_cast<std::size_t>(columns / 16) * strip);
    std::uint16_t high[32], low[32];
    for (int column = 0; column < count; ++column) {
        for (int k = 0; k < tiles_of(depth); ++k) {
            to_bf16(from + column * stride + k * 32, depth - k * 32, high, low);
            std::byte* at = out + static_cast<std::size_t>(column / 16) * strip +
                            static_cast<std::size_t>(k) * tile_bytes +
                            static_cast<std::size_t>(column % 16) * 4;
            for (std::size_t pair = 0; pair < 16; ++pair) {
                __builtin_memcpy(at + pair * 64, high + 2 * pair, 4);
                if (split) __builtin_memcpy(at + low_part + pair * 64, low + 2 * pair, 4);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// The tables.

template <bool split>
std::size_t block_bytes(int depth) {
    return static_cast<std::size_t>(tiles_of(depth)) * 2 * tile_bytes * (split ? 2 : 1);
}

template <bool split>
void pack_right(const float* from, std::int64_t stride, int count, int depth, void* packed) {
    pack_right_columns<split>(from, stride, count, 32, depth, packed);
}

template <bool split>
void multiply_block(const void* left, std::int64_t count, const void* right, int columns, int depth, float* y,
                    std::int64_t y_stride, bool add) {
    alignas(64) float sums[32 * 32];
    const auto* b = static_cast<const std::byte*>(right);
    const std::uint32_t some = columns == 32 ? 0xffffffffu : (1u << columns) - 1u;
    _tile_loadconfig(&shapes);
    for (std::int64_t row = 0; row < count; row += 32) {
        const std::byte* a = static_cast<const std::byte*>(left) +
                             static_cast<std::size_t>(row / 32) * block_bytes<split>(depth);
        float* to = y + row * y_stride;
        const std::int64_t rows = count - row < 32 ? count - row : 32;
        if (rows == 32 && columns == 32 && !add) {
            multiply<split>(a, b, tiles_of(depth), to, static_cast<std::size_t>(y_stride) * sizeof(float));
            continue;
        }
        multiply<split>(a, b, tiles_of(depth), sums, 32 * sizeof(float));
        for (std::int64_t r = 0; r < rows; ++r) {
            for (int half = 0; half < 2; ++half) {
                const auto mask = static_cast<__mmask16>(some >> (16 * half));
                float* at = to + r * y_stride + 16 * half;
                __m512 sum = _mm512_load_ps(sums + r * 32 + 16 * half);
                if (add) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, at));
                _mm512_mask_storeu_ps(at, mask, sum);
            }
        }
    }
    _tile_release();
}

template <bool split>
std::size_t query_block_bytes(int dim) {
    return block_bytes<split>(dim);
}
template <bool split>
std::size_t key_tile_bytes(int dim) {
    return strips_bytes<split>(tile_keys, dim);
}

template <bool split>
void pack_queries(const float* rows, int dim, void* packed) {
    pack_left<split>(rows, dim, block_rows, dim, packed);
}

template <bool split>
void pack_keys(const float* rows, int dim, void* packed) {
    pack_right_columns<split>(rows, dim, tile_keys, tile_keys, dim, packed);
}

template <bool split>
void pack_values(const float* rows, int dim, void* packed) {
    auto* out = static_cast<std::byte*>(packed);
    constexpr std::size_t low_part = tile_keys / 32 * tile_bytes;
    constexpr std::size_t strip = split ? 2 * low_part : low_part;
    std::uint16_t high[32], low[32];
    for (int key = 0; key < tile_keys; ++key) {
        for (int d = 0; d < dim; d += 32) {
            to_bf16(rows + static_cast<std::int64_t>(key) * dim + d, 32, high, low);
            for (int half = 0; half < 2; ++half) {
                std::byte* at = out + static_cast<std::size_t>(d / 16 + half) * strip +
                                static_cast<std::size_t>(key / 32) * tile_bytes +
                                static_cast<std::size_t>(key % 32 / 2) * 64 +
                                static_cast<std::size_t>(key % 2) * 2;
                for (std::size_t n = 0; n < 16; ++n) {
                    __builtin_memcpy(at + n * 4, high + static_cast<std::size_t>(half) * 16 + n, 2);
                    if (split)
                        __builtin_memcpy(at + low_part + n * 4, low + static_cast<std::size_t>(half) * 16 + n,
                                         2);
                }
            }
        }
    }
}

template <bool split>
constexpr attention_kernel attention_table = {block_rows,
                                              tile_keys,
                                              dim_multiple,
                                              16,
                                              query_block_bytes<split>,
                                              key_tile_bytes<split>,
                                              key_tile_bytes<split>,
                                              pack_queries<split>,
                                              pack_keys<split>,
                                              pack_values<split>,
                                              attend<split>};
template <bool split>
constexpr tile_products products_table = {block_bytes<split>, pack_left<split>, pack_right<split>,
                                          multiply_block<split>};

} // namespace

const attention_kernel attention_amx_bf16 = attention_table<false>;
const attention_kernel attention_amx_bf16x3 = attention_table<true>;
const tile_products products_amx_bf16 = products_table<false>;
const tile_products products_amx_bf16x3 = products_table<true>;

} // namespace engine::cpu
