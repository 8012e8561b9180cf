// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

/// Offsets into packed rows: 0 first, never falling, num_rows last.
[[nodiscard]] inline UNIPREFILL_HOST_API status check_offsets(const batch_view& batch) noexcept {
    if (batch.space != memory_space::host) {
        return failure(status_code::not_supported, "batch.space", "host memory", 1);
    }
    if (batch.num_requests < 0) {
        return failure(status_code::invalid_argument, "batch.num_requests", ">= 0", batch.num_requests);
    }
    if (batch.num_requests == 0) {
        return batch.num_rows == 0 ? success()
                                   : failure(status_code::invalid_argument, "batch.num_rows",
                                             "0 without requests", batch.num_rows);
    }
    if (batch.cu_seqlens == nullptr) {
        return failure(status_code::invalid_argument, "batch.cu_seqlens", "an array, not a null pointer", 0);
    }
    if (batch.cu_seqlens[0] != 0) {
        return failure(status_code::invalid_argument, "batch.cu_seqlens", "0 first", batch.cu_seqlens[0]);
    }
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        if (batch.cu_seqlens[r + 1] < batch.cu_seqlens[r]) {
            return failure(status_code::invalid_argument, "batch.cu_seqlens", "offsets that don't fall",
                           batch.cu_seqlens[r + 1]);
        }
    }
    return batch.cu_seqlens[batch.num_requests] == batch.num_rows
               ? success()
               : failure(status_code::invalid_argument, "batch.cu_seqlens", "num_rows last",
                         batch.cu_seqlens[batch.num_requests]);
}

} // namespace detail

// A step ----------------------------------------------------------------------------------------------------

template <class Visit>
inline void drop_ledger<backend::host>::for_each_request(const ledger_step& step,
                                                         Visit visit) const noexcept {
    // Copies, because what is written on the way could be these for all that a compiler knows.
    const detail::ledger_layout layout = layout_;
    std::byte* const memory = memory_;
    const std::int32_t* const request_ids = step.request_ids_;
    const std::int32_t num_requests = step.num_requests_;
    for (std::int32_t r = 0; r < num_requests; ++r) {
        const std::int32_t request = request_ids[r];
        if (request >= 0) {
            visit(r, request, layout.record(memory, request));
        }
    }
}

inline status drop_ledger<backend::host>::check_step(const ledger_step& step) const noexcept {
    if (!step.open_ || memory_ == nullptr) {
        return failure(status_code::wrong_state, "step", "a step that begin_step() opened", 0);
    }
    for (std::int32_t r = 0; r < step.num_requests_; ++r) {
        const std::int32_t request = step.request_ids_[r];
        const bool good = request == -1 || (request >= 0 && request < bounds_.max_requests &&
                                            record(request).header->open != 0);
        if (!good) {
            return failure(status_code::wrong_state, "step", "requests that are in this open step", request)
                .at_request(request);
        }
    }
    return success();
}

inline status drop_ledger<backend::host>::check_next_rows(const batch_view& batch, std::int32_t index,
                                                          std::int32_t request) const noexcept {
    const auto tag = static_cast<std::int32_t>(batch.tags[index]);
    if (tag < 0 || tag > static_cast<std::int32_t>(request_tag::verify)) {
        return failure(status_code::invalid_argument, "batch.tags", "prefill, chunk, decode or verify", tag)
            .at_request(request);
    }
    const std::int32_t begin = batch.cu_seqlens[index];
    const std::int32_t count = batch.cu_seqlens[index + 1] - begin;
    if (request == -1) {
        return count == 0 ? success()
                          : failure(status_code::invalid_argument, "batch.cu_seqlens",
                                    "no rows in an empty place of the batch", count);
    }
    UNIPREFILL_TRY(check_closed(request));
    const std::int32_t held = record(request).header->committed.num_tokens;
    if (batch.tags[index] == request_tag::prefill && held != 0) {
        return failure(status_code::invalid_argument, "batch.tags",
                       "chunk, decode or verify for a request that has positions", tag)
            .at_request(request);
    }
    if (count > bounds_.max_tokens - held) {
        return failure(status_code::capacity_exceeded, "batch.cu_seqlens",
                       "rows within the request's max_tokens", std::int64_t{held} + count)
            .at_request(request);
    }
    for (std::int32_t i = 0; batch.positions != nullptr && i < count; ++i) {
        if (batch.positions[begin + i] != held + i) {
            return failure(status_code::invalid_argument, "batch.positions",
                           "positions that go on from the request's last one, without overlap or gap",
                           batch.positions[begin + i])
                .at_request(request);
        }
    }
    return success();
}

