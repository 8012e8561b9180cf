// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

/// @file
/// A ledger on the host and one on the device that are told the same, and compared.

#include "ledger/ledger_fixture.hpp"
#include "property/random.hpp"
#include "support/cuda.cuh"
#include "support/cuda_calls.hpp"

#include <uniprefill/ledger/drop_ledger.cuh>

#include <algorithm>
#include <iterator>
#include <memory>

namespace ledger_test {

using backend_cuda = up::backend::cuda;
using uniprefill_test::device_array;

/// A call of the hot path: it does what it is asked, and asks the runtime for nothing but launches.
template <class Call>
void launches_only(Call call) {
    const uniprefill_test::cuda_calls before = uniprefill_test::cuda_calls::now();
    must(call());
    REQUIRE(before.since() == "");
}

/// Which arrays a step is asked for: all of them, in these sizes.
struct wanted_arrays {
    std::int32_t num_requests;
    std::int32_t num_rows;
    std::int32_t page_tokens;
    std::int32_t window;
    std::int32_t chunk_rows = 64;

    std::int32_t num_chunks() const { return num_requests + num_rows / chunk_rows; }
};

/// step_arrays that own their memory, on the host or, once as much again, on the device.
template <class Index, class Slot>
class told_arrays {
  public:
    told_arrays(const wanted_arrays& wanted, std::int32_t layers)
        : wanted_(wanted)
        , layers_(static_cast<std::size_t>(layers)) {
        const std::size_t requests = layers_ * static_cast<std::size_t>(wanted.num_requests);
        const std::size_t rows = layers_ * static_cast<std::size_t>(wanted.num_rows);
        const std::size_t chunks = layers_ * 2 * static_cast<std::size_t>(wanted.num_chunks());
        const std::size_t sizes[] = {requests, requests, requests + layers_, requests, requests, rows, rows,
                                     rows,     chunks};
        std::size_t all = 0;
        for (std::size_t i = 0; i < std::size(sizes); ++i) {
            begins_[i] = all;
            all += sizes[i];
        }
        host_.assign(all, Index{-77});
        slots_.assign(rows, Slot{-77});
        on_device_ = device_array<Index>(host_);
        slots_on_device_ = device_array<Slot>(slots_);
    }
    up::step_arrays<Index, Slot> host() { return over(host_.data(), slots_.data()); }
    up::step_arrays<Index, Slot> device() { return over(on_device_.data(), slots_on_device_.data()); }

    void compare() const {
        const std::vector<Index> came = on_device_.get();
        for (std::size_t i = 0; i < host_.size(); ++i) {
            if (came[i] != host_[i]) {
                const auto part = std::upper_bound(begins_, begins_ + 9, i) - begins_ - 1;
                FAIL("array " << part << ", entry " << i - begins_[part] << ": " << came[i]
                              << " on the device, " << host_[i] << " on the host");
            }
        }
        REQUIRE(slots_on_device_.get() == slots_);
    }

  private:
    up::step_arrays<Index, Slot> over(Index* indices, Slot* slots) const {
        up::step_arrays<Index, Slot> made;
        made.num_requests = wanted_.num_requests;
        made.num_rows = wanted_.num_rows;
        made.page_tokens = wanted_.page_tokens;
        made.window = wanted_.window;
        made.num_chunks = wanted_.num_chunks();
        made.chunk_rows = wanted_.chunk_rows;
        Index** const arrays[] = {&made.cached_lens, &made.seq_lens,      &made.cu_seqlens,
                                  &made.num_pages,   &made.partial_pages, &made.row_positions,
                                  &made.write_rows,  &made.window_rows,   &made.chunks};
        for (std::size_t i = 0; i < std::size(arrays); ++i) {
            *arrays[i] = indices + begins_[i];
        }
        made.slots = slots;
        return made;
    }

