// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// -use_fast_math, which an including project may have chosen, changes no bit of masses and keep sets.

#include "gpu_flags_run.hpp"
#include "support/cuda.cuh"

#include <algorithm>
#include <iostream>
#include <string>

TEST_CASE("masses and keep sets are the same bits with and without -use_fast_math", "[gpu]") {
    if (!uniprefill_test::has_device()) {
        return;
    }
    int compared = 0;
    for (int i = 0; *as_it_is::name_of(i) != 0; ++i) {
        INFO(as_it_is::name_of(i));
        REQUIRE(std::string(as_it_is::name_of(i)) == fast_math::name_of(i));
        const std::vector<std::int64_t> plain = as_it_is::run(i);
        const std::vector<std::int64_t> fast = fast_math::run(i);
        if (plain.empty()) {
            std::cout << as_it_is::name_of(i) << ": not on this device" << std::endl;
            REQUIRE(fast.empty());
            continue;
        }
        REQUIRE(plain.size() == fast.size());
        std::int64_t different = 0;
        for (std::size_t j = 0; j < plain.size(); ++j) {
            different += plain[j] != fast[j] ? 1 : 0;
        }
        CHECK(different == 0);
        CHECK(std::count(plain.begin(), plain.end(), 0) < static_cast<std::int64_t>(plain.size()) / 2);
        ++compared;
    }
    CHECK(compared >= 5); // the portable ones at least
}
