// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Everything that a selecting layer adds on a device: masses, keep set, fused compaction of hidden states and
// residuals with add and norm, compaction of positions, row maps. Beside it the residual add and norm of all
// rows, which the fused compaction replaces: `net` is what remains. 32 query heads, 8 KV heads of dimension
// 128, hidden size 4096, bfloat16.
//
// Medians, cold caches, all in one run in turn: launched one by one on a stream, and as one CUDA graph. The
// stages' own times don't add up to the total, since the beginning of each overlaps the end of the one
// before.

#include "../support/device_timer.cuh"

#include <uniprefill/importance/importance.cuh>
#include <uniprefill/propagate/add_norm.cuh>
#include <uniprefill/propagate/compaction.cuh>
#include <uniprefill/propagate/lineage.cuh>
#include <uniprefill/select/selector.cuh>

#include <benchmark/benchmark.h>

#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

namespace up = uniprefill;
using device_bench::check;
using device_bench::device_bytes;
using device_bench::device_timer;
using device_bench::fill_normal;
using device_bench::median;
using device_bench::upload;
using work = std::function<void(cudaStream_t)>;

constexpr std::int32_t heads = 32, kv_heads = 8, head_dim = 128, hidden_size = 4096, block_rows = 64;
using policy = up::estimator_policy<block_rows, 128, up::head_sum, head_dim>;

up::limits bounds_of(std::int32_t rows) {
    up::limits bounds;
    bounds.max_rows = rows;
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = head_dim;
    bounds.block_rows = block_rows;
    bounds.num_observations = 128;
    return bounds;
}

/// One request of a step, and what a layer does with it.
class selecting_layer {
  public:
    selecting_layer(std::int32_t rows, const up::cuda_device& device)
        : rows_(rows)
        , device_(device)
        , bounds_(bounds_of(rows))
        , estimator_(bounds_, device)
        , selector_(bounds_, device)
        , lineage_(bounds_, device)
        , queries_(elements(heads * head_dim))
        , keys_(elements(kv_heads * head_dim))
        , hidden_(elements(hidden_size))
        , residual_(elements(hidden_size))
        , weight_(2 * hidden_size)
        , step_arrays_(4 * (std::size_t(rows) + 2) + 64)
        , packed_positions_(4 * std::size_t(rows))
        , rule_(sizeof(up::selection_rule))
        , masses_(8 * std::size_t(up::mass_view::rank_buffer_size(bounds_)))
        , estimator_memory_(estimator_.workspace_bytes())
        , selector_memory_(selector_.workspace_bytes())
        , selection_memory_(selection_bytes())
        , lineage_memory_(lineage_.state_bytes()) {
        check(estimator_.template prepare<up::bfloat16>());
        fill_normal<up::bfloat16>(queries_, std::size_t(rows) * heads * head_dim, 1);
        fill_normal<up::bfloat16>(keys_, std::size_t(rows) * kv_heads * head_dim, 2);
        std::vector<std::int32_t> arrays(std::size_t(rows) + 2);
        std::iota(arrays.begin(), arrays.end() - 2, 0); // positions; then the offsets
        arrays[std::size_t(rows)] = 0;
        arrays[std::size_t(rows) + 1] = rows;
        upload(step_arrays_, arrays);
        auto* const ints = step_arrays_.data<std::int32_t>();
        batch_.space = up::memory_space::device;
        batch_.num_requests = batch_.num_segments = 1;
        batch_.num_rows = rows;
        batch_.positions = ints;
        batch_.cu_seqlens = ints + rows;
        batch_.tags = reinterpret_cast<up::request_tag*>(ints + rows + 2);
        const up::request_tag tag = up::request_tag::prefill;
        check(cudaMemcpy(ints + rows + 2, &tag, sizeof tag, cudaMemcpyHostToDevice), "tag");
        upload(rule_, std::vector<up::selection_rule>{up::selection_rule::top_p(0.43)});
        up::workspace pieces(selection_memory_.data(), selection_bytes());
        decided_ = up::selection::carve(pieces, bounds_, up::memory_space::device);
    }

