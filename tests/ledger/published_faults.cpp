// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What goes wrong in a bookkeeping of drops, each fault as published code had it: one test a fault, named
// after what the fault does to a request.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;

namespace {

constexpr std::int32_t first_layer_after = 1; // of layers 0 to 3, layer 0 selects
constexpr std::int32_t page = 16;

owned_ledger make_server() {
    owned_ledger owner = make_ledger({0}, 4, set_relation::nested);
    for (std::int32_t id = 0; id < 4; ++id) {
        must(owner.ledger.admit(id));
    }
    return owner;
}

/// Pages 100 * request + 0, 1, 2, ...: request and row can be read off a slot.
struct paged_pool {
    std::vector<std::int32_t> table;
    up::block_table_view view;

    paged_pool() {
        for (std::int32_t request = 0; request < 4; ++request) {
            for (std::int32_t i = 0; i < 100; ++i) {
                table.push_back(100 * request + i);
            }
        }
        view.table = table.data();
        view.request_stride = 100;
        view.max_pages = 100;
        view.page_tokens = page;
        view.rows = up::request_index::ledger;
    }
    static std::int64_t slot(std::int32_t request, std::int32_t row) {
        return std::int64_t{100} * request * page + row;
    }
};

positions join(positions first, const positions& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
}

} // namespace

TEST_CASE("decode after a drop goes behind the kept rows, not behind the prompt", "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    const positions kept = join(range(0, 40), range(270, 300));
    open_step(owner, {{0, request_tag::prefill, range(0, 300), kept}}, first_layer_after).commit();
    for (std::int32_t token = 0; token < 40; ++token) {
        const positions row{300 + token};
        open_step step(owner, {{0, request_tag::decode, row, row}}, first_layer_after);
        CHECK(step.slots(0, pool.view) == std::vector<std::int64_t>{paged_pool::slot(0, 300 + token)});
        CHECK(step.seq_lens(0)[0] == 301 + token);
        for (std::int32_t layer = first_layer_after; layer < 4; ++layer) {
            CHECK(step.slots(layer, pool.view) == std::vector<std::int64_t>{paged_pool::slot(0, 70 + token)});
            CHECK(step.seq_lens(layer)[0] == 71 + token); // nobody reads rows that were never written
            CHECK(step.row_positions(layer) == row);      // and positions stay original
        }
        step.commit();
    }
}

TEST_CASE("a long prompt that drops leaves the sinks of decoding requests alone", "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    // Requests without any drop, decoding in the step in which the first long prompt arrives.
    open_step(owner,
              {{1, request_tag::prefill, range(0, 20), range(0, 20)},
               {2, request_tag::prefill, range(0, 9), range(0, 9)}},
              first_layer_after)
        .commit();
    const positions kept = join(range(0, 30), range(480, 500));
    open_step mixed(owner,
                    {{1, request_tag::decode, {20}, {20}},
                     {3, request_tag::prefill, range(0, 500), kept},
                     {2, request_tag::decode, {9}, {9}}},
                    first_layer_after);
    for (std::int32_t layer = first_layer_after; layer < 4; ++layer) {
        const std::vector<std::int64_t> slots = mixed.slots(layer, pool.view);
        REQUIRE(slots.size() == 52);
        CHECK(slots.front() == paged_pool::slot(1, 20));
        CHECK(slots[1] == paged_pool::slot(3, 0));
        CHECK(slots[50] == paged_pool::slot(3, 49));
        CHECK(slots.back() == paged_pool::slot(2, 9));
        CHECK(mixed.seq_lens(layer) == std::vector<std::int32_t>{21, 50, 10});
    }
    mixed.commit();
    CHECK(owner.held(1, 3) == range(0, 21));
    CHECK(owner.held(2, 3) == range(0, 10));
}

