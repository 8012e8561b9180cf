// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The ledger in device memory against the one on the host: the same operations, the same state byte for byte,
// the same arrays; then faults, and a graph that is replayed while requests come and go.

#include "ledger/gpu_twins.cuh"

using namespace ledger_test;
using uniprefill_test::captured_graph;
using uniprefill_test::has_device;
using up::ledger_complaint;
using up::request_tag;
using up::set_relation;

namespace {

/// Layers, sets and sizes that a run is made of.
struct twin_shape {
    const char* name;
    set_relation relation;
    std::vector<std::int32_t> layer_sets;
    std::int32_t max_requests;
    std::int32_t max_tokens;
    std::int32_t longest_chunk;
};

const twin_shape shapes[] = {
    {"nested", set_relation::nested, {0, 0, 1, 1, 2, 3}, 9, 700, 90},
    {"independent", set_relation::independent, {0, 1, 1, 2, 0, 3}, 9, 700, 90},
    {"one set", set_relation::nested, {0, 0}, 300, 120, 20},
    // More positions than a thread block stages at once, more requests than it has threads.
    {"long", set_relation::nested, {0, 1, 2}, 2, 150000, 100000},
    {"long and independent", set_relation::independent, {0, 1, 2}, 2, 150000, 100000},
};

class random_run {
  public:
    random_run(const twin_shape& shape, std::uint64_t seed)
        : shape_(shape)
        , random_(seed)
        , twins_({shape.max_requests, shape.max_tokens, static_cast<std::int32_t>(shape.layer_sets.size()),
                  *std::max_element(shape.layer_sets.begin(), shape.layer_sets.end()) + 1, shape.relation},
                 shape.layer_sets)
        , lengths_(static_cast<std::size_t>(shape.max_requests), -1) {
        const std::size_t pages = static_cast<std::size_t>(shape.max_tokens / page + 1);
        for (std::size_t i = 0; i < shape.layer_sets.size() * lengths_.size() * pages; ++i) {
            table_.push_back(random_.between(0, 1 << 20));
        }
        view_.request_stride = static_cast<std::int64_t>(pages);
        view_.layer_stride = view_.request_stride * shape.max_requests;
        view_.max_pages = static_cast<std::int32_t>(pages);
        view_.page_tokens = page;
        view_.rows = up::request_index::ledger;
    }

    void run(int operations) {
        for (int i = 0; i < operations; ++i) {
            admit();
            step();
            if (random_.chance(0.3)) {
                roll_back();
            }
            if (random_.chance(0.2)) {
                fork();
            }
            if (random_.chance(0.15)) {
                release();
            }
            if (random_.chance(0.3)) {
                hand_back();
            }
            if (random_.chance(0.2) && twins_.bounds().num_sets > 1) {
                keep_only();
            }
            twins_.check_states();
        }
        REQUIRE(twins_.fault() == ledger_complaint::none);
        REQUIRE(dropped_ + (twins_.bounds().num_sets == 1 ? 1 : 0) > 0);
    }

  private:
    static constexpr std::int32_t page = 16;

    std::size_t at(std::int32_t index) const { return static_cast<std::size_t>(index); }
    std::vector<std::int32_t> some(bool admitted, double chance) {
        std::vector<std::int32_t> found;
        for (std::int32_t slot = 0; slot < shape_.max_requests; ++slot) {
            if ((lengths_[at(slot)] >= 0) == admitted && random_.chance(chance)) {
                found.push_back(slot);
            } else if (random_.chance(0.1)) {
                found.push_back(-1);
            }
        }
        found.resize(std::min(found.size(), at(shape_.max_requests)));
        return found;
    }

