// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/program.hpp"
#include "engine/error.hpp"

namespace engine {

namespace {

[[noreturn]] void refuse() {
    throw error("--device", "cpu, as this program was built without CUDA", "cuda");
}

} // namespace

std::unique_ptr<prompt_model> open_cuda_model(const std::string&) {
    refuse();
}

void run_cuda_prefill(const options&) {
    refuse();
}

// The real one takes the windows.
std::unique_ptr<calibration::window_reader>
cuda_window_reader(const prompt_model&, const policy&,
                   std::vector<calibration::window>) { // NOLINT(performance-unnecessary-value-param)
    refuse();
}

} // namespace engine
