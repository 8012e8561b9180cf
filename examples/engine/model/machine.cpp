// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/machine.hpp"

#include "engine/error.hpp"
#include "engine/model/estimator_pairs.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>

namespace engine {

using uniprefill::throw_if_failed;

namespace {

cpu::activations rows_of(std::int64_t rows, std::int64_t columns) {
    return cpu::activations(static_cast<std::size_t>(rows * columns));
}

/// Rows of @p columns elements, of which the first @p used are moved.
uniprefill::byte_rows bytes_of(cpu::activations& rows, std::int64_t columns, std::int64_t used,
                               std::int64_t count) {
    return {rows.data(), columns * std::int64_t{sizeof(float)}, used * std::int64_t{sizeof(float)},
            static_cast<std::int32_t>(count)};
}

bool reads_prompts(const uniprefill::batch_view& batch) {
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        if (batch.is_prefill(r)) return true;
    }
    return false;
}

} // namespace

template <class Ops>
basic_machine<Ops>::basic_machine(basic_session<Ops>& session, const step_plan& plan)
    : session_(session)
    , plan_(plan)
    , config_(session.model().config())
    , step_(session.policy())
    , scratch_(session.policy().workspace_bytes())
    , q_elements_(std::int64_t{config_.heads} * config_.head_dim)
    , kv_elements_(std::int64_t{config_.kv_heads} * config_.head_dim)
    , qkv_elements_(q_elements_ + 2 * kv_elements_)
    , cached_lens_(plan.requests().size())
    , records_(static_cast<std::size_t>(config_.layers))
    , dropped_at_(static_cast<std::size_t>(plan.num_rows()), -1) {
    const std::int64_t rows = plan.num_rows();
    const bool revives = session.options().propagation == uniprefill::propagation::revive;
    throw_if_failed(step_.begin(plan.batch(), scratch_.workspace()));
    working_ = rows_of(rows, config_.hidden);
    full_ = rows_of(revives ? rows : 0, config_.hidden);
    hidden_rows_ = {bytes_of(working_, config_.hidden, config_.hidden, rows),
                    bytes_of(full_, config_.hidden, config_.hidden, revives ? rows : 0)};
    session.model().embed(plan.tokens(), hidden());
    normed_ = rows_of(rows, config_.hidden);
    qkv_ = rows_of(rows, qkv_elements_);
    attended_ = rows_of(rows, q_elements_);
    gate_up_ = rows_of(rows, 2 * std::int64_t{config_.ffn});
    activated_ = rows_of(rows, config_.ffn);
    if (session.options().decide_at_end) {
        last_queries_ = query_tails(session.options().selecting.size(), plan.ids().size(),
                                    session.options().num_observations, q_elements_);
    }
    if (session.options().lists && reads_prompts(plan.batch())) {
        lists_.emplace(session.policy().bounds(), session.options().list_means,
                       session.options().list_sampling);
        if (lists_->query_rows() == 0) step_.want_head_masses(lists_->masses());
    }
    throw_if_failed(session.drops().begin_step(plan.batch(), plan.ids().data(), ledger_step_));
}

template <class Ops>
basic_machine<Ops>::~basic_machine() {
    if (ledger_step_.open()) {
        // Can only fail on a step that isn't open. What was written to the cache lies beyond the lengths that
        // the ledger tells, and the next write goes over it.
        static_cast<void>(session_.drops().abort_step(ledger_step_));
    }
}

template <class Ops>
bool basic_machine<Ops>::advance() {
    const auto start = std::chrono::steady_clock::now();
    const segment running = next_;
    const std::int32_t layer = layer_;
    switch (running) {
    case segment::project_qkv:
        project_qkv();
        next_ = segment::decide;
        break;
    case segment::decide:
        decide();
        next_ = segment::attend;
        break;
    case segment::attend:
        attend();
        next_ = segment::project_output;
        break;
    case segment::project_output:
        project_output();
        next_ = segment::gate_up;
        break;
    case segment::gate_up:
        gate_up();
        next_ = segment::down;
        break;
    case segment::down:
        down();
        ++layer_;
        next_ = layer_ < config_.layers ? segment::project_qkv : segment::logits;
        break;
    case segment::logits:
        project_logits();
        throw_if_failed(session_.drops().commit_step(ledger_step_));
        if (session_.options().decide_at_end) keep_queries();
        next_ = segment::done;
        break;
    case segment::done:
        return false;
    }
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    seconds_ += seconds;
    if (running != segment::logits) {
        records_[static_cast<std::size_t>(layer)].seconds += seconds;
    }
    if (running == segment::down && left_ != nullptr) {
        left_->stops[static_cast<std::size_t>(layer)].record = records_[static_cast<std::size_t>(layer)];
    }
    return next_ != segment::done;
}

