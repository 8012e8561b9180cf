// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A request as a flat buffer: to another slot, another ledger, and back; and every buffer that is none.

#include "ledger/forged.hpp"
#include "ledger/refusals.hpp"

#include "property/random.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

bytes save(owned_ledger& owner, std::int32_t request) {
    std::size_t size = 0;
    must(owner.ledger.saved_bytes(request, size));
    CHECK(size <= up::drop_ledger<>::max_saved_bytes(owner.ledger.bounds()));
    bytes saved(size + 9, std::byte{0x5a});
    must(owner.ledger.save(request, saved.data() + 1, size)); // any alignment
    CHECK((saved.front() == std::byte{0x5a} && saved[size + 1] == std::byte{0x5a}));
    return {saved.begin() + 1, saved.begin() + 1 + static_cast<std::ptrdiff_t>(size)};
}

/// Layers 0 to 4, of which 0 and 2 select. Request 0: 700 positions, the first 600 with drops.
owned_ledger make_server(set_relation relation, std::int32_t max_tokens = 2048) {
    owned_ledger owner = make_ledger({0, 2}, 5, relation, max_tokens);
    must(owner.ledger.admit(0));
    open_step step(owner, {{0, request_tag::chunk, range(0, 600), every(3, 0, 600)}}, 1);
    rows_batch fewer;
    fewer.add(0, request_tag::chunk, every(6, 0, 600));
    must(owner.ledger.append(step.step, 3, fewer.view()));
    step.commit();
    open_step(owner, {{0, request_tag::verify, range(600, 700), range(600, 700)}}, 1).commit();
    return owner;
}

void check_same(owned_ledger& one, std::int32_t request, owned_ledger& other, std::int32_t copy) {
    for (std::int32_t layer = 0; layer < 5; ++layer) {
        CHECK(one.held(request, layer) == other.held(copy, layer));
        CHECK(one.rows(request, layer).num_tokens() == other.rows(copy, layer).num_tokens());
    }
}

} // namespace

TEST_CASE("a request is swapped out and comes back to another slot, or another ledger", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        owned_ledger owner = make_server(relation);
        owned_ledger before = make_server(relation);
        const bytes saved = save(owner, 0);
        CHECK(save(before, 0) == saved); // the state alone decides
        must(owner.ledger.release(0));
        must(owner.ledger.admit(0)); // somebody else has the slot now
        must(owner.ledger.admit(3));
        must(owner.ledger.restore(3, saved.data(), saved.size()));
        check_same(before, 0, owner, 3);
        CHECK(owner.held(0, 0).empty());
        CHECK(save(owner, 3) == saved);

        owned_ledger elsewhere = make_ledger({0, 2}, 5, relation, 700, 1);
        must(elsewhere.ledger.admit(0));
        must(elsewhere.ledger.restore(0, saved.data(), saved.size()));
        check_same(before, 0, elsewhere, 0);
        CHECK(elsewhere.canaries_intact());

        // And it goes on: decode, a chunk with drops, a rollback into the first chunk.
        for (owned_ledger* ledger : {&before, &owner}) {
            const std::int32_t id = ledger == &before ? 0 : 3;
            open_step(*ledger, {{id, request_tag::decode, {700}, {700}}}, 1).commit();
            open_step(*ledger, {{id, request_tag::chunk, range(701, 900), every(50, 701, 900)}}, 1).commit();
        }
        check_same(before, 0, owner, 3);
        must(before.ledger.rollback(0, 333));
        must(owner.ledger.rollback(3, 333));
        check_same(before, 0, owner, 3);
        must(owner.ledger.release(3));
        must(owner.ledger.release(0));
        CHECK(owner.canaries_intact());
    }
}

TEST_CASE("an empty request and one without drops take little", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    must(owner.ledger.admit(0));
    must(owner.ledger.admit(1));
    const bytes empty = save(owner, 0);
    open_step(owner, {{0, request_tag::prefill, range(0, 2000), range(0, 2000)}}, 1).commit();
    const bytes dense = save(owner, 0);
    CHECK(dense.size() == empty.size());
    CHECK(dense.size() == 48 + 5 * 4 + 3 * 4);
    must(owner.ledger.restore(1, dense.data(), dense.size()));
    CHECK(owner.held(1, 4) == range(0, 2000));
    must(owner.ledger.rollback(1, 0));
    must(owner.ledger.restore(1, empty.data(), empty.size()));
    CHECK(owner.rows(1, 0).num_tokens() == 0);
}

