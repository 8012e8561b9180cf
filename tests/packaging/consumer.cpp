// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What every consumer project builds and runs: the library's error type, used as a stranger would.

#include <uniprefill/core/status.hpp>
#include <uniprefill/core/version.hpp>

#include <cstdio>
#include <cstring>

int main() {
    const uniprefill::status refusal =
        uniprefill::failure(uniprefill::status_code::out_of_range, "p", "(0, 1]", 1.5).at_request(3);
    char message[256];
    uniprefill::format(refusal, message, sizeof message);
    std::printf("uniprefill %d.%d.%d: %s\n", UNIPREFILL_VERSION_MAJOR, UNIPREFILL_VERSION_MINOR,
                UNIPREFILL_VERSION_PATCH, message);
    return std::strcmp(message, "p: expected (0, 1], came 1.5 (out of range, request 3)") == 0 ? 0 : 1;
}