    wanted_arrays wanted_;
    std::size_t layers_;
    std::size_t begins_[9];
    std::vector<Index> host_;
    std::vector<Slot> slots_;
    device_array<Index> on_device_;
    device_array<Slot> slots_on_device_;
};

class ledger_twins {
  public:
    ledger_twins(const up::ledger_limits& bounds, const std::vector<std::int32_t>& layer_sets)
        : owner_(bounds, layer_sets)
        , memory_(up::drop_ledger<backend_cuda>::state_bytes(bounds)) {
        up::cuda_device here;
        must(up::cuda_device::current(here));
        must(device.bind(bounds, layer_sets.data(), memory_.data(), memory_.size(), here, nullptr));
        check_states();
    }

    up::drop_ledger<backend_cuda> device;
    up::drop_ledger<>& host() { return owner_.ledger; }
    const up::ledger_limits& bounds() const { return device.bounds(); }

    /// The same bytes. @pre no step is open
    void check_states() {
        std::vector<std::byte> state = memory_.get(owner_.bytes());
        if (!owner_.is(state)) {
            const std::vector<std::byte> expected = owner_.snapshot();
            const auto at = std::mismatch(state.begin(), state.end(), expected.begin()).first - state.begin();
            FAIL("the states differ from byte " << at << " on");
        }
    }
    up::ledger_fault read_fault() const {
        std::uint64_t word = 0;
        uniprefill_test::check_cuda(cudaMemcpy(&word, device.fault(), sizeof word, cudaMemcpyDeviceToHost),
                                    "fault");
        return up::ledger_fault(word);
    }
    up::ledger_complaint fault() const { return read_fault().what(); }
    up::status fault_status() const { return read_fault().to_status(); }
    void forget_fault() { must(device.clear_fault(nullptr)); }
    /// The device has refused what the host did (or neither has), for the same reason; forgets it.
    void check_refusal(const up::status& host) {
        const up::status came = fault_status();
        INFO("host: " << text(host) << "; device: " << text(came));
        REQUIRE(came.code == host.code);
        REQUIRE(came.request == host.request);
        REQUIRE(came.layer == host.layer);
        REQUIRE((host.ok() || std::string(came.argument) == host.argument));
        forget_fault();
    }

    /// A copy in device memory that stays until the next step ends, or forget_uploads().
    template <class T>
    T* upload(const std::vector<T>& values) {
        auto array = std::make_shared<device_array<T>>(values);
        kept_.push_back(array);
        return array->data();
    }
    up::batch_view view_of(const rows_batch& rows, bool positions_given) {
        up::batch_view view = rows.view();
        view.space = up::memory_space::device;
        view.tags = upload(rows.tags);
        view.cu_seqlens = upload(rows.cu);
        view.positions = positions_given ? upload(rows.packed) : nullptr;
        return view;
    }