template <class Ops>
void basic_machine<Ops>::record_into(trail& left) {
    left.stops.assign(static_cast<std::size_t>(config_.layers), {});
    left_ = &left;
}

template <class Ops>
void basic_machine<Ops>::begin_at(std::int32_t layer, const trail& from) {
    const bool cumulative = session_.options().propagation == uniprefill::propagation::cumulative;
    if (!cumulative || plan_.requests().size() != 1 || !from.begins_at(layer)) {
        throw error("trail", "one that begins at layer " + std::to_string(layer), "another");
    }
    for (; layer_ < layer; ++layer_) {
        replay(from.stops[static_cast<std::size_t>(layer_)]);
    }
    const std::vector<float>& entered = from.stops[static_cast<std::size_t>(layer)].hidden;
    if (static_cast<std::int64_t>(entered.size()) != num_rows() * config_.hidden) {
        throw error("trail", "one that dropped the same", "another");
    }
    std::copy(entered.begin(), entered.end(), hidden());
}

/// A layer's keys and decision, as the step before had them.
template <class Ops>
void basic_machine<Ops>::replay(const trail::stop& left) {
    throw_if_failed(step_.enter(layer_, &hidden_rows_, 1));
    const uniprefill::batch_view rows = step_.rows();
    if (static_cast<std::int64_t>(left.k.size()) != rows.num_rows * kv_elements_) {
        throw error("trail", "one that dropped the same", "another");
    }
    auto& ledger = session_.drops();
    throw_if_failed(ledger.append(ledger_step_, layer_, rows));
    throw_if_failed(ledger.cached_lens(ledger_step_, layer_, cached_lens_.data(), 1));
    session_.cache().write(layer_, plan_.ids().front(), cached_lens_.front(), left.k.data(), left.v.data(),
                           rows.num_rows, kv_elements_);
    now() = left.record;
    if (left_ != nullptr) left_->stops[static_cast<std::size_t>(layer_)] = left;
    if (!session_.policy().selects(layer_)) return;
    for (std::int64_t row = 0; row < rows.num_rows; ++row) {
        std::copy_n(left.k.data() + row * kv_elements_, kv_elements_,
                    qkv_.data() + row * qkv_elements_ + q_elements_);
    }
    const std::int64_t first = rows.num_rows - static_cast<std::int64_t>(left.queries.size()) / q_elements_;
    for (std::int64_t row = first; row < rows.num_rows; ++row) {
        std::copy_n(left.queries.data() + (row - first) * q_elements_, q_elements_,
                    qkv_.data() + row * qkv_elements_);
    }
    look(entered_keys());
    if (!decided_.identity) {
        record(decided_, rows);
        leave(decided_);
    }
}

/// Of rows that have just entered the layer and of their q, k and v.
template <class Ops>
void basic_machine<Ops>::leave_trail() {
    trail::stop& into = left_->stops[static_cast<std::size_t>(layer_)];
    const auto copy_columns = [&](std::int64_t first_row, std::int64_t column, std::int64_t columns) {
        std::vector<float> made(static_cast<std::size_t>((num_rows() - first_row) * columns));
        for (std::int64_t row = first_row; row < num_rows(); ++row) {
            std::copy_n(qkv_.data() + row * qkv_elements_ + column, columns,
                        made.data() + (row - first_row) * columns);
        }
        return made;
    };
    if (left_->may_begin.empty() || left_->may_begin[static_cast<std::size_t>(layer_)]) {
        into.hidden.assign(hidden(), hidden() + num_rows() * config_.hidden);
    }
    into.k = copy_columns(0, q_elements_, kv_elements_);
    into.v = copy_columns(0, q_elements_ + kv_elements_, kv_elements_);
    if (session_.policy().selects(layer_)) {
        const std::int64_t observed = session_.options().num_observations;
        into.queries = copy_columns(std::max<std::int64_t>(0, num_rows() - observed), 0, q_elements_);
    }
}

