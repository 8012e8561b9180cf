// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "ledger/simulated_engine.hpp"

#include <iterator>

namespace ledger_test {

using up::request_tag;
using up::status_code;

void simulated_engine::run(std::int64_t operations) {
    std::int64_t so_far = 0;
    std::int64_t rounds = 0;
    while (so_far < operations) {
        const std::int32_t choice = below(100);
        if (choice < 50) {
            step();
        } else if (choice < 59) {
            if (!prefixes_.empty() && one_in(2)) {
                arrive_with_prefix();
            } else {
                arrive();
            }
        } else if (choice < 62) {
            remember();
        } else if (choice < 69) {
            roll_back();
        } else if (choice < 71) {
            give_up();
        } else if (choice < 75) {
            fork();
        } else if (choice < 80) {
            if (sequence* const of = some(sequence::state::running)) {
                preempt(*of);
            }
        } else if (choice < 90) {
            resume();
        } else if (choice < 94) {
            finish();
        } else {
            fail();
        }
        if (++rounds % 32 == 0) {
            check_pages();
        }
        so_far = 0;
        for (const auto& [kind, times] : done) {
            so_far += times;
        }
    }
    while (!sequences_.empty()) {
        if (some(sequence::state::running) != nullptr) {
            finish();
        } else if (sequence* const of = some(sequence::state::parked)) {
            for (std::size_t layer = 0; layer < layers(); ++layer) {
                for (std::int32_t entry = of->in_use[layer].begin; entry < of->in_use[layer].end; ++entry) {
                    pool_.give_back(of->pages[layer][at(entry)]);
                }
            }
            sequences_.remove_if([of](const sequence& one) { return &one == of; });
        } else {
            sequences_.pop_back();
        }
    }
    while (!prefixes_.empty()) {
        forget(prefixes_.begin());
    }
    check_pages();
    expect(pool_.free_pages() == pool_.pages(), "pages leaked");
    const std::vector<std::byte> state = owner_.snapshot();
    owned_ledger fresh(owner_.ledger.bounds(), shape_.layer_sets);
    expect(fresh.is(state), "a ledger without requests is not as it was at first");
    expect(owner_.canaries_intact(), "memory beyond state_bytes() was written");
}

// What must hold
// ---------------------------------------------------------------------------------------------

/// What the ledger says a request holds, and what attention would read, by the plain lists.
void simulated_engine::check(sequence& of) {
    const std::int32_t next = of.done;
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        up::held_rows rows;
        must(owner_.ledger.rows_of(of.slot, static_cast<std::int32_t>(layer), rows));
        const std::int32_t length = of.length(layer);
        const positions& held = of.kept[layer];
        expect(rows.length() == length && rows.num_tokens() == of.done, "lengths differ");
        std::int32_t seen_from = 0; // the first row in the next query's window
        while (shape_.windows[layer] > 0 && seen_from < length &&
               held[at(seen_from)] + shape_.windows[layer] <= next) {
            ++seen_from;
        }
        const std::int32_t page = shape_.page_tokens[layer];
        const std::int32_t* const table = entries(layer, of.slot);
        std::array<std::int32_t, 64> chunk{};
        for (std::int32_t row = 0; row < length; ++row) {
            if (row % 64 == 0) {
                expect(rows.copy_positions(row, chunk.data(), 64) == std::min(64, length - row),
                       "numbers of positions differ");
            }
            expect(chunk[at(row % 64)] == held[at(row)], "positions differ");
            if (row >= seen_from) {
                expect(pool_.read(table[row / page], row % page) == of.row(layer, held[at(row)]),
                       "attention reads a row that was never written for it");
            }
        }
        if (length > 0) {
            const std::int32_t row = below(length);
            const std::int32_t position = held[at(row)];
            expect(rows.position_of(row) == position && rows.row_of(position) == row, "rows differ");
            expect(rows.window_row(next, shape_.windows[layer]) == seen_from, "windows differ");
        }
    }
}

