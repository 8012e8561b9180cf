// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Decisions that are taken when the prompt ends: layers give up positions that they hold.

#include "ledger/refusals.hpp"

#include "property/random.hpp"

#include <algorithm>

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

/// Layers 0 to 4, of which 0 and 2 select; request 0 has 300 positions in every layer, and 20 decoded ones.
owned_ledger make_server(set_relation relation) {
    owned_ledger owner = make_ledger({0, 2}, 5, relation);
    must(owner.ledger.admit(0));
    open_step(owner, {{0, request_tag::prefill, range(0, 300), range(0, 300)}}, 1).commit();
    open_step(owner, {{0, request_tag::decode, range(300, 320), range(300, 320)}}, 1).commit();
    return owner;
}

positions keep(owned_ledger& owner, std::int32_t layer, const positions& kept) {
    positions from(kept.size());
    must(owner.ledger.keep_only(0, layer, kept.data(), static_cast<std::int32_t>(kept.size()), from.data()));
    return from;
}

positions join(positions first, const positions& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

} // namespace

TEST_CASE("layers give up positions when the prompt ends", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested); // sets 0 1 1 2 2
    const positions last = join({0, 7, 200}, range(295, 320));
    const positions first = join({0, 5, 7, 64, 200}, range(290, 320));
    CHECK(keep(owner, 4, last) == last); // every row was held: rows are positions
    CHECK(owner.held(0, 3) == last);
    CHECK(owner.held(0, 2) == range(0, 320));
    CHECK(keep(owner, 1, first) == first);
    CHECK(owner.held(0, 0) == range(0, 320));
    CHECK(owner.held(0, 1) == first);
    CHECK(owner.held(0, 2) == first);
    CHECK(owner.held(0, 4) == last);
    // Again: rows are those of what is left.
    const positions fewer = join({7}, range(300, 320));
    CHECK(keep(owner, 3, fewer) == join({1}, range(8, 28)));
    CHECK(owner.held(0, 4) == fewer);
    CHECK(owner.held(0, 1) == first);
    // And the request goes on.
    open_step step(owner, {{0, request_tag::decode, {320}, {320}}}, 1);
    CHECK(step.write_rows(0) == positions{320});
    CHECK(step.write_rows(1) == positions{35});
    CHECK(step.write_rows(4) == positions{21});
    step.commit();
    must(owner.ledger.rollback(0, 100));
    CHECK(owner.held(0, 1) == positions{0, 5, 7, 64});
    CHECK(owner.held(0, 4) == positions{7});
    CHECK(owner.canaries_intact());
}

TEST_CASE("what is decoded stays without being stored", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested);
    std::size_t all = 0;
    keep(owner, 4, join({0}, range(128, 320)));
    must(owner.ledger.saved_bytes(0, all));
    CHECK(all == 48 + 5 * 4 + 3 * 4 + 2 * 2 * 8); // two planes of two words: 128 positions
    const std::vector<std::byte> before = owner.snapshot();
    CHECK(keep(owner, 4, join({0}, range(128, 320))) == range(0, 193)); // nothing given up
    CHECK(owner.is(before));
}

TEST_CASE("independent sets give up each for itself", "[ledger]") {
    owned_ledger owner = make_server(set_relation::independent); // sets 0 1 0 2 2
    keep(owner, 1, {3, 4, 319});
    CHECK(owner.held(0, 1) == positions{3, 4, 319});
    CHECK(owner.held(0, 3) == range(0, 320));
    keep(owner, 4, {});
    CHECK(owner.held(0, 3).empty());
    CHECK(owner.held(0, 1) == positions{3, 4, 319});
    CHECK(owner.held(0, 2) == range(0, 320));
    open_step step(owner, {{0, request_tag::decode, {320}, {320}}}, 1);
    CHECK(step.write_rows(4) == positions{0});
    step.abort();
    CHECK(owner.canaries_intact());
}

TEST_CASE("giving up at the end holds what dropping on the way would have held", "[ledger]") {
    property::random_numbers random(property::base_seed());
    for (int round = property::scaled(200); round > 0; --round) {
        const set_relation relation = round % 2 == 0 ? set_relation::nested : set_relation::independent;
        owned_ledger late = make_ledger({0, 2}, 5, relation, 700);
        owned_ledger early = make_ledger({0, 2}, 5, relation, 700);
        must(late.ledger.admit(0));
        must(early.ledger.admit(0));
        positions first;
        positions second;
        const std::int32_t length = random.between(1, 700);
        for (std::int32_t position = 0; position < length; ++position) {
            if (random.chance(0.5)) {
                first.push_back(position);
                if (random.chance(0.5)) {
                    second.push_back(position);
                }
            }
        }
        open_step(late, {{0, request_tag::prefill, range(0, length), range(0, length)}}, 1).commit();
        open_step step(early, {{0, request_tag::prefill, range(0, length), first}}, 1);
        rows_batch entering;
        entering.add(0, request_tag::prefill, second);
        must(early.ledger.append(step.step, 3, entering.view()));
        step.commit();
        CHECK(keep(late, 3, second) == second);
        CHECK(keep(late, 1, first) == first);
        for (std::int32_t layer = 0; layer < 5; ++layer) {
            REQUIRE(late.held(0, layer) == early.held(0, layer));
        }
        const std::int32_t left = random.between(0, length);
        must(late.ledger.rollback(0, left));
        must(early.ledger.rollback(0, left));
        for (std::int32_t layer = 0; layer < 5; ++layer) {
            REQUIRE(late.held(0, layer) == early.held(0, layer));
        }
        must(late.ledger.release(0));
        must(early.ledger.release(0));
        REQUIRE(late.is(early.snapshot()));
    }
}

TEST_CASE("what can't be given up", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested);
    keep(owner, 3, join({4, 9}, range(300, 320)));
    const auto refuse = [&](std::int32_t request, std::int32_t layer, const positions& kept, status_code code,
                            const std::string& argument) {
        const std::vector<std::byte> before = owner.snapshot();
        positions from(kept.size(), -7);
        check_refused(owner.ledger.keep_only(request, layer, kept.data(),
                                             static_cast<std::int32_t>(kept.size()), from.data()),
                      code, argument, request, layer);
        CHECK(owner.is(before));
        CHECK(from == positions(kept.size(), -7));
    };
    const auto bad = status_code::invalid_argument;
    refuse(1, 1, {4}, status_code::unknown_request, "request");
    refuse(0, 5, {4}, status_code::out_of_range, "layer");
    refuse(0, 0, range(0, 320), bad, "layer"); // set 0 holds everything
    refuse(0, 3, {4, 4}, bad, "positions");
    refuse(0, 3, {9, 4}, bad, "positions");
    refuse(0, 3, {-1, 4}, bad, "positions");
    refuse(0, 3, {4, 320}, bad, "positions");
    refuse(0, 3, {4, 5}, bad, "positions");                     // not held
    refuse(0, 1, join({4}, range(300, 320)), bad, "positions"); // 9 is held by layer 3
    std::int32_t* const nowhere = nullptr;
    check_refused(owner.ledger.keep_only(0, 3, nullptr, 1, nowhere), bad, "positions", 0, 3);
    check_refused(owner.ledger.keep_only(0, 3, nullptr, -1, nowhere), bad, "positions", 0, 3);
    open_step step(owner, {{0, request_tag::decode, {320}, {320}}}, 1);
    refuse(0, 3, {4}, status_code::wrong_state, "request");
    step.abort();
    const positions one{9};
    must(owner.ledger.keep_only(0, 3, one.data(), 1, nowhere));
    CHECK(owner.held(0, 4) == one);
}
