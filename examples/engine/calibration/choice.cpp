// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/choice.hpp"

#include "engine/app/number_text.hpp"

#include <algorithm>

namespace engine::calibration {

using uniprefill::mass_scope;
using uniprefill::selection_rule;

choice dense_choice(std::int32_t layers) {
    choice made;
    made.steps.assign(static_cast<std::size_t>(layers), 0);
    return made;
}

policy policy_of(const choice& chosen, const policy& base) {
    policy made = base;
    made.rules.clear();
    made.lists.reset();
    made.list_sampling.reset();
    for (std::size_t layer = 0; layer < chosen.steps.size(); ++layer) {
        if (chosen.steps[layer] == 0) continue;
        const double p = choice::layer_shares[static_cast<std::size_t>(chosen.steps[layer] - 1)];
        made.rules.push_back({static_cast<std::int32_t>(layer), selection_rule::top_p(p, mass_scope::free)});
    }
    if (chosen.lists > 0) {
        made.lists.emplace();
        made.lists->rule = selection_rule::top_p(
            choice::list_shares[static_cast<std::size_t>(chosen.lists - 1)], mass_scope::all);
    }
    return made;
}

std::vector<choice> fixed_list_choices(std::int32_t layers, std::int8_t lists) {
    std::vector<choice> made;
    const policy list = fixed_list(layers);
    if (list.rules.empty()) return made;
    for (std::size_t step = 1; step <= choice::layer_shares.size(); ++step) {
        choice one = dense_choice(layers);
        one.lists = lists;
        for (const layer_rule& rule : list.rules) {
            one.steps[static_cast<std::size_t>(rule.layer)] = static_cast<std::int8_t>(step);
        }
        made.push_back(one);
    }
    return made;
}

std::int32_t first_difference(const choice& a, const choice& b) {
    if (a.lists != b.lists) return 0;
    const auto differs = std::mismatch(a.steps.begin(), a.steps.end(), b.steps.begin()).first;
    return static_cast<std::int32_t>(differs - a.steps.begin());
}

std::string describe(const choice& chosen) {
    std::string text;
    for (std::size_t layer = 0; layer < chosen.steps.size(); ++layer) {
        if (chosen.steps[layer] == 0) continue;
        if (!text.empty()) text += ' ';
        text += std::to_string(layer) + ":" +
                short_number(choice::layer_shares[static_cast<std::size_t>(chosen.steps[layer] - 1)]);
    }
    if (chosen.lists > 0) {
        if (!text.empty()) text += " + ";
        text += "lists " + short_number(choice::list_shares[static_cast<std::size_t>(chosen.lists - 1)]);
    }
    return text.empty() ? "dense" : text;
}

} // namespace engine::calibration
