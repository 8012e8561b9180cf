// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Rank buffers in device memory, one rank a device, reduced on the devices' streams.

#include "check_nccl.hpp"
#include "support/cuda.cuh"

#include <uniprefill/comm/nccl.cuh>

#include <algorithm>
#include <memory>
#include <string>

namespace up = uniprefill;
using uniprefill_test::check_cuda;
using uniprefill_test::device_array;

namespace {

static_assert(up::is_reduction_v<up::nccl_reduction, up::backend::cuda::stream>);
static_assert(!up::is_reduction_v<up::nccl_reduction, up::host_stream>, "it takes device buffers");

int device_count() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

/// One communicator, stream and buffer for each of the first devices, driven by one thread.
class device_ranks {
  public:
    device_ranks(int count, int words)
        : comms_(static_cast<std::size_t>(count)) {
        check_nccl(ncclCommInitAll(comms_.data(), count, nullptr), "ncclCommInitAll");
        for (int device = 0; device < count; ++device) {
            cudaSetDevice(device);
            streams_.emplace_back();
            check_cuda(cudaStreamCreate(&streams_.back()), "cudaStreamCreate");
            joins_.emplace_back();
            check_cuda(cudaEventCreateWithFlags(&joins_.back(), cudaEventDisableTiming), "cudaEventCreate");
            buffers_.emplace_back(static_cast<std::size_t>(words));
        }
    }
    device_ranks(const device_ranks&) = delete;
    device_ranks& operator=(const device_ranks&) = delete;
    ~device_ranks() {
        for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
            cudaSetDevice(static_cast<int>(rank));
            cudaStreamDestroy(streams_[rank]);
            cudaEventDestroy(joins_[rank]);
            buffers_[rank] = {};
            ncclCommDestroy(comms_[rank]);
        }
        cudaSetDevice(0);
    }

    void set(const std::vector<std::vector<std::int64_t>>& values) {
        for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
            cudaSetDevice(static_cast<int>(rank));
            buffers_[rank].set(values[rank]);
            check_cuda(cudaDeviceSynchronize(),
                       "synchronize"); // streams of other devices don't wait for copies
        }
    }
    void reduce(up::rank_reduction how) {
        check_nccl(ncclGroupStart(), "ncclGroupStart");
        for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
            const up::nccl_reduction reduction(comms_[rank]);
            CHECK(reduction(buffers_[rank].data(), static_cast<std::int64_t>(buffers_[rank].size()), how,
                            streams_[rank])
                      .ok());
        }
        check_nccl(ncclGroupEnd(), "ncclGroupEnd");
    }
    /// What is on every device once the streams are done.
    std::vector<std::vector<std::int64_t>> get() {
        std::vector<std::vector<std::int64_t>> values;
        for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
            cudaSetDevice(static_cast<int>(rank));
            values.push_back(buffers_[rank].get());
        }
        return values;
    }
    /// Records one reduction of all ranks as a graph that begins and ends on the first stream (global capture
    /// mode).
    cudaGraphExec_t capture(up::rank_reduction how) {
        check_cuda(cudaStreamBeginCapture(streams_[0], cudaStreamCaptureModeGlobal),
                   "cudaStreamBeginCapture");
        check_cuda(cudaEventRecord(joins_[0], streams_[0]), "fork");
        for (std::size_t rank = 1; rank < comms_.size(); ++rank) {
            check_cuda(cudaStreamWaitEvent(streams_[rank], joins_[0]), "fork");
        }
        reduce(how);
        for (std::size_t rank = 1; rank < comms_.size(); ++rank) {
            check_cuda(cudaEventRecord(joins_[rank], streams_[rank]), "join");
            check_cuda(cudaStreamWaitEvent(streams_[0], joins_[rank]), "join");
        }
        cudaGraph_t graph = nullptr;
        check_cuda(cudaStreamEndCapture(streams_[0], &graph), "cudaStreamEndCapture");
        cudaGraphExec_t executable = nullptr;
        check_cuda(cudaGraphInstantiate(&executable, graph, 0), "cudaGraphInstantiate");
        cudaGraphDestroy(graph);
        return executable;
    }
    void replay(cudaGraphExec_t graph) {
        cudaSetDevice(0);
        check_cuda(cudaGraphLaunch(graph, streams_[0]), "cudaGraphLaunch");
        check_cuda(cudaStreamSynchronize(streams_[0]), "replay");
    }

  private:
    std::vector<ncclComm_t> comms_;
    std::vector<cudaStream_t> streams_;
    std::vector<cudaEvent_t> joins_;
    std::vector<device_array<std::int64_t>> buffers_;
};

