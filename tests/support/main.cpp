// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Catch2's own main returns the number of failures: 77 of them would look like a skip to ctest. Ours doesn't.

#define CATCH_CONFIG_RUNNER
#include "support/catch.hpp"

#include <iostream>

namespace {

constexpr unsigned default_seed = 20260101;
bool something_was_skipped = false;

} // namespace

namespace uniprefill_test {

std::uint64_t seed() {
    return Catch::rngSeed();
}

void skip(const std::string& reason) {
    something_was_skipped = true;
    std::cout << "skipped: " << reason << std::endl;
}

} // namespace uniprefill_test

int main(int argc, char** argv) {
    Catch::Session session;
    session.configData().rngSeed = default_seed;
    if (const int wrong_usage = session.applyCommandLine(argc, argv)) {
        return wrong_usage;
    }
    std::cout << "seed " << session.configData().rngSeed << std::endl;
    if (session.run() != 0) {
        return 1;
    }
    return something_was_skipped ? 77 : 0;
}