/// Every page has as many owners as tables that name it.
void simulated_engine::check_pages() {
    std::vector<std::int32_t> named(at(pool_.pages()));
    for (sequence& of : sequences_) {
        for (std::size_t layer = 0; layer < layers(); ++layer) {
            if (of.where == sequence::state::running) {
                const up::page_span used = in_use(layer, of.slot);
                for (std::int32_t entry = used.begin; entry < used.end; ++entry) {
                    ++named.at(at(entries(layer, of.slot)[entry]));
                }
            } else if (of.where == sequence::state::parked) {
                for (std::int32_t entry = of.in_use[layer].begin; entry < of.in_use[layer].end; ++entry) {
                    ++named.at(at(of.pages[layer][at(entry)]));
                }
            }
        }
    }
    for (const cached_prefix& one : prefixes_) {
        for (const std::vector<std::int32_t>& pages : one.pages) {
            for (const std::int32_t page : pages) {
                ++named.at(at(page));
            }
        }
    }
    std::int32_t used = 0;
    for (std::int32_t page = 0; page < pool_.pages(); ++page) {
        expect(named[at(page)] == pool_.owners(page), "a page has leaked, or has been given back too often");
        used += named[at(page)] > 0 ? 1 : 0;
    }
    expect(used + pool_.free_pages() == pool_.pages(), "free and used pages are not all pages");
}

// Pages
// ------------------------------------------------------------------------------------------------------

/// Entries for the first @p rows rows of a layer.
void simulated_engine::take_pages(sequence& of, std::size_t layer, std::int32_t rows) {
    up::page_span& used = in_use(layer, of.slot);
    while (used.end * shape_.page_tokens[layer] < rows) {
        const std::int32_t page = pool_.take();
        if (page < 0) {
            throw exhausted{};
        }
        entries(layer, of.slot)[used.end++] = page;
    }
}

/// Pages that the ledger says nobody needs any more; what is left must be what plain lists say.
void simulated_engine::hand_back(sequence& of) {
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const auto index = static_cast<std::int32_t>(layer);
        const std::int32_t gone = in_use(layer, of.slot).begin; // passed before a rollback
        std::vector<std::int32_t> freed(at(in_use(layer, of.slot).count()));
        std::int32_t count = 0;
        must(owner_.ledger.hand_back_pages(&of.slot, 1, {index, 1}, rule(layer), tables(), freed.data(),
                                           static_cast<std::int32_t>(freed.size()), count));
        for (std::int32_t i = 0; i < count; ++i) {
            pool_.give_back(freed[at(i)]);
        }
        const std::int32_t page = shape_.page_tokens[layer];
        const std::int32_t length = of.length(layer);
        const std::int32_t window = shape_.windows[layer];
        std::int32_t passed = 0; // full pages whose every position is behind the window
        const std::int32_t oldest_query = std::max(0, of.done - max_rollback);
        while (window > 0 && (passed + 1) * page <= length &&
               of.kept[layer][at((passed + 1) * page - 1)] + window <= oldest_query) {
            ++passed;
        }
        std::int32_t dense_passed = 0; // in a cache that drops nothing
        while (window > 0 && (dense_passed + 1) * page <= of.done &&
               (dense_passed + 1) * page - 1 + window <= oldest_query) {
            ++dense_passed;
        }
        up::page_usage usage;
        must(owner_.ledger.pages_of(of.slot, {index, 1}, rule(layer), usage));
        expect(usage.pages == (length + page - 1) / page - passed &&
                   usage.dense_pages == (of.done + page - 1) / page - dense_passed,
               "usage differs");
        passed = std::max(passed, gone);
        const up::page_span left = in_use(layer, of.slot);
        expect(left.count() == (length + page - 1) / page - passed, "pages in use are too many or too few");
        expect(left.count() == 0 || left.begin == passed, "other pages are in use than those needed");
        if (window > 0) {
            of.lowest = std::max(of.lowest, of.done - max_rollback);
        }
        if (count > 0) {
            ++seen["a layer handed pages back"];
        }
    }
}

void simulated_engine::give_back_all(sequence& of) {
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const up::page_span used = in_use(layer, of.slot);
        for (std::int32_t entry = used.begin; entry < used.end; ++entry) {
            pool_.give_back(entries(layer, of.slot)[entry]);
        }
    }
}

/// The slot is somebody else's from now on.
void simulated_engine::leave_slot(sequence& of) {
    must(owner_.ledger.release(of.slot));
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        std::fill_n(entries(layer, of.slot), shape_.max_tokens, -1);
        in_use(layer, of.slot) = {};
    }
    slots_[at(of.slot)] = nullptr;
    of.slot = -1;
}

void simulated_engine::enter_slot(sequence& of, std::int32_t slot) {
    must(owner_.ledger.admit(slot));
    slots_[at(slot)] = &of;
    of.slot = slot;
    of.where = sequence::state::running;
}

// Operations
// -------------------------------------------------------------------------------------------------

