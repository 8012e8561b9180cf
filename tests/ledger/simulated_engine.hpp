// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// A serving engine without a model. What each layer of each request holds it knows from plain lists of
/// positions; where to write and how much to read it takes from the ledger alone. Rows of its pages name the
/// text and the layer that they were written for, so a row in the wrong place, or read by the wrong request,
/// is seen.

#include "ledger/ledger_fixture.hpp"
#include "ledger/simulated_pool.hpp"

#include "property/random.hpp"

#include <algorithm>
#include <array>
#include <list>
#include <map>
#include <optional>

namespace ledger_test {

/// A model's layers: their sets, the rows of their pages, their windows.
struct engine_shape {
    const char* name;
    up::set_relation relation;
    std::vector<std::int32_t> layer_sets;
    std::vector<std::int32_t> page_tokens; // [layer]
    std::vector<std::int32_t> windows;     // [layer] 0: all
    std::int32_t max_tokens;
    std::int32_t pool_pages;
};

struct sequence {
    enum class state { running, to_recompute, swapped_out, parked };

    std::vector<std::uint64_t> text; // [position] a hash of all tokens up to it
    std::vector<positions> kept;     // [layer] positions whose rows entered it, of the whole text
    std::int32_t prompt = 0;
    std::int32_t done = 0;   // positions that the ledger has; fewer than the text while it is recomputed
    std::int32_t lowest = 0; // no rollback below this: pages that windows passed are gone
    std::int32_t slot = -1;

    state where = state::running;
    std::vector<std::byte> saved;                     // swapped_out, parked
    std::vector<std::vector<std::int32_t>> pages;     // parked: [layer] entries
    std::vector<up::page_span> in_use;                // [layer] parked and swapped_out
    std::vector<std::vector<std::uint64_t>> contents; // swapped_out: [layer] rows of the pages in use

    std::int32_t length(std::size_t layer) const { // rows that the layer holds
        const positions& of = kept[layer];
        return static_cast<std::int32_t>(std::lower_bound(of.begin(), of.end(), done) - of.begin());
    }
    /// The content of a row.
    std::uint64_t row(std::size_t layer, std::int32_t position) const {
        return text[static_cast<std::size_t>(position)] * 31 + layer;
    }
};

/// What a prefix cache keeps: a text, and the pages that it led to.
struct cached_prefix {
    std::vector<std::uint64_t> text;
    std::vector<positions> kept; // [layer]
    std::vector<std::byte> saved;
    std::vector<std::vector<std::int32_t>> pages;            // [layer] one owner of each is the cache
    std::vector<std::vector<up::page_signature>> signatures; // [layer] of full pages
};

class simulated_engine {
  public:
    static constexpr std::int32_t max_requests = 6;
    static constexpr std::int32_t max_rollback = 6; // of verifications

    simulated_engine(const engine_shape& shape, std::uint64_t seed)
        : shape_(shape)
        , random_(seed)
        , owner_(bounds_of(shape), shape.layer_sets)
        , pool_(shape.pool_pages, *std::max_element(shape.page_tokens.begin(), shape.page_tokens.end())) {
        for (std::int32_t set = 1; set < owner_.ledger.bounds().num_sets; ++set) {
            first_layers_.push_back(static_cast<std::int32_t>(
                std::find(shape.layer_sets.begin(), shape.layer_sets.end(), set) - shape.layer_sets.begin()));
        }
        // Positions of one request in pages of one row: no table needs more entries.
        const std::size_t tables = layers() * std::size_t{max_requests};
        table_.assign(tables * static_cast<std::size_t>(shape.max_tokens), -1);
        in_use_.assign(tables, {});
        slots_.fill(nullptr);
    }

    /// Lets operations happen until there have been so many, then ends every request.
    void run(std::int64_t operations);

    std::map<std::string, std::int64_t> done; // operations by kind
    std::map<std::string, std::int64_t> seen; // what happened on the way

  private:
    /// One request of a step.
    struct part {
        sequence* of;
        up::request_tag tag;
        std::int32_t rows;
        bool fresh = true;               // not run before, so the rows to drop are yet to be decided
        std::vector<positions> entering; // [layer]
    };
    struct exhausted {};

    static up::ledger_limits bounds_of(const engine_shape& shape) {
        return {max_requests, shape.max_tokens, static_cast<std::int32_t>(shape.layer_sets.size()),
                *std::max_element(shape.layer_sets.begin(), shape.layer_sets.end()) + 1, shape.relation};
    }
    std::size_t layers() const { return shape_.layer_sets.size(); }
    static std::size_t at(std::int32_t index) { return static_cast<std::size_t>(index); }
    std::int32_t below(std::int32_t n) { return random_.between(0, n - 1); }
    bool one_in(std::int32_t n) { return below(n) == 0; }
    static void expect(bool good, const char* what) {
        if (!good) {
            throw std::logic_error(what);
        }
    }

