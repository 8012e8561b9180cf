// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <cstring>

UNIPREFILL_BEGIN_NAMESPACE

// Life of a ledger and its requests -------------------------------------------------------------------------

inline status drop_ledger<backend::host>::bind(const ledger_limits& bounds, const std::int32_t* layer_sets,
                                               void* memory, std::size_t bytes) noexcept {
    UNIPREFILL_TRY(validate(bounds));
    UNIPREFILL_TRY(detail::check_layer_sets(bounds, layer_sets));
    if (memory == nullptr) {
        return failure(status_code::invalid_argument, "memory", "an address, not a null pointer", 0);
    }
    if (reinterpret_cast<std::uintptr_t>(memory) % workspace::alignment != 0) {
        return failure(status_code::misaligned, "memory", "an address that is a multiple of 256",
                       reinterpret_cast<std::uintptr_t>(memory) % workspace::alignment);
    }
    const detail::ledger_layout layout(bounds);
    const std::size_t needed = layout.bytes(bounds.max_requests);
    if (bytes < needed || needed == static_cast<std::size_t>(-1)) {
        return failure(status_code::workspace_too_small, "bytes", "at least state_bytes(bounds)", bytes);
    }
    auto* const base = static_cast<std::byte*>(memory);
    std::memset(base, 0, needed);
    for (std::int32_t layer = 0; layer < bounds.num_layers; ++layer) {
        layout.layer_sets(base)[layer] = layer_sets[layer];
    }
    for (std::int32_t set = 0; set < bounds.num_sets; ++set) {
        layout.first_layers(base)[set] = detail::first_layer_of(layer_sets, bounds.num_layers, set);
    }
    bounds_ = bounds;
    layout_ = layout;
    memory_ = base;
    return success();
}

inline status drop_ledger<backend::host>::check_request(std::int32_t request) const noexcept {
    if (memory_ == nullptr) {
        return failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
    }
    if (request < 0 || request >= bounds_.max_requests || record(request).header->admitted == 0) {
        return failure(status_code::unknown_request, "request", "a request that is admitted", request)
            .at_request(request);
    }
    return success();
}

inline status drop_ledger<backend::host>::check_closed(std::int32_t request) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    return record(request).header->open == 0 ? success()
                                             : failure(status_code::wrong_state, "request",
                                                       "a request in no open step, listed once", request)
                                                   .at_request(request);
}

inline status drop_ledger<backend::host>::check_layer(std::int32_t layer) const noexcept {
    return layer >= 0 && layer < bounds_.num_layers
               ? success()
               : failure(status_code::out_of_range, "layer", "0..num_layers - 1", layer).at_layer(layer);
}

inline status drop_ledger<backend::host>::check_layers(const layer_list& layers) const noexcept {
    if (memory_ == nullptr) {
        return failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
    }
    if (layers.count < 0) {
        return failure(status_code::invalid_argument, "layers.count", ">= 0", layers.count);
    }
    if (layers.layers == nullptr && (layers.first < 0 || layers.count > bounds_.num_layers - layers.first)) {
        return failure(status_code::out_of_range, "layers", "layers of the ledger", layers.first);
    }
    for (std::int32_t i = 0; layers.layers != nullptr && i < layers.count; ++i) {
        UNIPREFILL_TRY(check_layer(layers.layers[i]));
    }
    return success();
}

/// Slots of a call over several requests: each in no open step and listed once; -1 is an empty place.
inline status drop_ledger<backend::host>::check_closed(const std::int32_t* request_ids,
                                                       std::int32_t count) const noexcept {
    if (memory_ == nullptr) {
        return failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
    }
    if (count < 0 || (count > 0 && request_ids == nullptr)) {
        return failure(status_code::invalid_argument, "request_ids", "an array of count slots", count);
    }
    status checked = success();
    std::int32_t marked = 0;
    for (; marked < count && checked.ok(); ++marked) {
        if (request_ids[marked] == -1) {
            continue;
        }
        checked = check_closed(request_ids[marked]);
        if (!checked.ok()) {
            break;
        }
        record(request_ids[marked]).header->open = 1; // a second mention fails
    }
    while (marked-- > 0) {
        if (request_ids[marked] >= 0) {
            record(request_ids[marked]).header->open = 0;
        }
    }
    return checked;
}