template <class Ops>
void basic_machine<Ops>::project_qkv() {
    Ops& ops = session_.ops();
    const auto& weights = session_.model().layers()[static_cast<std::size_t>(layer_)];
    throw_if_failed(step_.enter(layer_, &hidden_rows_, 1));
    const uniprefill::batch_view rows = step_.rows();
    now().rows_in = rows.num_rows;

    ops.rms_norm(hidden(), weights.attention_norm.data(), config_.rms_epsilon, rows.num_rows, config_.hidden,
                 normed_.data());
    ops.multiply(weights.qkv, normed_.data(), rows.num_rows, qkv_.data());
    // q and k of a row lie side by side, so one call rotates both.
    ops.rope(qkv_.data(), qkv_elements_, config_.head_dim, config_.heads + config_.kv_heads, rows.num_rows,
             rows.positions, session_.rope());

    auto& ledger = session_.drops();
    throw_if_failed(ledger.append(ledger_step_, layer_, rows));
    throw_if_failed(ledger.cached_lens(ledger_step_, layer_, cached_lens_.data(),
                                       static_cast<std::int32_t>(cached_lens_.size())));
    for (std::int32_t r = 0; r < rows.num_requests; ++r) {
        const std::int64_t first = rows.cu_seqlens[r];
        const float* k = qkv_.data() + first * qkv_elements_ + q_elements_;
        session_.cache().write(layer_, plan_.ids()[static_cast<std::size_t>(r)],
                               cached_lens_[static_cast<std::size_t>(r)], k, k + kv_elements_,
                               rows.cu_seqlens[r + 1] - first, qkv_elements_);
    }
    if (left_ != nullptr) leave_trail();
}

template <class Ops>
void basic_machine<Ops>::decide() {
    decided_ = uniprefill::selection{};
    listed_ = false;
    const auto listing =
        lists_ ? lists_at(session_.options().lists, session_.options().list_rules, layer_) : std::nullopt;
    if (!session_.policy().selects(layer_) && !listing) {
        return;
    }
    if (session_.options().decide_at_end) {
        note_queries();
        return;
    }
    const uniprefill::batch_view rows = step_.rows();
    const bool by_query_block = listing && lists_->query_rows() > 0;
    const layer_lists::key_rows keys = entered_keys();
    if (!by_query_block || session_.policy().selects(layer_)) {
        look(keys);
    }
    uniprefill::batch_view entered = rows;
    entered.cached_lens = cached_lens_.data();
    if (listing && !by_query_block) {
        const auto rows_at = [&](std::int64_t column) {
            return uniprefill::head_rows<const float>{qkv_.data() + column, qkv_elements_,
                                                      config_.head_dim,     rows.num_rows,
                                                      config_.kv_heads,     config_.head_dim};
        };
        lists_->make(step_.masses().faults, entered, *listing, rows_at(q_elements_),
                     rows_at(q_elements_ + kv_elements_));
    }
    listed_ = listing.has_value();
    if ((listing && !by_query_block) || !decided_.identity) {
        count_look(rows);
    }
    const bool drops_now = !decided_.identity && !session_.options().decide_after_attention;
    if (!decided_.identity) {
        record(decided_, rows);
    }
    if (drops_now) {
        const auto queries = bytes_of(qkv_, qkv_elements_, q_elements_, rows.num_rows);
        throw_if_failed(uniprefill::compact(decided_, queries, queries, {}));
    }
    if (by_query_block) {
        list_by_query_block(*listing, keys, entered,
                            drops_now ? decided_
                                      : uniprefill::selection::keep_all(rows.num_requests, rows.num_segments,
                                                                        rows.num_rows,
                                                                        uniprefill::memory_space::host));
    }
    if (drops_now) {
        leave(decided_);
    }
}

