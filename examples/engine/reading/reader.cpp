// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/reading/reader.hpp"

#include <algorithm>
#include <chrono>

namespace engine {

session_options session_under(const policy& policy) {
    session_options options;
    options.block_rows = policy.block_rows;
    options.num_observations = policy.num_observations;
    options.propagation = policy.propagation;
    for (const layer_rule& rule : policy.rules) {
        options.selecting.push_back({rule.layer, rule.rule, nullptr});
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
                            bool decide_after_attention) {
    session_options options = session_under(policy);
    options.max_segments = static_cast<std::int32_t>(span_ends(policy, prompt).size());
    options.max_step_rows = std::max(prompt, following);
    options.max_tokens = prompt + following;
    options.decide_after_attention = decide_after_attention;
    return options;
}

} // namespace

reader::reader(loaded_model& model, const policy& policy, std::int32_t prompt, std::int32_t following,
               bool decide_after_attention)
    : policy_(policy)
    , prompt_(prompt)
    , session_(model.weights(), model.ops(), options_for(policy, prompt, following, decide_after_attention)) {
    session_.admit(0);
}

void reader::step(uniprefill::request_tag tag, const std::vector<std::int32_t>& tokens, bool every_row,
                  const progress_call& progress) {
    planned_request request;
    request.tag = tag;
    request.first_position = length_;
    request.tokens = tokens;
    request.options = request_under(policy_);
    const auto rows = static_cast<std::int32_t>(tokens.size());
    if (tag == uniprefill::request_tag::prefill) {
        request.span_ends = span_ends(policy_, rows);
    }
    for (std::int32_t row = every_row ? 0 : rows - 1; row < rows; ++row) {
        request.logits_rows.push_back(row);
    }
    const step_plan plan({std::move(request)});
    cpu_machine pass(session_, plan);
    while (pass.advance()) {
        if (progress) progress(static_cast<double>(pass.layer()) / static_cast<double>(pass.layers().size()));
    }
    logits_ = pass.logits();
    length_ += rows;
    if (tag == uniprefill::request_tag::prefill) {
        layers_ = pass.layers();
        dropped_at_ = pass.dropped_at();
    }
}

void reader::prefill(const std::vector<std::int32_t>& tokens, const progress_call& progress) {
    const auto start = std::chrono::steady_clock::now();
    step(uniprefill::request_tag::prefill, tokens, false, progress);
    prefill_seconds_ = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void reader::feed(const std::vector<std::int32_t>& tokens) {
    step(uniprefill::request_tag::verify, tokens, true, {});
}

void reader::feed_one(std::int32_t token) {
    step(uniprefill::request_tag::decode, {token}, true, {});
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

double share_of_estimator_pairs(const std::vector<layer_record>& layers, std::int32_t tokens) {
    return share_of_dense_pairs(layers, tokens, &layer_record::estimator_pairs);
}

} // namespace engine
