// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Very many random operations on ledgers in device memory, several at once on streams of their own, against
// the host's. UNIPREFILL_TEST_OPERATIONS says how many, in place of the scale's share of 10^5.

#include "ledger/gpu_batches.cuh"
#include "ledger/ledger_shapes.hpp"
#include "ledger/random_subset.hpp"
#include "property/random.hpp"

#include <uniprefill/ledger/stage_rows.hpp>

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>

using namespace ledger_test;
using uniprefill_test::has_device;
using up::request_tag;
using up::set_relation;
using up::status_code;

namespace {

using numbers = std::vector<std::int32_t>;
using bytes = std::vector<std::byte>;
using wishes = up::step_wishes<up::block_table_view, std::int32_t, std::int64_t>;

constexpr std::int32_t max_requests = 5;
constexpr std::int32_t max_tokens = 1200; // beyond two cumulative counts
constexpr std::int32_t max_open_steps = 2;
constexpr std::int32_t max_saved = 8;
constexpr std::int32_t page = 16;
constexpr std::int32_t table_pages = max_tokens / page;
constexpr std::size_t room = 6 << 20; // of a batch; an operation takes less than a third

std::size_t at(std::int32_t index) {
    return static_cast<std::size_t>(index);
}
std::int32_t size_of(const numbers& values) {
    return static_cast<std::int32_t>(values.size());
}

/// A step that both have open.
struct running_step {
    rows_batch batch;
    up::ledger_step host;
    up::ledger_step device;
    up::stage_rows came; // what the device read of it, if it came from a stage before
    std::int32_t next_set = 1;
};

/// A request that a ledger has saved.
struct saved_state {
    bytes content;
    const std::byte* there; // null: only on the host
};

/// A ledger on the host, its twin on a stream, and random operations on both.
class random_pair {
  public:
    random_pair(const ledger_shape& shape, std::uint64_t seed)
        : shape_(shape)
        , random_(seed)
        , owner_(shape.bounds(max_requests, max_tokens), shape.layer_sets)
        , memory_(up::drop_ledger<backend_cuda>::state_bytes(bounds()))
        , batch_(room) {
        up::cuda_device here;
        must(up::cuda_device::current(here));
        must(device_.bind(bounds(), shape.layer_sets.data(), memory_.data(), memory_.size(), here,
                          batch_.stream()));
        table_.resize(at(bounds().num_layers * max_requests * table_pages));
        for (std::int32_t& entry : table_) {
            entry = below(1 << 20);
        }
        table_there_ = device_array<std::int32_t>(table_);
        text_.resize(at(max_requests * max_tokens));
        for (std::int32_t& token : text_) {
            token = below(100'000);
        }
        text_there_ = device_array<std::int32_t>(text_);
        check_cuda(cudaDeviceSynchronize(), "synchronize");
    }

    /// Does more operations, first on the host. The device is still at them when this returns.
    void start(std::int64_t operations) {
        for (const std::int64_t end = now_ + operations; now_ < end && !batch_.is_full(); ++now_) {
            operate();
        }
        name("end of a batch");
        while (!running_.empty()) { // what is open isn't laid out alike
            close(0);
        }
        expect_no_fault();
        const told_twice<std::byte> state = batch_.output<std::byte>(owner_.bytes());
        std::memcpy(state.host, owner_.memory(), owner_.bytes());
        batch_.copy(state.device, device_.state(), owner_.bytes());
        batch_.launch();
        for (saved_state& saved : saved_) {
            saved.there = nullptr; // its memory is the next batch's
        }
    }
    void finish() { batch_.compare(); }

    const char* shape_name() const { return shape_.name; }
    std::int64_t operations() const { return now_; }
    std::map<std::string, std::int64_t> done;

  private:
    const up::ledger_limits& bounds() const { return owner_.ledger.bounds(); }
    up::drop_ledger<>& host() { return owner_.ledger; }

    std::int32_t below(std::int32_t n) { return random_.between(0, n - 1); }
    bool one_in(std::int32_t n) { return below(n) == 0; }

    void name(const char* what) {
        batch_.begin_operation(now_, what);
        ++done[what];
    }
    /// A call of the device that leaves no fault.
    void call(std::function<up::status(cudaStream_t)> what) { batch_.call(std::move(what)); }
    void expect_no_fault() { batch_.expect_fault(device_, up::success()); }
    /// A call that the host has refused. Nothing has been wrong before.
    void refused(const up::status& by_host, std::function<up::status(cudaStream_t)> what) {
        if (by_host.ok()) {
            throw std::logic_error("an injected error wasn't one");
        }
        expect_no_fault();
        call(std::move(what));
        batch_.expect_fault(device_, by_host);
        call([this](cudaStream_t stream) { return device_.clear_fault(stream); });
        ++done["refused"];
    }

    // What there is ---------------------------------------------------------------------------------------

    bool admitted(std::int32_t id) {
        up::held_rows rows;
        return host().rows_of(id, 0, rows).ok();
    }
    bool in_open_step(std::int32_t id) const {
        return std::any_of(running_.begin(), running_.end(), [id](const auto& running) {
            const numbers& ids = running->batch.ids;
            return std::find(ids.begin(), ids.end(), id) != ids.end();
        });
    }
    bool closed(std::int32_t id) { return admitted(id) && !in_open_step(id); }
    std::int32_t tokens(std::int32_t id) { return owner_.rows(id, 0).num_tokens(); }
    /// Some requests in any order, and empty places.
    template <class Wanted>
    numbers some(Wanted wanted) {
        numbers ids;
        const std::int32_t first = below(max_requests);
        for (std::int32_t i = 0; i < max_requests; ++i) {
            const std::int32_t id = (first + 2 * i) % max_requests;
            if (wanted(id) && one_in(2)) {
                ids.push_back(id);
            } else if (one_in(6)) {
                ids.push_back(-1);
            }
        }
        return ids;
    }
    std::int32_t free_slot() {
        const std::int32_t first = below(max_requests);
        for (std::int32_t i = 0; i < max_requests; ++i) {
            if (!admitted((first + i) % max_requests)) {
                return (first + i) % max_requests;
            }
        }
        return -1;
    }
    std::int32_t first_layer(std::int32_t set) const {
        const auto found = std::find(shape_.layer_sets.begin(), shape_.layer_sets.end(), set);
        return static_cast<std::int32_t>(found - shape_.layer_sets.begin());
    }
    positions subset(const positions& of) {
        return random_subset(of, 64, 200, [this](std::int32_t n) { return below(n); });
    }
    up::batch_view view_of(const rows_batch& rows) {
        up::batch_view view = rows.view();
        view.space = up::memory_space::device;
        view.tags = batch_.input(rows.tags);
        view.cu_seqlens = batch_.input(rows.cu);
        view.positions = batch_.input(rows.packed);
        return view;
    }
    up::block_table_view table(const std::int32_t* entries) const {
        up::block_table_view view;
        view.table = entries;
        view.request_stride = table_pages;
        view.layer_stride = max_requests * table_pages;
        view.max_pages = table_pages;
        view.page_tokens = page;
        view.rows = up::request_index::ledger;
        return view;
    }

    // Operations ------------------------------------------------------------------------------------------

    void operate() {
        const std::int32_t choice = below(100);
        if (choice < 5) {
            admit();
        } else if (choice < 7) {
            release();
        } else if (choice < 12) {
            roll_back();
        } else if (choice < 14) {
            fork();
        } else if (choice < 17) {
            keep_only();
        } else if (choice < 19) {
            hand_back();
        } else if (choice < 22) {
            save();
        } else if (choice < 25) {
            resume();
        } else if (choice < 27) {
            sign();
        } else if (choice < 38) {
            inject_error();
        } else if ((choice < 58 && running_.size() < max_open_steps) || running_.empty()) {
            begin();
        } else {
            const std::size_t which = at(below(static_cast<std::int32_t>(running_.size())));
            if (one_in(4)) {
                look_up(*running_[which]);
            } else if (running_[which]->next_set < bounds().num_sets && !one_in(6)) {
                append(running_[which]);
            } else {
                close(which);
            }
        }
    }

    void admit() {
        name("admit");
        const numbers ids = some([this](std::int32_t id) { return !admitted(id); });
        admit(ids);
    }
    void admit(const numbers& ids) {
        for (const std::int32_t id : ids) {
            if (id >= 0) {
                must(host().admit(id));
            }
        }
        const std::int32_t* const there = batch_.input(ids);
        call([this, there, n = size_of(ids)](cudaStream_t s) { return device_.admit(there, n, s); });
    }
    void release() {
        name("release");
        numbers ids = some([this](std::int32_t id) { return closed(id); });
        ids.resize(std::min<std::size_t>(ids.size(), 2));
        release(ids);
    }
    void release(const numbers& ids) {
        for (const std::int32_t id : ids) {
            if (id >= 0) {
                must(host().release(id));
            }
        }
        const std::int32_t* const there = batch_.input(ids);
        call([this, there, n = size_of(ids)](cudaStream_t s) { return device_.release(there, n, s); });
    }

    void roll_back() {
        name("rollback");
        const numbers ids = some([this](std::int32_t id) { return closed(id); });
        numbers left;
        for (const std::int32_t id : ids) {
            const std::int32_t held = id < 0 ? 0 : tokens(id);
            left.push_back(one_in(3) ? below(held + 1) : std::max(0, held - below(6)));
        }
        must(host().rollback(ids.data(), left.data(), size_of(ids)));
        const std::int32_t* const there = batch_.input(ids);
        const std::int32_t* const left_there = batch_.input(left);
        call([this, there, left_there, n = size_of(ids)](cudaStream_t s) {
            return device_.rollback(there, left_there, n, s);
        });
    }

    void fork() {
        const std::int32_t copy = free_slot();
        const numbers ids = some([this](std::int32_t id) { return closed(id); });
        if (copy < 0 || ids.empty()) {
            return;
        }
        name("fork");
        if (ids[0] >= 0) {
            must(host().fork(ids[0], copy));
        }
        const std::int32_t* const from = batch_.input(numbers{ids[0]});
        const std::int32_t* const to = batch_.input(numbers{copy});
        call([this, from, to](cudaStream_t s) { return device_.fork(from, to, 1, s); });
    }

    void keep_only() {
        if (bounds().num_sets == 1) {
            return;
        }
        name("keep only");
        const std::int32_t set = 1 + below(bounds().num_sets - 1);
        const std::int32_t layer = first_layer(set);
        const bool nested = shape_.relation == set_relation::nested && set + 1 < bounds().num_sets;
        const std::int32_t behind = below(max_tokens); // all that lies there stays
        rows_batch kept;
        for (const std::int32_t id : some([this](std::int32_t other) { return closed(other); })) {
            positions stay;
            if (id >= 0) {
                const positions held = owner_.held(id, layer);
                const up::held_rows next = owner_.rows(id, nested ? first_layer(set + 1) : layer);
                const positions wanted = subset(held);
                for (const std::int32_t position : held) {
                    if (position >= behind || (nested && next.row_of(position) >= 0) ||
                        std::binary_search(wanted.begin(), wanted.end(), position)) {
                        stay.push_back(position);
                    }
                }
            }
            kept.add(id, request_tag::chunk, stay);
        }
        const told_twice<std::int64_t> from = batch_.output<std::int64_t>(kept.packed.size());
        for (std::size_t r = 0; r < kept.ids.size(); ++r) {
            if (kept.ids[r] >= 0) {
                must(host().keep_only(kept.ids[r], layer, kept.packed.data() + kept.cu[r],
                                      kept.cu[r + 1] - kept.cu[r], from.host + kept.cu[r]));
            }
        }
        const std::int32_t* const ids = batch_.input(kept.ids);
        call([this, ids, layer, view = view_of(kept), from](cudaStream_t s) {
            return device_.keep_only(ids, layer, view, from.device, s);
        });
    }

    void hand_back() {
        name("hand back");
        const numbers ids = some([this](std::int32_t id) { return admitted(id); });
        const up::page_rule rule{page, one_in(2) ? 0 : 1 + below(80), below(4)};
        const bool shared = one_in(3);
        const std::size_t layers = shared ? 1 : at(bounds().num_layers);
        std::vector<up::page_span> spans;
        for (std::size_t i = 0; i < layers * max_requests; ++i) {
            const std::int32_t begin = below(5);
            spans.push_back({begin, begin + below(table_pages - begin + 1)});
        }
        const told_twice<std::int32_t> entries = batch_.changed(
            numbers(table_.begin(),
                    table_.begin() + static_cast<std::ptrdiff_t>(layers * max_requests * table_pages)));
        const told_twice<up::page_span> in_use = batch_.changed(spans);
        const auto tables = [&](std::int32_t* table, up::page_span* used) {
            up::page_tables made;
            made.table = table;
            made.in_use = used;
            made.request_stride = table_pages;
            made.layer_stride = shared ? 0 : max_requests * table_pages;
            made.span_layer_stride = shared ? 0 : max_requests;
            made.max_pages = table_pages;
            made.rows = up::request_index::ledger;
            return made;
        };
        const std::int32_t capacity = one_in(10) ? below(6) : static_cast<std::int32_t>(table_.size());
        const told_twice<std::int32_t> pages = batch_.output<std::int32_t>(at(capacity));
        const told_twice<std::int32_t> found = batch_.output<std::int32_t>(1);
        *found.host = 0;
        const up::status done_by_host =
            host().hand_back_pages(ids.data(), size_of(ids), host().every_layer(), rule,
                                   tables(entries.host, in_use.host), pages.host, capacity, *found.host);
        const std::int32_t* const there = batch_.input(ids);
        const auto by_device = [=, n = size_of(ids),
                                on = tables(entries.device, in_use.device)](cudaStream_t s) {
            return device_.hand_back_pages(there, n, device_.every_layer(), rule, on, pages.device, capacity,
                                           found.device, s);
        };
        if (done_by_host.ok()) {
            call(by_device);
        } else {
            refused(done_by_host, by_device);
        }
    }

    // Saved requests --------------------------------------------------------------------------------------

    /// Requests are swapped out, or their beginnings kept in a cache.
    void save() {
        name("save");
        const numbers ids = some([this](std::int32_t id) { return closed(id); });
        const bool prefixes = one_in(2);
        numbers left;
        const std::size_t stride = (up::drop_ledger<>::max_saved_bytes(bounds()) + 7) / 8 * 8;
        const told_twice<std::byte> buffers = batch_.output<std::byte>(ids.size() * stride);
        const told_twice<std::uint64_t> sizes = batch_.output<std::uint64_t>(ids.size());
        numbers leaving;
        for (std::size_t r = 0; r < ids.size(); ++r) {
            sizes.host[r] = 0;
            left.push_back(ids[r] < 0 ? 3 : prefixes ? below(tokens(ids[r]) + 1) : tokens(ids[r]));
            if (ids[r] < 0) {
                continue;
            }
            std::size_t size = 0;
            must(host().saved_prefix_bytes(ids[r], left[r], size));
            must(host().save_prefix(ids[r], left[r], buffers.host + r * stride, size));
            sizes.host[r] = size;
            saved_.push_back({bytes(buffers.host + r * stride, buffers.host + r * stride + size),
                              buffers.device + r * stride});
            if (!prefixes && one_in(2)) {
                leaving.push_back(ids[r]);
            }
        }
        const std::int32_t* const there = batch_.input(ids);
        const std::int32_t* const left_there =
            prefixes || one_in(2) ? batch_.input(left) : static_cast<std::int32_t*>(nullptr);
        call([=, n = size_of(ids)](cudaStream_t s) {
            return device_.save(there, left_there, n, buffers.device, stride, sizes.device, s);
        });
        if (!leaving.empty()) {
            release(leaving);
            ++done["preempted"];
        }
        while (saved_.size() > max_saved) {
            saved_.erase(saved_.begin() + below(static_cast<std::int32_t>(saved_.size())));
        }
    }

    /// A saved one comes back to any free slot.
    void resume() {
        const std::int32_t slot = free_slot();
        if (slot < 0 || saved_.empty()) {
            return;
        }
        name("resume");
        const std::size_t which = at(below(static_cast<std::int32_t>(saved_.size())));
        const saved_state saved = saved_[which];
        admit({slot});
        must(host().restore(slot, saved.content.data(), saved.content.size()));
        restore(slot, saved.content, one_in(2) ? saved.there : nullptr);
        if (one_in(2)) {
            saved_.erase(saved_.begin() + static_cast<std::ptrdiff_t>(which));
        }
    }
    /// On the device. @param there a buffer of the device's own, null: the host's
    void restore(std::int32_t slot, const bytes& content, const std::byte* there) {
        call(restoring(slot, content, there));
    }
    std::function<up::status(cudaStream_t)> restoring(std::int32_t slot, const bytes& content,
                                                      const std::byte* there) {
        const std::int32_t* const ids = batch_.input(numbers{slot});
        const std::uint64_t* const sizes =
            one_in(2) ? batch_.input(std::vector<std::uint64_t>{content.size()}) : nullptr;
        const std::byte* const from = there != nullptr ? there : batch_.input(content);
        return [this, ids, from, sizes, stride = (content.size() + 7) / 8 * 8](cudaStream_t s) {
            return device_.restore(ids, 1, from, stride, sizes, s);
        };
    }

    void sign() {
        name("sign");
        numbers ids = some([this](std::int32_t id) { return admitted(id); });
        ids.resize(std::min<std::size_t>(ids.size(), 2));
        const std::int32_t layers = std::min(2, bounds().num_layers);
        const std::int32_t first = below(bounds().num_layers - layers + 1);
        const std::int32_t page_tokens = 1 + below(40);
        const std::int32_t capacity = max_tokens / page_tokens + 1;
        const std::size_t chains = ids.size() * at(layers);
        const told_twice<up::page_signature> made = batch_.output<up::page_signature>(chains * at(capacity));
        const told_twice<std::int32_t> pages = batch_.output<std::int32_t>(chains);
        const up::page_signer signer{{random_.next(), 5}, random_.next()};
        for (std::size_t chain = 0; chain < chains; ++chain) {
            const std::int32_t id = ids[chain % ids.size()];
            pages.host[chain] = 0;
            if (id >= 0) {
                must(host().sign_pages(id, first + static_cast<std::int32_t>(chain / ids.size()), signer,
                                       text_.data() + id * max_tokens, page_tokens,
                                       made.host + chain * at(capacity), capacity, pages.host[chain]));
            }
        }
        const std::int32_t* const there = batch_.input(ids);
        const up::request_texts<std::int32_t> texts{text_there_.data(), max_tokens,
                                                    up::request_index::ledger};
        call([=, n = size_of(ids)](cudaStream_t s) {
            return device_.sign_pages(there, n, up::layer_list{first, layers, nullptr}, signer, texts,
                                      page_tokens, made.device, capacity, pages.device, s);
        });
    }

    // Steps -----------------------------------------------------------------------------------------------

    /// What both tell of layers of an open step.
    wishes tell(const running_step& running, const up::layer_list& layers) {
        up::step_arrays<std::int32_t, std::int64_t> on_host, on_device;
        on_host.num_requests = size_of(running.batch.ids) + below(3);
        on_host.num_rows = size_of(running.batch.packed) + below(9);
        on_host.window = one_in(2) ? 0 : 1 + below(100);
        on_host.page_tokens = one_in(2) ? page : 1 + below(40);
        on_host.chunk_rows = one_in(2) ? 64 : 1 + below(40);
        on_host.num_chunks = on_host.num_requests + on_host.num_rows / on_host.chunk_rows;
        on_device = on_host;
        const auto add = [&](std::int32_t* up::step_arrays<std::int32_t, std::int64_t>::*array,
                             std::int32_t entries) {
            if (!one_in(5)) {
                const auto made = batch_.output<std::int32_t>(at(layers.count) * at(entries));
                on_host.*array = made.host;
                on_device.*array = made.device;
            }
        };
        using arrays = up::step_arrays<std::int32_t, std::int64_t>;
        add(&arrays::cached_lens, on_host.num_requests);
        add(&arrays::seq_lens, on_host.num_requests);
        add(&arrays::cu_seqlens, on_host.num_requests + 1);
        add(&arrays::num_pages, on_host.num_requests);
        add(&arrays::partial_pages, on_host.num_requests);
        add(&arrays::row_positions, on_host.num_rows);
        add(&arrays::write_rows, on_host.num_rows);
        add(&arrays::window_rows, on_host.num_rows);
        add(&arrays::chunks, 2 * on_host.num_chunks);
        const auto slots = batch_.output<std::int64_t>(at(layers.count) * at(on_host.num_rows));
        on_host.slots = slots.host;
        on_device.slots = slots.device;
        must(host().look_up(running.host, layers, table(table_.data()), on_host));
        return {layers, table(table_there_.data()), on_device};
    }

    void begin() {
        name("begin");
        const auto running = std::make_shared<running_step>();
        rows_batch& batch = running->batch;
        for (const std::int32_t id : some([this](std::int32_t other) { return closed(other); })) {
            if (id < 0) {
                batch.add(-1, request_tag::decode, {});
                continue;
            }
            const std::int32_t held = tokens(id);
            auto tag = static_cast<request_tag>(below(4));
            if (tag == request_tag::prefill && held > 0) {
                tag = request_tag::chunk;
            }
            std::int32_t rows = 1;
            if (tag == request_tag::verify) {
                rows = below(9);
            } else if (tag != request_tag::decode) {
                rows = one_in(4) ? below(3) : one_in(40) ? below(max_tokens + 1) : below(120);
            }
            rows = std::min(rows, max_tokens - held);
            batch.add(id, tag, range(held, held + rows));
        }
        must(host().begin_step(batch.view(), batch.ids.data(), running->host));
        up::batch_view view = view_of(batch);
        const std::int32_t* const ids = batch_.input(batch.ids);
        if (one_in(6)) {
            begin_from_stage(running, view, ids);
        } else {
            view.positions = one_in(4) ? nullptr : view.positions;
            call([this, running, view, ids, wanted = tell(*running, host().every_layer())](cudaStream_t s) {
                return device_.begin_step(view, ids, running->device, wanted, s);
            });
        }
        running_.push_back(running);
    }
    /// As if this were a stage of its own, and all rows came from the one before.
    void begin_from_stage(const std::shared_ptr<running_step>& running, const up::batch_view& view,
                          const std::int32_t* ids) {
        const std::int64_t size = up::stage_rows_words(view.num_requests, view.num_rows);
        const told_twice<std::int32_t> words = batch_.output<std::int32_t>(static_cast<std::size_t>(size));
        const up::batch_view on_host = running->batch.view();
        must(up::write_stage_rows(on_host, running->batch.ids.data(), on_host, words.host, size));
        call(
            [=](cudaStream_t s) { return device_.write_stage_rows(view, ids, view, words.device, size, s); });
        call([=](cudaStream_t s) {
            return device_.read_stage_rows(words.device, size, view.num_requests, view.num_rows,
                                           running->came, s);
        });
        call([this, running, wanted = tell(*running, host().every_layer())](cudaStream_t s) {
            return device_.begin_step(running->came.batch, running->came.request_ids, running->device, wanted,
                                      s);
        });
        ++done["from a stage"];
    }

    /// Rows of a request that enter a layer as it is now.
    positions entering_now(const running_step& running, std::size_t r, std::int32_t layer) {
        const std::int32_t begin = running.batch.cu[r];
        if (running.batch.ids[r] < 0 || begin == running.batch.cu[r + 1]) {
            return {};
        }
        const positions held = owner_.held(running.batch.ids[r], layer);
        return {std::lower_bound(held.begin(), held.end(), running.batch.packed[at(begin)]), held.end()};
    }

    void append(const std::shared_ptr<running_step>& running) {
        const std::int32_t set = running->next_set++;
        if (one_in(4)) {
            return; // the set has what came before
        }
        name("append");
        const std::int32_t layer = first_layer(set);
        const rows_batch& batch = running->batch;
        std::vector<positions> rows;
        std::int32_t spoiled = -1;
        for (std::size_t r = 0; r < batch.ids.size(); ++r) {
            const positions now = entering_now(*running, r, layer);
            const bool any = shape_.relation == set_relation::independent;
            const bool droppable =
                batch.tags[r] == request_tag::prefill || batch.tags[r] == request_tag::chunk;
            rows.push_back(!droppable ? now
                           : any      ? subset(positions(batch.packed.begin() + batch.cu[r],
                                                         batch.packed.begin() + batch.cu[r + 1]))
                                      : subset(now));
            if (rows[r].size() > 1 && spoiled < 0 && one_in(8)) {
                spoiled = static_cast<std::int32_t>(r);
            }
        }
        const auto packed = [&] {
            rows_batch made;
            for (std::size_t r = 0; r < rows.size(); ++r) {
                made.add(batch.ids[r], batch.tags[r], rows[r]);
            }
            return made;
        };
        if (spoiled >= 0) {
            // The host refuses it as a whole, the device for the request, which keeps what it has.
            std::swap(rows[at(spoiled)].front(), rows[at(spoiled)].back());
            const rows_batch bad = packed();
            const up::status by_host = host().append(running->host, layer, bad.view());
            refused(by_host, [this, running, layer, view = view_of(bad)](cudaStream_t s) {
                return device_.append(running->device, layer, view, s);
            });
            rows[at(spoiled)] = entering_now(*running, at(spoiled), layer);
            must(host().append(running->host, layer, packed().view()));
            return;
        }
        const rows_batch entering = packed();
        must(host().append(running->host, layer, entering.view()));
        std::int32_t end = layer + 1; // layers of the set that follow at once
        while (end < bounds().num_layers && shape_.layer_sets[at(end)] == set) {
            ++end;
        }
        call([=, view = view_of(entering), wanted = tell(*running, {layer, end - layer, nullptr})](
                 cudaStream_t s) { return device_.append(running->device, layer, view, wanted, s); });
    }

    void look_up(const running_step& running) {
        name("look up");
        const up::ledger_step* const step = &running.device;
        call([this, step, wanted = tell(running, host().every_layer())](cudaStream_t s) {
            return device_.look_up(*step, wanted, s);
        });
        const std::int32_t layer = below(bounds().num_layers);
        const std::size_t most = running.batch.packed.size() + running.batch.ids.size();
        const auto rows = batch_.output<std::int32_t>(most);
        const auto offsets = batch_.output<std::int32_t>(running.batch.ids.size() + 1);
        must(host().logits_rows(running.host, layer, {}, rows.host, static_cast<std::int32_t>(most),
                                offsets.host));
        call([=](cudaStream_t s) {
            return device_.logits_rows(*step, layer, {}, 0, rows.device, static_cast<std::int32_t>(most),
                                       offsets.device, s);
        });
    }

    void close(std::size_t which) {
        const std::shared_ptr<running_step> running = running_[which];
        running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(which));
        if (one_in(3)) {
            name("abort");
            must(host().abort_step(running->host));
            call([=](cudaStream_t s) { return device_.abort_step(running->device, s); });
        } else {
            name("commit");
            must(host().commit_step(running->host));
            call([=](cudaStream_t s) { return device_.commit_step(running->device, s); });
        }
    }

