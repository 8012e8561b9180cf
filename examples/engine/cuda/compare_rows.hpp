// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace engine::cuda {

/// KL(reference || ours) in nats of each of @p rows rows of logits [rows, vocab] in device memory, in double,
/// not below 0; NaN where a logit isn't finite. What compare_logits() says on the host but for rounding. One
/// launch, which nobody waits for; the same bits every time.
void compare_rows(const float* reference, const float* ours, std::int32_t rows, std::int32_t vocab,
                  double* out, cudaStream_t on);

} // namespace engine::cuda
