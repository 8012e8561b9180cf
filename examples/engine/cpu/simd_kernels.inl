// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The inner loops in terms of vectors of `lanes` floats. The including file defines, before this one, inside
// namespace engine::cpu and an unnamed namespace:
//   constexpr int lanes        floats in a vector register
//   constexpr int tile_vectors vectors in a row of the register tile
// It is compiled with the flags of its instruction set, so nothing here may call an inline function of
// another header: the linker could hand that copy, with instructions that the processor lacks, to everybody
// else.

using vec = float __attribute__((vector_size(lanes * 4)));
using ivec = std::int32_t __attribute__((vector_size(lanes * 4)));
using uvec = std::uint32_t __attribute__((vector_size(lanes * 4)));
using hvec = std::uint16_t __attribute__((vector_size(lanes * 2)));

inline vec load(const float* p) {
    vec v;
    __builtin_memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, vec v) {
    __builtin_memcpy(p, &v, sizeof v);
}
inline vec all(float x) {
    return x -
           vec{}; // subtracting zero changes nothing, so compilers leave the broadcast alone; adding it would
}
inline vec larger(vec a, vec b) {
    return a > b ? a : b;
}
inline ivec lane_index() {
    ivec v;
    for (int i = 0; i < lanes; ++i) {
        v[i] = i;
    }
    return v;
}

template <int width>
struct half_of {
    // GCC ignores the attribute in a dependent alias. NOLINTNEXTLINE(modernize-use-using)
    typedef float type __attribute__((vector_size(width * 2)));
};
// Combines the upper half of a vector with the lower one until one number is left.
template <int width, class Vector, class Combine>
inline float reduce(Vector v, Combine combine) {
    if constexpr (width == 1) {
        return v[0];
    } else if constexpr (width == 2) {
        return combine(v[0], v[1]);
    } else {
        typename half_of<width>::type lower, upper;
        __builtin_memcpy(&lower, &v, sizeof lower);
        __builtin_memcpy(&upper, reinterpret_cast<const char*>(&v) + sizeof lower, sizeof upper);
        return reduce<width / 2>(combine(lower, upper), combine);
    }
}
inline float sum_of(vec v) {
    return reduce<lanes>(v, [](auto a, auto b) { return a + b; });
}
inline float max_of(vec v) {
    return reduce<lanes>(v, [](auto a, auto b) { return a > b ? a : b; });
}

// 2^x = 2^n * 2^f, n the nearest integer, f in [-1/2, 1/2] by a polynomial of degree 5 that is 1 at 0 and has
// the smallest maximal relative error there, 9.2e-8 (fitted by iteratively reweighted least squares).
inline vec exp2_of(vec x) {
    const vec bounded = x > all(127.0f) ? all(127.0f) : x;
    // Adding 1.5 * 2^23 leaves the rounded integer in the lowest bits of the sum.
    const vec shifted = bounded + all(12582912.0f);
    const vec f = bounded - (shifted - all(12582912.0f));
    vec p = all(0.001326472731307149f);
    p = p * f + all(0.009671512991189957f);
    p = p * f + all(0.05550733581185341f);
    p = p * f + all(0.24022242426872253f);
    p = p * f + all(0.6931470036506653f);
    p = p * f + all(1.0f);
    uvec bits, exponent; // unsigned, as it wraps around below -126, where the result isn't used
    __builtin_memcpy(&bits, &p, sizeof p);
    __builtin_memcpy(&exponent, &shifted, sizeof shifted);
    bits += exponent << 23;
    __builtin_memcpy(&p, &bits, sizeof p);
    return x < all(-126.0f) ? vec{} : p;
}

// ---------------------------------------------------------------------------------------------------------------------
// Rows.

constexpr float log2_e = 1.44269504088896340736f;

void rms_norm(const float* x, const float* weight, int n, float epsilon, float* y) {
    vec squares{};
    int i = 0;
    for (; i + lanes <= n; i += lanes) {
        const vec v = load(x + i);
        squares += v * v;
    }
    float sum = sum_of(squares);
    for (int j = i; j < n; ++j) {
        sum += x[j] * x[j];
    }
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + epsilon);
    for (i = 0; i + lanes <= n; i += lanes) {
        store(y + i, load(x + i) * factor * load(weight + i));
    }
    for (; i < n; ++i) {
        y[i] = x[i] * factor * weight[i];
    }
}