    void admit() {
        const std::vector<std::int32_t> ids = some(false, 0.5);
        for (const std::int32_t id : ids) {
            if (id >= 0) {
                must(twins_.host().admit(id));
                lengths_[at(id)] = 0;
            }
        }
        must(twins_.device.admit(twins_.upload(ids), static_cast<std::int32_t>(ids.size()), nullptr));
    }
    void release() {
        const std::vector<std::int32_t> ids = some(true, 0.3);
        for (const std::int32_t id : ids) {
            if (id >= 0) {
                must(twins_.host().release(id));
                lengths_[at(id)] = -1;
            }
        }
        must(twins_.device.release(twins_.upload(ids), static_cast<std::int32_t>(ids.size()), nullptr));
    }
    void roll_back() {
        const std::vector<std::int32_t> ids = some(true, 0.4);
        std::vector<std::int32_t> left;
        for (const std::int32_t id : ids) {
            left.push_back(id < 0 ? 7 : random_.between(0, lengths_[at(id)]));
            if (id >= 0) {
                lengths_[at(id)] = left.back();
            }
        }
        const auto count = static_cast<std::int32_t>(ids.size());
        must(twins_.host().rollback(ids.data(), left.data(), count));
        must(twins_.device.rollback(twins_.upload(ids), twins_.upload(left), count, nullptr));
    }
    void fork() {
        const std::vector<std::int32_t> from = some(true, 0.5);
        std::vector<std::int32_t> ids, copies;
        std::int32_t slot = 0;
        for (const std::int32_t id : from) {
            while (slot < shape_.max_requests && lengths_[at(slot)] >= 0) {
                ++slot;
            }
            if (id < 0 || slot == shape_.max_requests) {
                continue;
            }
            must(twins_.host().fork(id, slot));
            ids.push_back(id);
            copies.push_back(slot);
            lengths_[at(slot)] = lengths_[at(id)];
        }
        must(twins_.device.fork(twins_.upload(ids), twins_.upload(copies),
                                static_cast<std::int32_t>(ids.size()), nullptr));
    }

    rows_batch arrivals() {
        rows_batch batch;
        for (const std::int32_t id : some(true, 0.7)) {
            if (id < 0) {
                batch.add(-1, request_tag::decode, {});
                continue;
            }
            const std::int32_t held = lengths_[at(id)];
            const request_tag tags[] = {request_tag::chunk, request_tag::decode, request_tag::verify,
                                        held == 0 ? request_tag::prefill : request_tag::chunk};
            const request_tag tag = random_.one_of(tags);
            const bool of_prompt = tag == request_tag::prefill || tag == request_tag::chunk;
            const std::int32_t rows =
                std::min(of_prompt ? random_.between(0, shape_.longest_chunk) : random_.between(0, 5),
                         shape_.max_tokens - held);
            batch.add(id, tag, range(held, held + rows));
        }
        return batch;
    }
    /// What enters a layer, given what entered before and what arrived.
    rows_batch entering(const rows_batch& before, const rows_batch& arrived) {
        const bool any_subset = shape_.relation == set_relation::independent;
        const double share = random_.chance(0.2) ? 1.0 : random_.unit();
        rows_batch made;
        for (std::size_t r = 0; r < arrived.ids.size(); ++r) {
            const rows_batch& from = any_subset ? arrived : before;
            const bool droppable =
                arrived.tags[r] == request_tag::prefill || arrived.tags[r] == request_tag::chunk;
            positions kept;
            for (std::int32_t i = from.cu[r]; i < from.cu[r + 1]; ++i) {
                if (!droppable || random_.chance(share)) {
                    kept.push_back(from.packed[at(i)]);
                }
            }
            dropped_ += from.cu[r + 1] - from.cu[r] - static_cast<std::int32_t>(kept.size());
            made.add(arrived.ids[r], arrived.tags[r], kept);
        }
        return made;
    }
    std::int32_t first_layer(std::int32_t set) const {
        return static_cast<std::int32_t>(std::find(shape_.layer_sets.begin(), shape_.layer_sets.end(), set) -
                                         shape_.layer_sets.begin());
    }

