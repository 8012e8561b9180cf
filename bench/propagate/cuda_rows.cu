// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Moving rows on a device against copies of the same bytes: call by call in turn, so that all see the same
// clock. Times are medians; `copy_share` is the time of cudaMemcpyAsync over that of the operation,
// `kernel_share` the same for a copy kernel. Rows are dropped in blocks of 64, as a selector does.

#include "../support/device_timer.cuh"

#include <uniprefill/propagate/add_norm.cuh>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/propagate/lineage.cuh>

#include <benchmark/benchmark.h>

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <vector>

namespace {

namespace up = uniprefill;
using namespace device_bench;

up::cuda_device device;

/// A plain copy, as fast as one gets by loads and stores: 8 words of 16 bytes in flight for a thread.
__global__ void __launch_bounds__(256) copy_kernel(const uint4* from, uint4* to, std::size_t words) {
    constexpr std::size_t at_once = 8;
    constexpr std::size_t tile = 256 * at_once;
    for (std::size_t first = blockIdx.x * tile + threadIdx.x; first < words; first += gridDim.x * tile) {
        uint4 held[at_once];
#pragma unroll
        for (std::size_t i = 0; i < at_once; ++i) {
            held[i] = first + 256 * i < words ? __ldcs(from + first + 256 * i) : uint4{};
        }
#pragma unroll
        for (std::size_t i = 0; i < at_once; ++i) {
            if (first + 256 * i < words) {
                __stcs(to + first + 256 * i, held[i]);
            }
        }
    }
}

inline void copy(const void* from, void* to, std::size_t bytes, int multiprocessors, cudaStream_t stream) {
    copy_kernel<<<static_cast<unsigned>(multiprocessors * 4), 256, 0, stream>>>(
        static_cast<const uint4*>(from), static_cast<uint4*>(to), bytes / 16);
}

/// Rows of bfloat16 with some of them kept, and room for results.
class kept_rows {
  public:
    kept_rows(std::int32_t rows, std::int32_t row_bytes, double keep)
        : rows_(rows)
        , row_bytes_(row_bytes)
        , memory_(4 * tensor_bytes())
        , weight_(static_cast<std::size_t>(row_bytes))
        , map_(static_cast<std::size_t>(rows + 1) * sizeof(std::int32_t))
        , scratch_(up::in_place_scratch_bytes()) {
        constexpr std::int32_t block = 64;
        std::vector<bool> keeps(static_cast<std::size_t>((rows + block - 1) / block));
        for (std::size_t b = 0; b < keeps.size(); ++b) {
            keeps[b] = static_cast<double>(b) < keep * static_cast<double>(keeps.size());
        }
        std::shuffle(keeps.begin(), keeps.end(), std::mt19937(7));
        std::vector<std::int32_t> map;
        for (std::int32_t row = 0; row < rows; ++row) {
            if (keeps[static_cast<std::size_t>(row / block)]) {
                map.push_back(row);
            }
        }
        kept_ = static_cast<std::int32_t>(map.size());
        map.resize(static_cast<std::size_t>(rows), -1);
        map.push_back(kept_);
        device_bench::check(
            cudaMemcpy(map_.data(), map.data(), map.size() * sizeof(std::int32_t), cudaMemcpyHostToDevice),
            "map");
    }

    [[nodiscard]] up::row_map map() const {
        up::row_map made;
        made.space = up::memory_space::device;
        made.identity = false;
        made.kept_to_old = map_.data<std::int32_t>();
        made.kept_count = map_.data<std::int32_t>() + rows_;
        made.num_kept = rows_;
        made.num_rows = rows_;
        return made;
    }
    [[nodiscard]] up::byte_rows tensor(std::size_t index) const {
        return up::as_byte_rows(memory_.data<std::byte>() + index * tensor_bytes(), rows_, row_bytes_);
    }
    template <class T>
    [[nodiscard]] up::element_rows<T> elements(std::size_t index) const {
        const auto count = static_cast<std::int32_t>(row_bytes_ / static_cast<std::int32_t>(sizeof(T)));
        return {static_cast<T*>(tensor(index).data), count, count, rows_};
    }
    [[nodiscard]] const up::bfloat16* weight() const { return weight_.data<up::bfloat16>(); }
    [[nodiscard]] up::workspace scratch() const { return {scratch_.data(), up::in_place_scratch_bytes()}; }
    [[nodiscard]] std::size_t kept_bytes() const {
        return static_cast<std::size_t>(kept_) * static_cast<std::size_t>(row_bytes_);
    }
    [[nodiscard]] std::size_t tensor_bytes() const {
        return static_cast<std::size_t>(rows_) * static_cast<std::size_t>(row_bytes_);
    }

