// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// What benchmarks of a device share: memory, inputs, and times of work on a stream by events, with cold
/// caches.

#include <uniprefill/core/element.hpp>
#include <uniprefill/core/status.hpp>

#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <type_traits>
#include <vector>

namespace device_bench {

inline void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
        std::exit(1);
    }
}

inline void check(const uniprefill::status& done) {
    if (!done.ok()) {
        char text[320];
        static_cast<void>(uniprefill::format(done, text, sizeof text));
        std::fprintf(stderr, "%s\n", text);
        std::exit(1);
    }
}

/// Device memory.
class device_bytes {
  public:
    explicit device_bytes(std::size_t bytes) {
        check(cudaMalloc(&data_, bytes), "cudaMalloc");
        check(cudaMemset(data_, 0x3c, bytes), "cudaMemset"); // as bfloat16: 0.0115
    }
    device_bytes(const device_bytes&) = delete;
    device_bytes& operator=(const device_bytes&) = delete;
    ~device_bytes() { cudaFree(data_); }
    template <class T = void>
    [[nodiscard]] T* data() const {
        return static_cast<T*>(data_);
    }

  private:
    void* data_ = nullptr;
};

template <class T>
void upload(const device_bytes& to, const std::vector<T>& values) {
    check(cudaMemcpy(to.data(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice), "upload");
}

/// Device memory of elements.
template <class T>
class device_array : private device_bytes {
  public:
    explicit device_array(std::size_t count)
        : device_bytes((count + 1) * sizeof(T)) // never nothing
        , count_(count) {}
    explicit device_array(const std::vector<T>& values)
        : device_array(values.size()) {
        upload(*this, values);
    }
    [[nodiscard]] T* data() const { return device_bytes::data<T>(); }
    [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }

  private:
    std::size_t count_;
};

/// Normal numbers: a table of 2^20 of them, doubled on the device until it fills @p to, each time with its
/// halves shifted against each other.
template <class T>
void fill_normal(const device_bytes& to, std::size_t count, unsigned seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    std::vector<T> table(std::min(count, std::size_t{1} << 20));
    for (T& value : table) {
        if constexpr (std::is_same_v<T, uniprefill::float8_e4m3>) {
            value = {__nv_cvt_float_to_fp8(normal(random), __NV_SATFINITE, __NV_E4M3)};
        } else {
            value = uniprefill::from_float<T>(normal(random));
        }
    }
    upload(to, table);
    T* const all = to.data<T>();
    for (std::size_t filled = table.size(); filled < count;) {
        const std::size_t shift = std::min<std::size_t>(7919, filled - 1);
        const std::size_t first = std::min(filled - shift, count - filled);
        const std::size_t rest = std::min(shift, count - filled - first);
        check(cudaMemcpy(all + filled, all + shift, first * sizeof(T), cudaMemcpyDeviceToDevice), "fill");
        check(cudaMemcpy(all + filled + first, all, rest * sizeof(T), cudaMemcpyDeviceToDevice), "fill");
        filled += first + rest;
    }
}

/// Times work on its own stream, after flushing the second-level cache.
class device_timer {
  public:
    device_timer() {
        check(cudaStreamCreate(&stream_), "cudaStreamCreate");
        check(cudaEventCreate(&begin_), "cudaEventCreate");
        check(cudaEventCreate(&end_), "cudaEventCreate");
    }
    device_timer(const device_timer&) = delete;
    device_timer& operator=(const device_timer&) = delete;
    ~device_timer() {
        cudaEventDestroy(begin_);
        cudaEventDestroy(end_);
        cudaStreamDestroy(stream_);
    }

    /// Milliseconds of one call of @p work.
    template <class Work>
    float time(Work&& work) {
        check(cudaMemsetAsync(flushed_.data(), 0, flush_bytes, stream_), "flush");
        check(cudaEventRecord(begin_, stream_), "cudaEventRecord");
        work(stream_);
        check(cudaEventRecord(end_, stream_), "cudaEventRecord");
        check(cudaEventSynchronize(end_), "cudaEventSynchronize");
        float ms = 0;
        check(cudaEventElapsedTime(&ms, begin_, end_), "cudaEventElapsedTime");
        return ms;
    }

  private:
    static constexpr std::size_t flush_bytes = std::size_t{256} << 20;
    device_bytes flushed_{flush_bytes};
    cudaStream_t stream_ = nullptr;
    cudaEvent_t begin_ = nullptr;
    cudaEvent_t end_ = nullptr;
};

[[nodiscard]] inline double median(std::vector<float> times) {
    const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
    std::nth_element(times.begin(), middle, times.end());
    return static_cast<double>(*middle);
}

} // namespace device_bench
