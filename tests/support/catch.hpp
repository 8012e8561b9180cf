// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Catch2, version 2 or 3, whichever is installed. Sources keep to what both spell alike.

#if __has_include(<catch2/catch_all.hpp>)
#    include <catch2/catch_all.hpp>
#else
#    include <catch2/catch.hpp>
#endif

#include <cstdint>
#include <string>

namespace uniprefill_test {

/// The run's seed (`--rng-seed N` repeats a run; printed at the start of each). The default is fixed, so that
/// two runs of the suite test the same thing.
std::uint64_t seed();

/// Says that the running test case can't be judged on this machine. The executable then exits with 77, which
/// ctest shows as skipped, unless something failed. Return from the test case right after.
void skip(const std::string& reason);

} // namespace uniprefill_test
