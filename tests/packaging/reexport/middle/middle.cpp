// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "middle.hpp"

uniprefill::status middle::check_share(double p) {
    if (p > 0 && p <= 1) {
        return uniprefill::success();
    }
    return uniprefill::failure(uniprefill::status_code::out_of_range, "p", "(0, 1]", p);
}
