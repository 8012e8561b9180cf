// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What goes wrong in a bookkeeping of drops, each fault as published code had it: one test a fault, named
// after what the fault does to a request.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

#include <algorithm>

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

TEST_CASE("a request that starts from another's pages goes on behind them and writes none of them",
          "[ledger]") {
    owned_ledger owner = make_server();
    const paged_pool pool;
    const positions kept = join(range(0, 20), range(80, 100));
    open_step(owner, {{0, request_tag::chunk, range(0, 100), kept}}, first_layer_after).commit();
    must(owner.ledger.release(1));
    must(owner.ledger.fork(0, 1)); // 100 positions are there already
    const positions rest = join(range(100, 110), range(190, 200));
    open_step step(owner, {{1, request_tag::chunk, range(100, 200), rest}}, first_layer_after);
    for (std::int32_t layer = 0; layer < 4; ++layer) {
        const std::int32_t there = layer == 0 ? 100 : 40; // in pages of 16: 4 and 8 rows in the last one
        CHECK(step.cached_lens(layer)[0] == there);
        CHECK(step.slots(layer, pool.view).front() == paged_pool::slot(1, there));
        const up::forked_pages pages = owner.rows(0, layer).fork_pages({page, 0, 0});
        CHECK((pages.shared.begin == 0 && pages.shared.end == there / page));
        CHECK((pages.copied == there / page && pages.copied_rows == there % page));
        std::int32_t partial = -7; // the one page with rows already that the step writes: to be copied
        up::step_arrays<> told;
        told.num_requests = 1;
        told.page_tokens = page;
        told.partial_pages = &partial;
        must(owner.ledger.look_up(step.step, {layer, 1}, told));
        CHECK(partial == pages.copied);
        for (const std::int64_t slot : step.slots(layer, pool.view)) {
            CHECK(slot >= paged_pool::slot(1, there));
        }
    }
    step.commit();
    CHECK(owner.held(0, 3) == kept); // and the rows of the first stay what they are
    CHECK(owner.held(1, 3) == join(kept, rest));
}

