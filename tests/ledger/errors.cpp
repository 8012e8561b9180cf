// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Bad input: a status that names the argument, the request and the layer, and nothing changed.

#include "ledger/refusals.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

/// Layers 0 to 4, of which 0 and 2 select; request 0 has 300 positions, request 1 none, 2 and 3 are free.
owned_ledger make_server(set_relation relation = set_relation::nested) {
    owned_ledger owner = make_ledger({0, 2}, 5, relation);
    must(owner.ledger.admit(0));
    must(owner.ledger.admit(1));
    open_step(owner, {{0, request_tag::prefill, range(0, 300), range(0, 100)}}, 1).commit();
    return owner;
}

/// Tries to open a step of one request after a good one, and checks that nothing is left of the try.
up::status try_step(owned_ledger& owner, std::int32_t id, request_tag tag, const positions& rows) {
    rows_batch batch;
    batch.add(1, request_tag::prefill, range(0, 10));
    batch.add(id, tag, rows);
    const std::vector<std::byte> before = owner.snapshot();
    up::ledger_step step;
    const up::status came = owner.ledger.begin_step(batch.view(), batch.ids.data(), step);
    CHECK_FALSE(step.open());
    CHECK(owner.is(before));
    return came;
}

} // namespace

TEST_CASE("a ledger's limits and map are checked", "[ledger]") {
    const up::ledger_limits good{2, 100, 4, 3, set_relation::nested};
    alignas(256) static std::byte memory[65536];
    const auto bind = [&](const up::ledger_limits& l, std::vector<std::int32_t> sets) {
        up::drop_ledger<> ledger;
        return ledger.bind(l, sets.data(), memory, sizeof memory);
    };
    CHECK(bind(good, {0, 1, 1, 2}).ok());
    const auto with = [&](auto member, auto value) {
        up::ledger_limits l = good;
        l.*member = value;
        return bind(l, {0, 1, 1, 2}).argument;
    };
    using l = up::ledger_limits;
    CHECK(with(&l::max_requests, 0) == std::string("ledger_limits.max_requests"));
    CHECK(with(&l::max_tokens, -1) == std::string("ledger_limits.max_tokens"));
    CHECK(with(&l::max_tokens, (1 << 30) + 1) == std::string("ledger_limits.max_tokens"));
    CHECK(with(&l::num_layers, 0) == std::string("ledger_limits.num_layers"));
    CHECK(with(&l::num_sets, 0) == std::string("ledger_limits.num_sets"));
    CHECK(with(&l::num_sets, 6) == std::string("ledger_limits.num_sets"));
    CHECK(with(&l::relation, static_cast<set_relation>(2)) == std::string("ledger_limits.relation"));
    check_refused(bind(good, {0, 2, 2, 2}), status_code::invalid_argument, "layer_sets", -1, 1);
    check_refused(bind(good, {0, 1, 2, 3}), status_code::invalid_argument, "layer_sets", -1, 3);
    check_refused(bind(good, {0, 1, 2, 1}), status_code::invalid_argument, "layer_sets", -1, 3);
    check_refused(bind(good, {0, -1, 1, 2}), status_code::invalid_argument, "layer_sets", -1, 1);
    check_refused(bind(good, {0, 1, 1, 1}), status_code::invalid_argument, "layer_sets", -1);
    CHECK(up::drop_ledger<>{}.bind(good, nullptr, memory, sizeof memory).argument ==
          std::string("layer_sets"));
}

