// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// All rooms together: prompts of several requests go span by span through the layers of a make-believe model
// (random q and k for each layer and position), decided by the facade and remembered by the ledger, while the
// oracle keeps sets of positions. Then a token is decoded from what the caches hold.

#include "property/decision.hpp"
#include "property/request.hpp"

#include <uniprefill/ledger/drop_ledger.hpp>
#include <uniprefill/pipeline/prefill_sparsifier.hpp>

#include <memory>
#include <numeric>

using namespace property;

namespace {

using policy = up::default_policy<up::dynamic, up::dynamic>;
using sparsifier = up::prefill_sparsifier<policy>;

/// One request: its tensors for the whole prompt and one token after it, its caches, and its history.
struct prompt {
    request whole;                      // options, forced and observed spans; q and k are those of layers[0]
    std::vector<int> spans;             // rows of each
    std::vector<oracle::tensor> q;      // [layers], rows for each position and one more
    std::vector<oracle::tensor> k;      // [layers]
    std::vector<std::vector<int>> held; // [layers] positions whose keys are cached, by the oracle
    int next_span = 0;
    int next_position = 0;

    int tokens() const { return std::accumulate(spans.begin(), spans.end(), 0); }
};

/// What the observer heard.
struct heard {
    std::vector<up::decision_metrics> decisions;
};

/// What a sum over ranks does when all of them have the same heads, and one of them may have met a fault.
struct equal_ranks {
    std::int64_t count = 1;
    std::int64_t faulty_word = -1;

    up::status operator()(std::int64_t* buffer, std::int64_t words, up::rank_reduction how,
                          up::host_stream) const noexcept {
        for (std::int64_t word = 0; word < words; ++word) {
            buffer[word] = static_cast<std::int64_t>(static_cast<std::uint64_t>(buffer[word]) *
                                                     static_cast<std::uint64_t>(count));
        }
        if (faulty_word >= 0) {
            buffer[faulty_word] += up::fault_word(up::mass_fault::rank);
        }
        return how == up::rank_reduction::sum
                   ? up::success()
                   : up::failure(up::status_code::invalid_argument, "how", "a sum over heads", 1);
    }
};

class simulation {
  public:
    explicit simulation(random_numbers& numbers)
        : numbers_(numbers)
        , layers_(numbers.between(2, 7)) {
        of_.kv_heads = numbers.between(1, 2);
        of_.heads = of_.kv_heads * numbers.between(1, 2);
        of_.dim = numbers.one_of({4, 8});
        of_.block_rows = numbers.one_of({8, 12});
        of_.observations = numbers.one_of({1, 4, 9});
        of_.score.scale = 0.5;
        for (int count = numbers.between(1, 3); count > 0; --count) {
            add_prompt();
        }
        revives_ = numbers.chance(0.5);
        for (int layer = 0; layer < layers_; ++layer) {
            if (numbers.chance(0.5)) {
                rule_pair rule;
                do {
                    rule = random_rule(numbers, 40);
                } while (rule.theirs.kind == oracle::rule_kind::budget);
                rule.ours.p.value = rule.theirs.fraction = oracle::fraction(0.05 + 0.9 * numbers.unit());
                rules_.push_back(rule);
                selecting_.push_back({layer, rule.ours, nullptr});
                selecting_layers_.push_back(layer);
            }
        }
        bounds_.max_requests = requests();
        bounds_.max_segments = 4 * requests();
        for (const prompt& one : prompts_) {
            bounds_.max_rows += one.tokens();
        }
        bounds_.max_cached_tokens = bounds_.max_rows + requests();
        bounds_.num_layers = layers_;
        bounds_.num_heads = of_.heads;
        bounds_.num_kv_heads = of_.kv_heads;
        bounds_.head_dim = of_.dim;
        bounds_.block_rows = of_.block_rows;
        bounds_.num_observations = of_.observations;
        ranks_ = numbers.between(1, 3);
        bounds_.num_global_heads = ranks_ * of_.heads;
        bind_ledger();
        const auto cells = static_cast<std::size_t>(requests()) *
                           static_cast<std::size_t>(capacity() * of_.kv_heads * of_.dim);
        caches_.assign(static_cast<std::size_t>(layers_), std::vector<float>(cells, 1e4f));
    }

