// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

namespace engine {

// Files of this folder that are compiled in, so that the program is one file wherever it is copied to. The
// build generates the definitions, and those of shipped_policies().

const char* embedded_report_css();

} // namespace engine
