// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/options.hpp"
#include "engine/reading/prompt_reader.hpp"

#include <memory>

namespace engine {

/// The model of the command line, on the device of the command line. Throws `error` where the file is none
/// that the engine runs, or the device isn't there.
std::unique_ptr<prompt_model> open_model(const options& chosen);

} // namespace engine