  private:
    std::int32_t rows_;
    std::int32_t row_bytes_;
    std::int32_t kept_ = 0;
    device_bytes memory_;
    device_bytes weight_;
    device_bytes map_;
    device_bytes scratch_;
};

/// Times @p work, and copies of @p moved tensors' kept rows.
void measure(benchmark::State& state, const kept_rows& rows, std::size_t moved,
             const std::function<void(cudaStream_t)>& work) {
    device_timer timer;
    const std::size_t bytes = moved * rows.kept_bytes();
    const void* from = rows.tensor(0).data;
    void* to = rows.tensor(2).data;
    const auto copy_all = [&](cudaStream_t stream) {
        device_bench::check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream), "copy");
    };
    const auto kernel = [&](cudaStream_t stream) {
        copy(from, to, bytes, device.num_multiprocessors, stream);
    };
    for (int i = 0; i < 3; ++i) {
        timer.time(work);
        timer.time(copy_all);
        timer.time(kernel);
    }
    std::vector<float> times, copies, kernels;
    for (auto _ : state) {
        copies.push_back(timer.time(copy_all));
        kernels.push_back(timer.time(kernel));
        times.push_back(timer.time(work));
        state.SetIterationTime(static_cast<double>(times.back()) * 1e-3);
    }
    device_bench::check(cudaGetLastError(), "launch");
    const double time = median(times);
    state.counters["median_us"] = time * 1e3;
    state.counters["TB_s"] = 2e-9 * static_cast<double>(bytes) / time;
    state.counters["memcpy_TB_s"] = 2e-9 * static_cast<double>(bytes) / median(copies);
    state.counters["copy_share"] = median(copies) / time;
    state.counters["kernel_share"] = median(kernels) / time;
}

void compaction(benchmark::State& state, std::int32_t rows, std::int32_t row_bytes, double keep,
                std::size_t tensors, bool in_place) {
    const kept_rows what(rows, row_bytes, keep);
    std::vector<up::byte_rows> from, to;
    for (std::size_t t = 0; t < tensors; ++t) {
        from.push_back(what.tensor(t));
        to.push_back(what.tensor(in_place ? t : t + 2));
    }
    measure(state, what, tensors, [&](cudaStream_t stream) {
        check(up::compact(what.map(), from.data(), to.data(), static_cast<std::int32_t>(tensors),
                          what.scratch(), device, stream));
    });
}

void revival(benchmark::State& state, std::int32_t rows, std::int32_t row_bytes, double keep) {
    const kept_rows what(rows, row_bytes, keep);
    measure(state, what, 1, [&](cudaStream_t stream) {
        check(up::scatter(what.map(), what.tensor(0), what.tensor(2), device, stream));
    });
}

void compaction_with_norm(benchmark::State& state, std::int32_t rows, std::int32_t row_bytes, double keep,
                          bool in_place) {
    const kept_rows what(rows, row_bytes, keep);
    up::add_norm<up::bfloat16> norm;
    norm.hidden = what.elements<const up::bfloat16>(0);
    norm.residual = what.elements<const up::bfloat16>(1);
    norm.out_hidden = what.elements<up::bfloat16>(in_place ? 0 : 2);
    norm.out_residual = what.elements<up::bfloat16>(in_place ? 1 : 3);
    norm.weight = what.weight();
    measure(state, what, 2, [&](cudaStream_t stream) {
        check(up::compact_add_norm(what.map(), norm, what.scratch(), device, stream));
    });
}

