// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include <middle.hpp>

#include <uniprefill/core/status.hpp>

int main() {
    const bool accepts = middle::check_share(0.98).ok();
    const bool refuses = middle::check_share(1.5).code == uniprefill::status_code::out_of_range;
    return accepts && refuses ? 0 : 1;
}