/// Lists by query block, from the queries that are kept, packed.
template <class Ops>
void basic_machine<Ops>::list_by_query_block(const uniprefill::list_options<>& listing,
                                             const layer_lists::key_rows& keys,
                                             const uniprefill::batch_view& entered,
                                             const uniprefill::selection& kept) {
    const uniprefill::head_rows<const float> queries{qkv_.data(),     qkv_elements_, config_.head_dim,
                                                     kept.kept_bound, config_.heads, config_.head_dim};
    lists_->make(queries, keys, entered, kept, listing);
    const std::int32_t query_rows = lists_->query_rows();
    const std::int32_t sample = session_.options().list_sampling->sample;
    for (std::int32_t s = 0; s < entered.num_segments; ++s) {
        if (!may_look_at(entered, s)) continue; // everything is read there
        const std::int32_t before =
            entered.cached_len(entered.request_of(s)) - entered.cu_seqlens[entered.request_of(s)];
        const std::int32_t begin = kept.segment_begin(entered, s), end = kept.segment_end(entered, s);
        for (std::int32_t first = begin; first < end; first += query_rows) {
            for (std::int32_t i = std::min(first + query_rows, end) - 1; i >= first; i -= sample) {
                now().estimator_pairs += before + (kept.identity ? i : kept.kept_to_old[i]) + 1;
            }
        }
    }
}

/// The keys of the rows that have entered the layer, and those that it holds; valid until the next call.
template <class Ops>
layer_lists::key_rows basic_machine<Ops>::entered_keys() {
    const uniprefill::batch_view rows = step_.rows();
    const std::int32_t page_tokens = session_.cache().page_tokens();
    std::int32_t most_pages = 0;
    for (const std::int32_t rows_cached : cached_lens_) {
        most_pages = std::max(most_pages, uniprefill::num_blocks(rows_cached, page_tokens));
    }
    pages_.assign(plan_.ids().size() * static_cast<std::size_t>(most_pages), nullptr);
    for (std::size_t r = 0; r < plan_.ids().size(); ++r) {
        const kv_sequence held = session_.cache().rows(layer_, plan_.ids()[r]);
        for (std::int32_t i = 0; i < uniprefill::num_blocks(cached_lens_[r], page_tokens); ++i) {
            const std::int64_t slot = held.slot_of(std::int64_t{i} * page_tokens, page_tokens);
            pages_[r * static_cast<std::size_t>(most_pages) + static_cast<std::size_t>(i)] =
                held.k + slot * held.row_stride;
        }
    }
    uniprefill::page_pointer_cache<float> cache;
    cache.pages = pages_.data();
    cache.table_stride = most_pages;
    cache.page_tokens = page_tokens;
    cache.token_stride = kv_elements_;
    cache.head_stride = config_.head_dim;
    const uniprefill::head_rows<const float> k{qkv_.data() + q_elements_, qkv_elements_,
                                               config_.head_dim,          rows.num_rows,
                                               config_.kv_heads,          config_.head_dim};
    return {k, cache};
}

/// The library's decision, and masses by head where lists want them, from the rows' q and k.
template <class Ops>
void basic_machine<Ops>::look(const layer_lists::key_rows& keys) {
    const uniprefill::batch_view rows = step_.rows();
    const uniprefill::head_rows<const float> q{qkv_.data(),   qkv_elements_, config_.head_dim,
                                               rows.num_rows, config_.heads, config_.head_dim};
    throw_if_failed(
        step_.decide(layer_, q, keys, uniprefill::attention_params{}, cached_lens_.data(), decided_));
}

/// Queries of prompt rows, as a selecting layer has them.
template <class Ops>
void basic_machine<Ops>::note_queries() {
    const uniprefill::batch_view rows = step_.rows();
    for (std::int32_t r = 0; r < rows.num_requests; ++r) {
        if (rows.tags[r] == uniprefill::request_tag::prefill ||
            rows.tags[r] == uniprefill::request_tag::chunk) {
            last_queries_.append(session_.selecting_index(layer_), static_cast<std::size_t>(r),
                                 qkv_.data() + rows.cu_seqlens[r] * qkv_elements_,
                                 rows.cu_seqlens[r + 1] - rows.cu_seqlens[r], qkv_elements_);
        }
    }
}

template <class Ops>
void basic_machine<Ops>::keep_queries() {
    for (std::size_t layer = 0; layer < session_.options().selecting.size(); ++layer) {
        for (std::size_t r = 0; r < plan_.ids().size(); ++r) {
            const std::vector<float>& tail = last_queries_.of(layer, r);
            session_.last_queries().append(layer, static_cast<std::size_t>(plan_.ids()[r]), tail.data(),
                                           static_cast<std::int64_t>(tail.size()) / q_elements_, q_elements_);
        }
    }
}

