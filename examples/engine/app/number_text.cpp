// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/number_text.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>

namespace engine {

std::string with_commas(std::int64_t number) {
    std::string out = std::to_string(number);
    const std::size_t first = number < 0 ? 1 : 0;
    for (std::size_t at = out.size(); at > first + 3;) {
        at -= 3;
        out.insert(at, ",");
    }
    return out;
}

std::string fixed(double number, int digits) {
    if (!std::isfinite(number)) return "-";
    char text[400];
    std::snprintf(text, sizeof(text), "%.*f", digits, number);
    return text;
}

std::string significant(double number, int digits) {
    if (!std::isfinite(number)) return "-";
    if (number == 0) return "0";
    const double size = std::fabs(number);
    if (size < 1e-5 || size >= 1e9) {
        char text[64];
        std::snprintf(text, sizeof(text), "%.*g", std::min(digits, 17), number);
        return text;
    }
    return fixed(number, std::max(0, digits - 1 - static_cast<int>(std::floor(std::log10(size)))));
}

std::string short_number(double number) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", number);
    return text;
}

std::string percent(double share, int digits) {
    return std::isfinite(share) ? fixed(share * 100, digits) + " %" : "-";
}

std::string duration_text(double seconds) {
    if (!std::isfinite(seconds) || seconds < 0) return "-";
    if (seconds < 0.9995) return significant(seconds * 1000, 3) + " ms";
    if (seconds < 99.95) return significant(seconds, 3) + " s";
    const auto whole = static_cast<std::int64_t>(std::llround(std::min(seconds, 1e15)));
    return with_commas(whole / 60) + " min " + std::to_string(whole % 60) + " s";
}

std::string memory_text(std::int64_t bytes) {
    return bytes <= 0 ? "-" : with_commas((bytes + (1 << 19)) >> 20) + " MiB";
}

std::string speed_text(double speedup) {
    if (!std::isfinite(speedup) || speedup <= 0) return "of unknown speed";
    if (speedup >= 1.005) return fixed(speedup, 2) + " times faster";
    if (speedup <= 0.995) return fixed(1 / speedup, 2) + " times slower";
    return "as fast";
}

} // namespace engine
