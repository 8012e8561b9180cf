// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/query_sampling.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace engine {

/// A layer that selects, and by what rule.
struct layer_rule {
    std::int32_t layer = 0;
    uniprefill::selection_rule rule;
};

/// What is dropped where: all that a policy file says. Counts are rows, which are tokens here.
struct policy {
    std::string name;                    ///< at most 200 bytes
    std::string comment;                 ///< where the figures come from
    std::int32_t block_rows = 64;        ///< G, 8 to 256
    std::int32_t num_observations = 128; ///< n, 1 to 512
    std::int32_t sink = 128;             ///< first positions, never dropped
    std::int32_t tail = 128;             ///< last rows of each span, never dropped
    std::int32_t min_length = 0;         ///< shorter prompts are left alone
    std::int32_t span = 0;               ///< prompt positions decided at once; 0: the whole prompt
    uniprefill::propagation propagation = uniprefill::propagation::cumulative;
    std::vector<layer_rule> rules; ///< by rising layer; empty: nothing is ever dropped
    /// Which blocks of keys each head reads, at every layer; none: all.
    std::optional<uniprefill::list_options<>> lists;
    /// Rules of lists at layers that have their own, by rising layer. p = 1: that layer has no lists.
    std::vector<layer_rule> list_rules;
    bool list_means = false; ///< with lists: a block that a head skips is met by its mean key and value
    /// Each block of so many query rows has lists of its own, from a sample of them; none: a segment's rows
    /// share its lists. Only with `lists`.
    std::optional<uniprefill::query_sampling> list_sampling;
};

/// Ends of the spans of a prompt, which are a property of the prompt and the policy: each span is decided as
/// if nothing came after it. A last one shorter than the observation rows joins the one before.
std::vector<std::int32_t> span_ends(const policy& policy, std::int32_t tokens);

/// What tells models apart when a policy is chosen for one.
struct model_identity {
    std::string name; ///< `general.name`
    std::int32_t layers = 0;
    std::int32_t hidden = 0;
};

/// p of a top-p rule, the share of other kinds, as the number that it was made from.
double share_of(const uniprefill::selection_rule& rule);

/// The p of a top-p rule for which nobody chose one: 0.98 where forced rows don't count, 0.99 where they do.
double default_share(uniprefill::mass_scope scope);

/// Nothing is dropped.
policy dense();

/// The list for models that nobody has measured: layers 7, 11, 15, ... but not the last, each at
/// `default_share` of `mass_scope::free`. Fewer than nine layers: empty.
policy fixed_list(std::int32_t layers);

/// The policy measured on this very model where one ships with the engine, else `fixed_list`.
policy default_policy(const model_identity& model);

/// Throws `error`, its argument starting with `where`, unless every number is in range and layers rise.
void check(const policy& checked, const std::string& where);

/// Every head reads every key: no lists, and nothing of what goes with them.
void clear_lists(policy& of);

/// Throws `error`, its argument starting with `where`, if a rule, or one of lists, names a layer that a model
/// of `layers` layers doesn't have.
void check_layers(const policy& checked, std::int32_t layers, const std::string& where);

/// "top-p", "fixed-ratio", ... and back, as policy files and options spell them. The parsers return false for
/// any other text.
const char* name_of(uniprefill::rule_kind kind);
const char* name_of(uniprefill::mass_scope scope);
const char* name_of(uniprefill::propagation mode);
const char* name_of(uniprefill::tie_order ties);
const char* name_of(uniprefill::crossing crossing);
bool parse(const std::string& text, uniprefill::rule_kind& kind);
bool parse(const std::string& text, uniprefill::mass_scope& scope);
bool parse(const std::string& text, uniprefill::propagation& mode);
bool parse(const std::string& text, uniprefill::tie_order& ties);
bool parse(const std::string& text, uniprefill::crossing& crossing);

/// One rule in words: "top-p 0.99, scope free".
std::string describe(const uniprefill::selection_rule& rule);

} // namespace engine
