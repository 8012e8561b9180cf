// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace engine {

/// What `calibrate` measures and looks for.
struct calibrate_options {
    std::vector<std::string> texts; ///< files, each tokenised alone
    std::int32_t tokens = 4096;     ///< of a window's prompt
    std::int32_t windows = 8;
    std::optional<double> divergence;       ///< most KL, mean over windows; none: the search's own
    std::optional<std::int32_t> for_length; ///< prompts whose work is saved; none: the model's context
    bool lists = true;                      ///< whether block lists may be chosen
    /// Both or none: the least divergence within these shares of rows and pairs is looked for instead.
    std::optional<double> lin;
    std::optional<double> att;
    std::optional<double> worst; ///< weight of the worst window beside the mean, there; none: its own
    std::string begin; ///< policy file that that search begins with; empty: the default for the model
    double minutes = 60;
    std::uint64_t seed = 1;
    std::string out = "policy.json";
};

} // namespace engine