    void run() {
        while (std::any_of(prompts_.begin(), prompts_.end(), [](const prompt& one) {
            return one.next_span < static_cast<int>(one.spans.size());
        })) {
            prefill_step();
        }
        for (int layer = 0; layer < layers_; ++layer) {
            check_held(layer);
        }
        decode_step();
    }

  private:
    int requests() const { return static_cast<int>(prompts_.size()); }
    int capacity() const { return bounds_.max_rows + 1; }
    bool selects(int layer) const {
        return std::find(selecting_layers_.begin(), selecting_layers_.end(), layer) !=
               selecting_layers_.end();
    }

    void add_prompt() {
        prompt one;
        int tokens = 0;
        for (int span = numbers_.between(1, 4); span > 0; --span) {
            one.spans.push_back(numbers_.between(0, 5 * of_.block_rows));
            tokens += one.spans.back();
        }
        request_wishes wishes;
        wishes.rows = tokens;
        wishes.spans = numbers_.chance(0.3);
        wishes.observed = numbers_.chance(0.2);
        one.whole = random_request(numbers_, of_, wishes, rounding::f32);
        one.whole.options.enabled = numbers_.chance(0.9) ? 1 : 0;
        for (int layer = 0; layer < layers_; ++layer) {
            wishes.rows = tokens + 1;
            wishes.style = numbers_.chance(0.5) ? key_style::plain : key_style::sharp;
            request drawn = random_request(numbers_, of_, wishes, rounding::f32);
            one.q.push_back(std::move(drawn.q));
            one.k.push_back(std::move(drawn.k));
        }
        one.held.resize(static_cast<std::size_t>(layers_));
        prompts_.push_back(std::move(one));
    }

    void bind_ledger() {
        up::ledger_limits limits;
        limits.max_requests = requests();
        limits.max_tokens = bounds_.max_rows + 1;
        limits.num_layers = layers_;
        limits.relation = revives_ ? up::set_relation::independent : up::set_relation::nested;
        std::vector<std::int32_t> sets(static_cast<std::size_t>(layers_));
        const auto map = revives_ ? up::revived_layer_sets : up::cumulative_layer_sets;
        REQUIRE(map(selecting_layers_.data(), static_cast<int>(selecting_layers_.size()), layers_,
                    sets.data(), limits.num_sets)
                    .ok());
        ledger_memory_ = std::make_unique<aligned_memory>(up::drop_ledger<>::state_bytes(limits));
        const up::workspace memory = ledger_memory_->view();
        REQUIRE(ledger_.bind(limits, sets.data(), memory.data(), memory.bytes()).ok());
        for (int r = 0; r < requests(); ++r) {
            REQUIRE(ledger_.admit(r).ok());
        }
    }

    /// Where row @p row of a request's cache of a layer begins.
    float* cache_row(int layer, int r, int row) {
        return caches_[static_cast<std::size_t>(layer)].data() +
               (static_cast<std::ptrdiff_t>(r) * capacity() + row) * of_.kv_heads * of_.dim;
    }
    up::contiguous_cache<float> cache(int layer) const {
        const std::int64_t token = std::int64_t{of_.kv_heads} * of_.dim;
        return {caches_[static_cast<std::size_t>(layer)].data(), token * capacity(), token, of_.dim};
    }

    /// Rows of q or k of the current rows, in their order.
    std::vector<float> gather(const up::batch_view& rows, int layer, bool keys) const {
        std::vector<float> packed;
        for (int r = 0; r < rows.num_requests; ++r) {
            const prompt& one = prompts_[static_cast<std::size_t>(r)];
            const oracle::tensor& from = (keys ? one.k : one.q)[static_cast<std::size_t>(layer)];
            for (int row = rows.cu_seqlens[r]; row < rows.cu_seqlens[r + 1]; ++row) {
                for (int head = 0; head < from.heads; ++head) {
                    for (int i = 0; i < from.dim; ++i) {
                        packed.push_back(static_cast<float>(from.at(rows.positions[row], head, i)));
                    }
                }
            }
        }
        packed.push_back(0);
        return packed;
    }

