// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The combinations of gpu_agreement.cuh at D 192 and 256.

#include "gpu_agreement.cuh"

using namespace attend_test;

TEST_CASE("device attention agrees with the oracle: D 192 and 256", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_line<up::bfloat16, 192, 256, page_pointers>(8);
    check_line<up::half, 192, 64, token_slots>(9);
    check_line<up::bfloat16, 256, 32, none>(10);
    check_line<up::half, 256, 128, contiguous>(11);
}
