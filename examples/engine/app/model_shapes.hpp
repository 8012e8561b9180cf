// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/llama_config.hpp"

#include <string>

namespace engine {

/// The sizes of a well-known model, for runs on random weights. Throws `error`, naming @p option, where the
/// name isn't one of model_shape_names().
llama_config model_shape(const std::string& option, const std::string& name);

/// "llama3-8b, llama3.2-1b, ...": what model_shape() knows.
std::string model_shape_names();

} // namespace engine
