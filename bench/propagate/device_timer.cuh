// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Times of work on a stream by events, with cold caches, and the copies that they are measured against.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

namespace propagate_bench {

inline void check(cudaError_t code, const char* what) {
    if (code != cudaSuccess) {
        std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(code));
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

} // namespace propagate_bench
