// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model_file/gguf.hpp"

#include <iosfwd>
#include <string>

namespace engine {

/// Prints what the GGUF file at `path` holds: metadata (long values abbreviated, control characters escaped),
/// tensors with type, shape and bytes, and totals; as text, or as one JSON object. Any architecture and any
/// known element type, also those that the engine doesn't run. Returns the exit code 0; throws `error` if it
/// isn't a sound file.
int inspect(const std::string& path, bool json, std::ostream& out);

/// Same for a file that is read already and called `name`.
void inspect(const gguf& file, const std::string& name, bool json, std::ostream& out);

} // namespace engine
