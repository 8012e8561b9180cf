// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What FP8 keys change in what is kept: the same requests with bfloat16 keys, and with these as an FP8 cache
// holds them (e4m3, one scale for each KV head: its largest element is 448). Nothing is timed.
//
// 32 query heads, 8 KV heads of 128, n 128, G 64, sinks and tail of 128 forced rows; requests of 2K to 32K
// keys, their lengths log-uniform. Shares of blocks are of all blocks of all requests; shares of mass are of
// a request's free mass, as bfloat16 keys give it, mean and maximum over requests.

#include "../support/device_timer.cuh"

#include <uniprefill/importance/importance.cuh>
#include <uniprefill/select/selector.hpp>

#include <benchmark/benchmark.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace up = uniprefill;
using namespace device_bench;

namespace {

using bf16 = up::bfloat16;
using f8 = up::float8_e4m3;
constexpr std::int32_t heads = 32, kv_heads = 8, D = 128, N = 128, G = 64;
constexpr std::int32_t num_requests = 200, shortest = 2048, longest = 32768;
using policy = up::estimator_policy<G, N, up::head_sum, D>;

enum class inputs {
    normal,           ///< as in bench/importance/cuda_estimator.cu: softmax neither flat nor one-hot
    heavy_keys,       ///< one in 64 runs of eight keys lies in the queries' direction: 5.5 nats more
    outlier_channels, ///< uneven runs, scores with a deviation of 3 nats, and four channels 8 deviations off
};
constexpr const char* name_of(inputs kind) {
    return kind == inputs::normal ? "normal" : kind == inputs::heavy_keys ? "heavy_keys" : "outlier_channels";
}

__device__ std::uint64_t hash(std::uint64_t seed, std::uint64_t index) {
    std::uint64_t z = (seed << 40) + (index + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}
/// A normal number that follows from a seed and an index.
__device__ float normal(std::uint64_t seed, std::uint64_t index) {
    const std::uint64_t bits = hash(seed, index);
    const float radius = sqrtf(-2.0f * logf((static_cast<float>(bits >> 40) + 0.5f) * 0x1p-24f));
    return radius * cospif(static_cast<float>(bits & 0xffffffu) * 0x1p-23f);
}
/// The direction that the queries of a KV head have in common.
__device__ float direction(std::int32_t kv_head, std::int32_t channel) {
    return 0.7f * normal(1, static_cast<std::uint64_t>(kv_head * D + channel));
}
__device__ bool is_outlier(std::int32_t channel) {
    return channel % 32 == 5;
}

/// The query rows that observe.
__global__ void fill_queries(bf16* queries, std::int32_t rows, inputs kind, std::uint64_t seed) {
    const std::int32_t count = N * heads * D;
    for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
         i += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        const std::int32_t channel = i % D;
        float value = normal(2 * seed, static_cast<std::uint64_t>(i));
        if (kind == inputs::outlier_channels && !is_outlier(channel)) {
            value *= 2.5f;
        }
        if (kind != inputs::normal) {
            value += direction(i / D % heads / (heads / kv_heads), channel);
        }
        queries[std::int64_t{rows - N} * heads * D + i] = up::from_float<bf16>(value);
    }
}
__global__ void fill_keys(bf16* keys, std::int32_t rows, inputs kind, std::uint64_t seed) {
    const std::int32_t count = rows * kv_heads * D;
    for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x); i < count;
         i += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        const std::int32_t channel = i % D;
        const std::int32_t head = i / D % kv_heads;
        const auto row = static_cast<std::uint64_t>(i / (kv_heads * D));
        float value = normal(2 * seed + 1, static_cast<std::uint64_t>(i));
        if (kind == inputs::heavy_keys && hash(3 * seed, row / 8) % 64 == 0) {
            value += direction(head, channel);
        } else if (kind == inputs::outlier_channels) {
            value += 0.35f * normal(3 * seed, row / 32) * direction(head, channel);
            if (is_outlier(channel)) {
                value += head % 2 == 0 ? 8.0f : -8.0f;
            }
        }
        keys[i] = up::from_float<bf16>(value);
    }
}
/// The largest element of each KV head, as the bits of a float that isn't negative.
__global__ void find_largest(const bf16* keys, std::int32_t rows, int* largest) {
    int mine[kv_heads] = {};
    for (std::int32_t row = static_cast<std::int32_t>(blockIdx.x); row < rows;
         row += static_cast<std::int32_t>(gridDim.x)) {
        for (std::int32_t head = 0; head < kv_heads; ++head) {
            const bf16 key = keys[(std::int64_t{row} * kv_heads + head) * D + threadIdx.x];
            mine[head] = max(mine[head], __float_as_int(fabsf(up::to_float(key))));
        }
    }
    for (std::int32_t head = 0; head < kv_heads; ++head) {
        atomicMax(&largest[head], mine[head]);
    }
}
__global__ void quantise(const bf16* keys, std::int32_t rows, const int* largest, f8* quantised,
                         float* scales) {
    for (std::int32_t i = static_cast<std::int32_t>(blockIdx.x * blockDim.x + threadIdx.x);
         i < rows * kv_heads * D; i += static_cast<std::int32_t>(gridDim.x * blockDim.x)) {
        const std::int32_t head = i / D % kv_heads;
        const float scale = __int_as_float(largest[head]) / 448.0f;
        quantised[i] = {__nv_cvt_float_to_fp8(up::to_float(keys[i]) / scale, __NV_SATFINITE, __NV_E4M3)};
        if (i < kv_heads * D) {
            scales[head] = scale;
        }
    }
}