TEST_CASE("unknown requests", "[ledger]") {
    owned_ledger owner = make_server();
    for (const std::int32_t id : {2, 3}) {
        check_refused(try_step(owner, id, request_tag::prefill, {0}), status_code::unknown_request, "request",
                      id);
        check_refused(owner.ledger.release(id), status_code::unknown_request, "request", id);
        check_refused(owner.ledger.rollback(id, 0), status_code::unknown_request, "request", id);
    }
    check_refused(try_step(owner, 4, request_tag::prefill, {0}), status_code::unknown_request, "request", 4);
    check_refused(try_step(owner, -2, request_tag::prefill, {0}), status_code::unknown_request, "request",
                  -2);
    check_refused(try_step(owner, -1, request_tag::prefill, {0}), status_code::invalid_argument,
                  "batch.cu_seqlens", -1);
    up::held_rows rows;
    check_refused(owner.ledger.rows_of(2, 1, rows), status_code::unknown_request, "request", 2, 1);
    check_refused(owner.ledger.rows_of(0, 5, rows), status_code::out_of_range, "layer", 0, 5);
    check_refused(owner.ledger.admit(0), status_code::wrong_state, "request", 0);
    check_refused(owner.ledger.admit(4), status_code::out_of_range, "request", 4);
    must(owner.ledger.release(0));
    check_refused(owner.ledger.release(0), status_code::unknown_request, "request", 0);
}

TEST_CASE("rows that overlap, leave a gap, or don't fit", "[ledger]") {
    owned_ledger owner = make_server();
    const auto bad = status_code::invalid_argument;
    check_refused(try_step(owner, 0, request_tag::chunk, range(299, 320)), bad, "batch.positions", 0);
    check_refused(try_step(owner, 0, request_tag::chunk, range(301, 320)), bad, "batch.positions", 0);
    check_refused(try_step(owner, 0, request_tag::chunk, {300, 302}), bad, "batch.positions", 0);
    check_refused(try_step(owner, 0, request_tag::verify, {300, 300}), bad, "batch.positions", 0);
    check_refused(try_step(owner, 0, request_tag::decode, {0}), bad, "batch.positions", 0);
    check_refused(try_step(owner, 0, request_tag::prefill, {300}), bad, "batch.tags", 0);
    check_refused(try_step(owner, 0, static_cast<request_tag>(4), {300}), bad, "batch.tags", 0);
    check_refused(try_step(owner, 0, request_tag::chunk, range(300, 2049)), status_code::capacity_exceeded,
                  "batch.cu_seqlens", 0);
    check_refused(try_step(owner, 1, request_tag::chunk, {0}), status_code::wrong_state, "request",
                  1); // listed twice
    CHECK(try_step(owner, 0, request_tag::chunk, {0}).came == 0);
}

TEST_CASE("batches that are no batches", "[ledger]") {
    owned_ledger owner = make_server();
    rows_batch batch;
    batch.add(0, request_tag::decode, {300});
    batch.add(1, request_tag::prefill, {0, 1});
    const std::vector<std::byte> before = owner.snapshot();
    const auto begin = [&](auto change, const std::int32_t* ids) {
        up::batch_view view = batch.view();
        change(view);
        up::ledger_step step;
        const up::status came = owner.ledger.begin_step(view, ids, step);
        CHECK(owner.is(before));
        CHECK_FALSE(step.open());
        return std::string(came.argument);
    };
    const std::int32_t* ids = batch.ids.data();
    const std::int32_t falling[] = {0, 2, 1};
    const std::int32_t late[] = {1, 1, 3};
    CHECK(begin([](up::batch_view& v) { v.space = up::memory_space::device; }, ids) == "batch.space");
    CHECK(begin([](up::batch_view& v) { v.num_requests = -1; }, ids) == "batch.num_requests");
    CHECK(begin([](up::batch_view& v) { v.num_requests = 0; }, ids) == "batch.num_rows");
    CHECK(begin([](up::batch_view& v) { v.num_rows = 4; }, ids) == "batch.cu_seqlens");
    CHECK(begin([](up::batch_view& v) { v.cu_seqlens = nullptr; }, ids) == "batch.cu_seqlens");
    CHECK(begin([&](up::batch_view& v) { v.cu_seqlens = falling; }, ids) == "batch.cu_seqlens");
    CHECK(begin([&](up::batch_view& v) { v.cu_seqlens = late; }, ids) == "batch.cu_seqlens");
    CHECK(begin([](up::batch_view& v) { v.tags = nullptr; }, ids) == "batch.tags");
    CHECK(begin([](up::batch_view&) {}, nullptr) == "request_ids");
}

