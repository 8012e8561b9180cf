// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/products.hpp"

#include <cublasLt.h>

#include <string>

namespace engine::cuda {

namespace {

constexpr std::size_t workspace_bytes = std::size_t{64} << 20; // Hopper's split algorithms want 32 MiB

void check(cublasStatus_t code, const char* what) {
    if (code != CUBLAS_STATUS_SUCCESS) {
        throw error(std::string("cuBLASLt, ") + what, "success", cublasLtGetStatusString(code));
    }
}

cublasLtHandle_t handle_of(void* handle) {
    return static_cast<cublasLtHandle_t>(handle);
}

} // namespace

/// How products of one size are computed. Column-major in the library's words: y^T = (W^T)^T x^T.
struct products::plan {
    plan(cublasLtHandle_t handle, const size& wanted) {
        const auto [out, in, rows, fp32, add] = wanted;
        const cudaDataType_t result = fp32 ? CUDA_R_32F : CUDA_R_16BF;
        check(cublasLtMatmulDescCreate(&product, CUBLAS_COMPUTE_32F, CUDA_R_32F), "product");
        const cublasOperation_t transposed = CUBLAS_OP_T;
        check(cublasLtMatmulDescSetAttribute(product, CUBLASLT_MATMUL_DESC_TRANSA, &transposed,
                                             sizeof transposed),
              "product");
        const auto columns = [](std::int32_t n) { return static_cast<std::uint64_t>(n); };
        check(cublasLtMatrixLayoutCreate(&a, CUDA_R_16BF, columns(in), columns(out), in), "layout");
        check(cublasLtMatrixLayoutCreate(&b, CUDA_R_16BF, columns(in), columns(rows), in), "layout");
        check(cublasLtMatrixLayoutCreate(&d, result, columns(out), columns(rows), out), "layout");
        cublasLtMatmulPreference_t preference = nullptr;
        check(cublasLtMatmulPreferenceCreate(&preference), "preference");
        std::size_t most = workspace_bytes;
        int found = 0;
        cublasLtMatmulHeuristicResult_t best{};
        cublasStatus_t code = cublasLtMatmulPreferenceSetAttribute(
            preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &most, sizeof most);
        if (code == CUBLAS_STATUS_SUCCESS) {
            code = cublasLtMatmulAlgoGetHeuristic(handle, product, a, b, d, d, preference, 1, &best, &found);
        }
        cublasLtMatmulPreferenceDestroy(preference);
        check(code, "choice of an algorithm");
        if (found == 0) {
            throw error("cuBLASLt", "an algorithm for a product of this size",
                        "none for [" + std::to_string(rows) + ", " + std::to_string(in) + "] by [" +
                            std::to_string(out) + ", " + std::to_string(in) + "]");
        }
        algorithm = best.algo;
        beta = add ? 1.0f : 0.0f;
    }
    plan(const plan&) = delete;
    plan& operator=(const plan&) = delete;
    ~plan() {
        if (d != nullptr) cublasLtMatrixLayoutDestroy(d);
        if (b != nullptr) cublasLtMatrixLayoutDestroy(b);
        if (a != nullptr) cublasLtMatrixLayoutDestroy(a);
        if (product != nullptr) cublasLtMatmulDescDestroy(product);
    }

    cublasLtMatmulDesc_t product = nullptr;
    cublasLtMatrixLayout_t a = nullptr;
    cublasLtMatrixLayout_t b = nullptr;
    cublasLtMatrixLayout_t d = nullptr;
    cublasLtMatmulAlgo_t algorithm{};
    float beta = 0;
};

products::products()
    : workspace_(workspace_bytes) {
    cublasLtHandle_t handle = nullptr;
    check(cublasLtCreate(&handle), "start");
    handle_ = handle;
}

products::~products() {
    plans_.clear();
    cublasLtDestroy(handle_of(handle_));
}

const products::plan& products::plan_for(const size& wanted) {
    std::unique_ptr<plan>& known = plans_[wanted];
    if (!known) known = std::make_unique<plan>(handle_of(handle_), wanted);
    return *known;
}

void products::run(const matrix& w, const bfloat16* x, std::int32_t rows, void* y, bool fp32, bool add,
                   cudaStream_t on) {
    if (rows == 0) return;
    const plan& how = plan_for({w.out, w.in, rows, fp32, add});
    const float alpha = 1;
    check(cublasLtMatmul(handle_of(handle_), how.product, &alpha, w.weights.data(), how.a, x, how.b,
                         &how.beta, y, how.d, y, how.d, &how.algorithm, workspace_.data(), workspace_.bytes(),
                         on),
          "product");
}

void products::multiply(const matrix& w, const bfloat16* x, std::int32_t rows, bfloat16* y, cudaStream_t on) {
    run(w, x, rows, y, false, false, on);
}

void products::multiply(const matrix& w, const bfloat16* x, std::int32_t rows, float* y, cudaStream_t on) {
    run(w, x, rows, y, true, false, on);
}

void products::multiply_add(const matrix& w, const bfloat16* x, std::int32_t rows, float* y,
                            cudaStream_t on) {
    run(w, x, rows, y, true, true, on);
}

std::size_t products::library_version() {
    return cublasLtGetVersion();
}

} // namespace engine::cuda