    void write_keys(int layer, const up::ledger_step& opened, const up::batch_view& rows,
                    const std::vector<float>& k) {
        std::vector<std::int32_t> places(static_cast<std::size_t>(rows.num_rows) + 1);
        REQUIRE(ledger_.write_rows(opened, layer, places.data(), rows.num_rows + 1).ok());
        const int size = of_.kv_heads * of_.dim;
        for (int r = 0; r < rows.num_requests; ++r) {
            for (int row = rows.cu_seqlens[r]; row < rows.cu_seqlens[r + 1]; ++row) {
                std::copy_n(k.begin() + static_cast<std::ptrdiff_t>(row) * size, size,
                            cache_row(layer, r, places[static_cast<std::size_t>(row)]));
            }
        }
    }

    /// The arrays of a step that takes some spans of each request.
    struct step_arrays {
        std::vector<up::request_tag> tags;
        std::vector<std::int32_t> cu_seqlens{0}, cu_segments{0}, segment_request, positions;
        std::vector<up::request_options> options;
        std::vector<std::int32_t> forced_offsets{0}, observed_offsets{0};
        std::vector<up::position_span> forced, observed;
        std::vector<int> segment_rows; // at the start

        up::batch_view view() const {
            up::batch_view batch;
            batch.num_requests = static_cast<std::int32_t>(tags.size());
            batch.num_segments = static_cast<std::int32_t>(segment_request.size());
            batch.num_rows = cu_seqlens.back();
            batch.tags = tags.data();
            batch.cu_seqlens = cu_seqlens.data();
            batch.positions = positions.data();
            batch.options = options.data();
            batch.cu_segments = cu_segments.data();
            batch.segment_request = segment_request.data();
            batch.forced = {forced_offsets.data(), forced.data()};
            batch.observed = {observed_offsets.data(), observed.data()};
            return batch;
        }
    };

    step_arrays next_spans() {
        step_arrays arrays;
        for (int r = 0; r < requests(); ++r) {
            prompt& one = prompts_[static_cast<std::size_t>(r)];
            const int left = static_cast<int>(one.spans.size()) - one.next_span;
            const int taken = numbers_.between(0, left);
            const bool whole = one.next_span == 0 && taken == left;
            arrays.tags.push_back(whole ? up::request_tag::prefill : up::request_tag::chunk);
            for (int i = 0; i < std::max(1, taken); ++i) { // a request without rows has an empty segment
                const int rows = i < taken ? one.spans[static_cast<std::size_t>(one.next_span++)] : 0;
                arrays.segment_request.push_back(r);
                arrays.segment_rows.push_back(rows);
                arrays.cu_segments.push_back(arrays.cu_segments.back() + rows);
                for (int row = 0; row < rows; ++row) {
                    arrays.positions.push_back(one.next_position++);
                }
            }
            arrays.cu_seqlens.push_back(arrays.cu_segments.back());
            arrays.options.push_back(one.whole.options);
            for (const oracle::range& span : one.whole.forced) {
                arrays.forced.push_back({span.begin, span.end});
            }
            for (const oracle::range& span : one.whole.observed) {
                arrays.observed.push_back({span.begin, span.end});
            }
            arrays.forced_offsets.push_back(static_cast<std::int32_t>(arrays.forced.size()));
            arrays.observed_offsets.push_back(static_cast<std::int32_t>(arrays.observed.size()));
        }
        arrays.positions.reserve(1);
        return arrays;
    }

