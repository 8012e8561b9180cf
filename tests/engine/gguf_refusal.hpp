// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/error.hpp"

#include <string>

namespace engine_test {

/// What `call` tells the user when it refuses, "" if it doesn't.
template <class Call>
std::string refusal(Call call) {
    try {
        call();
    } catch (const engine::error& refused) {
        return refused.what();
    }
    return "";
}

/// Whether it refuses with one line that begins with `argument` and holds `detail`; `line` is what it says.
template <class Call>
bool refuses(Call call, const std::string& argument, const std::string& detail, std::string& line) {
    line = refusal(call);
    return line.rfind(argument, 0) == 0 && line.find(detail) != std::string::npos &&
           line.find(": expected ") != std::string::npos && line.find(", came ") != std::string::npos &&
           line.find('\n') == std::string::npos;
}

} // namespace engine_test

/// As a Catch2 check that shows what was said.
#define CHECK_REFUSES(expression, argument, detail)                                                          \
    do {                                                                                                     \
        std::string said;                                                                                    \
        const bool refused = engine_test::refuses([&] { (void)(expression); }, argument, detail, said);      \
        INFO("said: " << said);                                                                              \
        CHECK(refused);                                                                                      \
    } while (false)
