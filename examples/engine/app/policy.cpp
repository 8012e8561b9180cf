// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/policy.hpp"

#include "engine/app/number_text.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstddef>
#include <string_view>

namespace engine {
namespace {

template <class Value>
struct spelling {
    Value value;
    const char* text;
};

constexpr std::array<spelling<uniprefill::rule_kind>, 4> rule_kinds = {{
    {uniprefill::rule_kind::top_p, "top-p"},
    {uniprefill::rule_kind::fixed_ratio, "fixed-ratio"},
    {uniprefill::rule_kind::fixed_budget, "fixed-budget"},
    {uniprefill::rule_kind::max_fraction, "max-fraction"},
}};
constexpr std::array<spelling<uniprefill::mass_scope>, 2> mass_scopes = {{
    {uniprefill::mass_scope::free, "free"},
    {uniprefill::mass_scope::all, "all"},
}};
constexpr std::array<spelling<uniprefill::propagation>, 2> propagations = {{
    {uniprefill::propagation::cumulative, "cumulative"},
    {uniprefill::propagation::revive, "revive"},
}};
constexpr std::array<spelling<uniprefill::tie_order>, 2> tie_orders = {{
    {uniprefill::tie_order::lower_block_first, "lower-block-first"},
    {uniprefill::tie_order::higher_block_first, "higher-block-first"},
}};
constexpr std::array<spelling<uniprefill::crossing>, 2> crossings = {{
    {uniprefill::crossing::minimal, "minimal"},
    {uniprefill::crossing::published, "published"},
}};

template <class Table, class Value>
const char* spell(const Table& table, Value value) {
    for (const auto& entry : table) {
        if (entry.value == value) return entry.text;
    }
    return "unknown";
}

template <class Table, class Value>
bool read_spelling(const Table& table, const std::string& text, Value& value) {
    for (const auto& entry : table) {
        if (text == entry.text) {
            value = entry.value;
            return true;
        }
    }
    return false;
}

void check_range(std::int32_t value, std::int32_t lowest, std::int32_t highest, const std::string& argument) {
    if (value < lowest || value > highest) {
        throw error(argument, std::to_string(lowest) + " to " + std::to_string(highest),
                    std::to_string(value));
    }
}

/// A field of a rule, as the library's validation names it, in the spelling of policy files.
std::string key_of(std::string_view field) {
    if (field == "rule.p") return ".p";
    if (field == "rule.budget_rows") return ".budget";
    if (field == "rule.min_kept_rows") return ".min_kept";
    if (field == "rule.max_kept_rows") return ".max_kept";
    return ": " + std::string(field);
}

bool contains_ignoring_case(std::string_view text, std::string_view lower_case) {
    const auto same = [](char a, char b) { return std::tolower(static_cast<unsigned char>(a)) == b; };
    return std::search(text.begin(), text.end(), lower_case.begin(), lower_case.end(), same) != text.end();
}

/// Rules by rising layer.
void check_rules(const std::vector<layer_rule>& rules, const std::string& where) {
    std::int32_t last = -1;
    for (std::size_t i = 0; i < rules.size(); ++i) {
        const std::string at = where + "[" + std::to_string(i) + "]";
        const layer_rule& entry = rules[i];
        check_range(entry.layer, 0, 4095, at + ".layer");
        if (entry.layer <= last) {
            throw error(at + ".layer", "a layer after " + std::to_string(last), std::to_string(entry.layer));
        }
        last = entry.layer;
        const bool budgeted = entry.rule.kind == uniprefill::rule_kind::fixed_budget;
        if (!budgeted && entry.rule.budget_rows != 0) {
            throw error(at + ".budget", "none unless the selector is fixed-budget",
                        std::to_string(entry.rule.budget_rows));
        }
        const uniprefill::status verdict = validate(entry.rule);
        if (!verdict.ok())
            throw error(at + key_of(verdict.argument), verdict.expected, short_number(verdict.came));
    }
}

void check_lists(const uniprefill::list_options<>& lists, const std::string& where) {
    constexpr std::int32_t many = 1 << 30;
    check_range(lists.sink, 0, many, where + ".sink");
    check_range(lists.window, 0, many, where + ".window");
    const uniprefill::status verdict = validate(lists.rule);
    if (!verdict.ok())
        throw error(where + key_of(verdict.argument), verdict.expected, short_number(verdict.came));
}

} // namespace

double share_of(const uniprefill::selection_rule& rule) {
    return static_cast<double>(rule.p.value) / static_cast<double>(uniprefill::unit_fraction::one);
}

double default_share(uniprefill::mass_scope scope) {
    return scope == uniprefill::mass_scope::free ? 0.98 : 0.99;
}

std::vector<std::int32_t> span_ends(const policy& policy, std::int32_t tokens) {
    std::vector<std::int32_t> ends;
    if (policy.span > 0) {
        for (std::int32_t end = policy.span; tokens - end >= policy.num_observations; end += policy.span) {
            ends.push_back(end);
        }
    }
    ends.push_back(tokens);
    return ends;
}

policy dense() {
    policy out;
    out.name = "dense";
    return out;
}

policy fixed_list(std::int32_t layers) {
    policy out;
    out.name = "fixed list";
    out.comment =
        "Every fourth layer from 7 on but the last, at the p that does well where nothing was measured.";
    constexpr auto scope = uniprefill::mass_scope::free;
    for (std::int32_t layer = 7; layer < layers - 1; layer += 4) {
        out.rules.push_back({layer, uniprefill::selection_rule::top_p(default_share(scope), scope)});
    }
    return out;
}

policy default_policy(const model_identity& model) {
    // The name alone would also match its larger siblings, the shape alone its predecessor.
    if (model.layers == 30 && model.hidden == 576 && contains_ignoring_case(model.name, "smollm2")) {
        for (const shipped_policy& shipped : shipped_policies()) {
            if (std::string_view(shipped.file) == "smollm2-135m-instruct.json") {
                return parse_policy(shipped.json, shipped.file);
            }
        }
    }
    return fixed_list(model.layers);
}

void check(const policy& checked, const std::string& where) {
    constexpr std::int32_t many = 1 << 30;
    if (checked.name.size() > 200) {
        throw error(where + "name", "at most 200 bytes", std::to_string(checked.name.size()));
    }
    check_range(checked.block_rows, 8, 256, where + "block_rows");
    check_range(checked.num_observations, 1, 512, where + "observations");
    check_range(checked.sink, 0, many, where + "sink");
    check_range(checked.tail, 0, many, where + "tail");
    check_range(checked.min_length, 0, many, where + "min_length");
    check_range(checked.span, 0, many, where + "span");
    if (checked.span > 0 && checked.span < checked.num_observations) {
        throw error(where + "span",
                    "0 (the whole prompt) or at least the " + std::to_string(checked.num_observations) +
                        " observations",
                    std::to_string(checked.span));
    }
    check_rules(checked.rules, where + "layers");
    if (checked.lists) check_lists(*checked.lists, where + "lists");
    if (!checked.lists && !checked.list_rules.empty()) {
        throw error(where + "lists.layers", "none without lists", std::to_string(checked.list_rules.size()));
    }
    check_rules(checked.list_rules, where + "lists.layers");
    if (checked.list_sampling) {
        if (!checked.lists) throw error(where + "lists", "some, where query blocks have their own", "none");
        check_range(checked.list_sampling->query_rows, 1, 1 << 16, where + "lists.query_rows");
        check_range(checked.list_sampling->sample, 1, 1 << 16, where + "lists.sample");
        if (checked.list_means) {
            throw error(where + "lists.mean", "false where query blocks have lists of their own", "true");
        }
    }
}

void check_layers(const policy& checked, std::int32_t layers, const std::string& where) {
    const auto check_all = [&](const std::vector<layer_rule>& rules, const char* field) {
        for (const layer_rule& entry : rules) {
            if (entry.layer < layers) continue;
            throw error(where + field,
                        "layers from 0 to " + std::to_string(layers - 1) + ", which the model has",
                        "layer " + std::to_string(entry.layer));
        }
    };
    check_all(checked.rules, "layers");
    check_all(checked.list_rules, "lists.layers");
}

void clear_lists(policy& of) {
    of.lists.reset();
    of.list_rules.clear();
    of.list_sampling.reset();
    of.list_means = false;
}

const char* name_of(uniprefill::rule_kind kind) {
    return spell(rule_kinds, kind);
}
const char* name_of(uniprefill::mass_scope scope) {
    return spell(mass_scopes, scope);
}
const char* name_of(uniprefill::propagation mode) {
    return spell(propagations, mode);
}
const char* name_of(uniprefill::tie_order ties) {
    return spell(tie_orders, ties);
}
const char* name_of(uniprefill::crossing crossing) {
    return spell(crossings, crossing);
}
bool parse(const std::string& text, uniprefill::rule_kind& kind) {
    return read_spelling(rule_kinds, text, kind);
}
bool parse(const std::string& text, uniprefill::mass_scope& scope) {
    return read_spelling(mass_scopes, text, scope);
}
bool parse(const std::string& text, uniprefill::propagation& mode) {
    return read_spelling(propagations, text, mode);
}
bool parse(const std::string& text, uniprefill::tie_order& ties) {
    return read_spelling(tie_orders, text, ties);
}
bool parse(const std::string& text, uniprefill::crossing& crossing) {
    return read_spelling(crossings, text, crossing);
}

std::string describe(const uniprefill::selection_rule& rule) {
    std::string out = name_of(rule.kind);
    out += rule.kind == uniprefill::rule_kind::fixed_budget
               ? " of " + std::to_string(rule.budget_rows) + " rows"
               : " " + short_number(share_of(rule));
    out += std::string(", scope ") + name_of(rule.scope);
    return out;
}

} // namespace engine
