// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <algorithm>
#include <chrono>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Seconds since it was made; reads no clock unless somebody listens.
class stage_clock {
  public:
    UNIPREFILL_HOST_API explicit stage_clock(bool listening) noexcept
        : listening_(listening)
        , start_(listening ? clock::now() : clock::time_point{}) {}
    [[nodiscard]] UNIPREFILL_HOST_API double lap() noexcept {
        if (!listening_) {
            return 0;
        }
        const auto now = clock::now();
        const double seconds = std::chrono::duration<double>(now - start_).count();
        start_ = now;
        return seconds;
    }

  private:
    using clock = std::chrono::steady_clock;
    bool listening_;
    clock::time_point start_;
};

/// Bytes of the largest of the operations' temporaries, which share one piece of the workspace.
template <class Policy, class Backend>
[[nodiscard]] UNIPREFILL_HOST_API std::size_t scratch_bytes(const limits& bounds) noexcept {
    const std::size_t estimate =
        importance_estimator<typename Policy::estimator, Backend>(bounds).workspace_bytes();
    const std::size_t select = block_selector<typename Policy::rule, Backend>(bounds).workspace_bytes();
    return estimate > select ? estimate : select;
}

template <class Backend>
[[nodiscard]] UNIPREFILL_HOST_API std::int64_t lineage_bytes(const limits& bounds) noexcept {
    return static_cast<std::int64_t>(row_lineage<Backend>(bounds).state_bytes());
}

} // namespace detail

template <class Policy, class Backend>
status prefill_sparsifier<Policy, Backend>::check() const noexcept {
    UNIPREFILL_TRY((importance_estimator<typename Policy::estimator, Backend>(bounds_).check()));
    return detail::check_layers(bounds_, options_);
}

template <class Policy, class Backend>
std::size_t prefill_sparsifier<Policy, Backend>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace count;
    static_cast<void>(count.take<std::byte>(detail::lineage_bytes<Backend>(bounds_)));
    static_cast<void>(selection::carve(count, bounds_, Backend::space));
    static_cast<void>(count.take<std::int64_t>(mass_view::rank_buffer_size(bounds_)));
    static_cast<void>(count.take<rule>(bounds_.max_requests));
    return count.bytes_used() + detail::scratch_bytes<Policy, Backend>(bounds_);
}

template <class Policy, class Backend>
status prefill_step<Policy, Backend>::begin(const batch_view& batch, workspace memory,
                                            stream queue) noexcept {
    const limits& bounds = made_by_->bounds();
    UNIPREFILL_TRY(made_by_->check());
    UNIPREFILL_TRY(memory.check(made_by_->workspace_bytes()));
    batch_view without_cache = batch;
    without_cache.cached_lens = nullptr;
    UNIPREFILL_TRY(validate(without_cache, bounds));

    workspace piece(memory.data(), memory.bytes());
    const std::int64_t lineage_bytes = detail::lineage_bytes<Backend>(bounds);
    std::byte* lineage = piece.take<std::byte>(lineage_bytes);
    decided_ = selection::carve(piece, bounds, Backend::space);
    masses_ = mass_view::over(piece.take<std::int64_t>(mass_view::rank_buffer_size(bounds)), bounds,
                              Backend::space);
    rules_ = piece.take<typename Policy::rule>(bounds.max_requests);
    scratch_ = workspace(static_cast<std::byte*>(memory.data()) + piece.bytes_used(),
                         memory.bytes() - piece.bytes_used());
    return lineage_.begin(without_cache, workspace(lineage, static_cast<std::size_t>(lineage_bytes)), queue);
}

template <class Policy, class Backend>
status prefill_step<Policy, Backend>::enter(std::int32_t layer, const row_tensor* tensors, std::int32_t count,
                                            stream queue) noexcept {
    return detail::enter(made_by_->options().mode, made_by_->selects(layer), lineage_, tensors, count, queue);
}

template <class Policy, class Backend>
status prefill_step<Policy, Backend>::leave(const selection& decided, const row_tensor* tensors,
                                            std::int32_t count, stream queue) noexcept {
    return detail::leave(made_by_->options().mode, lineage_, decided, tensors, count, queue);
}

