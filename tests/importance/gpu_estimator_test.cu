// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The CUDA estimator's masses against the host's.
//
// Which combinations are compiled. Every value occurs; so does every pair of a value of N with one of D, G,
// element and page model, and every pair of D, element and page model that a line below has. Each line runs
// with both reductions, with a soft-cap, with sink logits and with a scale of its own, and on each body that
// has its types: those marked * on both, the others on the portable one alone.
//
//   D    G    queries and rows, cache      page model     N
//   64   16   float                        page table     16 64 256
//   64   256  bfloat16 *                   none           32 128 512
//   80   64   half *                       CSR            16 64 256
//   80   32   float                        token slots    32 128 512
//   96   128  bfloat16, e4m3, e4m3 *       contiguous     16 64 256
//   96   16   bfloat16 *                   page pointers  32 128 512
//   128  64   bfloat16 *                   token slots    16 64 256
//   128  32   half, e4m3, e4m3 *           page table     32 128 512
//   192  256  bfloat16, e4m3 cache         page pointers  16 64 256
//   192  64   half *                       contiguous     32 128 512
//   256  32   bfloat16 *                   none           16 64 256
//   256  128  half, float cache            CSR            32 128 512
//
// Scaled down (tests/gpu.sh does so under compute-sanitizer), the last N of a line is left out but for D 64
// and 192, whose stages of keys are the most and the fewest: it adds no kernel, only more query rows.

#include "gpu_step.cuh"
#include "support/scale.hpp"

#include <iostream>
#include <string>

namespace up = uniprefill;
using namespace importance_test;

namespace {

std::vector<request> some_requests(std::int32_t G, std::int32_t n, bool cached) {
    const std::int32_t c = cached ? 1 : 0;
    std::vector<request> requests;
    requests.push_back({11, up::request_tag::prefill, 0, {533 + G}, {1, 100, 128, 0}});
    requests.push_back({12, up::request_tag::prefill, 0, {5}, {1, 1, 1, 0}});
    requests.push_back({13, up::request_tag::prefill, 0, {170, 0, 229, 77}, {1, 64, 30, 0}});
    requests.push_back({14, up::request_tag::decode, 300 * c, {1}});
    requests.push_back({15, up::request_tag::chunk, 275 * c, {264, 190}, {1, 4, 8, 0}});
    requests.push_back({16, up::request_tag::prefill, 0, {n + 3 * G + 1}, {1, 17, 9, 0}});
    requests.push_back({17, up::request_tag::chunk, 1000 * c, {n < 300 ? n : 300}, {1, 0, 0, 0}});
    requests[0].forced = {{130, 141}, {160, 160}, {163, 330}};
    requests[2].observed = {{10, 240}, {250, 253}, {460, 9999}};
    requests[5].gaps = true;
    requests[5].spread = 3.0f;
    return requests;
}

template <class T>
void round_to(std::vector<float>& values, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
        values[i] = value_of(element_of<T>(values[i]));
    }
}

/// Each KV head's keys times its scale.
void scale_keys(std::vector<float>& keys, const model& shape, const std::vector<float>& scales) {
    for (std::size_t i = 0; i < keys.size(); ++i) {
        keys[i] *= scales[i / static_cast<std::size_t>(shape.head_dim) % scales.size()];
    }
}

/// What the wgmma body makes of queries where keys are FP8.
void round_rows_to_e4m3(std::vector<float>& queries, std::int32_t head_dim) {
    const auto d = static_cast<std::size_t>(head_dim);
    for (std::size_t row = 0; row < queries.size(); row += d) {
        float largest = 0;
        for (std::size_t i = row; i < row + d; ++i) {
            largest = std::max(largest, std::fabs(queries[i]));
        }
        for (std::size_t i = row; i < row + d; ++i) {
            queries[i] = value_of(element_of<up::float8_e4m3>(queries[i] * (448.0f * (1.0f / largest)))) *
                         (largest * (1.0f / 448.0f));
        }
    }
}