    void prefill_step() {
        const step_arrays arrays = next_spans();
        const up::batch_view batch = arrays.view();
        const int segments = batch.num_segments;

        std::vector<oracle::row_history> histories; // of each segment
        for (int s = 0; s < segments; ++s) {
            histories.emplace_back(revives_ ? oracle::propagation::revive : oracle::propagation::cumulative,
                                   std::vector<int>(batch.positions + batch.cu_segments[s],
                                                    batch.positions + batch.cu_segments[s + 1]));
        }

        heard ears;
        up::sparsifier_options<up::selection_rule> options;
        options.layers = selecting_.data();
        options.num_selecting = static_cast<std::int32_t>(selecting_.size());
        options.mode = revives_ ? up::propagation::revive : up::propagation::cumulative;
        options.observer.context = &ears;
        options.observer.on_decision = [](void* context, const up::decision_metrics& what) {
            static_cast<heard*>(context)->decisions.push_back(what);
        };
        const sparsifier facade(bounds_, options);
        REQUIRE(facade.check().ok());
        const aligned_memory memory(facade.workspace_bytes());
        sparsifier::step step(facade);
        REQUIRE(step.begin(batch, memory.view()).ok());

        std::vector<std::int32_t> ids(static_cast<std::size_t>(requests()));
        std::iota(ids.begin(), ids.end(), 0);
        up::ledger_step opened;
        REQUIRE(ledger_.begin_step(batch, ids.data(), opened).ok());

        // Hidden states are positions: what a row is must follow it.
        std::vector<std::int32_t> working(static_cast<std::size_t>(batch.num_rows) + 1);
        std::vector<std::int32_t> full(working.size());
        const up::row_tensor hidden{up::as_byte_rows(working.data(), batch.num_rows, 1),
                                    up::as_byte_rows(full.data(), batch.num_rows, 1)};
        std::copy_n(batch.positions, batch.num_rows, static_cast<std::int32_t*>(step.rows_of(hidden).data));

        std::vector<std::int64_t> head_masses(static_cast<std::size_t>(2 * of_.heads * bounds_.max_blocks()),
                                              -1);
        const bool by_head = numbers_.chance(0.5);
        step.want_head_masses(by_head ? heads_in(head_masses) : up::head_mass_view{});

        std::size_t decisions = 0;
        for (int layer = 0; layer < layers_; ++layer) {
            INFO("layer " << layer);
            REQUIRE(step.enter(layer, &hidden, 1).ok());
            const up::batch_view rows = step.rows();
            std::vector<std::vector<int>> entered;
            for (int s = 0; s < segments; ++s) {
                entered.push_back(histories[static_cast<std::size_t>(s)].enter(selects(layer)));
                REQUIRE(std::vector<int>(rows.positions + rows.segment_begin(s),
                                         rows.positions + rows.segment_end(s)) == entered.back());
            }
            REQUIRE(ledger_.append(opened, layer, rows).ok());
            std::vector<std::int32_t> cached(static_cast<std::size_t>(requests()));
            REQUIRE(ledger_.cached_lens(opened, layer, cached.data(), requests()).ok());
            const std::vector<float> q = gather(rows, layer, false);
            const std::vector<float> k = gather(rows, layer, true);
            write_keys(layer, opened, rows, k);
            const up::head_rows<const float> q_rows{q.data(),      of_.heads * of_.dim, of_.dim,
                                                    rows.num_rows, of_.heads,           of_.dim};
            const up::head_rows<const float> k_rows{k.data(),      of_.kv_heads * of_.dim, of_.dim,
                                                    rows.num_rows, of_.kv_heads,           of_.dim};
            up::attention_params attention;
            attention.scale = static_cast<float>(of_.score.scale);
            const int faulty = numbers_.chance(0.1) ? numbers_.between(0, segments - 1) : -1;
            const equal_ranks reduction{ranks_, faulty < 0 ? -1 : 2 * bounds_.max_blocks() + faulty};
            up::selection decided;
            const up::status done = step.decide(
                layer, q_rows, up::key_source<float, up::contiguous_cache<float>>{k_rows, cache(layer)},
                attention, cached.data(), decided, {}, reduction);
            char message[256];
            up::format(done, message, sizeof message);
            INFO(message);
            REQUIRE(done.ok());
            if (by_head) {
                check_head_masses(layer, q_rows, k_rows, attention, cached, rows, head_masses);
            }
            const std::vector<kept_segment> kept = consistent(decided, rows);
            const std::vector<oracle::selected_rows> wanted = oracle_decision(layer, rows, entered, faulty);
            for (int s = 0; s < segments; ++s) {
                const auto index = static_cast<std::size_t>(s);
                REQUIRE(kept[index].keep == wanted[index].keep);
                histories[index].keep(wanted[index].keep);
                if (!decided.identity) {
                    REQUIRE(ears.decisions.size() > decisions);
                    const up::decision_metrics& told = ears.decisions[decisions++];
                    REQUIRE(told.layer == layer);
                    REQUIRE(told.segment == s);
                    REQUIRE(told.request == rows.request_of(s));
                    REQUIRE(told.outcome.rows == static_cast<int>(entered[index].size()));
                    REQUIRE(told.outcome.kept ==
                            std::count(wanted[index].keep.begin(), wanted[index].keep.end(), true));
                    REQUIRE(in_oracle_words(told.outcome.reason) == wanted[index].reason);
                    const double dropped = wanted[index].total > 0
                                               ? static_cast<double>(wanted[index].dropped) /
                                                     static_cast<double>(wanted[index].total)
                                               : 0;
                    REQUIRE(std::abs(told.dropped_share - dropped) < 1e-5);
                }
                std::vector<int>& held = prompts_[static_cast<std::size_t>(rows.request_of(s))]
                                             .held[static_cast<std::size_t>(layer)];
                held.insert(held.end(), entered[index].begin(), entered[index].end());
            }
            REQUIRE(ears.decisions.size() == decisions);
            REQUIRE(step.leave(decided, &hidden, 1).ok());
            const up::batch_view after = step.rows();
            const auto* states = static_cast<const std::int32_t*>(step.rows_of(hidden).data);
            REQUIRE(std::equal(after.positions, after.positions + after.num_rows, states));
        }
        REQUIRE(ledger_.commit_step(opened).ok());
    }