template <class Policy, class Backend>
bool prefill_step<Policy, Backend>::may_drop(const batch_view& batch) const noexcept {
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        if (batch.is_prefill(r) && batch.options_of(r).enabled != 0 &&
            batch.cu_seqlens[r + 1] > batch.cu_seqlens[r]) {
            return true;
        }
    }
    return false;
}

template <class Policy, class Backend>
template <class T, class Cache, class Reduction>
status prefill_step<Policy, Backend>::decide(std::int32_t layer, const head_rows<const T>& q,
                                             const key_source<T, Cache>& keys,
                                             const attention_params& attention,
                                             const std::int32_t* cached_lens, selection& out, stream queue,
                                             const Reduction& reduction) noexcept {
    const limits& bounds = made_by_->bounds();
    batch_view batch = lineage_.current();
    if (layer < 0 || layer >= bounds.num_layers) {
        return failure(status_code::out_of_range, "layer", "0..limits.num_layers - 1", layer);
    }
    if (!lineage_.has_begun()) {
        return failure(status_code::wrong_state, "decide", "begin() before", layer).at_layer(layer);
    }
    const std::int32_t index = detail::find_layer(made_by_->options(), layer);
    const bool selects = index >= 0 && may_drop(batch);
    const selection all =
        selection::keep_all(batch.num_requests, batch.num_segments, batch.num_rows, Backend::space);
    if (!selects && per_head_.free == nullptr) {
        out = all;
        return success();
    }
    batch.cached_lens = cached_lens;

    const metrics_observer& observer = made_by_->options().observer;
    detail::stage_clock clock(observer.on_stage_times != nullptr);
    const importance_estimator<typename Policy::estimator, Backend> estimator(bounds);
    if (const status done = estimator.run(q, keys, attention, batch, masses_, per_head_, scratch_, queue);
        !done.ok()) {
        return done.at_layer(layer);
    }
    if (!selects) {
        out = all;
        return success();
    }
    // The estimator writes what this step uses; ranks reduce the whole buffer, whose size they agree on.
    const std::int64_t used = used_blocks(batch, bounds.block_rows);
    std::fill(masses_.free + used, masses_.forced, std::int64_t{0});
    std::fill(masses_.forced + used, masses_.faults, std::int64_t{0});
    std::fill(masses_.faults + batch.num_segments, masses_.faults + masses_.num_segments, std::int64_t{0});
    if (const status done = reduction(masses_.free, mass_view::rank_buffer_size(bounds),
                                      Policy::estimator::head_reduction::ranks, queue);
        !done.ok()) {
        return done.at_layer(layer);
    }
    const double estimate_s = clock.lap();
    const auto& selecting = made_by_->options().layers[index];
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        rules_[r] = selecting.per_request != nullptr ? selecting.per_request[r] : selecting.rule;
    }
    const block_selector<typename Policy::rule, Backend> selector(bounds);
    if (const status done = selector.run(masses_, batch, rules_, decided_, scratch_, queue); !done.ok()) {
        return done.at_layer(layer);
    }
    tell(layer, batch, decided_, estimate_s, clock.lap());
    out = decided_;
    return success();
}

template <class Policy, class Backend>
void prefill_step<Policy, Backend>::tell(std::int32_t layer, const batch_view& before,
                                         const selection& decided, double estimate_s,
                                         double select_s) const noexcept {
    const metrics_observer& observer = made_by_->options().observer;
    if (observer.on_decision != nullptr) {
        for (std::int32_t s = 0; s < before.num_segments; ++s) {
            const segment_outcome& outcome = decided.outcomes[s];
            const double total = static_cast<double>(outcome.total_mass);
            observer.on_decision(
                observer.context,
                {layer, before.request_of(s), s, outcome,
                 outcome.total_mass > 0 ? static_cast<double>(outcome.dropped_mass) / total : 0});
        }
    }
    if (observer.on_stage_times != nullptr) {
        observer.on_stage_times(observer.context, {layer, estimate_s, select_s});
    }
}

UNIPREFILL_END_NAMESPACE