    void estimate(cudaStream_t stream) {
        check(estimator_.run(
            up::head_rows<const up::bfloat16>{queries_.data<up::bfloat16>(), heads * head_dim, head_dim,
                                              rows_, heads, head_dim},
            up::key_source<up::bfloat16>{up::head_rows<const up::bfloat16>{
                keys_.data<up::bfloat16>(), kv_heads * head_dim, head_dim, rows_, kv_heads, head_dim}},
            {}, batch_, masses(), {}, {estimator_memory_.data(), estimator_.workspace_bytes()}, stream));
    }
    void select(cudaStream_t stream) {
        check(selector_.run(masses(), batch_, rule_.data<up::selection_rule>(), decided_,
                            {selector_memory_.data(), selector_.workspace_bytes()}, stream));
    }
    void begin(cudaStream_t stream) {
        check(lineage_.begin(batch_, {lineage_memory_.data(), lineage_.state_bytes()}, stream));
    }
    /// In place. @param every whether it is about all rows: what a layer does that doesn't select
    void add_and_norm(bool every, cudaStream_t stream) {
        up::add_norm<up::bfloat16> norm;
        norm.hidden = rows_of<const up::bfloat16>(hidden_);
        norm.residual = rows_of<const up::bfloat16>(residual_);
        norm.out_hidden = rows_of<up::bfloat16>(hidden_);
        norm.out_residual = rows_of<up::bfloat16>(residual_);
        norm.weight = weight_.data<up::bfloat16>();
        const up::row_map map =
            every ? up::row_map(up::selection::keep_all(1, 1, rows_, up::memory_space::device))
                  : up::row_map(decided_);
        check(up::compact_add_norm(map, norm, lineage_.scratch(), device_, stream));
    }
    void pack_positions(cudaStream_t stream) {
        const auto view = [&](const std::int32_t* data) {
            return up::as_byte_rows(const_cast<std::int32_t*>(data), rows_, 1);
        };
        check(up::compact(decided_, view(batch_.positions), view(packed_positions_.data<std::int32_t>()), {},
                          device_, stream));
    }
    void follow(cudaStream_t stream) { check(lineage_.apply(decided_, stream)); }

    void everything(cudaStream_t stream) {
        begin(stream);
        estimate(stream);
        select(stream);
        add_and_norm(false, stream);
        pack_positions(stream);
        follow(stream);
    }

    [[nodiscard]] double kept_share() const {
        std::int32_t kept = 0;
        check(cudaMemcpy(&kept, decided_.cu_seqlens + 1, sizeof kept, cudaMemcpyDeviceToHost), "kept rows");
        return static_cast<double>(kept) / rows_;
    }
    /// Bytes beyond the layer's own tensors.
    [[nodiscard]] double extra_bytes() const {
        return static_cast<double>(estimator_.workspace_bytes() + selector_.workspace_bytes() +
                                   selection_bytes() + lineage_.state_bytes() + 4 * std::size_t(rows_)) +
               8.0 * static_cast<double>(up::mass_view::rank_buffer_size(bounds_));
    }

  private:
    [[nodiscard]] std::size_t elements(std::int32_t of_row) const {
        return std::size_t(rows_) * std::size_t(of_row) * sizeof(up::bfloat16);
    }
    [[nodiscard]] std::size_t selection_bytes() const {
        up::workspace counting;
        static_cast<void>(up::selection::carve(counting, bounds_, up::memory_space::device));
        return counting.bytes_used();
    }
    [[nodiscard]] up::mass_view masses() const {
        return up::mass_view::over(masses_.data<std::int64_t>(), bounds_, up::memory_space::device);
    }
    template <class T>
    [[nodiscard]] up::element_rows<T> rows_of(const device_bytes& tensor) const {
        return {tensor.data<up::bfloat16>(), hidden_size, hidden_size, rows_};
    }

    std::int32_t rows_;
    up::cuda_device device_;
    up::limits bounds_;
    up::importance_estimator<policy, up::backend::cuda> estimator_;
    up::block_selector<up::selection_rule, up::backend::cuda> selector_;
    up::row_lineage<up::backend::cuda> lineage_;
    device_bytes queries_, keys_, hidden_, residual_, weight_, step_arrays_, packed_positions_, rule_,
        masses_, estimator_memory_, selector_memory_, selection_memory_, lineage_memory_;
    up::batch_view batch_;
    up::selection decided_;
};

