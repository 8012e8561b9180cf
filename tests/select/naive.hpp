// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// The decision about one segment, told again in the plainest way: sets, vectors and 128-bit integers.

#include "step.hpp"

#include <algorithm>
#include <numeric>
#include <set>

namespace select_test {

__extension__ using uint128 = unsigned __int128;

/// sum / total compared with a share of 2^-63: below 0, 0, or above 0.
inline int compare_share(std::int64_t part, up::unit_fraction share, std::int64_t total) {
    const uint128 left = static_cast<uint128>(part) << 63;
    const uint128 right = static_cast<uint128>(share.value) * static_cast<uint128>(total);
    return left < right ? -1 : left > right ? 1 : 0;
}

struct naive_outcome {
    std::set<std::int32_t> kept; ///< packed rows
    std::int64_t places = 0;
    up::segment_outcome told{};
};

/// Blocks by rank that the rule keeps, from masses by rank.
inline std::size_t naive_count(const up::selection_rule& rule, const std::vector<std::int64_t>& masses,
                               std::int64_t total) {
    std::size_t count = 0;
    std::int64_t sum = 0;
    for (const std::int64_t mass : masses) {
        bool stays = true;
        switch (rule.kind) {
        case up::rule_kind::top_p:
            stays = count == 0 || rule.p.value == up::unit_fraction::one ||
                    (rule.crossing == up::crossing::minimal ? compare_share(sum, rule.p, total) < 0
                                                            : compare_share(sum, rule.p, total) <= 0);
            break;
        case up::rule_kind::fixed_ratio:
            // count < p * n, so count + 1 blocks are needed
            stays = (static_cast<uint128>(count) << 63) < static_cast<uint128>(rule.p.value) * masses.size();
            break;
        case up::rule_kind::max_fraction:
            stays = compare_share(mass, rule.p, masses[0]) >= 0;
            break;
        case up::rule_kind::fixed_budget:
            break;
        }
        if (!stays) {
            break;
        }
        sum += mass;
        ++count;
    }
    return count;
}

inline naive_outcome naive_decision(step& what, std::int32_t segment) {
    const up::batch_view batch = what.batch();
    const std::int32_t request = batch.request_of(segment);
    const up::selection_rule& rule = what.rules[static_cast<std::size_t>(request)];
    const up::request_options& options = what.options[static_cast<std::size_t>(request)];
    const std::int32_t g = what.bounds.block_rows;
    const std::int32_t begin = what.begin(segment);
    const std::int32_t end = what.end(segment);
    const bool has_budget = rule.kind == up::rule_kind::fixed_budget;

    naive_outcome result;
    result.told.rows = end - begin;
    std::set<std::int32_t> everything;
    std::set<std::int32_t> forced;
    for (std::int32_t row = begin; row < end; ++row) {
        everything.insert(row);
        if (up::is_forced_row(batch, segment, row)) {
            forced.insert(row);
        }
    }
    const auto finish = [&](up::keep_reason reason) {
        result.told.kept = static_cast<std::int32_t>(result.kept.size());
        result.told.reason = reason;
        if (result.places == 0) {
            result.places = result.told.kept;
        }
        return result;
    };
    if (batch.tags[request] == up::request_tag::decode || batch.tags[request] == up::request_tag::verify) {
        result.kept = everything;
        return finish(up::keep_reason::not_prefill);
    }
    if (options.enabled == 0) {
        result.kept = everything;
        return finish(up::keep_reason::switched_off);
    }
    if (has_budget) {
        result.places = rule.budget_rows;
    }
    if (everything.empty()) {
        return finish(up::keep_reason::empty);
    }
    const auto doubt = [&](up::keep_reason reason) {
        if (!has_budget || static_cast<std::int32_t>(everything.size()) <= rule.budget_rows) {
            result.kept = everything;
            return finish(reason);
        }
        // Forced rows, then the others, latest first each.
        std::vector<std::int32_t> order(forced.rbegin(), forced.rend());
        for (auto row = everything.rbegin(); row != everything.rend(); ++row) {
            if (forced.count(*row) == 0) {
                order.push_back(*row);
            }
        }
        result.kept = std::set<std::int32_t>(order.begin(), order.begin() + rule.budget_rows);
        return finish(up::keep_reason::rerun_dense);
    };
    if (result.told.rows < options.min_length || forced == everything) {
        return doubt(up::keep_reason::short_segment);
    }
    const auto word = static_cast<std::uint64_t>(what.fault(segment));
    if ((word & 0xffffu) != 0) return doubt(up::keep_reason::non_finite);
    if ((word >> 16 & 0xffffu) != 0) return doubt(up::keep_reason::unscored);
    if ((word >> 32 & 0xffffu) != 0) return doubt(up::keep_reason::overflow);
    if ((word >> 48 & 0xffffu) != 0) return doubt(up::keep_reason::rank);

    struct block {
        std::int32_t index;
        std::int64_t mass;
        std::int64_t free_mass;
        std::vector<std::int32_t> free_rows;
    };
    std::vector<block> blocks;
    uint128 total = 0;
    for (std::int32_t b = 0; b < what.blocks_of(segment); ++b) {
        block next{b, 0, what.free_mass(segment, b), {}};
        for (std::int32_t row = begin + b * g; row < std::min(end, begin + (b + 1) * g); ++row) {
            if (forced.count(row) == 0) {
                next.free_rows.push_back(row);
            }
        }
        if (rule.scope == up::mass_scope::free && next.free_rows.empty()) {
            continue;
        }
        if (next.free_mass < 0 || (rule.scope == up::mass_scope::all && what.forced_mass(segment, b) < 0)) {
            return doubt(up::keep_reason::overflow);
        }
        const uint128 mass =
            static_cast<uint128>(next.free_mass) +
            (rule.scope == up::mass_scope::all ? static_cast<uint128>(what.forced_mass(segment, b)) : 0);
        total += mass;
        next.mass = static_cast<std::int64_t>(mass);
        blocks.push_back(next);
    }
    if (total > static_cast<uint128>(INT64_MAX)) {
        return doubt(up::keep_reason::overflow);
    }
    if (total == 0) {
        return doubt(up::keep_reason::zero_mass);
    }
    if (has_budget && static_cast<std::int32_t>(forced.size()) > rule.budget_rows) {
        return doubt(up::keep_reason::rerun_dense);
    }
    // Insertion of each block before the first that it outranks.
    std::vector<block> ranked;
    for (const block& next : blocks) {
        auto place = ranked.begin();
        while (place != ranked.end() &&
               (place->mass > next.mass ||
                (place->mass == next.mass && rule.ties == up::tie_order::lower_block_first))) {
            ++place;
        }
        ranked.insert(place, next);
    }
    std::vector<std::int64_t> masses;
    for (const block& next : ranked) {
        masses.push_back(next.mass);
    }
    const std::size_t chosen = naive_count(rule, masses, static_cast<std::int64_t>(total));
    result.told.total_mass = static_cast<std::int64_t>(total);
    // Rows one by one in order of rank, until the bounds say stop.
    result.kept = forced;
    for (std::size_t k = 0; k < ranked.size(); ++k) {
        std::int32_t taken = 0;
        for (const std::int32_t row : ranked[k].free_rows) {
            const auto kept = static_cast<std::int32_t>(result.kept.size());
            const bool wanted = has_budget
                                    ? kept < rule.budget_rows
                                    : (k < chosen || kept < rule.min_kept_rows) && kept < rule.max_kept_rows;
            if (!wanted) {
                break;
            }
            result.kept.insert(row);
            ++taken;
        }
        const auto rows = static_cast<std::int32_t>(ranked[k].free_rows.size());
        if (taken < rows) {
            const uint128 lost =
                static_cast<uint128>(ranked[k].free_mass) * static_cast<uint128>(rows - taken);
            result.told.dropped_mass += static_cast<std::int64_t>((lost + static_cast<uint128>(rows - 1)) /
                                                                  static_cast<uint128>(rows));
            if (taken > 0) {
                result.told.cut_block = ranked[k].index;
                result.told.cut_rows = taken;
            }
        }
    }
    return finish(result.kept == everything ? up::keep_reason::everything : up::keep_reason::selected);
}

} // namespace select_test
