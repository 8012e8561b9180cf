// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// A prompt: stretches of kernels that end where a decision is taken.

#include "engine/cuda/session.hpp"

#include <algorithm>
#include <chrono>
#include <string>

namespace engine::cuda {

void session::put_stretch(std::size_t index) {
    std::int32_t layer = 0;
    if (index == 0) {
        start_prompt();
    } else {
        layer = decisions_[index - 1];
        finish(layer++);
    }
    put_layers(layer, index);
}

/// A stretch from the entry of a layer to its end.
void session::put_layers(std::int32_t layer, std::size_t index) {
    const std::int32_t end = index < decisions_.size() ? decisions_[index] : config_.layers;
    for (; layer < end; ++layer) {
        enter(layer);
        decide(layer);
        finish(layer);
    }
    if (index < decisions_.size()) {
        enter(end);
        decide(end);
    } else {
        const uniprefill::batch_view rows = alive();
        put_logits(1, rows.cu_seqlens + 1);
    }
}

/// What enter() and finish() note of a stretch's layers, for one that is replayed.
void session::note_rows(std::size_t index) {
    const auto begin = static_cast<std::size_t>(index == 0 ? 0 : decisions_[index - 1]);
    const auto end = static_cast<std::size_t>(index < decisions_.size() ? decisions_[index] : config_.layers);
    std::fill(rows_kept_.begin() + static_cast<std::ptrdiff_t>(begin),
              rows_kept_.begin() + static_cast<std::ptrdiff_t>(end), rows_);
    const std::size_t last_in = std::min(end + 1, rows_in_.size());
    for (std::size_t layer = index == 0 ? 0 : begin + 1; layer < last_in; ++layer) {
        rows_in_[layer] = rows_;
    }
}

void session::run_stretch(std::size_t index, bool as_graph) {
    if (!as_graph) return put_stretch(index);
    piece& of = pieces_[{static_cast<std::int32_t>(index), rows_}];
    if (of.recorded) {
        of.recorded.launch(stream_);
        if (sparsity_) sparsity_->restore(index);
        before_ = saved_before_[index];
        note_rows(index);
        return;
    }
    if (of.seen) {
        of.recorded = graph(stream_, [&] { put_stretch(index); });
        of.recorded.launch(stream_);
    } else {
        put_stretch(index);
        of.seen = true;
    }
    if (sparsity_) sparsity_->save(index);
    saved_before_[index] = before_;
}

/// The one thing that the host waits for.
void session::read_count(std::size_t decision) {
    counted_.wait();
    ++times_.count_reads;
    const std::int32_t count = counts_[decision];
    if (count < 1 || count > rows_before_) {
        throw error("rows after layer " + std::to_string(decisions_[decision]),
                    "1 to " + std::to_string(rows_before_), std::to_string(count));
    }
    const std::int64_t multiple =
        options_.counts == counts_kind::buckets ? options_.bucket_rows : options_.row_multiple;
    rows_ = static_cast<std::int32_t>(
        std::min<std::int64_t>((count + multiple - 1) / multiple * multiple, rows_before_));
}

void session::run_by_counts(bool as_graphs, const device_trail* from, std::int32_t first) {
    rows_ = rows_before_ = options_.prompt;
    const auto begin =
        from == nullptr ? decisions_.begin() : std::lower_bound(decisions_.begin(), decisions_.end(), first);
    if (from != nullptr) begin_at(*from, first);
    for (auto index = static_cast<std::size_t>(begin - decisions_.begin()); index <= decisions_.size();
         ++index) {
        const std::int32_t entering = rows_;
        if (from != nullptr) {
            put_layers(first, index);
            from = nullptr;
        } else {
            run_stretch(index, as_graphs);
        }
        if (index == decisions_.size()) break;
        rows_before_ = entering;
        const bool reads = options_.counts != counts_kind::budget;
        if (reads) {
            counted_.record(stream_);
        } else {
            rows_ = budget_after(index, entering);
        }
        // The device knows which rows go on: it attends while the host waits for their number.
        attend(decisions_[index]);
        mark(stage::attention);
        if (reads) read_count(index);
    }
}

void session::run_prefill(bool by_stage, const device_trail* from, std::int32_t first) {
    by_stage_ = by_stage;
    if (by_stage) clock_.start(stream_);
    const bool plain =
        options_.counts == counts_kind::read || (options_.counts == counts_kind::budget && !warm_);
    if (by_stage || counts() || plain) {
        run_by_counts(false, from, first);
    } else if (options_.counts == counts_kind::buckets) {
        run_by_counts(true);
    } else {
        whole_.launch(stream_);
    }
    by_stage_ = false;
}

const prefill_times& session::time_prefill(const std::vector<std::int32_t>& tokens, bool by_stage,
                                           const device_trail* from, std::int32_t first) {
    if (tokens.size() != prompt_tokens_.size()) {
        throw error("prompt", std::to_string(prompt_tokens_.size()) + " tokens",
                    std::to_string(tokens.size()));
    }
    for (const std::int32_t token : tokens) {
        if (token < 0 || token >= config_.vocab) {
            throw error("token id", "0.." + std::to_string(config_.vocab - 1), std::to_string(token));
        }
    }
    stream_.wait();
    std::copy(tokens.begin(), tokens.end(), prompt_tokens_.data());
    rows_in_.resize(static_cast<std::size_t>(config_.layers));
    rows_kept_.resize(static_cast<std::size_t>(config_.layers));
    facts_.clear();
    times_ = {};
    // Recording is not part of a prefill that users wait for.
    if (!by_stage && !counts() && warm_ && options_.counts == counts_kind::budget && !whole_) {
        whole_ = graph(stream_, [&] { run_by_counts(false); });
    }
    const auto begin = std::chrono::steady_clock::now();
    started_.record(stream_);
    run_prefill(by_stage, from, first);
    stopped_.record(stream_);
    if (counts()) {
        copy_back(counted_pairs_.data(), pair_counts_.data(), pair_counts_.bytes(), stream_);
        copy_back(counted_lengths_.data(), lengths_.data(), lengths_.bytes(), stream_);
    }
    if (left_ != nullptr) leave_caches();
    stream_.wait();
    const auto end = std::chrono::steady_clock::now();
    times_.wall_ms = std::chrono::duration<double, std::milli>(end - begin).count();
    times_.device_ms = static_cast<double>(stopped_.since(started_));
    warm_ = true;
    if (counts()) collect_facts(first);
    if (left_ != nullptr && counts()) {
        for (std::size_t layer = 0; layer < facts_.size(); ++layer) {
            left_->stops[layer].facts = facts_[layer];
        }
    }
    of_prompt_ = true;
    logits_rows_ = 1;
    fed_ = options_.prompt;
    check(cudaMemcpyAsync(prompt_lengths_.data(), lengths_.data(), lengths_.bytes(), cudaMemcpyDeviceToDevice,
                          stream_),
          "lengths");
    return times_;
}

const prefill_times& session::prefill(const std::vector<std::int32_t>& tokens) {
    return time_prefill(tokens, false);
}

const prefill_times& session::prefill_by_stage(const std::vector<std::int32_t>& tokens) {
    return time_prefill(tokens, true);
}

} // namespace engine::cuda