TEST_CASE("the header tells an engine what a request takes", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested);
    const bytes saved = save(owner, 0);
    up::saved_header header;
    std::memcpy(&header, saved.data(), sizeof header);
    CHECK(header.magic == up::saved_header::magic_number);
    CHECK(header.version == up::saved_request_version);
    CHECK(header.bytes == saved.size());
    CHECK(header.num_tokens == 700);
    CHECK(header.dense_from == 600);
    CHECK(header.num_layers == 5);
    CHECK(header.num_sets == 3);
}

TEST_CASE("damaged, cut and foreign buffers are refused and change nothing", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        owned_ledger owner = make_server(relation);
        must(owner.ledger.admit(2));
        const bytes good = save(owner, 0);
        const auto refuse = [&](const bytes& saved, status_code code, const std::string& argument,
                                std::int32_t layer = -1) {
            const bytes before = owner.snapshot();
            check_refused(owner.ledger.restore(2, saved.data(), saved.size()), code, argument, 2, layer);
            CHECK(owner.is(before));
        };
        const auto bad = status_code::invalid_argument;
        const bytes before_cuts = owner.snapshot();
        check_refused(owner.ledger.restore(2, good.data(), 0), bad, "bytes", 2);
        CHECK(owner.is(before_cuts));
        for (std::size_t size = 1; size < good.size(); ++size) { // cut anywhere
            refuse({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size)}, bad, "bytes");
        }
        bytes longer = good;
        longer.resize(good.size() + 8);
        refuse(longer, bad, "bytes");
        for (std::size_t bit = 0; bit < 8 * good.size(); bit += 7) { // one bit anywhere
            bytes damaged = good;
            damaged[bit / 8] ^= std::byte{1} << (bit % 8);
            const bytes before = owner.snapshot();
            const up::status came = owner.ledger.restore(2, damaged.data(), damaged.size());
            CHECK_FALSE(came.ok());
            CHECK(came.request == 2);
            CHECK(owner.is(before));
        }
        bytes swapped = good; // two words of the planes in each other's place
        std::swap_ranges(swapped.end() - 8, swapped.end(), swapped.end() - 32);
        CHECK(swapped != good);
        refuse(swapped, bad, "saved.checksum");

        const auto forge = [&](std::size_t at, auto value) {
            bytes forged = good;
            put(forged, at, value);
            sign(forged);
            return forged;
        };
        CHECK(forge(0, up::saved_header::magic_number) == good);
        refuse(forge(0, std::uint64_t{0x5055504650475244}), bad, "saved.magic"); // the other byte order
        refuse(forge(24, std::uint32_t{2}), status_code::not_supported, "saved.version");
        refuse(forge(8, std::uint64_t{good.size() + 8}), bad, "bytes");
        refuse(forge(36, 4), bad, "saved.num_layers");
        refuse(forge(36, -1), bad, "saved.num_layers");
        refuse(forge(40, 2), bad, "saved.num_sets");
        refuse(forge(40, 2'147'483'647), bad, "saved.num_sets");
        refuse(forge(44, 1 - static_cast<std::int32_t>(relation)), bad, "saved.relation");
        refuse(forge(28, 2049), status_code::capacity_exceeded, "saved.num_tokens");
        refuse(forge(28, -1), status_code::capacity_exceeded, "saved.num_tokens");
        refuse(forge(28, 599), bad, "saved.dense_from");
        refuse(forge(32, -64), bad, "saved.dense_from");
        refuse(forge(32, 700), bad, "saved.bytes");
        refuse(forge(32, 0), bad, "saved.bytes");
        refuse(forge(32, 599), bad, "saved.below");
        const std::int32_t other_set = relation == set_relation::nested ? 2 : 1;
        refuse(forge(48 + 2 * 4, other_set), bad, "saved.layer_sets", 2);
        for (std::size_t set = 0; set < 3; ++set) {
            refuse(forge(48 + 5 * 4 + 4 * set, 101), bad, "saved.below");
        }
        const std::size_t planes = 48 + 5 * 4 + 3 * 4;
        CHECK(good.size() == planes + 2 * 8 * 10);
        refuse(forge(planes, std::uint64_t{0}), bad, "saved.below");           // other positions
        refuse(forge(planes + 9 * 8, ~std::uint64_t{0}), bad, "saved.planes"); // positions behind dense_from
        if (relation == set_relation::nested) {                                // the number 3, of three sets
            bytes forged = forge(planes, ~std::uint64_t{0});
            put(forged, planes + 80, ~std::uint64_t{0});
            sign(forged);
            refuse(forged, bad, "saved.planes");
        }
        must(owner.ledger.restore(2, good.data(), good.size()));
        check_same(owner, 0, owner, 2);
    }
}

