// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Masses -> keep set: the selector against the oracle, exactly, on random integers.

#include "property/decision.hpp"
#include "property/request.hpp"
#include "property/step.hpp"

using namespace property;

namespace {

std::vector<std::int64_t> random_masses(random_numbers& numbers, std::size_t count) {
    const int style = numbers.between(0, 5);
    std::vector<std::int64_t> masses(count, 0);
    for (std::int64_t& mass : masses) {
        switch (style) {
        case 0: // total zero
            break;
        case 1: // ties everywhere
            mass = std::int64_t{1} << 40;
            break;
        case 2: // few values, some zero
            mass = numbers.between(0, 3);
            break;
        case 3: // near the top of the format
            mass = static_cast<std::int64_t>(numbers.next() >> 3) / static_cast<std::int64_t>(count + 1);
            break;
        case 4: // long-tailed
            mass = static_cast<std::int64_t>(numbers.next() >> numbers.between(4, 60)) /
                   static_cast<std::int64_t>(count + 1);
            break;
        default: // quarters of a total, so that p is met exactly
            mass = std::int64_t{1} << numbers.between(20, 22);
            break;
        }
    }
    if (count > 0 && numbers.chance(0.1)) { // all mass on one block
        masses.assign(count, 0);
        masses[numbers.next() % count] = std::int64_t{1} << 50;
    }
    return masses;
}

std::vector<request> random_requests(random_numbers& numbers, const shape& of) {
    std::vector<request> requests;
    for (int count = numbers.between(0, 4); count > 0; --count) {
        request_wishes wishes;
        const int lengths[] = {0, 1, of.block_rows - 1, of.block_rows, of.block_rows + 1, -1, -1, -1};
        wishes.rows = numbers.one_of(lengths);
        wishes.segments = numbers.chance(0.3) ? numbers.between(1, 4) : 1;
        wishes.gaps = numbers.chance(0.5);
        wishes.spans = numbers.chance(0.4);
        wishes.tag = numbers.chance(0.8) ? up::request_tag::prefill : up::request_tag::verify;
        requests.push_back(random_request(numbers, of, wishes, rounding::f32));
        requests.back().options.enabled = numbers.chance(0.9) ? 1 : 0;
        requests.back().options.min_length = numbers.chance(0.2) ? numbers.between(0, 40) : 0;
    }
    return requests;
}

} // namespace

TEST_CASE("selection equals the oracle's for the same masses") {
    const int cases = scaled(8000);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        shape of;
        of.dim = 1;
        of.block_rows = numbers.one_of({8, 9, 16, 64});
        const std::vector<request> requests = random_requests(numbers, of);
        const step<float> packed(requests, of);
        const up::batch_view batch = packed.batch();
        const up::limits bounds = packed.limits();

        std::vector<std::int64_t> buffer(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)),
                                         -77); // nobody's blocks must not be read
        const up::mass_view masses = up::mass_view::over(buffer.data(), bounds, up::memory_space::host);
        std::vector<rule_pair> rules;
        std::vector<up::selection_rule> ours;
        for (const request& one : requests) {
            rules.push_back(random_rule(numbers, one.rows()));
            ours.push_back(rules.back().ours);
        }
        for (int s = 0; s < batch.num_segments; ++s) {
            const int begin = batch.segment_begin(s);
            const int rows = batch.segment_end(s) - begin;
            const auto blocks = static_cast<std::size_t>(up::num_blocks(rows, of.block_rows));
            const std::int64_t offset = up::block_offset(s, begin, of.block_rows);
            const std::vector<std::int64_t> free = random_masses(numbers, blocks);
            const std::vector<std::int64_t> forced = random_masses(numbers, blocks);
            std::copy(free.begin(), free.end(), masses.free + offset);
            std::copy(forced.begin(), forced.end(), masses.forced + offset);
            for (int row = 0; row < rows; row += of.block_rows) { // blocks of forced rows have no free mass
                bool any = false;
                for (int r = row; r < std::min(rows, row + of.block_rows); ++r) {
                    any = any || !up::is_forced_row(batch, s, begin + r);
                }
                if (!any) masses.free[offset + row / of.block_rows] = 0;
            }
            masses.faults[s] = numbers.chance(0.1)
                                   ? up::fault_word(static_cast<up::mass_fault>(numbers.between(0, 3))) *
                                         numbers.between(1, 9)
                                   : 0;
        }
        const std::vector<kept_segment> kept = decide(bounds, masses, batch, ours);
        for (int s = 0; s < batch.num_segments; ++s) {
            INFO("segment " << s);
            const auto& rule = rules[static_cast<std::size_t>(batch.request_of(s))].theirs;
            const oracle::selected_rows wanted =
                oracle::select(selection_problem_of(batch, masses, s, of.block_rows), rule);
            const kept_segment& one = kept[static_cast<std::size_t>(s)];
            REQUIRE(in_oracle_words(one.outcome.reason) == wanted.reason);
            REQUIRE(one.keep == wanted.keep);
            REQUIRE(one.outcome.total_mass == wanted.total);
            REQUIRE(one.outcome.dropped_mass == wanted.dropped);
        }
    }
}

// p = w / 2^53 and total = +-1/w mod 2^53 put p * total within 2^-53 of an integer, on a known side: no
// floating point and no product that loses its low bits can tell the sides apart.
TEST_CASE("selection is exact where a running sum misses p of the total by a hair") {
    const std::uint64_t modulus = std::uint64_t{1} << 53;
    const int cases = scaled(2000);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        const std::uint64_t w = (modulus / 2 + numbers.next() % (modulus / 2)) | 1;
        std::uint64_t inverse = w;
        for (int step_of_newton = 0; step_of_newton < 6; ++step_of_newton) {
            inverse *= 2 - w * inverse;
        }
        for (const bool above : {false, true}) { // where the sum lies, seen from p * total
            const std::uint64_t total = (above ? std::uint64_t{0} - inverse : inverse) % modulus;
            __extension__ typedef unsigned __int128 wide;
            const auto floor = static_cast<std::uint64_t>(static_cast<wide>(w) * total >> 53);
            const auto heavy = static_cast<std::int64_t>(floor + (above ? 1 : 0));
            const std::int64_t light = static_cast<std::int64_t>(total) - heavy;
            if (light <= 0 || heavy <= light) {
                continue;
            }
            shape of;
            of.dim = 1;
            request one;
            one.options = {1, 0, 0, 0};
            one.span_rows = {16};
            one.q = oracle::tensor(16, 1, 1);
            one.k = one.q;
            for (int row = 0; row < 16; ++row) {
                one.positions.push_back(row);
            }
            const step<float> packed({one}, of);
            std::vector<std::int64_t> buffer(
                static_cast<std::size_t>(up::mass_view::rank_buffer_size(packed.limits())), 0);
            const auto masses = up::mass_view::over(buffer.data(), packed.limits(), up::memory_space::host);
            masses.free[0] = light;
            masses.free[1] = heavy;
            for (const auto crossing : {up::crossing::minimal, up::crossing::published}) {
                auto rule = up::selection_rule::top_p(static_cast<double>(w) * 0x1p-53);
                rule.crossing = crossing;
                const auto kept = decide(packed.limits(), masses, packed.batch(), {rule});
                REQUIRE(kept[0].outcome.kept == (above ? 8 : 16));
                REQUIRE(kept[0].keep[8]);
            }
        }
    }
}
