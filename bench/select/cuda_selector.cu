// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CUDA selector and lister alone, beside what sorting the same masses takes (CUB) and what a launch costs
// at all.
//
// Time: microseconds of one call among 200 in a graph, everything in L2. "flushed_us": the median of single
// calls after 256 MiB were overwritten, between two events; the events' own cost is in it, and in the empty
// kernel's as well.

#include "../support/device_timer.cuh"

#include <uniprefill/select/block_lister.cuh>
#include <uniprefill/select/selector.cuh>

#include <benchmark/benchmark.h>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_scan.cuh>

#include <cmath>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

namespace up = uniprefill;
using selector = up::block_selector<up::selection_rule, up::backend::cuda>;
using launch_count = up::cuda_selector_options::launch_count;

using device_bench::check;
using device_bench::device_bytes;

/// Device memory with content.
template <class T>
class array : public device_bytes {
  public:
    explicit array(std::size_t count)
        : device_bytes((count + 1) * sizeof(T))
        , count_(count) {}
    explicit array(const std::vector<T>& values)
        : array(values.size()) {
        device_bench::upload(*this, values);
    }
    T* data() const { return device_bytes::data<T>(); }
    std::size_t bytes() const { return count_ * sizeof(T); }

  private:
    std::size_t count_;
};

enum class masses { even, heavy };

struct shape {
    std::int32_t requests;
    std::int32_t blocks; ///< of each request
    std::int32_t block_rows;
    masses kind;
};

/// Block masses: close to each other (random inputs), or a few heavy ones and a long tail (prompts). Those of
/// each request sum to about 2^60, as importance makes them.
std::vector<std::int64_t> draw(const shape& what, std::int64_t count) {
    std::mt19937_64 random(7);
    std::normal_distribution<double> normal;
    const std::int64_t stride = what.blocks + 1; // as block_offset() has it for whole blocks
    std::vector<std::int64_t> drawn;
    for (std::int64_t first = 0; first < count; first += stride) {
        std::vector<double> of_request;
        double sum = 0;
        for (std::int64_t i = first; i < first + stride && i < count; ++i) {
            const double mass =
                what.kind == masses::even ? 1 + 0.1 * normal(random) : std::exp(2.5 * normal(random));
            of_request.push_back(mass > 0 ? mass : 0);
            sum += of_request.back();
        }
        for (const double mass : of_request) {
            drawn.push_back(static_cast<std::int64_t>(std::ldexp(mass / sum, 60)));
        }
    }
    return drawn;
}

/// A step on the device.
struct problem {
    shape what;
    up::limits bounds;
    std::vector<std::int32_t> cu;
    std::unique_ptr<array<std::int32_t>> cu_seqlens;
    std::unique_ptr<array<std::int32_t>> positions;
    std::unique_ptr<array<up::request_tag>> tags;
    std::unique_ptr<array<up::request_options>> options;
    std::unique_ptr<array<up::selection_rule>> rules;
    std::unique_ptr<array<std::int64_t>> ranks;
    std::unique_ptr<array<unsigned char>> output;
    std::unique_ptr<array<unsigned char>> scratch;
    up::selection out;
    up::batch_view batch;

