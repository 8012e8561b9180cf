// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Pages in use, pages handed back, pages that a fork shares: by layer, with and without windows.

#include "ledger/refusals.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

using ids = std::vector<std::int32_t>;

bool same(const up::page_span& span, std::int32_t begin, std::int32_t end) {
    return span.begin == begin && span.end == end;
}

/// Tables of 8 pages of 4 rows for 3 requests, one table for each of 5 layers or one for all. Page ids are
/// 1000 * (layer + 1) + 100 * request + entry.
struct paged {
    static constexpr std::int32_t page = 4;
    std::int32_t layers;
    ids table;
    std::vector<up::page_span> in_use;
    up::page_tables view;

    explicit paged(bool shared)
        : layers(shared ? 1 : 5)
        , in_use(static_cast<std::size_t>(layers * 3)) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            for (std::int32_t request = 0; request < 3; ++request) {
                for (std::int32_t entry = 0; entry < 8; ++entry) {
                    table.push_back(1000 * (layer + 1) + 100 * request + entry);
                }
            }
        }
        view.table = table.data();
        view.in_use = in_use.data();
        view.request_stride = 8;
        view.max_pages = 8;
        if (!shared) {
            view.layer_stride = 24;
            view.span_layer_stride = 3;
        }
        view.rows = up::request_index::ledger;
    }
    void use(std::int32_t request, std::int32_t begin, std::int32_t end) {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            view.span(layer, request) = {begin, end};
        }
    }
};

/// Layers 0 to 4, of which 0 and 2 select.
owned_ledger make_server() {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    for (std::int32_t id = 0; id < 3; ++id) {
        must(owner.ledger.admit(id));
    }
    return owner;
}

ids hand_back(owned_ledger& owner, const ids& requests, const up::layer_list& layers,
              const up::page_rule& rule, const up::page_tables& tables, std::int32_t capacity = 100) {
    ids pages(static_cast<std::size_t>(capacity), -77);
    std::int32_t count = -1;
    must(owner.ledger.hand_back_pages(requests.data(), static_cast<std::int32_t>(requests.size()), layers,
                                      rule, tables, pages.data(), capacity, count));
    for (std::size_t i = static_cast<std::size_t>(count); i < pages.size(); ++i) {
        CHECK(pages[i] == -77);
    }
    pages.resize(static_cast<std::size_t>(count));
    return pages;
}

} // namespace

TEST_CASE("pages of dropped positions are handed back layer by layer", "[ledger]") {
    owned_ledger owner = make_server();
    paged pool(false);
    pool.use(0, 0, 6); // an engine that takes pages for the whole prompt before it runs
    pool.use(1, 0, 2);
    const up::page_rule rule{paged::page, 0, 0};
    open_step step(owner,
                   {{0, request_tag::prefill, range(0, 23), {0, 1, 2, 3, 4, 5, 6, 7, 8}},
                    {1, request_tag::prefill, range(0, 7), range(0, 7)}},
                   1);
    CHECK(hand_back(owner, {0, 1}, {0, 1}, rule, pool.view).empty()); // layer 0 holds everything
    CHECK(hand_back(owner, {0, -1, 1}, {1, 1}, rule, pool.view) == ids{2003, 2004, 2005});
    rows_batch fewer;
    fewer.add(0, request_tag::prefill, {7});
    fewer.add(1, request_tag::prefill, {});
    must(owner.ledger.append(step.step, 3, fewer.view()));
    step.commit();
    CHECK(hand_back(owner, {0, 1}, owner.ledger.every_layer(), rule, pool.view) ==
          ids{3003, 3004, 3005, 4001, 4002, 4003, 4004, 4005, 4100, 4101, 5001, 5002, 5003, 5004, 5005, 5100,
              5101});
    CHECK(hand_back(owner, {0, 1}, owner.ledger.every_layer(), rule, pool.view).empty());
    CHECK(same(pool.view.span(0, 0), 0, 6));
    CHECK(same(pool.view.span(2, 0), 0, 3));
    CHECK(same(pool.view.span(4, 0), 0, 1));
    CHECK(same(pool.view.span(4, 1), 0, 0));
    CHECK(pool.view.entries(4, 0)[0] == 5000);
    CHECK(pool.view.entries(4, 0)[1] == -1);
    up::page_usage usage;
    must(owner.ledger.pages_of(0, owner.ledger.every_layer(), rule, usage));
    CHECK(usage.pages == 6 + 3 + 3 + 1 + 1);
    CHECK(usage.dense_pages == 5 * 6);
    must(owner.ledger.rollback(0, 5));
    CHECK(hand_back(owner, {0}, {0, 3}, rule, pool.view) == ids{1002, 1003, 1004, 1005, 2002, 3002});
    must(owner.ledger.pages_of(0, {3, 1}, rule, usage));
    CHECK((usage.pages == 0 && usage.dense_pages == 2));
}

