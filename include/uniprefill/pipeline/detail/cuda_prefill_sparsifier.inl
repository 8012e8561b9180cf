// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/core/detail/check_device_batch.hpp>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Rules that hold for all requests of a step, by selecting layer, small enough for a kernel's parameters.
template <class Rule>
struct rule_batch {
    static constexpr std::int32_t capacity =
        sizeof(Rule) < 2048 ? static_cast<std::int32_t>(2048 / sizeof(Rule)) : 1;

    Rule rules[capacity]{};
    std::int32_t index[capacity]{}; ///< of each among the selecting layers
    std::int32_t count = 0;
    std::int32_t num_requests = 0;
    std::int32_t max_requests = 0;
    Rule* out = nullptr; // [num_selecting, max_requests]
};

inline constexpr int rule_threads = 128;

/// Writes each rule once for each request: a thread block for each rule.
template <class Rule>
UNIPREFILL_HIDDEN __global__ void __launch_bounds__(rule_threads)
    spread_rules_kernel(const __grid_constant__ rule_batch<Rule> work) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    Rule* const out = work.out + std::int64_t{work.index[blockIdx.x]} * work.max_requests;
    for (auto r = static_cast<std::int32_t>(threadIdx.x); r < work.num_requests; r += rule_threads) {
        out[r] = work.rules[blockIdx.x];
    }
}

/// The pieces of a step's workspace.
template <class Rule>
struct cuda_step_pieces {
    std::byte* lineage = nullptr;
    selection decided{};
    std::int64_t* masses = nullptr; // [rank_buffer_size]
    Rule* rules = nullptr;          // [num_selecting, max_requests]

    [[nodiscard]] static UNIPREFILL_HOST_API cuda_step_pieces carve(workspace& memory, const limits& bounds,
                                                                    std::int32_t num_selecting) noexcept {
        cuda_step_pieces made;
        made.lineage = memory.take<std::byte>(
            static_cast<std::int64_t>(row_lineage<backend::cuda>(bounds).state_bytes()));
        made.decided = selection::carve(memory, bounds, memory_space::device);
        made.masses = memory.take<std::int64_t>(mass_view::rank_buffer_size(bounds));
        made.rules = memory.take<Rule>(std::int64_t{num_selecting} * bounds.max_requests);
        return made;
    }
};

} // namespace detail

template <class Policy>
UNIPREFILL_HOST_API status prefill_sparsifier<Policy, backend::cuda>::check() const noexcept {
    UNIPREFILL_TRY((importance_estimator<typename Policy::estimator, backend::cuda>(bounds_).check()));
    UNIPREFILL_TRY(detail::check_layers(bounds_, options_));
    if (options_.observer.on_decision != nullptr || options_.observer.on_stage_times != nullptr) {
        return failure(status_code::not_supported, "options.observer",
                       "none, as outcomes lie in device memory", 1);
    }
    return success();
}

template <class Policy>
UNIPREFILL_HOST_API std::size_t prefill_sparsifier<Policy, backend::cuda>::workspace_bytes() const noexcept {
    if (!check().ok()) {
        return 0;
    }
    workspace count;
    static_cast<void>(detail::cuda_step_pieces<rule>::carve(count, bounds_, options_.num_selecting));
    // Estimator and selector run one after the other: one piece serves both.
    const std::size_t estimate =
        importance_estimator<typename Policy::estimator, backend::cuda>(bounds_).workspace_bytes();
    const std::size_t select = block_selector<rule, backend::cuda>(bounds_, device_).workspace_bytes();
    return count.bytes_used() + (estimate > select ? estimate : select);
}

