// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/dense_attention.hpp"

namespace engine::cuda {

struct dense_attention::state {};

dense_attention::dense_attention(std::int32_t, std::int32_t, std::int32_t) {
    throw error("--attention", "uniprefill, as this program was built without cuDNN and its frontend",
                "cudnn");
}

dense_attention::~dense_attention() = default;

void dense_attention::run(const uniprefill::head_rows<const uniprefill::bfloat16>&,
                          const uniprefill::head_rows<const uniprefill::bfloat16>&,
                          const uniprefill::head_rows<const uniprefill::bfloat16>&,
                          const uniprefill::head_rows<uniprefill::bfloat16>&, cudaStream_t) {}

bool dense_attention::built() {
    return false;
}

std::string dense_attention::library() {
    return "not built";
}

} // namespace engine::cuda