inline status drop_ledger<backend::host>::check_free(std::int32_t request,
                                                     const char* argument) const noexcept {
    if (memory_ == nullptr) {
        return failure(status_code::wrong_state, "ledger", "a ledger that is bound to memory", 0);
    }
    if (request < 0 || request >= bounds_.max_requests) {
        return failure(status_code::out_of_range, argument, "0..max_requests - 1", request)
            .at_request(request);
    }
    return record(request).header->admitted == 0
               ? success()
               : failure(status_code::wrong_state, argument, "a free slot", request).at_request(request);
}

inline status drop_ledger<backend::host>::admit(std::int32_t request) noexcept {
    UNIPREFILL_TRY(check_free(request, "request"));
    record(request).header->admitted = 1;
    return success();
}

inline status drop_ledger<backend::host>::release(std::int32_t request) noexcept {
    UNIPREFILL_TRY(rollback(request, 0));
    record(request).header->admitted = 0;
    return success();
}

inline status drop_ledger<backend::host>::check_rollback(std::int32_t request,
                                                         std::int32_t num_tokens) const noexcept {
    return num_tokens >= 0 && num_tokens <= record(request).header->committed.num_tokens
               ? success()
               : failure(status_code::out_of_range, "num_tokens", "0..the positions that the request has",
                         num_tokens)
                     .at_request(request);
}

inline void drop_ledger<backend::host>::forget(std::int32_t request, std::int32_t num_tokens) const noexcept {
    const detail::request_record state = record(request);
    detail::request_extent& extent = state.header->committed;
    extent.num_tokens = num_tokens;
    if (num_tokens < extent.dense_from) {
        state.committed_below[0] = num_tokens;
        for (std::int32_t set = 1; set < bounds_.num_sets; ++set) {
            state.committed_below[set] = state.sets.rank(set, num_tokens);
        }
        state.sets.clear(num_tokens, extent.dense_from);
        extent.dense_from = num_tokens;
        state.copy_below(state.staged_below, state.committed_below);
    }
    state.header->staged = extent;
}

inline status drop_ledger<backend::host>::rollback(std::int32_t request, std::int32_t num_tokens,
                                                   stream) noexcept {
    UNIPREFILL_TRY(check_closed(request));
    UNIPREFILL_TRY(check_rollback(request, num_tokens));
    forget(request, num_tokens);
    return success();
}

inline status drop_ledger<backend::host>::rollback(const std::int32_t* request_ids,
                                                   const std::int32_t* num_tokens, std::int32_t count,
                                                   stream) noexcept {
    UNIPREFILL_TRY(check_closed(request_ids, count));
    if (count > 0 && num_tokens == nullptr) {
        return failure(status_code::invalid_argument, "num_tokens", "an array, not a null pointer", 0);
    }
    for (std::int32_t r = 0; r < count; ++r) {
        if (request_ids[r] >= 0) {
            UNIPREFILL_TRY(check_rollback(request_ids[r], num_tokens[r]));
        }
    }
    for (std::int32_t r = 0; r < count; ++r) {
        if (request_ids[r] >= 0) {
            forget(request_ids[r], num_tokens[r]);
        }
    }
    return success();
}

inline status drop_ledger<backend::host>::fork(std::int32_t request, std::int32_t copy, stream) noexcept {
    UNIPREFILL_TRY(check_closed(request));
    UNIPREFILL_TRY(check_free(copy, "copy"));
    const detail::request_record from = record(request);
    const detail::request_record to = record(copy);
    *to.header = *from.header;
    to.copy_below(to.committed_below, from.committed_below);
    to.copy_below(to.staged_below, from.staged_below);
    to.sets.copy_prefix(from.sets, from.header->committed.dense_from);
    return success();
}

UNIPREFILL_END_NAMESPACE