void simulated_engine::arrive() {
    const std::int32_t slot = free_slot();
    if (slot < 0 || sequences_.size() >= 2 * max_requests) {
        return;
    }
    sequence& made = sequences_.emplace_back();
    made.kept.resize(layers());
    made.prompt = one_in(6) ? shape_.max_tokens - below(3) : 1 + below(shape_.max_tokens / 2);
    enter_slot(made, slot);
    ++done["admit"];
}

/// Signatures of a request's first pages in a layer, from its own text.
std::vector<up::page_signature> simulated_engine::sign(const sequence& of, std::size_t layer,
                                                       std::int32_t pages) {
    const std::vector<std::int64_t> tokens(of.text.begin(), of.text.end());
    std::vector<up::page_signature> made(at(shape_.max_tokens));
    std::int32_t count = 0;
    must(owner_.ledger.sign_pages(of.slot, static_cast<std::int32_t>(layer), {{1, 2}, 3}, tokens.data(),
                                  shape_.page_tokens[layer], made.data(),
                                  static_cast<std::int32_t>(made.size()), count));
    expect(count >= pages, "there are fewer signatures than pages");
    made.resize(at(pages));
    return made;
}

/// The pages of some request's beginning are kept for others that begin so.
void simulated_engine::remember() {
    sequence* const of = some(sequence::state::running);
    if (of == nullptr || of->done == 0 || of->done != static_cast<std::int32_t>(of->text.size())) {
        return;
    }
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        if (in_use(layer, of->slot).begin > 0) {
            return; // a window has passed the beginning
        }
    }
    const std::int32_t tokens = one_in(2) ? of->done : 1 + below(of->done);
    cached_prefix& made = prefixes_.emplace_back();
    made.text.assign(of->text.begin(), of->text.begin() + tokens);
    std::size_t bytes = 0;
    must(owner_.ledger.saved_prefix_bytes(of->slot, tokens, bytes));
    made.saved.resize(bytes);
    must(owner_.ledger.save_prefix(of->slot, tokens, made.saved.data(), bytes));
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const positions& kept = of->kept[layer];
        made.kept.emplace_back(kept.begin(), std::lower_bound(kept.begin(), kept.end(), tokens));
        const auto rows = static_cast<std::int32_t>(made.kept.back().size());
        const std::int32_t page = shape_.page_tokens[layer];
        made.pages.emplace_back();
        for (std::int32_t entry = 0; entry * page < rows; ++entry) {
            made.pages.back().push_back(entries(layer, of->slot)[entry]);
            pool_.share(made.pages.back().back());
        }
        made.signatures.push_back(sign(*of, layer, rows / page));
    }
    if (prefixes_.size() > 4) {
        forget(prefixes_.begin());
    }
    ++done["prefix kept"];
}

void simulated_engine::forget(std::list<cached_prefix>::iterator which) {
    for (const std::vector<std::int32_t>& pages : which->pages) {
        for (const std::int32_t page : pages) {
            pool_.give_back(page);
        }
    }
    prefixes_.erase(which);
}

/// A request that begins as another did takes its pages, once they have the signatures that its own text asks
/// for.
void simulated_engine::arrive_with_prefix() {
    const std::int32_t slot = free_slot();
    if (prefixes_.empty() || slot < 0 || sequences_.size() >= 2 * max_requests) {
        return;
    }
    const cached_prefix& from =
        *std::next(prefixes_.begin(), below(static_cast<std::int32_t>(prefixes_.size())));
    sequence& made = sequences_.emplace_back();
    made.text = from.text;
    made.kept = from.kept;
    made.done = static_cast<std::int32_t>(from.text.size());
    made.prompt = std::min(shape_.max_tokens, made.done + below(shape_.max_tokens / 4));
    enter_slot(made, slot);
    must(owner_.ledger.restore(slot, from.saved.data(), from.saved.size()));
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const auto full = static_cast<std::int32_t>(from.signatures[layer].size());
        expect(sign(made, layer, full) == from.signatures[layer], "signatures differ");
        std::copy(from.pages[layer].begin(), from.pages[layer].end(), entries(layer, slot));
        in_use(layer, slot) = {0, static_cast<std::int32_t>(from.pages[layer].size())};
        for (const std::int32_t page : from.pages[layer]) {
            pool_.share(page);
        }
    }
    check(made);
    if (one_in(2)) { // a text that differs in its last token has another last page
        made.text.back() ^= 1;
        const std::size_t layer = at(below(static_cast<std::int32_t>(layers())));
        std::vector<up::page_signature> own =
            sign(made, layer, static_cast<std::int32_t>(from.signatures[layer].size()));
        const bool last_is_full = !from.kept[layer].empty() && from.kept[layer].back() == made.done - 1 &&
                                  made.length(layer) % shape_.page_tokens[layer] == 0;
        expect((own == from.signatures[layer]) == !last_is_full, "a wrong page would have been taken");
        made.text.back() ^= 1;
    }
    ++done["prefix hit"];
}