/// Arrays for the longest request, and the estimators.
class laboratory {
  public:
    laboratory() {
        bounds_.max_rows = longest;
        bounds_.num_heads = heads;
        bounds_.num_kv_heads = kv_heads;
        bounds_.head_dim = D;
        bounds_.block_rows = G;
        bounds_.num_observations = N;
        std::iota(ascending_.begin(), ascending_.end(), 0);
        upload(positions_, ascending_);
        upload(tags_, tag_);
        check(up::cuda_device::current(device_));
    }

    /// Masses of a request, with bfloat16 keys and with FP8 keys on @p body.
    void estimate(std::int32_t rows, inputs kind, std::uint64_t seed, up::cuda_body body,
                  std::vector<std::int64_t>& exact, std::vector<std::int64_t>& rounded) {
        rows_ = rows;
        offsets_ = {0, rows};
        upload(cu_seqlens_, offsets_);
        bf16* const queries = queries_.data<bf16>();
        bf16* const keys = keys_.data<bf16>();
        int* const largest = largest_.data<int>();
        check(cudaMemset(largest, 0, kv_heads * sizeof(int)), "cudaMemset");
        fill_queries<<<512, 256>>>(queries, rows, kind, seed);
        fill_keys<<<1024, 256>>>(keys, rows, kind, seed);
        find_largest<<<256, D>>>(keys, rows, largest);
        quantise<<<1024, 256>>>(keys, rows, largest, quantised_.data<f8>(), scales_.data<float>());
        check(cudaGetLastError(), "inputs");
        exact = masses_of(keys, up::cuda_body::automatic);
        rounded = masses_of(quantised_.data<f8>(), body);
    }

    /// Which blocks of the last request stay.
    [[nodiscard]] std::vector<bool> keep(std::vector<std::int64_t>& masses, const up::selection_rule& rule) {
        up::batch_view batch;
        batch.num_requests = batch.num_segments = 1;
        batch.num_rows = rows_;
        batch.tags = tag_.data();
        batch.cu_seqlens = offsets_.data();
        batch.positions = ascending_.data();
        up::workspace counting;
        static_cast<void>(up::selection::carve(counting, bounds_, up::memory_space::host));
        const up::block_selector<> selector(bounds_);
        std::vector<std::max_align_t> memory[2];
        const auto space = [](std::vector<std::max_align_t>& of, std::size_t bytes) {
            of.resize((bytes + up::workspace::alignment) / sizeof(std::max_align_t) + 1);
            void* start = of.data();
            std::size_t size = of.size() * sizeof(std::max_align_t);
            return up::workspace(std::align(up::workspace::alignment, bytes, start, size), bytes);
        };
        up::workspace pieces = space(memory[0], counting.bytes_used());
        up::selection out = up::selection::carve(pieces, bounds_, up::memory_space::host);
        check(selector.run(up::mass_view::over(masses.data(), bounds_, up::memory_space::host), batch, &rule,
                           out, space(memory[1], selector.workspace_bytes()), {}));
        std::vector<bool> kept;
        for (std::int32_t block = 0; block < num_blocks(); ++block) {
            kept.push_back((out.keep_bits[block / 32] >> (block % 32) & 1u) != 0);
        }
        return kept;
    }
    [[nodiscard]] std::int32_t num_blocks() const { return up::num_blocks(rows_, G); }