TEST_CASE("a second chunk goes on where the first ended, in every layer", "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    const positions first = join(range(0, 10), range(90, 100));
    const positions second = join(range(100, 105), range(195, 200));
    open_step(owner, {{0, request_tag::chunk, range(0, 100), first}}, first_layer_after).commit();
    // No decode row in this step: every row of the chunk is still written.
    open_step step(owner, {{0, request_tag::chunk, range(100, 200), second}}, first_layer_after);
    CHECK(step.cached_lens(0)[0] == 100);
    CHECK(step.seq_lens(0)[0] == 200);
    CHECK(step.write_rows(0) == range(100, 200));
    CHECK(step.cached_lens(2)[0] == 20); // earlier rows are neither overwritten nor ignored
    CHECK(step.seq_lens(2)[0] == 30);
    CHECK(step.write_rows(2) == range(20, 30));
    CHECK(step.slots(2, pool.view).front() == paged_pool::slot(0, 20));
    CHECK(step.row_positions(2) == second);
    step.commit();
    CHECK(owner.held(0, 2) == join(first, second));
}

TEST_CASE("a preempted request that comes again has no history", "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    open_step(owner, {{0, request_tag::prefill, range(0, 400), range(0, 50)}}, first_layer_after).commit();
    open_step(owner, {{0, request_tag::decode, {400}, {400}}}, first_layer_after).commit();
    must(owner.ledger.release(0)); // its pages go to others
    must(owner.ledger.admit(0));
    CHECK(owner.rows(0, 3).num_tokens() == 0);
    // It resumes in a step without decodes, below any length at which tokens are dropped.
    open_step step(owner, {{0, request_tag::prefill, range(0, 60), range(0, 60)}}, first_layer_after);
    for (std::int32_t layer = 0; layer < 4; ++layer) {
        CHECK(step.slots(layer, pool.view).size() == 60);
        CHECK(step.write_rows(layer) == range(0, 60));
        CHECK(step.seq_lens(layer)[0] == 60);
    }
    step.commit();
    open_step decode(owner, {{0, request_tag::decode, {60}, {60}}}, first_layer_after);
    CHECK(decode.seq_lens(3)[0] == 61);
    decode.commit();
}

TEST_CASE("a step that dies halfway leaves no history either", "[ledger]") {
    owned_ledger owner = make_server();
    open_step died(owner, {{0, request_tag::prefill, range(0, 400), range(0, 50)}}, first_layer_after);
    died.abort();
    open_step again(owner, {{0, request_tag::prefill, range(0, 400), range(0, 399)}}, first_layer_after);
    CHECK(again.write_rows(3) == range(0, 399));
    again.commit();
    CHECK(owner.held(0, 3) == range(0, 399));
}

TEST_CASE("verification rows are not a prompt: none is dropped, rejected ones go in every layer",
          "[ledger]") {
    owned_ledger owner = make_server();
    const positions kept = join(range(0, 20), range(580, 600));
    open_step(owner, {{0, request_tag::prefill, range(0, 600), kept}}, first_layer_after).commit();

    rows_batch batch;
    batch.add(0, request_tag::verify, range(600, 606));
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    rows_batch fewer;
    fewer.add(0, request_tag::verify, range(603, 606));
    const up::status refused = owner.ledger.append(step, first_layer_after, fewer.view());
    CHECK(refused.code == up::status_code::invalid_argument);
    CHECK(refused.request == 0);
    CHECK(refused.layer == first_layer_after);
    must(owner.ledger.append(step, first_layer_after, batch.view()));
    must(owner.ledger.commit_step(step));
    CHECK(owner.held(0, 0) == range(0, 606));
    CHECK(owner.held(0, 2) == join(kept, range(600, 606)));

    must(owner.ledger.rollback(0, 602)); // two of six accepted
    CHECK(owner.held(0, 0) == range(0, 602));
    CHECK(owner.held(0, 2) == join(kept, range(600, 602)));
    open_step next(owner, {{0, request_tag::verify, range(602, 606), range(602, 606)}}, first_layer_after);
    CHECK(next.write_rows(0) == range(602, 606));
    CHECK(next.write_rows(2) == range(42, 46));
    next.commit();
}