void simulated_engine::finish() {
    if (sequence* const of = some(sequence::state::running)) {
        give_back_all(*of);
        leave_slot(*of);
        sequences_.remove_if([of](const sequence& one) { return &one == of; });
        ++done["finish"];
    }
}

void simulated_engine::roll_back() {
    sequence* const of = some(sequence::state::running);
    if (of == nullptr || of->done != static_cast<std::int32_t>(of->text.size())) {
        return; // none, or being recomputed
    }
    const std::int32_t lowest = one_in(3) ? of->lowest : std::max(of->lowest, of->done - max_rollback);
    const std::int32_t to = lowest + below(of->done - lowest + 1);
    if (one_in(2)) {
        must(owner_.ledger.rollback(of->slot, to));
    } else {
        const std::int32_t ids[] = {-1, of->slot};
        const std::int32_t tokens[] = {5, to};
        must(owner_.ledger.rollback(ids, tokens, 2));
    }
    of->done = to;
    of->text.resize(at(to));
    for (positions& held : of->kept) {
        held.erase(std::lower_bound(held.begin(), held.end(), to), held.end());
    }
    // Shared pages behind the last row aren't this request's to write.
    hand_back(*of);
    check(*of);
    ++done["rollback"];
}

/// Layers give up rows after all of them have run: those that stay move to the front of their cache.
void simulated_engine::give_up() {
    sequence* const of = some(sequence::state::running);
    if (of == nullptr || first_layers_.empty() || of->done != static_cast<std::int32_t>(of->text.size())) {
        return;
    }
    const std::int32_t set = 1 + below(static_cast<std::int32_t>(first_layers_.size()));
    const auto of_set = [&](std::size_t layer) { return shape_.layer_sets[layer] == set; };
    const std::size_t first = at(first_layers_[at(set - 1)]);
    positions kept = subset(of->kept[first]);
    if (shape_.relation == up::set_relation::nested && at(set) < first_layers_.size()) {
        const positions& next = of->kept[at(first_layers_[at(set)])];
        const positions chosen = kept;
        kept.clear();
        std::set_union(chosen.begin(), chosen.end(), next.begin(), next.end(), std::back_inserter(kept));
    }
    const auto count = static_cast<std::int32_t>(kept.size());
    for (std::size_t layer = first; layer < layers(); ++layer) { // pages to be written become one's own
        if (!of_set(layer)) {
            continue;
        }
        if (in_use(layer, of->slot).begin > 0) {
            return; // a window has passed rows that would move
        }
        for (std::int32_t entry = 0; entry * shape_.page_tokens[layer] < count; ++entry) {
            std::int32_t& page = entries(layer, of->slot)[entry];
            const std::int32_t own = pool_.owners(page) > 1 ? pool_.copy(page) : page;
            if (own < 0) {
                return;
            }
            if (own != page) {
                pool_.give_back(page);
                page = own;
            }
        }
    }
    std::vector<std::int64_t> from(kept.size());
    must(
        owner_.ledger.keep_only(of->slot, static_cast<std::int32_t>(first), kept.data(), count, from.data()));
    for (std::size_t layer = first; layer < layers(); ++layer) {
        if (!of_set(layer)) {
            continue;
        }
        const std::int32_t* const table = entries(layer, of->slot);
        const std::int32_t rows = shape_.page_tokens[layer];
        for (std::int32_t row = 0; row < count; ++row) {
            const auto source = static_cast<std::int32_t>(from[at(row)]);
            expect(source >= row, "a row would be overwritten before it moves");
            pool_.write(table[row / rows], row % rows, pool_.read(table[source / rows], source % rows));
        }
        of->kept[layer] = kept;
    }
    hand_back(*of);
    check(*of);
    ++done["give up"];
}