TEST_CASE("appends out of order, of foreign rows, of other rows inside a set", "[ledger]") {
    for (const set_relation relation : {set_relation::nested, set_relation::independent}) {
        owned_ledger owner = make_server(relation);
        // nested: sets 0 1 1 2 2; independent: 0 1 0 2 2
        rows_batch batch;
        batch.add(0, request_tag::chunk, range(300, 400));
        batch.add(1, request_tag::prefill, range(0, 200));
        up::ledger_step step;
        must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
        const auto entering = [](const positions& first, const positions& second) {
            rows_batch rows;
            rows.add(0, request_tag::chunk, first);
            rows.add(1, request_tag::prefill, second);
            return rows;
        };
        const auto refuse = [&](std::int32_t layer, const rows_batch& rows, status_code code,
                                const std::string& argument, std::int32_t request) {
            const std::vector<std::byte> before = owner.snapshot();
            check_refused(owner.ledger.append(step, layer, rows.view()), code, argument, request, layer);
            CHECK(owner.is(before));
        };
        const auto bad = status_code::invalid_argument;
        const positions chunk{310, 350};
        const positions prompt{0, 7, 199};
        refuse(-1, batch, status_code::out_of_range, "layer", -1);
        refuse(5, batch, status_code::out_of_range, "layer", -1);
        refuse(0, entering(range(300, 400), range(0, 199)), bad, "entering.cu_seqlens", 1); // not dense
        refuse(1, entering({299}, prompt), bad, "entering.positions", 0);
        refuse(1, entering({400}, prompt), bad, "entering.positions", 0);
        refuse(1, entering(chunk, {7, 7}), bad, "entering.positions", 1);
        refuse(1, entering(chunk, {7, 5}), bad, "entering.positions", 1);
        rows_batch one;
        one.add(0, request_tag::chunk, chunk);
        refuse(1, one, bad, "entering.num_requests", -1);
        must(owner.ledger.append(step, 1, entering(chunk, prompt).view()));
        refuse(1, entering(chunk, prompt), status_code::wrong_state, "layer", -1); // twice
        refuse(0, batch, status_code::wrong_state, "layer", -1);
        if (relation == set_relation::nested) {
            refuse(2, entering(chunk, {0, 7}), bad, "entering.cu_seqlens", 1);
            refuse(2, entering(chunk, {0, 8, 199}), bad, "entering.positions", 1);
            refuse(3, entering(chunk, {0, 8}), bad, "entering.positions", 1); // dropped before
            refuse(3, entering({311}, {0}), bad, "entering.positions", 0);
        } else {
            refuse(2, entering(chunk, prompt), bad, "entering.cu_seqlens", 0); // every row revives
            must(owner.ledger.append(step, 2, batch.view()));
            must(owner.ledger.append(step, 3, entering({311}, {0, 8}).view()));
            CHECK(owner.held(1, 4) == positions{0, 8});
        }
        CHECK(owner.held(1, 1) == prompt);
        must(owner.ledger.commit_step(step));
        check_refused(owner.ledger.append(step, 4, batch.view()), status_code::wrong_state, "step", -1);
    }
}

TEST_CASE("decode and verify rows enter every layer", "[ledger]") {
    for (const request_tag tag : {request_tag::decode, request_tag::verify}) {
        owned_ledger owner = make_server(set_relation::independent);
        rows_batch batch;
        batch.add(0, tag, {300, 301});
        up::ledger_step step;
        must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
        rows_batch fewer;
        fewer.add(0, tag, {301});
        check_refused(owner.ledger.append(step, 1, fewer.view()), status_code::invalid_argument,
                      "entering.cu_seqlens", 0, 1);
        must(owner.ledger.abort_step(step));
    }
}

