// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The ledger on the device: a decode step of many requests through 32 layers, six of which have selected.
// Times are of the device (events), of one step with the second-level cache flushed, and of steps that follow
// each other in a graph.

#include "../support/device_timer.cuh"

#include <uniprefill/ledger/drop_ledger.cuh>

#include <benchmark/benchmark.h>

#include <memory>
#include <vector>

namespace up = uniprefill;
using namespace device_bench;
using cuda_ledger = up::drop_ledger<up::backend::cuda>;
using numbers = std::vector<std::int32_t>;

namespace {

constexpr std::int32_t num_layers = 32;
constexpr std::int32_t page_tokens = 16;
constexpr std::int32_t max_tokens = 8192;
constexpr std::int32_t max_pages = max_tokens / page_tokens;
const numbers selecting{3, 7, 11, 15, 19, 23};

__global__ void do_nothing() {}

/// Requests with a prompt of 2,048 positions, of which each selecting layer keeps half.
class server {
  public:
    explicit server(std::int32_t requests)
        : requests_(requests)
        , bounds_(bounds_of(requests))
        , memory_(cuda_ledger::state_bytes(bounds_))
        , table_(std::size_t(num_layers) * std::size_t(requests) * max_pages * sizeof(std::int32_t))
        , ids_(count_up(requests))
        , offsets_(count_up(requests + 1))
        , tags_(std::vector<up::request_tag>(std::size_t(requests), up::request_tag::decode))
        , lens_(std::size_t(num_layers) * std::size_t(requests + 1))
        , slots_(std::size_t(num_layers) * std::size_t(requests)) {
        check(cudaMemset(table_.data(), 0, table_.size), "cudaMemset"); // page 0 everywhere
        up::cuda_device device;
        check(up::cuda_device::current(device));
        check(ledger_.bind(bounds_, layer_sets().data(), memory_.data(), memory_.size, device, nullptr));
        check(ledger_.admit(ids_.data(), requests, nullptr));
        for (std::int32_t request = 0; request < requests; ++request) {
            write_prompt(request, 2048);
        }
        check_fault();
    }

    /// A step of one row for each request, and what all layers have to know of it: two launches.
    void decode(cudaStream_t stream) {
        up::ledger_step step;
        check(ledger_.begin_step(one_row_each(), ids_.data(), step, of_all_layers(), stream));
        check(ledger_.commit_step(step, stream));
    }
    /// Opens a step of one row for each request, whose layers look_up() then tells of: one launch.
    void open(cudaStream_t stream) {
        check(ledger_.begin_step(one_row_each(), ids_.data(), opened_, stream));
    }
    void look_up(cudaStream_t stream) { check(ledger_.look_up(opened_, of_all_layers(), stream)); }
    void check_fault() const {
        std::uint64_t word = 0;
        check(cudaMemcpy(&word, ledger_.fault(), sizeof word, cudaMemcpyDeviceToHost), "fault");
        check(up::ledger_fault(word).to_status());
    }
    [[nodiscard]] double bytes_of_a_request() const { return double(memory_.size) / requests_; }

  private:
    struct sized_bytes : device_bytes {
        explicit sized_bytes(std::size_t bytes)
            : device_bytes(bytes)
            , size(bytes) {}
        std::size_t size;
    };

    [[nodiscard]] up::batch_view one_row_each() const {
        up::batch_view batch = batch_of(requests_, offsets_.data());
        batch.tags = tags_.data();
        batch.num_rows = requests_;
        return batch;
    }
    [[nodiscard]] up::step_wishes<up::block_table_view> of_all_layers() const {
        up::step_wishes<up::block_table_view> wishes;
        wishes.layers = ledger_.every_layer();
        wishes.slots.table = table_.data<std::int32_t>();
        wishes.slots.request_stride = max_pages;
        wishes.slots.layer_stride = std::int64_t{max_pages} * requests_;
        wishes.slots.max_pages = max_pages;
        wishes.slots.page_tokens = page_tokens;
        wishes.out.num_requests = wishes.out.num_rows = requests_;
        wishes.out.seq_lens = lens_.data();
        wishes.out.slots = slots_.data();
        return wishes;
    }
    static numbers count_up(std::int32_t count) {
        numbers made;
        for (std::int32_t i = 0; i < count; ++i) {
            made.push_back(i);
        }
        return made;
    }
    static numbers layer_sets() {
        numbers sets(num_layers);
        std::int32_t count = 0;
        check(up::cumulative_layer_sets(selecting.data(), static_cast<std::int32_t>(selecting.size()),
                                        num_layers, sets.data(), count));
        return sets;
    }
    static up::ledger_limits bounds_of(std::int32_t requests) {
        return {requests, max_tokens, num_layers, static_cast<std::int32_t>(selecting.size()) + 1,
                up::set_relation::nested};
    }
    static up::batch_view batch_of(std::int32_t requests, const std::int32_t* offsets) {
        up::batch_view batch;
        batch.space = up::memory_space::device;
        batch.num_requests = batch.num_segments = requests;
        batch.cu_seqlens = offsets;
        return batch;
    }
    void write_prompt(std::int32_t request, std::int32_t rows) {
        const device_array<up::request_tag> tag(std::vector<up::request_tag>{up::request_tag::prefill});
        std::vector<std::unique_ptr<device_array<std::int32_t>>> kept; // until the device is done
        const auto there = [&](const numbers& values) {
            kept.push_back(std::make_unique<device_array<std::int32_t>>(values));
            return kept.back()->data();
        };
        up::batch_view batch = batch_of(1, there({0, rows}));
        batch.num_rows = rows;
        batch.tags = tag.data();
        up::ledger_step step;
        check(ledger_.begin_step(batch, ids_.data() + request, step, nullptr));
        numbers positions = count_up(rows);
        for (const std::int32_t layer : selecting) {
            for (std::size_t i = 0; i < positions.size() / 2; ++i) {
                positions[i] = positions[2 * i];
            }
            positions.resize(positions.size() / 2);
            up::batch_view entering = batch_of(1, there({0, static_cast<std::int32_t>(positions.size())}));
            entering.num_rows = static_cast<std::int32_t>(positions.size());
            entering.positions = there(positions);
            check(ledger_.append(step, layer + 1, entering, nullptr));
        }
        check(ledger_.commit_step(step, nullptr));
        check(cudaDeviceSynchronize(), "prompt");
    }

