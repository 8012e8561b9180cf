// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/serving/server.hpp"

#include "engine/app/sampling.hpp"
#include "engine/error.hpp"

#include <algorithm>
#include <string>
#include <utility>

namespace engine {

using uniprefill::request_tag;
using uniprefill::throw_if_failed;

namespace {

constexpr std::int32_t page_tokens = 16;

session_options session_for(const policy& policy, const server_options& options) {
    session_options made = session_under(policy);
    made.max_requests = options.slots + 1; // the prefix cache has one of its own
    made.max_step_rows = options.budget + options.slots;
    // A request has at most one span in a step that is shorter than the policy's.
    made.max_segments = made.max_requests + (policy.span > 0 ? options.budget / policy.span : 0);
    made.max_tokens = options.max_tokens;
    return made;
}

std::unique_ptr<paged_kv_store> store_for(const llama_config& config, const server_options& options) {
    paged_kv_limits limits;
    limits.layers = config.layers;
    limits.requests = options.slots + 1;
    limits.kv_heads = config.kv_heads;
    limits.head_dim = config.head_dim;
    limits.max_tokens = options.max_tokens;
    limits.pages = options.pages;
    limits.page_tokens = page_tokens;
    return std::make_unique<paged_kv_store>(limits);
}

const server_options& checked(const server_options& options, const policy& policy) {
    if (policy.span > 0 && options.budget < policy.span + policy.num_observations - 1) {
        throw error("prefill budget",
                    "at least span + n - 1 = " + std::to_string(policy.span + policy.num_observations - 1) +
                        " rows, the longest span",
                    std::to_string(options.budget));
    }
    return options;
}

} // namespace

server::server(loaded_model& model, const policy& policy, const server_options& options)
    : server(model, policy, checked(options, policy), store_for(model.config(), options)) {}

server::server(loaded_model& model, const policy& policy, const server_options& options,
               std::unique_ptr<paged_kv_store> pages)
    : model_(model)
    , policy_(policy)
    , options_(options)
    , layers_(model.config().layers)
    , pages_(pages.get())
    , session_(model.weights(), model.ops(), session_for(policy, options), std::move(pages)) {
    for (std::int32_t slot = options.slots; slot-- > 0;) {
        free_slots_.push_back(slot);
    }
    if (options.prefix_cache) prefixes_.emplace(session_, *pages_, options.slots);
}

std::int32_t server::submit(const serving_request& asked) {
    request_state added;
    added.id = num_requests();
    added.tokens = asked.prompt;
    added.prompt = added.num_tokens();
    added.new_tokens = asked.new_tokens;
    const std::string name = "request " + std::to_string(added.id);
    if (added.prompt < 1) throw error(name, "a prompt of at least one token", "none");
    if (asked.new_tokens < 1) {
        throw error(name, "at least one new token", std::to_string(asked.new_tokens));
    }
    const std::int64_t all = std::int64_t{added.prompt} + asked.new_tokens;
    if (all > options_.max_tokens) {
        throw error(name, "at most " + std::to_string(options_.max_tokens) + " tokens with those asked for",
                    std::to_string(all));
    }
    added.span_ends = span_ends(policy_, added.prompt);
    std::int32_t longest = 0;
    std::int32_t begin = 0;
    for (const std::int32_t end : added.span_ends) {
        longest = std::max(longest, end - begin);
        begin = end;
    }
    if (longest > options_.budget) {
        throw error(name, "spans of at most " + std::to_string(options_.budget) + " rows, the budget",
                    std::to_string(longest));
    }
    // One page more in each layer: the copy of a partly filled one that the prefix cache has too.
    const std::int64_t pages =
        (uniprefill::num_blocks(static_cast<std::int32_t>(all), page_tokens) + 1) * std::int64_t{layers_};
    if (pages > options_.pages) {
        throw error(name, "at most the pool's " + std::to_string(options_.pages) + " pages",
                    std::to_string(pages));
    }
    requests_.push_back(std::move(added));
    waiting_.push_back(requests_.back().id);
    return requests_.back().id;
}

// The schedule -------------------------------------------------------------------------------------------

std::int32_t server::held(const request_state& of, std::int32_t layer) const {
    uniprefill::held_rows rows;
    throw_if_failed(session_.drops().rows_of(of.slot, layer, rows));
    return rows.length();
}

/// What the request would run next: whole spans of its prompt, tokens that it had generated before it was
/// preempted, or the last token that it has. Nothing where the budget doesn't take a span.
std::optional<server::work> server::next_work(const request_state& of, std::int32_t budget) const {
    work next;
    next.request = of.id;
    if (of.computed < of.prompt) {
        for (const std::int32_t end : of.span_ends) {
            if (end <= of.computed) continue;
            if (end - of.computed > budget) break;
            next.span_ends.push_back(end - of.computed);
        }
        if (next.span_ends.empty()) return std::nullopt;
        next.rows = next.span_ends.back();
        const bool whole = next.rows == of.prompt;
        next.tag = whole ? request_tag::prefill : request_tag::chunk;
    } else {
        const std::int32_t pending = of.num_tokens() - of.computed;
        next.tag = pending == 1 ? request_tag::decode : request_tag::verify;
        next.rows = pending == 1 ? 1 : std::min(pending, budget);
        if (next.rows == 0) return std::nullopt;
    }
    // The prompt's last row is asked for each time it runs: rows asked for are never dropped.
    const std::int32_t end = of.computed + next.rows;
    next.wants_logits = end == of.prompt || end == of.num_tokens();
    return next;
}

std::vector<server::work> server::schedule() {
    std::vector<work> planned;
    std::int32_t budget = options_.budget;
    const std::int64_t preemptions = counts_.preemptions;
    const auto plan = [&](work next) {
        if (next.tag != request_tag::decode) budget -= next.rows;
        planned.push_back(std::move(next));
    };
    // Those that make room are behind the one that needs it, so nothing planned is taken away.
    std::size_t turn = 0;
    while (turn < running_.size()) {
        const std::int32_t id = running_[turn++];
        std::optional<work> next = next_work(at(id), budget);
        if (!next) continue;
        if (!make_room(id, pages_needed(at(id), next->rows))) break; // it made room for others itself
        reserve(at(id), next->rows);
        plan(std::move(*next));
    }
    while (counts_.preemptions == preemptions && !waiting_.empty() && !free_slots_.empty()) {
        std::optional<work> next = start(waiting_.front(), budget);
        if (!next) break;
        waiting_.pop_front();
        plan(std::move(*next));
    }
    return planned;
}

/// Gives a waiting request a slot and pages for its next rows; nothing has changed where there are too few.
std::optional<server::work> server::start(std::int32_t id, std::int32_t budget) {
    request_state& starting = at(id);
    starting.slot = free_slots_.back();
    session_.admit(starting.slot);
    const bool resumed = !starting.swapped.empty();
    if (resumed) {
        throw_if_failed(session_.drops().restore(starting.slot, starting.swapped.ledger.data(),
                                                 starting.swapped.ledger.size()));
    } else if (prefixes_) {
        starting.computed = prefixes_->look_up(starting.slot, starting.tokens, starting.span_ends);
    }
    std::optional<work> next = next_work(starting, budget);
    if (!next || !find_pages(pages_needed(starting, next->rows))) {
        session_.release(starting.slot);
        starting.slot = -1;
        if (!resumed) starting.computed = 0;
        return std::nullopt;
    }
    free_slots_.pop_back();
    reserve(starting, next->rows);
    if (resumed) {
        swap_in(starting);
    } else {
        note_start(starting);
    }
    running_.push_back(id); // those that run came before those that wait
    return next;
}

void server::note_start(request_state& starting) {
    if (starting.computed > 0) {
        ++counts_.prefix_hits;
        counts_.prefix_tokens += starting.computed;
    }
    if (starting.preemptions == 0) {
        starting.reused = starting.computed;
    } else {
        counts_.recomputed_rows += std::max(0, starting.computed_before - starting.computed);
    }
}

/// Free pages, if need be from the prefix cache.
bool server::find_pages(std::int32_t pages) {
    if (pool().num_free() + cached_pages() < pages) return false;
    if (prefixes_) prefixes_->evict(pages);
    return true;
}

/// The same, if need be from the requests that came last. @return false where the request itself had to go
bool server::make_room(std::int32_t id, std::int32_t pages) {
    while (!find_pages(pages)) {
        const std::int32_t last = running_.back();
        preempt(last);
        if (last == id) return false;
    }
    return true;
}

std::int32_t server::pages_needed(const request_state& of, std::int32_t rows) const {
    std::int32_t pages = 0;
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
        pages += pages_->pages_needed(layer, of.slot, held(of, layer), rows);
    }
    return pages;
}