    // Errors: refused by both for the same reason, and nothing changed ------------------------------------

    void refuse_begin(std::int32_t id, request_tag tag, const positions& rows) {
        rows_batch batch;
        const std::int32_t place = below(max_requests - 1);
        for (std::int32_t other = 0; other < max_requests - 1; ++other) { // good ones before and after
            if (other == place) {
                batch.add(id, tag, rows);
            }
            if (other != id && closed(other) && tokens(other) < max_tokens) {
                batch.add(other, request_tag::verify, {tokens(other)});
            }
        }
        refuse_batch(batch);
    }
    void refuse_batch(const rows_batch& batch) {
        up::ledger_step step;
        const up::status by_host = host().begin_step(batch.view(), batch.ids.data(), step);
        const std::int32_t* const ids = batch_.input(batch.ids);
        refused(by_host, [this, ids, view = view_of(batch)](cudaStream_t s) {
            up::ledger_step twin;
            return device_.begin_step(view, ids, twin, s);
        });
    }
    void refuse_rollback(std::int32_t id, std::int32_t left) {
        const std::int32_t* const ids = batch_.input(numbers{id});
        const std::int32_t* const left_there = batch_.input(numbers{left});
        refused(host().rollback(id, left),
                [=](cudaStream_t s) { return device_.rollback(ids, left_there, 1, s); });
    }
    void refuse_save(std::int32_t id, std::size_t room_for) {
        const std::int32_t* const ids = batch_.input(numbers{id});
        const told_twice<std::byte> buffer = batch_.output<std::byte>(room_for);
        refused(host().save(id, buffer.host, room_for), [=](cudaStream_t s) {
            return device_.save(ids, nullptr, 1, buffer.device, room_for, nullptr, s);
        });
    }
    void refuse_restore(std::int32_t id, const bytes& content) {
        refused(host().restore(id, content.data(), content.size()), restoring(id, content, nullptr));
    }