  private:
    template <class T>
    std::vector<std::int64_t> masses_of(const T* keys, up::cuda_body body) {
        up::cuda_device device = device_;
        device.body = body;
        const up::importance_estimator<policy, up::backend::cuda> estimator(bounds_, device);
        check(estimator.template prepare<bf16, T>());
        const std::size_t count = static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds_));
        if (memory_ == nullptr) {
            memory_ = std::make_unique<device_bytes>(estimator.workspace_bytes());
            buffer_ = std::make_unique<device_bytes>(count * sizeof(std::int64_t));
        }
        up::batch_view batch;
        batch.space = up::memory_space::device;
        batch.num_requests = batch.num_segments = 1;
        batch.num_rows = rows_;
        batch.tags = tags_.data<up::request_tag>();
        batch.cu_seqlens = cu_seqlens_.data<std::int32_t>();
        batch.positions = positions_.data<std::int32_t>();
        up::attention_params params;
        params.key_scales = scales_.data<float>(); // bfloat16 keys have none
        const up::key_source<T> source{{keys, kv_heads * D, D, rows_, kv_heads, D}};
        check(estimator.run(
            up::head_rows<const bf16>{queries_.data<const bf16>(), heads * D, D, rows_, heads, D}, source,
            params, batch,
            up::mass_view::over(buffer_->data<std::int64_t>(), bounds_, up::memory_space::device), {},
            up::workspace(memory_->data(), estimator.workspace_bytes()), nullptr));
        std::vector<std::int64_t> masses(count);
        check(
            cudaMemcpy(masses.data(), buffer_->data(), count * sizeof(std::int64_t), cudaMemcpyDeviceToHost),
            "masses");
        return masses;
    }

    up::limits bounds_;
    up::cuda_device device_;
    std::int32_t rows_ = 0;
    std::vector<std::int32_t> ascending_ = std::vector<std::int32_t>(longest), offsets_;
    std::vector<up::request_tag> tag_{up::request_tag::prefill};
    device_bytes queries_{std::size_t{longest} * heads * D * sizeof(bf16)};
    device_bytes keys_{std::size_t{longest} * kv_heads * D * sizeof(bf16)};
    device_bytes quantised_{std::size_t{longest} * kv_heads * D};
    device_bytes scales_{kv_heads * sizeof(float)}, largest_{kv_heads * sizeof(int)};
    device_bytes positions_{longest * sizeof(std::int32_t)}, tags_{16}, cu_seqlens_{2 * sizeof(std::int32_t)};
    std::unique_ptr<device_bytes> memory_, buffer_;
};

/// A sum and a maximum over requests.
struct over_requests {
    double sum = 0, most = 0;
    void add(double value) {
        sum += value;
        most = std::max(most, value);
    }
    void tell(benchmark::State& state, const std::string& name) const {
        state.counters[name + "_mean"] = sum / num_requests;
        state.counters[name + "_max"] = most;
    }
};

/// What one rule keeps of all requests by either masses.
struct keep_set_difference {
    std::int64_t blocks = 0, kept_by_bf16 = 0, kept_by_fp8 = 0, by_bf16_only = 0, by_fp8_only = 0,
                 requests = 0;
    over_requests mass_of_bf16_only, dropped_by_bf16, dropped_by_fp8;