template <class Ops>
void basic_machine<Ops>::leave(const uniprefill::selection& decided) {
    throw_if_failed(step_.leave(decided, &hidden_rows_, 1));
}

template <class Ops>
void basic_machine<Ops>::record(const uniprefill::selection& decided, const uniprefill::batch_view& before) {
    layer_record& into = now();
    into.selected = true;
    into.outcomes.assign(decided.outcomes, decided.outcomes + decided.num_segments);
    const uniprefill::row_map map = step_.map();
    for (std::int32_t row = 0; row < before.num_rows; ++row) {
        const std::int32_t original = map.identity ? row : map.kept_to_old[row];
        dropped_at_[static_cast<std::size_t>(original)] = decided.old_to_kept[row] < 0 ? layer_ : -1;
    }
    double total = 0;
    for (std::int32_t s = 0; s < before.num_segments; ++s) {
        if (before.request_of(s) == 0) {
            total += record_blocks(s, before, decided);
        }
    }
    for (double& mass : into.block_mass) {
        mass = total > 0 ? mass / total : 0;
    }
}

/// What the look at the rows that entered the layer cost.
template <class Ops>
void basic_machine<Ops>::count_look(const uniprefill::batch_view& before) {
    for (std::int32_t s = 0; s < before.num_segments; ++s) {
        const std::int32_t request = before.request_of(s);
        const std::int64_t context =
            std::int64_t{cached_lens_[static_cast<std::size_t>(request)]} - before.cu_seqlens[request];
        now().estimator_pairs += pairs_of_look(before, s, context, session_.options().num_observations);
    }
}

template <class Ops>
double basic_machine<Ops>::record_blocks(std::int32_t segment, const uniprefill::batch_view& before,
                                         const uniprefill::selection& decided) {
    layer_record& into = now();
    const uniprefill::mass_view& masses = step_.masses();
    const std::int32_t first = before.segment_begin(segment);
    std::int64_t block = uniprefill::block_offset(segment, first, decided.block_rows);
    double total = 0;
    for (std::int32_t begin = first; begin < before.segment_end(segment);
         begin += decided.block_rows, ++block) {
        const std::int32_t end = std::min(begin + decided.block_rows, before.segment_end(segment));
        bool forced = true;
        for (std::int32_t row = begin; row < end; ++row) {
            forced = forced && uniprefill::is_forced_row(before, segment, row);
        }
        into.block_mass.push_back(static_cast<double>(masses.free[block]) +
                                  static_cast<double>(masses.forced[block]));
        into.block_first_position.push_back(before.positions[begin]);
        into.block_kept.push_back(decided.keeps_block(block));
        into.block_forced.push_back(forced);
        total += into.block_mass.back();
    }
    return total;
}

/// Slots of a sequence's first rows, null where row i is at slot i; valid until the next call.
template <class Ops>
const std::int64_t* basic_machine<Ops>::slots_of(const kv_sequence& kv, std::int32_t rows) {
    if (kv.pages == nullptr) {
        return nullptr;
    }
    const std::int32_t page_tokens = session_.cache().page_tokens();
    key_slots_.resize(static_cast<std::size_t>(rows));
    for (std::int32_t row = 0; row < rows; ++row) {
        key_slots_[static_cast<std::size_t>(row)] = kv.slot_of(row, page_tokens);
    }
    return key_slots_.data();
}

template <class Ops>
void basic_machine<Ops>::attend() {
    const uniprefill::batch_view rows = step_.rows();
    for (std::int32_t r = 0; r < rows.num_requests; ++r) {
        uniprefill::held_rows held;
        throw_if_failed(session_.drops().rows_of(plan_.ids()[static_cast<std::size_t>(r)], layer_, held));
        key_positions_.resize(static_cast<std::size_t>(held.length()));
        held.copy_positions(0, key_positions_.data(), held.length());
        if (!listed_) {
            attend_rows(r, rows.cu_seqlens[r], rows.cu_seqlens[r + 1], held.length(), {});
            continue;
        }
        for (std::int32_t s = 0; s < rows.num_segments; ++s) {
            if (rows.request_of(s) != r) {
                continue;
            }
            const std::int32_t begin = rows.segment_begin(s), end = rows.segment_end(s);
            const std::int32_t query_rows = lists_->query_rows();
            if (query_rows == 0) {
                attend_rows(r, begin, end, lists_->keys_of_segment(s), lists_->of_segment(s));
                continue;
            }
            for (std::int32_t i = 0; begin + i * query_rows < end; ++i) {
                attend_rows(r, begin + i * query_rows, std::min(begin + (i + 1) * query_rows, end),
                            lists_->keys_of_segment(s), lists_->of_query_block(s, begin, i));
            }
        }
    }
    if (session_.options().decide_after_attention && !decided_.identity) {
        const auto outputs = bytes_of(attended_, q_elements_, q_elements_, rows.num_rows);
        throw_if_failed(uniprefill::compact(decided_, outputs, outputs, {}));
        leave(decided_);
    }
    now().rows_kept = num_rows();
}