    void inject_error() {
        name("inject errors");
        const std::int32_t id = below(max_requests);
        const std::int32_t* const ids = batch_.input(numbers{id});
        if (!admitted(id)) {
            refuse_begin(id, request_tag::decode, {0});
            refuse_rollback(id, 0);
            refuse_save(id, 48);
            refused(host().release(id), [=](cudaStream_t s) { return device_.release(ids, 1, s); });
            if (!saved_.empty()) {
                refuse_restore(id, saved_.front().content);
            }
            return;
        }
        refused(host().admit(id), [=](cudaStream_t s) { return device_.admit(ids, 1, s); });
        refused_signature(id);
        const std::int32_t held = tokens(id);
        if (in_open_step(id)) {
            refuse_begin(id, request_tag::decode, {held});
            refuse_rollback(id, 0);
            refuse_save(id, 4096);
            refused(host().release(id), [=](cudaStream_t s) { return device_.release(ids, 1, s); });
            if (!saved_.empty()) {
                refuse_restore(id, saved_.front().content);
            }
            return;
        }
        switch (below(8)) {
        case 0:
            if (held + 1 < max_tokens) {
                refuse_begin(id, request_tag::chunk,
                             range(held + 1, held + 2 + below(max_tokens - held - 1)));
            }
            break;
        case 1:
            if (held > 0 && held < max_tokens) {
                refuse_begin(id, request_tag::chunk, {held - 1});
                refuse_begin(id, request_tag::prefill, {held});
            }
            break;
        case 2:
            if (held < max_tokens) {
                rows_batch twice;
                twice.add(id, request_tag::decode, {held});
                twice.add(id, request_tag::decode, {held});
                refuse_batch(twice);
            }
            break;
        case 3:
            refuse_begin(id, request_tag::chunk, range(held, max_tokens + 1));
            break;
        case 4:
            refuse_rollback(id, held + 1);
            refuse_save(id, 40);
            break;
        case 5: {
            const std::int32_t taken = below(max_requests + 1); // perhaps itself, or a slot too many
            if (taken == max_requests || admitted(taken)) {
                const std::int32_t* const to = batch_.input(numbers{taken});
                refused(host().fork(id, taken), [=](cudaStream_t s) { return device_.fork(ids, to, 1, s); });
            }
            break;
        }
        case 6:
            refuse_kept(id);
            break;
        default:
            refuse_saved(id, held);
        }
    }
    void refused_signature(std::int32_t id) {
        const std::int32_t layer = below(bounds().num_layers);
        if (owner_.rows(id, layer).length() == 0) {
            return;
        }
        std::int32_t none = 0;
        up::page_signature nothing;
        const std::int32_t* const ids = batch_.input(numbers{id});
        const told_twice<std::int32_t> pages = batch_.output<std::int32_t>(1);
        *pages.host = 0;
        refused(host().sign_pages(id, layer, {}, text_.data(), page, &nothing, 0, none), [=](cudaStream_t s) {
            return device_.sign_pages(ids, 1, up::layer_list{layer, 1, nullptr}, {},
                                      up::request_texts<std::int32_t>{text_there_.data(), max_tokens}, page,
                                      static_cast<up::page_signature*>(nullptr), 0, pages.device, s);
        });
    }
    void refuse_kept(std::int32_t id) {
        const std::int32_t layer = below(bounds().num_layers);
        rows_batch kept;
        kept.add(id, request_tag::chunk, {tokens(id)}); // beyond the last, or of set 0
        const std::int32_t* const ids = batch_.input(numbers{id});
        refused(host().keep_only<std::int32_t>(id, layer, kept.packed.data(), 1, nullptr),
                [this, ids, layer, view = view_of(kept)](cudaStream_t s) {
                    return device_.keep_only<std::int32_t>(ids, layer, view, nullptr, s);
                });
    }
    /// To a request that has positions, or a damaged buffer to one that has none.
    void refuse_saved(std::int32_t id, std::int32_t held) {
        if (saved_.empty()) {
            return;
        }
        bytes content = saved_[at(below(static_cast<std::int32_t>(saved_.size())))].content;
        if (held == 0) {
            const std::int32_t bit = below(8 * static_cast<std::int32_t>(content.size()));
            content[at(bit / 8)] ^= std::byte{1} << (bit % 8);
        }
        refuse_restore(id, content);
    }