    /// Opens a step on both and compares what they tell of every layer.
    void begin(const rows_batch& batch, bool positions_given, const wanted_arrays& wanted,
               up::block_table_view view, const std::vector<std::int32_t>& table, bool wide) {
        batch_ = batch;
        wide_ = wide;
        up::batch_view on_host = batch_.view();
        on_host.positions = positions_given ? on_host.positions : nullptr;
        must(host().begin_step(on_host, batch_.ids.data(), step_));
        const up::batch_view on_device = view_of(batch_, positions_given);
        const std::int32_t* const ids = upload(batch_.ids);
        with_arrays(device.every_layer(), wanted, view, table, [&](const auto& wishes) {
            launches_only([&] { return device.begin_step(on_device, ids, twin_, wishes, nullptr); });
        });
    }
    /// Rows enter layer @p layer; compares what both tell of layers [layer, end).
    void append(std::int32_t layer, std::int32_t end, const rows_batch& rows, const wanted_arrays& wanted,
                up::block_table_view view, const std::vector<std::int32_t>& table) {
        must(host().append(step_, layer, rows.view()));
        const up::batch_view on_device = view_of(rows, true);
        with_arrays({layer, end - layer, nullptr}, wanted, view, table, [&](const auto& wishes) {
            launches_only([&] { return device.append(twin_, layer, on_device, wishes, nullptr); });
        });
    }
    void look_up_all(const wanted_arrays& wanted, up::block_table_view view,
                     const std::vector<std::int32_t>& table) {
        with_arrays(device.every_layer(), wanted, view, table, [&](const auto& wishes) {
            launches_only([&] { return device.look_up(twin_, wishes, nullptr); });
        });
    }
    void compare_logits(std::int32_t layer, const rows_batch& batch) {
        const std::size_t size = batch.packed.size() + batch.ids.size();
        std::vector<std::int32_t> rows(size, -77), offsets(batch.ids.size() + 1, -77);
        must(host().logits_rows(step_, layer, {}, rows.data(), static_cast<std::int32_t>(size),
                                offsets.data()));
        compare_logits(layer, {}, 0, rows, offsets);
        // Every third position, and some that the step doesn't have.
        std::vector<up::position_span> spans;
        std::vector<std::int32_t> firsts{0};
        for (std::size_t r = 0; r < batch.ids.size(); ++r) {
            spans.push_back({0, 1});
            for (std::int32_t i = batch.cu[r]; i < batch.cu[r + 1]; i += 3) {
                const std::int32_t position = batch.packed[static_cast<std::size_t>(i)];
                spans.push_back({position, position + 1});
            }
            firsts.push_back(static_cast<std::int32_t>(spans.size()));
        }
        const up::span_lists wanted{firsts.data(), spans.data()};
        rows.assign(size, -77);
        must(host().logits_rows(step_, layer, wanted, rows.data(), static_cast<std::int32_t>(size),
                                offsets.data()));
        compare_logits(layer, {upload(firsts), upload(spans)}, static_cast<std::int32_t>(spans.size()), rows,
                       offsets);
    }
    void end(bool commits) {
        must(commits ? host().commit_step(step_) : host().abort_step(step_));
        launches_only(
            [&] { return commits ? device.commit_step(twin_, nullptr) : device.abort_step(twin_, nullptr); });
        check_states();
        kept_.clear();
    }
    /// Uploaded arrays aren't needed any more.
    void forget_uploads() { kept_.clear(); }
    void admit(const std::vector<std::int32_t>& ids) {
        for (const std::int32_t id : ids) {
            if (id >= 0) {
                must(host().admit(id));
            }
        }
        must(device.admit(upload(ids), static_cast<std::int32_t>(ids.size()), nullptr));
    }
    /// A new request gets rows of which layers keep some, then decoded ones. @return its positions
    std::int32_t grow_at_random(std::int32_t id, std::int32_t longest_chunk,
                                property::random_numbers& random) {
        admit({id});
        std::int32_t tokens = 0;
        for (int chunk = random.between(0, 3); chunk > 0; --chunk) {
            const std::int32_t end = std::min(tokens + random.between(0, longest_chunk), bounds().max_tokens);
            const std::int32_t set = random.between(0, bounds().num_sets - 1);
            const double share = set == 0 || random.chance(0.2) ? 1 : random.unit();
            rows_batch rows, fewer;
            positions kept;
            for (std::int32_t position = tokens; position < end; ++position) {
                if (random.chance(share)) {
                    kept.push_back(position);
                }
            }
            rows.add(id, up::request_tag::chunk, range(tokens, end));
            fewer.add(id, up::request_tag::chunk, kept);
            const auto& sets = owner_.layer_sets();
            const auto first = std::find(sets.begin(), sets.end(), set);
            run_step(rows, static_cast<std::int32_t>(first - sets.begin()), fewer);
            tokens = end;
        }
        const std::int32_t end = std::min(tokens + random.between(0, 9), bounds().max_tokens);
        rows_batch decoded;
        decoded.add(id, up::request_tag::verify, range(tokens, end));
        run_step(decoded, 0, decoded);
        forget_uploads();
        return end;
    }
    /// Calls @p call while a step is open on both, which is aborted afterwards.
    template <class Call>
    void with_open_step(const rows_batch& batch, Call call) {
        const std::int32_t* const ids = upload(batch.ids);
        must(host().begin_step(batch.view(), batch.ids.data(), step_));
        must(device.begin_step(view_of(batch, true), ids, twin_, nullptr));
        call();
        must(host().abort_step(step_));
        must(device.abort_step(twin_, nullptr));
    }
    /// A whole step on both, of which some rows enter @p layer.
    void run_step(const rows_batch& batch, std::int32_t layer, const rows_batch& fewer) {
        must(host().begin_step(batch.view(), batch.ids.data(), step_));
        must(host().append(step_, layer, fewer.view()));
        must(host().commit_step(step_));
        must(device.begin_step(view_of(batch, true), upload(batch.ids), twin_, nullptr));
        must(device.append(twin_, layer, view_of(fewer, true), nullptr));
        must(device.commit_step(twin_, nullptr));
        check_states();
    }

