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
/// where every key is read: without lists, and where a rule of its own is top-p with a p of 1.
inline std::optional<uniprefill::list_options<>>
lists_at(const std::optional<uniprefill::list_options<>>& lists, const list_rules& own, std::int32_t layer) {
    if (!lists) return std::nullopt;
    uniprefill::list_options<> made = *lists;
    for (const auto& one : own) {
        if (one.layer != layer) continue;
        const bool everything = one.rule.kind == uniprefill::rule_kind::top_p &&
                                one.rule.p.value == uniprefill::unit_fraction::one;
        if (everything) return std::nullopt;
        made.rule = one.rule;
    }
    return made;
}

} // namespace engine
