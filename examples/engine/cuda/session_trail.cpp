// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What a prompt leaves for others that begin behind its first layer, and beginning there.

#include "engine/cuda/session.hpp"

#include <string>
#include <utility>
#include <vector>

namespace engine::cuda {

void session::leave_trail(device_trail* left) {
    if (left != nullptr && (pattern_.period > 1 || options_.counts != counts_kind::read)) {
        throw error("trail", "a model whose layers all read every key, and counts that are read", "another");
    }
    left_ = left;
    if (left_ != nullptr) left_->stops.resize(static_cast<std::size_t>(config_.layers));
}

const prefill_times& session::prefill_from(const device_trail& from, std::int32_t first,
                                           const std::vector<std::int32_t>& tokens) {
    const bool fits = from.begins_at(first) &&
                      from.entered.size() == static_cast<std::size_t>(config_.layers) &&
                      from.k.size() == count_of(std::int64_t{config_.layers} * options_.prompt, kv_elements_);
    if (!fits || options_.counts != counts_kind::read || (left_ != nullptr && left_ != &from)) {
        throw error("trail", "one that begins at layer " + std::to_string(first), "another");
    }
    return time_prefill(tokens, false, &from, first);
}

/// Everything that the layers before @p first left.
void session::begin_at(const device_trail& from, std::int32_t first) {
    const auto copy = [&](void* to, const void* source, std::size_t bytes) {
        check(cudaMemcpyAsync(to, source, bytes, cudaMemcpyDeviceToDevice, stream_), "trail");
    };
    start_counts();
    if (sparsity_) sparsity_->begin(prompt_.view, stream_);
    for (std::int32_t layer = 0; layer < first; ++layer) {
        const auto at = static_cast<std::size_t>(layer);
        const device_trail::stop& left = from.stops[at];
        if (!left.decided.identity) sparsity_->replay(left.decided, stream_);
        rows_in_[at] = left.rows;
        rows_kept_[at] = from.stops[at + 1].rows;
        if (counts()) facts_[at] = left.facts;
    }
    const device_trail::stop& there = from.stops[static_cast<std::size_t>(first)];
    rows_ = rows_before_ = there.rows;
    copy(hidden_.data(), there.hidden.data(), count_of(rows_, config_.hidden) * sizeof(float));
    copy(entered_.data(), from.entered.data(), static_cast<std::size_t>(first) * sizeof(std::int32_t));
    const std::size_t stretch = count_of(options_.prompt, kv_elements_) * sizeof(bfloat16);
    const std::size_t apart = count_of(capacity_, kv_elements_) * sizeof(bfloat16);
    for (const auto& [to, source] : {std::pair{&k_, &from.k}, std::pair{&v_, &from.v}}) {
        check(cudaMemcpy2DAsync(to->data(), apart, source->data(), stretch, stretch,
                                static_cast<std::size_t>(first), cudaMemcpyDeviceToDevice, stream_),
              "trail");
    }
}

/// Of rows that are about to enter a layer.
void session::leave_stop(std::int32_t layer) {
    device_trail::stop& into = left_->stops[static_cast<std::size_t>(layer)];
    into.rows = rows_;
    into.decided = {};
    into.begins = left_->may_begin.empty() || left_->may_begin[static_cast<std::size_t>(layer)];
    if (!into.begins) return;
    const std::size_t most = count_of(options_.prompt, config_.hidden);
    if (into.hidden.size() < most) into.hidden = device_array<float>(most);
    check(cudaMemcpyAsync(into.hidden.data(), hidden_.data(), count_of(rows_, config_.hidden) * sizeof(float),
                          cudaMemcpyDeviceToDevice, stream_),
          "trail");
}

/// Keys and values of a prompt, once all layers have written theirs.
void session::leave_caches() {
    const std::size_t all = count_of(std::int64_t{config_.layers} * options_.prompt, kv_elements_);
    if (left_->k.size() != all) {
        left_->k = device_array<bfloat16>(all);
        left_->v = device_array<bfloat16>(all);
        left_->entered = device_array<std::int32_t>(static_cast<std::size_t>(config_.layers));
    }
    const std::size_t stretch = count_of(options_.prompt, kv_elements_) * sizeof(bfloat16);
    const std::size_t apart = count_of(capacity_, kv_elements_) * sizeof(bfloat16);
    for (const auto& [to, source] : {std::pair{&left_->k, &k_}, std::pair{&left_->v, &v_}}) {
        check(cudaMemcpy2DAsync(to->data(), stretch, source->data(), apart, stretch,
                                static_cast<std::size_t>(config_.layers), cudaMemcpyDeviceToDevice, stream_),
              "trail");
    }
    check(cudaMemcpyAsync(left_->entered.data(), entered_.data(), entered_.bytes(), cudaMemcpyDeviceToDevice,
                          stream_),
          "trail");
}

} // namespace engine::cuda