void server::reserve(const request_state& of, std::int32_t rows) {
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
        counts_.copied_pages += pages_->reserve(layer, of.slot, held(of, layer), rows);
    }
}

// Making room --------------------------------------------------------------------------------------------

void server::preempt(std::int32_t id) {
    request_state& leaving = at(id);
    ++counts_.preemptions;
    ++leaving.preemptions;
    leaving.computed_before = leaving.computed;
    if (options_.preemption == preemption::swap) {
        swap_out(leaving);
    } else {
        leaving.computed = 0;
    }
    leave(leaving);
    waiting_.push_front(id); // it came before those that wait
}

void server::leave(request_state& leaving) {
    session_.release(leaving.slot);
    free_slots_.push_back(leaving.slot);
    leaving.slot = -1;
    running_.erase(std::find(running_.begin(), running_.end(), leaving.id));
}

void server::swap_out(request_state& leaving) {
    swapped_request& to = leaving.swapped;
    std::size_t bytes = 0;
    throw_if_failed(session_.drops().saved_bytes(leaving.slot, bytes));
    to.ledger.resize(bytes);
    throw_if_failed(session_.drops().save(leaving.slot, to.ledger.data(), bytes));
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
        pages_->copy_out(layer, leaving.slot, held(leaving, layer), to.rows);
    }
}

