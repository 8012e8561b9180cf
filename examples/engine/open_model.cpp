// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/open_model.hpp"

#include "engine/cuda/program.hpp"
#include "engine/reading/reader.hpp"

namespace engine {

std::unique_ptr<prompt_model> open_model(const options& chosen) {
    if (chosen.device == device_kind::cuda) return open_cuda_model(chosen.model);
    return std::make_unique<loaded_model>(chosen.model, chosen.arithmetic);
}

} // namespace engine
