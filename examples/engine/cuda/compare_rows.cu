// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/compare_rows.hpp"

#include "engine/cuda/runtime.hpp"

namespace engine::cuda {

namespace {

constexpr unsigned threads = 512;

__device__ double larger(double a, double b) {
    return a > b ? a : b;
}
__device__ double sum(double a, double b) {
    return a + b;
}

/// All threads' @p value together; every thread gets the result. In a fixed order.
template <class Merge>
__device__ double over_block(double value, Merge merge, double* shared) {
    __syncthreads(); // whoever still reads the last result
    shared[threadIdx.x] = value;
    for (unsigned half = threads / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) shared[threadIdx.x] = merge(shared[threadIdx.x], shared[threadIdx.x + half]);
    }
    __syncthreads();
    return shared[0];
}

/// Whether a number is neither infinite nor NaN, by its bits.
__device__ bool finite(float number) {
    return (__float_as_uint(number) & 0x7f800000u) != 0x7f800000u;
}

/// A thread block for each row.
__global__ void __launch_bounds__(threads)
    compare_rows_kernel(const float* reference, const float* ours, std::int32_t vocab, double* out) {
    __shared__ double shared[threads];
    const float* const p = reference + std::int64_t{blockIdx.x} * vocab;
    const float* const q = ours + std::int64_t{blockIdx.x} * vocab;
    double top_p = -1e300;
    double top_q = -1e300;
    double faults = 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < vocab; i += threads) {
        if (!finite(p[i]) || !finite(q[i])) faults = 1;
        top_p = larger(top_p, static_cast<double>(p[i]));
        top_q = larger(top_q, static_cast<double>(q[i]));
    }
    faults = over_block(faults, larger, shared);
    top_p = over_block(top_p, larger, shared);
    top_q = over_block(top_q, larger, shared);
    double of_p = 0;
    double of_q = 0;
    double weighted = 0; // sum of exp(p) * (p - q)
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < vocab; i += threads) {
        const double share = exp(static_cast<double>(p[i]) - top_p);
        of_p += share;
        of_q += exp(static_cast<double>(q[i]) - top_q);
        weighted += share * (static_cast<double>(p[i]) - static_cast<double>(q[i]));
    }
    of_p = over_block(of_p, sum, shared);
    of_q = over_block(of_q, sum, shared);
    weighted = over_block(weighted, sum, shared);
    if (threadIdx.x > 0) return;
    const double divergence = weighted / of_p - (top_p + log(of_p)) + (top_q + log(of_q));
    out[blockIdx.x] = faults > 0 ? __longlong_as_double(0x7ff8000000000000ll) : larger(divergence, 0.0);
}

} // namespace

void compare_rows(const float* reference, const float* ours, std::int32_t rows, std::int32_t vocab,
                  double* out, cudaStream_t on) {
    if (rows <= 0) return;
    compare_rows_kernel<<<static_cast<unsigned>(rows), threads, 0, on>>>(reference, ours, vocab, out);
    check(cudaGetLastError(), "launch");
}

} // namespace engine::cuda
