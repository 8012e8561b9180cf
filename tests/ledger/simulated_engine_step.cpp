// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A step of the engine: what each request does in it, the pages and slots of its rows, what the ledger tells.

#include "ledger/random_subset.hpp"
#include "ledger/simulated_engine.hpp"

namespace ledger_test {

using up::request_tag;
using up::status_code;

positions simulated_engine::subset(const positions& of) {
    return random_subset(of, 16, 40, [this](std::int32_t n) { return below(n); });
}

/// What a request does in the next step: its prompt, or what is left of it, or tokens after it; after a
/// preemption by recomputing all of that once more.
std::optional<simulated_engine::part> simulated_engine::plan(sequence& of) {
    const auto known = static_cast<std::int32_t>(of.text.size());
    part made{&of, request_tag::decode, 1, true, {}};
    if (of.done < known) {
        made.fresh = false;
        made.tag = request_tag::chunk;
        made.rows = 1 + below(known - of.done);
        if (of.done == 0 && one_in(2)) {
            made.tag = request_tag::prefill;
            made.rows = known;
        }
    } else if (of.done < of.prompt) {
        made.tag = request_tag::chunk;
        made.rows = one_in(8) ? 0 : 1 + below(std::min(of.prompt - of.done, 1 + shape_.max_tokens / 4));
        if (of.done == 0 && one_in(3)) {
            made.tag = request_tag::prefill;
            made.rows = of.prompt;
        }
    } else if (one_in(3)) {
        made.tag = request_tag::verify;
        made.rows = 1 + below(max_rollback);
    }
    made.rows = std::min(made.rows, shape_.max_tokens - of.done);
    if (made.rows == 0 && !one_in(4)) {
        return std::nullopt;
    }
    return made;
}

/// Which rows enter each layer: as before where the text has run before, else as it comes.
void simulated_engine::decide(part& of) {
    const std::int32_t begin = of.of->done;
    const std::int32_t end = begin + of.rows;
    const positions every = range(begin, end);
    const bool droppable = of.tag == request_tag::prefill || of.tag == request_tag::chunk;
    for (std::size_t layer = 0; layer < layers(); ++layer) {
        const std::int32_t set = shape_.layer_sets[layer];
        if (!of.fresh) {
            const positions& kept = of.of->kept[layer];
            of.entering.emplace_back(std::lower_bound(kept.begin(), kept.end(), begin),
                                     std::lower_bound(kept.begin(), kept.end(), end));
        } else if (set == 0) {
            of.entering.push_back(every);
        } else if (first_layers_[at(set - 1)] != static_cast<std::int32_t>(layer)) {
            of.entering.push_back(of.entering[at(first_layers_[at(set - 1)])]);
        } else {
            const positions& candidates =
                layer == 0 || shape_.relation == up::set_relation::independent ? every : of.entering.back();
            of.entering.push_back(droppable ? subset(candidates) : every);
        }
    }
}

void simulated_engine::step() {
    std::vector<part> parts;
    rows_batch batch;
    for (std::int32_t i = 0, slot = below(max_requests); i < max_requests; ++i) {
        slot = (slot + 1) % max_requests;
        std::optional<part> made;
        if (slots_[at(slot)] != nullptr && !one_in(5)) {
            made = plan(*slots_[at(slot)]);
        }
        if (made) {
            decide(*made);
            batch.add(slot, made->tag, range(made->of->done, made->of->done + made->rows));
            parts.push_back(std::move(*made));
        } else if (one_in(4)) {
            batch.add(-1, request_tag::decode, {});
            parts.push_back({nullptr, request_tag::decode, 0, false, std::vector<positions>(layers())});
        }
    }
    const std::vector<std::byte> before = owner_.snapshot();
    up::batch_view view = batch.view();
    if (one_in(4)) {
        view.positions = nullptr;
    }
    for (const part& of : parts) {
        for (std::int32_t i = 0; of.fresh && i < of.rows; ++i) { // the text goes on
            const std::uint64_t last = of.of->text.empty() ? 0 : of.of->text.back();
            of.of->text.push_back(last * 0x9e3779b97f4a7c15u + random_.next());
        }
    }
    up::ledger_step step;
    must(owner_.ledger.begin_step(view, batch.ids.data(), step));
    bool ran = false;
    try {
        for (const part& of : parts) { // some engines take pages for rows that may yet be dropped
            for (std::size_t layer = 0; of.of != nullptr && one_in(2) && layer < layers(); ++layer) {
                take_pages(*of.of, layer, of.of->length(layer) + of.rows);
            }
        }
        run_layers(step, parts, batch);
        ran = !one_in(12);
    } catch (const exhausted&) {
        ++seen["pool exhausted"];
    }
    if (!ran) {
        must(owner_.ledger.abort_step(step));
        expect(owner_.is(before), "an aborted step has left a trace");
        for (const part& of : parts) {
            if (of.of != nullptr && of.fresh) {
                of.of->text.resize(at(of.of->done));
            }
        }
        for (std::int32_t victims = pool_.free_pages() == 0 ? 2 : 0; victims > 0; --victims) {
            if (!prefixes_.empty() && one_in(2)) {
                forget(prefixes_.begin());
            } else if (sequence* const victim = some(sequence::state::running)) {
                preempt(*victim);
            }
        }
        ++done["abort"];
        return;
    }
    must(owner_.ledger.commit_step(step));
    for (const part& of : parts) {
        if (of.of == nullptr) {
            continue;
        }
        for (std::size_t layer = 0; of.fresh && layer < layers(); ++layer) {
            positions& kept = of.of->kept[layer];
            kept.insert(kept.end(), of.entering[layer].begin(), of.entering[layer].end());
        }
        of.of->done += of.rows;
        if (one_in(2)) {
            hand_back(*of.of);
        }
        check(*of.of);
        ++done[of.tag == request_tag::verify   ? "verify"
               : of.tag == request_tag::decode ? "decode"
               : of.fresh                      ? "chunk"
                                               : "chunk again"];
    }
}

/// Layer by layer, those between two appends at once.
void simulated_engine::run_layers(up::ledger_step& step, const std::vector<part>& parts,
                                  const rows_batch& batch) {
    const auto starts = [&](std::size_t layer) {
        const std::int32_t set = shape_.layer_sets[layer];
        return set != 0 && first_layers_[at(set - 1)] == static_cast<std::int32_t>(layer);
    };
    for (std::size_t layer = 0; layer < layers();) {
        if (starts(layer) || one_in(4)) {
            rows_batch entering;
            for (std::size_t r = 0; r < parts.size(); ++r) {
                entering.add(batch.ids[r], batch.tags[r], parts[r].entering[layer]);
            }
            must(owner_.ledger.append(step, static_cast<std::int32_t>(layer), entering.view()));
            if (one_in(16)) {
                refused(status_code::wrong_state, -1, [&] {
                    return owner_.ledger.append(step, below(static_cast<std::int32_t>(layer) + 1),
                                                entering.view());
                });
            }
        }
        std::size_t end = layer + 1;
        while (end < layers() && !starts(end) && !one_in(8) &&
               shape_.page_tokens[end] == shape_.page_tokens[layer] &&
               shape_.windows[end] == shape_.windows[layer]) {
            ++end;
        }
        if (one_in(2)) {
            write_rows<std::int32_t>(step, parts, layer, end);
        } else {
            write_rows<std::int64_t>(step, parts, layer, end);
        }
        layer = end;
    }
    check_logits<std::int32_t>(step, parts);
}

/// Layers [first, end): pages for their rows, copies of pages that others have too, and the rows.
template <class Index>
void simulated_engine::write_rows(const up::ledger_step& step, const std::vector<part>& parts,
                                  std::size_t first, std::size_t end) {
    const auto requests = static_cast<std::int32_t>(parts.size());
    std::int32_t rows = 0;
    for (const part& of : parts) {
        rows += of.rows;
    }
    up::step_arrays<Index, std::int64_t> told;
    told.num_requests = requests + below(3);
    told.num_rows = rows + below(3);
    told.page_tokens = shape_.page_tokens[first];
    told.window = shape_.windows[first];
    told.chunk_rows = 1 + below(20);
    told.num_chunks = told.num_requests + told.num_rows / told.chunk_rows; // enough, whatever the rows
    told.no_slot = -5;
    const std::size_t by_request = at(told.num_requests);
    const std::size_t by_row = at(told.num_rows);
    const std::size_t parts_told = end - first;
    const std::size_t by_chunk = 2 * at(told.num_chunks);
    std::vector<Index> numbers(parts_told * (5 * by_request + 1 + 3 * by_row + by_chunk), -77);
    std::vector<std::int64_t> slots(parts_told * by_row, -77);
    Index* next = numbers.data();
    const auto array = [&](std::size_t size) {
        Index* const made = next;
        next += parts_told * size;
        return made;
    };
    told.cached_lens = array(by_request);
    told.seq_lens = array(by_request);
    told.cu_seqlens = array(by_request + 1);
    told.num_pages = array(by_request);
    told.partial_pages = array(by_request);
    told.row_positions = array(by_row);
    told.write_rows = array(by_row);
    told.window_rows = array(by_row);
    told.chunks = array(by_chunk);
    const auto from = static_cast<std::int32_t>(first);
    const auto count = static_cast<std::int32_t>(parts_told);
    must(owner_.ledger.look_up(step, {from, count}, told));
    for (std::size_t layer = first; layer < end; ++layer) {
        for (std::size_t r = 0; r < parts.size(); ++r) {
            sequence* const of = parts[r].of;
            if (of == nullptr) {
                continue;
            }
            const std::size_t i = (layer - first) * by_request + r;
            const auto entry = static_cast<std::int32_t>(told.partial_pages[i]);
            const std::int32_t page = told.page_tokens;
            const std::int32_t length = of->length(layer);
            const bool goes_on = length % page != 0 && !parts[r].entering[layer].empty();
            expect(entry == (goes_on ? length / page : -1), "partly filled pages differ");
            take_pages(*of, layer, static_cast<std::int32_t>(told.num_pages[i]) * page);
            if (entry >= 0 && pool_.owners(entries(layer, of->slot)[entry]) > 1) {
                std::int32_t& shared = entries(layer, of->slot)[entry];
                const std::int32_t own = pool_.copy(shared);
                if (own < 0) {
                    throw exhausted{};
                }
                pool_.give_back(shared);
                shared = own;
                ++seen["a shared page was copied before it was written"];
            }
        }
    }
    told.slots = slots.data();
    must(owner_.ledger.look_up(step, {from, count}, slots_of(first), told));
    for (std::size_t layer = first; layer < end; ++layer) {
        up::step_arrays<Index, std::int64_t> one = told;
        const std::size_t i = layer - first;
        one.cached_lens += i * by_request;
        one.seq_lens += i * by_request;
        one.cu_seqlens += i * (by_request + 1);
        one.row_positions += i * by_row;
        one.write_rows += i * by_row;
        one.window_rows += i * by_row;
        one.slots += i * by_row;
        one.chunks += i * by_chunk;
        write_layer(parts, layer, one);
    }
}

/// Writes the rows of a layer where the ledger says, once it has said the right thing.
template <class Index>
void simulated_engine::write_layer(const std::vector<part>& parts, std::size_t layer,
                                   const up::step_arrays<Index, std::int64_t>& told) {
    const std::int32_t page = shape_.page_tokens[layer];
    const std::int32_t window = shape_.windows[layer];
    std::size_t row = 0;
    std::size_t chunk = 0;
    for (std::size_t r = 0; r < parts.size(); ++r) {
        const part& of = parts[r];
        const positions& entering = of.entering[layer];
        for (std::size_t i = 0; i * at(told.chunk_rows) < entering.size(); ++i, ++chunk) {
            expect(told.chunks[2 * chunk] == static_cast<Index>(r) &&
                       told.chunks[2 * chunk + 1] == static_cast<Index>(i),
                   "chunks differ");
        }
        const std::int32_t before = of.of == nullptr ? 0 : of.of->length(layer);
        expect(told.cached_lens[r] == before, "cached lengths differ");
        expect(told.seq_lens[r] == before + static_cast<std::int32_t>(entering.size()), "lengths differ");
        expect(told.cu_seqlens[r] == static_cast<Index>(row), "offsets differ");
        std::int32_t seen_from = 0;
        for (std::size_t i = 0; i < entering.size(); ++i, ++row) {
            const std::int32_t place = before + static_cast<std::int32_t>(i);
            expect(told.row_positions[row] == entering[i], "positions of rows differ");
            expect(told.write_rows[row] == place, "rows to write differ");
            const auto held_at = [&](std::int32_t index) {
                return index < before ? of.of->kept[layer][at(index)] : entering[at(index - before)];
            };
            while (window > 0 && held_at(seen_from) + window <= entering[i]) {
                ++seen_from;
            }
            expect(told.window_rows[row] == seen_from, "windows of rows differ");
            const std::int32_t entry = entries(layer, of.of->slot)[place / page];
            expect(told.slots[row] == std::int64_t{entry} * page + place % page, "slots differ");
            pool_.write(static_cast<std::int32_t>(told.slots[row] / page),
                        static_cast<std::int32_t>(told.slots[row] % page), of.of->row(layer, entering[i]));
        }
    }
    expect(told.cu_seqlens[parts.size()] == static_cast<Index>(row), "numbers of rows differ");
    for (std::size_t r = parts.size(); r < at(told.num_requests); ++r) {
        expect(told.cached_lens[r] == 0 && told.seq_lens[r] == 0 &&
                   told.cu_seqlens[r + 1] == static_cast<Index>(row),
               "padding of requests differs");
    }
    for (chunk *= 2; chunk < 2 * at(told.num_chunks); ++chunk) {
        expect(told.chunks[chunk] == -1, "padding of chunks differs");
    }
    for (; row < at(told.num_rows); ++row) {
        expect(told.row_positions[row] == -1 && told.write_rows[row] == -1 && told.window_rows[row] == -1 &&
                   told.slots[row] == -5,
               "padding of rows differs");
    }
}

/// The last row of each request, every row of a verification.
template <class Index>
void simulated_engine::check_logits(const up::ledger_step& step, const std::vector<part>& parts) {
    const std::size_t layer = layers() - 1;
    std::vector<Index> expected;
    Index first_row = 0;
    for (const part& of : parts) {
        const positions& rows = of.entering[layer];
        const std::int32_t wanted = of.tag == request_tag::verify ? of.rows : std::min(of.rows, 1);
        for (std::int32_t i = of.rows - wanted; i < of.rows; ++i) {
            const auto found = std::lower_bound(rows.begin(), rows.end(), of.of->done + i);
            const bool kept = found != rows.end() && *found == of.of->done + i;
            expected.push_back(kept ? first_row + static_cast<Index>(found - rows.begin()) : -1);
        }
        first_row += static_cast<Index>(rows.size());
    }
    expected.resize(expected.size() + at(below(3)), -1);
    std::vector<Index> told(expected.size());
    must(owner_.ledger.logits_rows(step, static_cast<std::int32_t>(layer), {}, told.data(),
                                   static_cast<std::int32_t>(told.size())));
    expect(told == expected, "rows for logits differ");
}

} // namespace ledger_test
