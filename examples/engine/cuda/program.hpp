// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/options.hpp"
#include "engine/calibration/window_reader.hpp"
#include "engine/calibration/windows.hpp"
#include "engine/reading/prompt_reader.hpp"

#include <memory>
#include <string>
#include <vector>

namespace engine {

/// What the program has of the CUDA engine. Each throws `error` where the program was built without it
/// (program_none.cpp), or there is no device.
std::unique_ptr<prompt_model> open_cuda_model(const std::string& path);
void run_cuda_prefill(const options& chosen);
/// Windows of one length, read on the device by a model that open_cuda_model() opened and that outlives them.
std::unique_ptr<calibration::window_reader> cuda_window_reader(const prompt_model& model, const policy& base,
                                                               std::vector<calibration::window> windows);

} // namespace engine
