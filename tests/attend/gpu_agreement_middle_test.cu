// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The combinations of gpu_agreement.cuh at D 96 and 128.

#include "gpu_agreement.cuh"

using namespace attend_test;

TEST_CASE("device attention agrees with the oracle: D 96 and 128", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    check_line<up::bfloat16, 96, 128, contiguous>(4);
    check_line<up::half, 96, 16, page_pointers>(5);
    check_line<up::bfloat16, 128, 64, csr_pages>(6);
    check_line<up::half, 128, 32, page_table>(7);
}
