// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// What the tests of the estimator's contracts share: requests, and kernels that are compiled once, in
/// gpu_contract_kernels.cu.

#include "gpu_step.cuh"

namespace importance_test {

constexpr std::int32_t G = 16;
constexpr std::int32_t N = 32;
constexpr std::int32_t D = 64;
using bf16 = up::bfloat16;
using policy = up::estimator_policy<G, N, up::head_sum, D>;
using cache_view = up::contiguous_cache<bf16>;
using cuda_estimator = up::importance_estimator<policy, up::backend::cuda>;

constexpr bool has_sm90 = up::detail::score_bodies<bf16, bf16, cache_view, D, G>::has_sm90;

inline const char* name_of(const up::cuda_device& device) {
    return device.body == up::cuda_body::sm90 ? "wgmma" : "portable";
}

inline std::vector<request> some_requests() {
    std::vector<request> requests;
    requests.push_back({21, up::request_tag::prefill, 0, {533}, {1, 100, 128, 0}});
    requests.push_back({22, up::request_tag::prefill, 0, {5}, {1, 1, 1, 0}});
    requests.push_back({23, up::request_tag::chunk, 77, {170, 0, 229}, {1, 64, 30, 0}});
    requests.push_back({24, up::request_tag::decode, 300, {1}});
    requests.push_back({25, up::request_tag::prefill, 0, {0}, {1, 4, 8, 0}});
    requests.push_back({26, up::request_tag::chunk, 1000, {300}, {1, 0, 0, 0}});
    requests[0].forced = {{130, 141}, {163, 330}};
    requests[2].observed = {{90, 200}};
    requests[5].gaps = true;
    return requests;
}

/// A step and its cache in both memories.
struct both {
    step<bf16> host;
    caches<bf16> cached;
    device_step<bf16> device;
    device_caches<bf16> device_cached;
    up::limits bounds;

    both(const model& shape, const std::vector<request>& requests)
        : host(shape, requests)
        , cached(host)
        , device(host)
        , device_cached(cached)
        , bounds(host.tight_limits()) {}
    masses estimate_here(const up::cuda_device& on) {
        return estimate_on_device<policy>(device, device_cached.contiguous(), {}, bounds, on);
    }
};

/// Takes back what prepare() has allowed, on the current device. @return whether a run needs it.
bool forget_shared_memory(const up::cuda_device& device);

} // namespace importance_test

UNIPREFILL_BEGIN_NAMESPACE

extern template status
importance_test::cuda_estimator::prepare<bfloat16, bfloat16, contiguous_cache<bfloat16>>() const noexcept;
extern template status importance_test::cuda_estimator::run<bfloat16, bfloat16, contiguous_cache<bfloat16>>(
    const head_rows<const bfloat16>&, const key_source<bfloat16, contiguous_cache<bfloat16>>&,
    const attention_params&, const batch_view&, const mass_view&, const head_mass_view&, workspace,
    backend::cuda::stream) const noexcept;

UNIPREFILL_END_NAMESPACE