    std::int32_t requests_;
    up::ledger_limits bounds_;
    cuda_ledger ledger_;
    sized_bytes memory_;
    sized_bytes table_;
    device_array<std::int32_t> ids_;
    device_array<std::int32_t> offsets_;
    device_array<up::request_tag> tags_;
    device_array<std::int32_t> lens_;
    device_array<std::int64_t> slots_;
    up::ledger_step opened_;
};

/// Times @p work, @p times of it at once.
template <class Work>
void measure(benchmark::State& state, const server& serving, int times, Work work) {
    device_timer timer;
    std::vector<float> each;
    for (auto _ : state) {
        each.push_back(timer.time(work) / static_cast<float>(times));
        state.SetIterationTime(static_cast<double>(each.back()) / 1000);
    }
    serving.check_fault();
    state.counters["median_us"] = 1000 * median(each);
}

/// The same for @p work captured in a graph that does it 20 times.
template <class Work>
void measure_in_a_graph(benchmark::State& state, const server& serving, Work work) {
    constexpr int times = 20;
    cudaStream_t stream = nullptr;
    check(cudaStreamCreate(&stream), "cudaStreamCreate");
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    for (int i = 0; i < times; ++i) {
        work(stream);
    }
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t replayed = nullptr;
    check(cudaStreamEndCapture(stream, &graph), "capture");
    check(cudaGraphInstantiate(&replayed, graph, 0), "cudaGraphInstantiate");
    measure(state, serving, times, [&](cudaStream_t on) { check(cudaGraphLaunch(replayed, on), "replay"); });
    cudaGraphExecDestroy(replayed);
    cudaGraphDestroy(graph);
    cudaStreamDestroy(stream);
}

void decode_step(benchmark::State& state) {
    server serving(static_cast<std::int32_t>(state.range(0)));
    measure(state, serving, 1, [&](cudaStream_t stream) { serving.decode(stream); });
    state.counters["bytes_of_a_request"] = serving.bytes_of_a_request();
}
void decode_steps_in_a_graph(benchmark::State& state) {
    server serving(static_cast<std::int32_t>(state.range(0)));
    measure_in_a_graph(state, serving, [&](cudaStream_t stream) { serving.decode(stream); });
}
/// Lengths and slots of all layers by themselves, of a step that is open.
void lookups(benchmark::State& state) {
    server serving(static_cast<std::int32_t>(state.range(0)));
    serving.open(nullptr);
    measure(state, serving, 1, [&](cudaStream_t stream) { serving.look_up(stream); });
}
void lookups_in_a_graph(benchmark::State& state) {
    server serving(static_cast<std::int32_t>(state.range(0)));
    serving.open(nullptr);
    measure_in_a_graph(state, serving, [&](cudaStream_t stream) { serving.look_up(stream); });
}
/// What events show around nothing that takes time.
void empty_kernel(benchmark::State& state) {
    device_timer timer;
    std::vector<float> each;
    for (auto _ : state) {
        each.push_back(timer.time([](cudaStream_t stream) { do_nothing<<<1, 32, 0, stream>>>(); }));
        state.SetIterationTime(static_cast<double>(each.back()) / 1000);
    }
    state.counters["median_us"] = 1000 * median(each);
}

} // namespace

#define UNIPREFILL_BENCH(NAME)                                                                               \
    BENCHMARK(NAME)->UseManualTime()->Unit(benchmark::kMicrosecond)->Iterations(100)

UNIPREFILL_BENCH(empty_kernel);
UNIPREFILL_BENCH(decode_step)->Arg(64)->Arg(256);
UNIPREFILL_BENCH(decode_steps_in_a_graph)->Arg(64)->Arg(256);
UNIPREFILL_BENCH(lookups)->Arg(64)->Arg(256);
UNIPREFILL_BENCH(lookups_in_a_graph)->Arg(64)->Arg(256);
