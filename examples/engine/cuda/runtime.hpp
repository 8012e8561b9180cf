// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/error.hpp"

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

/// What the engine has of the CUDA runtime: memory, streams, events and graphs that free themselves. Every
/// failure is an `engine::error`.
namespace engine::cuda {

/// Throws unless @p code is success. @p what names what was tried.
inline void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) {
        static_cast<void>(cudaGetLastError()); // the next call is not to blame
        throw error(std::string("CUDA, ") + what, "success", cudaGetErrorString(code));
    }
}

/// Throws where there is no device that can run the engine.
inline void require_device() {
    int devices = 0;
    const cudaError_t code = cudaGetDeviceCount(&devices);
    if (code != cudaSuccess || devices == 0) {
        static_cast<void>(cudaGetLastError());
        throw error("--device", "a CUDA device",
                    code == cudaSuccess ? std::string("none")
                                        : std::string("none: ") + cudaGetErrorString(code));
    }
    int major = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), "device");
    if (major < 8) throw error("--device", "compute capability 8.0 or more", std::to_string(major) + ".x");
}

/// Elements of an array of rows.
inline std::size_t count_of(std::int64_t rows, std::int64_t columns) {
    return static_cast<std::size_t>(rows * columns);
}

/// Puts a copy to pinned memory onto a stream.
inline void copy_back(void* to, const void* from, std::size_t bytes, cudaStream_t on) {
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, on), "copy to the host");
}

/// An array in device memory, uninitialised.
template <class T>
class device_array {
  public:
    device_array() = default;
    explicit device_array(std::size_t count)
        : count_(count) {
        if (count == 0) return;
        const cudaError_t code = cudaMalloc(&data_, count * sizeof(T));
        if (code != cudaSuccess) {
            static_cast<void>(cudaGetLastError());
            throw error("device memory", "room for " + std::to_string(count * sizeof(T)) + " bytes more",
                        cudaGetErrorString(code));
        }
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

    T* data() const { return static_cast<T*>(data_); }
    std::size_t size() const { return count_; }
    std::size_t bytes() const { return count_ * sizeof(T); }

    /// Overwrites elements from @p first on; returns when it is done.
    void set(const T* values, std::size_t count, std::size_t first = 0) {
        if (first > count_ || count > count_ - first) {
            throw error("device memory", "at most " + std::to_string(count_) + " elements",
                        std::to_string(first + count));
        }
        check(cudaMemcpy(data() + first, values, count * sizeof(T), cudaMemcpyHostToDevice),
              "copy to the device");
        // A copy from pageable memory may still be on its way, and other streams don't wait for it.
        check(cudaStreamSynchronize(nullptr), "copy to the device");
    }
    void set(const std::vector<T>& values) { set(values.data(), values.size()); }
    /// Elements, once all work launched before is done.
    std::vector<T> get(std::size_t count) const {
        std::vector<T> values(count);
        check(cudaDeviceSynchronize(), "kernels");
        check(cudaMemcpy(values.data(), data_, count * sizeof(T), cudaMemcpyDeviceToHost),
              "copy to the host");
        return values;
    }
    std::vector<T> get() const { return get(count_); }

  private:
    void* data_ = nullptr;
    std::size_t count_ = 0;
};

/// An array in host memory that copies can run from and to on their own.
template <class T>
class pinned_array {
  public:
    explicit pinned_array(std::size_t count)
        : count_(count) {
        check(cudaMallocHost(&data_, (count == 0 ? 1 : count) * sizeof(T)), "pinned memory");
    }
    pinned_array(const pinned_array&) = delete;
    pinned_array& operator=(const pinned_array&) = delete;
    ~pinned_array() { cudaFreeHost(data_); }
    T* data() const { return static_cast<T*>(data_); }
    std::size_t size() const { return count_; }
    T& operator[](std::size_t i) const { return data()[i]; }

  private:
    void* data_ = nullptr;
    std::size_t count_;
};

class stream {
  public:
    stream() { check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream"); }
    stream(const stream&) = delete;
    stream& operator=(const stream&) = delete;
    ~stream() { cudaStreamDestroy(stream_); }
    operator cudaStream_t() const { return stream_; }
    void wait() const { check(cudaStreamSynchronize(stream_), "kernels"); }

  private:
    cudaStream_t stream_ = nullptr;
};

class event {
  public:
    event() { check(cudaEventCreate(&event_), "event"); }
    event(event&& other) noexcept
        : event_(std::exchange(other.event_, nullptr)) {}
    event& operator=(event&& other) noexcept {
        std::swap(event_, other.event_);
        return *this;
    }
    event(const event&) = delete;
    event& operator=(const event&) = delete;
    ~event() {
        if (event_ != nullptr) cudaEventDestroy(event_);
    }
    void record(cudaStream_t on) const { check(cudaEventRecord(event_, on), "event"); }
    void wait() const { check(cudaEventSynchronize(event_), "kernels"); }
    /// Milliseconds from @p start to this one; both have happened.
    float since(const event& start) const {
        float milliseconds = 0;
        check(cudaEventElapsedTime(&milliseconds, start.event_, event_), "event");
        return milliseconds;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

/// What @p work put onto a stream, to be launched again.
class graph {
  public:
    graph() = default;
    template <class Work>
    graph(cudaStream_t on, const Work& work) {
        check(cudaStreamBeginCapture(on, cudaStreamCaptureModeThreadLocal), "capture");
        cudaGraph_t made = nullptr;
        try {
            work();
        } catch (...) { // the stream must not stay in capture
            static_cast<void>(cudaStreamEndCapture(on, &made));
            if (made != nullptr) cudaGraphDestroy(made);
            static_cast<void>(cudaGetLastError());
            throw;
        }
        check(cudaStreamEndCapture(on, &made), "capture");
        const cudaError_t code = cudaGraphInstantiate(&executable_, made, 0);
        if (code == cudaSuccess) static_cast<void>(cudaGraphGetNodes(made, nullptr, &nodes_));
        cudaGraphDestroy(made);
        check(code, "graph");
    }
    graph(graph&& other) noexcept
        : executable_(std::exchange(other.executable_, nullptr))
        , nodes_(other.nodes_) {}
    graph& operator=(graph&& other) noexcept {
        std::swap(executable_, other.executable_);
        std::swap(nodes_, other.nodes_);
        return *this;
    }
    graph(const graph&) = delete;
    graph& operator=(const graph&) = delete;
    ~graph() {
        if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    }
    explicit operator bool() const { return executable_ != nullptr; }
    std::size_t nodes() const { return nodes_; }
    void launch(cudaStream_t on) const { check(cudaGraphLaunch(executable_, on), "graph launch"); }

  private:
    cudaGraphExec_t executable_ = nullptr;
    std::size_t nodes_ = 0;
};

} // namespace engine::cuda