inline status drop_ledger<backend::host>::begin_step(const batch_view& batch, const std::int32_t* request_ids,
                                                     ledger_step& step, stream) noexcept {
    if (memory_ == nullptr) {
        return failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
    }
    if (step.open_) {
        return failure(status_code::wrong_state, "step", "a step that is closed", 1);
    }
    UNIPREFILL_TRY(detail::check_offsets(batch));
    if (batch.num_requests > 0 && (batch.tags == nullptr || request_ids == nullptr)) {
        return failure(status_code::invalid_argument, batch.tags == nullptr ? "batch.tags" : "request_ids",
                       "an array, not a null pointer", 0);
    }
    ledger_step opened;
    opened.request_ids_ = request_ids;
    opened.open_ = true;
    for (std::int32_t r = 0; r < batch.num_requests; ++r) {
        const status checked = check_next_rows(batch, r, request_ids[r]);
        if (!checked.ok()) {
            for_each_request(opened, [](std::int32_t, std::int32_t, const detail::request_record& state) {
                state.header->open = 0;
            });
            return checked;
        }
        if (request_ids[r] >= 0) {
            record(request_ids[r]).header->open = 1; // a second mention fails
        }
        opened.num_requests_ = r + 1;
    }
    for_each_request(opened, [&](std::int32_t r, std::int32_t, const detail::request_record& state) {
        state.header->tag = batch.tags[r];
        state.header->staged.num_tokens += batch.cu_seqlens[r + 1] - batch.cu_seqlens[r];
    });
    step = opened;
    return success();
}

inline bool drop_ledger<backend::host>::follows(std::int32_t set, std::int32_t changed) const noexcept {
    return detail::set_follows(layer_sets(), first_layers(), set, changed);
}

inline status drop_ledger<backend::host>::check_entering(std::int32_t request, std::int32_t layer,
                                                         const std::int32_t* positions,
                                                         std::int32_t count) const noexcept {
    const auto bad = [request, layer](const char* argument, const char* expected, std::int64_t came) {
        return failure(status_code::invalid_argument, argument, expected, came)
            .at_request(request)
            .at_layer(layer);
    };
    const detail::request_record state = record(request);
    const std::int32_t set = layer_sets()[layer];
    const bool starts = first_layers()[set] == layer;
    if (!state.header->droppable() || !starts || set == 0) {
        const std::int32_t expected = state.length(set) - state.length_before(set);
        if (count != expected) {
            return bad("entering.cu_seqlens",
                       !state.header->droppable() ? "every decode or verify row in every layer"
                       : set == 0                 ? "every row of the step, in a layer of set 0"
                                                  : "the rows of the first layer of this layer's set",
                       count);
        }
    }
    const bool any_subset = starts && bounds_.relation == set_relation::independent;
    std::int32_t previous = state.header->committed.num_tokens - 1;
    for (std::int32_t i = 0; i < count; ++i) {
        const std::int32_t position = positions[i];
        if (position <= previous || position >= state.header->staged.num_tokens) {
            return bad("entering.positions", "ascending positions of this step's rows", position);
        }
        if (!any_subset && !state.holds(set, position)) {
            return bad("entering.positions",
                       starts ? "rows that entered the layer before" : "the rows of this layer's set",
                       position);
        }
        previous = position;
    }
    return success();
}

