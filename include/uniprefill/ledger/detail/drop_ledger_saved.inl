// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/ledger/detail/saved_words.hpp>

#include <cstring>

UNIPREFILL_BEGIN_NAMESPACE

inline status drop_ledger<backend::host>::saved_bytes(std::int32_t request,
                                                      std::size_t& bytes) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    return saved_prefix_bytes(request, record(request).header->committed.num_tokens, bytes);
}

inline status drop_ledger<backend::host>::saved_prefix_bytes(std::int32_t request, std::int32_t num_tokens,
                                                             std::size_t& bytes) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    UNIPREFILL_TRY(check_rollback(request, num_tokens));
    const std::int32_t stored = record(request).header->committed.dense_from;
    bytes = detail::saved_layout::of(bounds_.num_layers, bounds_.num_sets, bounds_.relation,
                                     stored < num_tokens ? stored : num_tokens)
                .size();
    return success();
}

inline status drop_ledger<backend::host>::save(std::int32_t request, void* buffer, std::size_t bytes,
                                               stream on) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    return save_prefix(request, record(request).header->committed.num_tokens, buffer, bytes, on);
}

inline status drop_ledger<backend::host>::save_prefix(std::int32_t request, std::int32_t num_tokens,
                                                      void* buffer, std::size_t bytes,
                                                      stream) const noexcept {
    UNIPREFILL_TRY(check_closed(request));
    UNIPREFILL_TRY(check_rollback(request, num_tokens));
    if (buffer == nullptr) {
        return failure(status_code::invalid_argument, "buffer", "an address, not a null pointer", 0)
            .at_request(request);
    }
    const detail::request_writer writer(bounds_, layer_sets(), record(request), num_tokens);
    if (bytes < writer.bytes()) {
        return ledger_fault::status_of(ledger_complaint::saved_room, request, -1, static_cast<double>(bytes));
    }
    auto* const out = static_cast<std::byte*>(buffer);
    writer.write_header(out, writer.write_body(out, {}));
    return success();
}

inline status drop_ledger<backend::host>::restore(std::int32_t request, const void* buffer, std::size_t bytes,
                                                  stream) noexcept {
    UNIPREFILL_TRY(check_closed(request));
    const auto refuse = [request](const detail::saved_flaw& flaw) {
        return ledger_fault::status_of(flaw.what, request, flaw.layer, static_cast<double>(flaw.came));
    };
    const detail::request_record state = record(request);
    if (state.header->committed.num_tokens != 0) {
        return ledger_fault::status_of(ledger_complaint::has_positions, request, -1,
                                       state.header->committed.num_tokens);
    }
    if (buffer == nullptr) {
        return failure(status_code::invalid_argument, "buffer", "an address, not a null pointer", 0)
            .at_request(request);
    }
    saved_header header;
    if (bytes < sizeof header) {
        return refuse({ledger_complaint::saved_bytes, static_cast<std::int64_t>(bytes)});
    }
    std::memcpy(&header, buffer, sizeof header);
    const detail::request_reader reader(bounds_, layer_sets(), header, static_cast<const std::byte*>(buffer),
                                        bytes);
    detail::saved_flaw flaw = reader.judge_format();
    if (!flaw.any()) {
        flaw = reader.judge_header(reader.body_checksum({}));
    }
    for (std::int32_t layer = 0; !flaw.any() && layer < bounds_.num_layers; ++layer) {
        flaw = reader.judge_layer(layer);
    }
    if (flaw.any()) {
        return refuse(flaw);
    }
    // The request's own memory is all 0, so the planes can be judged there and taken back.
    reader.take_planes(state.sets, {});
    if (!state.sets.well_formed(header.dense_from)) {
        flaw.what = ledger_complaint::saved_planes;
    }
    for (std::int32_t set = 0; !flaw.any() && set < bounds_.num_sets; ++set) {
        const std::int32_t counted =
            set == 0 ? header.dense_from : state.sets.recount(set, 0, header.dense_from, 0);
        state.committed_below[set] = counted;
        if (!reader.agrees(set, counted)) {
            flaw = {ledger_complaint::saved_below, set};
        }
    }
    if (flaw.any()) {
        reader.give_back(state.sets, {});
        state.copy_below(state.committed_below, state.staged_below); // of an empty request
        return refuse(flaw);
    }
    state.copy_below(state.staged_below, state.committed_below);
    state.header->committed = {header.num_tokens, header.dense_from};
    state.header->staged = state.header->committed;
    return success();
}

UNIPREFILL_END_NAMESPACE
