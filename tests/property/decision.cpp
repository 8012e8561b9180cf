// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "property/decision.hpp"

namespace property {

rule_pair top_p_rule(double p, oracle::scope over) {
    rule_pair made;
    made.ours = up::selection_rule::top_p(p, over == oracle::scope::free ? up::mass_scope::free
                                                                         : up::mass_scope::all);
    made.theirs.over = over;
    made.theirs.fraction = oracle::fraction(p);
    return made;
}

rule_pair random_rule(random_numbers& numbers, int rows) {
    const double p = numbers.one_of({1e-6, 0.25, 0.5, 0.75, 0.9, 0.98, 0.99, 0.999999, 1.0, -1.0});
    rule_pair made = top_p_rule(p < 0 ? 0.01 + 0.98 * numbers.unit() : p,
                                numbers.chance(0.5) ? oracle::scope::free : oracle::scope::all);
    const int kind = numbers.between(0, 5);
    if (kind == 3) {
        made.ours.kind = up::rule_kind::fixed_ratio;
        made.theirs.kind = oracle::rule_kind::ratio;
    } else if (kind == 4) {
        made.ours.kind = up::rule_kind::max_fraction;
        made.theirs.kind = oracle::rule_kind::max_fraction;
    } else if (kind == 5) {
        made.theirs.budget = numbers.between(1, rows + rows / 2 + 1);
        const up::mass_scope over = made.ours.scope;
        made.ours = up::selection_rule::fixed_budget(made.theirs.budget);
        made.ours.scope = over;
        made.theirs.kind = oracle::rule_kind::budget;
    }
    if (numbers.chance(0.3)) {
        made.ours.ties = up::tie_order::higher_block_first;
        made.theirs.later_block_first = true;
    }
    if (numbers.chance(0.3)) {
        made.ours.crossing = up::crossing::published;
        made.theirs.keep_when_exactly_met = true;
    }
    if (kind != 5 && numbers.chance(0.3)) {
        made.ours.min_kept_rows = made.theirs.min_rows = numbers.between(0, rows + 1);
    }
    if (kind != 5 && numbers.chance(0.3)) {
        made.ours.max_kept_rows = made.theirs.max_rows =
            numbers.between(std::max(1, made.theirs.min_rows), made.theirs.min_rows + rows + 1);
    }
    return made;
}

oracle::kept_because in_oracle_words(up::keep_reason reason) {
    switch (reason) {
    case up::keep_reason::selected:
        return oracle::kept_because::selected;
    case up::keep_reason::everything:
        return oracle::kept_because::everything;
    case up::keep_reason::empty:
        return oracle::kept_because::empty;
    case up::keep_reason::not_prefill:
        return oracle::kept_because::not_prefill;
    case up::keep_reason::switched_off:
        return oracle::kept_because::switched_off;
    case up::keep_reason::short_segment:
        return oracle::kept_because::short_segment;
    case up::keep_reason::non_finite:
        return oracle::kept_because::non_finite;
    case up::keep_reason::zero_mass:
        return oracle::kept_because::zero_mass;
    case up::keep_reason::unscored:
        return oracle::kept_because::unscored;
    case up::keep_reason::overflow:
        return oracle::kept_because::overflow;
    case up::keep_reason::rank:
        return oracle::kept_because::rank;
    case up::keep_reason::rerun_dense:
        return oracle::kept_because::rerun_dense;
    case up::keep_reason::invalid: // only of device arrays, which the oracle doesn't see
        break;
    }
    FAIL("a reason without a name: " << static_cast<int>(reason));
    return oracle::kept_because::selected;
}

oracle::kept_because fault_of(std::int64_t word) {
    if ((word & 0xffff) != 0) return oracle::kept_because::non_finite;
    if (((word >> 16) & 0xffff) != 0) return oracle::kept_because::unscored;
    if (((word >> 32) & 0xffff) != 0) return oracle::kept_because::overflow;
    return word != 0 ? oracle::kept_because::rank : oracle::kept_because::selected;
}

oracle::selection_problem selection_problem_of(const up::batch_view& batch, const up::mass_view& masses,
                                               int segment, int block_rows) {
    const int request = batch.request_of(segment);
    const int begin = batch.segment_begin(segment);
    const int rows = batch.segment_end(segment) - begin;
    const up::request_options options = batch.options_of(request);

    std::vector<oracle::range> spans;
    if (batch.forced.offsets != nullptr) {
        for (int i = batch.forced.offsets[request]; i < batch.forced.offsets[request + 1]; ++i) {
            spans.push_back({batch.forced.spans[i].begin, batch.forced.spans[i].end});
        }
    }
    oracle::selection_problem problem;
    problem.forced = oracle::forced_rows({batch.positions + begin, batch.positions + begin + rows},
                                         options.sink, options.tail, spans);
    const std::int64_t offset = begin / block_rows + segment;
    const int blocks = (rows + block_rows - 1) / block_rows;
    problem.free_mass.assign(masses.free + offset, masses.free + offset + blocks);
    problem.forced_mass.assign(masses.forced + offset, masses.forced + offset + blocks);
    problem.block_rows = block_rows;
    problem.is_prefill =
        batch.tags[request] == up::request_tag::prefill || batch.tags[request] == up::request_tag::chunk;
    problem.enabled = options.enabled != 0;
    problem.min_length = options.min_length;
    problem.fault = fault_of(masses.faults[segment]);
    return problem;
}

bool operator==(const kept_segment& a, const kept_segment& b) {
    return a.keep == b.keep && a.outcome.total_mass == b.outcome.total_mass &&
           a.outcome.dropped_mass == b.outcome.dropped_mass && a.outcome.rows == b.outcome.rows &&
           a.outcome.kept == b.outcome.kept && a.outcome.cut_block == b.outcome.cut_block &&
           a.outcome.cut_rows == b.outcome.cut_rows && a.outcome.reason == b.outcome.reason;
}

std::vector<kept_segment> consistent(const up::selection& decided, const up::batch_view& batch) {
    std::vector<kept_segment> kept(static_cast<std::size_t>(batch.num_segments));
    if (decided.identity) {
        CHECK(decided.kept_bound == batch.num_rows);
        for (int s = 0; s < batch.num_segments; ++s) {
            const int rows = batch.segment_end(s) - batch.segment_begin(s);
            kept[static_cast<std::size_t>(s)].keep.assign(static_cast<std::size_t>(rows), true);
        }
        return kept;
    }
    bool good = decided.num_rows == batch.num_rows && decided.num_segments == batch.num_segments &&
                decided.num_requests == batch.num_requests;
    int next = 0;
    for (int s = 0; s < batch.num_segments; ++s) {
        const int begin = batch.segment_begin(s);
        const up::segment_outcome& outcome = decided.outcomes[s];
        kept_segment& one = kept[static_cast<std::size_t>(s)];
        one.outcome = outcome;
        good = good && decided.cu_segments[s] == next;
        int free_rows_before = 0; // in the block
        for (int row = begin; row < batch.segment_end(s); ++row) {
            const int block = (row - begin) / decided.block_rows;
            free_rows_before = (row - begin) % decided.block_rows == 0 ? 0 : free_rows_before;
            const int to = decided.old_to_kept[row];
            one.keep.push_back(to >= 0);
            good = good && (to == -1 || (to == next && decided.kept_to_old[to] == row));
            next += to >= 0 ? 1 : 0;
            // What a reader who looks at bits and the cut alone would think.
            const bool is_forced = up::is_forced_row(batch, s, row);
            const bool by_bits =
                is_forced || decided.keeps_block(up::block_offset(s, begin, decided.block_rows) + block) ||
                (block == outcome.cut_block && free_rows_before < outcome.cut_rows);
            good = good && (by_bits == (to >= 0) || outcome.reason == up::keep_reason::rerun_dense);
            free_rows_before += is_forced ? 0 : 1;
        }
        good = good && outcome.rows == batch.segment_end(s) - begin &&
               outcome.kept == next - decided.cu_segments[s];
        // A fault that could keep everything did.
        good = good && (!up::is_fault(outcome.reason) || outcome.reason == up::keep_reason::rerun_dense ||
                        outcome.kept == outcome.rows);
    }
    good = good && decided.cu_segments[batch.num_segments] == next && decided.kept_bound >= next;
    for (int row = next; row < decided.kept_bound; ++row) {
        good = good && decided.kept_to_old[row] == -1;
    }
    for (int r = 0, s = 0; r < batch.num_requests; ++r) {
        while (s < batch.num_segments && batch.request_of(s) < r) {
            ++s;
        }
        const int first = s < batch.num_segments ? decided.cu_segments[s] : next;
        good = good && decided.cu_seqlens[r] == first;
    }
    good = good && decided.cu_seqlens[batch.num_requests] == next;
    CHECK(good);
    return kept;
}

std::vector<kept_segment> decide(const up::limits& bounds, const up::mass_view& masses,
                                 const up::batch_view& batch, const std::vector<up::selection_rule>& rules) {
    const up::block_selector<> selector(bounds);
    up::workspace count;
    static_cast<void>(up::selection::carve(count, bounds, up::memory_space::host));
    const aligned_memory arrays(count.bytes_used());
    const aligned_memory scratch(selector.workspace_bytes());
    up::workspace piece = arrays.view();
    up::selection decided = up::selection::carve(piece, bounds, up::memory_space::host);
    const up::status done = selector.run(masses, batch, rules.data(), decided, scratch.view(), {});
    char message[256];
    up::format(done, message, sizeof message);
    INFO("selector: " << message);
    REQUIRE(done.ok());
    return consistent(decided, batch);
}

} // namespace property
