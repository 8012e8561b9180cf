// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/trial.hpp"

#include "engine/app/quality.hpp"
#include "engine/reading/reader.hpp"

#include <algorithm>
#include <numeric>
#include <utility>

namespace engine::calibration {

namespace {

planned_request planned(uniprefill::request_tag tag, const policy& under, std::int32_t first,
                        const std::vector<std::int32_t>& tokens) {
    planned_request request;
    request.tag = tag;
    request.first_position = first;
    request.tokens = tokens;
    request.options = request_under(under);
    return request;
}

} // namespace

trial::trial(const cpu_weights& weights, cpu_ops& ops, policy base, std::vector<window> windows,
             const cost_model& cost, std::function<bool()> go_on, std::size_t memory)
    : weights_(weights)
    , ops_(ops)
    , base_(std::move(base))
    , windows_(std::move(windows))
    , cost_(cost)
    , go_on_(std::move(go_on))
    , memory_(memory)
    , adopted_(dense_choice(weights.config().layers))
    , trails_(windows_.size()) {}

trial::pass trial::read(std::size_t window, const choice& chosen, trail* left) {
    const auto& [begin, prompt, fed] = windows_[window];
    const policy under = policy_of(chosen, base_);
    const auto rows = static_cast<std::int32_t>(prompt.size());
    const auto following = static_cast<std::int32_t>(fed.size());
    session_options options = session_under(under);
    options.max_step_rows = std::max(rows, following);
    options.max_tokens = rows + following;
    cpu_session session(weights_, ops_, options);
    session.admit(0);

    pass made;
    {
        planned_request whole = planned(uniprefill::request_tag::prefill, under, 0, prompt);
        whole.span_ends = {rows};
        whole.logits_rows = {rows - 1};
        const step_plan plan({std::move(whole)});
        cpu_machine machine(session, plan);
        if (left != nullptr) machine.record_into(*left);
        // The latest layer at which the adopted choice's trail can be joined.
        std::int32_t start = std::min(first_difference(chosen, adopted_), weights_.config().layers - 1);
        while (start > 0 && !trails_[window].begins_at(start)) {
            --start;
        }
        if (start > 0) machine.begin_at(start, trails_[window]);
        layers_replayed_ += start;
        layers_run_ += weights_.config().layers - start;
        machine.run();
        made.logits = machine.logits();
        made.layers = machine.layers();
    }
    planned_request rest = planned(uniprefill::request_tag::verify, under, rows, fed);
    rest.logits_rows.resize(fed.size());
    std::iota(rest.logits_rows.begin(), rest.logits_rows.end(), 0);
    const step_plan plan({std::move(rest)});
    cpu_machine machine(session, plan);
    machine.run();
    made.logits.insert(made.logits.end(), machine.logits().begin(), machine.logits().end());
    return made;
}

bool trial::read_dense(const std::vector<bool>& layers) {
    const choice dense = dense_choice(weights_.config().layers);
    for (std::size_t window = 0; window < windows_.size(); ++window) {
        if (!go_on_()) return false;
        trail left;
        left.may_begin = layers;
        dense_.push_back(read(window, dense, memory_used_ < memory_ ? &left : nullptr).logits);
        trails_[window] = std::move(left);
        memory_used_ += trails_[window].bytes();
    }
    return true;
}

std::optional<score> trial::run(const choice& chosen) {
    score made;
    made.work = {0, 0, 0, 0};
    const auto count = static_cast<double>(windows_.size());
    for (std::size_t window = 0; window < windows_.size(); ++window) {
        if (!go_on_()) return std::nullopt;
        const pass came = read(window, chosen, nullptr);
        const auto& fed = windows_[window].fed;
        const quality found =
            compare_logits(dense_[window].data(), came.logits.data(),
                           static_cast<std::int32_t>(fed.size()) + 1, weights_.config().vocab, fed);
        const calibration::work took =
            cost_.of(came.layers, static_cast<std::int32_t>(windows_[window].prompt.size()));
        made.by_window.push_back(found.kl_mean);
        made.kl += found.kl_mean / count;
        made.kl_max = std::max(made.kl_max, found.kl_mean);
        made.work.lin += took.lin / count;
        made.work.att += took.att / count;
        made.work.looks += took.looks / count;
        made.work.total += took.total / count;
    }
    return made;
}

void trial::adopt(const choice& chosen, const std::vector<bool>& layers) {
    if (chosen == adopted_) return;
    for (std::size_t window = 0; window < windows_.size(); ++window) {
        trail fresh;
        fresh.may_begin = layers;
        memory_used_ -= trails_[window].bytes();
        if (memory_used_ < memory_ && go_on_()) static_cast<void>(read(window, chosen, &fresh));
        trails_[window] = std::move(fresh);
        memory_used_ += trails_[window].bytes();
    }
    adopted_ = chosen;
}

} // namespace engine::calibration
