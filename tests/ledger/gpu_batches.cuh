// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// Operations on the device that are written down first and run together, so that a test of very many of them
/// waits for the device once in a while: what they read goes there in one copy, what they tell comes back in
/// one.

#include "ledger/ledger_fixture.hpp"
#include "support/cuda.cuh"

#include <uniprefill/ledger/drop_ledger.cuh>

#include <algorithm>
#include <functional>

namespace ledger_test {

using backend_cuda = up::backend::cuda;
using uniprefill_test::check_cuda;
using uniprefill_test::device_array;

/// Page-locked host memory: copies from and to it don't wait.
class pinned_bytes {
  public:
    explicit pinned_bytes(std::size_t count) { check_cuda(cudaMallocHost(&data_, count), "cudaMallocHost"); }
    pinned_bytes(const pinned_bytes&) = delete;
    pinned_bytes& operator=(const pinned_bytes&) = delete;
    ~pinned_bytes() { cudaFreeHost(data_); }
    std::byte* data() const { return data_; }

  private:
    std::byte* data_ = nullptr;
};

/// An array that the device writes, and the same one as the host writes it.
template <class T>
struct told_twice {
    T* host;
    T* device;
};

/// Operations on one stream. In turn: record, launch(), compare().
class recorded_batch {
  public:
    explicit recorded_batch(std::size_t room)
        : room_(room)
        , sent_(room)
        , came_(room)
        , expected_(room, std::byte{untouched})
        , inputs_(room)
        , outputs_(room) {
        check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
        check_cuda(cudaDeviceSynchronize(), "synchronize"); // the stream doesn't wait for what filled memory
    }
    recorded_batch(const recorded_batch&) = delete;
    recorded_batch& operator=(const recorded_batch&) = delete;
    ~recorded_batch() { cudaStreamDestroy(stream_); }

    /// Whether less than a third of the room is left.
    bool is_full() const { return 3 * std::max(inputs_used_, outputs_used_) > 2 * room_; }
    cudaStream_t stream() const { return stream_; }

    /// What comes now belongs to this operation.
    void begin_operation(std::int64_t number, const char* name) {
        operation_ = number;
        name_ = name;
    }

    /// A copy that is on the device when the operations run.
    template <class T>
    T* input(const std::vector<T>& values) {
        const std::size_t at = take(inputs_used_, values.size() * sizeof(T));
        if (!values.empty()) {
            std::memcpy(sent_.data() + at, values.data(), values.size() * sizeof(T));
        }
        return reinterpret_cast<T*>(inputs_.data() + at);
    }
    /// To be written by both; what neither writes is the same too.
    template <class T>
    told_twice<T> output(std::size_t count) {
        const std::size_t at = take(outputs_used_, count * sizeof(T));
        marks_.push_back({at, operation_, name_});
        return {reinterpret_cast<T*>(expected_.data() + at), reinterpret_cast<T*>(outputs_.data() + at)};
    }
    /// To be changed by both.
    template <class T>
    told_twice<T> changed(const std::vector<T>& before) {
        const told_twice<T> made = output<T>(before.size());
        const std::size_t bytes = before.size() * sizeof(T);
        std::copy(before.begin(), before.end(), made.host);
        copy(made.device, input(before), bytes);
        return made;
    }

    /// A call of the device ledger.
    void call(std::function<up::status(cudaStream_t)> what) { calls_.push_back(std::move(what)); }
    /// A copy on the device.
    void copy(void* to, const void* from, std::size_t bytes) {
        call([=](cudaStream_t stream) {
            return up::cuda_result(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream),
                                   "copy");
        });
    }
    /// The fault that is there then has to say what the host's status does.
    void expect_fault(const up::drop_ledger<backend_cuda>& ledger, const up::status& expected) {
        const told_twice<std::uint64_t> word = output<std::uint64_t>(1);
        copy(word.device, ledger.fault(), sizeof(std::uint64_t));
        faults_.push_back({marks_.back().begin, expected, operation_, name_});
    }

    void launch() {
        check_cuda(
            cudaMemcpyAsync(inputs_.data(), sent_.data(), inputs_used_, cudaMemcpyHostToDevice, stream_),
            "inputs");
        check_cuda(cudaMemsetAsync(outputs_.data(), untouched, outputs_used_, stream_), "outputs");
        for (const auto& one : calls_) {
            must(one(stream_));
        }
        check_cuda(
            cudaMemcpyAsync(came_.data(), outputs_.data(), outputs_used_, cudaMemcpyDeviceToHost, stream_),
            "outputs");
    }
    /// Waits. Fails the test at the first difference.
    void compare() {
        check_cuda(cudaStreamSynchronize(stream_), "a batch of operations");
        for (const expected_fault& fault : faults_) {
            std::uint64_t word = 0;
            std::memcpy(&word, came_.data() + fault.at, sizeof word);
            std::memcpy(expected_.data() + fault.at, &word, sizeof word);
            const up::status said = up::ledger_fault(word).to_status();
            if (said.code != fault.expected.code || said.request != fault.expected.request ||
                said.layer != fault.expected.layer) {
                FAIL("operation " << fault.operation << ", " << fault.name << ": the device says "
                                  << text(said) << ", the host " << text(fault.expected));
            }
        }
        if (std::memcmp(came_.data(), expected_.data(), outputs_used_) != 0) {
            std::size_t at = 0;
            while (came_.data()[at] == expected_.data()[at]) {
                ++at;
            }
            const auto behind = std::upper_bound(marks_.begin(), marks_.end(), at,
                                                 [](std::size_t a, const mark& m) { return a < m.begin; });
            const mark& in = *(behind - 1);
            FAIL("operation " << in.operation << ", " << in.name << ": array " << in_operation(in)
                              << " differs at byte " << at - in.begin);
        }
        clear();
    }

  private:
    static constexpr int untouched = 0xa5;

    struct mark {
        std::size_t begin;
        std::int64_t operation;
        const char* name;
    };
    struct expected_fault {
        std::size_t at;
        up::status expected;
        std::int64_t operation;
        const char* name;
    };

    /// Which of its operation's arrays this is.
    std::ptrdiff_t in_operation(const mark& which) const {
        const auto first = std::find_if(marks_.begin(), marks_.end(),
                                        [&](const mark& m) { return m.operation == which.operation; });
        return &which - &*first;
    }
    std::size_t take(std::size_t& used, std::size_t bytes) const {
        const std::size_t at = used;
        used += (bytes + 15) / 16 * 16 + 16; // something between any two that neither may touch
        if (used > room_) {
            throw std::logic_error("a batch of operations took more room than there is");
        }
        return at;
    }
    void clear() {
        std::memset(expected_.data(), untouched, outputs_used_);
        inputs_used_ = outputs_used_ = 0;
        marks_.clear();
        faults_.clear();
        calls_.clear();
    }

    std::size_t room_;
    pinned_bytes sent_;
    pinned_bytes came_;
    std::vector<std::byte> expected_;
    device_array<std::byte> inputs_;
    device_array<std::byte> outputs_;
    std::size_t inputs_used_ = 0;
    std::size_t outputs_used_ = 0;
    std::vector<mark> marks_;
    std::vector<expected_fault> faults_;
    std::vector<std::function<up::status(cudaStream_t)>> calls_;
    std::int64_t operation_ = 0;
    const char* name_ = "";
    cudaStream_t stream_ = nullptr;
};

} // namespace ledger_test
