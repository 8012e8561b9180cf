// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Google Benchmark's iterations, timed on the device.

#include "device_timer.cuh"

#include <benchmark/benchmark.h>

#include <vector>

namespace device_bench {

/// Median milliseconds of @p once over the iterations of @p state, after two runs that don't count.
template <class Work>
[[nodiscard]] double median_ms(benchmark::State& state, device_timer& timer, const Work& once) {
    once(nullptr);
    once(nullptr);
    check(cudaDeviceSynchronize(), "first runs");
    std::vector<float> times;
    for (auto _ : state) {
        times.push_back(timer.time(once));
        state.SetIterationTime(static_cast<double>(times.back()) / 1000);
    }
    return median(times);
}

} // namespace device_bench
