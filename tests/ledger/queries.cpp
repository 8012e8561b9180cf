// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What an engine reads: windows, ranges, pages, tables of every shape, both index types, parked steps.

#include "ledger/ledger_fixture.hpp"
#include "support/catch.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;

namespace {

std::vector<up::position_span> dropped(const up::held_rows& rows) {
    std::vector<up::position_span> spans(static_cast<std::size_t>(rows.copy_dropped_ranges(nullptr, 0)));
    CHECK(rows.copy_dropped_ranges(spans.data(), static_cast<std::int32_t>(spans.size())) ==
          static_cast<std::int32_t>(spans.size()));
    return spans;
}

} // namespace

TEST_CASE("a window over original positions starts at a cache row", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
    must(owner.ledger.admit(0));
    open_step(owner, {{0, request_tag::prefill, range(0, 1000), {0, 1, 2, 600, 601, 999}}}, 1).commit();
    open_step(owner, {{0, request_tag::decode, {1000}, {1000}}}, 1).commit();
    const up::held_rows rows = owner.rows(0, 1);
    CHECK(rows.rows_below(1000 - 400 + 1) == 4); // a window of 400 positions that ends at 1000
    CHECK(rows.rows_below(-5) == 0);
    CHECK(rows.rows_below(0) == 0);
    CHECK(rows.rows_below(1000) == 6);
    CHECK(rows.rows_below(1001) == 7);
    CHECK(rows.rows_below(2'000'000'000) == 7);
    CHECK(rows.row_of(601) == 4);
    CHECK(rows.row_of(602) == -1);
    CHECK(rows.row_of(1000) == 6);
    CHECK(rows.row_of(1001) == -1);
    CHECK(rows.row_of(-1) == -1);
    CHECK(rows.position_of(6) == 1000);
    CHECK(rows.position_of(7) == -1);
    CHECK(rows.position_of(-1) == -1);
    CHECK(up::held_rows{}.length() == 0);
    CHECK(up::held_rows{}.position_of(0) == -1);
}

TEST_CASE("dropped ranges of each layer", "[ledger]") {
    owned_ledger owner = make_ledger({0, 1}, 3, set_relation::nested);
    must(owner.ledger.admit(0));
    open_step step(owner, {{0, request_tag::chunk, range(0, 200), {0, 63, 64, 128, 199}}}, 1);
    rows_batch fewer;
    fewer.add(0, request_tag::chunk, {63, 64});
    must(owner.ledger.append(step.step, 2, fewer.view()));
    step.commit();
    open_step(owner, {{0, request_tag::decode, {200}, {200}}}, 1).commit();
    const auto same = [](const std::vector<up::position_span>& spans,
                         const std::vector<std::pair<std::int32_t, std::int32_t>>& expected) {
        std::vector<std::pair<std::int32_t, std::int32_t>> came;
        for (const up::position_span& span : spans) {
            came.emplace_back(span.begin, span.end);
        }
        return came == expected;
    };
    CHECK(same(dropped(owner.rows(0, 0)), {}));
    CHECK(same(dropped(owner.rows(0, 1)), {{1, 63}, {65, 128}, {129, 199}}));
    CHECK(same(dropped(owner.rows(0, 2)), {{0, 63}, {65, 200}}));
    up::position_span first{-1, -1};
    CHECK(owner.rows(0, 1).copy_dropped_ranges(&first, 1) == 3); // counts those that don't fit
    CHECK((first.begin == 1 && first.end == 63));
}

TEST_CASE("pages in use follow each layer's own length", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
    must(owner.ledger.admit(0));
    CHECK(owner.rows(0, 0).pages(16) == 0);
    open_step(owner, {{0, request_tag::prefill, range(0, 100), range(0, 32)}}, 1).commit();
    CHECK(owner.rows(0, 0).pages(16) == 7);
    CHECK(owner.rows(0, 1).pages(16) == 2);
    CHECK(owner.rows(0, 1).pages(1) == 32);
    open_step(owner, {{0, request_tag::decode, {100}, {100}}}, 1).commit();
    CHECK(owner.rows(0, 1).pages(16) == 3);
    must(owner.ledger.rollback(0, 100));
    CHECK(owner.rows(0, 1).pages(16) == 2);
}

TEST_CASE("block tables shared by layers, one for each layer, and contiguous caches", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
    must(owner.ledger.admit(2));
    must(owner.ledger.admit(3));
    rows_batch batch;
    batch.add(3, request_tag::prefill, range(0, 5));
    batch.add(2, request_tag::prefill, range(0, 3));
    rows_batch kept;
    kept.add(3, request_tag::prefill, {0, 4});
    kept.add(2, request_tag::prefill, {1});
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    must(owner.ledger.append(step, 1, kept.view()));

    using narrow = std::vector<std::int32_t>;
    const auto slots = [&](std::int32_t layer, const auto& source) {
        std::int32_t rows = 0;
        must(owner.ledger.num_rows(step, layer, rows));
        narrow out(static_cast<std::size_t>(rows));
        must(owner.ledger.slot_mapping(step, layer, source, out.data(), rows));
        std::vector<std::int64_t> wide(out.size());
        must(owner.ledger.slot_mapping(step, layer, source, wide.data(), rows));
        CHECK(std::vector<std::int64_t>(out.begin(), out.end()) == wide);
        return out;
    };

    const std::int32_t shared[] = {10, 11, 20, 21}; // [request, page] of 4 slots
    up::block_table_view view;
    view.table = shared;
    view.request_stride = 2;
    view.max_pages = 2;
    view.page_tokens = 4;
    CHECK(slots(0, view) == narrow{40, 41, 42, 43, 44, 80, 81, 82});
    CHECK(slots(1, view) == narrow{40, 41, 80});

    const std::int32_t by_layer[] = {10, 11, 20, 21, 50, -1, 60, -1}; // [layer, request, page]
    view.table = by_layer;
    view.layer_stride = 4;
    CHECK(slots(0, view) == narrow{40, 41, 42, 43, 44, 80, 81, 82});
    CHECK(slots(1, view) == narrow{200, 201, 240}); // one page is enough for this layer

    const std::int32_t by_id[] = {-1, -1, -1, -1, 20, 21, 10, 11}; // [slot of the ledger, page]
    view.table = by_id;
    view.layer_stride = 0;
    view.rows = up::request_index::ledger;
    CHECK(slots(0, view) == narrow{40, 41, 42, 43, 44, 80, 81, 82});

    const std::int32_t token_slots[] = {9, 7, 5, 3, 1, 8, 6, 4, 2, 0}; // a page size of 1
    view = {token_slots, 0, 5, 5, 1, up::request_index::batch};
    CHECK(slots(0, view) == narrow{9, 7, 5, 3, 1, 8, 6, 4});

    up::contiguous_slots contiguous{1000, 100, 100, up::request_index::ledger};
    CHECK(slots(0, contiguous) == narrow{300, 301, 302, 303, 304, 200, 201, 202});
    CHECK(slots(1, contiguous) == narrow{1300, 1301, 1200});
    contiguous.rows = up::request_index::batch;
    CHECK(slots(1, contiguous) == narrow{1000, 1001, 1100});
    must(owner.ledger.commit_step(step));
}

TEST_CASE("a slot source of the engine's own", "[ledger]") {
    struct reversed {
        up::request_index rows = up::request_index::batch;
        up::status check() const { return up::success(); }
        std::int64_t slot(std::int32_t layer, std::int32_t, std::int32_t row) const {
            return 1000 * (layer + 1) - row;
        }
    };
    owned_ledger owner = make_ledger({}, 2, set_relation::nested);
    must(owner.ledger.admit(0));
    rows_batch batch;
    batch.add(0, request_tag::prefill, range(0, 3));
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    std::int64_t out[3];
    must(owner.ledger.slot_mapping(step, 1, reversed{}, out, 3));
    CHECK((out[0] == 2000 && out[1] == 1999 && out[2] == 1998));
    must(owner.ledger.commit_step(step));
}

TEST_CASE("a prefill parked between layers while other requests run", "[ledger]") {
    owned_ledger owner = make_ledger({0, 1}, 3, set_relation::nested);
    must(owner.ledger.admit(0));
    must(owner.ledger.admit(1));
    open_step parked(owner, {{0, request_tag::prefill, range(0, 500), range(0, 100)}}, 1);
    open_step(owner, {{1, request_tag::prefill, range(0, 40), range(0, 30)}}, 1).commit();
    open_step(owner, {{1, request_tag::decode, {40}, {40}}}, 1).commit();
    rows_batch fewer;
    fewer.add(0, request_tag::prefill, range(0, 7));
    must(owner.ledger.append(parked.step, 2, fewer.view()));
    parked.commit();
    CHECK(owner.held(0, 1) == range(0, 100));
    CHECK(owner.held(0, 2) == range(0, 7));
    CHECK(owner.rows(1, 2).length() == 31);
}

TEST_CASE("positions that the engine leaves to the ledger", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
    must(owner.ledger.admit(0));
    open_step(owner, {{0, request_tag::prefill, range(0, 100), range(0, 32)}}, 1).commit();
    rows_batch batch;
    batch.add(0, request_tag::decode, {100});
    up::batch_view view = batch.view();
    view.positions = nullptr;
    up::ledger_step step;
    must(owner.ledger.begin_step(view, batch.ids.data(), step));
    std::int64_t position = 0;
    must(owner.ledger.row_positions(step, 1, &position, 1));
    CHECK(position == 100);
    must(owner.ledger.commit_step(step));
}

TEST_CASE("nothing to do is legal everywhere", "[ledger]") {
    owned_ledger owner = make_ledger({0}, 2, set_relation::nested);
    up::batch_view nothing;
    up::ledger_step step;
    must(owner.ledger.begin_step(nothing, nullptr, step));
    must(owner.ledger.append(step, 1, nothing));
    std::int32_t rows = -1;
    must(owner.ledger.num_rows(step, 1, rows));
    CHECK(rows == 0);
    must(owner.ledger.seq_lens(step, 1, static_cast<std::int32_t*>(nullptr), 0));
    std::int32_t end = -1;
    must(owner.ledger.cu_seqlens(step, 1, &end, 1));
    CHECK(end == 0);
    must(owner.ledger.commit_step(step));

    owned_ledger empty = make_ledger({0}, 2, set_relation::nested, 0, 1);
    must(empty.ledger.admit(0));
    open_step(empty, {{0, request_tag::prefill, {}, {}}}, 1).commit();
    CHECK(empty.rows(0, 1).length() == 0);
    CHECK(empty.rows(0, 1).copy_dropped_ranges(nullptr, 0) == 0);
}