    void step() {
        const rows_batch batch = arrivals();
        wanted_arrays wanted{static_cast<std::int32_t>(batch.ids.size()) + random_.between(0, 2),
                             static_cast<std::int32_t>(batch.packed.size()) + random_.between(0, 40), page,
                             random_.chance(0.5) ? 0 : random_.between(1, 60),
                             random_.chance(0.5) ? 64 : random_.between(1, 40)};
        twins_.begin(batch, random_.chance(0.7), wanted, view_, table_, random_.chance(0.5));
        std::vector<rows_batch> entered(shape_.layer_sets.size(), batch);
        for (std::int32_t set = 1; set < twins_.bounds().num_sets; ++set) {
            if (random_.chance(0.25)) {
                continue;
            }
            const std::int32_t layer = first_layer(set);
            const rows_batch rows = entering(layer == 0 ? batch : entered[at(layer - 1)], batch);
            for (std::size_t later = at(layer); later < entered.size(); ++later) {
                entered[later] = rows;
            }
            std::int32_t end = layer + 1; // layers that follow at once and are of the same set
            while (at(end) < shape_.layer_sets.size() && shape_.layer_sets[at(end)] == set) {
                ++end;
            }
            twins_.append(layer, end, rows, wanted, view_, table_);
        }
        twins_.look_up_all(wanted, view_, table_);
        twins_.compare_logits(static_cast<std::int32_t>(shape_.layer_sets.size()) - 1, batch);
        const bool commits = random_.chance(0.8);
        twins_.end(commits);
        for (std::size_t r = 0; commits && r < batch.ids.size(); ++r) {
            if (batch.ids[r] >= 0) {
                lengths_[at(batch.ids[r])] += batch.cu[r + 1] - batch.cu[r];
            }
        }
    }

    /// The layers of a set give up some of what they hold, but nothing that the next nested set has.
    void keep_only() {
        const std::int32_t set = random_.between(1, twins_.bounds().num_sets - 1);
        const double share = random_.unit();
        const std::int32_t from = random_.between(0, shape_.max_tokens); // all that lies behind stays
        rows_batch kept;
        for (const std::int32_t id : some(true, 0.5)) {
            positions stay;
            if (id >= 0) {
                const bool nested =
                    shape_.relation == set_relation::nested && set + 1 < twins_.bounds().num_sets;
                const up::held_rows next = twins_.held(id, first_layer(nested ? set + 1 : set));
                for (const std::int32_t position : twins_.positions_of(id, first_layer(set))) {
                    if (position >= from || random_.chance(share) || (nested && next.row_of(position) >= 0)) {
                        stay.push_back(position);
                    }
                }
            }
            kept.add(id, request_tag::chunk, stay);
        }
        twins_.keep_only(first_layer(set), kept);
    }

    void hand_back() {
        const std::vector<std::int32_t> ids = some(true, 0.8);
        const up::page_rule rule{page, random_.chance(0.5) ? 0 : random_.between(1, 80),
                                 random_.between(0, 4)};
        const bool shared = random_.chance(0.3);
        const std::size_t layers = shared ? 1 : shape_.layer_sets.size();
        std::vector<up::page_span> spans;
        for (std::size_t i = 0; i < layers * lengths_.size(); ++i) {
            const std::int32_t begin = random_.between(0, 5);
            spans.push_back({begin, random_.between(begin, view_.max_pages)});
        }
        std::vector<std::int32_t> asked = ids;
        if (random_.chance(0.1) && asked.size() < lengths_.size()) {
            asked.push_back(shape_.max_requests); // no slot: nothing is handed back
        }
        twins_.hand_back(asked, rule, shared, spans, view_, table_, random_.chance(0.1) ? 3 : 1 << 20);
    }

    const twin_shape& shape_;
    property::random_numbers random_;
    ledger_twins twins_;
    std::vector<std::int32_t> lengths_; // [slot] -1: free
    std::vector<std::int32_t> table_;
    up::block_table_view view_;
    std::int64_t dropped_ = 0;
};

} // namespace

TEST_CASE("a device ledger holds and tells what the host's does") {
    if (!has_device()) {
        return;
    }
    const std::uint64_t seed = property::base_seed();
    INFO("seed " << seed);
    for (const twin_shape& shape : shapes) {
        INFO(shape.name);
        const bool is_long = shape.max_tokens > 10000;
        random_run(shape, seed).run(std::max(4, property::scaled(is_long ? 12 : 150)));
    }
}