    /// @param masses free ones, with bfloat16 keys
    void add(const std::vector<bool>& exact, const std::vector<bool>& rounded,
             const std::vector<std::int64_t>& masses) {
        double total = 0, only = 0, dropped = 0, dropped_rounded = 0;
        for (std::size_t block = 0; block < exact.size(); ++block) {
            const auto mass = static_cast<double>(masses[block]);
            total += mass;
            only += exact[block] && !rounded[block] ? mass : 0;
            dropped += exact[block] ? 0 : mass;
            dropped_rounded += rounded[block] ? 0 : mass;
            kept_by_bf16 += exact[block] ? 1 : 0;
            kept_by_fp8 += rounded[block] ? 1 : 0;
            by_bf16_only += exact[block] && !rounded[block] ? 1 : 0;
            by_fp8_only += rounded[block] && !exact[block] ? 1 : 0;
        }
        blocks += static_cast<std::int64_t>(exact.size());
        requests += exact != rounded ? 1 : 0;
        mass_of_bf16_only.add(only / total);
        dropped_by_bf16.add(dropped / total);
        dropped_by_fp8.add(dropped_rounded / total);
    }
    void tell(benchmark::State& state) const {
        const auto share = [&](std::int64_t count) {
            return static_cast<double>(count) / static_cast<double>(blocks);
        };
        state.counters["requests"] = num_requests;
        state.counters["requests_different"] = static_cast<double>(requests);
        state.counters["blocks"] = static_cast<double>(blocks);
        state.counters["kept_by_bf16"] = share(kept_by_bf16);
        state.counters["kept_by_fp8"] = share(kept_by_fp8);
        state.counters["kept_by_bf16_only"] = share(by_bf16_only);
        state.counters["kept_by_fp8_only"] = share(by_fp8_only);
        mass_of_bf16_only.tell(state, "mass_of_bf16_only");
        dropped_by_bf16.tell(state, "mass_dropped_by_bf16");
        dropped_by_fp8.tell(state, "mass_dropped_by_fp8");
    }
};

constexpr const char* rule_names[] = {"top_p_0.9", "top_p_0.95", "top_p_0.99", "budget_0.4"};
constexpr std::size_t num_rules = 4;
up::selection_rule rule_of(std::size_t which, std::int32_t rows) {
    constexpr double shares[] = {0.9, 0.95, 0.99};
    return which < 3 ? up::selection_rule::top_p(shares[which])
                     : up::selection_rule::fixed_budget(rows * 2 / 5 / G * G);
}

/// All rules over the same requests.
struct comparison {
    keep_set_difference by_rule[num_rules];
    over_requests mass_moved; ///< sum of differences of block masses, of the total

    comparison(inputs kind, up::cuda_body body) {
        laboratory here;
        std::mt19937_64 random(11);
        std::vector<std::int64_t> exact, rounded;
        for (std::int32_t request = 0; request < num_requests; ++request) {
            const double place = std::ldexp(static_cast<double>(random() >> 11), -53);
            const auto rows = static_cast<std::int32_t>(shortest * std::pow(longest / shortest, place));
            here.estimate(rows, kind, static_cast<std::uint64_t>(100 + request), body, exact, rounded);
            for (std::size_t which = 0; which < num_rules; ++which) {
                const up::selection_rule rule = rule_of(which, rows);
                by_rule[which].add(here.keep(exact, rule), here.keep(rounded, rule), exact);
            }
            double total = 0, moved = 0;
            for (std::int32_t block = 0; block < here.num_blocks(); ++block) {
                const auto b = static_cast<std::size_t>(block);
                total += static_cast<double>(exact[b]);
                moved += std::abs(static_cast<double>(exact[b] - rounded[b]));
            }
            mass_moved.add(moved / total);
        }
    }
};

/// One rule's line; all rules of the same inputs and body share one comparison.
void compare(benchmark::State& state, inputs kind, up::cuda_body body, std::size_t which,
             std::shared_ptr<std::unique_ptr<comparison>> shared) {
    for (auto _ : state) {
        if (*shared == nullptr) {
            *shared = std::make_unique<comparison>(kind, body);
        }
    }
    (*shared)->by_rule[which].tell(state);
    (*shared)->mass_moved.tell(state, "mass_moved");
}

const bool registered = [] {
    for (const inputs kind : {inputs::normal, inputs::heavy_keys, inputs::outlier_channels}) {
        for (const up::cuda_body body : {up::cuda_body::automatic, up::cuda_body::portable}) {
            const auto shared = std::make_shared<std::unique_ptr<comparison>>();
            for (std::size_t which = 0; which < num_rules; ++which) {
                const std::string name = std::string(name_of(kind)) +
                                         (body == up::cuda_body::portable ? "/portable/" : "/automatic/") +
                                         rule_names[which];
                benchmark::RegisterBenchmark(name.c_str(), compare, kind, body, which, shared)->Iterations(1);
            }
        }
    }
    return true;
}();

} // namespace
