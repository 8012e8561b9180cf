// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <string>

namespace engine {

/// Cores that this process may use.
std::int32_t usable_cores();

/// The processor's own name, or "unknown processor".
std::string cpu_name();

/// The most memory that the process has held since its start or the last reset, in bytes; 0 if unknown.
std::int64_t peak_memory_bytes();

/// Lets peak_memory_bytes() start anew from what is held now; false where the system doesn't allow it.
bool reset_peak_memory();

} // namespace engine