TEST_CASE("a device ledger refuses what the host's refuses, and changes nothing") {
    if (!has_device()) {
        return;
    }
    const up::ledger_limits bounds{4, 100, 3, 2, set_relation::nested};
    ledger_twins twins(bounds, {0, 1, 1});
    must(twins.host().admit(0));
    must(twins.host().admit(1));
    must(twins.device.admit(twins.upload(std::vector<std::int32_t>{0, 1}), 2, nullptr));
    const auto once = [&](const rows_batch& batch) {
        up::ledger_step step;
        must(twins.host().begin_step(batch.view(), batch.ids.data(), step));
        must(twins.host().commit_step(step));
        up::ledger_step twin;
        must(twins.device.begin_step(twins.view_of(batch, true), twins.upload(batch.ids), twin, nullptr));
        must(twins.device.commit_step(twin, nullptr));
    };
    rows_batch first;
    first.add(0, request_tag::prefill, range(0, 20));
    first.add(1, request_tag::prefill, range(0, 9));
    once(first);
    twins.check_states();

    const auto begin_refused = [&](rows_batch batch, ledger_complaint what, std::int32_t slot) {
        INFO("complaint " << static_cast<int>(what));
        up::ledger_step step;
        const up::status host = twins.host().begin_step(batch.view(), batch.ids.data(), step);
        REQUIRE_FALSE(host.ok());
        // Nothing is told of its rows; ending it doesn't hide why it wasn't opened, and changes nothing.
        const auto requests = static_cast<std::int32_t>(batch.ids.size());
        const auto rows = static_cast<std::int32_t>(batch.packed.size());
        const device_array<std::int32_t> lens(batch.ids.size());
        const device_array<std::int32_t> row_positions(batch.packed.size());
        up::step_wishes<> wishes;
        wishes.layers = {0, 1, nullptr};
        wishes.out.num_requests = requests;
        wishes.out.num_rows = rows;
        wishes.out.seq_lens = lens.data();
        wishes.out.row_positions = row_positions.data();
        up::ledger_step twin;
        must(twins.device.begin_step(twins.view_of(batch, true), twins.upload(batch.ids), twin, wishes,
                                     nullptr));
        REQUIRE(lens.get() == std::vector<std::int32_t>(batch.ids.size(), 0));
        REQUIRE(row_positions.get() == std::vector<std::int32_t>(batch.packed.size(), -1));
        up::ledger_step again = twin;
        must(twins.device.commit_step(twin, nullptr));
        REQUIRE(twins.fault() == what);
        REQUIRE(twins.fault_status().code == host.code);
        REQUIRE(twins.fault_status().request == slot);
        twins.forget_fault();
        must(twins.device.commit_step(again, nullptr));
        REQUIRE(twins.fault() == ledger_complaint::not_in_step);
        twins.forget_fault();
        twins.check_states();
    };
    rows_batch batch;
    batch.add(1, request_tag::decode, range(9, 10));
    batch.add(2, request_tag::decode, range(0, 1));
    begin_refused(batch, ledger_complaint::unknown_request, 2);
    batch = {};
    batch.add(1, request_tag::decode, range(9, 10));
    batch.add(1, request_tag::decode, range(9, 10));
    begin_refused(batch, ledger_complaint::busy_request, 1);
    batch = {};
    batch.add(0, request_tag::prefill, range(20, 22));
    begin_refused(batch, ledger_complaint::second_prefill, 0);
    batch = {};
    batch.add(0, request_tag::chunk, range(20, 101));
    begin_refused(batch, ledger_complaint::too_many_tokens, 0);
    batch = {};
    batch.add(0, request_tag::chunk, range(21, 40));
    begin_refused(batch, ledger_complaint::gap, 0);
    batch = {};
    batch.add(1, request_tag::chunk, range(8, 10));
    begin_refused(batch, ledger_complaint::gap, 1);
    batch = {};
    batch.add(0, static_cast<request_tag>(9), range(20, 21));
    begin_refused(batch, ledger_complaint::tag, 0);

    // Room for one chunk of two: the first is told, and a fault.
    {
        rows_batch rows;
        rows.add(0, request_tag::chunk, range(20, 30));
        const device_array<std::int32_t> chunks(std::vector<std::int32_t>(4, -77));
        up::step_wishes<> wishes;
        wishes.layers = {2, 1, nullptr};
        wishes.out.chunks = chunks.data();
        wishes.out.num_requests = wishes.out.num_chunks = 1;
        wishes.out.num_rows = 10;
        wishes.out.chunk_rows = 8;
        up::ledger_step twin;
        must(twins.device.begin_step(twins.view_of(rows, true), twins.upload(rows.ids), twin, wishes,
                                     nullptr));
        must(twins.device.abort_step(twin, nullptr));
        REQUIRE(chunks.get() == std::vector<std::int32_t>{0, 0, -77, -77});
        REQUIRE(twins.fault() == ledger_complaint::too_few_chunks);
        REQUIRE(twins.fault_status().layer == 2);
        twins.forget_fault();
        twins.check_states();
    }

    // Appends: what the host refuses as a whole, the device refuses for the request.
    const auto append_refused = [&](const positions& entering, request_tag tag, ledger_complaint what) {
        INFO("complaint " << static_cast<int>(what));
        rows_batch rows;
        rows.add(0, tag, range(20, 30));
        rows_batch fewer;
        fewer.add(0, tag, entering);
        up::ledger_step step;
        must(twins.host().begin_step(rows.view(), rows.ids.data(), step));
        const up::status host = twins.host().append(step, 1, fewer.view());
        REQUIRE_FALSE(host.ok());
        must(twins.host().commit_step(step));
        up::ledger_step twin;
        must(twins.device.begin_step(twins.view_of(rows, true), twins.upload(rows.ids), twin, nullptr));
        must(twins.device.append(twin, 1, twins.view_of(fewer, true), nullptr));
        must(twins.device.commit_step(twin, nullptr));
        REQUIRE(twins.fault() == what);
        REQUIRE(twins.fault_status().code == host.code);
        REQUIRE(twins.fault_status().request == host.request);
        REQUIRE(twins.fault_status().layer == host.layer);
        twins.forget_fault();
        twins.check_states();
        const std::int32_t slot = 0;
        const std::int32_t left = 20;
        must(twins.host().rollback(&slot, &left, 1));
        must(twins.device.rollback(twins.upload(std::vector<std::int32_t>{0}),
                                   twins.upload(std::vector<std::int32_t>{20}), 1, nullptr));
        twins.check_states();
    };
    append_refused({20, 22, 21}, request_tag::chunk, ledger_complaint::entering_order);
    append_refused({19, 22}, request_tag::chunk, ledger_complaint::entering_order);
    append_refused({22, 30}, request_tag::chunk, ledger_complaint::entering_order);
    append_refused({22, 23}, request_tag::decode, ledger_complaint::entering_count);

    const auto keep_refused = [&](std::int32_t layer, const positions& stay, ledger_complaint what) {
        rows_batch kept;
        kept.add(0, request_tag::chunk, stay);
        const up::status host = twins.host().keep_only<std::int32_t>(
            0, layer, stay.data(), static_cast<std::int32_t>(stay.size()), nullptr);
        REQUIRE_FALSE(host.ok());
        must(twins.device.keep_only<std::int32_t>(twins.upload(kept.ids), layer, twins.view_of(kept, true),
                                                  nullptr, nullptr));
        REQUIRE(twins.fault() == what);
        REQUIRE(twins.fault_status().code == host.code);
        REQUIRE(twins.fault_status().layer == host.layer);
        twins.forget_fault();
        twins.check_states();
    };
    keep_refused(0, {0, 1}, ledger_complaint::whole_layer);
    keep_refused(1, {3, 2}, ledger_complaint::kept_position);
    keep_refused(1, {3, 20}, ledger_complaint::kept_position);

    const auto refused = [&](ledger_complaint what) {
        REQUIRE(twins.fault() == what);
        twins.forget_fault();
        twins.check_states();
    };
    const auto slots = [&](std::int32_t slot) { return twins.upload(std::vector<std::int32_t>{slot}); };
    must(twins.device.admit(slots(0), 1, nullptr));
    refused(ledger_complaint::taken);
    for (const std::int32_t slot : {4, 77, -2}) {
        must(twins.device.admit(slots(slot), 1, nullptr));
        if (slot >= 0) {
            twins.check_refusal(twins.host().admit(slot));
        } else {
            refused(ledger_complaint::slot);
        }
    }
    must(twins.device.release(slots(3), 1, nullptr));
    refused(ledger_complaint::unknown_request);
    must(twins.device.rollback(slots(0), slots(21), 1, nullptr));
    refused(ledger_complaint::rollback);
    must(twins.device.fork(slots(0), slots(1), 1, nullptr));
    refused(ledger_complaint::taken);
    must(twins.device.fork(slots(2), slots(3), 1, nullptr));
    refused(ledger_complaint::unknown_request);
    for (const std::int32_t from : {0, 2}) { // to itself, or to a slot that isn't there
        for (const std::int32_t to : {from, 4, -1}) {
            const up::status host = twins.host().fork(from, to);
            REQUIRE_FALSE(host.ok());
            must(twins.device.fork(slots(from), slots(to), 1, nullptr));
            REQUIRE(twins.fault_status().code == host.code);
            REQUIRE(twins.fault_status().request == host.request);
            REQUIRE(twins.fault_status().came == host.came);
            twins.forget_fault();
            twins.check_states();
        }
    }
    // A copy can't be copied in the launch that makes it.
    must(twins.host().fork(0, 2));
    must(twins.device.fork(twins.upload(std::vector<std::int32_t>{0, 2}),
                           twins.upload(std::vector<std::int32_t>{2, 3}), 2, nullptr));
    refused(ledger_complaint::unknown_request);

    // Lists of layers: one that names none hands nothing back, one that names what isn't there neither.
    std::vector<std::int32_t> table(100, 7);
    const device_array<std::int32_t> table_there(table);
    const device_array<up::page_span> span_there(std::vector<up::page_span>(4, {0, 25}));
    const device_array<std::int32_t> pages(100);
    const device_array<std::int32_t> found(1);
    up::page_tables tables;
    tables.table = table_there.data();
    tables.in_use = span_there.data();
    tables.request_stride = 25;
    tables.max_pages = 25;
    tables.rows = up::request_index::ledger;
    const auto hand_back = [&](const up::layer_list& layers) {
        must(twins.device.hand_back_pages(slots(0), 1, layers, {}, tables, pages.data(), 100, found.data(),
                                          nullptr));
        REQUIRE(found.get()[0] == 0);
        REQUIRE(table_there.get() == table);
    };
    hand_back({0, 0, nullptr});
    REQUIRE(twins.fault() == ledger_complaint::none);
    hand_back({0, 2, twins.upload(std::vector<std::int32_t>{0, 1 << 30})});
    refused(ledger_complaint::layer);
    hand_back({0, 1, twins.upload(std::vector<std::int32_t>{-1})});
    refused(ledger_complaint::layer);
}

