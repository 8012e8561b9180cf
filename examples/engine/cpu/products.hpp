// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cpu/features.hpp"
#include "engine/cpu/scratch.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

namespace engine::cpu {

/// A weight matrix [out, in], held as its products want it: y[row] = W x[row].
///
/// Products run in fixed tiles of rows, the last one filled up with zeros, and fixed panels of columns, each
/// computed by one thread: a row's bits depend on that row and the weights alone, not on how many rows run
/// with it, where it stands among them, or the number of threads. fp32 products are oneDNN's; bf16 and bf16x3
/// ones run on this engine's matrix tiles, because a split product there needs one pass instead of three
/// (bench/results/cpu_products.json).
class matrix {
  public:
    /// Writes rows [first, first + count) of the matrix, dense fp32 [count, in], to `to`. Called from several
    /// threads at once, never twice for a row.
    using row_source = std::function<void(int first, int count, float* to)>;

    matrix() = default;
    /// Takes the rows piece by piece: besides the result, 4 (fp32, bf16x3) or 2 (bf16) bytes a weight, an
    /// fp32 copy of 32 rows for each thread is all that exists. `kind` is resolved for this processor. Throws
    /// engine::error unless out and in are at least 1, and what `source` throws.
    matrix(int out, int in, arithmetic kind, const row_source& source);
    /// The same from rows in memory: row o is at weights + o * stride.
    matrix(int out, int in, arithmetic kind, const float* weights, std::int64_t stride);

    int out() const;
    int in() const;
    /// How products are computed: fp32, bf16x3 or bf16.
    arithmetic kind() const;
    /// Bytes held.
    std::size_t bytes() const;

    explicit operator bool() const { return data_ != nullptr; }

  private:
    friend void multiply(const matrix&, const float*, std::int64_t, std::int64_t, float*, std::int64_t,
                         scratch&);
    friend void multiply_add(const matrix&, const float*, std::int64_t, std::int64_t, float*, std::int64_t,
                             scratch&);
    struct packed;
    std::shared_ptr<const packed> data_; // never changes once packed, so copies may share it
};

/// y = W x by row: x [rows, in] with row stride x_stride, y [rows, out] with row stride y_stride (elements);
/// y must not overlap x. `memory` grows to about one MiB a thread for 1,536 inputs. Threads: OpenMP, the
/// caller's current setting.
void multiply(const matrix& weights, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
              std::int64_t y_stride, scratch& memory);
/// y += W x (a residual connection).
void multiply_add(const matrix& weights, const float* x, std::int64_t x_stride, std::int64_t rows, float* y,
                  std::int64_t y_stride, scratch& memory);

/// Name and version of the library under fp32 products, for reports: "oneDNN 2.6.3".
const char* products_library();

} // namespace engine::cpu