    /// The same as the previous pipeline stage tells it.
    void run_step(const up::stage_rows& on_host, const up::stage_rows& on_device) {
        must(host().begin_step(on_host.batch, on_host.request_ids, step_));
        must(host().append(step_, 0, on_host.entering));
        must(host().commit_step(step_));
        must(device.begin_step(on_device.batch, on_device.request_ids, twin_, nullptr));
        must(device.append(twin_, 0, on_device.entering, nullptr));
        must(device.commit_step(twin_, nullptr));
        check_states();
        forget_uploads();
    }

    up::held_rows held(std::int32_t request, std::int32_t layer) { return owner_.rows(request, layer); }
    positions positions_of(std::int32_t request, std::int32_t layer) { return owner_.held(request, layer); }
    void keep_only(std::int32_t layer, const rows_batch& kept) {
        std::vector<std::int64_t> from(kept.packed.size(), -77);
        for (std::size_t r = 0; r < kept.ids.size(); ++r) {
            if (kept.ids[r] >= 0) {
                must(host().keep_only(kept.ids[r], layer, kept.packed.data() + kept.cu[r],
                                      kept.cu[r + 1] - kept.cu[r], from.data() + kept.cu[r]));
            }
        }
        const device_array<std::int64_t> from_there(from.size());
        const std::int32_t* const ids_there = upload(kept.ids);
        const up::batch_view kept_there = view_of(kept, true);
        launches_only(
            [&] { return device.keep_only(ids_there, layer, kept_there, from_there.data(), nullptr); });
        REQUIRE(from_there.get() == from);
        check_states();
    }

    void hand_back(const std::vector<std::int32_t>& ids, const up::page_rule& rule, bool shared,
                   std::vector<up::page_span> spans, const up::block_table_view& view,
                   std::vector<std::int32_t> table, std::int32_t capacity) {
        up::page_tables tables;
        tables.request_stride = view.request_stride;
        tables.layer_stride = shared ? 0 : view.layer_stride;
        tables.span_layer_stride = shared ? 0 : bounds().max_requests;
        tables.max_pages = view.max_pages;
        tables.rows = up::request_index::ledger;
        up::page_tables twin = tables;
        const device_array<std::int32_t> table_there(table);
        const device_array<up::page_span> spans_there(spans);
        twin.table = table_there.data();
        twin.in_use = spans_there.data();
        tables.table = table.data();
        tables.in_use = spans.data();
        const auto count = static_cast<std::int32_t>(ids.size());
        std::vector<std::int32_t> pages(static_cast<std::size_t>(capacity), -77);
        const device_array<std::int32_t> pages_there(pages);
        const device_array<std::int32_t> found_there(1);
        std::int32_t found = 0;
        const up::status done = host().hand_back_pages(ids.data(), count, host().every_layer(), rule, tables,
                                                       pages.data(), capacity, found);
        const std::int32_t* const ids_there = upload(ids);
        launches_only([&] {
            return device.hand_back_pages(ids_there, count, device.every_layer(), rule, twin,
                                          pages_there.data(), capacity, found_there.data(), nullptr);
        });
        REQUIRE(found_there.get()[0] == (done.ok() ? found : 0));
        REQUIRE(pages_there.get() == pages);
        REQUIRE(table_there.get() == table);
        const std::vector<up::page_span> spans_then = spans_there.get();
        for (std::size_t i = 0; i < spans.size(); ++i) {
            REQUIRE(spans_then[i].begin == spans[i].begin);
            REQUIRE(spans_then[i].end == spans[i].end);
        }
        REQUIRE(fault_status().code == done.code);
        forget_fault();
    }

