// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Engines that threads drive at the same time, each on a device and a stream: ranks that share the heads of
/// one model, or engines that have nothing to do with each other.

#include "gpu_facade.cuh"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace pipeline_test {

inline int num_devices() {
    int count = 0;
    return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}
inline void use_device(int ordinal) {
    check_cuda(cudaSetDevice(ordinal), "cudaSetDevice");
}

/// Where an engine works, and on which heads.
struct engine_place {
    up::cuda_device device;
    head_share share{};
};

class engine_crew {
  public:
    /// @param first the largest content that it will run
    engine_crew(const content& first, const std::vector<up::selecting_layer<rule>>& layers,
                up::propagation mode, const std::vector<engine_place>& places) {
        for (const engine_place& place : places) {
            use_device(place.device.ordinal);
            members_.push_back(std::make_unique<member>(first, layers, mode, place));
        }
        use_device(0);
    }

    void load(const content& what) {
        for (const auto& one : members_) {
            use_device(one->ordinal);
            one->engine.load(what);
            check_cuda(cudaDeviceSynchronize(), "load"); // streams of their own don't wait for copies
        }
        use_device(0);
    }
    /// All engines at once, each on its own thread. @param reduction_of of an engine's place among them
    template <class ReductionOf>
    void run(const ReductionOf& reduction_of) {
        together([&](member& one, int index) {
            UNIPREFILL_TRY(one.engine.prepare());
            UNIPREFILL_TRY(one.engine.run(one.stream, true, reduction_of(index)));
            return up::cuda_result(cudaStreamSynchronize(one.stream), "run");
        });
    }
    /// The same as graphs, one for each engine.
    template <class ReductionOf>
    void capture(cudaStreamCaptureMode mode, const ReductionOf& reduction_of) {
        together([&](member& one, int index) {
            UNIPREFILL_TRY(
                up::cuda_result(cudaStreamBeginCapture(one.stream, mode), "cudaStreamBeginCapture"));
            const up::status ran = one.engine.run(one.stream, true, reduction_of(index));
            const up::status ended =
                up::cuda_result(cudaStreamEndCapture(one.stream, &one.captured), "cudaStreamEndCapture");
            return ran.ok() ? ended : ran;
        });
        for (const auto& one : members_) {
            use_device(one->ordinal);
            one->instantiate();
        }
        use_device(0);
    }
    void replay() {
        together([](member& one, int) {
            UNIPREFILL_TRY(up::cuda_result(cudaGraphLaunch(one.graph, one.stream), "cudaGraphLaunch"));
            return up::cuda_result(cudaStreamSynchronize(one.stream), "replay");
        });
    }
    /// What each engine recorded.
    [[nodiscard]] std::vector<std::vector<seen>> recorded() const {
        std::vector<std::vector<seen>> all;
        for (const auto& one : members_) {
            use_device(one->ordinal);
            all.push_back(one->engine.recorded());
        }
        use_device(0);
        return all;
    }

  private:
    struct member {
        int ordinal;
        device_engine engine;
        cudaStream_t stream = nullptr;
        cudaGraph_t captured = nullptr;
        cudaGraphExec_t graph = nullptr;
        up::status done{};

        member(const content& first, const std::vector<up::selecting_layer<rule>>& layers,
               up::propagation mode, const engine_place& place)
            : ordinal(place.device.ordinal)
            , engine(first, layers, mode, place.device, place.share) {
            check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
        }
        member(const member&) = delete;
        member& operator=(const member&) = delete;
        ~member() {
            forget_graph();
            cudaStreamDestroy(stream);
        }
        void instantiate() {
            forget_graph();
            check_cuda(cudaGraphInstantiate(&graph, captured, 0), "cudaGraphInstantiate");
            cudaGraphDestroy(captured);
        }
        void forget_graph() {
            if (graph != nullptr) {
                cudaGraphExecDestroy(graph);
                graph = nullptr;
            }
        }
    };

