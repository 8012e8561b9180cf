// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// What a refusal has to say.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

namespace ledger_test {

inline void check_refused(const up::status& came, up::status_code code, const std::string& argument,
                          std::int32_t request, std::int32_t layer = -1) {
    INFO(text(came));
    CHECK(came.code == code);
    CHECK(came.argument == argument);
    CHECK(came.request == request);
    CHECK(came.layer == layer);
}

} // namespace ledger_test
