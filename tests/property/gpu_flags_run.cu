// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// hygiene/fast_math.py compares this unit's PTX with and without -use_fast_math, gpu_flags_test.cu its
// results on a device.

#include "gpu_flags_run.hpp"

#include <uniprefill/importance/importance.cuh>
#include <uniprefill/select/selector.cuh>

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <type_traits>

namespace up = UNIPREFILL_WRAPPED_NAMESPACE::uniprefill;

namespace {

constexpr std::int32_t G = 16;
constexpr std::int32_t N = 32;
constexpr std::int32_t D = 64;
constexpr std::int32_t heads = 4;
constexpr std::int32_t kv_heads = 2;

void check(cudaError_t code) {
    if (code != cudaSuccess) {
        throw std::runtime_error(cudaGetErrorString(code));
    }
}
void check(const up::status& done) {
    if (!done.ok()) {
        char text[320];
        static_cast<void>(up::format(done, text, sizeof text));
        throw std::runtime_error(text);
    }
}

template <class T>
class on_device {
  public:
    explicit on_device(std::size_t count)
        : count_(count) {
        check(cudaMalloc(&data_, count * sizeof(T)));
        check(cudaMemset(data_, 0, count * sizeof(T)));
    }
    explicit on_device(const std::vector<T>& values)
        : on_device(values.size()) {
        check(cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice));
    }
    on_device(const on_device&) = delete;
    on_device& operator=(const on_device&) = delete;
    ~on_device() { cudaFree(data_); }
    T* data() const { return data_; }

  private:
    T* data_ = nullptr;
    std::size_t count_;
};

