// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <vector>

/// Operations on rows of fp32. Each row is computed by itself, so its bits depend neither on the other rows
/// nor on the number of threads (OpenMP, the caller's current setting). Strides count elements. Nothing
/// allocates but rope_table.
namespace engine::cpu {

/// y = x / sqrt(mean(x^2) + epsilon) * weight, by row; y may be x.
void rms_norm(const float* x, std::int64_t x_stride, const float* weight, float epsilon, std::int64_t rows,
              int dim, float* y, std::int64_t y_stride);

/// Cosines and sines of rotary embedding by position: angle i of position p is p * base^(-2i / dims) /
/// factors[i].
class rope_table {
  public:
    rope_table() = default;
    /// `dims`: even, of each head's first dimensions. `positions`: those from 0 to positions - 1 can be
    /// rotated. `factors`: [dims / 2] or null (all 1). Computed in double, kept in fp32: positions * dims * 4
    /// bytes.
    rope_table(std::int32_t positions, int dims, double base, const float* factors = nullptr);

    std::int32_t positions() const { return positions_; }
    int dims() const { return dims_; }
    /// dims / 2 pairs (cosine, sine).
    const float* of(std::int32_t position) const {
        return table_.data() + static_cast<std::int64_t>(position) * dims_;
    }

  private:
    std::int32_t positions_ = 0;
    int dims_ = 0;
    std::vector<float> table_;
};

/// Rotates in place the pairs (x0, x1), (x2, x3), ... of each head by its row's position (Su et al. 2021, as
/// llama models in GGUF files order them). `positions`: [rows], each below table.positions(); throws
/// engine::error otherwise, before anything is changed.
void rope(float* x, std::int64_t row_stride, std::int64_t head_stride, int heads, std::int64_t rows,
          const std::int32_t* positions, const rope_table& table);

/// y = gate * sigmoid(gate) * up, by row (SwiGLU: Shazeer 2020); y may be gate or up.
void swiglu(const float* gate, std::int64_t gate_stride, const float* up, std::int64_t up_stride,
            std::int64_t rows, int dim, float* y, std::int64_t y_stride);

/// y += x, by row.
void add(const float* x, std::int64_t x_stride, std::int64_t rows, int dim, float* y, std::int64_t y_stride);

/// Row i of y is row `ids[i]` of a dense [table_rows, dim] table. Throws engine::error, before anything is
/// written, on an id outside the table.
void gather(const float* table, std::int64_t table_rows, int dim, const std::int32_t* ids, std::int64_t rows,
            float* y, std::int64_t y_stride);

} // namespace engine::cpu
