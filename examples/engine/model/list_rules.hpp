// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <uniprefill/pipeline/policy.hpp>
#include <uniprefill/select/block_lister.hpp>
#include <uniprefill/select/rule.hpp>

#include <cstdint>
#include <optional>
#include <vector>

namespace engine {

/// Rules of block lists at layers that have their own, by rising layer.
using list_rules = std::vector<uniprefill::selecting_layer<uniprefill::selection_rule>>;

/// How the lists of a layer are made: as @p lists says, by the layer's own rule where there is one. None
/// where every key is read: without lists, and where top-p asks for all of the mass.
inline std::optional<uniprefill::list_options<>>
lists_at(const std::optional<uniprefill::list_options<>>& lists, const list_rules& own, std::int32_t layer) {
    if (!lists) return std::nullopt;
    uniprefill::list_options<> made = *lists;
    for (const auto& one : own) {
        if (one.layer == layer) made.rule = one.rule;
    }
    const bool all =
        made.rule.kind == uniprefill::rule_kind::top_p && made.rule.p.value == uniprefill::unit_fraction::one;
    if (all) return std::nullopt;
    return made;
}

} // namespace engine