TEST_CASE("a one-token prompt is a prompt and a one-token chunk is a chunk", "[ledger]") {
    owned_ledger owner = make_server();
    open_step(owner, {{0, request_tag::prefill, {0}, {0}}}, first_layer_after).commit();
    CHECK(owner.held(0, 3) == range(0, 1));
    // The last chunk has one row, and its layers may drop it: its tag says so, not its length.
    open_step(owner, {{1, request_tag::chunk, range(0, 64), range(0, 8)}}, first_layer_after).commit();
    open_step step(owner, {{1, request_tag::chunk, {64}, {}}}, first_layer_after);
    CHECK(step.write_rows(0) == positions{64});
    CHECK(step.write_rows(3).empty());
    step.commit();
    CHECK(owner.rows(1, 3).length() == 8);
    CHECK(owner.rows(1, 3).num_tokens() == 65);
}

TEST_CASE("a short request beside a long one loses nothing and costs nothing", "[ledger]") {
    owned_ledger owner = make_server();
    open_step(owner,
              {{0, request_tag::prefill, range(0, 1000), range(0, 300)},
               {1, request_tag::prefill, range(0, 100), range(0, 100)}},
              first_layer_after)
        .commit();
    up::position_span span{-1, -1};
    CHECK(owner.rows(1, 3).length() == 100);
    CHECK(owner.rows(1, 3).copy_dropped_ranges(&span, 1) == 0);
    CHECK(span.begin == -1);
    CHECK(owner.rows(0, 3).copy_dropped_ranges(&span, 1) == 1);
    CHECK((span.begin == 300 && span.end == 1000));
}

TEST_CASE("padded rows and empty places of the batch write nowhere", "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    open_step(owner, {{0, request_tag::prefill, range(0, 300), range(0, 40)}}, first_layer_after).commit();
    open_step(owner, {{2, request_tag::prefill, range(0, 30), range(0, 30)}}, first_layer_after).commit();
    rows_batch batch;
    batch.add(2, request_tag::decode, {30});
    batch.add(-1, request_tag::decode, {});
    batch.add(0, request_tag::decode, {300});
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    std::int64_t slots[8];
    must(owner.ledger.slot_mapping(step, 2, pool.view, slots, 8));
    CHECK(slots[0] == paged_pool::slot(2, 30));
    CHECK(slots[1] == paged_pool::slot(0, 40));
    for (std::int32_t i = 2; i < 8; ++i) {
        CHECK(slots[i] == -1);
    }
    std::int32_t lengths[5];
    must(owner.ledger.seq_lens(step, 2, lengths, 5));
    CHECK(std::vector<std::int32_t>(lengths, lengths + 5) == std::vector<std::int32_t>{31, 0, 41, 0, 0});
    std::int32_t cu[6];
    must(owner.ledger.cu_seqlens(step, 2, cu, 6));
    CHECK(std::vector<std::int32_t>(cu, cu + 6) == std::vector<std::int32_t>{0, 1, 1, 2, 2, 2});
    std::int32_t row_positions[4];
    must(owner.ledger.row_positions(step, 2, row_positions, 4));
    CHECK(positions(row_positions, row_positions + 4) == positions{30, 300, -1, -1});
    must(owner.ledger.commit_step(step));
}

TEST_CASE("slots beyond 2^31 are whole, or refused where they don't fit", "[ledger]") {
    owned_ledger owner = make_server();
    rows_batch batch;
    batch.add(0, request_tag::prefill, range(0, 40));
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    const std::int32_t table[] = {1, 200'000'000, 7};
    up::block_table_view view;
    view.table = table;
    view.max_pages = 3;
    view.page_tokens = page;
    std::vector<std::int64_t> wide(40);
    must(owner.ledger.slot_mapping(step, 0, view, wide.data(), 40));
    CHECK(wide[15] == 31);
    CHECK(wide[16] == 3'200'000'000);
    CHECK(wide[39] == 7 * 16 + 7);
    std::vector<std::int32_t> narrow(40, 123);
    const up::status refused = owner.ledger.slot_mapping(step, 0, view, narrow.data(), 40);
    CHECK(refused.code == up::status_code::out_of_range);
    CHECK(refused.request == 0);
    CHECK(refused.layer == 0);
    CHECK(narrow == std::vector<std::int32_t>(40, 123));
    must(owner.ledger.abort_step(step));
}
