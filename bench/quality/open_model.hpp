// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"
#include "engine/cpu/features.hpp"
#include "engine/cuda/program.hpp"
#include "engine/error.hpp"
#include "engine/reading/reader.hpp"

#include <memory>
#include <string>

namespace quality_bench {

/// Where these programs run a model.
enum class device { cpu, cuda };

/// Throws `engine::error` where @p text is no device's name.
inline device device_of(const std::string& name, const std::string& text) {
    if (text == "cpu") return device::cpu;
    if (text == "cuda") return device::cuda;
    throw engine::error(name, "cpu or cuda", engine::quoted(text));
}

inline std::unique_ptr<engine::prompt_model> open_model(const std::string& path, device on,
                                                        engine::cpu::arithmetic kind) {
    if (on == device::cuda) return engine::open_cuda_model(path);
    return std::make_unique<engine::loaded_model>(path, kind);
}

/// Whether the CUDA engine does what a policy says: its kernels are compiled for one G and one n.
inline bool runs_on_cuda(const engine::policy& policy) {
    return policy.block_rows == 64 && policy.num_observations == 128 &&
           policy.propagation == uniprefill::propagation::cumulative && !policy.list_sampling;
}

} // namespace quality_bench