TEST_CASE("a table that layers share keeps what any of them needs", "[ledger]") {
    owned_ledger owner = make_server();
    paged pool(true);
    pool.use(0, 0, 6);
    const up::page_rule rule{paged::page, 0, 0};
    open_step step(owner, {{0, request_tag::prefill, range(0, 23), {0, 1, 2, 3, 4, 20, 21, 22}}}, 1);
    rows_batch fewer;
    fewer.add(0, request_tag::prefill, {22});
    must(owner.ledger.append(step.step, 3, fewer.view()));
    step.commit();
    const std::int32_t later[] = {4, 1, 3}; // 1 row, 8 rows, 1 row
    const std::int32_t all[] = {3, 2, 0, 1};
    CHECK(hand_back(owner, {0}, {0, 4, all}, rule, pool.view).empty());
    // A window of 2 sees the only row of layers 3 and 4, but no more than the last page of layer 1.
    CHECK(hand_back(owner, {0}, {0, 3, later}, {paged::page, 2, 0}, pool.view) ==
          ids{1002, 1003, 1004, 1005});
    const std::int32_t last[] = {4, 3};
    CHECK(hand_back(owner, {0}, {0, 2, last}, rule, pool.view) == ids{1001});
}

TEST_CASE("windows pass pages by original position", "[ledger]") {
    owned_ledger owner = make_server();
    paged pool(false);
    pool.use(0, 0, 7);
    // Layers 1 and 2 hold 0..4, 10, 20, 21, 22: pages of positions {0 1 2 3} {4 10 20 21} {22}.
    open_step(owner, {{0, request_tag::prefill, range(0, 23), {0, 1, 2, 3, 4, 10, 20, 21, 22}}}, 1).commit();
    const auto live = [&](std::int32_t layer, std::int32_t window, std::int32_t max_rollback) {
        return owner.rows(0, layer).live_pages({paged::page, window, max_rollback});
    };
    // The next query is at 23. By rows a window of 6 would have passed {0 1 2}: no page; by position it has
    // passed all but 18..22.
    CHECK(same(live(1, 6, 0), 1, 3));
    CHECK(same(live(0, 6, 0), 4, 6));
    CHECK(same(live(1, 20, 0), 1, 3));
    CHECK(same(live(1, 21, 0), 0, 3)); // 3 is still seen
    CHECK(same(live(1, 20, 1), 0, 3)); // and would be again after a rollback
    CHECK(same(live(1, 20, 1000), 0, 3));
    CHECK(same(live(1, 0, 0), 0, 3));
    CHECK(same(live(1, 1, 0), 2, 3)); // the partly filled page is written next
    CHECK(same(live(0, 1, 0), 5, 6));
    CHECK(same(live(1, 2'000'000'000, 0), 0, 3));
    const std::int32_t windowed[] = {1};
    CHECK(hand_back(owner, {0}, {0, 1, windowed}, {paged::page, 6, 0}, pool.view) ==
          ids{2000, 2003, 2004, 2005, 2006});
    CHECK(same(pool.view.span(1, 0), 1, 3));
    // In an open step the window is that of its first row, committed rows decide.
    open_step verify(owner, {{0, request_tag::verify, range(23, 27), range(23, 27)}}, 1);
    CHECK(same(live(0, 2, 0), 5, 7));
    CHECK(same(live(1, 6, 0), 1, 4));
    verify.commit();
    CHECK(same(live(0, 2, 0), 6, 7));
    CHECK(same(live(0, 2, 4), 5, 7));
    must(owner.ledger.rollback(0, 23));
    CHECK(same(live(0, 2, 0), 5, 6));
    // A full last page that the window has passed: nothing is live, the next row starts a page.
    open_step(owner, {{1, request_tag::prefill, range(0, 12), {0, 1, 2, 3}}}, 1).commit();
    pool.use(1, 0, 1);
    CHECK(hand_back(owner, {1}, {1, 1}, {paged::page, 4, 0}, pool.view) == ids{2100});
    CHECK(same(pool.view.span(1, 1), 1, 1));
    up::page_usage usage;
    must(owner.ledger.pages_of(1, {1, 2}, {paged::page, 4, 0}, usage));
    CHECK((usage.pages == 0 && usage.dense_pages == 2)); // 9, 10, 11 are seen
}

TEST_CASE("pages are handed back, tokens rolled back, pages handed back", "[ledger]") {
    owned_ledger owner = make_server();
    paged pool(false);
    open_step(owner, {{0, request_tag::prefill, range(0, 24), range(0, 24)}}, 1).commit();
    pool.use(0, 0, 6);
    const up::page_rule rule{paged::page, 4, 4};
    CHECK(hand_back(owner, {0}, {0, 1}, rule, pool.view) == ids{1000, 1001, 1002, 1003});
    CHECK(same(pool.view.span(0, 0), 4, 6)); // the query at 20 sees 17..
    must(owner.ledger.rollback(0, 20));
    // A query at 16 would see pages that have gone. Nobody asks for it: nothing comes back to the table.
    CHECK(hand_back(owner, {0}, {0, 1}, rule, pool.view) == ids{1005});
    CHECK(same(pool.view.span(0, 0), 4, 5));
    must(owner.ledger.rollback(0, 16));
    CHECK(hand_back(owner, {0}, {0, 1}, rule, pool.view) == ids{1004});
    CHECK(same(pool.view.span(0, 0), 4, 4)); // the next row takes entry 4
}

TEST_CASE("a fork shares full pages and copies the partly filled one, layer by layer", "[ledger]") {
    owned_ledger owner = make_server();
    must(owner.ledger.release(2));
    open_step(owner, {{0, request_tag::prefill, range(0, 22), {0, 1, 2, 3, 4, 5, 6, 7}}}, 1).commit();
    must(owner.ledger.fork(0, 2));
    const up::page_rule rule{paged::page, 0, 0};
    const up::forked_pages dense = owner.rows(2, 0).fork_pages(rule);
    CHECK(same(dense.shared, 0, 5));
    CHECK((dense.copied == 5 && dense.copied_rows == 2));
    const up::forked_pages full = owner.rows(2, 1).fork_pages(rule);
    CHECK(same(full.shared, 0, 2));
    CHECK((full.copied == -1 && full.copied_rows == 0));
    const up::forked_pages windowed = owner.rows(2, 0).fork_pages({paged::page, 6, 0});
    CHECK(same(windowed.shared, 4, 5)); // 17.. are seen by the query at 22
    CHECK(windowed.copied == 5);

    // Each goes on alone.
    open_step(owner, {{0, request_tag::decode, {22}, {22}}}, 1).commit();
    open_step(owner, {{2, request_tag::chunk, range(22, 30), {25}}}, 1).commit();
    CHECK(owner.held(0, 1) == positions{0, 1, 2, 3, 4, 5, 6, 7, 22});
    CHECK(owner.held(2, 1) == positions{0, 1, 2, 3, 4, 5, 6, 7, 25});
    CHECK(owner.held(0, 0) == range(0, 23));
    CHECK(owner.held(2, 0) == range(0, 30));
    // After a rollback into a shared page the next step asks for a copy of that one.
    must(owner.ledger.rollback(2, 6));
    rows_batch batch;
    batch.add(2, request_tag::decode, {6});
    batch.add(0, request_tag::decode, {23});
    up::ledger_step step;
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    std::int64_t partial[4];
    up::step_arrays<std::int64_t> out;
    out.num_requests = 2;
    out.partial_pages = partial;
    out.page_tokens = paged::page;
    must(owner.ledger.look_up(step, {0, 2}, out));
    CHECK((partial[0] == 1 && partial[1] == 5));
    CHECK((partial[2] == 1 && partial[3] == 2));
    must(owner.ledger.abort_step(step));
    must(owner.ledger.release(0));
    CHECK(owner.held(2, 1) == range(0, 6));
    CHECK(owner.canaries_intact());
}

TEST_CASE("a fork that can't be", "[ledger]") {
    owned_ledger owner = make_server();
    const auto refuse = [&](std::int32_t from, std::int32_t to, status_code code, const std::string& argument,
                            std::int32_t named) {
        const std::vector<std::byte> before = owner.snapshot();
        check_refused(owner.ledger.fork(from, to), code, argument, named);
        CHECK(owner.is(before));
    };
    refuse(3, 2, status_code::unknown_request, "request", 3);
    refuse(-1, 3, status_code::unknown_request, "request", -1);
    refuse(0, 1, status_code::wrong_state, "copy", 1);
    refuse(0, 0, status_code::wrong_state, "copy", 0);
    refuse(0, 4, status_code::out_of_range, "copy", 4);
    refuse(0, -1, status_code::out_of_range, "copy", -1);
    open_step step(owner, {{0, request_tag::prefill, range(0, 3), range(0, 3)}}, 1);
    refuse(0, 3, status_code::wrong_state, "request", 0);
    step.abort();
    must(owner.ledger.fork(0, 3));
    CHECK(owner.held(3, 0).empty());
}

TEST_CASE("pages that can't be handed back leave tables as they were", "[ledger]") {
    owned_ledger owner = make_server();
    paged pool(false);
    pool.use(0, 0, 6);
    pool.use(1, 0, 6);
    open_step(owner, {{0, request_tag::prefill, range(0, 9), {0}}, {1, request_tag::prefill, {0}, {0}}}, 1)
        .commit();
    const auto refuse = [&](const ids& requests, const up::layer_list& layers, auto change, status_code code,
                            const std::string& argument, std::int32_t request, std::int32_t layer) {
        up::page_rule rule{paged::page, 0, 0};
        up::page_tables tables = pool.view;
        std::int32_t capacity = 100;
        change(rule, tables, capacity);
        const ids before = pool.table;
        ids pages(100, -77);
        std::int32_t count = -77;
        check_refused(owner.ledger.hand_back_pages(requests.data(),
                                                   static_cast<std::int32_t>(requests.size()), layers, rule,
                                                   tables, pages.data(), capacity, count),
                      code, argument, request, layer);
        CHECK(count == -77);
        CHECK(pages == ids(100, -77));
        CHECK(pool.table == before);
        CHECK(same(pool.view.span(0, 0), 0, 6));
    };
    const auto nothing = [](auto&, auto&, auto&) {};
    const auto bad = status_code::invalid_argument;
    const up::layer_list all = owner.ledger.every_layer();
    refuse({0, 3}, all, nothing, status_code::unknown_request, "request", 3, -1);
    refuse({0, -2}, all, nothing, status_code::unknown_request, "request", -2, -1);
    refuse({0}, {3, 3}, nothing, status_code::out_of_range, "layers", -1, -1);
    refuse(
        {0}, all, [](auto& r, auto&, auto&) { r.page_tokens = 0; }, bad, "page_rule.page_tokens", -1, -1);
    refuse(
        {0}, all, [](auto& r, auto&, auto&) { r.window = -1; }, bad, "page_rule.window", -1, -1);
    refuse(
        {0}, all, [](auto& r, auto&, auto&) { r.max_rollback = -1; }, bad, "page_rule.max_rollback", -1, -1);
    refuse(
        {0}, all, [](auto&, auto& t, auto&) { t.table = nullptr; }, bad, "page_tables.table", -1, -1);
    refuse(
        {0}, all, [](auto&, auto& t, auto&) { t.max_pages = -1; }, bad, "page_tables.table", -1, -1);
    refuse(
        {0}, all, [](auto&, auto& t, auto&) { t.in_use = nullptr; }, bad, "page_tables.in_use", -1, -1);
    refuse(
        {0}, all, [](auto&, auto& t, auto&) { t.span_layer_stride = 0; }, bad,
        "page_tables.span_layer_stride", -1, -1);
    refuse(
        {0}, all, [](auto&, auto& t, auto&) { t.max_pages = 5; }, bad, "page_tables.in_use", 0, 0);
    refuse(
        {0}, all, [](auto&, auto&, auto& capacity) { capacity = -1; }, bad, "pages", -1, -1);
    // 3 pages too many in layer 0, 5 in each of the others; request 1: 5 in each.
    refuse(
        {0, 1}, all, [](auto&, auto&, auto& capacity) { capacity = 47; }, status_code::capacity_exceeded,
        "capacity", -1, -1);
    pool.view.span(3, 1) = {4, 3};
    refuse({0, 1}, all, nothing, bad, "page_tables.in_use", 1, 3);
    pool.view.span(3, 1) = {-1, 3};
    refuse({0, 1}, all, nothing, bad, "page_tables.in_use", 1, 3);
    pool.view.span(3, 1) = {0, 6};
    pool.view.entries(2, 0)[4] = -5;
    refuse({0}, all, nothing, bad, "page_tables.table", 0, 2);
    pool.view.no_page = 3005; // handed back before
    pool.view.entries(2, 0)[4] = 3005;
    refuse({0}, all, nothing, bad, "page_tables.table", 0, 2);
    pool.view.entries(2, 0)[4] = 3004;
    pool.view.no_page = 0;
    CHECK(hand_back(owner, {0, 1}, all, {paged::page, 0, 0}, pool.view, 48).size() == 48);
    CHECK(pool.view.entries(2, 0)[4] == 0);
    up::page_usage usage{-77, -77};
    check_refused(owner.ledger.pages_of(3, all, {}, usage), status_code::unknown_request, "request", 3);
    check_refused(owner.ledger.pages_of(0, {0, 6}, {}, usage), status_code::out_of_range, "layers", 0);
    check_refused(owner.ledger.pages_of(0, all, {0, 0, 0}, usage), bad, "page_rule.page_tokens", 0);
    CHECK(usage.pages == -77);
}