    /// Every engine's work on a thread of its own, judged on this one.
    template <class Work>
    void together(const Work& work) {
        std::atomic<int> missing{static_cast<int>(members_.size())};
        std::vector<std::thread> threads;
        for (int index = 0; index < static_cast<int>(members_.size()); ++index) {
            threads.emplace_back([this, &missing, &work, index] {
                member& one = *members_[static_cast<std::size_t>(index)];
                one.done = up::cuda_result(cudaSetDevice(one.ordinal), "cudaSetDevice");
                for (--missing; missing.load() > 0;) { // so that they start together
                }
                if (one.done.ok()) {
                    one.done = work(one, index);
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        for (const auto& one : members_) {
            INFO("device " << one->ordinal);
            require_ok(one->done);
        }
    }

    std::vector<std::unique_ptr<member>> members_;
};

/// What an engine with all heads, alone on device 0, makes of @p what.
inline std::vector<seen> of_one_engine(const content& first, const content& what, up::propagation mode) {
    device_engine engine(first, some_layers(), mode, this_device());
    engine.load(what);
    require_ok(engine.run(nullptr, true));
    return engine.recorded();
}

/// Checks that an engine saw what another did at each selecting layer: every output, and every mass but those
/// of a segment with a fault, which differ with the number of ranks, as does how often its word tells it.
inline void check_same(const content& what, const std::vector<seen>& came, const std::vector<seen>& wanted) {
    REQUIRE(came.size() == wanted.size());
    const auto num_masses = static_cast<std::ptrdiff_t>(wanted[0].masses.size()) - what.limits().max_segments;
    const auto fault_of = [&](const seen& one, std::int32_t s) {
        return one.masses[static_cast<std::size_t>(num_masses + s)];
    };
    for (std::size_t layer = 0; layer < came.size(); ++layer) {
        INFO("selecting layer " << layer);
        const seen& a = came[layer];
        const seen& b = wanted[layer];
        std::vector<std::int64_t> masses = a.masses, wanted_masses = b.masses;
        for (std::int32_t s = 0; s < what.batch().num_segments; ++s) {
            CAPTURE(s);
            CHECK((fault_of(a, s) != 0) == (fault_of(b, s) != 0));
            if (fault_of(b, s) != 0) {
                REQUIRE(layer == 0); // the rows that its decision was about are the step's
                what.forget_masses(masses, s);
                what.forget_masses(wanted_masses, s);
            }
        }
        CHECK(std::equal(masses.begin(), masses.begin() + num_masses, wanted_masses.begin()));
        CHECK((a.keep_bits == b.keep_bits));
        CHECK((a.kept_to_old == b.kept_to_old));
        CHECK((a.old_to_kept == b.old_to_kept));
        CHECK((a.cu_seqlens == b.cu_seqlens));
        CHECK((a.cu_segments == b.cu_segments));
        CHECK((a.rows_cu_seqlens == b.rows_cu_seqlens));
        CHECK((a.rows_cu_segments == b.rows_cu_segments));
        CHECK((a.positions == b.positions));
        CHECK((a.original_rows == b.original_rows));
        for (std::size_t s = 0; s < a.outcomes.size(); ++s) {
            CAPTURE(s);
            CHECK(a.outcomes[s].reason == b.outcomes[s].reason);
            CHECK(a.outcomes[s].rows == b.outcomes[s].rows);
            CHECK(a.outcomes[s].kept == b.outcomes[s].kept);
            CHECK(a.outcomes[s].total_mass == b.outcomes[s].total_mass);
            CHECK(a.outcomes[s].dropped_mass == b.outcomes[s].dropped_mass);
        }
        // Rows beyond those that are left hold whatever was there.
        const auto requests = static_cast<std::size_t>(what.batch().num_requests);
        CHECK(std::equal(a.hidden.begin(),
                         a.hidden.begin() + std::ptrdiff_t{a.rows_cu_seqlens[requests]} * tensor_width,
                         b.hidden.begin()));
    }
}

/// Checks what ranks that share the heads made of @p what: what one engine does, and all of them the same.
inline void check_ranks(const content& what, const std::vector<std::vector<seen>>& ranks,
                        const std::vector<seen>& wanted) {
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        INFO("rank " << rank);
        check_same(what, ranks[rank], wanted);
        for (std::size_t layer = 0; layer < wanted.size(); ++layer) {
            CHECK((ranks[rank][layer].masses == ranks[0][layer].masses));
        }
    }
}

/// Places for so many ranks, on one device each or all on one.
inline std::vector<engine_place> places_of_ranks(int ranks, bool on_one_device) {
    std::vector<engine_place> places;
    for (int rank = 0; rank < ranks; ++rank) {
        use_device(on_one_device ? 0 : rank);
        places.push_back({this_device(), {rank, ranks}});
    }
    use_device(0);
    return places;
}

/// Buffers of all ranks.
struct rank_buffers {
    const std::int64_t* of[kv_heads];
};
template <class = void>
__global__ void sum_of_ranks(rank_buffers all, std::int64_t count, std::int64_t* sum) {
    for (std::int64_t i = blockIdx.x * std::int64_t{blockDim.x} + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        sum[i] = 0;
        for (const std::int64_t* const one : all.of) {
            sum[i] += one[i];
        }
    }
}

/// A reduction that a user might write between ranks that are threads with one device. Its streams wait for
/// each other, so it can't be captured.
class thread_ranks {
  public:
    explicit thread_ranks(std::int64_t words) {
        for (int rank = 0; rank < kv_heads; ++rank) {
            sums_.emplace_back(static_cast<std::size_t>(words));
            for (auto* const events : {ready_, summed_}) {
                check_cuda(cudaEventCreateWithFlags(&events[rank], cudaEventDisableTiming),
                           "cudaEventCreate");
            }
        }
    }
    thread_ranks(const thread_ranks&) = delete;
    thread_ranks& operator=(const thread_ranks&) = delete;
    ~thread_ranks() {
        for (int rank = 0; rank < kv_heads; ++rank) {
            cudaEventDestroy(ready_[rank]);
            cudaEventDestroy(summed_[rank]);
        }
    }

    struct reduction {
        thread_ranks* all;
        int rank;

        up::status operator()(std::int64_t* buffer, std::int64_t count, up::rank_reduction how,
                              cudaStream_t stream) const noexcept {
            return how == up::rank_reduction::sum
                       ? all->add_up(rank, buffer, count, stream)
                       : up::failure(up::status_code::invalid_argument, "how", "a sum over heads", 1);
        }
    };

  private:
    up::status add_up(int rank, std::int64_t* buffer, std::int64_t count, cudaStream_t stream) {
        buffers_.of[rank] = buffer;
        up::status done = up::cuda_result(cudaEventRecord(ready_[rank], stream), "ready");
        meet(); // even where something failed: the others wait
        std::int64_t* const sum = sums_[static_cast<std::size_t>(rank)].data();
        done = done.ok() ? wait_for(ready_, stream) : done;
        sum_of_ranks<><<<4, 256, 0, stream>>>(buffers_, count, sum);
        done = done.ok() ? up::cuda_result(cudaPeekAtLastError(), "sum_of_ranks") : done;
        done = done.ok() ? up::cuda_result(cudaEventRecord(summed_[rank], stream), "summed") : done;
        meet();
        UNIPREFILL_TRY(done);
        UNIPREFILL_TRY(wait_for(summed_, stream));
        return up::cuda_result(cudaMemcpyAsync(buffer, sum, static_cast<std::size_t>(count) * sizeof *sum,
                                               cudaMemcpyDeviceToDevice, stream),
                               "sum");
    }
    static up::status wait_for(const cudaEvent_t (&events)[kv_heads], cudaStream_t stream) {
        for (const cudaEvent_t one : events) {
            UNIPREFILL_TRY(up::cuda_result(cudaStreamWaitEvent(stream, one), "wait"));
        }
        return up::success();
    }
    void meet() {
        std::unique_lock lock(mutex_);
        const int meeting = meetings_;
        if (++arrived_ == kv_heads) {
            arrived_ = 0;
            ++meetings_;
            changed_.notify_all();
        }
        changed_.wait(lock, [&] { return meetings_ != meeting; });
    }

    std::vector<device_array<std::int64_t>> sums_;
    rank_buffers buffers_{};
    cudaEvent_t ready_[kv_heads] = {}, summed_[kv_heads] = {};
    std::mutex mutex_;
    std::condition_variable changed_;
    int arrived_ = 0, meetings_ = 0;
};

} // namespace pipeline_test