void server::swap_in(request_state& back) {
    const float* from = back.swapped.rows.data();
    for (std::int32_t layer = 0; layer < layers_; ++layer) {
        const std::int32_t rows = held(back, layer);
        from = pages_->copy_in(layer, back.slot, rows, from);
        counts_.swapped_pages += uniprefill::num_blocks(rows, page_tokens);
    }
    back.swapped = {};
}

// A step -------------------------------------------------------------------------------------------------

step_outcome server::step() {
    const std::vector<work> planned = schedule();
    std::vector<planned_request> requests;
    for (const work& part : planned) {
        const request_state& of = at(part.request);
        planned_request one;
        one.id = of.slot;
        one.tag = part.tag;
        one.first_position = of.computed;
        one.tokens.assign(of.tokens.begin() + of.computed, of.tokens.begin() + of.computed + part.rows);
        one.span_ends = part.span_ends;
        one.options = request_under(policy_);
        if (part.wants_logits) one.logits_rows = {part.rows - 1};
        requests.push_back(std::move(one));
    }
    const step_plan plan(std::move(requests));
    cpu_machine machine(session_, plan);
    machine.run();

    hand_back(planned);
    step_outcome outcome;
    const float* logits = machine.logits().data();
    for (const work& part : planned) {
        request_state& of = at(part.request);
        const std::int32_t before = of.computed;
        of.computed += part.rows;
        count(part, outcome);
        if (prefixes_) prefixes_->keep(of.slot, of.tokens, of.span_ends, before, of.computed);
        if (of.computed == of.prompt) note_prompt_end(of);
        if (of.computed == of.num_tokens()) emit(of, logits, outcome);
        if (part.wants_logits) logits += model_.config().vocab;
    }
    ++counts_.steps;
    if (outcome.prompt_rows > 0 && outcome.decode_rows > 0) ++counts_.mixed_steps;
    return outcome;
}

void server::count(const work& done, step_outcome& into) const {
    switch (done.tag) {
    case request_tag::prefill:
    case request_tag::chunk:
        into.prompt_rows += done.rows;
        break;
    case request_tag::decode:
        into.decode_rows += done.rows;
        break;
    case request_tag::verify:
        into.repeated_rows += done.rows;
        break;
    }
}

/// Pages were taken for every row in every layer; those of rows that were dropped go back.
void server::hand_back(const std::vector<work>& done) {
    std::vector<std::int32_t> slots;
    slots.reserve(done.size());
    for (const work& part : done) {
        slots.push_back(at(part.request).slot);
    }
    std::vector<std::int32_t> pages(static_cast<std::size_t>(pool().num_taken()));
    uniprefill::page_rule rule;
    rule.page_tokens = page_tokens;
    std::int32_t count = 0;
    throw_if_failed(session_.drops().hand_back_pages(
        slots.data(), static_cast<std::int32_t>(slots.size()), session_.drops().every_layer(), rule,
        pages_->tables(), pages.data(), static_cast<std::int32_t>(pages.size()), count));
    for (std::int32_t i = 0; i < count; ++i) {
        pages_->pool().give_back(pages[static_cast<std::size_t>(i)]);
    }
    counts_.pages_handed_back += count;
}

void server::note_prompt_end(request_state& of) {
    of.dropped = of.prompt - held(of, layers_ - 1);
    const uniprefill::page_usage usage = usage_of(of);
    of.pages = usage.pages;
    of.dense_pages = usage.dense_pages;
}

uniprefill::page_usage server::usage_of(const request_state& of) const {
    uniprefill::page_rule rule;
    rule.page_tokens = page_tokens;
    uniprefill::page_usage usage;
    throw_if_failed(session_.drops().pages_of(of.slot, session_.drops().every_layer(), rule, usage));
    return usage;
}

void server::emit(request_state& of, const float* logits, step_outcome& into) {
    const std::int32_t token = greedy(logits, model_.config().vocab);
    step_outcome::emitted out{of.id, !model_.words().ends_generation(token), false};
    if (out.token) of.tokens.push_back(token);
    if (!out.token || of.generated() == of.new_tokens) {
        out.finished = of.finished = true;
        leave(of);
    }
    into.outputs.push_back(out);
}

// Figures ------------------------------------------------------------------------------------------------

std::int64_t server::dense_pages() const {
    std::int64_t pages = 0;
    for (const std::int32_t id : running_) {
        pages += usage_of(request(id)).dense_pages;
    }
    return pages;
}

server_counts server::counts() const {
    server_counts made = counts_;
    if (prefixes_) {
        made.prefix_evictions = prefixes_->evictions();
        made.prefix_refusals = prefixes_->refusals();
    }
    return made;
}

void server::forget_prefixes() {
    if (prefixes_) prefixes_->evict(pool().size());
}

} // namespace engine
