// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Sizes, the memory that is touched, and what an aborted step leaves: nothing.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

#include <functional>
#include <pthread.h>
#include <thread>

using namespace ledger_test;
using up::request_tag;
using up::set_relation;

namespace {

constexpr std::size_t small_stack = 128 * 1024; // what musl gives threads

void on_small_stack(std::function<void()> call) {
    pthread_attr_t attributes;
    REQUIRE(pthread_attr_init(&attributes) == 0);
    REQUIRE(pthread_attr_setstacksize(&attributes, small_stack) == 0);
    pthread_t thread;
    const auto body = [](void* what) -> void* {
        (*static_cast<std::function<void()>*>(what))();
        return nullptr;
    };
    REQUIRE(pthread_create(&thread, &attributes, body, &call) == 0);
    REQUIRE(pthread_join(thread, nullptr) == 0);
    pthread_attr_destroy(&attributes);
}

} // namespace

TEST_CASE("state follows the documented formula", "[ledger]") {
    const auto round_up = [](std::size_t bytes) { return (bytes + 63) / 64 * 64; };
    const auto formula = [&](const up::ledger_limits& l) {
        const auto tokens = static_cast<std::size_t>(l.max_tokens);
        const auto sets = static_cast<std::size_t>(l.num_sets);
        std::size_t planes = sets - 1;
        if (l.relation == set_relation::nested) {
            for (planes = 0; (std::size_t{1} << planes) < sets; ++planes) {
            }
        }
        const std::size_t request =
            round_up(32 + 8 * sets) +
            round_up(8 * planes * ((tokens + 63) / 64) + 4 * (sets - 1) * ((tokens + 511) / 512));
        return round_up(4 * (static_cast<std::size_t>(l.num_layers) + sets)) +
               static_cast<std::size_t>(l.max_requests) * request;
    };
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        for (const std::int32_t tokens : {0, 1, 63, 64, 65, 511, 512, 513, 100'000}) {
            for (const std::int32_t sets : {1, 2, 3, 4, 5, 8, 9}) {
                const up::ledger_limits l{3, tokens, 8, sets, relation};
                CHECK(up::drop_ledger<>::state_bytes(l) == formula(l));
            }
        }
    }
}

TEST_CASE("128K positions, 32 layers, 6 selecting layers: at most 64 KiB a request", "[ledger]") {
    up::ledger_limits l{1, 131'072, 32, 7, set_relation::nested};
    const std::size_t one = up::drop_ledger<>::state_bytes(l);
    l.max_requests = 2;
    CHECK(up::drop_ledger<>::state_bytes(l) - one <= 64 * 1024);
}

TEST_CASE("sizes beyond the address space are not forgotten modulo 2^64", "[ledger]") {
    const up::ledger_limits l{2147483647, 1 << 30, 65536, 65536, set_relation::independent};
    CHECK(up::drop_ledger<>::state_bytes(l) == static_cast<std::size_t>(-1));
    std::vector<std::int32_t> sets(65536);
    std::iota(sets.begin(), sets.end(), 0);
    alignas(256) std::byte few[256];
    CHECK(up::drop_ledger<>{}.bind(l, sets.data(), few, static_cast<std::size_t>(-1)).code ==
          up::status_code::workspace_too_small);
}

TEST_CASE("bind takes exact memory and nothing less", "[ledger]") {
    const up::ledger_limits l{2, 100, 4, 2, set_relation::nested};
    const std::int32_t sets[] = {0, 0, 1, 1};
    const std::size_t bytes = up::drop_ledger<>::state_bytes(l);
    std::vector<std::byte> storage(bytes + 512);
    std::byte* aligned = storage.data() + (256 - reinterpret_cast<std::uintptr_t>(storage.data()) % 256);
    up::drop_ledger<> ledger;
    CHECK(ledger.bind(l, sets, aligned, bytes - 1).code == up::status_code::workspace_too_small);
    CHECK(ledger.bind(l, sets, aligned + 64, bytes).code == up::status_code::misaligned);
    CHECK(ledger.bind(l, sets, nullptr, bytes).code == up::status_code::invalid_argument);
    CHECK(ledger.admit(0).code == up::status_code::wrong_state); // still unbound
    CHECK(ledger.bind(l, sets, aligned, bytes).ok());
    CHECK(ledger.admit(0).ok());
}

TEST_CASE("a full ledger stays between its canaries", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        for (const std::int32_t tokens : {1, 64, 511, 512, 513, 1000, 1024}) {
            owned_ledger owner = make_ledger({0, 2}, 5, relation, tokens, 3);
            for (std::int32_t id = 0; id < 3; ++id) {
                must(owner.ledger.admit(id));
                open_step step(owner, {{id, request_tag::prefill, range(0, tokens), every(2, 0, tokens)}}, 1);
                step.commit();
                CHECK(owner.held(id, 1) == every(2, 0, tokens));
                CHECK(owner.held(id, 0) == range(0, tokens));
            }
            CHECK(owner.canaries_intact());
            const std::vector<std::byte> full = owner.snapshot();
            rows_batch one_more;
            one_more.add(1, request_tag::decode, {tokens});
            up::ledger_step step;
            const up::status refused = owner.ledger.begin_step(one_more.view(), one_more.ids.data(), step);
            CHECK(refused.code == up::status_code::capacity_exceeded);
            CHECK(refused.request == 1);
            CHECK(owner.is(full));
        }
    }
}

