// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/step_plan.hpp"

#include "engine/error.hpp"

#include <algorithm>
#include <utility>

namespace engine {

namespace {

/// The caller's forced spans and the positions of the rows whose logits are wanted, sorted and merged.
std::vector<uniprefill::position_span> forced_spans(const planned_request& request) {
    auto spans = request.forced;
    for (const std::int32_t row : request.logits_rows) {
        spans.push_back({request.first_position + row, request.first_position + row + 1});
    }
    std::sort(spans.begin(), spans.end(), [](const auto& a, const auto& b) { return a.begin < b.begin; });
    std::vector<uniprefill::position_span> merged;
    for (const auto& span : spans) {
        if (!merged.empty() && span.begin <= merged.back().end) {
            merged.back().end = std::max(merged.back().end, span.end);
        } else {
            merged.push_back(span);
        }
    }
    return merged;
}

void check(const planned_request& request) {
    const std::string name = "request " + std::to_string(request.id);
    const auto rows = static_cast<std::int32_t>(request.tokens.size());
    if (rows == 0) throw error(name, "at least one token", "none");
    if (request.first_position < 0) {
        throw error(name + " first_position", ">= 0", std::to_string(request.first_position));
    }
    std::int32_t previous = 0;
    for (const std::int32_t end : request.span_ends) {
        if (end <= previous || end > rows)
            throw error(name + " span_ends", "ascending ends", std::to_string(end));
        previous = end;
    }
    if (!request.span_ends.empty() && previous != rows) {
        throw error(name + " span_ends", "spans up to the last row", std::to_string(previous));
    }
    previous = -1;
    for (const std::int32_t row : request.logits_rows) {
        if (row <= previous || row >= rows)
            throw error(name + " logits_rows", "ascending rows", std::to_string(row));
        previous = row;
    }
}

} // namespace

void step_plan::span_arrays::append(const std::vector<uniprefill::position_span>& list) {
    spans.insert(spans.end(), list.begin(), list.end());
    offsets.push_back(static_cast<std::int32_t>(spans.size()));
}

step_plan::step_plan(std::vector<planned_request> requests)
    : requests_(std::move(requests)) {
    for (const auto& request : requests_) {
        check(request);
        const auto index = static_cast<std::int32_t>(ids_.size());
        const std::int32_t first_row = cu_seqlens_.back();
        const auto rows = static_cast<std::int32_t>(request.tokens.size());
        ids_.push_back(request.id);
        tags_.push_back(request.tag);
        options_.push_back(request.options);
        tokens_.insert(tokens_.end(), request.tokens.begin(), request.tokens.end());
        for (std::int32_t i = 0; i < rows; ++i) {
            positions_.push_back(request.first_position + i);
        }
        cu_seqlens_.push_back(first_row + rows);
        const auto ends = request.span_ends.empty() ? std::vector<std::int32_t>{rows} : request.span_ends;
        for (const std::int32_t end : ends) {
            cu_segments_.push_back(first_row + end);
            segment_request_.push_back(index);
        }
        for (const std::int32_t row : request.logits_rows) {
            logits_rows_.push_back(first_row + row);
        }
        forced_.append(forced_spans(request));
        observed_.append(request.observed);
    }
}

uniprefill::batch_view step_plan::batch() const {
    uniprefill::batch_view view;
    view.num_requests = static_cast<std::int32_t>(requests_.size());
    view.num_segments = static_cast<std::int32_t>(segment_request_.size());
    view.num_rows = num_rows();
    view.tags = tags_.data();
    view.cu_seqlens = cu_seqlens_.data();
    view.positions = positions_.data();
    view.options = options_.data();
    view.cu_segments = cu_segments_.data();
    view.segment_request = segment_request_.data();
    view.forced = forced_.view();
    view.observed = observed_.view();
    return view;
}

} // namespace engine
