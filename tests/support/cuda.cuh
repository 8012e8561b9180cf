// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Device memory and streams of tests. Everything here fails the running test on a CUDA error.

#include "support/catch.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

namespace uniprefill_test {

inline void check_cuda(cudaError_t code, const char* what) {
    if (code != cudaSuccess) {
        FAIL(what << ": " << cudaGetErrorString(code));
    }
}

/// Whether there is a device; if not, the test case is marked as skipped and should return.
inline bool has_device() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) {
        return true;
    }
    static_cast<void>(cudaGetLastError());
    skip("no CUDA device");
    return false;
}

/// Whether new arrays are filled. With UNIPREFILL_TEST_FILL=0 they aren't, so that compute-sanitizer's
/// initcheck sees what nobody wrote.
inline bool fills_arrays() {
    const char* const fill = std::getenv("UNIPREFILL_TEST_FILL");
    return fill == nullptr || std::string(fill) != "0";
}

/// An array in device memory. New elements hold bytes 0xa5, so that reading what nobody wrote shows.
template <class T>
class device_array {
  public:
    device_array() = default;
    explicit device_array(std::size_t count)
        : count_(count) {
        check_cuda(cudaMalloc(&data_, (count == 0 ? 1 : count) * sizeof(T)), "cudaMalloc");
        if (fills_arrays()) {
            check_cuda(cudaMemset(data_, 0xa5, (count == 0 ? 1 : count) * sizeof(T)), "cudaMemset");
        }
    }
    explicit device_array(const std::vector<T>& values)
        : device_array(values.size()) {
        set(values);
    }
    device_array(device_array&& other) noexcept
        : data_(std::exchange(other.data_, nullptr))
        , count_(std::exchange(other.count_, 0)) {}
    device_array& operator=(device_array&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    device_array(const device_array&) = delete;
    device_array& operator=(const device_array&) = delete;
    ~device_array() { cudaFree(data_); }

    /// Overwrites the first elements. Synchronous.
    void set(const std::vector<T>& values) {
        REQUIRE(values.size() <= count_);
        check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
                   "copy to the device");
    }
    /// All elements, once everything launched before has run.
    [[nodiscard]] std::vector<T> get() const { return get(count_); }
    [[nodiscard]] std::vector<T> get(std::size_t count) const {
        check_cuda(cudaDeviceSynchronize(), "synchronize");
        std::vector<T> values(count);
        check_cuda(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost),
                   "copy from the device");
        return values;
    }
    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }

  private:
    T* data_ = nullptr;
    std::size_t count_ = 0;
};

/// Records what @p work puts onto a stream as a graph (global capture mode: any call that a capture forbids
/// fails), then replays it as often as wanted.
class captured_graph {
  public:
    template <class Work>
    explicit captured_graph(Work work) {
        check_cuda(cudaStreamCreate(&stream_), "cudaStreamCreate");
        check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), "cudaStreamBeginCapture");
        work(stream_);
        cudaGraph_t graph = nullptr;
        check_cuda(cudaStreamEndCapture(stream_, &graph), "cudaStreamEndCapture");
        check_cuda(cudaGraphInstantiate(&executable_, graph, 0), "cudaGraphInstantiate");
        cudaGraphDestroy(graph);
    }
    captured_graph(const captured_graph&) = delete;
    captured_graph& operator=(const captured_graph&) = delete;
    ~captured_graph() {
        cudaGraphExecDestroy(executable_);
        cudaStreamDestroy(stream_);
    }
    void replay() {
        check_cuda(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch");
        check_cuda(cudaStreamSynchronize(stream_), "replay");
    }

  private:
    cudaStream_t stream_ = nullptr;
    cudaGraphExec_t executable_ = nullptr;
};

} // namespace uniprefill_test
