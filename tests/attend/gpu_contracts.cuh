// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// What the tests of the CUDA backend's contracts share: requests, and kernels that are compiled once, in
/// gpu_contract_kernels.cu.

#include "gpu_scene.cuh"

namespace attend_test {

/// Types, G and D of a test. Blocks of 16 rows share a slot of a tile with others; those of 64 have one each.
struct small_blocks {
    using element = up::bfloat16;
    using policy = up::attention_policy<16, 64>;
    static constexpr std::int32_t G = 16;
    static constexpr std::int32_t D = 64;
};
struct large_blocks {
    using element = up::half;
    using policy = up::attention_policy<64, 128>;
    static constexpr std::int32_t G = 64;
    static constexpr std::int32_t D = 128;
};
template <class Case>
using cache_of = up::contiguous_cache<typename Case::element>;
template <class Case>
using attention_of = up::prefill_attention<typename Case::policy, up::backend::cuda>;
template <class Case>
using scene_of = scene<typename Case::element>;
template <class Case>
using output_of = output<typename Case::element>;

/// A model with four query heads of a KV head.
template <class Case>
model shape_of() {
    return {8, 2, Case::D, Case::G, 8};
}

inline std::vector<request> contract_requests() {
    std::vector<request> requests;
    requests.push_back({21, up::request_tag::prefill, 0, {533}});
    requests.push_back({22, up::request_tag::prefill, 0, {5}});
    requests.push_back({23, up::request_tag::chunk, 77, {170, 0, 229}});
    requests.push_back({24, up::request_tag::decode, 300, {1}});
    requests.push_back({25, up::request_tag::prefill, 0, {0}});
    requests.push_back({26, up::request_tag::chunk, 400, {300}});
    requests[2].spread = 4.0f;
    requests[5].gaps = true;
    return requests;
}

inline bool some_blocks(std::uint64_t seed, std::int32_t segment, std::int32_t head, int block) {
    return coin(seed, 1, static_cast<std::uint64_t>(segment * 100 + head), static_cast<std::uint64_t>(block),
                40);
}
inline bool some_rows(std::uint64_t seed, std::int32_t row) {
    return coin(seed, 2, 0, static_cast<std::uint64_t>(row), 60);
}
const auto every_block = [](std::uint64_t, std::int32_t, std::int32_t, int) { return true; };
const auto no_block = [](std::uint64_t, std::int32_t, std::int32_t, int) { return false; };

/// Attends with copies of its own of all arrays.
template <class Case>
output_of<Case> attend_there(scene_of<Case>& what, const up::cuda_device& device) {
    using T = typename Case::element;
    device_scene<T> on_device(what);
    const caches<T> k(what.keys);
    const caches<T> v(what.values);
    const device_caches<T> device_k(k);
    const device_caches<T> device_v(v);
    return attend_on_device<typename Case::policy>(what, on_device, device_k.contiguous(),
                                                   device_v.contiguous(), device);
}

/// The bits of every query of request @p index.
template <class T>
std::vector<std::vector<std::uint32_t>> of_request(const scene<T>& what, const output<T>& got,
                                                   std::size_t index) {
    std::vector<std::vector<std::uint32_t>> all;
    for (std::int32_t query = 0; query < what.num_queries(); ++query) {
        const std::int32_t row = what.row_of(query);
        if (row >= what.keys.cu_seqlens[index] && row < what.keys.cu_seqlens[index + 1]) {
            all.push_back(got.bits(query));
        }
    }
    return all;
}

} // namespace attend_test

#define ATTEND_TEST_KERNELS(external, Case)                                                                  \
    external template status attend_test::attention_of<attend_test::Case>::prepare<                          \
        attend_test::Case::element, attend_test::cache_of<attend_test::Case>>() const noexcept;              \
    external template status attend_test::attention_of<attend_test::Case>::run(                              \
        const head_rows<const attend_test::Case::element>&,                                                  \
        const key_source<attend_test::Case::element, attend_test::cache_of<attend_test::Case>>&,             \
        const key_source<attend_test::Case::element, attend_test::cache_of<attend_test::Case>>&,             \
        const attention_options&, const batch_view&, const selection&, const block_lists&,                   \
        const head_rows<attend_test::Case::element>&, float*, workspace, backend::cuda::stream)              \
        const noexcept

UNIPREFILL_BEGIN_NAMESPACE
ATTEND_TEST_KERNELS(extern, small_blocks);
ATTEND_TEST_KERNELS(extern, large_blocks);
UNIPREFILL_END_NAMESPACE
