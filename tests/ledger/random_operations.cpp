// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The ledger against lists of positions: random lives of requests, every query compared after every
// operation.

#include "ledger/ledger_shapes.hpp"
#include "ledger/naive_ledger.hpp"
#include "ledger/random_subset.hpp"
#include "property/random.hpp"

#include <algorithm>
#include <iostream>
#include <iterator>
#include <list>
#include <random>

using namespace ledger_test;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

constexpr std::int32_t max_requests = 5;
constexpr std::int32_t max_tokens = 1200; // beyond two cumulative counts
constexpr std::int32_t max_open_steps = 2;

std::size_t at(std::int32_t index) {
    return static_cast<std::size_t>(index);
}

void expect(bool good, const char* what, std::int32_t request, std::int32_t layer) {
    if (!good) {
        throw std::logic_error(std::string(what) + " differ: request " + std::to_string(request) +
                               ", layer " + std::to_string(layer));
    }
}

struct running_step {
    naive_step naive;
    up::ledger_step step;
    std::map<std::int32_t, std::vector<positions>> appends;
    std::int32_t next_layer = 0;
    std::int32_t last_append = -1;
    std::vector<std::byte> before; // what an abort must restore, unless others changed the ledger meanwhile
    bool disturbed = false;
};

class simulation {
  public:
    simulation(const ledger_shape& what, std::uint64_t seed)
        : shape_(what)
        , owner_(what.bounds(max_requests, max_tokens), what.layer_sets)
        , naive_(what.layer_sets)
        , random_(seed) {
        for (std::int32_t i = 0; i < max_requests * 400; ++i) {
            table_.push_back(static_cast<std::int32_t>(random_() % 100'000));
        }
    }

    void run(std::int64_t operations) {
        for (now_ = 0; now_ < operations; ++now_) {
            try {
                operate();
                compare_request(below(max_requests));
                if (!owner_.canaries_intact()) {
                    throw std::logic_error("memory beyond state_bytes() was written");
                }
            } catch (const std::exception& fault) {
                FAIL(shape_.name << ", operation " << now_ << ": " << fault.what());
            }
        }
    }

    std::map<std::string, std::int64_t> done;

  private:
    // The generator's own arithmetic, the same in every standard library.
    std::int32_t below(std::int32_t n) {
        return static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(n));
    }
    bool one_in(std::int32_t n) { return below(n) == 0; }

    bool in_open_step(std::int32_t id) const {
        for (const running_step& running : running_) {
            for (const std::int32_t other : running.naive.batch.ids) {
                if (other == id) {
                    return true;
                }
            }
        }
        return false;
    }

    void operate() {
        const std::int32_t choice = below(100);
        if (choice < 6) {
            admit(below(max_requests));
        } else if (choice < 8) {
            release(below(max_requests));
        } else if (choice < 14) {
            rollback(below(max_requests));
        } else if (choice < 30) {
            inject_error();
        } else if (choice < 55 && running_.size() < max_open_steps) {
            begin();
        } else if (!running_.empty()) {
            const auto which = std::next(running_.begin(), below(static_cast<std::int32_t>(running_.size())));
            if (which->next_layer < naive_.num_layers() && !one_in(8)) {
                advance(*which);
            } else {
                close(*which, one_in(3));
                running_.erase(which);
            }
        } else {
            begin();
        }
    }

    void admit(std::int32_t id) {
        const up::status came = owner_.ledger.admit(id);
        expect(came.ok() == !naive_.admitted(id), "admissions", id, -1);
        if (came.ok()) {
            naive_.admit(id);
            disturb(nullptr);
            ++done["admit"];
        }
    }

    void release(std::int32_t id) {
        const up::status came = owner_.ledger.release(id);
        expect(came.ok() == (naive_.admitted(id) && !in_open_step(id)), "releases", id, -1);
        if (came.ok()) {
            naive_.release(id);
            disturb(nullptr);
            ++done["release"];
        }
    }

    void rollback(std::int32_t id) {
        if (!naive_.admitted(id) || in_open_step(id)) {
            return;
        }
        const std::int32_t tokens = naive_.tokens(id);
        const std::int32_t to = one_in(3) ? below(tokens + 1) : std::max(0, tokens - below(6));
        must(owner_.ledger.rollback(id, to));
        naive_.rollback(id, to);
        disturb(nullptr);
        ++done["rollback"];
    }

    void begin() {
        running_step& running = *running_.emplace(running_.end());
        rows_batch& batch = running.naive.batch;
        const std::int32_t requests = 1 + below(max_requests);
        const std::int32_t start = below(max_requests);
        for (std::int32_t i = 0; i < requests; ++i) {
            const std::int32_t id = (start + 2 * i) % max_requests;
            if (!naive_.admitted(id) || in_open_step(id) || one_in(10)) {
                batch.add(-1, request_tag::decode, {});
                continue;
            }
            const std::int32_t tokens = naive_.tokens(id);
            auto tag = static_cast<request_tag>(below(4));
            if (tag == request_tag::prefill && tokens > 0) {
                tag = request_tag::chunk;
            }
            std::int32_t rows = 1;
            if (tag == request_tag::verify) {
                rows = below(9);
            } else if (tag != request_tag::decode) {
                rows = one_in(4) ? below(3) : one_in(5) ? below(max_tokens + 1) : below(300);
            }
            rows = std::min(rows, max_tokens - tokens);
            batch.add(id, tag, range(tokens, tokens + rows));
        }
        up::batch_view view = batch.view();
        if (one_in(4)) {
            view.positions = nullptr;
        }
        running.before = owner_.snapshot();
        must(owner_.ledger.begin_step(view, batch.ids.data(), running.step));
        running.naive.entering = naive_.entering(batch, running.appends);
        disturb(&running);
        ++done["begin"];
        compare_step(running);
    }

    positions subset(const positions& of) {
        return random_subset(of, 64, 200, [this](std::int32_t n) { return below(n); });
    }

    /// Goes to the next layer: an append of other rows where a set starts, of the same ones, or none.
    void advance(running_step& running) {
        const std::int32_t layer = running.next_layer++;
        const bool starts = naive_.set_of(layer) != 0 && naive_.first_of_set(layer) == layer;
        rows_batch& batch = running.naive.batch;
        std::vector<positions> rows = running.naive.entering[at(layer)];
        if (starts && !one_in(4)) {
            for (std::size_t r = 0; r < rows.size(); ++r) {
                if (batch.tags[r] == request_tag::prefill || batch.tags[r] == request_tag::chunk) {
                    const bool any = shape_.relation == set_relation::independent;
                    rows[r] = subset(any ? positions(batch.packed.begin() + batch.cu[r],
                                                     batch.packed.begin() + batch.cu[r + 1])
                                         : rows[r]);
                }
            }
        } else if (one_in(2)) {
            return;
        }
        rows_batch entering;
        for (std::size_t r = 0; r < rows.size(); ++r) {
            entering.add(batch.ids[r], batch.tags[r], rows[r]);
        }
        if (one_in(8)) {
            refuse_append(running, layer, entering);
        }
        must(owner_.ledger.append(running.step, layer, entering.view()));
        if (starts) {
            running.appends[layer] = rows;
        }
        running.naive.entering = naive_.entering(batch, running.appends);
        running.last_append = layer;
        disturb(&running);
        ++done["append"];
        compare_step(running);
    }

    void close(running_step& running, bool abort) {
        if (abort) {
            must(owner_.ledger.abort_step(running.step));
            ++done["abort"];
            if (!running.disturbed) {
                expect(owner_.is(running.before), "bytes after an abort", -1, -1);
                ++done["abort, bytes compared"];
            }
        } else {
            must(owner_.ledger.commit_step(running.step));
            naive_.commit(running.naive);
            ++done["commit"];
        }
        disturb(&running);
    }

    /// Something else than this step has changed the ledger.
    void disturb(const running_step* by) {
        for (running_step& running : running_) {
            running.disturbed = running.disturbed || &running != by;
        }
    }

    // Errors: refused with the right code, and not a byte changed ------------------------------------------

    template <class Call>
    void refused(status_code code, std::int32_t request, Call call) {
        const std::vector<std::byte> before = owner_.snapshot();
        const up::status came = call();
        if (came.code != code || came.request != request || !owner_.is(before)) {
            throw std::logic_error("an injected error came back as: " + text(came));
        }
        ++done["error"];
    }

    up::status try_begin(std::int32_t id, request_tag tag, const positions& rows) {
        rows_batch batch;
        const std::int32_t place = below(max_requests);
        for (std::int32_t other = 0; other < max_requests; ++other) { // good ones before and after
            if (other == place) {
                batch.add(id, tag, rows);
            }
            if (other != id && naive_.admitted(other) && !in_open_step(other) &&
                naive_.tokens(other) < max_tokens) {
                batch.add(other, request_tag::verify, {naive_.tokens(other)});
            }
        }
        return try_batch(batch);
    }
    up::status try_batch(const rows_batch& batch) {
        up::ledger_step step;
        return owner_.ledger.begin_step(batch.view(), batch.ids.data(), step);
    }

    void inject_error() {
        const std::int32_t id = below(max_requests);
        if (!naive_.admitted(id)) {
            const auto unknown = status_code::unknown_request;
            refused(unknown, id, [&] { return try_begin(id, request_tag::decode, {0}); });
            refused(unknown, id, [&] { return owner_.ledger.rollback(id, 0); });
            return;
        }
        const std::int32_t tokens = naive_.tokens(id);
        if (in_open_step(id)) {
            const auto wrong = status_code::wrong_state;
            refused(wrong, id, [&] { return try_begin(id, request_tag::decode, {tokens}); });
            refused(wrong, id, [&] { return owner_.ledger.rollback(id, 0); });
            refused(wrong, id, [&] { return owner_.ledger.release(id); });
            return;
        }
        const auto bad = status_code::invalid_argument;
        const positions gap = range(std::min(tokens + 1, max_tokens - 1), max_tokens);
        if (tokens + 1 < max_tokens) {
            refused(bad, id, [&] { return try_begin(id, request_tag::chunk, gap); });
        }
        if (tokens > 0 && tokens < max_tokens) {
            refused(bad, id, [&] { return try_begin(id, request_tag::chunk, {tokens - 1}); });
            refused(bad, id, [&] { return try_begin(id, request_tag::prefill, {tokens}); });
        }
        if (tokens < max_tokens) {
            rows_batch twice;
            twice.add(id, request_tag::decode, {tokens});
            twice.add(id, request_tag::decode, {tokens});
            refused(status_code::wrong_state, id, [&] { return try_batch(twice); });
        }
        refused(status_code::capacity_exceeded, id,
                [&] { return try_begin(id, request_tag::chunk, range(tokens, max_tokens + 1)); });
        refused(status_code::out_of_range, id, [&] { return owner_.ledger.rollback(id, tokens + 1); });
        up::ledger_step closed;
        refused(status_code::wrong_state, -1, [&] { return owner_.ledger.commit_step(closed); });
    }

    /// Spoils a good append in one way.
    void refuse_append(running_step& running, std::int32_t layer, rows_batch entering) {
        const auto append = [&](std::int32_t to) {
            return owner_.ledger.append(running.step, to, entering.view());
        };
        if (running.last_append >= 0) {
            refused(status_code::wrong_state, -1, [&] { return append(running.last_append); });
        }
        refused(status_code::out_of_range, -1, [&] { return append(naive_.num_layers()); });
        const auto total = static_cast<std::int32_t>(entering.packed.size());
        if (total == 0) {
            return;
        }
        const std::int32_t row = below(total);
        std::int32_t r = 0;
        while (entering.cu[at(r + 1)] <= row) {
            ++r;
        }
        std::int32_t& position = entering.packed[at(row)];
        const std::int32_t right = position;
        const rows_batch& batch = running.naive.batch;
        const std::int32_t id = batch.ids[at(r)];
        for (const std::int32_t wrong :
             {-1, batch.packed[at(batch.cu[at(r)])] - 1, batch.packed[at(batch.cu[at(r + 1)] - 1)] + 1}) {
            position = wrong;
            refused(status_code::invalid_argument, id, [&] { return append(layer); });
        }
        position = right;
        if (row > entering.cu[at(r)]) {
            position = entering.packed[at(row - 1)];
            refused(status_code::invalid_argument, id, [&] { return append(layer); });
        }
    }

    // Queries ---------------------------------------------------------------------------------------------

    void compare_request(std::int32_t id) {
        up::held_rows rows;
        if (!naive_.admitted(id)) {
            expect(owner_.ledger.rows_of(id, 0, rows).code == status_code::unknown_request, "requests", id,
                   0);
            return;
        }
        for (std::int32_t layer = 0; layer < naive_.num_layers(); ++layer) {
            positions held = naive_.held(id, layer);
            std::int32_t tokens = naive_.tokens(id);
            for (const running_step& running : running_) {
                const rows_batch& batch = running.naive.batch;
                for (std::size_t r = 0; r < batch.ids.size(); ++r) {
                    if (batch.ids[r] == id) {
                        const positions& more = running.naive.entering[at(layer)][r];
                        held.insert(held.end(), more.begin(), more.end());
                        tokens += batch.cu[r + 1] - batch.cu[r];
                    }
                }
            }
            must(owner_.ledger.rows_of(id, layer, rows));
            compare_rows(rows, held, tokens, id, layer);
        }
        ++done["request compared"];
    }

    void compare_rows(const up::held_rows& rows, const positions& held, std::int32_t tokens, std::int32_t id,
                      std::int32_t layer) {
        const auto length = static_cast<std::int32_t>(held.size());
        expect(rows.num_tokens() == tokens, "tokens", id, layer);
        expect(rows.length() == length, "lengths", id, layer);
        const std::int32_t first = below(length + 1);
        std::vector<std::int64_t> copied(held.size() + 1, -7);
        const std::int32_t written = rows.copy_positions(first, copied.data(), length + 1);
        expect(written == length - first && std::equal(held.begin() + first, held.end(), copied.begin()) &&
                   copied[at(written)] == -7,
               "positions", id, layer);
        if (written > 1) {
            const std::int32_t some = below(written);
            copied.assign(copied.size(), -7);
            expect(rows.copy_positions(first, copied.data(), some) == some && copied[at(some)] == -7,
                   "capacities", id, layer);
        }
        for (std::int32_t i = 0; i < 8; ++i) {
            const std::int32_t row = below(length + 3) - 1;
            const bool exists = row >= 0 && row < length;
            expect(rows.position_of(row) == (exists ? held[at(row)] : -1), "position_of", id, layer);
            const std::int32_t position = below(tokens + 3) - 1;
            const auto lower = std::lower_bound(held.begin(), held.end(), position);
            const auto rank = static_cast<std::int32_t>(lower - held.begin());
            expect(rows.rows_below(position) == rank, "rows_below", id, layer);
            expect(rows.row_of(position) == (lower != held.end() && *lower == position ? rank : -1), "row_of",
                   id, layer);
            const std::int32_t page = 1 + below(64);
            expect(rows.pages(page) == (length + page - 1) / page, "pages", id, layer);
        }
        std::vector<up::position_span> spans(at(tokens) + 1);
        const std::int32_t ranges = rows.copy_dropped_ranges(spans.data(), tokens + 1);
        std::int32_t expected = 0;
        std::int32_t next = 0;
        for (std::size_t i = 0; i <= held.size(); ++i) {
            const std::int32_t position = i < held.size() ? held[i] : tokens;
            if (position > next) {
                expect(expected < ranges && spans[at(expected)].begin == next &&
                           spans[at(expected)].end == position,
                       "dropped ranges", id, layer);
                ++expected;
            }
            next = position + 1;
        }
        expect(expected == ranges, "numbers of dropped ranges", id, layer);
    }

    void compare_step(const running_step& running) {
        const std::int32_t layer = below(naive_.num_layers());
        if (one_in(2)) {
            compare_step_layer<std::int32_t>(running, layer);
        } else {
            compare_step_layer<std::int64_t>(running, layer);
        }
        for (const std::int32_t id : running.naive.batch.ids) {
            if (id >= 0 && one_in(3)) {
                compare_request(id);
            }
        }
    }

    template <class Index>
    void compare_step_layer(const running_step& running, std::int32_t layer) {
        const rows_batch& batch = running.naive.batch;
        const std::int32_t pad = below(5);
        const auto requests = static_cast<std::int32_t>(batch.ids.size());
        up::block_table_view table;
        table.table = table_.data();
        table.max_pages = 200;
        table.page_tokens = 6 + below(20); // 200 pages of 6 hold max_tokens
        table.request_stride = 200;
        table.layer_stride = one_in(2) ? 0 : 17;
        table.rows = one_in(2) ? up::request_index::batch : up::request_index::ledger;

        std::vector<Index> cached;
        std::vector<Index> lengths;
        std::vector<Index> cu{0};
        std::vector<Index> row_positions;
        std::vector<Index> write_rows;
        std::vector<Index> slots;
        for (std::int32_t r = 0; r < requests; ++r) {
            const std::int32_t id = batch.ids[at(r)];
            const auto before = id < 0 ? 0 : static_cast<std::int32_t>(naive_.held(id, layer).size());
            const positions& rows = running.naive.entering[at(layer)][at(r)];
            cached.push_back(before);
            for (std::int32_t i = 0; i < static_cast<std::int32_t>(rows.size()); ++i) {
                const std::int32_t row = before + i;
                row_positions.push_back(rows[at(i)]);
                write_rows.push_back(row);
                const std::int64_t entry = layer * table.layer_stride +
                                           200 * (table.rows == up::request_index::batch ? r : id) +
                                           row / table.page_tokens;
                slots.push_back(static_cast<Index>(
                    table_[static_cast<std::size_t>(entry)] * table.page_tokens + row % table.page_tokens));
            }
            lengths.push_back(static_cast<Index>(before) + static_cast<Index>(rows.size()));
            cu.push_back(static_cast<Index>(row_positions.size()));
        }
        std::int32_t rows = -1;
        must(owner_.ledger.num_rows(running.step, layer, rows));
        expect(rows == cu.back(), "numbers of rows", -1, layer);

        const auto same = [&](std::vector<Index> expected, Index padding, const char* what, auto query) {
            expected.resize(expected.size() + at(pad), padding);
            std::vector<Index> came(expected.size() + 1, -9);
            must(query(came.data(), static_cast<std::int32_t>(expected.size())));
            expect(came.back() == -9, "sizes of outputs", -1, layer);
            came.pop_back();
            expect(came == expected, what, -1, layer);
        };
        const auto& ledger = owner_.ledger;
        const auto& step = running.step;
        same(cached, 0, "cached_lens",
             [&](Index* out, std::int32_t n) { return ledger.cached_lens(step, layer, out, n); });
        same(lengths, 0, "seq_lens",
             [&](Index* out, std::int32_t n) { return ledger.seq_lens(step, layer, out, n); });
        same(cu, cu.back(), "cu_seqlens",
             [&](Index* out, std::int32_t n) { return ledger.cu_seqlens(step, layer, out, n); });
        same(row_positions, -1, "row_positions",
             [&](Index* out, std::int32_t n) { return ledger.row_positions(step, layer, out, n); });
        same(write_rows, -1, "write_rows",
             [&](Index* out, std::int32_t n) { return ledger.write_rows(step, layer, out, n); });
        same(slots, -1, "slot_mapping",
             [&](Index* out, std::int32_t n) { return ledger.slot_mapping(step, layer, table, out, n); });
        ++done["step compared"];
    }

    const ledger_shape& shape_;
    owned_ledger owner_;
    naive_ledger naive_;
    std::mt19937_64 random_;
    std::vector<std::int32_t> table_;
    std::list<running_step> running_;
    std::int64_t now_ = 0;
};

} // namespace

TEST_CASE("10^5 random operations against lists of positions", "[ledger]") {
    const int operations[] = {30'000, 30'000, 15'000, 10'000, 5'000, 7'000, 3'000};
    std::map<std::string, std::int64_t> done;
    for (std::size_t i = 0; i < std::size(ledger_shapes); ++i) {
        simulation simulated(ledger_shapes[i], property::base_seed() + i);
        simulated.run(property::scaled(operations[i]));
        for (const auto& [what, times] : simulated.done) {
            done[what] += times;
        }
    }
    for (const auto& [what, times] : done) {
        std::cout << what << ": " << times << "\n";
        CHECK(times > property::scaled(500)); // of each kind enough to say something
    }
    CHECK(done.size() == 11);
}