/// @tparam Q element of queries @tparam T of rows' keys @tparam E of cached keys @tparam K how often so far
template <class Q, class T, class E, std::int32_t D, std::int32_t G, class View, std::int32_t N, int K>
void check_masses() {
    using reduction = std::conditional_t<K % 2 == 0, up::head_sum, up::head_max>;
    using policy = up::estimator_policy<G, N, reduction, D>;
    using reference = up::importance_estimator<up::estimator_policy<up::dynamic, up::dynamic, reduction>>;
    constexpr bool has_cache = !std::is_same_v<View, none>;
    constexpr bool rows_are_float8 = std::is_same_v<T, up::float8_e4m3>;
    constexpr bool cached_are_float8 = std::is_same_v<E, up::float8_e4m3>;
    constexpr std::int32_t heads[][2] = {{4, 2}, {3, 1}, {8, 4}};
    if (K == 2 && D != 64 && D != 192 && uniprefill_test::is_scaled_down()) {
        return;
    }
    const model shape{heads[K][0], heads[K][1], D, G, N};

    step<float> what(shape, some_requests(G, N, has_cache));
    round_to<Q>(what.queries, what.queries.size());
    round_to<T>(what.keys, what.keys.size());
    for (std::size_t r = 0; r < what.data.size(); ++r) {
        std::vector<float>& keys = what.data[r].keys;
        const auto count = static_cast<std::size_t>(what.cached_lens[r] * shape.kv_heads * D);
        round_to<E>(keys, count);
        round_to<Q>(keys, count); // the kernel multiplies in the queries' type
    }
    device_step<Q, T> on_device(what);
    const caches<E> stored(what);
    const device_caches<E> device_cached(stored);
    if (!has_cache) {
        on_device.batch().cached_lens = nullptr;
    }

    const std::vector<float> scales = {0.75f, 1.25f, 0.375f, 1.0f};
    const std::vector<float> used(scales.begin(), scales.begin() + shape.kv_heads);
    const device_array<float> device_scales(used);
    if (rows_are_float8) {
        scale_keys(what.keys, shape, used);
    }
    if (cached_are_float8) {
        for (request_data<float>& one : what.data) {
            scale_keys(one.keys, shape, used);
        }
    }
    const caches<float> cached(what);
    const std::vector<float> sinks = {0.5f, -3.0f, 4.0f, 0.0f, 2.0f, 1.0f, -1.0f, 7.0f};
    const device_array<float> device_sinks(sinks);
    up::attention_params params;
    params.softcap = K == 1 ? 6.0f : 0.0f;
    params.scale = K == 2 ? 0.15f : 0.0f;
    up::attention_params device_params = params;
    device_params.key_scales = device_scales.data();
    if (K == 2) {
        params.sink_logits = sinks.data();
        device_params.sink_logits = device_sinks.data();
    }

    constexpr bool has_sm90 =
        up::detail::score_bodies<Q, T, decltype(View::view(device_cached)), D, G>::has_sm90;
    const up::limits bounds = what.tight_limits();
    for (const up::cuda_device& device : each_body<has_sm90>()) {
        const bool is_sm90 = device.body == up::cuda_body::sm90;
        // Hopper's tensor cores keep fewer bits of sums of FP8 products.
        const double limit = is_sm90 && rows_are_float8 ? 1000 : 1;
        if (is_sm90 && rows_are_float8) {
            round_rows_to_e4m3(what.queries, D);
        }
        masses host = estimate<reference>(what, View::view(cached), params, bounds);
        masses came =
            estimate_on_device<policy>(on_device, View::view(device_cached), device_params, bounds, device);
        const double worst = worst_difference(came, host, what.batch());
        std::cout << "D " << D << " G " << G << " N " << N << (is_sm90 ? " wgmma" : " portable")
                  << ": worst difference " << worst << " of " << limit << std::endl;
        CHECK(worst < limit);
    }
}

template <class Q, class T, class E, std::int32_t D, std::int32_t G, class View>
void check_small_n() {
    check_masses<Q, T, E, D, G, View, 16, 0>();
    check_masses<Q, T, E, D, G, View, 64, 1>();
    check_masses<Q, T, E, D, G, View, 256, 2>();
}
template <class Q, class T, class E, std::int32_t D, std::int32_t G, class View>
void check_large_n() {
    check_masses<Q, T, E, D, G, View, 32, 0>();
    check_masses<Q, T, E, D, G, View, 128, 1>();
    check_masses<Q, T, E, D, G, View, 512, 2>();
}

using f32 = float;
using f16 = up::half;
using bf16 = up::bfloat16;
using f8 = up::float8_e4m3;

} // namespace

TEST_CASE("masses of 16-bit keys agree with the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_large_n<bf16, bf16, bf16, 64, 256, none>();
    check_small_n<f16, f16, f16, 80, 64, csr_pages>();
    check_large_n<bf16, bf16, bf16, 96, 16, page_pointers>();
    check_small_n<bf16, bf16, bf16, 128, 64, token_slots>();
    check_large_n<f16, f16, f16, 192, 64, contiguous>();
    check_small_n<bf16, bf16, bf16, 256, 32, none>();
}

TEST_CASE("masses of float keys agree with the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_small_n<f32, f32, f32, 64, 16, page_table>();
    check_large_n<f32, f32, f32, 80, 32, token_slots>();
}

TEST_CASE("masses of FP8 keys agree with the host's of the same values", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_small_n<bf16, f8, f8, 96, 128, contiguous>();
    check_large_n<f16, f8, f8, 128, 32, page_table>();
}

TEST_CASE("a cache of another element type agrees with the host's", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_small_n<bf16, bf16, f8, 192, 256, page_pointers>();
    check_large_n<f16, f16, f32, 256, 128, csr_pages>();
}
