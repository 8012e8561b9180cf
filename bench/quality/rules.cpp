// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "quality/rules.hpp"

#include "engine/app/number_text.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/error.hpp"

#include <initializer_list>
#include <set>
#include <utility>

namespace quality_bench {

namespace {

using uniprefill::selection_rule;

/// A policy with the usual G 64, n 128, sink 128, tail 128.
engine::policy policy_of(std::initializer_list<engine::layer_rule> rules) {
    engine::policy made;
    made.rules = rules;
    return made;
}

engine::policy at_fixed_layers(const selection_rule& rule) {
    return policy_of({{7, rule}, {11, rule}, {15, rule}, {19, rule}, {23, rule}, {27, rule}});
}

engine::policy revived(engine::policy policy) {
    policy.propagation = uniprefill::propagation::revive;
    return policy;
}

/// Lists of the fewest blocks that hold @p p of a head's mass, sinks of 64 and a window of 256.
engine::policy with_lists(engine::policy policy, double p) {
    policy.lists.emplace();
    policy.lists->rule = selection_rule::top_p(p, uniprefill::mass_scope::all);
    return policy;
}

/// The same, with the means of blocks that a head skips.
engine::policy with_means(engine::policy policy, double p) {
    policy = with_lists(std::move(policy), p);
    policy.list_means = true;
    return policy;
}

/// p as names have it: 0.90.
std::string short_share(double p) {
    std::string text = engine::short_number(p);
    if (text.size() < 4) text += '0';
    return text;
}

/// The same for each block of 64 query rows, from one in eight.
engine::policy with_own_lists(engine::policy policy, double p) {
    policy = with_lists(std::move(policy), p);
    policy.list_sampling = uniprefill::query_sampling{64, 8};
    return policy;
}

selection_rule outside(double p) {
    return selection_rule::top_p(p, uniprefill::mass_scope::free);
}

engine::policy schedule_a() {
    return policy_of({{1, outside(0.99)},
                      {7, outside(0.99)},
                      {15, outside(0.995)},
                      {19, outside(0.995)},
                      {21, outside(0.99)},
                      {23, outside(0.95)},
                      {25, outside(0.99)},
                      {27, outside(0.90)}});
}

} // namespace

std::vector<rule> known_rules() {
    return {
        {"published", at_fixed_layers(selection_rule::published_top_p(0.99)),
         reference{0.0275, 0.465, 0.354}},
        {"outside 0.98", at_fixed_layers(outside(0.98)), reference{0.0191, 0.492, 0.357}},
        {"outside 0.95", at_fixed_layers(outside(0.95)), reference{0.0360, 0.404, 0.299}},
        {"outside 0.99", at_fixed_layers(outside(0.99)), reference{0.0093, 0.566, 0.418}},
        {"schedule A", schedule_a(), reference{0.0093, 0.482, 0.300}},
        {"revival", revived(at_fixed_layers(outside(0.98))), reference{0.0127, 0.681, 0.576}},
        {"lists 0.99 alone", with_lists(policy_of({}), 0.99), reference{0.0037, 1, 0.268}},
        {"lists 0.95 alone", with_lists(policy_of({}), 0.95), reference{0.0097, 1, 0.154}},
        {"own lists 0.95 alone", with_own_lists(policy_of({}), 0.95), reference{0.0037, 1, 0.249}},
        {"own lists 0.99 alone", with_own_lists(policy_of({}), 0.99), reference{0.0007, 1, 0.42}},
        {"outside 0.98 + lists 0.99", with_lists(at_fixed_layers(outside(0.98)), 0.99),
         reference{0.0210, 0.497, 0.155}},
        {"schedule A + lists 0.99", with_lists(schedule_a(), 0.99), reference{0.0108, 0.487, 0.141}},
    };
}

std::vector<rule> mean_rules() {
    std::vector<rule> made;
    const auto add = [&](const std::string& name, const engine::policy& without, double p) {
        made.push_back({name + short_share(p), with_lists(without, p), std::nullopt});
        made.push_back({name + short_share(p) + " with means", with_means(without, p), std::nullopt});
    };
    for (const double p : {0.99, 0.95, 0.90, 0.80}) {
        add("lists ", policy_of({}), p);
    }
    for (const double p : {0.99, 0.95, 0.90}) {
        add("schedule A + lists ", schedule_a(), p);
    }
    return made;
}

std::vector<rule> ablation_rules() {
    const engine::policy usual = at_fixed_layers(outside(0.98));
    std::vector<rule> made;
    const auto add = [&](const std::string& name, std::int32_t engine::policy::*member, std::int32_t value) {
        rule one{name + " " + std::to_string(value), usual, std::nullopt};
        one.policy.*member = value;
        made.push_back(one);
    };
    for (const std::int32_t rows : {16, 32, 128}) {
        add("G", &engine::policy::block_rows, rows);
    }
    for (const std::int32_t rows : {16, 32, 64, 256, 512}) {
        add("n", &engine::policy::num_observations, rows);
    }
    for (const std::int32_t rows : {0, 16, 64, 256}) {
        add("sink", &engine::policy::sink, rows);
    }
    for (const double p : {0.90, 0.95, 0.99, 0.995}) {
        made.push_back({"p " + engine::short_number(p), at_fixed_layers(outside(p)), std::nullopt});
    }
    for (std::int32_t layer = 1; layer < 29; layer += 2) {
        made.push_back(
            {"layer " + std::to_string(layer) + " alone", policy_of({{layer, outside(0.90)}}), std::nullopt});
    }
    return made;
}

std::vector<rule> chunk_rules() {
    std::vector<rule> made{{"whole prompt", schedule_a(), reference{0.0093, 0.482, 0.300}}};
    for (const bool at_end : {false, true}) {
        for (const std::int32_t thousands : {1, 2, 4}) {
            const std::string name = std::to_string(thousands) + "K";
            rule chunked{(at_end ? "at the end, chunks of " : "spans of ") + name, schedule_a(),
                         std::nullopt};
            chunked.policy.span = thousands * 1024;
            chunked.reading = {true, at_end};
            made.push_back(chunked);
        }
    }
    return made;
}

rule rule_of_file(const std::string& path, std::int32_t layers) {
    const engine::policy policy = engine::load_policy(path);
    engine::check_layers(policy, layers, engine::printable(path) + ": ");
    return {policy.name.empty() ? path : policy.name, policy, std::nullopt};
}

void check_names(const std::vector<rule>& rules) {
    std::set<std::string> names;
    for (const rule& one : rules) {
        if (!names.insert(one.name).second) {
            throw engine::error("rules and policies", "each name once", engine::quoted(one.name) + " twice");
        }
    }
}

} // namespace quality_bench