/// Work recorded once, to be launched as a whole.
class recorded {
  public:
    explicit recorded(const work& calls) {
        cudaStream_t stream = nullptr;
        cudaGraph_t graph = nullptr;
        check(cudaStreamCreate(&stream), "stream");
        check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
        calls(stream);
        check(cudaStreamEndCapture(stream, &graph), "capture");
        check(cudaGraphInstantiate(&executable_, graph, 0), "graph");
        cudaGraphDestroy(graph);
        cudaStreamDestroy(stream);
    }
    recorded(const recorded&) = delete;
    recorded& operator=(const recorded&) = delete;
    ~recorded() { cudaGraphExecDestroy(executable_); }
    void operator()(cudaStream_t stream) const { check(cudaGraphLaunch(executable_, stream), "graph"); }

  private:
    cudaGraphExec_t executable_ = nullptr;
};

void layer(benchmark::State& state) {
    up::cuda_device device;
    check(up::cuda_device::current(device));
    selecting_layer one(static_cast<std::int32_t>(state.range(0)), device);
    const work everything = [&](cudaStream_t stream) { one.everything(stream); };
    const work replaced = [&](cudaStream_t stream) { one.add_and_norm(true, stream); };
    everything(nullptr); // loads the kernels
    replaced(nullptr);
    check(cudaDeviceSynchronize(), "first run");
    const recorded everything_recorded(everything), replaced_recorded(replaced);

    struct timed {
        const char* name;
        work calls;
        std::vector<float> times;
    };
    std::vector<timed> all = {
        {"total_us", everything, {}},
        {"replaced_us", replaced, {}},
        {"graph_us", [&](cudaStream_t s) { everything_recorded(s); }, {}},
        {"replaced_graph_us", [&](cudaStream_t s) { replaced_recorded(s); }, {}},
        {"estimate_us", [&](cudaStream_t s) { one.estimate(s); }, {}},
        {"select_us", [&](cudaStream_t s) { one.select(s); }, {}},
        {"estimate_select_us",
         [&](cudaStream_t s) {
             one.estimate(s);
             one.select(s);
         },
         {}},
        {"compact_add_norm_us", [&](cudaStream_t s) { one.add_and_norm(false, s); }, {}},
        {"positions_us", [&](cudaStream_t s) { one.pack_positions(s); }, {}},
        {"lineage_us",
         [&](cudaStream_t s) {
             one.begin(s);
             one.follow(s);
         },
         {}},
    };
    device_timer timer;
    for (timed& what : all) {
        timer.time(what.calls);
    }
    for (auto _ : state) {
        for (timed& what : all) {
            what.times.push_back(timer.time(what.calls));
        }
        state.SetIterationTime(static_cast<double>(all[0].times.back()) * 1e-3);
    }
    check(cudaGetLastError(), "launch");
    for (const timed& what : all) {
        state.counters[what.name] = 1e3 * median(what.times);
    }
    state.counters["net_us"] = state.counters["total_us"] - state.counters["replaced_us"];
    state.counters["net_graph_us"] = state.counters["graph_us"] - state.counters["replaced_graph_us"];
    state.counters["kept_share"] = one.kept_share();
    state.counters["extra_MB"] = 1e-6 * one.extra_bytes();
}

} // namespace

BENCHMARK(layer)
    ->ArgName("rows")
    ->Arg(128 * 1024)
    ->Arg(32 * 1024)
    ->Arg(4 * 1024)
    ->UseManualTime()
    ->Iterations(30)
    ->Unit(benchmark::kMicrosecond);

int main(int argc, char** argv) {
    benchmark::Initialize(&argc, argv);
    if (benchmark::ReportUnrecognizedArguments(argc, argv)) {
        return 2;
    }
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, 0), "device");
    int driver = 0;
    check(cudaDriverGetVersion(&driver), "driver");
    benchmark::AddCustomContext("gpu", properties.name);
    benchmark::AddCustomContext("cuda_driver", std::to_string(driver));
    benchmark::RunSpecifiedBenchmarks();
    benchmark::Shutdown();
    return 0;
}
