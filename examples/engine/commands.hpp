// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/options.hpp"
#include "engine/cpu/features.hpp"

namespace engine {

/// The programs. Each throws `error` on what the user must be told, and writes its result to standard output.
void run_compare(const options& chosen);
void run_generate(const options& chosen);

/// What the operators compute in, from the option.
cpu::arithmetic product_arithmetic(arithmetic chosen);

} // namespace engine