    const up::ledger_step& host_step() const { return step_; }

  private:
    template <class Launch>
    void with_arrays(const up::layer_list& layers, const wanted_arrays& wanted, up::block_table_view view,
                     const std::vector<std::int32_t>& table, Launch launch) {
        if (wide_) {
            with_arrays_of<std::int64_t, std::int32_t>(layers, wanted, view, table, launch);
        } else {
            with_arrays_of<std::int32_t, std::int64_t>(layers, wanted, view, table, launch);
        }
    }
    template <class Index, class Slot, class Launch>
    void with_arrays_of(const up::layer_list& layers, const wanted_arrays& wanted, up::block_table_view view,
                        const std::vector<std::int32_t>& table, Launch launch) {
        told_arrays<Index, Slot> told(wanted, layers.count);
        view.table = table.data();
        must(host().look_up(step_, layers, view, told.host()));
        view.table = upload(table);
        launch(up::step_wishes<up::block_table_view, Index, Slot>{layers, view, told.device()});
        told.compare();
    }
    void compare_logits(std::int32_t layer, const up::span_lists& wanted, std::int32_t max_spans,
                        const std::vector<std::int32_t>& rows, const std::vector<std::int32_t>& offsets) {
        const device_array<std::int32_t> rows_there(rows.size());
        const device_array<std::int32_t> offsets_there(offsets.size());
        must(device.logits_rows(twin_, layer, wanted, max_spans, rows_there.data(),
                                static_cast<std::int32_t>(rows.size()), offsets_there.data(), nullptr));
        REQUIRE(rows_there.get() == rows);
        REQUIRE(offsets_there.get() == offsets);
    }

    owned_ledger owner_;
    device_array<std::byte> memory_;
    std::vector<std::shared_ptr<void>> kept_;
    rows_batch batch_;
    up::ledger_step step_;
    up::ledger_step twin_;
    bool wide_ = false;
};

/// A decode step in arrays of fixed size, for a graph.
class replayed_decode {
  public:
    replayed_decode(ledger_twins& twins, std::int32_t places, up::block_table_view view,
                    const std::vector<std::int32_t>& table)
        : twins_(twins)
        , view_(view)
        , table_(table)
        , table_there_(table)
        , told_({places, places, view.page_tokens, 32}, twins.bounds().num_layers)
        , tags_(static_cast<std::size_t>(places))
        , ids_(static_cast<std::size_t>(places))
        , cu_(static_cast<std::size_t>(places) + 1) {}

    void launch(cudaStream_t stream) {
        up::batch_view batch;
        batch.space = up::memory_space::device;
        batch.num_requests = batch.num_segments = batch.num_rows = static_cast<std::int32_t>(ids_.size());
        batch.tags = tags_.data();
        batch.cu_seqlens = cu_.data();
        up::block_table_view view = view_;
        view.table = table_there_.data();
        up::ledger_step step;
        must(twins_.device.begin_step(batch, ids_.data(), step,
                                      up::step_wishes<up::block_table_view, std::int32_t, std::int64_t>{
                                          twins_.device.every_layer(), view, told_.device()},
                                      stream));
        must(twins_.device.commit_step(step, stream));
    }
    void set(const rows_batch& batch) {
        tags_.set(batch.tags);
        ids_.set(batch.ids);
        cu_.set(batch.cu);
    }
    /// Lets the host do the same.
    void compare(const rows_batch& batch) {
        up::ledger_step step;
        must(twins_.host().begin_step(batch.view(), batch.ids.data(), step));
        up::block_table_view view = view_;
        view.table = table_.data();
        must(twins_.host().look_up(step, twins_.host().every_layer(), view, told_.host()));
        must(twins_.host().commit_step(step));
        told_.compare();
    }

  private:
    ledger_twins& twins_;
    up::block_table_view view_;
    std::vector<std::int32_t> table_;
    device_array<std::int32_t> table_there_;
    told_arrays<std::int32_t, std::int64_t> told_;
    device_array<up::request_tag> tags_;
    device_array<std::int32_t> ids_;
    device_array<std::int32_t> cu_;
};

} // namespace ledger_test
