// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What a step costs in the host ledger: from begin to commit, with everything that an engine's kernels read
// of all layers. 32 layers of which 6 select, prompts of up to 128K positions of which later layers hold less
// and less, pages of 16 rows. Memory is the ledger's own, one request's part of it.

#include <uniprefill/ledger/drop_ledger.hpp>

#include <benchmark/benchmark.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include <sys/mman.h>

namespace up = uniprefill;

namespace {

constexpr std::int32_t num_layers = 32;
constexpr std::int32_t max_tokens = 131072;
constexpr std::int32_t page = 16;
constexpr std::int32_t max_pages = max_tokens / page;

/// Seconds of this thread's processor time, which neighbours on a busy machine don't lengthen.
double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

void must(const up::status& what) {
    if (!what.ok()) {
        char text[320];
        up::format(what, text, sizeof text);
        std::fprintf(stderr, "%s\n", text);
        std::exit(1);
    }
}

struct freed {
    void operator()(void* memory) const { std::free(memory); }
};

struct batch {
    std::vector<std::int32_t> ids;
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu{0};
    std::vector<std::int32_t> rows;

    void add(std::int32_t id, up::request_tag tag, const std::vector<std::int32_t>& positions) {
        ids.push_back(id);
        tags.push_back(tag);
        rows.insert(rows.end(), positions.begin(), positions.end());
        cu.push_back(static_cast<std::int32_t>(rows.size()));
    }
    up::batch_view view() const {
        up::batch_view made;
        made.num_requests = made.num_segments = static_cast<std::int32_t>(ids.size());
        made.num_rows = static_cast<std::int32_t>(rows.size());
        made.tags = tags.data();
        made.cu_seqlens = cu.data();
        made.positions = rows.data();
        return made;
    }
};

enum class memory_pages {
    small, ///< of 4 KiB, where the system has such
    huge,  ///< of 2 MiB, where it has them to give
};

/// Block tables with an entry in every place.
class tables {
  public:
    tables(std::size_t entries, memory_pages kind) {
        constexpr std::size_t huge = std::size_t{1} << 21;
        const std::size_t bytes = (entries * sizeof(std::int32_t) + huge - 1) / huge * huge;
        entries_.reset(static_cast<std::int32_t*>(std::aligned_alloc(huge, bytes)));
        madvise(entries_.get(), bytes, kind == memory_pages::huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
        std::uint32_t entry = 1;
        for (std::size_t i = 0; i < entries; ++i) {
            entries_[i] = static_cast<std::int32_t>((entry = entry * 1664525 + 1013904223) >> 8);
        }
    }
    const std::int32_t* data() const { return entries_.get(); }

  private:
    std::unique_ptr<std::int32_t[], freed> entries_;
};

/// Requests in the middle of their answers.
class server {
  public:
    explicit server(std::int32_t requests, memory_pages kind = memory_pages::small)
        : random_(1)
        , table_(std::size_t{num_layers} * static_cast<std::size_t>(requests) * max_pages, kind) {
        const std::int32_t selecting[] = {7, 11, 15, 19, 23, 27};
        bounds_.max_requests = requests;
        bounds_.max_tokens = max_tokens;
        bounds_.num_layers = num_layers;
        must(up::cumulative_layer_sets(selecting, 6, num_layers, sets_, bounds_.num_sets));
        const std::size_t bytes = up::drop_ledger<>::state_bytes(bounds_);
        memory_.reset(static_cast<std::byte*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)));
        must(ledger.bind(bounds_, sets_, memory_.get(), bytes));
        for (std::int32_t id = 0; id < requests; ++id) {
            must(ledger.admit(id));
            prefill(id, requests == 1 ? max_tokens - 8192 : below(1024, max_tokens - 8192));
        }
    }