TEST_CASE("random buffers with a right checksum never make a ledger contradict itself", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        owned_ledger owner = make_server(relation);
        must(owner.ledger.admit(2));
        const bytes good = save(owner, 0);
        property::random_numbers random(property::base_seed());
        std::int32_t taken = 0;
        for (int i = 0; i < property::scaled(4000); ++i) {
            const bytes forged = forge_at_random(good, random);
            const bytes before = owner.snapshot();
            if (!owner.ledger.restore(2, forged.data(), forged.size()).ok()) {
                REQUIRE(owner.is(before));
                continue;
            }
            ++taken;
            for (std::int32_t layer = 0; layer < 5; ++layer) {
                const positions held = owner.held(2, layer);
                REQUIRE(static_cast<std::int32_t>(held.size()) == owner.rows(2, layer).length());
                REQUIRE(std::is_sorted(held.begin(), held.end()));
            }
            REQUIRE(save(owner, 2) == forged);
            must(owner.ledger.rollback(2, 0));
            REQUIRE(owner.is(before));
        }
        CHECK(taken > 0);
        CHECK(owner.canaries_intact());
    }
}

TEST_CASE("saving and restoring at the wrong time", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested);
    must(owner.ledger.admit(1));
    const bytes good = save(owner, 0);
    bytes room(good.size());
    std::size_t size = 77;
    check_refused(owner.ledger.saved_bytes(2, size), status_code::unknown_request, "request", 2);
    CHECK(size == 77);
    check_refused(owner.ledger.save(2, room.data(), room.size()), status_code::unknown_request, "request", 2);
    check_refused(owner.ledger.save(0, room.data(), room.size() - 1), status_code::workspace_too_small,
                  "bytes", 0);
    check_refused(owner.ledger.save(0, nullptr, room.size()), status_code::invalid_argument, "buffer", 0);
    CHECK(room == bytes(good.size()));
    check_refused(owner.ledger.restore(0, good.data(), good.size()), status_code::wrong_state, "request", 0);
    check_refused(owner.ledger.restore(2, good.data(), good.size()), status_code::unknown_request, "request",
                  2);
    check_refused(owner.ledger.restore(1, nullptr, good.size()), status_code::invalid_argument, "buffer", 1);
    open_step step(owner, {{0, request_tag::decode, {700}, {700}}, {1, request_tag::prefill, {0}, {0}}}, 1);
    check_refused(owner.ledger.save(0, room.data(), room.size()), status_code::wrong_state, "request", 0);
    check_refused(owner.ledger.restore(1, good.data(), good.size()), status_code::wrong_state, "request", 1);
    step.abort();
    must(owner.ledger.restore(1, good.data(), good.size()));
}

TEST_CASE("several requests are rolled back at once, or none", "[ledger]") {
    owned_ledger owner = make_server(set_relation::nested);
    must(owner.ledger.admit(1));
    must(owner.ledger.admit(2));
    open_step(owner, {{1, request_tag::prefill, range(0, 50), every(5, 0, 50)}}, 1).commit();
    const auto refuse = [&](const positions& ids, const positions& tokens, status_code code,
                            const std::string& argument, std::int32_t request) {
        const bytes before = owner.snapshot();
        check_refused(owner.ledger.rollback(ids.data(), tokens.data(), static_cast<std::int32_t>(ids.size())),
                      code, argument, request);
        CHECK(owner.is(before));
    };
    refuse({0, 1, 3}, {1, 1, 1}, status_code::unknown_request, "request", 3);
    refuse({0, 1, 0}, {9, 1, 5}, status_code::wrong_state, "request", 0);
    refuse({0, 1}, {1, 51}, status_code::out_of_range, "num_tokens", 1);
    refuse({0, 1}, {-1, 50}, status_code::out_of_range, "num_tokens", 0);
    check_refused(owner.ledger.rollback(nullptr, nullptr, 1), status_code::invalid_argument, "request_ids",
                  -1);
    const std::int32_t ids[] = {1, -1, 0, 2};
    check_refused(owner.ledger.rollback(ids, nullptr, 4), status_code::invalid_argument, "num_tokens", -1);
    check_refused(owner.ledger.rollback(ids, ids, -1), status_code::invalid_argument, "request_ids", -1);
    const std::int32_t tokens[] = {12, 99, 650, 0};
    must(owner.ledger.rollback(ids, tokens, 4));
    CHECK(owner.held(1, 1) == every(5, 0, 12));
    CHECK(owner.rows(0, 4).num_tokens() == 650);
    CHECK(owner.rows(0, 4).length() == 150);
    must(owner.ledger.rollback(nullptr, nullptr, 0));
}
