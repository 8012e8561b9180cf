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
