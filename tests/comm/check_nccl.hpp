// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "support/catch.hpp"

#include <nccl.h>

/// Fails the running test on an error of NCCL.
inline void check_nccl(ncclResult_t code, const char* what) {
    if (code != ncclSuccess) {
        FAIL(what << ": " << ncclGetErrorString(code));
    }
}