    up::head_mass_view heads_in(std::vector<std::int64_t>& masses) const {
        const std::int64_t blocks = bounds_.max_blocks();
        return {masses.data(), masses.data() + of_.heads * blocks, blocks, of_.heads};
    }

    /// What the facade wrote at any layer, selecting or not, is what the estimator says by itself.
    void check_head_masses(int layer, const up::head_rows<const float>& q,
                           const up::head_rows<const float>& k, const up::attention_params& attention,
                           const std::vector<std::int32_t>& cached, up::batch_view rows,
                           std::vector<std::int64_t>& came) const {
        const up::importance_estimator<policy::estimator> estimator(bounds_);
        const aligned_memory memory(estimator.workspace_bytes());
        std::vector<std::int64_t> buffer(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds_)));
        std::vector<std::int64_t> wanted(came.size(), -1);
        rows.cached_lens = cached.data();
        REQUIRE(estimator
                    .run(q, up::key_source<float, up::contiguous_cache<float>>{k, cache(layer)}, attention,
                         rows, up::mass_view::over(buffer.data(), bounds_, up::memory_space::host),
                         heads_in(wanted), memory.view())
                    .ok());
        const std::int64_t used = up::used_blocks(rows, of_.block_rows);
        for (std::int64_t plane = 0; plane < 2 * of_.heads; ++plane) {
            for (std::int64_t block = plane * bounds_.max_blocks();
                 block < plane * bounds_.max_blocks() + used; ++block) {
                REQUIRE(came[static_cast<std::size_t>(block)] == wanted[static_cast<std::size_t>(block)]);
            }
        }
        came.assign(came.size(), -1);
    }

    /// The same decision from sets of positions, in double.
    std::vector<oracle::selected_rows> oracle_decision(int layer, const up::batch_view& rows,
                                                       const std::vector<std::vector<int>>& entered,
                                                       int faulty) const {
        std::vector<oracle::selected_rows> out;
        std::vector<int> before; // positions of the request that entered in earlier spans of this step
        for (int s = 0; s < rows.num_segments; ++s) {
            const auto index = static_cast<std::size_t>(s);
            const std::vector<int>& mine = entered[index];
            const int r = rows.request_of(s);
            if (s == 0 || rows.request_of(s - 1) != r) {
                before.clear();
            }
            const prompt& one = prompts_[static_cast<std::size_t>(r)];
            oracle::selected_rows everything;
            everything.keep.assign(mine.size(), true);
            if (!selects(layer)) {
                out.push_back(everything);
                continue;
            }
            oracle::segment_problem problem;
            problem.score = of_.score;
            problem.block_rows = of_.block_rows;
            problem.positions = mine;
            problem.q = rows_at(one.q[static_cast<std::size_t>(layer)], mine);
            problem.key_positions = one.held[static_cast<std::size_t>(layer)];
            problem.key_positions.insert(problem.key_positions.end(), before.begin(), before.end());
            problem.key_positions.insert(problem.key_positions.end(), mine.begin(), mine.end());
            problem.keys = rows_at(one.k[static_cast<std::size_t>(layer)], problem.key_positions);
            problem.observers = oracle::observers_of(mine, one.whole.observed, of_.observations);
            problem.forced =
                oracle::forced_rows(mine, one.whole.options.sink, one.whole.options.tail, one.whole.forced);
            const oracle::block_masses masses = oracle::masses_of(problem);
            oracle::selection_problem choice;
            choice.forced = problem.forced;
            choice.block_rows = of_.block_rows;
            choice.enabled = one.whole.options.enabled != 0;
            choice.fault = masses.unscored ? oracle::kept_because::unscored
                           : s == faulty   ? oracle::kept_because::rank
                                           : oracle::kept_because::selected;
            for (std::size_t block = 0; block < masses.free.size(); ++block) {
                choice.free_mass.push_back(static_cast<std::int64_t>(masses.free[block] * 0x1p50));
                choice.forced_mass.push_back(static_cast<std::int64_t>(masses.forced[block] * 0x1p50));
            }
            out.push_back(oracle::select(choice, rule_at(layer)));
            before.insert(before.end(), mine.begin(), mine.end());
        }
        return out;
    }

    const oracle::rule& rule_at(int layer) const {
        const auto found = std::find(selecting_layers_.begin(), selecting_layers_.end(), layer);
        return rules_[static_cast<std::size_t>(found - selecting_layers_.begin())].theirs;
    }

    static oracle::tensor rows_at(const oracle::tensor& from, const std::vector<int>& positions) {
        oracle::tensor out(static_cast<int>(positions.size()), from.heads, from.dim);
        for (int row = 0; row < out.rows; ++row) {
            for (int head = 0; head < from.heads; ++head) {
                for (int i = 0; i < from.dim; ++i) {
                    out.at(row, head, i) = from.at(positions[static_cast<std::size_t>(row)], head, i);
                }
            }
        }
        return out;
    }

    /// The ledger's view of a layer against the oracle's set.
    void check_held(int layer) const {
        for (int r = 0; r < requests(); ++r) {
            INFO("request " << r << ", layer " << layer);
            const prompt& one = prompts_[static_cast<std::size_t>(r)];
            const std::vector<int>& held = one.held[static_cast<std::size_t>(layer)];
            up::held_rows rows;
            REQUIRE(ledger_.rows_of(r, layer, rows).ok());
            std::vector<std::int32_t> positions(held.size() + 1);
            REQUIRE(rows.copy_positions(0, positions.data(), static_cast<std::int32_t>(positions.size())) ==
                    static_cast<std::int32_t>(held.size()));
            REQUIRE(std::equal(held.begin(), held.end(), positions.begin()));
            std::vector<int> all(static_cast<std::size_t>(one.tokens()));
            std::iota(all.begin(), all.end(), 0);
            const std::vector<oracle::range> wanted = oracle::missing_ranges(all, held);
            std::vector<up::position_span> dropped(wanted.size() + 1);
            REQUIRE(rows.copy_dropped_ranges(dropped.data(), static_cast<std::int32_t>(dropped.size())) ==
                    static_cast<std::int32_t>(wanted.size()));
            for (std::size_t i = 0; i < wanted.size(); ++i) {
                REQUIRE(dropped[i].begin == wanted[i].begin);
                REQUIRE(dropped[i].end == wanted[i].end);
            }
        }
    }

    /// Attention over what the cache holds, found through the ledger, against attention over the whole prompt
    /// with an explicit mask.
    void decode_step() {
        std::vector<up::request_tag> tags(static_cast<std::size_t>(requests()), up::request_tag::decode);
        std::vector<std::int32_t> cu_seqlens{0};
        std::vector<std::int32_t> positions;
        std::vector<std::int32_t> ids;
        for (int r = 0; r < requests(); ++r) {
            cu_seqlens.push_back(r + 1);
            positions.push_back(prompts_[static_cast<std::size_t>(r)].tokens());
            ids.push_back(r);
        }
        up::batch_view batch;
        batch.num_requests = batch.num_segments = batch.num_rows = requests();
        batch.tags = tags.data();
        batch.cu_seqlens = cu_seqlens.data();
        batch.positions = positions.data();
        up::ledger_step opened;
        REQUIRE(ledger_.begin_step(batch, ids.data(), opened).ok());
        for (int layer = 0; layer < layers_; ++layer) {
            write_keys(layer, opened, batch, gather(batch, layer, true));
            std::vector<std::int32_t> lengths(static_cast<std::size_t>(requests()));
            REQUIRE(ledger_.seq_lens(opened, layer, lengths.data(), requests()).ok());
            for (int r = 0; r < requests(); ++r) {
                INFO("layer " << layer << ", request " << r);
                const prompt& one = prompts_[static_cast<std::size_t>(r)];
                const auto l = static_cast<std::size_t>(layer);
                const int token = one.tokens();
                const int length = lengths[static_cast<std::size_t>(r)];
                oracle::tensor keys(length, of_.kv_heads, of_.dim);
                for (std::size_t i = 0; i < keys.data.size(); ++i) {
                    keys.data[i] = static_cast<double>(cache_row(layer, r, 0)[i]);
                }
                const oracle::tensor query = rows_at(one.q[l], {token});
                const std::vector<bool> all(static_cast<std::size_t>(length), true);
                const oracle::tensor ours = oracle::masked_attention(query, keys, keys, of_.score, {all});

                std::vector<int> everything(static_cast<std::size_t>(token) + 1);
                std::iota(everything.begin(), everything.end(), 0);
                std::vector<int> stored = one.held[l];
                stored.push_back(token);
                const oracle::tensor wanted =
                    oracle::masked_attention(query, one.k[l], one.k[l], of_.score,
                                             oracle::stored_causal_mask({token}, everything, stored));
                double worst = 0;
                for (std::size_t i = 0; i < wanted.data.size(); ++i) {
                    worst = std::max(worst, std::abs(wanted.data[i] - ours.data[i]));
                }
                REQUIRE(worst < 1e-12);
            }
        }
        REQUIRE(ledger_.commit_step(opened).ok());
    }

    random_numbers& numbers_;
    int layers_;
    int ranks_ = 1;
    shape of_;
    bool revives_ = false;
    std::vector<prompt> prompts_;
    std::vector<rule_pair> rules_;
    std::vector<up::selecting_layer<up::selection_rule>> selecting_;
    std::vector<std::int32_t> selecting_layers_;
    up::limits bounds_;
    std::unique_ptr<aligned_memory> ledger_memory_;
    up::drop_ledger<> ledger_;
    std::vector<std::vector<float>> caches_; // [layers][requests][capacity][kv heads][dim]
};

} // namespace

TEST_CASE("spans of many requests through all layers hold the oracle's positions, and decode from them") {
    const int cases = scaled(600);
    for (int i = 0; i < cases; ++i) {
        const std::uint64_t seed = base_seed() + static_cast<std::uint64_t>(i);
        INFO("UNIPREFILL_TEST_SEED=" << seed << " (first case)");
        random_numbers numbers(seed);
        simulation(numbers).run();
    }
}