template <class Policy>
UNIPREFILL_HOST_API status prefill_step<Policy, backend::cuda>::begin(const batch_view& batch,
                                                                      workspace memory,
                                                                      stream queue) noexcept {
    using rule = typename Policy::rule;
    const limits& bounds = made_by_->bounds();
    const sparsifier_options<rule>& options = made_by_->options();
    UNIPREFILL_TRY(made_by_->check());
    UNIPREFILL_TRY(memory.check(made_by_->workspace_bytes()));
    UNIPREFILL_TRY(detail::check_device_batch(batch, bounds));
    workspace piece(memory.data(), memory.bytes());
    const auto pieces = detail::cuda_step_pieces<rule>::carve(piece, bounds, options.num_selecting);

    detail::rule_batch<rule> common;
    common.num_requests = batch.num_requests;
    common.max_requests = bounds.max_requests;
    common.out = pieces.rules;
    for (std::int32_t i = 0; i < options.num_selecting && batch.num_requests > 0; ++i) {
        if (options.layers[i].per_request == nullptr) {
            common.rules[common.count] = options.layers[i].rule;
            common.index[common.count++] = i;
        }
        if (common.count == common.capacity || (common.count > 0 && i + 1 == options.num_selecting)) {
            UNIPREFILL_TRY(detail::launch(made_by_->device(), detail::spread_rules_kernel<rule>,
                                          dim3(static_cast<unsigned>(common.count)),
                                          dim3(detail::rule_threads), 0, queue, common));
            common.count = 0;
        }
    }

    batch_view without_cache = batch;
    without_cache.cached_lens = nullptr;
    const std::size_t lineage_bytes = row_lineage<backend::cuda>(bounds).state_bytes();
    UNIPREFILL_TRY(lineage_.begin(without_cache, workspace(pieces.lineage, lineage_bytes), queue));
    decided_ = pieces.decided;
    masses_ = mass_view::over(pieces.masses, bounds, memory_space::device);
    rules_ = pieces.rules;
    scratch_ = workspace(static_cast<std::byte*>(memory.data()) + piece.bytes_used(),
                         memory.bytes() - piece.bytes_used());
    return success();
}

template <class Policy>
template <class Q, class T, class Cache, class Reduction>
UNIPREFILL_HOST_API status prefill_step<Policy, backend::cuda>::decide(
    std::int32_t layer, const head_rows<const Q>& q, const key_source<T, Cache>& keys,
    const attention_params& attention, const std::int32_t* cached_lens, std::int32_t kept_bound,
    selection& out, stream queue, const Reduction& reduction) noexcept {
    using rule = typename Policy::rule;
    static_assert(is_reduction_v<Reduction, stream>,
                  "Reduction: status operator()(std::int64_t*, std::int64_t, rank_reduction, cudaStream_t) "
                  "const noexcept expected");
    const limits& bounds = made_by_->bounds();
    const cuda_device& device = made_by_->device();
    batch_view batch = lineage_.current();
    if (layer < 0 || layer >= bounds.num_layers) {
        return failure(status_code::out_of_range, "layer", "0..limits.num_layers - 1", layer);
    }
    if (!lineage_.has_begun()) {
        return failure(status_code::wrong_state, "decide", "begin() before", layer).at_layer(layer);
    }
    if (kept_bound < 0 || kept_bound > bounds.max_rows) {
        return failure(status_code::out_of_range, "kept_bound", "0..limits.max_rows", kept_bound)
            .at_layer(layer);
    }
    const std::int32_t index = detail::find_layer(made_by_->options(), layer);
    const bool selects = index >= 0 && batch.num_rows > 0 && batch.num_segments > 0;
    const selection all =
        selection::keep_all(batch.num_requests, batch.num_segments, batch.num_rows, memory_space::device);
    if (!selects && per_head_.free == nullptr) {
        out = all;
        return success();
    }
    batch.cached_lens = cached_lens;

    const importance_estimator<typename Policy::estimator, backend::cuda> estimator(bounds, device);
    if (const status done = estimator.run(q, keys, attention, batch, masses_, per_head_, scratch_, queue);
        !done.ok()) {
        return done.at_layer(layer);
    }
    if (!selects) {
        out = all;
        return success();
    }
    // The estimator has written the whole buffer, so that ranks can reduce all of it.
    if (const status done = reduction(masses_.free, mass_view::rank_buffer_size(bounds),
                                      Policy::estimator::head_reduction::ranks, queue);
        !done.ok()) {
        return done.at_layer(layer);
    }
    const rule* const own = made_by_->options().layers[index].per_request;
    const rule* const rules = own != nullptr ? own : rules_ + std::int64_t{index} * bounds.max_requests;
    const block_selector<rule, backend::cuda> selector(bounds, device);
    if (const status done = selector.run(masses_, batch, rules, kept_bound, decided_, scratch_, queue);
        !done.ok()) {
        return done.at_layer(layer);
    }
    out = decided_;
    return success();
}

UNIPREFILL_END_NAMESPACE
