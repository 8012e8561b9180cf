// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The kernels that all engines of gpu_facade.cuh run.

#include "gpu_facade.cuh"

UNIPREFILL_BEGIN_NAMESPACE

template status
pipeline_test::device_estimator::prepare<bfloat16, bfloat16, contiguous_cache<bfloat16>>() const noexcept;
template status pipeline_test::device_estimator::run<bfloat16, bfloat16, contiguous_cache<bfloat16>>(
    const head_rows<const bfloat16>&, const key_source<bfloat16, contiguous_cache<bfloat16>>&,
    const attention_params&, const batch_view&, const mass_view&, const head_mass_view&, workspace,
    backend::cuda::stream) const noexcept;
template status pipeline_test::device_selector::run(const mass_view&, const batch_view&,
                                                    const selection_rule*, std::int32_t, selection&,
                                                    workspace, backend::cuda::stream) const noexcept;

UNIPREFILL_END_NAMESPACE