/// Words of each rank that a double would round, masses of random size and fault words.
std::vector<std::vector<std::int64_t>> random_words(int ranks, int words, std::uint64_t seed) {
    std::vector<std::vector<std::int64_t>> values(static_cast<std::size_t>(ranks));
    std::uint64_t state = seed;
    for (auto& rank : values) {
        for (int i = 0; i < words; ++i) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            rank.push_back(static_cast<std::int64_t>(state >> (4 + i % 50)));
        }
    }
    return values;
}

std::vector<std::vector<std::int64_t>> reduced(std::vector<std::vector<std::int64_t>> values,
                                               up::rank_reduction how) {
    std::vector<std::int64_t> all = values[0];
    for (std::size_t rank = 1; rank < values.size(); ++rank) {
        for (std::size_t i = 0; i < all.size(); ++i) {
            all[i] =
                how == up::rank_reduction::sum ? all[i] + values[rank][i] : std::max(all[i], values[rank][i]);
        }
    }
    std::fill(values.begin(), values.end(), all);
    return values;
}

void reduces_exactly(int count) {
    for (const int words : {1, 33, 4106, 600001}) {
        device_ranks ranks(count, words);
        for (const auto how : {up::rank_reduction::sum, up::rank_reduction::maximum}) {
            INFO(words << " words, " << count << " ranks, "
                       << (how == up::rank_reduction::sum ? "sum" : "maximum"));
            const auto eager = random_words(count, words, uniprefill_test::seed());
            ranks.set(eager);
            ranks.reduce(how);
            CHECK(ranks.get() == reduced(eager, how));

            const cudaGraphExec_t graph = ranks.capture(how);
            for (const std::uint64_t seed : {1u, 2u}) {
                const auto replayed = random_words(count, words, uniprefill_test::seed() + seed);
                ranks.set(replayed);
                ranks.replay(graph);
                CHECK(ranks.get() == reduced(replayed, how));
            }
            cudaGraphExecDestroy(graph);
        }
    }
}

} // namespace

TEST_CASE("one device: the buffer stays as it is, eager and captured") {
    if (uniprefill_test::has_device()) {
        reduces_exactly(1);
    }
}

TEST_CASE("two devices: sums and maxima are exact and the same on both, eager and captured") {
    if (device_count() < 2) {
        uniprefill_test::skip("fewer than two CUDA devices");
        return;
    }
    reduces_exactly(2);
}

TEST_CASE("arguments that make no sense are refused before anything is enqueued") {
    const auto refused = [](ncclComm_t ranks, std::int64_t* buffer, std::int64_t count) {
        const up::status result = up::nccl_reduction(ranks)(buffer, count, up::rank_reduction::sum, nullptr);
        CHECK(result.code == up::status_code::invalid_argument);
        return std::string(result.argument);
    };
    std::int64_t word = 0;
    const auto some_ranks = reinterpret_cast<ncclComm_t>(&word); // never looked into
    CHECK(refused(nullptr, &word, 1) == "ranks");
    CHECK(refused(some_ranks, &word, -1) == "count");
    CHECK(refused(some_ranks, nullptr, 1) == "buffer");
}

TEST_CASE("a result of NCCL as a status") {
    CHECK(up::nccl_result(ncclSuccess, "ncclAllReduce").ok());
    const up::status failed = up::nccl_result(ncclInProgress, "ncclAllReduce");
    CHECK(failed.code == up::status_code::backend_error);
    CHECK(failed.came == ncclInProgress);
    CHECK(std::string(failed.argument) == "ncclAllReduce");
}