    // Tables: [layer, slot, entry], one row of them for each slot of the ledger.
    std::int32_t* entries(std::size_t layer, std::int32_t slot) {
        return table_.data() + (layer * max_requests + at(slot)) * at(shape_.max_tokens);
    }
    up::page_span& in_use(std::size_t layer, std::int32_t slot) {
        return in_use_[layer * max_requests + at(slot)];
    }
    up::page_rule rule(std::size_t layer) const {
        return {shape_.page_tokens[layer], shape_.windows[layer], max_rollback};
    }
    up::page_tables tables() {
        up::page_tables made;
        made.table = table_.data();
        made.in_use = in_use_.data();
        made.request_stride = shape_.max_tokens;
        made.layer_stride = std::int64_t{max_requests} * shape_.max_tokens;
        made.span_layer_stride = max_requests;
        made.max_pages = shape_.max_tokens;
        made.rows = up::request_index::ledger;
        return made;
    }
    up::block_table_view slots_of(std::size_t layer) const {
        up::block_table_view made;
        made.table = table_.data();
        made.request_stride = shape_.max_tokens;
        made.layer_stride = std::int64_t{max_requests} * shape_.max_tokens;
        made.max_pages = shape_.max_tokens;
        made.page_tokens = shape_.page_tokens[layer];
        made.rows = up::request_index::ledger;
        return made;
    }

    sequence* some(sequence::state where) {
        std::vector<sequence*> found;
        for (sequence& one : sequences_) {
            if (one.where == where) {
                found.push_back(&one);
            }
        }
        return found.empty() ? nullptr : found[at(below(static_cast<std::int32_t>(found.size())))];
    }
    std::int32_t free_slot() {
        const std::int32_t start = below(max_requests);
        for (std::int32_t i = 0; i < max_requests; ++i) {
            const std::int32_t slot = (start + i) % max_requests;
            if (slots_[at(slot)] == nullptr) {
                return slot;
            }
        }
        return -1;
    }

    // Operations; each leaves everything as it was when there is nothing to do.
    void arrive();
    void step();
    void arrive_with_prefix();
    void remember();
    void roll_back();
    void give_up();
    void fork();
    void preempt(sequence& of);
    void resume();
    void finish();
    void fail();

    // Parts of them.
    std::optional<part> plan(sequence& of);
    positions subset(const positions& of);
    void decide(part& of);
    void run_layers(up::ledger_step& step, const std::vector<part>& parts, const rows_batch& batch);
    template <class Index>
    void write_rows(const up::ledger_step& step, const std::vector<part>& parts, std::size_t first,
                    std::size_t end);
    template <class Index>
    void write_layer(const std::vector<part>& parts, std::size_t layer,
                     const up::step_arrays<Index, std::int64_t>& told);
    template <class Index>
    void check_logits(const up::ledger_step& step, const std::vector<part>& parts);
    void take_pages(sequence& of, std::size_t layer, std::int32_t rows);
    void hand_back(sequence& of);
    void give_back_all(sequence& of);
    void forget(std::list<cached_prefix>::iterator which);
    std::vector<up::page_signature> sign(const sequence& of, std::size_t layer, std::int32_t pages);
    void leave_slot(sequence& of);
    void enter_slot(sequence& of, std::int32_t slot);
    template <class Call>
    void refused(up::status_code code, std::int32_t request, Call call);

    // What must hold.
    void check(sequence& of);
    void check_pages();

    const engine_shape& shape_;
    property::random_numbers random_;
    owned_ledger owner_;
    simulated_pool pool_;
    std::vector<std::int32_t> first_layers_; // [set - 1]
    std::vector<std::int32_t> table_;
    std::vector<up::page_span> in_use_;
    std::list<sequence> sequences_;
    std::list<cached_prefix> prefixes_; // the oldest first
    std::array<sequence*, max_requests> slots_{};
};

template <class Call>
void simulated_engine::refused(up::status_code code, std::int32_t request, Call call) {
    const std::vector<std::byte> before = owner_.snapshot();
    const up::status came = call();
    if (came.code != code || came.request != request || !owner_.is(before)) {
        throw std::logic_error("an injected failure came back as: " + text(came));
    }
    ++done["failure"];
}

} // namespace ledger_test