TEST_CASE("an aborted step leaves no trace, byte for byte", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        owned_ledger owner = make_ledger({0, 2}, 5, relation);
        must(owner.ledger.admit(0));
        must(owner.ledger.admit(1));
        open_step(owner, {{0, request_tag::prefill, range(0, 700), every(3, 0, 700)}}, 1).commit();
        // Decoded positions are not stored; a later chunk that drops rows has to store them, and abort
        // forgets.
        open_step(owner, {{0, request_tag::verify, range(700, 900), range(700, 900)}}, 1).commit();
        const std::vector<std::byte> before = owner.snapshot();
        open_step step(owner,
                       {{1, request_tag::prefill, range(0, 1500), every(7, 0, 1500)},
                        {0, request_tag::chunk, range(900, 2048), every(5, 900, 2048)}},
                       1);
        CHECK_FALSE(owner.is(before));
        rows_batch later;
        later.add(1, request_tag::prefill, every(14, 0, 1500));
        later.add(0, request_tag::chunk, every(10, 900, 2048));
        must(owner.ledger.append(step.step, 3, later.view()));
        CHECK(owner.held(1, 4) == every(14, 0, 1500));
        step.abort();
        CHECK(owner.is(before));
        CHECK_FALSE(step.step.open());
        CHECK(owner.canaries_intact());
    }
}

TEST_CASE("two million positions", "[ledger]") {
    constexpr std::int32_t tokens = 2'100'000;
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested, tokens, 2);
    must(owner.ledger.admit(0));
    open_step(owner, {{0, request_tag::prefill, range(0, tokens - 1), every(3, 0, tokens - 1)}}, 1).commit();
    open_step(owner, {{0, request_tag::decode, {tokens - 1}, {tokens - 1}}}, 1).commit();
    const up::held_rows rows = owner.rows(0, 4);
    CHECK(rows.length() == 700'001);
    CHECK(rows.position_of(699'999) == 2'099'997);
    CHECK(rows.row_of(tokens - 1) == 700'000);
    CHECK(rows.window_row(tokens, 1'000'000) == 366'667);
    CHECK(rows.live_pages({16, 1'000'000, 0}).begin == 22916);
    must(owner.ledger.fork(0, 1));
    must(owner.ledger.release(0));
    std::size_t bytes = 0;
    must(owner.ledger.saved_bytes(1, bytes));
    std::vector<std::byte> saved(bytes);
    must(owner.ledger.save(1, saved.data(), bytes));
    must(owner.ledger.admit(0));
    must(owner.ledger.restore(0, saved.data(), bytes));
    CHECK(owner.held(0, 4) == owner.held(1, 4));
    const std::vector<std::int32_t> text(static_cast<std::size_t>(tokens), 1);
    std::vector<up::page_signature> pages[2];
    for (std::int32_t id = 0; id < 2; ++id) {
        pages[id].resize(700'016 / 16);
        std::int32_t count = 0;
        must(owner.ledger.sign_pages(id, 4, {}, text.data(), 16, pages[id].data(), 43'751, count));
        CHECK(count == 43'751);
    }
    CHECK(pages[0] == pages[1]);
    CHECK(owner.canaries_intact());
}

TEST_CASE("a released request leaves its slot as it was before admission", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    const std::vector<std::byte> empty = owner.snapshot();
    must(owner.ledger.admit(2));
    open_step(owner, {{2, request_tag::prefill, range(0, 1100), every(3, 0, 1100)}}, 1).commit();
    open_step(owner, {{2, request_tag::decode, {1100}, {1100}}}, 1).commit();
    must(owner.ledger.release(2));
    CHECK(owner.is(empty));
}

TEST_CASE("steps over different requests may be open at once, on their own threads", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 3, set_relation::nested);
    must(owner.ledger.admit(0));
    must(owner.ledger.admit(1));
    const auto live = [&](std::int32_t id, bool& right) {
        for (std::int32_t round = 0; round < 20; ++round) {
            for (std::int32_t at = 0; at < 2000; at += 100) {
                const positions rows = range(at, at + 100);
                const positions kept = every(id + 2, at, at + 100);
                open_step(owner, {{id, request_tag::chunk, rows, rows}}, 1).abort();
                open_step(owner, {{id, request_tag::chunk, rows, kept}}, 1).commit();
            }
            right = right && owner.held(id, 2).size() == (id == 0 ? 1000u : 680u);
            must(owner.ledger.rollback(id, 0));
        }
    };
    bool right[2] = {true, true};
    std::thread other([&] { live(1, right[1]); });
    live(0, right[0]);
    other.join();
    CHECK(right[0]);
    CHECK(right[1]);
    CHECK(owner.canaries_intact());
}

TEST_CASE("a ledger tells of steps on a thread with a small stack", "[ledger]") {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested, 300, 3);
    must(owner.ledger.admit(1));
    std::vector<std::int64_t> slots(5 * 200), expected(200);
    up::status told = up::success();
    on_small_stack([&] {
        open_step step(owner, {{1, request_tag::prefill, range(0, 200), every(2, 0, 200)}}, 1);
        up::step_arrays<> wanted;
        wanted.num_rows = 200;
        wanted.slots = slots.data();
        const up::contiguous_slots cache{1000, 300, 300, up::request_index::ledger};
        told = owner.ledger.look_up(step.step, owner.ledger.every_layer(), cache, wanted);
        told = told.ok() ? owner.ledger.slot_mapping(step.step, 0, cache, expected.data(), 200) : told;
        step.commit();
    });
    REQUIRE(told.ok());
    REQUIRE(std::equal(expected.begin(), expected.end(), slots.begin()));
    REQUIRE(slots.back() == -1);
    REQUIRE(slots[4 * 200 + 99] == 4 * 1000 + 300 + 99);
}
