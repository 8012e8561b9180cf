// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "oracle/oracle.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace oracle {

namespace {

__extension__ typedef __int128 wide;

/// A block that may be chosen.
struct candidate {
    int block = 0;
    wide mass = 0;              // over the scope
    std::vector<int> free_rows; // ascending
};

std::vector<candidate> ranked_candidates(const selection_problem& problem, const rule& how) {
    std::vector<candidate> found;
    for (int block = 0; block < static_cast<int>(problem.free_mass.size()); ++block) {
        const auto b = static_cast<std::size_t>(block);
        candidate one;
        one.block = block;
        one.mass = problem.free_mass[b];
        if (how.over == scope::all) {
            one.mass += problem.forced_mass[b];
        }
        for (int row = 0; row < static_cast<int>(problem.forced.size()); ++row) {
            if (row / problem.block_rows == block && !problem.forced[static_cast<std::size_t>(row)]) {
                one.free_rows.push_back(row);
            }
        }
        if (how.over == scope::all || !one.free_rows.empty()) {
            found.push_back(one);
        }
    }
    std::sort(found.begin(), found.end(), [&](const candidate& a, const candidate& b) {
        if (a.mass != b.mass) return a.mass > b.mass;
        return how.later_block_first ? a.block > b.block : a.block < b.block;
    });
    return found;
}

/// How many of the candidates the rule chooses.
std::size_t chosen(const std::vector<candidate>& ranked, const rule& how, wide total) {
    const wide one = static_cast<wide>(1) << 63;
    const wide fraction = static_cast<wide>(how.fraction);
    std::size_t count = 0;
    switch (how.kind) {
    case rule_kind::top_p: {
        if (fraction == one) return ranked.size();
        wide before = 0;
        while (count < ranked.size() && (before * one < fraction * total ||
                                         (how.keep_when_exactly_met && before * one == fraction * total))) {
            before += ranked[count++].mass;
        }
        return count;
    }
    case rule_kind::ratio:
        while (static_cast<wide>(count) * one < fraction * static_cast<wide>(ranked.size())) {
            ++count;
        }
        return count;
    case rule_kind::max_fraction:
        while (count < ranked.size() && ranked[count].mass * one >= fraction * ranked[0].mass) {
            ++count;
        }
        return count;
    case rule_kind::budget:
        return ranked.size();
    }
    return ranked.size();
}

/// Whether a mass is not one, or their sum doesn't fit.
bool is_sound(const std::vector<candidate>& candidates, const selection_problem& problem, const rule& how) {
    wide total = 0;
    for (const candidate& one : candidates) {
        const auto b = static_cast<std::size_t>(one.block);
        if (problem.free_mass[b] < 0 || (how.over == scope::all && problem.forced_mass[b] < 0)) return false;
        total += one.mass;
    }
    return total <= std::numeric_limits<std::int64_t>::max();
}

/// Keeps @p rows rows: forced ones first, of too many the latest, then the latest others.
std::vector<bool> latest_rows(const std::vector<bool>& forced, int rows) {
    std::vector<bool> keep(forced.size(), false);
    for (const bool wanted : {true, false}) {
        for (std::size_t row = forced.size(); row-- > 0 && rows > 0;) {
            if (forced[row] == wanted) {
                keep[row] = true;
                --rows;
            }
        }
    }
    return keep;
}

selected_rows keep_all(const selection_problem& problem, kept_because reason) {
    selected_rows out;
    out.keep.assign(problem.forced.size(), true);
    out.reason = reason;
    return out;
}

} // namespace

bool is_fault(kept_because reason) {
    return reason >= kept_because::non_finite;
}

std::uint64_t fraction(double number) {
    return static_cast<std::uint64_t>(std::floor(std::ldexp(static_cast<long double>(number), 63) + 0.5L));
}

selected_rows select(const selection_problem& problem, const rule& how) {
    const int rows = static_cast<int>(problem.forced.size());
    const int forced = static_cast<int>(std::count(problem.forced.begin(), problem.forced.end(), true));
    if (!problem.is_prefill) return keep_all(problem, kept_because::not_prefill);
    if (!problem.enabled) return keep_all(problem, kept_because::switched_off);
    if (rows == 0) return keep_all(problem, kept_because::empty);

    const std::vector<candidate> ranked = ranked_candidates(problem, how);
    wide total = 0;
    for (const candidate& one : ranked) {
        total += one.mass;
    }
    kept_because reason = kept_because::selected;
    if (rows < problem.min_length || forced == rows) {
        reason = kept_because::short_segment;
    } else if (problem.fault != kept_because::selected) {
        reason = problem.fault;
    } else if (!is_sound(ranked, problem, how)) {
        reason = kept_because::overflow;
    } else if (total == 0) {
        reason = kept_because::zero_mass;
    }
    const bool exact = how.kind == rule_kind::budget;
    if (exact && rows > how.budget && (reason != kept_because::selected || forced > how.budget)) {
        selected_rows out;
        out.keep = latest_rows(problem.forced, how.budget);
        out.reason = kept_because::rerun_dense;
        return out;
    }
    if (reason != kept_because::selected) return keep_all(problem, reason);

    int wanted = 0; // free rows
    const std::size_t count = chosen(ranked, how, total);
    for (std::size_t i = 0; i < count; ++i) {
        wanted += static_cast<int>(ranked[i].free_rows.size());
    }
    wanted = std::max(wanted, how.min_rows - forced);
    wanted = std::min(wanted, std::max(0, (exact ? how.budget : how.max_rows) - forced));

    selected_rows out;
    out.keep = problem.forced;
    out.total = static_cast<std::int64_t>(total);
    for (const candidate& one : ranked) {
        const int free_rows = static_cast<int>(one.free_rows.size());
        const int kept = std::min(free_rows, wanted);
        for (int i = 0; i < kept; ++i) {
            out.keep[static_cast<std::size_t>(one.free_rows[static_cast<std::size_t>(i)])] = true;
        }
        wanted -= kept;
        if (kept < free_rows) {
            const wide mass = problem.free_mass[static_cast<std::size_t>(one.block)];
            out.dropped += static_cast<std::int64_t>((mass * (free_rows - kept) + free_rows - 1) / free_rows);
        }
    }
    const bool all = std::all_of(out.keep.begin(), out.keep.end(), [](bool kept) { return kept; });
    out.reason = all ? kept_because::everything : kept_because::selected;
    return out;
}

} // namespace oracle
