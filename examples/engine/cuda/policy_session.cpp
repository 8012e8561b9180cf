// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/cuda/policy_session.hpp"

namespace engine::cuda {

namespace {

void check_policy(const policy& policy) {
    if (policy.propagation != uniprefill::propagation::cumulative) {
        throw error("--propagation", "cumulative on a CUDA device", name_of(policy.propagation));
    }
    if (policy.list_sampling) {
        throw error("lists.query_rows", "none on a CUDA device",
                    std::to_string(policy.list_sampling->query_rows));
    }
}

list_rules selecting_of(const std::vector<layer_rule>& rules) {
    list_rules made;
    for (const layer_rule& rule : rules) {
        made.push_back({rule.layer, rule.rule, nullptr});
    }
    return made;
}

uniprefill::request_options request_of(const policy& policy) {
    uniprefill::request_options options;
    options.sink = policy.sink;
    options.tail = policy.tail;
    options.min_length = policy.min_length;
    return options;
}

} // namespace

session_options options_under(const policy& policy, std::int32_t prompt, std::int32_t following) {
    check_policy(policy);
    session_options options;
    options.prompt = prompt;
    options.following = following;
    options.selecting = selecting_of(policy.rules);
    options.span_ends = span_ends(policy, prompt);
    options.request = request_of(policy);
    options.block_rows = policy.block_rows;
    options.num_observations = policy.num_observations;
    options.lists = policy.lists;
    options.list_means = policy.list_means;
    options.list_rules = selecting_of(policy.list_rules);
    return options;
}

void change_policy(session& session, const policy& policy) {
    check_policy(policy);
    const session_options& has = session.options();
    if (policy.block_rows != has.block_rows || policy.num_observations != has.num_observations ||
        policy.list_means != has.list_means || span_ends(policy, has.prompt) != has.span_ends) {
        throw error("a session's policy", "one with the same blocks, observations, means and spans",
                    "another");
    }
    session.change(selecting_of(policy.rules), policy.lists, selecting_of(policy.list_rules),
                   request_of(policy));
}

std::vector<layer_record> records_of(const session& session) {
    std::vector<layer_record> made;
    for (const layer_facts& facts : session.facts()) {
        layer_record record;
        record.rows_in = facts.rows_in;
        record.rows_kept = facts.rows_kept;
        record.pairs = facts.pairs;
        record.estimator_pairs = facts.estimator_pairs;
        made.push_back(record);
    }
    return made;
}

} // namespace engine::cuda