/// Appends numbers of the device to @p all.
template <class T>
void append(std::vector<std::int64_t>& all, const T* from, std::int64_t count) {
    std::vector<T> values(static_cast<std::size_t>(count));
    check(cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
    all.insert(all.end(), values.begin(), values.end());
}

/// Numbers that look random, roughly normal, from a counter.
class numbers {
  public:
    float next() {
        std::uint64_t z = ++counter_ * 0x9e3779b97f4a7c15u;
        z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
        z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
        std::int32_t sum = -1020;
        for (int byte = 0; byte < 8; ++byte) {
            sum += static_cast<std::int32_t>(z >> (8 * byte) & 255u);
        }
        return static_cast<float>(sum) / 209.0f;
    }

  private:
    std::uint64_t counter_ = 0;
};

template <class T>
T element(float value) {
    if constexpr (std::is_same_v<T, up::float8_e4m3>) {
        // Multiples of 1/64 up to 1/4, by exponent: enough for keys that differ.
        const auto size = static_cast<std::uint8_t>(value < 0 ? -value * 16 : value * 16);
        return {static_cast<std::uint8_t>((value < 0 ? 0x80 : 0) | (size & 0x3f))};
    } else {
        return up::from_float<T>(value);
    }
}

/// Four requests: ordinary ones, one whose scores are far apart, and one of subnormal numbers, which
/// -use_fast_math would flush.
struct requests {
    std::vector<std::int32_t> cu_seqlens{0, 700, 1033, 1250, 1251};
    std::vector<up::request_tag> tags{up::request_tag::prefill, up::request_tag::prefill,
                                      up::request_tag::prefill, up::request_tag::decode};
    std::vector<up::request_options> options{{1, 20, 40, 0}, {1, 1, 1, 0}, {1, 7, 9, 0}, {1, 1, 1, 0}};
    std::vector<up::selection_rule> rules{
        up::selection_rule::top_p(0.9), up::selection_rule::fixed_ratio(0.3),
        up::selection_rule::max_fraction(0.2), up::selection_rule::top_p(0.5)};
    static constexpr float spread[] = {2.0f, 40.0f, 1e-38f, 1.0f};
};

template <class T>
std::vector<T> rows_of(const requests& all, std::int32_t row_heads, bool spreads, numbers& from) {
    std::vector<T> made;
    for (std::size_t r = 0; r + 1 < all.cu_seqlens.size(); ++r) {
        for (std::int64_t i = std::int64_t{all.cu_seqlens[r]} * row_heads * D;
             i < std::int64_t{all.cu_seqlens[r + 1]} * row_heads * D; ++i) {
            made.push_back(element<T>(from.next() * (spreads ? requests::spread[r] : 1.0f)));
        }
    }
    return made;
}

template <class Q, class T, class Reduction>
std::vector<std::int64_t> run_case(up::cuda_body body, bool softcap_and_sinks) {
    using policy = up::estimator_policy<G, N, Reduction, D>;
    up::cuda_device device;
    check(up::cuda_device::current(device));
    device.body = body;
    if (body == up::cuda_body::sm90 && device.compute_capability != 90) {
        return {};
    }
    const requests all;
    up::limits bounds;
    bounds.max_requests = bounds.max_segments = static_cast<std::int32_t>(all.tags.size());
    bounds.max_rows = all.cu_seqlens.back();
    bounds.num_heads = heads;
    bounds.num_kv_heads = kv_heads;
    bounds.head_dim = D;
    bounds.block_rows = G;
    bounds.num_observations = N;

    numbers from;
    const on_device<Q> queries(rows_of<Q>(all, heads, true, from));
    const on_device<T> keys(rows_of<T>(all, kv_heads, false, from));
    std::vector<std::int32_t> ascending;
    for (std::size_t r = 0; r < all.tags.size(); ++r) {
        for (std::int32_t row = all.cu_seqlens[r]; row < all.cu_seqlens[r + 1]; ++row) {
            ascending.push_back(row - all.cu_seqlens[r]);
        }
    }
    const on_device<std::int32_t> positions(ascending), cu_seqlens(all.cu_seqlens);
    const on_device<up::request_tag> tags(all.tags);
    const on_device<up::request_options> options(all.options);
    const on_device<up::selection_rule> rules(all.rules);
    const on_device<float> sinks(std::vector<float>{0.5f, -3.0f, 2.0f, 0.0f}), scales({0.75f, 1.5f});

    up::batch_view batch;
    batch.space = up::memory_space::device;
    batch.num_requests = batch.num_segments = bounds.max_requests;
    batch.num_rows = bounds.max_rows;
    batch.tags = tags.data();
    batch.cu_seqlens = cu_seqlens.data();
    batch.positions = positions.data();
    batch.options = options.data();
    up::attention_params params;
    if (softcap_and_sinks) {
        params.softcap = 5.0f;
        params.sink_logits = sinks.data();
    }
    if constexpr (sizeof(T) == 1) {
        params.key_scales = scales.data();
    }

    const std::int64_t buffer_size = up::mass_view::rank_buffer_size(bounds);
    const std::int64_t head_size = bounds.num_heads * bounds.max_blocks();
    const on_device<std::int64_t> buffer(static_cast<std::size_t>(buffer_size));
    const on_device<std::int64_t> by_head(static_cast<std::size_t>(2 * head_size));
    const auto masses = up::mass_view::over(buffer.data(), bounds, up::memory_space::device);
    const up::importance_estimator<policy, up::backend::cuda> estimator(bounds, device);
    const on_device<std::byte> scratch(estimator.workspace_bytes());
    check(estimator.template prepare<Q, T>());
    check(estimator.run(
        up::head_rows<const Q>{queries.data(), heads * D, D, batch.num_rows, heads, D},
        up::key_source<T>{up::head_rows<const T>{keys.data(), kv_heads * D, D, batch.num_rows, kv_heads, D}},
        params, batch, masses,
        up::head_mass_view{by_head.data(), by_head.data() + head_size, bounds.max_blocks(), heads},
        up::workspace(scratch.data(), estimator.workspace_bytes()), nullptr));

    up::workspace counting;
    static_cast<void>(up::selection::carve(counting, bounds, up::memory_space::device));
    const on_device<std::byte> arrays(counting.bytes_used());
    up::workspace pieces(arrays.data(), counting.bytes_used());
    up::selection kept = up::selection::carve(pieces, bounds, up::memory_space::device);
    const up::block_selector<up::selection_rule, up::backend::cuda> selector(bounds, device);
    const on_device<std::byte> select_scratch(selector.workspace_bytes());
    check(selector.run(masses, batch, rules.data(), kept,
                       up::workspace(select_scratch.data(), selector.workspace_bytes()), nullptr));
    check(cudaDeviceSynchronize());

    std::vector<std::int64_t> made;
    append(made, buffer.data(), buffer_size);
    append(made, by_head.data(), 2 * head_size);
    append(made, kept.keep_bits, (bounds.max_blocks() + 31) / 32);
    append(made, kept.kept_to_old, bounds.max_rows);
    append(made, kept.old_to_kept, bounds.max_rows);
    append(made, kept.cu_seqlens, bounds.max_requests + 1);
    append(made, kept.cu_segments, bounds.max_segments + 1);
    std::vector<up::segment_outcome> outcomes(static_cast<std::size_t>(bounds.max_segments));
    check(cudaMemcpy(outcomes.data(), kept.outcomes, outcomes.size() * sizeof outcomes[0],
                     cudaMemcpyDeviceToHost));
    for (const up::segment_outcome& one : outcomes) {
        made.insert(made.end(), {one.total_mass, one.dropped_mass, one.rows, one.kept, one.cut_block,
                                 one.cut_rows, static_cast<std::int64_t>(one.reason)});
    }
    return made;
}

struct a_case {
    const char* name;
    std::vector<std::int64_t> (*run)(up::cuda_body body, bool softcap_and_sinks);
    up::cuda_body body;
    bool softcap_and_sinks;
};
constexpr up::cuda_body portable = up::cuda_body::portable;
constexpr up::cuda_body sm90 = up::cuda_body::sm90;
constexpr a_case cases[] = {
    {"float, portable", run_case<float, float, up::head_sum>, portable, false},
    {"float, portable, soft-cap and sinks", run_case<float, float, up::head_sum>, portable, true},
    {"bfloat16, portable", run_case<up::bfloat16, up::bfloat16, up::head_sum>, portable, false},
    {"bfloat16, wgmma", run_case<up::bfloat16, up::bfloat16, up::head_sum>, sm90, false},
    {"bfloat16, portable, soft-cap and sinks", run_case<up::bfloat16, up::bfloat16, up::head_sum>, portable,
     true},
    {"bfloat16, wgmma, soft-cap and sinks", run_case<up::bfloat16, up::bfloat16, up::head_sum>, sm90, true},
    {"FP8 keys, portable, heads by maximum", run_case<up::bfloat16, up::float8_e4m3, up::head_max>, portable,
     false},
    {"FP8 keys, wgmma, heads by maximum", run_case<up::bfloat16, up::float8_e4m3, up::head_max>, sm90, false},
};
constexpr int num_cases = static_cast<int>(std::extent_v<decltype(cases)>);

} // namespace

const char* UNIPREFILL_WRAPPED_NAMESPACE::name_of(int which) {
    return which < num_cases ? cases[which].name : "";
}

std::vector<std::int64_t> UNIPREFILL_WRAPPED_NAMESPACE::run(int which) {
    const a_case& one = cases[which];
    return one.run(one.body, one.softcap_and_sinks);
}