    problem(const shape& wanted, const up::selection_rule& rule)
        : what(wanted) {
        const std::int32_t rows = what.blocks * what.block_rows;
        bounds.block_rows = what.block_rows;
        bounds.max_requests = bounds.max_segments = what.requests;
        bounds.max_rows = what.requests * rows;
        std::vector<std::int32_t> where;
        cu.push_back(0);
        for (std::int32_t r = 0; r < what.requests; ++r) {
            for (std::int32_t i = 0; i < rows; ++i) {
                where.push_back(i);
            }
            cu.push_back(cu.back() + rows);
        }
        const auto requests = static_cast<std::size_t>(what.requests);
        cu_seqlens = std::make_unique<array<std::int32_t>>(cu);
        positions = std::make_unique<array<std::int32_t>>(where);
        tags = std::make_unique<array<up::request_tag>>(
            std::vector<up::request_tag>(requests, up::request_tag::prefill));
        options = std::make_unique<array<up::request_options>>(std::vector<up::request_options>(requests));
        rules = std::make_unique<array<up::selection_rule>>(std::vector<up::selection_rule>(requests, rule));
        std::vector<std::int64_t> buffer = draw(what, bounds.max_blocks());
        buffer.resize(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), 0);
        ranks = std::make_unique<array<std::int64_t>>(buffer);
        up::workspace counting;
        static_cast<void>(up::selection::carve(counting, bounds, up::memory_space::device));
        output = std::make_unique<array<unsigned char>>(counting.bytes_used());
        up::workspace pieces(output->data(), output->bytes());
        out = up::selection::carve(pieces, bounds, up::memory_space::device);
        scratch = std::make_unique<array<unsigned char>>(selector(bounds, {}).workspace_bytes());
        batch.space = up::memory_space::device;
        batch.num_requests = batch.num_segments = what.requests;
        batch.num_rows = bounds.max_rows;
        batch.tags = tags->data();
        batch.cu_seqlens = cu_seqlens->data();
        batch.positions = positions->data();
        batch.options = options->data();
    }
    void run(const up::cuda_device& device, const up::cuda_selector_options& how, cudaStream_t stream) {
        check(selector(bounds, device, how)
                  .run(up::mass_view::over(ranks->data(), bounds, up::memory_space::device), batch,
                       rules->data(), out, {scratch->data(), scratch->bytes()}, stream));
    }
    /// The share of rows that stay.
    double kept() const {
        std::int32_t rows = 0;
        check(cudaMemcpy(&rows, out.cu_seqlens + what.requests, sizeof rows, cudaMemcpyDeviceToHost),
              "download");
        return static_cast<double>(rows) / bounds.max_rows;
    }
};

constexpr int calls_in_graph = 200;

/// Seconds of one call among many in a graph.
class warm_timer {
  public:
    explicit warm_timer(const std::function<void(cudaStream_t)>& call) {
        check(cudaStreamCreate(&stream_), "stream");
        check(cudaEventCreate(&begin_), "event");
        check(cudaEventCreate(&end_), "event");
        call(stream_); // loads the kernels
        check(cudaStreamSynchronize(stream_), "first call");
        check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "capture");
        for (int i = 0; i < calls_in_graph; ++i) {
            call(stream_);
        }
        cudaGraph_t graph = nullptr;
        check(cudaStreamEndCapture(stream_, &graph), "capture");
        check(cudaGraphInstantiate(&graph_, graph, 0), "graph");
        cudaGraphDestroy(graph);
    }
    ~warm_timer() {
        cudaGraphExecDestroy(graph_);
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
        cudaStreamDestroy(stream_);
    }
    double seconds() {
        check(cudaEventRecord(begin_, stream_), "event");
        check(cudaGraphLaunch(graph_, stream_), "graph");
        check(cudaEventRecord(end_, stream_), "event");
        check(cudaEventSynchronize(end_), "graph");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_), "event");
        return 1e-3 * ms / calls_in_graph;
    }

  private:
    cudaStream_t stream_ = nullptr;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
    cudaGraphExec_t graph_ = nullptr;
};

void measure(benchmark::State& state, const std::function<void(cudaStream_t)>& call) {
    {
        warm_timer timer(call);
        timer.seconds();
        for (auto _ : state) {
            state.SetIterationTime(timer.seconds());
        }
    }
    static device_bench::device_timer timer;
    std::vector<float> times;
    for (int i = 0; i < 31; ++i) {
        times.push_back(timer.time(call));
    }
    state.counters["flushed_us"] = 1e3 * device_bench::median(times);
}

template <class = void>
__global__ void nothing() {
    up::detail::let_next_kernel_start();
    up::detail::wait_for_previous_kernel();
}