TEST_CASE("where offsets give every other request the same rows, a layer is told of none") {
    if (!has_device()) {
        return;
    }
    // All rows, so that together they are more than an int32 counts.
    constexpr std::int32_t requests = 8192;
    constexpr std::int32_t claimed = (1 << 20) + 1;
    ledger_twins twins({requests, 2, 1, 1, set_relation::nested}, {0});
    twins.admit(range(0, requests));
    rows_batch batch, entering;
    for (std::int32_t id = 0; id < requests; ++id) {
        batch.add(id, request_tag::decode, {0});
    }
    entering = batch;
    entering.packed.assign(claimed, 0);
    for (std::int32_t r = 1; r <= requests; ++r) {
        entering.cu[static_cast<std::size_t>(r)] = r % 2 == 1 ? claimed : 0;
    }
    up::batch_view there = twins.view_of(entering, true);
    there.num_rows = claimed;
    up::ledger_step step;
    must(twins.device.begin_step(twins.view_of(batch, true), twins.upload(batch.ids), step, nullptr));
    constexpr std::int32_t places = 3000;
    const device_array<std::int32_t> told(std::vector<std::int32_t>(places, -77));
    const device_array<std::int32_t> lens(std::vector<std::int32_t>(requests, -77));
    up::step_wishes<> wishes;
    wishes.layers = twins.device.every_layer();
    wishes.out.num_requests = requests;
    wishes.out.num_rows = places;
    wishes.out.row_positions = told.data();
    wishes.out.seq_lens = lens.data();
    must(twins.device.append(step, 0, there, wishes, nullptr));
    REQUIRE(told.get() == std::vector<std::int32_t>(places, -1));
    REQUIRE(lens.get() == std::vector<std::int32_t>(requests, 0));
    REQUIRE(twins.fault() != ledger_complaint::none);
    must(twins.device.abort_step(step, nullptr));
    twins.check_states();
}