inline void drop_ledger<backend::host>::stage_rows(const detail::request_record& state, std::int32_t set,
                                                   const std::int32_t* positions,
                                                   std::int32_t count) const noexcept {
    const detail::request_extent& committed = state.header->committed;
    detail::request_extent& staged = state.header->staged;
    const bool stored = staged.dense_from != committed.dense_from; // an append of this step dropped rows
    if (!stored && count == staged.num_tokens - committed.num_tokens) {
        return; // the tail stays dense
    }
    if (!stored) {
        state.sets.fill(committed.dense_from, staged.num_tokens);
        staged.dense_from = staged.num_tokens;
        state.staged_below[0] = staged.num_tokens;
    }
    for (std::int32_t s = set; s < bounds_.num_sets; ++s) {
        // Nested sets above follow by themselves.
        if (s == set || (bounds_.relation == set_relation::independent && follows(s, set))) {
            state.sets.keep(s, committed.num_tokens, staged.num_tokens, positions, count);
        }
    }
    for (std::int32_t s = 1; s < bounds_.num_sets; ++s) {
        if (!stored || follows(s, set)) {
            state.staged_below[s] =
                state.sets.recount(s, committed.dense_from, staged.dense_from, state.committed_below[s]);
        }
    }
}

inline status drop_ledger<backend::host>::append(ledger_step& step, std::int32_t layer,
                                                 const batch_view& entering, stream) noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    if (layer <= step.last_layer_) {
        return failure(status_code::wrong_state, "layer", "a layer above that of the last append", layer)
            .at_layer(layer);
    }
    UNIPREFILL_TRY(detail::check_offsets(entering).at_layer(layer));
    if (entering.num_requests != step.num_requests_) {
        return failure(status_code::invalid_argument, "entering.num_requests", "the requests of the step",
                       entering.num_requests)
            .at_layer(layer);
    }
    if (entering.num_rows > 0 && entering.positions == nullptr) {
        return failure(status_code::invalid_argument, "entering.positions", "an array, not a null pointer", 0)
            .at_layer(layer);
    }
    for (std::int32_t r = 0; r < step.num_requests_; ++r) {
        const std::int32_t begin = entering.cu_seqlens[r];
        const std::int32_t count = entering.cu_seqlens[r + 1] - begin;
        if (step.request_ids_[r] >= 0) {
            UNIPREFILL_TRY(check_entering(step.request_ids_[r], layer, entering.positions + begin, count));
        } else if (count != 0) {
            return failure(status_code::invalid_argument, "entering.cu_seqlens",
                           "no rows in an empty place of the batch", count)
                .at_layer(layer);
        }
    }
    const std::int32_t set = layer_sets()[layer];
    if (set != 0 && first_layers()[set] == layer) {
        for_each_request(step, [&](std::int32_t r, std::int32_t, const detail::request_record& state) {
            stage_rows(state, set, entering.positions + entering.cu_seqlens[r],
                       entering.cu_seqlens[r + 1] - entering.cu_seqlens[r]);
        });
    }
    step.last_layer_ = layer;
    return success();
}

inline status drop_ledger<backend::host>::commit_step(ledger_step& step, stream) noexcept {
    UNIPREFILL_TRY(check_step(step));
    for_each_request(step, [](std::int32_t, std::int32_t, const detail::request_record& state) {
        if (state.header->staged.dense_from != state.header->committed.dense_from) {
            state.copy_below(state.committed_below, state.staged_below);
        }
        state.header->committed = state.header->staged;
        state.header->close();
    });
    step = ledger_step{};
    return success();
}

inline status drop_ledger<backend::host>::abort_step(ledger_step& step, stream) noexcept {
    UNIPREFILL_TRY(check_step(step));
    for_each_request(step, [](std::int32_t, std::int32_t, const detail::request_record& state) {
        if (state.header->staged.dense_from != state.header->committed.dense_from) {
            state.sets.clear(state.header->committed.dense_from, state.header->staged.dense_from);
            state.copy_below(state.staged_below, state.committed_below);
        }
        state.header->staged = state.header->committed;
        state.header->close();
    });
    step = ledger_step{};
    return success();
}

UNIPREFILL_END_NAMESPACE
