// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What an engine's kernels read of a step: every layer at once, logits, windows, paddings, both index types.

#include "ledger/refusals.hpp"

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

constexpr std::int32_t page = 4;

/// Layers 0 to 4, of which 0 and 2 select. Request 0: 20 positions, of which layers 1 and 2 hold 6, layers 3
/// and 4 hold 3. Request 1 decodes without drops. Request 2 is empty.
struct server {
    owned_ledger owner = make_ledger({0, 2}, 5, set_relation::nested);
    rows_batch batch;
    up::ledger_step step;
    std::vector<std::int32_t> table; // [layer, request, page]
    up::block_table_view view;

    server() {
        for (std::int32_t id = 0; id < 3; ++id) {
            must(owner.ledger.admit(id));
        }
        open_step first(owner, {{0, request_tag::chunk, range(0, 20), {0, 1, 2, 9, 18, 19}}}, 1);
        rows_batch fewer;
        fewer.add(0, request_tag::chunk, {0, 18, 19});
        must(owner.ledger.append(first.step, 3, fewer.view()));
        first.commit();
        open_step(owner, {{1, request_tag::prefill, range(0, 7), range(0, 7)}}, 1).commit();
        for (std::int32_t i = 0; i < 5 * 4 * 100; ++i) {
            table.push_back(7 * i % 1000);
        }
        view.table = table.data();
        view.layer_stride = 400;
        view.request_stride = 100;
        view.max_pages = 100;
        view.page_tokens = page;
        view.rows = up::request_index::ledger;
    }

    /// A chunk, an empty place, a verification and a whole prompt.
    void begin() {
        batch.add(0, request_tag::chunk, range(20, 30));
        batch.add(-1, request_tag::decode, {});
        batch.add(1, request_tag::verify, range(7, 10));
        batch.add(2, request_tag::prefill, range(0, 5));
        must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
        rows_batch entering;
        entering.add(0, request_tag::chunk, {20, 21, 29});
        entering.add(-1, request_tag::decode, {});
        entering.add(1, request_tag::verify, range(7, 10));
        entering.add(2, request_tag::prefill, {0, 3, 4});
        must(owner.ledger.append(step, 1, entering.view()));
        rows_batch fewer;
        fewer.add(0, request_tag::chunk, {20});
        fewer.add(-1, request_tag::decode, {});
        fewer.add(1, request_tag::verify, range(7, 10));
        fewer.add(2, request_tag::prefill, {4});
        must(owner.ledger.append(step, 3, fewer.view()));
    }

    std::vector<std::int64_t> slots(const std::vector<std::pair<std::int32_t, std::int32_t>>& rows,
                                    std::int32_t layer) const {
        std::vector<std::int64_t> made;
        for (const auto& [request, row] : rows) {
            made.push_back(view.slot(layer, request, row));
        }
        return made;
    }
};

/// Arrays of each kind, with room for `layers` parts.
template <class Index, class Slot>
struct owned_arrays {
    std::vector<Index> cached, lens, cu, pages, partial, positions, write, window;
    std::vector<Slot> slots;
    up::step_arrays<Index, Slot> view;

    owned_arrays(std::size_t layers, std::int32_t requests, std::int32_t rows) {
        const auto by_request = layers * static_cast<std::size_t>(requests);
        const auto by_row = layers * static_cast<std::size_t>(rows);
        for (auto* array : {&cached, &lens, &pages, &partial}) {
            array->assign(by_request, -77);
        }
        cu.assign(by_request + layers, -77);
        for (auto* array : {&positions, &write, &window}) {
            array->assign(by_row, -77);
        }
        slots.assign(by_row, -77);
        view.num_requests = requests;
        view.num_rows = rows;
        view.cached_lens = cached.data();
        view.seq_lens = lens.data();
        view.cu_seqlens = cu.data();
        view.num_pages = pages.data();
        view.partial_pages = partial.data();
        view.row_positions = positions.data();
        view.write_rows = write.data();
        view.window_rows = window.data();
        view.slots = slots.data();
        view.page_tokens = page;
        view.window = 12;
    }
    template <class Entry>
    static std::vector<std::int64_t> part(const std::vector<Entry>& of, std::size_t layer, std::size_t size) {
        const auto begin = of.begin() + static_cast<std::ptrdiff_t>(layer * size);
        return {begin, begin + static_cast<std::ptrdiff_t>(size)};
    }
};

using wide = std::vector<std::int64_t>;