    std::int32_t below(std::int32_t from, std::int32_t to) {
        return from + static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(to - from));
    }
    /// Rows that a layer holds.
    std::int32_t tokens(std::int32_t id, std::int32_t layer = 0) const {
        up::held_rows held;
        must(ledger.rows_of(id, layer, held));
        return held.length();
    }
    /// Blocks of 64 rows; two of three stay.
    std::vector<std::int32_t> fewer(const std::vector<std::int32_t>& rows) {
        std::vector<std::int32_t> kept;
        for (std::size_t i = 0; i < rows.size(); i += 64) {
            if (i == 0 || random_() % 3 != 0) {
                kept.insert(kept.end(), rows.begin() + static_cast<std::ptrdiff_t>(i),
                            rows.begin() + static_cast<std::ptrdiff_t>(std::min(i + 64, rows.size())));
            }
        }
        return kept;
    }
    void prefill(std::int32_t id, std::int32_t length) {
        std::vector<std::int32_t> rows(static_cast<std::size_t>(length));
        std::iota(rows.begin(), rows.end(), 0);
        batch all;
        all.add(id, up::request_tag::prefill, rows);
        up::ledger_step step;
        must(ledger.begin_step(all.view(), all.ids.data(), step));
        for (std::int32_t layer = 1; layer < num_layers; ++layer) {
            if (ledger.starts_set(layer)) {
                rows = fewer(rows);
                batch entering;
                entering.add(id, up::request_tag::prefill, rows);
                must(ledger.append(step, layer, entering.view()));
            }
        }
        must(ledger.commit_step(step));
    }
    up::block_table_view slots(bool shared) const {
        up::block_table_view made;
        made.table = table_.data();
        made.request_stride = max_pages;
        made.layer_stride = shared ? 0 : std::int64_t{bounds_.max_requests} * max_pages;
        made.max_pages = max_pages;
        made.page_tokens = page;
        return made;
    }
    double bytes_per_request() const {
        up::ledger_limits more = bounds_;
        ++more.max_requests;
        return static_cast<double>(up::drop_ledger<>::state_bytes(more) -
                                   up::drop_ledger<>::state_bytes(bounds_));
    }

    up::drop_ledger<> ledger;

  private:
    std::mt19937_64 random_;
    up::ledger_limits bounds_{};
    std::int32_t sets_[num_layers];
    std::unique_ptr<std::byte[], freed> memory_;
    tables table_;
};

/// All that vLLM-like kernels read: int32 lengths and positions, int64 slots.
struct told {
    std::vector<std::int32_t> cached, lens, cu, positions;
    std::vector<std::int64_t> slots;
    up::step_arrays<> view;

    told(std::int32_t layers, std::int32_t requests, std::int32_t rows) {
        const auto entries = [layers](std::int32_t each) {
            return static_cast<std::size_t>(layers) * static_cast<std::size_t>(each);
        };
        cached.resize(entries(requests));
        lens.resize(entries(requests));
        cu.resize(entries(requests + 1));
        positions.resize(entries(rows));
        slots.resize(entries(rows));
        view.num_requests = requests;
        view.num_rows = rows;
        view.cached_lens = cached.data();
        view.seq_lens = lens.data();
        view.cu_seqlens = cu.data();
        view.row_positions = positions.data();
        view.slots = slots.data();
    }
};

/// One decode row for each request: begin, everything of every layer, commit. The token is taken back outside
/// of the time.
void decode_step(benchmark::State& state, bool table_for_each_layer, bool once_for_each_set,
                 memory_pages kind) {
    const auto requests = static_cast<std::int32_t>(state.range(0));
    server serving(requests, kind);
    std::vector<std::int32_t> firsts;
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        if (!once_for_each_set || serving.ledger.starts_set(layer)) {
            firsts.push_back(layer);
        }
    }
    const auto layers = static_cast<std::int32_t>(firsts.size());
    told out(layers, requests, requests);
    const up::block_table_view slots = serving.slots(!table_for_each_layer);
    batch rows;
    std::vector<std::int32_t> lengths;
    for (std::int32_t id = 0; id < requests; ++id) {
        lengths.push_back(serving.tokens(id));
        rows.add(id, up::request_tag::decode, {lengths.back()});
    }
    const up::batch_view view = rows.view();
    double best = 1e300;
    for (auto _ : state) {
        const double start = now();
        up::ledger_step step;
        must(serving.ledger.begin_step(view, rows.ids.data(), step));
        must(serving.ledger.look_up(step, {0, layers, firsts.data()}, slots, out.view));
        must(serving.ledger.commit_step(step));
        const double time = now() - start;
        state.SetIterationTime(time);
        best = std::min(best, time);
        must(serving.ledger.rollback(rows.ids.data(), lengths.data(), requests));
    }
    state.counters["best_us"] = best * 1e6;
    state.counters["layers_told"] = layers;
    state.counters["state_bytes_per_request"] = serving.bytes_per_request();
}

