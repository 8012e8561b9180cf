// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// Which positions of some a random layer keeps.

#include "ledger/ledger_fixture.hpp"

namespace ledger_test {

/// All of them, single ones, or runs, as blocks make them.
/// @param run     length of the runs that are all alike
/// @param longest of the runs that aren't
/// @param below   below(n): a random number from 0 to n - 1
template <class Below>
positions random_subset(const positions& of, std::int32_t run, std::int32_t longest, Below below) {
    positions made;
    const std::int32_t style = below(4);
    if (style == 0) {
        return of;
    }
    bool on = below(2) == 0;
    std::int32_t left = 0;
    for (const std::int32_t position : of) {
        if (style == 1) {
            on = below(3) == 0;
        } else if (left-- == 0) {
            on = !on;
            left = style == 2 ? run - 1 : below(longest);
        }
        if (on) {
            made.push_back(position);
        }
    }
    return made;
}

} // namespace ledger_test