template <class Index, class Slot>
void check_all_layers() {
    server s;
    s.begin();
    owned_arrays<Index, Slot> out(5, 6, 20);
    out.view.no_slot = 0; // as an engine with a slot to throw away pads
    must(s.owner.ledger.look_up(s.step, s.owner.ledger.every_layer(), s.view, out.view));
    const auto part = [&](const auto& of, std::size_t layer, std::size_t size) {
        return out.part(of, layer, size);
    };
    CHECK(part(out.cached, 0, 6) == wide{20, 0, 7, 0, 0, 0});
    CHECK(part(out.cached, 2, 6) == wide{6, 0, 7, 0, 0, 0});
    CHECK(part(out.cached, 4, 6) == wide{3, 0, 7, 0, 0, 0});
    CHECK(part(out.lens, 0, 6) == wide{30, 0, 10, 5, 0, 0});
    CHECK(part(out.lens, 2, 6) == wide{9, 0, 10, 3, 0, 0});
    CHECK(part(out.lens, 4, 6) == wide{4, 0, 10, 1, 0, 0});
    CHECK(part(out.cu, 0, 7) == wide{0, 10, 10, 13, 18, 18, 18});
    CHECK(part(out.cu, 4, 7) == wide{0, 1, 1, 4, 5, 5, 5});
    CHECK(part(out.pages, 0, 6) == wide{8, 0, 3, 2, 0, 0});
    CHECK(part(out.pages, 2, 6) == wide{3, 0, 3, 1, 0, 0});
    CHECK(part(out.pages, 4, 6) == wide{1, 0, 3, 1, 0, 0});
    CHECK(part(out.partial, 0, 6) == wide{-1, -1, 1, -1, -1, -1}); // request 0: 20 rows fill 5 pages
    CHECK(part(out.partial, 2, 6) == wide{1, -1, 1, -1, -1, -1});
    CHECK(part(out.partial, 4, 6) == wide{0, -1, 1, -1, -1, -1});
    CHECK(part(out.positions, 3, 20) ==
          wide{20, 7, 8, 9, 4, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
    CHECK(part(out.write, 3, 20) ==
          wide{3, 7, 8, 9, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
    // 12 positions up to 20, of the rows 0, 18, 19, 20: the second row. Nothing has left the others' windows.
    CHECK(part(out.window, 3, 20) ==
          wide{1, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
    for (const std::int32_t layer : {3, 4}) { // one set, but a table for each layer
        wide slots = s.slots({{0, 3}, {1, 7}, {1, 8}, {1, 9}, {2, 0}}, layer);
        slots.resize(20, 0);
        CHECK(part(out.slots, static_cast<std::size_t>(layer), 20) == slots);
    }
    for (std::size_t layer = 1; layer < 5; layer += 2) { // layers of one set tell the same
        CHECK(part(out.lens, layer, 6) == part(out.lens, layer + (layer == 3), 6));
    }
    CHECK(part(out.window, 1, 20) == part(out.window, 2, 20));
    CHECK(part(out.cu, 1, 7) == part(out.cu, 2, 7));
    must(s.owner.ledger.commit_step(s.step));
}

} // namespace

TEST_CASE("every layer at once, in any index types", "[ledger]") {
    check_all_layers<std::int32_t, std::int64_t>();
    check_all_layers<std::int32_t, std::int32_t>();
    check_all_layers<std::int64_t, std::int64_t>();
}

TEST_CASE("every layer at once tells what each layer tells", "[ledger]") {
    server s;
    s.begin();
    for (const std::int64_t stride : {400, 0}) {
        s.view.layer_stride = stride;
        const std::int32_t asked[] = {4, 1, 1, 0, 3};
        owned_arrays<std::int32_t, std::int64_t> out(5, 4, 18);
        must(s.owner.ledger.look_up(s.step, {0, 5, asked}, s.view, out.view));
        for (std::size_t i = 0; i < 5; ++i) {
            std::vector<std::int64_t> by_row(18);
            must(s.owner.ledger.slot_mapping(s.step, asked[i], s.view, by_row.data(), 18));
            CHECK(out.part(out.slots, i, 18) == by_row);
            must(s.owner.ledger.row_positions(s.step, asked[i], by_row.data(), 18));
            CHECK(out.part(out.positions, i, 18) == by_row);
            must(s.owner.ledger.write_rows(s.step, asked[i], by_row.data(), 18));
            CHECK(out.part(out.write, i, 18) == by_row);
            std::vector<std::int64_t> by_request(4);
            must(s.owner.ledger.seq_lens(s.step, asked[i], by_request.data(), 4));
            CHECK(out.part(out.lens, i, 4) == by_request);
            must(s.owner.ledger.cached_lens(s.step, asked[i], by_request.data(), 4));
            CHECK(out.part(out.cached, i, 4) == by_request);
            by_request.resize(5);
            must(s.owner.ledger.cu_seqlens(s.step, asked[i], by_request.data(), 5));
            CHECK(out.part(out.cu, i, 5) == by_request);
        }
    }
    must(s.owner.ledger.commit_step(s.step));
}

TEST_CASE("chunks of rows, for layers that run over rows", "[ledger]") {
    server s;
    s.begin(); // rows by layer: 10, 0, 3, 5 in layer 0; 3, 0, 3, 3 in 1 and 2; 1, 0, 3, 1 in 3 and 4
    std::vector<std::int32_t> pairs(5 * 2 * 9, -77);
    up::step_arrays<> out;
    out.num_chunks = 9;
    out.chunk_rows = 4;
    out.chunks = pairs.data();
    must(s.owner.ledger.look_up(s.step, s.owner.ledger.every_layer(), out));
    const auto part = [&](std::ptrdiff_t layer) {
        return std::vector<std::int32_t>(pairs.begin() + 18 * layer, pairs.begin() + 18 * (layer + 1));
    };
    CHECK(part(0) == std::vector<std::int32_t>{0, 0, 0, 1, 0, 2, 2, 0, 3, 0, 3, 1, -1, -1, -1, -1, -1, -1});
    for (const std::ptrdiff_t layer : {1, 2, 3, 4}) {
        CHECK(part(layer) ==
              std::vector<std::int32_t>{0, 0, 2, 0, 3, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1});
    }
    out.num_chunks = 5;
    check_refused(s.owner.ledger.look_up(s.step, {0, 5}, out), status_code::out_of_range,
                  "step_arrays.num_chunks", -1, 0);
    out.num_chunks = -1;
    check_refused(s.owner.ledger.look_up(s.step, {0, 5}, out), status_code::invalid_argument,
                  "step_arrays.num_chunks", -1);
    out.num_chunks = 9;
    out.chunk_rows = 0;
    check_refused(s.owner.ledger.look_up(s.step, {0, 5}, out), status_code::invalid_argument,
                  "step_arrays.chunk_rows", -1);
    must(s.owner.ledger.commit_step(s.step));
}

TEST_CASE("arrays that nobody wants are left alone", "[ledger]") {
    server s;
    s.begin();
    up::step_arrays<> wanted;
    std::vector<std::int32_t> lens(20);
    wanted.num_requests = 4; // no rows: nothing by row is wanted
    wanted.seq_lens = lens.data();
    must(s.owner.ledger.look_up(s.step, s.owner.ledger.every_layer(), s.view, wanted));
    CHECK(lens[0] == 30);
    CHECK(lens[16] == 4);
    must(s.owner.ledger.look_up(s.step, {2, 0}, s.view, wanted));
    must(s.owner.ledger.look_up(s.step, {4, 1}, wanted));
    CHECK(lens[0] == 4);
    std::int64_t slot = -7;
    wanted.slots = &slot;
    wanted.num_rows = 100;
    check_refused(s.owner.ledger.look_up(s.step, {4, 1}, wanted), status_code::invalid_argument,
                  "step_arrays.slots", -1);
    CHECK(slot == -7);
    must(s.owner.ledger.commit_step(s.step));
}

TEST_CASE("rows that need logits", "[ledger]") {
    server s;
    s.begin();
    const auto rows = [&](std::int32_t layer, const up::span_lists& wanted, std::int32_t size,
                          std::vector<std::int64_t> expected_offsets) {
        wide out(static_cast<std::size_t>(size), -77);
        std::vector<std::int64_t> offsets(5, -77);
        must(s.owner.ledger.logits_rows(s.step, layer, wanted, out.data(), size, offsets.data()));
        CHECK(offsets == expected_offsets);
        std::vector<std::int32_t> narrow(out.size());
        must(s.owner.ledger.logits_rows(s.step, layer, wanted, narrow.data(), size));
        CHECK(wide(narrow.begin(), narrow.end()) == out);
        return out;
    };
    // The chunk's last position (29) was dropped by layer 2; layer 1 still has it.
    CHECK(rows(4, {}, 7, {0, 1, 1, 4, 5}) == wide{-1, 1, 2, 3, 4, -1, -1});
    CHECK(rows(1, {}, 5, {0, 1, 1, 4, 5}) == wide{2, 3, 4, 5, 8});
    CHECK(rows(0, {}, 5, {0, 1, 1, 4, 5}) == wide{9, 10, 11, 12, 17});
    // Chosen positions, one list for all chunks of a prompt.
    const up::position_span spans[] = {{5, 8}, {19, 22}, {29, 40}, {8, 9}, {0, 4}};
    const std::int32_t offsets[] = {0, 3, 3, 4, 5};
    CHECK(rows(0, {offsets, spans}, 9, {0, 3, 3, 4, 8}) == wide{0, 1, 9, 11, 13, 14, 15, 16, -1});
    CHECK(rows(1, {offsets, spans}, 8, {0, 3, 3, 4, 8}) == wide{0, 1, 2, 4, 6, -1, -1, 7});
    CHECK(rows(4, {offsets, spans}, 8, {0, 3, 3, 4, 8}) == wide{0, -1, -1, 2, -1, -1, -1, -1});
    must(s.owner.ledger.commit_step(s.step));
}

TEST_CASE("a decode step in three calls", "[ledger]") {
    server s;
    rows_batch batch;
    batch.add(1, request_tag::decode, {7});
    batch.add(0, request_tag::decode, {20});
    up::ledger_step step;
    must(s.owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    owned_arrays<std::int32_t, std::int64_t> out(5, 2, 2);
    must(s.owner.ledger.look_up(step, s.owner.ledger.every_layer(), s.view, out.view));
    must(s.owner.ledger.commit_step(step));
    CHECK(out.lens == std::vector<std::int32_t>{8, 21, 8, 7, 8, 7, 8, 4, 8, 4});
    CHECK(out.write == std::vector<std::int32_t>{7, 20, 7, 6, 7, 6, 7, 3, 7, 3});
    CHECK(out.positions == std::vector<std::int32_t>{7, 20, 7, 20, 7, 20, 7, 20, 7, 20});
    CHECK(out.window == std::vector<std::int32_t>{0, 9, 0, 3, 0, 3, 0, 1, 0, 1});
}

TEST_CASE("look-ups that can't be answered leave the arrays as they were", "[ledger]") {
    server s;
    s.begin();
    owned_arrays<std::int32_t, std::int32_t> out(5, 4, 18);
    const owned_arrays<std::int32_t, std::int32_t> untouched(5, 4, 18);
    const auto refuse = [&](const up::layer_list& layers, auto change, status_code code,
                            const std::string& argument, std::int32_t request, std::int32_t layer) {
        auto arrays = out.view;
        up::block_table_view table = s.view;
        change(arrays, table);
        check_refused(s.owner.ledger.look_up(s.step, layers, table, arrays), code, argument, request, layer);
        CHECK(out.lens == untouched.lens);
        CHECK(out.slots == untouched.slots);
        CHECK(out.positions == untouched.positions);
    };
    const auto nothing = [](auto&, auto&) {};
    const auto all = s.owner.ledger.every_layer();
    const auto bad = status_code::invalid_argument;
    const auto range_code = status_code::out_of_range;
    const std::int32_t wrong_layers[] = {0, 5};
    refuse({0, 6}, nothing, range_code, "layers", -1, -1);
    refuse({-1, 2}, nothing, range_code, "layers", -1, -1);
    refuse({0, -1}, nothing, bad, "layers.count", -1, -1);
    refuse({0, 2, wrong_layers}, nothing, range_code, "layer", -1, 5);
    refuse(
        all, [](auto& a, auto&) { a.num_requests = 3; }, range_code, "step_arrays.num_requests", -1, -1);
    refuse(
        all, [](auto& a, auto&) { a.num_requests = -1; }, bad, "step_arrays.num_requests", -1, -1);
    refuse(
        all, [](auto& a, auto&) { a.num_rows = 17; }, range_code, "step_arrays.num_rows", -1, 0);
    refuse(
        {1, 4}, [](auto& a, auto&) { a.num_rows = 8; }, range_code, "step_arrays.num_rows", -1, 1);
    refuse(
        all, [](auto& a, auto&) { a.num_rows = -1; }, bad, "step_arrays.num_rows", -1, -1);
    refuse(
        all, [](auto& a, auto&) { a.page_tokens = 0; }, bad, "step_arrays.page_tokens", -1, -1);
    refuse(
        all, [](auto& a, auto&) { a.window = -1; }, bad, "step_arrays.window", -1, -1);
    refuse(
        all, [](auto&, auto& t) { t.page_tokens = 0; }, bad, "block_table.page_tokens", -1, -1);
    refuse(
        all, [](auto&, auto& t) { t.table = nullptr; }, bad, "block_table.table", -1, -1);
    refuse(
        all, [](auto&, auto& t) { t.max_pages = 5; }, status_code::capacity_exceeded, "slots", 0, 0);
    s.table[3 * 400 + 100 + 2] = -1; // of layer 3, request 1
    refuse(all, nothing, status_code::capacity_exceeded, "slots", 1, 3);
    s.table[3 * 400 + 100 + 2] = 536'870'912;
    refuse(all, nothing, range_code, "slots", 1, 3);
    up::ledger_step closed;
    CHECK(s.owner.ledger.look_up(closed, all, s.view, out.view).argument == std::string("step"));

    std::int32_t rows[4] = {-7, -7, -7, -7};
    check_refused(s.owner.ledger.logits_rows(s.step, 4, {}, rows, 4), range_code, "size", -1, 4);
    check_refused(s.owner.ledger.logits_rows(s.step, 5, {}, rows, 4), range_code, "layer", -1, 5);
    const std::int32_t falling[] = {0, 2, 1, 1, 1};
    const up::position_span spans[2] = {};
    check_refused(s.owner.ledger.logits_rows(s.step, 4, {falling, spans}, rows, 4), bad, "wanted.offsets", -1,
                  4);
    const std::int32_t one[] = {0, 1, 1, 1, 1};
    check_refused(s.owner.ledger.logits_rows(s.step, 4, {one, nullptr}, rows, 4), bad, "wanted.spans", -1, 4);
    CHECK((rows[0] == -7 && rows[3] == -7));
    must(s.owner.ledger.abort_step(s.step));
}

TEST_CASE("slots of more rows than a call notes, of prompts in between, and beyond 32 bits") {
    constexpr std::int32_t requests = 300; // in 60 layers: more than 8,192 decode rows
    constexpr std::int32_t layers = 60;
    constexpr std::int32_t longest = 20;
    owned_ledger owner = make_ledger({20, 40}, layers, set_relation::independent, longest, requests);
    rows_batch prompt, batch;
    std::vector<std::int32_t> rows_of; // cache row of each row of the step
    std::vector<std::int32_t> owners;
    for (std::int32_t id = 0; id < requests; ++id) {
        must(owner.ledger.admit(id));
        const std::int32_t held = id % 3;
        const std::int32_t rows = id % 7;
        prompt.add(id, request_tag::prefill, range(0, held));
        batch.add(id, request_tag::verify, range(held, held + rows));
        for (std::int32_t i = 0; i < rows; ++i) {
            rows_of.push_back(held + i);
            owners.push_back(id);
        }
    }
    up::ledger_step step;
    must(owner.ledger.begin_step(prompt.view(), prompt.ids.data(), step));
    must(owner.ledger.commit_step(step));
    must(owner.ledger.begin_step(batch.view(), batch.ids.data(), step));
    const std::size_t entries = rows_of.size() + 3;
    std::vector<std::int32_t> backwards(layers);
    std::iota(backwards.rbegin(), backwards.rend(), 0);
    const up::layer_list lists[] = {owner.ledger.every_layer(), {0, layers, backwards.data()}};
    for (const auto& [layer_stride, list] : {std::pair{std::int64_t{0}, 0},
                                             {std::int64_t{longest * requests}, 1},
                                             {std::int64_t{1} << 33, 0},
                                             {std::int64_t{1} << 27, 1}}) {
        const up::layer_list listed = lists[list];
        const up::contiguous_slots cache{layer_stride, longest, longest, up::request_index::ledger};
        std::vector<std::int64_t> slots(layers * entries, -77);
        up::step_arrays<> wanted;
        wanted.num_rows = static_cast<std::int32_t>(entries);
        wanted.slots = slots.data();
        wanted.no_slot = -5;
        must(owner.ledger.look_up(step, listed, cache, wanted));
        std::vector<std::int64_t> expected;
        for (std::int32_t i = 0; i < layers; ++i) {
            const std::int32_t layer = listed.at(i);
            for (std::size_t row = 0; row < rows_of.size(); ++row) {
                expected.push_back(layer * layer_stride + std::int64_t{longest} * owners[row] + rows_of[row]);
            }
            expected.insert(expected.end(), 3, -5);
        }
        REQUIRE((slots == expected));
        // Slots that the index type can't hold are found before the first is written.
        std::vector<std::int32_t> narrow(layers * entries, -77);
        up::step_arrays<std::int32_t, std::int32_t> less;
        less.num_rows = wanted.num_rows;
        less.slots = narrow.data();
        const up::status told = owner.ledger.look_up(step, listed, cache, less);
        REQUIRE(told.ok() == ((layers - 1) * layer_stride < INT32_MAX));
        REQUIRE((told.ok() || narrow == std::vector<std::int32_t>(narrow.size(), -77)));
        REQUIRE((told.ok() ||
                 (told.code == status_code::out_of_range && told.layer == (list == 0 ? 1 : layers - 1))));
    }
    must(owner.ledger.abort_step(step));
}
