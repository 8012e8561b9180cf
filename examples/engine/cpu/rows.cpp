// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cpu/rows.hpp"

#include "engine/cpu/kernels.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <string>

namespace engine::cpu {

namespace {

// Below this many elements, waking the threads takes longer than the work.
constexpr std::int64_t worth_threads = 16384;

template <class Work>
void for_rows(std::int64_t rows, std::int64_t elements, const Work& work) {
#pragma omp parallel for schedule(static) if (rows * elements >= worth_threads)
    for (std::int64_t row = 0; row < rows; ++row) {
        work(row);
    }
}

void check_index(const char* argument, const std::int32_t* values, std::int64_t count, std::int64_t limit) {
    for (std::int64_t i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= limit) {
            throw error(argument, "0 to " + std::to_string(limit - 1),
                        std::to_string(values[i]) + " in row " + std::to_string(i));
        }
    }
}

} // namespace

void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float epsilon, std::int64_t rows,
              int dim, float* y, std::int64_t y_stride) {
    const row_kernels& kernels = rows_for(best_simd());
    for_rows(rows, dim, [&](std::int64_t row) {
        kernels.rms_norm(x + row * x_stride, weight, dim, epsilon, y + row * y_stride);
    });
}

rope_table::rope_table(std::int32_t positions, int dims, double base, const float* factors)
    : positions_(positions)
    , dims_(dims) {
    if (positions < 0) throw error("positions", "0 or more", std::to_string(positions));
    if (dims < 0 || dims % 2 != 0) throw error("dims", "an even number", std::to_string(dims));
    if (!(base > 0)) throw error("base", "a number above 0", std::to_string(base));
    table_.resize(static_cast<std::size_t>(positions) * static_cast<std::size_t>(dims));
    for (int pair = 0; pair < dims / 2; ++pair) {
        const double frequency = std::pow(base, -2.0 * pair / dims) /
                                 (factors == nullptr ? 1.0 : static_cast<double>(factors[pair]));
        for (std::int32_t position = 0; position < positions; ++position) {
            const std::size_t at = static_cast<std::size_t>(position) * static_cast<std::size_t>(dims) +
                                   2 * static_cast<std::size_t>(pair);
            table_[at] = static_cast<float>(std::cos(position * frequency));
            table_[at + 1] = static_cast<float>(std::sin(position * frequency));
        }
    }
}

void rope(float* x, std::int64_t row_stride, std::int64_t head_stride, int heads, std::int64_t rows,
          const std::int32_t* positions, const rope_table& table) {
    check_index("positions", positions, rows, table.positions());
    const row_kernels& kernels = rows_for(best_simd());
    for_rows(rows, static_cast<std::int64_t>(heads) * table.dims(), [&](std::int64_t row) {
        for (int head = 0; head < heads; ++head) {
            kernels.rotate_pairs(x + row * row_stride + head * head_stride, table.of(positions[row]),
                                 table.dims() / 2);
        }
    });
}

void swiglu(const float* gate, std::int64_t gate_stride, const float* up, std::int64_t up_stride,
            std::int64_t rows, int dim, float* y, std::int64_t y_stride) {
    const row_kernels& kernels = rows_for(best_simd());
    for_rows(rows, dim, [&](std::int64_t row) {
        kernels.swiglu(gate + row * gate_stride, up + row * up_stride, dim, y + row * y_stride);
    });
}

void add(const float* x, std::int64_t x_stride, std::int64_t rows, int dim, float* y, std::int64_t y_stride) {
    const row_kernels& kernels = rows_for(best_simd());
    for_rows(rows, dim, [&](std::int64_t row) { kernels.add(x + row * x_stride, dim, y + row * y_stride); });
}

void gather(const float* table, std::int64_t table_rows, int dim, const std::int32_t* ids, std::int64_t rows,
            float* y, std::int64_t y_stride) {
    check_index("ids", ids, rows, table_rows);
    for_rows(rows, dim, [&](std::int64_t row) {
        std::copy_n(table + ids[row] * std::int64_t{dim}, dim, y + row * y_stride);
    });
}

} // namespace engine::cpu
