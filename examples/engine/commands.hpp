// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/options.hpp"

namespace engine {

/// The programs. Each throws `error` on what the user must be told, and writes its result to standard output.
void run_calibrate(const options& chosen);
void run_compare(const options& chosen);
void run_generate(const options& chosen);
void run_serve_sim(const options& chosen);

} // namespace engine
