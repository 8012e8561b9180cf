// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The host estimator against the same machine's single-precision matrix product, call by call in turn, so
// that both see the same clock and the same neighbours (let it have the machine for itself all the same).
// Rates are the best of all calls; `share` is their quotient.

#include "estimator_case.hpp"

#include <benchmark/benchmark.h>
#include <cblas.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <ctime>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using estimator_bench::element;
using estimator_bench::estimator_case;
using estimator_bench::shape;
using maker = std::unique_ptr<estimator_case> (*)(const shape&);

/// Seconds on the wall; on one thread, seconds of that thread's processor time, which neighbours on a busy
/// machine don't lengthen.
double now(int threads) {
    timespec time{};
    clock_gettime(threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

/// A square product, big enough for the library's best rate.
class gemm {
  public:
    static constexpr int size = 1024;
    static constexpr double flops = 2.0 * size * size * size;

    void run() {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, size, size, size, 1.0f, a_.data(), size,
                    b_.data(), size, 0.0f, c_.data(), size);
    }

  private:
    std::vector<float> a_ = std::vector<float>(std::size_t{size} * size, 0.5f);
    std::vector<float> b_ = std::vector<float>(std::size_t{size} * size, 0.25f);
    std::vector<float> c_ = std::vector<float>(std::size_t{size} * size);
};

void estimate(benchmark::State& state, maker make, const shape& what, int threads) {
    omp_set_num_threads(threads);
    openblas_set_num_threads(threads);
    const auto prompt = make(what);
    gemm product;
    prompt->run();
    product.run();
    const auto pause = std::chrono::milliseconds(threads == 1 ? 0 : 60);
    double best = 1e300;
    double best_product = 1e300;
    for (auto _ : state) {
        // Threads of either library spin for a while (OpenBLAS: 2^26 cycles) before they sleep; the other one
        // shall not have to share a core with them.
        std::this_thread::sleep_for(pause);
        const double start = now(threads);
        product.run();
        best_product = std::min(best_product, now(threads) - start);
        std::this_thread::sleep_for(pause);
        const double again = now(threads);
        prompt->run();
        const double time = now(threads) - again;
        best = std::min(best, time);
        state.SetIterationTime(time);
    }
    state.counters["best_ms"] = best * 1e3;
    state.counters["gflops"] = what.flops() / best * 1e-9;
    state.counters["sgemm_gflops"] = gemm::flops / best_product * 1e-9;
    state.counters["share"] = what.flops() / best / (gemm::flops / best_product);
}

const char* name_of(element type) {
    return type == element::f32 ? "f32" : type == element::f16 ? "f16" : "bf16";
}

void add(const std::string& build, maker make, const shape& what) {
    for (const int threads : {1, std::max(2, omp_get_num_procs())}) {
        const std::string name = build + "/" + name_of(what.type) + "/keys:" + std::to_string(what.keys) +
                                 "/heads:" + std::to_string(what.heads) + "x" +
                                 std::to_string(what.kv_heads) + "/d:" + std::to_string(what.head_dim) +
                                 "/threads:" + std::to_string(threads);
        benchmark::RegisterBenchmark(name.c_str(),
                                     [=](benchmark::State& state) { estimate(state, make, what, threads); })
            ->UseManualTime()
            ->Iterations(50)
            ->Unit(benchmark::kMillisecond);
    }
}

} // namespace

int main(int argc, char** argv) {
    benchmark::AddCustomContext("openblas_corename", openblas_get_corename());
    benchmark::AddCustomContext("openblas_config", openblas_get_config());
    benchmark::AddCustomContext("compiler", __VERSION__);
    const shape small_model;
    for (const element type : {element::f32, element::bf16, element::f16}) {
        shape what = small_model;
        what.type = type;
        add("native", estimator_bench::make_native, what);
        add("avx2", estimator_bench::make_avx2, what);
        add("plain", estimator_bench::make_plain, what);
    }
    add("native", estimator_bench::make_native, {32768, 9, 3, 64, element::f32});
    add("native", estimator_bench::make_native, {8192, 32, 8, 128, element::f32});
    add("native", estimator_bench::make_native, {8192, 32, 8, 128, element::bf16});
    add("native", estimator_bench::make_native, {512, 9, 3, 64, element::f32});
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
