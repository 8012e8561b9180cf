// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The kernels that all tests of contracts run.

#include "gpu_contracts.cuh"

UNIPREFILL_BEGIN_NAMESPACE
ATTEND_TEST_KERNELS(, small_blocks);
ATTEND_TEST_KERNELS(, large_blocks);
UNIPREFILL_END_NAMESPACE