void simulated_engine::fork() {
    sequence* const from = some(sequence::state::running);
    const std::int32_t slot = free_slot();
    if (from == nullptr || slot < 0 || sequences_.size() >= 2 * max_requests) {
        return;
    }
    hand_back(*from);
    must(owner_.ledger.fork(from->slot, slot));
    sequence& made = sequences_.emplace_back(*from);
    made.slot = slot;
    slots_[at(slot)] = &made;
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        up::held_rows rows;
        must(owner_.ledger.rows_of(slot, static_cast<std::int32_t>(layer), rows));
        const up::forked_pages pages = rows.fork_pages(rule(layer));
        const up::page_span used = in_use(layer, from->slot);
        const std::int32_t page = shape_.page_tokens[layer];
        const std::int32_t length = made.length(layer);
        const std::int32_t live_end = pages.shared.end + (pages.copied >= 0 ? 1 : 0);
        expect(used.end == live_end && used.begin >= pages.shared.begin, "forked pages differ");
        expect((pages.copied >= 0) == (length % page != 0) && pages.copied_rows == length % page &&
                   pages.shared.end == length / page,
               "the page to copy differs");
        for (std::int32_t entry = used.begin; entry < used.end; ++entry) {
            std::int32_t& copy = entries(layer, slot)[entry];
            copy = entries(layer, from->slot)[entry];
            pool_.share(copy);
        }
        in_use(layer, slot) = used;
        // Copied now, or when the first of the two writes it.
        if (pages.copied >= 0 && one_in(2)) {
            std::int32_t& shared = entries(layer, slot)[pages.copied];
            const std::int32_t own = pool_.copy(shared);
            if (own >= 0) {
                pool_.give_back(shared);
                shared = own;
            }
        }
    }
    check(made);
    ++done["fork"];
}

void simulated_engine::preempt(sequence& of) {
    const std::int32_t way = below(3);
    if (way == 0) {
        give_back_all(of);
        leave_slot(of);
        of.done = 0;
        of.lowest = 0;
        of.where = sequence::state::to_recompute;
        ++done["preempt by recompute"];
        return;
    }
    hand_back(of);
    std::size_t bytes = 0;
    must(owner_.ledger.saved_bytes(of.slot, bytes));
    expect(bytes <= up::drop_ledger<>::max_saved_bytes(owner_.ledger.bounds()), "saved sizes differ");
    of.saved.assign(bytes, {});
    must(owner_.ledger.save(of.slot, of.saved.data(), bytes));
    of.in_use.clear();
    of.contents.assign(layers(), {});
    of.pages.assign(layers(), {});
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const up::page_span used = in_use(layer, of.slot);
        const std::int32_t* const table = entries(layer, of.slot);
        of.in_use.push_back(used);
        if (way == 1) {
            for (std::int32_t entry = used.begin; entry < used.end; ++entry) {
                for (std::int32_t row = 0; row < shape_.page_tokens[layer]; ++row) {
                    of.contents[layer].push_back(pool_.read(table[entry], row));
                }
            }
        } else {
            of.pages[layer].assign(table, table + used.end);
        }
    }
    if (way == 1) {
        give_back_all(of);
    }
    leave_slot(of);
    of.where = way == 1 ? sequence::state::swapped_out : sequence::state::parked;
    ++done[way == 1 ? "preempt by swap" : "preempt by save"];
}

void simulated_engine::resume() {
    const sequence::state ways[] = {sequence::state::to_recompute, sequence::state::swapped_out,
                                    sequence::state::parked};
    sequence* const of = some(random_.one_of(ways));
    const std::int32_t slot = free_slot();
    if (of == nullptr || slot < 0) {
        return;
    }
    const sequence::state was = of->where;
    enter_slot(*of, slot);
    if (was == sequence::state::to_recompute) {
        ++done["resume"];
        return; // its rows come again, in chunks
    }
    if (one_in(4)) { // a bit of the buffer has changed on its way
        std::vector<std::byte> damaged = of->saved;
        damaged[at(below(static_cast<std::int32_t>(damaged.size())))] ^= std::byte{1} << below(8);
        const std::vector<std::byte> before = owner_.snapshot();
        const up::status came = owner_.ledger.restore(slot, damaged.data(), damaged.size());
        expect(!came.ok() && came.request == slot && owner_.is(before), "a damaged buffer was restored");
        ++done["failure"];
    }
    must(owner_.ledger.restore(slot, of->saved.data(), of->saved.size()));
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        in_use(layer, slot) = {of->in_use[layer].begin, of->in_use[layer].begin};
    }
    if (was == sequence::state::parked) {
        for (std::size_t layer = 0; layer < layers(); ++layer) {
            std::copy(of->pages[layer].begin(), of->pages[layer].end(), entries(layer, slot));
            in_use(layer, slot) = of->in_use[layer];
        }
    } else {
        try {
            for (std::size_t layer = 0; layer < layers(); ++layer) {
                take_pages(*of, layer, of->in_use[layer].end * shape_.page_tokens[layer]);
            }
        } catch (const exhausted&) {
            give_back_all(*of);
            leave_slot(*of);
            of->where = was;
            ++seen["pool exhausted"];
            return;
        }
        for (std::size_t layer = 0; layer < layers(); ++layer) {
            auto from = of->contents[layer].begin();
            for (std::int32_t entry = of->in_use[layer].begin; entry < of->in_use[layer].end; ++entry) {
                for (std::int32_t row = 0; row < shape_.page_tokens[layer]; ++row) {
                    pool_.write(entries(layer, slot)[entry], row, *from++);
                }
            }
        }
    }
    of->saved.clear();
    check(*of);
    ++done["resume"];
}

