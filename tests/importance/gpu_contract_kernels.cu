// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The kernels that all tests of contracts run.

#include "gpu_contracts.cuh"

UNIPREFILL_BEGIN_NAMESPACE

template status
importance_test::cuda_estimator::prepare<bfloat16, bfloat16, contiguous_cache<bfloat16>>() const noexcept;
template status importance_test::cuda_estimator::run<bfloat16, bfloat16, contiguous_cache<bfloat16>>(
    const head_rows<const bfloat16>&, const key_source<bfloat16, contiguous_cache<bfloat16>>&,
    const attention_params&, const batch_view&, const mass_view&, const head_mass_view&, workspace,
    backend::cuda::stream) const noexcept;

UNIPREFILL_END_NAMESPACE

namespace importance_test {

bool forget_shared_memory(const up::cuda_device& device) {
    const auto forget = [](auto kernel) {
        const up::status done = up::detail::allow_shared_memory(kernel, 0);
        INFO(message(done));
        REQUIRE(done.ok());
    };
    constexpr std::size_t always_allowed = 48 * 1024;
    if (device.body == up::cuda_body::sm90) {
        forget(up::detail::sm90_score_kernel<bf16, bf16, cache_view, D, G, false>);
        forget(up::detail::sm90_score_kernel<bf16, bf16, cache_view, D, G, true>);
        return up::detail::sm90_shape<bf16, D>::dynamic_bytes > always_allowed;
    }
    forget(up::detail::portable_score_kernel<bf16, bf16, cache_view, D, G, false>);
    forget(up::detail::portable_score_kernel<bf16, bf16, cache_view, D, G, true>);
    return up::detail::portable_shape<bf16, D>::dynamic_bytes > always_allowed;
}

} // namespace importance_test