/// What no ledger can do without where each layer has a table: the entries of one decode step are read, once
/// each, and slots written. Their addresses are known beforehand.
void bare_table_reads(benchmark::State& state, memory_pages kind) {
    const auto requests = static_cast<std::int32_t>(state.range(0));
    server serving(requests, kind);
    const up::block_table_view table = serving.slots(false);
    std::vector<std::int32_t> rows;
    std::vector<const std::int32_t*> entries;
    for (std::int32_t layer = 0; layer < num_layers; ++layer) {
        for (std::int32_t id = 0; id < requests; ++id) {
            rows.push_back(serving.tokens(id, layer));
            entries.push_back(table.table + layer * table.layer_stride + id * table.request_stride +
                              rows.back() / page);
        }
    }
    std::vector<std::int64_t> slots(rows.size());
    double best = 1e300;
    for (auto _ : state) {
        const double start = now();
        for (std::size_t i = 0; i < rows.size(); ++i) {
            slots[i] = std::int64_t{*entries[i]} * page + rows[i] % page;
        }
        benchmark::DoNotOptimize(slots.data());
        benchmark::ClobberMemory();
        const double time = now() - start;
        state.SetIterationTime(time);
        best = std::min(best, time);
    }
    state.counters["best_us"] = best * 1e6;
}

/// A chunk of a prompt beside decodes: begin, appends where sets start, everything of the layers up to the
/// next one, abort.
void mixed_step(benchmark::State& state) {
    const auto requests = static_cast<std::int32_t>(state.range(0));
    const auto chunk = static_cast<std::int32_t>(state.range(1));
    server serving(requests);
    batch rows;
    for (std::int32_t id = 0; id < requests; ++id) {
        const std::int32_t tokens = serving.tokens(id);
        std::vector<std::int32_t> positions(static_cast<std::size_t>(id == 0 ? chunk : 1));
        std::iota(positions.begin(), positions.end(), tokens);
        rows.add(id, id == 0 ? up::request_tag::chunk : up::request_tag::decode, positions);
    }
    std::vector<batch> entering;
    std::vector<std::int32_t> starts{0};
    std::vector<std::int32_t> kept(rows.rows.begin(), rows.rows.begin() + chunk);
    for (std::int32_t layer = 1; layer < num_layers; ++layer) {
        if (serving.ledger.starts_set(layer)) {
            kept = serving.fewer(kept);
            batch next;
            next.add(0, up::request_tag::chunk, kept);
            for (std::int32_t id = 1; id < requests; ++id) {
                next.add(id, up::request_tag::decode,
                         {rows.rows[static_cast<std::size_t>(rows.cu[static_cast<std::size_t>(id)])]});
            }
            entering.push_back(next);
            starts.push_back(layer);
        }
    }
    starts.push_back(num_layers);
    told out(num_layers, requests, chunk + requests - 1);
    const up::block_table_view slots = serving.slots(false);
    for (auto _ : state) {
        up::ledger_step step;
        must(serving.ledger.begin_step(rows.view(), rows.ids.data(), step));
        for (std::size_t i = 0; i + 1 < starts.size(); ++i) {
            if (i > 0) {
                must(serving.ledger.append(step, starts[i], entering[i - 1].view()));
            }
            must(serving.ledger.look_up(step, {starts[i], starts[i + 1] - starts[i]}, slots, out.view));
        }
        must(serving.ledger.abort_step(step));
        benchmark::DoNotOptimize(out.slots.data());
        benchmark::ClobberMemory();
    }
}

void save_and_restore(benchmark::State& state) {
    server serving(1);
    std::vector<std::byte> saved(up::drop_ledger<>::max_saved_bytes(serving.ledger.bounds()));
    std::size_t bytes = 0;
    must(serving.ledger.saved_bytes(0, bytes));
    for (auto _ : state) {
        must(serving.ledger.save(0, saved.data(), saved.size()));
        must(serving.ledger.release(0));
        must(serving.ledger.admit(0));
        must(serving.ledger.restore(0, saved.data(), bytes));
    }
    state.counters["saved_bytes"] = static_cast<double>(bytes);
    state.counters["state_bytes_per_request"] = serving.bytes_per_request();
}

BENCHMARK_CAPTURE(decode_step, table_for_each_layer, true, false, memory_pages::small)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(decode_step, table_for_each_layer_in_huge_pages, true, false, memory_pages::huge)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(decode_step, tables_shared_by_all_layers, false, false, memory_pages::small)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(decode_step, once_for_each_set, true, true, memory_pages::small)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(bare_table_reads, small_pages, memory_pages::small)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(bare_table_reads, huge_pages, memory_pages::huge)
    ->Arg(64)
    ->Arg(256)
    ->UseManualTime()
    ->Unit(benchmark::kMicrosecond);
BENCHMARK(mixed_step)->Args({256, 2048})->Args({1, 8192})->Unit(benchmark::kMicrosecond);
BENCHMARK(save_and_restore)->Unit(benchmark::kMicrosecond);

} // namespace
