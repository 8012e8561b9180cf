// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/choice.hpp"

#include "engine/app/number_text.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <map>

namespace engine::calibration {

using uniprefill::mass_scope;
using uniprefill::selection_rule;

namespace {

/// The p of a step; 1 of step 0.
template <class Ladder>
double share_at(const Ladder& ladder, std::int8_t step) {
    return step == 0 ? 1 : ladder[static_cast<std::size_t>(step - 1)];
}

template <class Ladder>
std::int8_t nearest_step(const Ladder& ladder, double share) {
    std::int8_t best = 0;
    for (std::int8_t step = 1; step <= static_cast<std::int8_t>(ladder.size()); ++step) {
        // Logarithms of what is left out: 0.999 is as far from 0.99 as 0.99 from 0.9.
        const auto distance = [&](std::int8_t of) {
            return std::fabs(std::log((1 - share_at(ladder, of) + 1e-4) / (1 - share + 1e-4)));
        };
        if (distance(step) < distance(best)) best = step;
    }
    return best;
}

template <class Ladder>
std::int8_t nearest_rows(const Ladder& ladder, std::int32_t rows) {
    const auto nearest = std::min_element(ladder.begin(), ladder.end(), [rows](auto a, auto b) {
        return std::abs(a - rows) < std::abs(b - rows);
    });
    return static_cast<std::int8_t>(nearest - ladder.begin());
}

/// What was forced by the step, or, where there is none, by @p base.
std::int32_t forced(std::int8_t step, std::int32_t base) {
    return step < 0 ? base : choice::forced_rows[static_cast<std::size_t>(std::int32_t{step})];
}

/// The p that most layers' lists have; 0 where no layer has any.
std::int8_t usual_lists(const choice& of) {
    std::map<std::int8_t, int> layers;
    for (const std::int8_t step : of.lists) {
        if (step > 0) ++layers[step];
    }
    const auto most = std::max_element(layers.begin(), layers.end(),
                                       [](const auto& a, const auto& b) { return a.second < b.second; });
    return most == layers.end() ? std::int8_t{0} : most->first;
}

/// Throws unless p is all that @p rule has.
void check_rule(const selection_rule& rule, mass_scope scope, const std::string& at) {
    const selection_rule usual = selection_rule::top_p(share_of(rule), scope);
    const auto same = [&](const char* key, const std::string& expected, const std::string& came) {
        if (came != expected) {
            throw error(at + key, expected + ", as all that is searched among has", came);
        }
    };
    same(".selector", name_of(usual.kind), name_of(rule.kind));
    same(".scope", name_of(usual.scope), name_of(rule.scope));
    same(".min_kept", std::to_string(usual.min_kept_rows), std::to_string(rule.min_kept_rows));
    same(".max_kept", std::to_string(usual.max_kept_rows), std::to_string(rule.max_kept_rows));
    same(".ties", name_of(usual.ties), name_of(rule.ties));
    same(".crossing", name_of(usual.crossing), name_of(rule.crossing));
}

void check_rules(const std::vector<layer_rule>& rules, mass_scope scope, const std::string& where) {
    for (std::size_t i = 0; i < rules.size(); ++i) {
        check_rule(rules[i].rule, scope, where + "[" + std::to_string(i) + "]");
    }
}

} // namespace

choice dense_choice(std::int32_t layers) {
    choice made;
    made.steps.assign(static_cast<std::size_t>(layers), 0);
    made.lists.assign(static_cast<std::size_t>(layers), 0);
    return made;
}

std::int8_t layer_step(double share) {
    return nearest_step(choice::layer_shares, share);
}

std::int8_t list_step(double share) {
    return nearest_step(choice::list_shares, share);
}

choice with_lists(choice of, std::int8_t step) {
    std::fill(of.lists.begin(), of.lists.end(), step);
    return of;
}

void check_begin(const policy& given, std::int32_t layers, std::int32_t tokens, const std::string& where) {
    check_layers(given, layers, where);
    if (given.propagation != uniprefill::propagation::cumulative) {
        throw error(where + "propagation", "cumulative", name_of(given.propagation));
    }
    if (given.span != 0) {
        throw error(where + "span", "0, as windows are read at once", std::to_string(given.span));
    }
    if (given.min_length > tokens) {
        throw error(where + "min_length",
                    "at most " + std::to_string(tokens) + ", the tokens of a window: nothing is dropped else",
                    std::to_string(given.min_length));
    }
    check_rules(given.rules, mass_scope::free, where + "layers");
    if (!given.lists) return;
    check_rule(given.lists->rule, mass_scope::all, where + "lists");
    check_rules(given.list_rules, mass_scope::all, where + "lists.layers");
    if (given.list_sampling) {
        throw error(where + "lists.query_rows", "none, as a prompt's rows share lists in a search",
                    std::to_string(given.list_sampling->query_rows));
    }
}

choice choice_of(const policy& given, std::int32_t layers) {
    check_begin(given, layers, std::numeric_limits<std::int32_t>::max(), "the policy to begin with: ");
    choice made = dense_choice(layers);
    for (const layer_rule& one : given.rules) {
        made.steps[static_cast<std::size_t>(one.layer)] = layer_step(share_of(one.rule));
    }
    made.sink = nearest_rows(choice::forced_rows, given.sink);
    made.tail = nearest_rows(choice::forced_rows, given.tail);
    if (!given.lists) return made;
    made = with_lists(made, list_step(share_of(given.lists->rule)));
    for (const layer_rule& one : given.list_rules) {
        made.lists[static_cast<std::size_t>(one.layer)] = list_step(share_of(one.rule));
    }
    made.window = nearest_rows(choice::list_windows, given.lists->window);
    return made;
}

policy policy_of(const choice& chosen, const policy& base) {
    policy made = base;
    made.rules.clear();
    clear_lists(made);
    made.sink = forced(chosen.sink, base.sink);
    made.tail = forced(chosen.tail, base.tail);
    for (std::size_t layer = 0; layer < chosen.steps.size(); ++layer) {
        if (chosen.steps[layer] == 0) continue;
        const double p = share_at(choice::layer_shares, chosen.steps[layer]);
        made.rules.push_back({static_cast<std::int32_t>(layer), selection_rule::top_p(p, mass_scope::free)});
    }
    const std::int8_t usual = usual_lists(chosen);
    if (usual == 0) return made;
    const auto rule_of = [](std::int8_t step) {
        return selection_rule::top_p(share_at(choice::list_shares, step), mass_scope::all);
    };
    made.lists = base.lists.value_or(uniprefill::list_options<>{}); // sinks are the base's
    made.list_means = base.list_means;
    made.lists->rule = rule_of(usual);
    made.lists->window = choice::list_windows[static_cast<std::size_t>(std::int32_t{chosen.window})];
    for (std::size_t layer = 0; layer < chosen.lists.size(); ++layer) {
        if (chosen.lists[layer] == usual) continue;
        made.list_rules.push_back({static_cast<std::int32_t>(layer), rule_of(chosen.lists[layer])});
    }
    return made;
}

std::vector<choice> fixed_list_choices(const choice& lists) {
    std::vector<choice> made;
    const policy list = fixed_list(static_cast<std::int32_t>(lists.steps.size()));
    if (list.rules.empty()) return made;
    for (const double share : {0.995, 0.99, 0.98, 0.95, 0.90}) {
        choice one = lists;
        std::fill(one.steps.begin(), one.steps.end(), std::int8_t{0});
        for (const layer_rule& rule : list.rules) {
            one.steps[static_cast<std::size_t>(rule.layer)] = layer_step(share);
        }
        made.push_back(one);
    }
    return made;
}

std::int32_t first_difference(const choice& a, const choice& b) {
    const bool same_forced = a.sink == b.sink && a.tail == b.tail;
    const bool same_window = a.window == b.window;
    std::size_t layer = 0;
    while (layer < a.steps.size() && a.steps[layer] == b.steps[layer] && a.lists[layer] == b.lists[layer] &&
           (same_window || a.lists[layer] == 0) &&
           (same_forced || (a.steps[layer] == 0 && a.lists[layer] == 0))) {
        ++layer;
    }
    return static_cast<std::int32_t>(layer);
}

std::string describe(const choice& chosen) {
    std::string text;
    const auto add = [&text](const std::string& more) {
        if (!text.empty()) text += ' ';
        text += more;
    };
    for (std::size_t layer = 0; layer < chosen.steps.size(); ++layer) {
        if (chosen.steps[layer] == 0) continue;
        add(std::to_string(layer) + ":" + short_number(share_at(choice::layer_shares, chosen.steps[layer])));
    }
    const std::int8_t usual = usual_lists(chosen);
    if (usual > 0) {
        if (!text.empty()) add("+");
        add("lists " + short_number(share_at(choice::list_shares, usual)));
        for (std::size_t layer = 0; layer < chosen.lists.size(); ++layer) {
            if (chosen.lists[layer] == usual) continue;
            add(std::to_string(layer) + ":" +
                short_number(share_at(choice::list_shares, chosen.lists[layer])));
        }
        const std::int32_t window =
            choice::list_windows[static_cast<std::size_t>(std::int32_t{chosen.window})];
        if (window != uniprefill::list_options<>{}.window) add("window " + std::to_string(window));
    }
    if (text.empty()) return "dense";
    const policy usual_rows;
    const auto add_rows = [&](const char* name, std::int8_t step, std::int32_t rows) {
        if (forced(step, rows) != rows) add(name + std::to_string(forced(step, rows)));
    };
    add_rows("sink ", chosen.sink, usual_rows.sink);
    add_rows("tail ", chosen.tail, usual_rows.tail);
    return text;
}

} // namespace engine::calibration
