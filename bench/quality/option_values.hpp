// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Values of command-line options, for the programs of this folder.

#include "engine/cpu/features.hpp"
#include "engine/error.hpp"

#include <charconv>
#include <string>
#include <system_error>

namespace quality_bench {

/// Throws `error` naming the option where @p text isn't a number from @p lowest on.
template <class Number>
Number number_of(const std::string& name, const std::string& text, Number lowest) {
    Number number{};
    const char* const last = text.data() + text.size();
    const auto [end, fault] = std::from_chars(text.data(), last, number);
    if (fault != std::errc{} || end != last || number < lowest) {
        throw engine::error(name, "a number from " + std::to_string(lowest), engine::quoted(text));
    }
    return number;
}

/// Throws `error` naming the option where @p text isn't an arithmetic's name.
inline engine::cpu::arithmetic arithmetic_of(const std::string& name, const std::string& text) {
    using engine::cpu::arithmetic;
    for (const auto kind : {arithmetic::automatic, arithmetic::fp32, arithmetic::bf16x3, arithmetic::bf16}) {
        if (text == engine::cpu::name(kind)) return kind;
    }
    throw engine::error(name, "auto, fp32, bf16x3 or bf16", engine::quoted(text));
}

} // namespace quality_bench
