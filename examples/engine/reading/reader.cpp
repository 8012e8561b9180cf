// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/reading/reader.hpp"

#include "engine/model/end_decision.hpp"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <utility>

namespace engine {

session_options session_under(const policy& policy) {
    session_options options;
    options.block_rows = policy.block_rows;
    options.num_observations = policy.num_observations;
    options.propagation = policy.propagation;
    options.lists = policy.lists;
    options.list_means = policy.list_means;
    options.list_sampling = policy.list_sampling;
    for (const layer_rule& rule : policy.rules) {
        options.selecting.push_back({rule.layer, rule.rule, nullptr});
    }
    for (const layer_rule& rule : policy.list_rules) {
        options.list_rules.push_back({rule.layer, rule.rule, nullptr});
    }
    return options;
}

uniprefill::request_options request_under(const policy& policy) {
    uniprefill::request_options options;
    options.sink = policy.sink;
    options.tail = policy.tail;
    options.min_length = policy.min_length;
    return options;
}

namespace {

session_options options_for(const policy& policy, std::int32_t prompt, std::int32_t following,
                            const reading_options& reading) {
    session_options options = session_under(policy);
    options.max_segments = static_cast<std::int32_t>(span_ends(policy, prompt).size());
    options.max_step_rows = std::max(prompt, following);
    options.max_tokens = prompt + following;
    options.decide_at_end = reading.decide_at_end;
    return options;
}

} // namespace

std::unique_ptr<prompt_reader> loaded_model::reader_of(const policy& policy, std::int32_t prompt,
                                                       std::int32_t following) {
    return std::make_unique<reader>(*this, policy, prompt, following);
}

reader::reader(loaded_model& model, const policy& policy, std::int32_t prompt, std::int32_t following,
               const reading_options& reading)
    : policy_(policy)
    , reading_(reading)
    , prompt_(prompt)
    , session_(model.weights(), model.ops(), options_for(policy, prompt, following, reading)) {
    session_.admit(0);
}

planned_request reader::planned(uniprefill::request_tag tag, const std::vector<std::int32_t>& tokens) const {
    planned_request request;
    request.tag = tag;
    request.first_position = length_;
    request.tokens = tokens;
    request.options = request_under(policy_);
    return request;
}

void reader::run(planned_request request, const progress_call& progress) {
    const auto rows = static_cast<std::int32_t>(request.tokens.size());
    const bool of_prompt =
        request.tag == uniprefill::request_tag::prefill || request.tag == uniprefill::request_tag::chunk;
    const step_plan plan({std::move(request)});
    cpu_machine pass(session_, plan);
    while (pass.advance()) {
        if (progress) progress(static_cast<double>(pass.layer()) / static_cast<double>(pass.layers().size()));
    }
    logits_ = pass.logits();
    length_ += rows;
    if (of_prompt) note_layers(pass);
}

void reader::note_layers(const cpu_machine& pass) {
    dropped_at_.insert(dropped_at_.end(), pass.dropped_at().begin(), pass.dropped_at().end());
    if (layers_.empty()) {
        layers_ = pass.layers();
        return;
    }
    for (std::size_t layer = 0; layer < layers_.size(); ++layer) {
        layer_record& sum = layers_[layer];
        const layer_record& more = pass.layers()[layer];
        layer_record both;
        both.rows_in = sum.rows_in + more.rows_in;
        both.rows_kept = sum.rows_kept + more.rows_kept;
        both.pairs = sum.pairs + more.pairs;
        both.seconds = sum.seconds + more.seconds;
        both.estimator_pairs = sum.estimator_pairs + more.estimator_pairs;
        sum = std::move(both);
    }
}

void reader::prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress) {
    using uniprefill::request_tag;
    const auto clock = [] { return std::chrono::steady_clock::now(); };
    const auto start = clock();
    const auto rows = static_cast<std::int32_t>(tokens.size());
    const std::vector<std::int32_t> ends = span_ends(policy_, rows);
    if (reading_.in_chunks) {
        for (const std::int32_t end : ends) {
            const request_tag tag = length_ == 0 && end == rows ? request_tag::prefill : request_tag::chunk;
            planned_request chunk = planned(tag, {tokens.begin() + length_, tokens.begin() + end});
            if (end == rows) chunk.logits_rows = {end - length_ - 1};
            run(std::move(chunk), progress);
        }
    } else {
        planned_request whole = planned(request_tag::prefill, tokens);
        whole.span_ends = ends;
        whole.logits_rows = {rows - 1};
        run(std::move(whole), progress);
    }
    const auto first_logits = clock();
    if (reading_.decide_at_end) {
        planned_request whole = planned(request_tag::prefill, tokens);
        whole.first_position = 0;
        whole.logits_rows = {rows - 1};
        decide_at_end(session_, whole);
    }
    prefill_seconds_ = std::chrono::duration<double>(first_logits - start).count();
    decision_seconds_ = std::chrono::duration<double>(clock() - first_logits).count();
}

void reader::feed_all(uniprefill::request_tag tag, const std::vector<std::int32_t>& tokens) {
    planned_request request = planned(tag, tokens);
    request.logits_rows.resize(tokens.size());
    std::iota(request.logits_rows.begin(), request.logits_rows.end(), 0);
    run(std::move(request), {});
}

void reader::feed(const std::vector<std::int32_t>& tokens) {
    feed_all(uniprefill::request_tag::verify, tokens);
}

void reader::feed_one(std::int32_t token) {
    feed_all(uniprefill::request_tag::decode, {token});
}

void reader::back_to_prompt() {
    uniprefill::throw_if_failed(session_.drops().rollback(0, prompt_));
    length_ = prompt_;
}

double share_of_rows(const std::vector<layer_record>& layers, std::int32_t tokens) {
    double rows = 0;
    for (const layer_record& layer : layers) {
        rows += static_cast<double>(layer.rows_kept);
    }
    return rows / static_cast<double>(tokens) / static_cast<double>(layers.size());
}

namespace {

double share_of_dense_pairs(const std::vector<layer_record>& layers, std::int32_t tokens,
                            std::int64_t layer_record::*pairs) {
    double sum = 0;
    for (const layer_record& layer : layers) {
        sum += static_cast<double>(layer.*pairs);
    }
    const double n = tokens;
    return sum / static_cast<double>(layers.size()) / (n * (n + 1) / 2);
}

} // namespace

double share_of_pairs(const std::vector<layer_record>& layers, std::int32_t tokens) {
    return share_of_dense_pairs(layers, tokens, &layer_record::pairs);
}

double reader::held_share() const {
    double rows = 0;
    uniprefill::held_rows held;
    const std::int32_t layers = session_.model().config().layers;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        uniprefill::throw_if_failed(session_.drops().rows_of(0, layer, held));
        rows += held.length();
    }
    return rows / layers / held.num_tokens();
}

double share_of_estimator_pairs(const std::vector<layer_record>& layers, std::int32_t tokens) {
    return share_of_dense_pairs(layers, tokens, &layer_record::estimator_pairs);
}

} // namespace engine