/// Rows [@p first, @p end) of a request over the first @p keys keys of its layer.
template <class Ops>
void basic_machine<Ops>::attend_rows(std::int32_t request, std::int64_t first, std::int64_t end,
                                     std::int32_t keys, const typename Ops::key_lists& lists) {
    const kv_sequence kv = session_.cache().rows(layer_, plan_.ids()[static_cast<std::size_t>(request)]);
    typename Ops::attention_call call;
    call.query_heads = config_.heads;
    call.kv_heads = config_.kv_heads;
    call.head_dim = config_.head_dim;
    call.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
    call.query_rows = end - first;
    call.query_positions = step_.rows().positions + first;
    call.queries = qkv_.data() + first * qkv_elements_;
    call.query_row_stride = qkv_elements_;
    call.query_head_stride = config_.head_dim;
    call.key_rows = keys;
    call.key_positions = key_positions_.data();
    const std::int64_t* slots = slots_of(kv, keys);
    call.keys = {kv.k, uniprefill::element_type::f32, kv.row_stride, kv.head_stride, slots};
    call.values = {kv.v, uniprefill::element_type::f32, kv.row_stride, kv.head_stride, slots};
    call.lists = lists;
    call.out = attended_.data() + first * q_elements_;
    call.out_row_stride = q_elements_;
    call.out_head_stride = config_.head_dim;
    session_.ops().attend(call);
    now().pairs += Ops::attention_pairs(call) / config_.heads;
}

template <class Ops>
void basic_machine<Ops>::project_output() {
    const auto& weights = session_.model().layers()[static_cast<std::size_t>(layer_)];
    session_.ops().multiply_add(weights.output, attended_.data(), num_rows(), hidden());
}

template <class Ops>
void basic_machine<Ops>::gate_up() {
    const auto& weights = session_.model().layers()[static_cast<std::size_t>(layer_)];
    Ops& ops = session_.ops();
    ops.rms_norm(hidden(), weights.ffn_norm.data(), config_.rms_epsilon, num_rows(), config_.hidden,
                 normed_.data());
    ops.multiply(weights.gate_up, normed_.data(), num_rows(), gate_up_.data());
    ops.swiglu(gate_up_.data(), num_rows(), config_.ffn, activated_.data());
}

template <class Ops>
void basic_machine<Ops>::down() {
    const auto& weights = session_.model().layers()[static_cast<std::size_t>(layer_)];
    session_.ops().multiply_add(weights.down, activated_.data(), num_rows(), hidden());
}

template <class Ops>
void basic_machine<Ops>::project_logits() {
    const auto wanted = static_cast<std::int64_t>(plan_.logits_rows().size());
    if (wanted == 0) {
        return;
    }
    cpu::activations rows = rows_of(wanted, config_.hidden);
    const uniprefill::row_map map = step_.map();
    for (std::int64_t i = 0; i < wanted; ++i) {
        std::int64_t row = plan_.logits_rows()[static_cast<std::size_t>(i)];
        if (!map.identity) { // rows asked for are forced, so they are there
            row = std::lower_bound(map.kept_to_old, map.kept_to_old + map.num_kept, row) - map.kept_to_old;
        }
        std::copy_n(hidden() + row * config_.hidden, config_.hidden, rows.data() + i * config_.hidden);
    }
    Ops& ops = session_.ops();
    ops.rms_norm(rows.data(), session_.model().output_norm().data(), config_.rms_epsilon, wanted,
                 config_.hidden, rows.data());
    logits_.resize(static_cast<std::size_t>(wanted * config_.vocab));
    ops.multiply(session_.model().head(), rows.data(), wanted, logits_.data());
}

template class basic_machine<cpu_ops>;

} // namespace engine
