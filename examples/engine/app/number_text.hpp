// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <string>

namespace engine {

/// "7,639".
std::string with_commas(std::int64_t number);

/// `digits` after the point; "-" for a number that doesn't exist.
std::string fixed(double number, int digits);

/// `digits` significant ones, never in powers of ten for what is at least 1e-5: "0.00251", "19.8", "0".
std::string significant(double number, int digits);

/// As short as six significant digits allow: "0.5", "1e-07", "nan".
std::string short_number(double number);

/// 0.481 as "48.1 %".
std::string percent(double share, int digits = 1);

/// "8.10 s", "412 ms", "1 min 20 s".
std::string duration_text(double seconds);

/// "812 MiB"; "-" for 0.
std::string memory_text(std::int64_t bytes);

/// "2.45 times faster", "1.10 times slower", "as fast".
std::string speed_text(double speedup);

} // namespace engine