std::string name_of(const shape& what) {
    return std::to_string(what.requests) + "x" + std::to_string(what.blocks) +
           "/G:" + std::to_string(what.block_rows) + (what.kind == masses::even ? "/even" : "/heavy");
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
    benchmark::RegisterBenchmark(name.c_str(), body)
        ->UseManualTime()
        ->Iterations(10)
        ->Unit(benchmark::kMicrosecond);
}

void add_select(const shape& what, const std::string& rule_name, const up::selection_rule& rule,
                const up::cuda_device& device, const std::string& variant,
                const up::cuda_selector_options& how) {
    add("select/" + name_of(what) + "/" + rule_name + "/" + variant, [=](benchmark::State& state) {
        problem step(what, rule);
        measure(state, [&](cudaStream_t stream) { step.run(device, how, stream); });
        state.counters["kept_share"] = step.kept();
    });
}

/// Block lists of one segment: @p lists of them, each of the masses of @p group query heads.
void add_lists(const shape& what, std::int32_t lists, std::int32_t group, const std::string& rule_name,
               const up::selection_rule& rule, const up::cuda_device& device) {
    const std::string heads = std::to_string(lists) + "lists/heads:" + std::to_string(group);
    add("lists/" + name_of(what) + "/" + heads + "/" + rule_name, [=](benchmark::State& state) {
        const problem step(what, rule);
        up::limits bounds = step.bounds;
        bounds.num_heads = lists * group;
        bounds.num_kv_heads = lists;
        const std::int64_t stride = bounds.max_blocks();
        const array<std::int64_t> free(draw(what, stride * bounds.num_heads));
        const array<std::int64_t> forced(
            std::vector<std::int64_t>(static_cast<std::size_t>(stride * bounds.num_heads)));
        const array<std::int64_t> faults(std::vector<std::int64_t>(1));
        up::workspace counting;
        static_cast<void>(up::block_lists::carve(counting, bounds, lists, up::memory_space::device));
        const array<unsigned char> output(counting.bytes_used());
        up::workspace pieces(output.data(), output.bytes());
        up::block_lists out = up::block_lists::carve(pieces, bounds, lists, up::memory_space::device);
        const up::block_lister<up::selection_rule, up::backend::cuda> lister(bounds, device);
        const array<unsigned char> scratch(lister.workspace_bytes());
        measure(state, [&](cudaStream_t stream) {
            check(lister.run({free.data(), forced.data(), stride, bounds.num_heads}, faults.data(),
                             step.batch, {rule, 64, 256}, out, {scratch.data(), scratch.bytes()}, stream));
        });
        std::int64_t listed = 0;
        check(cudaMemcpy(&listed, out.offsets + lists, sizeof listed, cudaMemcpyDeviceToHost), "download");
        state.counters["listed_share"] =
            static_cast<double>(listed) / (static_cast<double>(what.blocks) * lists);
    });
}

/// What a selection by sorting starts with: masses by rank with their blocks, and running sums. One segment.
void add_sort(const shape& what) {
    add("cub_sort_scan/" + name_of(what), [=](benchmark::State& state) {
        const std::vector<std::int64_t> drawn = draw(what, what.blocks);
        std::vector<std::uint64_t> keys(drawn.begin(), drawn.end());
        std::vector<std::int32_t> blocks(keys.size());
        const int count = what.blocks;
        array<std::uint64_t> in(keys);
        array<std::uint64_t> sorted(keys.size());
        array<std::uint64_t> sums(keys.size());
        array<std::int32_t> values(blocks);
        array<std::int32_t> order(blocks.size());
        std::size_t sort_bytes = 0;
        std::size_t scan_bytes = 0;
        check(cub::DeviceRadixSort::SortPairsDescending(nullptr, sort_bytes, in.data(), sorted.data(),
                                                        values.data(), order.data(), count),
              "sort");
        check(cub::DeviceScan::InclusiveSum(nullptr, scan_bytes, sorted.data(), sums.data(), count), "scan");
        array<unsigned char> scratch(sort_bytes > scan_bytes ? sort_bytes : scan_bytes);
        measure(state, [&](cudaStream_t stream) {
            check(cub::DeviceRadixSort::SortPairsDescending(scratch.data(), sort_bytes, in.data(),
                                                            sorted.data(), values.data(), order.data(), count,
                                                            0, 64, stream),
                  "sort");
            check(cub::DeviceScan::InclusiveSum(scratch.data(), scan_bytes, sorted.data(), sums.data(), count,
                                                stream),
                  "scan");
        });
    });
}

} // namespace

