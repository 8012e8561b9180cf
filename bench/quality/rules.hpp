// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/reading/reader.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace quality_bench {

/// What a row of the table was measured as elsewhere, where it was: exact fp32 products, the same 31 windows.
struct reference {
    double kl_mean;
    double lin;
    double att;
};

/// One row of the table.
struct rule {
    std::string name;
    engine::policy policy;
    std::optional<reference> expected;
    engine::reading_options reading{};
};

/// The rules that the bench knows; a new one is a line in rules.cpp.
std::vector<rule> known_rules();

/// Block lists without and with the means of skipped blocks, alone and with schedule A.
std::vector<rule> mean_rules();

/// "outside 0.98" with one thing changed at a time: G, n, sinks, p; and each layer by itself at p 0.90.
std::vector<rule> ablation_rules();

/// Schedule A as an engine decides that reads prompts in chunks: by spans of 1K, 2K and 4K, each a step of
/// its own, and when the prompt ends, after chunks of those lengths; beside them the whole prompt at once.
std::vector<rule> chunk_rules();

/// What a policy file says, under its name, or the file's where it has none. Throws `engine::error` that
/// names the file where it is bad or names layers that a model of @p layers layers doesn't have.
rule rule_of_file(const std::string& path, std::int32_t layers);

/// Throws `engine::error` where two rules have one name: results are kept by it.
void check_names(const std::vector<rule>& rules);

} // namespace quality_bench
