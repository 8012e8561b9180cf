// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/cpu_windows.hpp"

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

cpu_windows::cpu_windows(const cpu_weights& weights, cpu_ops& ops, policy base, std::vector<window> windows,
                         std::size_t memory)
    : weights_(weights)
    , ops_(ops)
    , base_(std::move(base))
    , windows_(std::move(windows))
    , memory_(memory)
    , dense_(windows_.size())
    , adopted_(windows_.size(), dense_choice(weights.config().layers))
    , trails_(windows_.size()) {}

std::int32_t cpu_windows::prompt_tokens(std::size_t window) const {
    return static_cast<std::int32_t>(windows_[window].prompt.size());
}

cpu_windows::pass cpu_windows::run(std::size_t window, const choice& chosen, trail* left) {
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
        std::int32_t start = std::min(first_difference(chosen, adopted_[window]), layers() - 1);
        while (start > 0 && !trails_[window].begins_at(start)) {
            --start;
        }
        if (start > 0) machine.begin_at(start, trails_[window]);
        layers_replayed_ += start;
        layers_run_ += layers() - start;
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

void cpu_windows::keep(std::size_t window, const choice& chosen, trail left) {
    trails_[window] = std::move(left);
    memory_used_ += trails_[window].bytes();
    adopted_[window] = chosen;
}

void cpu_windows::forget(std::size_t window) {
    memory_used_ -= trails_[window].bytes();
    trails_[window] = {};
}

void cpu_windows::read_dense(std::size_t window, const std::vector<bool>& layers, std::int32_t) {
    const choice dense = dense_choice(this->layers());
    forget(window);
    trail left;
    left.may_begin = layers;
    dense_[window] = run(window, dense, memory_used_ < memory_ ? &left : nullptr).logits;
    keep(window, dense, std::move(left));
}

window_reader::answer cpu_windows::read(std::size_t window, const choice& chosen, std::int32_t) {
    pass came = run(window, chosen, nullptr);
    const auto& fed = windows_[window].fed;
    const quality found =
        compare_logits(dense_[window].data(), came.logits.data(), static_cast<std::int32_t>(fed.size()) + 1,
                       weights_.config().vocab, fed);
    return {found.kl_mean, std::move(came.layers)};
}

void cpu_windows::adopt(std::size_t window, const choice& chosen, const std::vector<bool>& layers,
                        std::int32_t) {
    if (chosen == adopted_[window] && trails_[window].bytes() > 0) return;
    trail fresh;
    fresh.may_begin = layers;
    const bool room = memory_used_ - trails_[window].bytes() < memory_;
    if (room) static_cast<void>(run(window, chosen, &fresh));
    forget(window);
    keep(window, chosen, std::move(fresh));
}

} // namespace engine::calibration