TEST_CASE("pages of one text are not taken for each other where other tokens were dropped", "[ledger]") {
    owned_ledger owner = make_server();
    const std::vector<std::int32_t> text(320, 1);
    const positions kept = join(range(0, 40), range(200, 320));
    open_step(owner, {{0, request_tag::prefill, range(0, 320), kept}}, first_layer_after).commit();
    open_step(owner, {{1, request_tag::prefill, range(0, 320), range(0, 160)}}, first_layer_after).commit();
    open_step(owner, {{2, request_tag::prefill, range(0, 320), kept}}, first_layer_after).commit();
    const auto sign = [&](std::int32_t request, std::int32_t layer) {
        std::vector<up::page_signature> made(20);
        std::int32_t count = 0;
        must(owner.ledger.sign_pages(request, layer, {}, text.data(), page, made.data(), 20, count));
        CHECK(count == (layer == 0 ? 20 : 10));
        return made;
    };
    CHECK(sign(0, 0) == sign(1, 0)); // layer 0 holds everything of either
    CHECK(sign(0, 3) == sign(2, 3));
    const std::vector<up::page_signature> one = sign(0, 3);
    const std::vector<up::page_signature> other = sign(1, 3);
    for (std::size_t i = 0; i < 10; ++i) {
        CHECK((one[i] == other[i]) == (i < 2)); // 0..31 of both
    }
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

TEST_CASE("a request that was swapped out comes back with its history, and nobody else's", "[ledger]") {
    owned_ledger owner = make_server();
    open_step(owner, {{0, request_tag::prefill, range(0, 400), range(0, 50)}}, first_layer_after).commit();
    open_step(owner, {{1, request_tag::prefill, range(0, 300), range(0, 70)}}, first_layer_after).commit();
    std::size_t bytes = 0;
    must(owner.ledger.saved_bytes(0, bytes));
    std::vector<std::byte> saved(bytes);
    must(owner.ledger.save(0, saved.data(), bytes));
    must(owner.ledger.release(0));
    must(owner.ledger.release(1));
    must(owner.ledger.admit(1));
    must(owner.ledger.restore(1, saved.data(), bytes));
    // It resumes in a step without decodes, in the slot of another.
    open_step step(owner, {{1, request_tag::verify, range(400, 403), range(400, 403)}}, first_layer_after);
    CHECK(step.write_rows(0) == range(400, 403));
    CHECK(step.write_rows(3) == range(50, 53));
    CHECK(step.seq_lens(3)[0] == 53);
    step.commit();
}

TEST_CASE("a window frees what it has passed by position: pages that are read or written stay", "[ledger]") {
    owned_ledger owner = make_server();
    // Of 300 positions the later layers hold 60: 0..19 and 260..299. A window of 64 sees 237.. from 300 on.
    const positions kept = join(range(0, 20), range(260, 300));
    open_step(owner, {{0, request_tag::prefill, range(0, 300), kept}}, first_layer_after).commit();
    std::vector<std::int32_t> table = range(0, 100);
    up::page_span in_use{0, 19}; // pages for 300 rows were taken
    up::page_tables tables;
    tables.table = table.data();
    tables.in_use = &in_use;
    tables.max_pages = 100;
    const std::int32_t request = 0;
    std::vector<std::int32_t> freed(100);
    std::int32_t count = 0;
    must(owner.ledger.hand_back_pages(&request, 1, {first_layer_after, 1}, {page, 64, 0}, tables,
                                      freed.data(), 100, count));
    // Pages hold rows 0..15, 16..31, 32..47, 48..59: only the first has no position that the window sees. By
    // original position taken for a row, the window would begin at row 237 and free all that lives.
    CHECK(count == 1 + 15);
    CHECK(freed[0] == 0);
    CHECK(freed[1] == 4);
    CHECK((in_use.begin == 1 && in_use.end == 4));
    // By row, the window of 64 rows would hold all 60 and free nothing; it begins at row 20.
    CHECK(owner.rows(0, first_layer_after).window_row(300, 64) == 20);
    CHECK(owner.rows(0, first_layer_after).window_row(323, 64) == 20); // 260 is just seen
    CHECK(owner.rows(0, first_layer_after).window_row(324, 64) == 21);
    // Decoding, its rows go to pages that it still has, until the window has passed the prompt.
    for (std::int32_t position = 300; position < 400; ++position) {
        open_step step(owner, {{0, request_tag::decode, {position}, {position}}}, first_layer_after);
        const std::int32_t row = step.write_rows(first_layer_after)[0];
        CHECK(row == 60 + position - 300);
        in_use.end = std::max(in_use.end, row / page + 1);
        table[static_cast<std::size_t>(row / page)] = row / page;
        step.commit();
        must(owner.ledger.hand_back_pages(&request, 1, {first_layer_after, 1}, {page, 64, 0}, tables,
                                          freed.data(), 100, count));
        const std::int32_t seen = owner.rows(0, first_layer_after).window_row(position + 1, 64);
        CHECK((in_use.begin == seen / page && in_use.end == row / page + 1));
    }
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
    std::size_t with_drops = 0;
    std::size_t without = 0;
    std::size_t empty = 0;
    must(owner.ledger.saved_bytes(0, with_drops));
    must(owner.ledger.saved_bytes(1, without));
    must(owner.ledger.saved_bytes(2, empty));
    CHECK(without == empty); // it has no entry because others have one
    CHECK(with_drops > empty);
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

TEST_CASE("tables in smaller pages than the manager's name the same slots", "[ledger]") {
    owned_ledger owner = make_server();
    const positions kept = join(range(0, 40), range(270, 300));
    // The manager hands out pages of 64 rows; kernels read a table in pages of 16, four for each of those.
    // Layer 1 of another kind has pages of 32, in a pool of its own.
    const std::int32_t manager[] = {9, 3, 7, 5, 1};
    std::vector<std::int32_t> kernel;
    for (const std::int32_t large : manager) {
        for (std::int32_t i = 0; i < 4; ++i) {
            kernel.push_back(4 * large + i);
        }
    }
    const auto view = [](const std::int32_t* table, std::int32_t pages, std::int32_t rows) {
        up::block_table_view made;
        made.table = table;
        made.max_pages = pages;
        made.page_tokens = rows;
        return made;
    };
    open_step step(owner, {{0, request_tag::prefill, range(0, 300), kept}}, first_layer_after);
    for (std::int32_t layer = 0; layer < 4; ++layer) {
        const std::vector<std::int64_t> slots = step.slots(layer, view(manager, 5, 64));
        CHECK(step.slots(layer, view(kernel.data(), 20, 16)) == slots);
        for (const std::int64_t slot : slots) {
            CHECK((slot >= 64 && slot < 10 * 64)); // inside the manager's pool
        }
    }
    const std::int32_t own[] = {2, 0, 1};
    const std::vector<std::int64_t> slots = step.slots(first_layer_after, view(own, 3, 32));
    CHECK(slots.front() == 64);
    CHECK(slots.back() == 32 + 69 - 64);
    // Pages in use and handed back are counted in each table's own pages.
    const up::held_rows rows = owner.rows(0, first_layer_after);
    CHECK(rows.pages(64) == 2);
    CHECK(rows.pages(16) == 5);
    CHECK(rows.pages(32) == 3);
    step.commit();
}
