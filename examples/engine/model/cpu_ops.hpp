// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/attention.hpp"
#include "engine/cpu/products.hpp"
#include "engine/cpu/rows.hpp"
#include "engine/cpu/scratch.hpp"

#include <uniprefill/core/backend.hpp>

#include <cstdint>

namespace engine {

/// The operators of the forward pass on the CPU. The forward pass is written against these names, so that
/// another device is another struct with the same members. Matrices of activations are dense fp32 [rows,
/// columns].
class cpu_ops {
  public:
    using backend = uniprefill::backend::host;
    using matrix = cpu::matrix;
    using arithmetic = cpu::arithmetic;
    using rope_table = cpu::rope_table;
    using attention_call = cpu::attention_call;
    using key_lists = cpu::key_lists;

    explicit cpu_ops(arithmetic kind)
        : kind_(cpu::resolve(kind)) {}

    arithmetic kind() const { return kind_; }

    /// y = W x for every row.
    void multiply(const matrix& w, const float* x, std::int64_t rows, float* y) {
        cpu::multiply(w, x, w.in(), rows, y, w.out(), scratch_);
    }
    /// y += W x for every row.
    void multiply_add(const matrix& w, const float* x, std::int64_t rows, float* y) {
        cpu::multiply_add(w, x, w.in(), rows, y, w.out(), scratch_);
    }
    void rms_norm(const float* x, const float* weight, float epsilon, std::int64_t rows, int columns,
                  float* y) {
        cpu::rms_norm(x, columns, weight, epsilon, rows, columns, y, columns);
    }
    void rope(float* x, std::int64_t row_stride, int head_dim, int heads, std::int64_t rows,
              const std::int32_t* positions, const rope_table& table) {
        cpu::rope(x, row_stride, head_dim, heads, rows, positions, table);
    }
    /// The gate's rows [rows, 2 * columns] hold gate and up side by side; y is [rows, columns].
    void swiglu(const float* gate_up, std::int64_t rows, int columns, float* y) {
        cpu::swiglu(gate_up, 2 * std::int64_t{columns}, gate_up + columns, 2 * std::int64_t{columns}, rows,
                    columns, y, columns);
    }
    void attend(attention_call call) {
        call.kind = kind_;
        cpu::attend(call, scratch_);
    }
    /// (query, key) pairs that a call scores, over all query heads.
    static std::int64_t attention_pairs(const attention_call& call) { return cpu::attention_pairs(call); }

  private:
    arithmetic kind_;
    cpu::scratch scratch_;
};

} // namespace engine