int main(int argc, char** argv) {
    up::cuda_device device;
    check(up::cuda_device::current(device));
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "device");
    int driver = 0;
    int clock_khz = 0;
    check(cudaDriverGetVersion(&driver), "driver");
    check(cudaDeviceGetAttribute(&clock_khz, cudaDevAttrClockRate, 0), "clock");
    benchmark::AddCustomContext("gpu", properties.name);
    benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
    benchmark::AddCustomContext("max_clock_mhz", std::to_string(clock_khz / 1000));

    add("empty_kernel/overlapped", [=](benchmark::State& state) {
        measure(state, [&](cudaStream_t stream) {
            check(up::detail::launch(device, &nothing<>, dim3(64), dim3(512), 0, stream));
        });
    });
    up::cuda_device plain = device;
    plain.compute_capability = 80;
    add("empty_kernel/plain", [=](benchmark::State& state) {
        measure(state, [&](cudaStream_t stream) {
            check(up::detail::launch(plain, &nothing<>, dim3(64), dim3(512), 0, stream));
        });
    });
    using rule = up::selection_rule;
    const auto half = [](const shape& what) { return what.blocks * what.block_rows / 2; };
    for (const shape& what : {shape{1, 2048, 64, masses::even}, shape{1, 2048, 64, masses::heavy},
                              shape{1, 16384, 64, masses::even}, shape{1, 16384, 64, masses::heavy},
                              shape{256, 64, 64, masses::even}, shape{256, 64, 64, masses::heavy},
                              shape{1, 262144, 16, masses::even}, shape{1, 262144, 16, masses::heavy},
                              shape{4096, 64, 16, masses::heavy}, shape{16, 1024, 64, masses::heavy}}) {
        add_select(what, "top_p", rule::top_p(0.9), device, "automatic", {});
        if (what.kind == masses::heavy) {
            add_select(what, "published", rule::published_top_p(0.9), device, "automatic", {});
            add_select(what, "fixed_budget", rule::fixed_budget(half(what)), device, "automatic", {});
            for (const launch_count launches : {launch_count::one, launch_count::two}) {
                for (const std::int32_t cluster : {1, 2, 4, 8}) {
                    if (launches == launch_count::one && what.requests > 1) {
                        continue; // one launch is for one segment
                    }
                    up::cuda_selector_options how;
                    how.cluster_ctas = cluster;
                    how.launches = launches;
                    add_select(what, "top_p", rule::top_p(0.9), device,
                               (launches == launch_count::one ? "one/cluster:" : "two/cluster:") +
                                   std::to_string(cluster),
                               how);
                }
            }
        }
        if (what.requests == 1) {
            add_sort(what);
        }
    }
    for (const std::int32_t blocks : {128, 2048, 16384}) {
        const shape what{1, blocks, 64, masses::heavy};
        for (const std::int32_t lists : {8, 32}) {
            add_lists(what, lists, 1, "top_p_all", rule::top_p(0.99, up::mass_scope::all), device);
            add_lists(what, lists, 1, "top_p_free", rule::top_p(0.99), device);
        }
        add_lists(what, 8, 4, "top_p_all", rule::top_p(0.99, up::mass_scope::all), device);
    }
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