TEST_CASE("a decode step captured once serves requests that come, grow and go") {
    if (!has_device()) {
        return;
    }
    constexpr std::int32_t places = 8;
    const up::ledger_limits bounds{16, 400, 4, 3, set_relation::nested};
    ledger_twins twins(bounds, {0, 1, 1, 2});
    std::vector<std::int32_t> table;
    for (std::int32_t i = 0; i < 4 * 16 * 26; ++i) {
        table.push_back(i * 37 % 5000);
    }
    up::block_table_view view;
    view.request_stride = 26;
    view.layer_stride = 16 * 26;
    view.max_pages = 26;
    view.page_tokens = 16;
    view.rows = up::request_index::ledger;
    std::vector<std::int32_t> lengths(16, -1);
    property::random_numbers random(property::base_seed());

    replayed_decode replayed(twins, places, view, table);
    captured_graph graph([&](cudaStream_t stream) { replayed.launch(stream); });
    std::vector<std::int32_t> ids(places, -1);
    for (int round = 0; round < 60; ++round) {
        // One request leaves a place, another takes it with a prompt of which layers drop rows.
        if (round % 3 == 0) {
            const std::size_t place = static_cast<std::size_t>(random.between(0, places - 1));
            if (ids[place] >= 0) {
                must(twins.host().release(ids[place]));
                must(twins.device.release(twins.upload(std::vector<std::int32_t>{ids[place]}), 1, nullptr));
                lengths[static_cast<std::size_t>(ids[place])] = -1;
                ids[place] = -1;
            }
            const auto free = std::find(lengths.begin(), lengths.end(), -1);
            const auto slot = static_cast<std::int32_t>(free - lengths.begin());
            must(twins.host().admit(slot));
            must(twins.device.admit(twins.upload(std::vector<std::int32_t>{slot}), 1, nullptr));
            rows_batch prompt, fewer;
            const std::int32_t rows = random.between(1, 150);
            positions kept;
            for (std::int32_t i = 0; i < rows; ++i) {
                if (random.chance(0.5)) {
                    kept.push_back(i);
                }
            }
            prompt.add(slot, request_tag::prefill, range(0, rows));
            fewer.add(slot, request_tag::prefill, kept);
            twins.run_step(prompt, 1, fewer);
            lengths[static_cast<std::size_t>(slot)] = rows;
            ids[place] = slot;
        }
        rows_batch batch;
        for (const std::int32_t id : ids) {
            const std::int32_t held = id < 0 ? 0 : lengths[static_cast<std::size_t>(id)];
            batch.add(id, request_tag::decode, id < 0 ? positions{} : range(held, held + 1));
            if (id >= 0) {
                ++lengths[static_cast<std::size_t>(id)];
            }
        }
        replayed.set(batch);
        graph.replay();
        replayed.compare(batch);
        twins.check_states();
    }
    REQUIRE(twins.fault() == ledger_complaint::none);
}
