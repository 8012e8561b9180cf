// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// One run of estimator and selector on a device, compiled twice: as it is, and with -use_fast_math.
///
/// Each of the two has the library in a namespace of its own (UNIPREFILL_WRAPPED_NAMESPACE), so that no
/// function of one can stand in for the other's; only types of the standard library cross the border.

#include <cstdint>
#include <vector>

namespace as_it_is {

/// What the cases are, "" beyond the last.
const char* name_of(int which);
/// Everything that a case makes: masses, masses by head, fault words, keep bits, row maps, offsets, outcomes.
/// Empty where this device can't run it. Throws std::runtime_error with what went wrong.
std::vector<std::int64_t> run(int which);

} // namespace as_it_is

namespace fast_math {

const char* name_of(int which);
std::vector<std::int64_t> run(int which);

} // namespace fast_math