void lineage(benchmark::State& state, std::int32_t rows) {
    const kept_rows what(rows, 16, 0.43);
    const device_bytes arrays(static_cast<std::size_t>(rows + 8) * sizeof(std::int32_t));
    up::limits bounds;
    bounds.max_rows = rows;
    up::row_lineage<up::backend::cuda> followed(bounds, device);
    const device_bytes memory(followed.state_bytes());
    up::batch_view step;
    step.space = up::memory_space::device;
    step.num_requests = step.num_segments = 1;
    step.num_rows = rows;
    step.tags = arrays.data<up::request_tag>();
    step.cu_seqlens = arrays.data<std::int32_t>();
    step.positions = arrays.data<std::int32_t>();
    auto decided = up::selection::keep_all(1, 1, rows, up::memory_space::device);
    decided.identity = false;
    decided.kept_to_old = const_cast<std::int32_t*>(what.map().kept_to_old);
    decided.cu_seqlens = decided.cu_segments = const_cast<std::int32_t*>(what.map().kept_count) - 1;
    measure(state, what, 1, [&](cudaStream_t stream) {
        check(followed.begin(step, {memory.data(), followed.state_bytes()}, stream));
        check(followed.apply(decided, stream));
    });
}

template <class... Arguments>
void add(const std::string& name, void (*work)(benchmark::State&, Arguments...), Arguments... arguments) {
    benchmark::RegisterBenchmark(name.c_str(), [=](benchmark::State& state) { work(state, arguments...); })
        ->UseManualTime()
        ->Iterations(50)
        ->Unit(benchmark::kMicrosecond);
}

} // namespace

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    check(up::cuda_device::current(device));
    cudaDeviceProp properties{};
    device_bench::check(cudaGetDeviceProperties(&properties, device.ordinal), "device");
    int driver = 0;
    device_bench::check(cudaDriverGetVersion(&driver), "driver");
    benchmark::AddCustomContext("gpu", properties.name);
    benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
    constexpr std::int32_t k = 1024;
    constexpr double keep = 0.43;
    for (const bool in_place : {false, true}) {
        const std::string how = in_place ? "/in_place" : "/out_of_place";
        const auto add_compaction = [&](const std::string& name, std::int32_t rows, std::int32_t row_bytes,
                                        double kept, std::size_t tensors) {
            add("compact" + how + name, &compaction, rows, row_bytes, kept, tensors, in_place);
        };
        add_compaction("/rows:128K/bytes:8192/keep:0.43", 128 * k, 8192, keep, 1);
        add_compaction("/rows:128K/bytes:8192/keep:0.43/tensors:2", 128 * k, 8192, keep, 2);
        add_compaction("/rows:128K/bytes:8192/keep:0.95", 128 * k, 8192, 0.95, 1);
        add_compaction("/rows:128K/bytes:2048/keep:0.43", 128 * k, 2048, keep, 1);
        add_compaction("/rows:128K/bytes:512/keep:0.43", 128 * k, 512, keep, 1);
        add_compaction("/rows:32K/bytes:8192/keep:0.43", 32 * k, 8192, keep, 1);
        add_compaction("/rows:4K/bytes:8192/keep:0.43", 4 * k, 8192, keep, 1);
        add_compaction("/rows:128K/bytes:4/keep:0.43", 128 * k, 4, keep, 1);
        add_compaction("/rows:4K/bytes:4/keep:0.43", 4 * k, 4, keep, 1);
        const auto add_norm = [&](const std::string& name, std::int32_t rows, std::int32_t row_bytes,
                                  double kept) {
            add("add_norm" + how + name, &compaction_with_norm, rows, row_bytes, kept, in_place);
        };
        add_norm("/rows:128K/bytes:8192/keep:0.43", 128 * k, 8192, keep);
        add_norm("/rows:128K/bytes:8192/keep:0.95", 128 * k, 8192, 0.95);
        add_norm("/rows:128K/bytes:4096/keep:0.43", 128 * k, 4096, keep);
        add_norm("/rows:64K/bytes:16384/keep:0.43", 64 * k, 16384, keep);
        add_norm("/rows:4K/bytes:8192/keep:0.43", 4 * k, 8192, keep);
    }
    add("scatter/rows:128K/bytes:8192/keep:0.43", &revival, 128 * k, 8192, keep);
    add("lineage/rows:128K", &lineage, 128 * k);
    add("lineage/rows:4K", &lineage, 4 * k);
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
