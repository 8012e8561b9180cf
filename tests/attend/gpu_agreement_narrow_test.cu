// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The combinations of gpu_agreement.cuh at D 64 and 80.

#include "gpu_agreement.cuh"

using namespace attend_test;

TEST_CASE("device attention agrees with the oracle: D 64 and 80", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_line<up::bfloat16, 64, 16, page_table>(0);
    check_line<up::half, 64, 256, none>(1);
    check_line<up::half, 80, 64, csr_pages>(2);
    check_line<up::bfloat16, 80, 32, token_slots>(3);
}
