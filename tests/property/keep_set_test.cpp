// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Estimate, then select: the keep set against the oracle's, from queries and keys to rows. They may differ
// where a block lies within the estimator's rounding of the cut, and nowhere else; such blocks are counted.

#include "property/estimate.hpp"

#include <iostream>

using namespace property;

namespace {

/// What a mass may be off by, as a share of all observers' mass: see importance_estimator::run().
constexpr double rounding_error = 1e-6;

struct tally {
    std::int64_t blocks = 0;
    std::int64_t near_cut = 0; // kept differently, and within rounding of the cut
    std::int64_t wrong = 0;    // kept differently, and not
};

/// Whether rounding may decide about a block: with masses moved by their error it could be on either side.
bool is_near_cut(const std::vector<double>& masses, std::size_t block, double p, double observed) {
    const double error = rounding_error * observed;
    double total = 0;
    double surely_before = 0; // the mass of blocks that rank before it whatever rounding does
    double maybe_before = 0;
    for (std::size_t other = 0; other < masses.size(); ++other) {
        total += masses[other];
        if (other == block) continue;
        surely_before += masses[other] > masses[block] + 2 * error ? masses[other] : 0;
        maybe_before += masses[other] >= masses[block] - 2 * error ? masses[other] : 0;
    }
    const bool surely_kept = maybe_before < p * total - 2 * error;
    const bool surely_dropped = surely_before > p * total + 2 * error;
    return !surely_kept && !surely_dropped;
}

request_wishes small_wishes(random_numbers& numbers, const shape& of, key_style style) {
    request_wishes wishes;
    wishes.rows = numbers.between(1, 12 * of.block_rows);
    wishes.cached = numbers.chance(0.2) ? numbers.between(1, 40) : 0;
    wishes.tag = wishes.cached > 0 ? up::request_tag::chunk : up::request_tag::prefill;
    wishes.gaps = numbers.chance(0.3);
    wishes.spans = numbers.chance(0.3);
    wishes.style = style;
    return wishes;
}

/// What a comparison draws from.
struct choices {
    bool round_p = true;   ///< p that an exact sum may meet exactly, such as 0.5
    bool all_scope = true; ///< mass_scope::all too
};

template <class Element>
tally compare(rounding to, key_style style, int cases, const choices& among = {}) {
    tally counted;
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case), style " << static_cast<int>(style));
        random_numbers numbers(seed);
        shape of;
        of.kv_heads = numbers.between(1, 2);
        of.heads = of.kv_heads * numbers.between(1, 3);
        of.dim = numbers.one_of({4, 8, 16, 32});
        of.block_rows = numbers.one_of({8, 12, 16});
        of.observations = numbers.one_of({1, 4, 8});
        of.score.scale = 1 / std::sqrt(static_cast<double>(of.dim));
        of.score.scale = static_cast<double>(static_cast<float>(of.score.scale));
        const request one = random_request(numbers, of, small_wishes(numbers, of, style), to);
        const double ps[] = {1e-6, 0.5, 0.9, 0.98, 0.99, -1, -1};
        const double drawn = among.round_p ? numbers.one_of(ps) : -1;
        const double p = drawn > 0 ? drawn : numbers.unit() * 0.999 + 0.0005;
        const bool all = among.all_scope && numbers.chance(0.3);
        const rule_pair rule = top_p_rule(p, all ? oracle::scope::all : oracle::scope::free);

        const std::vector<request> requests{one};
        const step<Element> packed(requests, of);
        const key_caches<Element> caches(requests, of, numbers);
        estimated ours = estimate(packed, of, caches.token_slots(), packed.limits());
        const auto kept = decide(ours.bounds, ours.masses(), packed.batch(), {rule.ours});

        const oracle::segment_problem problem = problem_of(one, 0, of);
        const oracle::block_masses masses = oracle::masses_of(problem);
        oracle::selection_problem choice;
        choice.forced = problem.forced;
        choice.block_rows = of.block_rows;
        std::vector<double> ranked_by;
        const double unit = 0x1p50; // far finer than the estimator's rounding
        for (std::size_t block = 0; block < masses.free.size(); ++block) {
            choice.free_mass.push_back(static_cast<std::int64_t>(masses.free[block] * unit));
            choice.forced_mass.push_back(static_cast<std::int64_t>(masses.forced[block] * unit));
            ranked_by.push_back(masses.free[block] + (all ? masses.forced[block] : 0));
        }
        const oracle::selected_rows wanted = oracle::select(choice, rule.theirs);
        counted.blocks += static_cast<std::int64_t>(ranked_by.size());
        if (kept[0].keep == wanted.keep) {
            continue;
        }
        const double observed = static_cast<double>(problem.observers.size()) * of.heads;
        for (std::size_t block = 0; block < ranked_by.size(); ++block) {
            const std::size_t begin = block * static_cast<std::size_t>(of.block_rows);
            const std::size_t end =
                std::min(begin + static_cast<std::size_t>(of.block_rows), wanted.keep.size());
            bool same = true;
            for (std::size_t row = begin; row < end; ++row) {
                same = same && kept[0].keep[row] == wanted.keep[row];
            }
            if (same) continue;
            if (is_near_cut(ranked_by, block, p, observed)) {
                ++counted.near_cut;
            } else {
                ++counted.wrong;
                FAIL_CHECK("block " << block << " of mass " << ranked_by[block] << ", p " << p << ": "
                                    << describe(one, of));
            }
        }
    }
    return counted;
}

void report(const char* name, const tally& counted) {
    std::cout << name << ": " << counted.blocks << " blocks, " << counted.near_cut
              << " within rounding of the cut kept otherwise, " << counted.wrong << " wrong" << std::endl;
}

} // namespace

TEST_CASE("keep sets are the oracle's, float") {
    const tally plain = compare<float>(rounding::f32, key_style::plain, scaled(5000));
    const tally sharp = compare<float>(rounding::f32, key_style::sharp, scaled(5000));
    const tally one_block = compare<float>(rounding::f32, key_style::one_block, scaled(1000));
    report("float, plain", plain);
    report("float, sharp", sharp);
    report("float, all mass on one block", one_block);
    CHECK(plain.wrong + sharp.wrong + one_block.wrong == 0);
    CHECK(plain.near_cut + sharp.near_cut + one_block.near_cut == 0);
}

TEST_CASE("keep sets are the oracle's, bfloat16") {
    const tally plain = compare<up::bfloat16>(rounding::bf16, key_style::plain, scaled(2000));
    const tally sharp = compare<up::bfloat16>(rounding::bf16, key_style::sharp, scaled(2000));
    report("bfloat16, plain", plain);
    report("bfloat16, sharp", sharp);
    CHECK(plain.wrong + sharp.wrong == 0);
    CHECK((plain.near_cut + sharp.near_cut) * 10000 <= plain.blocks + sharp.blocks);
}

// Blocks of equal keys have equal masses, bit for bit, so that ties go by index here too. Not so where a
// forced boundary cuts a block: its two numbers are rounded apart, and their sum (mass_scope::all) may miss
// the tie.
TEST_CASE("keep sets are the oracle's where blocks tie") {
    const tally exact = compare<float>(rounding::f32, key_style::tied, scaled(2000), {false, false});
    report("float, every key the same", exact);
    CHECK(exact.wrong + exact.near_cut == 0);
    const tally tied = compare<float>(rounding::f32, key_style::tied, scaled(500));
    const tally few = compare<float>(rounding::f32, key_style::few, scaled(1000));
    report("float, every key the same, cut blocks and p met exactly", tied);
    report("float, three keys in any order", few);
    CHECK(tied.wrong + few.wrong == 0);
}