// Failures
// ---------------------------------------------------------------------------------------------------

void simulated_engine::fail() {
    auto& ledger = owner_.ledger;
    const std::int32_t slot = below(max_requests);
    up::ledger_step step;
    const auto try_rows = [&](request_tag tag, const positions& rows) {
        rows_batch batch;
        for (std::int32_t other = 0; other < max_requests; ++other) { // good ones before and after
            if (other == slot) {
                batch.add(slot, tag, rows);
            } else if (slots_[at(other)] != nullptr && slots_[at(other)]->done < shape_.max_tokens) {
                batch.add(other, request_tag::verify, {slots_[at(other)]->done});
            }
        }
        return ledger.begin_step(batch.view(), batch.ids.data(), step);
    };
    const sequence* const of = slots_[at(slot)];
    if (of == nullptr) {
        const auto unknown = status_code::unknown_request;
        refused(unknown, slot, [&] { return try_rows(request_tag::decode, {0}); });
        refused(unknown, slot, [&] { return ledger.rollback(slot, 0); });
        refused(unknown, slot, [&] { return ledger.fork(slot, (slot + 1) % max_requests); });
        return;
    }
    const auto bad = status_code::invalid_argument;
    const std::int32_t next = of->done;
    switch (below(5)) {
    case 0: // a chunk that leaves a gap, one that overlaps, one that is too long
        if (next + 1 < shape_.max_tokens) {
            refused(bad, slot, [&] { return try_rows(request_tag::chunk, range(next + 1, next + 2)); });
        }
        if (next > 0 && next < shape_.max_tokens) {
            refused(bad, slot, [&] { return try_rows(request_tag::chunk, {next - 1}); });
            refused(bad, slot, [&] { return try_rows(request_tag::prefill, {next}); });
        }
        refused(status_code::capacity_exceeded, slot,
                [&] { return try_rows(request_tag::chunk, range(next, shape_.max_tokens + 1)); });
        break;
    case 1:
        refused(status_code::out_of_range, slot, [&] { return ledger.rollback(slot, next + 1); });
        refused(status_code::out_of_range, slot, [&] { return ledger.rollback(slot, -1); });
        break;
    case 2:
        refused(status_code::wrong_state, slot, [&] { return ledger.admit(slot); });
        refused(status_code::wrong_state, slot, [&] { return ledger.fork(slot, slot); });
        break;
    case 3:
        if (next > 0) {
            std::vector<std::byte> saved(up::drop_ledger<>::max_saved_bytes(ledger.bounds()));
            std::size_t bytes = 0;
            must(ledger.saved_bytes(slot, bytes));
            must(ledger.save(slot, saved.data(), bytes));
            refused(status_code::wrong_state, slot,
                    [&] { return ledger.restore(slot, saved.data(), bytes); });
        }
        break;
    default: // no room in the list of pages: tables stay as they are
        for (std::size_t layer = 0; layer < layers(); ++layer) {
            const std::vector<std::int32_t> before = table_;
            const up::page_span used = in_use(layer, slot);
            std::int32_t count = -7;
            const up::status came = ledger.hand_back_pages(&slot, 1, {static_cast<std::int32_t>(layer), 1},
                                                           rule(layer), tables(), nullptr, 0, count);
            expect(came.ok() ? count == 0 : came.code == status_code::capacity_exceeded && count == -7,
                   "pages without room came back");
            expect(table_ == before && in_use(layer, slot).begin == used.begin &&
                       in_use(layer, slot).end == used.end,
                   "a refusal has changed tables");
            ++done["failure"];
        }
    }
    expect(!step.open(), "a step that was refused is open");
}

} // namespace ledger_test