    const ledger_shape& shape_;
    property::random_numbers random_;
    owned_ledger owner_;
    device_array<std::byte> memory_;
    up::drop_ledger<backend_cuda> device_;
    recorded_batch batch_;
    numbers table_;
    device_array<std::int32_t> table_there_;
    numbers text_;
    device_array<std::int32_t> text_there_;
    std::vector<std::shared_ptr<running_step>> running_;
    std::vector<saved_state> saved_;
    std::int64_t now_ = 0;
};

std::int64_t wanted_operations() {
    const char* const given = std::getenv("UNIPREFILL_TEST_OPERATIONS");
    return given != nullptr ? std::strtoll(given, nullptr, 10) : property::scaled(100'000, 500);
}

} // namespace

TEST_CASE("10^5 random operations on a device and on the host") {
    if (!has_device()) {
        return;
    }
    const std::uint64_t seed = property::base_seed();
    const std::int64_t operations = wanted_operations();
    std::cout << "seed " << seed << ", " << operations << " operations\n";
    std::vector<std::unique_ptr<random_pair>> pairs;
    for (std::size_t i = 0; i < std::size(ledger_shapes); ++i) {
        pairs.push_back(std::make_unique<random_pair>(ledger_shapes[i], seed + i));
    }
    const auto begin = std::chrono::steady_clock::now();
    // While the host is at one ledger, the device is at the others.
    constexpr std::int64_t together = 200;
    const auto share =
        (operations + static_cast<std::int64_t>(pairs.size()) - 1) / static_cast<std::int64_t>(pairs.size());
    std::vector<bool> in_flight(pairs.size());
    for (bool more = true; more;) {
        more = false;
        for (std::size_t i = 0; i < pairs.size(); ++i) {
            INFO(pairs[i]->shape_name() << ", seed " << seed + i);
            if (in_flight[i]) {
                pairs[i]->finish();
            }
            const std::int64_t left = share - pairs[i]->operations();
            in_flight[i] = left > 0;
            if (left > 0) {
                pairs[i]->start(std::min(left, together));
                more = true;
            }
        }
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    std::map<std::string, std::int64_t> done;
    for (const auto& pair : pairs) {
        for (const auto& [what, times] : pair->done) {
            done[what] += times;
        }
    }
    std::cout << "in " << took.count() << " s\n";
    for (const auto& [what, times] : done) {
        std::cout << what << ": " << times << "\n";
        CHECK(times >= operations / 1000); // of each kind enough to say something
    }
    CHECK((done.size() == 19 || operations < 10'000));
}