TEST_CASE("requests in an open step can't be taken elsewhere", "[ledger]") {
    owned_ledger owner = make_server();
    rows_batch batch;
    batch.add(0, request_tag::decode, {300});
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    const std::vector<std::byte> before = owner.snapshot();
    check_refused(owner.ledger.release(0), status_code::wrong_state, "request", 0);
    check_refused(owner.ledger.rollback(0, 10), status_code::wrong_state, "request", 0);
    check_refused(owner.ledger.begin_step(batch.view(), batch.ids.data(), step), status_code::wrong_state,
                  "step", -1);
    up::ledger_step other;
    check_refused(owner.ledger.begin_step(batch.view(), batch.ids.data(), other), status_code::wrong_state,
                  "request", 0);
    check_refused(owner.ledger.commit_step(other), status_code::wrong_state, "step", -1);
    CHECK(owner.is(before));
    up::ledger_step stale = step;
    must(owner.ledger.commit_step(step));
    check_refused(owner.ledger.commit_step(stale), status_code::wrong_state, "step", 0);
    check_refused(owner.ledger.abort_step(step), status_code::wrong_state, "step", -1);
    CHECK(owner.rows(0, 0).num_tokens() == 301);
}

TEST_CASE("rollback beyond what is kept", "[ledger]") {
    owned_ledger owner = make_server();
    const std::vector<std::byte> before = owner.snapshot();
    check_refused(owner.ledger.rollback(0, 301), status_code::out_of_range, "num_tokens", 0);
    check_refused(owner.ledger.rollback(0, -1), status_code::out_of_range, "num_tokens", 0);
    CHECK(owner.is(before));
    must(owner.ledger.rollback(0, 300));
    CHECK(owner.is(before));
}

TEST_CASE("outputs that are too short, and rows without a page", "[ledger]") {
    owned_ledger owner = make_server();
    rows_batch batch;
    batch.add(1, request_tag::prefill, range(0, 40));
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    std::vector<std::int32_t> out(40, 123);
    const std::vector<std::int32_t> untouched = out;
    check_refused(owner.ledger.row_positions(step, 1, out.data(), 39), status_code::out_of_range, "size", -1,
                  1);
    check_refused(owner.ledger.write_rows(step, 1, out.data(), 39), status_code::out_of_range, "size", -1, 1);
    check_refused(owner.ledger.seq_lens(step, 1, out.data(), 0), status_code::out_of_range, "size", -1, 1);
    check_refused(owner.ledger.cached_lens(step, 1, out.data(), 0), status_code::out_of_range, "size", -1, 1);
    check_refused(owner.ledger.cu_seqlens(step, 1, out.data(), 1), status_code::out_of_range, "size", -1, 1);
    check_refused(owner.ledger.seq_lens(step, 9, out.data(), 1), status_code::out_of_range, "layer", -1, 9);
    std::int32_t* const nowhere = nullptr;
    check_refused(owner.ledger.write_rows(step, 1, nowhere, 40), status_code::invalid_argument, "out", -1, 1);

    std::int32_t pages[] = {4, 5, 6};
    up::block_table_view view;
    view.table = pages;
    view.page_tokens = 16;
    const auto slots = [&](std::int32_t max_pages) {
        view.max_pages = max_pages;
        return owner.ledger.slot_mapping(step, 1, view, out.data(), 40);
    };
    check_refused(slots(2), status_code::capacity_exceeded, "slots", 1, 1); // the pool is exhausted
    CHECK(slots(2).came == 32);
    pages[2] = -1;
    check_refused(slots(3), status_code::capacity_exceeded, "slots", 1, 1);
    check_refused(slots(-1), status_code::invalid_argument, "block_table.table", -1, 1);
    view.page_tokens = 0;
    check_refused(slots(3), status_code::invalid_argument, "block_table.page_tokens", -1, 1);
    const up::contiguous_slots short_stretch{0, 0, 39, up::request_index::batch};
    check_refused(owner.ledger.slot_mapping(step, 1, short_stretch, out.data(), 40),
                  status_code::capacity_exceeded, "slots", 1, 1);
    const up::contiguous_slots no_stretch{0, 0, -1, up::request_index::batch};
    check_refused(owner.ledger.slot_mapping(step, 1, no_stretch, out.data(), 40),
                  status_code::invalid_argument, "contiguous_slots.max_tokens", -1, 1);
    CHECK(out == untouched);
    must(owner.ledger.abort_step(step));
}