void swiglu(const float* gate, const float* up, int n, float* y) {
    for (int i = 0; i < n; i += lanes) {
        if (i + lanes <= n) {
            const vec g = load(gate + i);
            store(y + i, g / (exp2_of(g * -log2_e) + 1.0f) * load(up + i));
        } else { // the same vector code for the rest, so that an element's place doesn't matter
            const std::size_t rest = static_cast<std::size_t>(n - i) * sizeof(float);
            vec g{}, u{};
            __builtin_memcpy(&g, gate + i, rest);
            __builtin_memcpy(&u, up + i, rest);
            const vec out = g / (exp2_of(g * -log2_e) + 1.0f) * u;
            __builtin_memcpy(y + i, &out, rest);
        }
    }
}

void rotate_pairs(float* x, const float* cos_sin, int pairs) {
    for (int i = 0; i < pairs; ++i) {
        const float c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * c - b * s;
        x[2 * i + 1] = a * s + b * c;
    }
}

void add(const float* x, int n, float* y) {
    for (int i = 0; i < n; ++i) {
        y[i] += x[i];
    }
}

// Rounds to nearest even; a NaN stays one.
inline uvec bf16_bits(vec x) {
    uvec bits;
    __builtin_memcpy(&bits, &x, sizeof x);
    const uvec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    const uvec quiet = (bits >> 16) | 0x40u;
    return (bits & 0x7fffffffu) > (uvec{} + 0x7f800000u) ? quiet : rounded;
}
inline vec from_bf16_bits(uvec bits) {
    const uvec wide = bits << 16;
    vec x;
    __builtin_memcpy(&x, &wide, sizeof x);
    return x;
}

