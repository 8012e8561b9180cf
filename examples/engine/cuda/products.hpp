// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/cuda/runtime.hpp"

#include <uniprefill/core/element.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

namespace engine::cuda {

using uniprefill::bfloat16;

/// A weight matrix [out, in] in device memory: y[row] = W x[row].
struct matrix {
    device_array<bfloat16> weights;
    std::int32_t out = 0;
    std::int32_t in = 0;
};

/// Products of bf16 rows with bf16 weights, summed in fp32 (cuBLASLt). The algorithm for a size is asked for
/// once and kept, so that a size that has run before does no host work worth naming, and can be captured.
class products {
  public:
    products();
    ~products();
    products(const products&) = delete;
    products& operator=(const products&) = delete;

    /// y = W x; x is dense [rows, in], y dense [rows, out].
    void multiply(const matrix& w, const bfloat16* x, std::int32_t rows, bfloat16* y, cudaStream_t on);
    void multiply(const matrix& w, const bfloat16* x, std::int32_t rows, float* y, cudaStream_t on);
    /// y += W x, a residual connection.
    void multiply_add(const matrix& w, const bfloat16* x, std::int32_t rows, float* y, cudaStream_t on);

    /// The version of the library, for reports.
    static std::size_t library_version();

  private:
    struct plan;
    using size = std::tuple<std::int32_t, std::int32_t, std::int32_t, bool, bool>;
    void run(const matrix& w, const bfloat16* x, std::int32_t rows, void* y, bool fp32, bool add,
             cudaStream_t on);
    const plan& plan_for(const size& wanted);

    void* handle_ = nullptr; // cublasLtHandle_t
    device_array<std::byte> workspace_;
    std::map<size, std::unique_ptr<plan>> plans_;
};

} // namespace engine::cuda
