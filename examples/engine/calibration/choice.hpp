// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace engine::calibration {

/// What the search chooses among: how far each layer and the lists have gone down their ladder of p. Step 0:
/// nothing.
struct choice {
    static constexpr std::array<double, 5> layer_shares = {0.995, 0.99, 0.98, 0.95, 0.90};
    static constexpr std::array<double, 4> list_shares = {0.995, 0.99, 0.98, 0.95};

    std::vector<std::int8_t> steps; ///< by layer
    std::int8_t lists = 0;

    friend bool operator<(const choice& a, const choice& b) {
        return a.steps != b.steps ? a.steps < b.steps : a.lists < b.lists;
    }
    friend bool operator==(const choice& a, const choice& b) {
        return a.steps == b.steps && a.lists == b.lists;
    }
};

/// Nothing dropped in a model of @p layers layers.
choice dense_choice(std::int32_t layers);

/// The fixed list for models that nobody has measured, from little to much dropped; none where the model has
/// too few layers for one.
std::vector<choice> fixed_list_choices(std::int32_t layers, std::int8_t lists);

/// The policy that @p chosen says; everything else as in @p base, whose rules and lists are replaced.
policy policy_of(const choice& chosen, const policy& base);

/// The first layer that does something else in @p b than in @p a; the number of layers where none does.
std::int32_t first_difference(const choice& a, const choice& b);

/// "7:0.99 15:0.995 + lists 0.99", "dense".
std::string describe(const choice& chosen);

} // namespace engine::calibration