void split_bf16(const float* x, int n, std::uint16_t* high, std::uint16_t* low) {
    for (int i = 0; i < n; i += lanes) {
        const int count = i + lanes <= n ? lanes : n - i;
        vec v{};
        __builtin_memcpy(&v, x + i, static_cast<std::size_t>(count) * sizeof(float));
        const uvec h = bf16_bits(v);
        const hvec high_part = __builtin_convertvector(h, hvec);
        __builtin_memcpy(high + i, &high_part, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
        if (low != nullptr) {
            const hvec low_part = __builtin_convertvector(bf16_bits(v - from_bf16_bits(h)), hvec);
            __builtin_memcpy(low + i, &low_part, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
        }
    }
}

void exp2_row(const float* x, int n, float* y) {
    for (int i = 0; i < n; i += lanes) {
        const std::size_t bytes = static_cast<std::size_t>(i + lanes <= n ? lanes : n - i) * sizeof(float);
        vec v{};
        __builtin_memcpy(&v, x + i, bytes);
        v = exp2_of(v);
        __builtin_memcpy(y + i, &v, bytes);
    }
}

constexpr row_kernels rows_table = {rms_norm, swiglu, rotate_pairs, add, split_bf16, exp2_row};

// ---------------------------------------------------------------------------------------------------------------------
// Attention in fp32. Queries are packed [dim][block_rows], keys [dim][tile_keys], values [tile_keys][dim]:
// both products then read their left operand by broadcast and their right one by vector.

constexpr int block_rows = 6;
constexpr int tile_keys = 64;
static_assert(tile_keys % (lanes * tile_vectors) == 0);

// c[block_rows][vectors * lanes] = sum over k of a[k * a_step_k + r * a_step_row] * b[k * b_step + column]
template <int vectors>
inline void register_tile(const float* a, std::int64_t a_step_k, std::int64_t a_step_row, const float* b,
                          std::int64_t b_step, int depth, vec (&c)[block_rows][vectors]) {
    vec sum[block_rows][vectors];
#pragma GCC unroll 8
    for (int r = 0; r < block_rows; ++r) { // NOLINT(modernize-loop-convert): only counted loops unroll
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
            sum[r][j] = vec{};
        }
    }
    for (int k = 0; k < depth; ++k) {
        vec right[vectors];
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
            right[j] = load(b + k * b_step + j * lanes);
        }
#pragma GCC unroll 8
        for (int r = 0; r < block_rows; ++r) {
            const vec left = all(a[k * a_step_k + r * a_step_row]);
#pragma GCC unroll 8
            for (int j = 0; j < vectors; ++j) {
                sum[r][j] += left * right[j];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < block_rows; ++r) {
#pragma GCC unroll 8
        for (int j = 0; j < vectors; ++j) {
            c[r][j] = sum[r][j];
        }
    }
}

// out = out * factor + weights * values for the rows that take part, `vectors` vectors of columns.
template <int vectors>
inline void add_values(const float* weights, const float* values, int dim, const bool* active,
                       const float* factor, float* out) {
    vec c[block_rows][vectors];
    register_tile<vectors>(weights, 1, tile_keys, values, dim, tile_keys, c);
    for (int r = 0; r < block_rows; ++r) {
        if (!active[r]) continue;
        for (int j = 0; j < vectors; ++j) {
            float* at = out + static_cast<std::int64_t>(r) * dim + j * lanes;
            store(at, load(at) * factor[r] + c[r][j]);
        }
    }
}

inline int within_tile(std::int64_t key) {
    return key < 0 ? 0 : key > tile_keys ? tile_keys : static_cast<int>(key);
}

// Turns one row of scores into weights and updates its maximum and sum; returns the factor for what was
// summed before.
inline float soften(float* scores, int from, int to, float& maximum, float* sum) {
    constexpr int count = tile_keys / lanes;
    const bool whole = from == 0 && to == tile_keys;
    const vec lowest = all(-__builtin_inff());
    const ivec lane = lane_index();
    vec s[count];
    vec top = all(maximum);
    for (int j = 0; j < count; ++j) {
        s[j] = load(scores + j * lanes);
        if (!whole) {
            const ivec key = lane + j * lanes;
            s[j] = ((key >= from) & (key < to)) ? s[j] : lowest;
        }
        top = larger(s[j], top);
    }
    const float new_maximum = max_of(top);
    const vec reference = all(new_maximum);
    vec total{};
    for (int j = 0; j < count; ++j) {
        vec weight = exp2_of(s[j] - reference);
        if (!whole) {
            const ivec key = lane + j * lanes;
            weight = ((key >= from) & (key < to)) ? weight : vec{};
        }
        total += weight;
        store(scores + j * lanes, weight);
    }
    const float factor = maximum == -__builtin_inff() ? 0.0f : exp2_of(all(maximum - new_maximum))[0];
    store(sum, load(sum) * factor + total);
    maximum = new_maximum;
    return factor;
}

void attend(const attention_tile& tile) {
    const int dim = tile.dim;
    const auto* keys = static_cast<const float*>(tile.keys);
    const auto* values = static_cast<const float*>(tile.values);
    alignas(64) float scores[block_rows * tile_keys];
    for (int block = 0; block < tile.row_blocks; ++block) {
        const std::int64_t row = static_cast<std::int64_t>(block) * block_rows;
        int from[block_rows], to[block_rows];
        bool active[block_rows], any = false;
        for (int r = 0; r < block_rows; ++r) {
            from[r] = within_tile(tile.from[row + r] - tile.first_key);
            to[r] = within_tile(tile.to[row + r] - tile.first_key);
            active[r] = from[r] < to[r];
            any = any || active[r];
        }
        if (!any) continue;
        const float* queries = static_cast<const float*>(tile.queries) + row * dim;
        for (int column = 0; column < tile_keys; column += lanes * tile_vectors) {
            vec c[block_rows][tile_vectors];
            register_tile<tile_vectors>(queries, block_rows, 1, keys + column, tile_keys, dim, c);
            for (int r = 0; r < block_rows; ++r) {
                for (int j = 0; j < tile_vectors; ++j) {
                    store(scores + r * tile_keys + column + j * lanes, c[r][j]);
                }
            }
        }
        float factor[block_rows];
        for (int r = 0; r < block_rows; ++r) {
            if (active[r]) {
                factor[r] = soften(scores + r * tile_keys, from[r], to[r], tile.maximum[row + r],
                                   tile.sum + (row + r) * lanes);
            }
        }
        float* out = tile.out + row * dim;
        int column = 0;
        for (; column + lanes * tile_vectors <= dim; column += lanes * tile_vectors) {
            add_values<tile_vectors>(scores, values + column, dim, active, factor, out + column);
        }
        for (; column < dim; column += lanes) {
            add_values<1>(scores, values + column, dim, active, factor, out + column);
        }
    }
}

std::size_t query_block_bytes(int dim) {
    return static_cast<std::size_t>(dim) * block_rows * sizeof(float);
}
std::size_t key_tile_bytes(int dim) {
    return static_cast<std::size_t>(dim) * tile_keys * sizeof(float);
}

// [count][dim] to [dim][count]
template <int count>
inline void transpose(const float* rows, int dim, float* packed) {
    for (int d = 0; d < dim; ++d) {
        for (int r = 0; r < count; ++r) {
            packed[static_cast<std::int64_t>(d) * count + r] = rows[static_cast<std::int64_t>(r) * dim + d];
        }
    }
}
void pack_queries(const float* rows, int dim, void* packed) {
    transpose<block_rows>(rows, dim, static_cast<float*>(packed));
}
void pack_keys(const float* rows, int dim, void* packed) {
    transpose<tile_keys>(rows, dim, static_cast<float*>(packed));
}
void pack_values(const float* rows, int dim, void* packed) {
    __builtin_memcpy(packed, rows, key_tile_bytes(dim));
}

constexpr attention_kernel attention_table = {block_rows,        tile_keys,      lanes,          lanes,
                                              query_block_bytes, key_tile_bytes, key_tile_bytes, pack_queries,
                                              pack_keys,         pack_values,    attend};
