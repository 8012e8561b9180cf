// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <cstring>
#include <limits>
#include <type_traits>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

template <class Index>
inline constexpr bool is_index = std::is_same_v<Index, std::int32_t> || std::is_same_v<Index, std::int64_t>;

/// Whether a row of any layer has the same slot, as far as the source's type tells.
template <class Slots>
[[nodiscard]] UNIPREFILL_HOST_API bool shares_layers(const Slots&) noexcept {
    return false;
}
[[nodiscard]] inline UNIPREFILL_HOST_API bool shares_layers(const block_table_view& slots) noexcept {
    return slots.layer_stride == 0;
}
[[nodiscard]] inline UNIPREFILL_HOST_API bool shares_layers(const contiguous_slots& slots) noexcept {
    return slots.layer_stride == 0;
}

template <class Index, class Slot>
[[nodiscard]] UNIPREFILL_HOST_API status check(const step_arrays<Index, Slot>& arrays) noexcept {
    const auto require = [](bool good, const char* argument, const char* expected, std::int64_t came) {
        return good ? success() : failure(status_code::invalid_argument, argument, expected, came);
    };
    UNIPREFILL_TRY(
        require(arrays.num_requests >= 0, "step_arrays.num_requests", ">= 0", arrays.num_requests));
    UNIPREFILL_TRY(require(arrays.num_rows >= 0, "step_arrays.num_rows", ">= 0", arrays.num_rows));
    UNIPREFILL_TRY(require(arrays.num_chunks >= 0, "step_arrays.num_chunks", ">= 0", arrays.num_chunks));
    UNIPREFILL_TRY(require(arrays.chunk_rows >= 1, "step_arrays.chunk_rows", ">= 1", arrays.chunk_rows));
    UNIPREFILL_TRY(require(arrays.page_tokens >= 1, "step_arrays.page_tokens", ">= 1", arrays.page_tokens));
    return require(arrays.window >= 0, "step_arrays.window", ">= 0", arrays.window);
}

/// What is told of the rows of one request; arrays that aren't null start at the first of them.
template <class Index>
UNIPREFILL_API void fill_rows(const request_record& state, std::int32_t set, std::int32_t before,
                              std::int32_t rows, Index* positions, Index* write_rows, Index* window_rows,
                              std::int32_t window) noexcept {
    if (write_rows != nullptr) {
        for (std::int32_t i = 0; i < rows; ++i) {
            write_rows[i] = before + i;
        }
    }
    if (rows == 0 || (positions == nullptr && window_rows == nullptr)) {
        return;
    }
    if (state.is_dense_from(set, before) && window_rows == nullptr) {
        const std::int32_t first = state.header->staged.num_tokens - (state.length(set) - before);
        for (std::int32_t i = 0; i < rows; ++i) {
            positions[i] = first + i;
        }
        return;
    }
    const held_rows held = held_rows_maker::make(state, set);
    if (positions != nullptr) {
        held.copy_positions(before, positions, rows);
    }
    if (window_rows != nullptr) {
        held.copy_positions(before, window_rows, rows);
        for (std::int32_t i = 0; i < rows; ++i) {
            window_rows[i] = held.window_row(static_cast<std::int32_t>(window_rows[i]), window);
        }
    }
}

/// Calls visit(array, entries of a layer) for each array of @p part but slots.
template <class Index, class Slot, class Visit>
UNIPREFILL_HOST_API void for_each_array(step_arrays<Index, Slot>& part, Visit visit) noexcept {
    visit(part.cached_lens, std::int64_t{part.num_requests});
    visit(part.seq_lens, std::int64_t{part.num_requests});
    visit(part.cu_seqlens, std::int64_t{part.num_requests} + 1);
    visit(part.num_pages, std::int64_t{part.num_requests});
    visit(part.partial_pages, std::int64_t{part.num_requests});
    visit(part.row_positions, std::int64_t{part.num_rows});
    visit(part.write_rows, std::int64_t{part.num_rows});
    visit(part.window_rows, std::int64_t{part.num_rows});
    visit(part.chunks, std::int64_t{2} * part.num_chunks);
}

/// An array's part once more: what lies before it.
template <class Entry>
UNIPREFILL_HOST_API void repeat(Entry* array, std::int64_t entries) noexcept {
    if (array != nullptr && entries > 0) {
        std::memcpy(array, array - entries, static_cast<std::size_t>(entries) * sizeof(Entry));
    }
}

template <class Index, class Slot>
UNIPREFILL_HOST_API void repeat_part(step_arrays<Index, Slot>& part) noexcept {
    for_each_array(part, [](Index* array, std::int64_t entries) { repeat(array, entries); });
}

/// The arrays start at the next layer's part.
template <class Index, class Slot>
UNIPREFILL_HOST_API void next_part(step_arrays<Index, Slot>& part) noexcept {
    for_each_array(part, [](Index*& array, std::int64_t entries) {
        array = array != nullptr ? array + entries : nullptr;
    });
    part.slots = part.slots != nullptr ? part.slots + part.num_rows : nullptr;
}

[[nodiscard]] inline UNIPREFILL_HOST_API status check_wanted(const span_lists& wanted,
                                                             std::int32_t num_requests) noexcept {
    for (std::int32_t r = 0; wanted.offsets != nullptr && r < num_requests; ++r) {
        if (wanted.offsets[r] < 0 || wanted.offsets[r + 1] < wanted.offsets[r]) {
            return failure(status_code::invalid_argument, "wanted.offsets", "offsets from 0 that don't fall",
                           wanted.offsets[r + 1]);
        }
    }
    return wanted.offsets == nullptr || num_requests == 0 || wanted.offsets[num_requests] == 0 ||
                   wanted.spans != nullptr
               ? success()
               : failure(status_code::invalid_argument, "wanted.spans", "an array, not a null pointer", 0);
}

} // namespace detail

// What an engine asks ---------------------------------------------------------------------------------------

inline status drop_ledger<backend::host>::rows_of(std::int32_t request, std::int32_t layer,
                                                  held_rows& rows) const noexcept {
    UNIPREFILL_TRY(check_request(request).at_layer(layer));
    UNIPREFILL_TRY(check_layer(layer).at_request(request));
    rows = detail::held_rows_maker::make(record(request), layer_sets()[layer]);
    return success();
}

/// The rows of the step that enter a layer of @p set.
inline std::int32_t drop_ledger<backend::host>::count_rows(const ledger_step& step,
                                                           std::int32_t set) const noexcept {
    std::int32_t counted = 0;
    for_each_request(step, [&](std::int32_t, std::int32_t, const detail::request_record& state) {
        counted += state.length(set) - state.length_before(set);
    });
    return counted;
}

/// The chunks of those rows, request by request.
inline std::int64_t drop_ledger<backend::host>::count_chunks(const ledger_step& step, std::int32_t set,
                                                             std::int32_t chunk_rows) const noexcept {
    std::int64_t counted = 0;
    for_each_request(step, [&](std::int32_t, std::int32_t, const detail::request_record& state) {
        counted += num_blocks(state.length(set) - state.length_before(set), chunk_rows);
    });
    return counted;
}

inline status drop_ledger<backend::host>::num_rows(const ledger_step& step, std::int32_t layer,
                                                   std::int32_t& rows) const noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    rows = count_rows(step, layer_sets()[layer]);
    return success();
}

inline status drop_ledger<backend::host>::check_output(const ledger_step& step, std::int32_t layer,
                                                       bool given, std::int32_t size,
                                                       bool by_row) const noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    const std::int32_t needed = by_row ? count_rows(step, layer_sets()[layer]) : step.num_requests_;
    if (size < needed) {
        return failure(status_code::out_of_range, "size",
                       by_row ? "at least the rows that enter the layer" : "at least num_requests", size)
            .at_layer(layer);
    }
    return size == 0 || given
               ? success()
               : failure(status_code::invalid_argument, "out", "an array, not a null pointer", 0)
                     .at_layer(layer);
}

/// Looks up the slots of the step's rows in layers [first, end) of a list, which are of one set. Slots that
/// lie far apart in memory are asked for side by side. @return the rows that enter such a layer
template <class Slots>
inline std::int32_t drop_ledger<backend::host>::note_slots(const ledger_step& step, const layer_list layers,
                                                           std::int32_t first, std::int32_t end,
                                                           const Slots slots,
                                                           detail::noted_slots& noted) const noexcept {
    const std::int32_t set = layer_sets()[layers.at(first)];
    std::int32_t counted = 0;
    std::int64_t lowest = 0;
    std::int64_t highest = 0;
    for_each_request(step, [&](std::int32_t r, std::int32_t request, const detail::request_record& state) {
        const std::int32_t index = slots.rows == request_index::batch ? r : request;
        const std::int32_t before = state.length_before(set);
        const std::int32_t length = state.length(set);
        counted += length - before;
        const auto look_up_each = [&](auto note) {
            for (std::int32_t row = before; row < length; ++row) {
                for (std::int32_t i = first; i < end; ++i) {
                    const std::int64_t slot = slots.slot(layers.at(i), index, row);
                    lowest = slot < lowest ? slot : lowest;
                    highest = slot > highest ? slot : highest;
                    note(slot);
                }
            }
        };
        if (detail::noted_slots::worth_it(length - before)) {
            look_up_each([&noted](std::int64_t slot) { noted.note(slot); });
        } else {
            look_up_each([](std::int64_t) {});
        }
    });
    noted.include(lowest, highest);
    return counted;
}

/// The first row of a layer that has no slot, or one above @p most.
template <class Slots>
inline status drop_ledger<backend::host>::misfit(const ledger_step& step, std::int32_t layer,
                                                 const Slots& slots, std::int64_t most) const noexcept {
    const std::int32_t set = layer_sets()[layer];
    status fault = success();
    for_each_request(step, [&](std::int32_t r, std::int32_t request, const detail::request_record& state) {
        const std::int32_t index = slots.rows == request_index::batch ? r : request;
        for (std::int32_t row = state.length_before(set); fault.ok() && row < state.length(set); ++row) {
            const std::int64_t slot = slots.slot(layer, index, row);
            if (slot < 0) {
                fault = failure(status_code::capacity_exceeded, "slots", "a page for each row of the request",
                                row)
                            .at_request(request)
                            .at_layer(layer);
            } else if (slot > most) {
                fault = failure(status_code::out_of_range, "slots", "slots that fit the index type", slot)
                            .at_request(request)
                            .at_layer(layer);
            }
        }
    });
    return fault;
}

/// Everything but slots that is wanted of one layer; the arrays start at its part.
template <class Index, class Slot>
inline void drop_ledger<backend::host>::fill_layer(const ledger_step& step, std::int32_t set,
                                                   const step_arrays<Index, Slot> out) const noexcept {
    static_assert(detail::is_index<Index>, "indices are int32 or int64");
    const auto put = [](Index* array, std::int32_t index, std::int32_t value) {
        if (array != nullptr) {
            array[index] = value;
        }
    };
    const detail::ledger_layout layout = layout_; // as in for_each_request()
    std::byte* const memory = memory_;
    const std::int32_t* const request_ids = step.request_ids_;
    const std::int32_t num_requests = step.num_requests_;
    std::int32_t at = 0; // rows so far
    std::int64_t chunk = 0;
    for (std::int32_t r = 0; r < out.num_requests || r < num_requests; ++r) {
        std::int32_t before = 0;
        std::int32_t length = 0;
        if (r < num_requests && request_ids[r] >= 0) {
            const detail::request_record state = layout.record(memory, request_ids[r]);
            before = state.length_before(set);
            length = state.length(set);
            if (length == before + 1 && out.window_rows == nullptr && state.is_dense_from(set, before)) {
                put(out.row_positions, at, state.header->staged.num_tokens - 1); // as decode rows are
                put(out.write_rows, at, before);
            } else {
                // Made once more, so that it needn't be whole where nobody asks for it.
                const auto row_part = [at](Index* array) { return array != nullptr ? array + at : nullptr; };
                detail::fill_rows(layout_.record(memory_, request_ids[r]), set, before, length - before,
                                  row_part(out.row_positions), row_part(out.write_rows),
                                  row_part(out.window_rows), out.window);
            }
        }
        if (r < out.num_requests) { // else arrays by request aren't wanted
            put(out.cached_lens, r, before);
            put(out.seq_lens, r, length);
            put(out.cu_seqlens, r, at);
            if (out.num_pages != nullptr) {
                out.num_pages[r] = num_blocks(length, out.page_tokens);
            }
            if (out.partial_pages != nullptr) {
                const bool goes_on = length > before && before % out.page_tokens != 0;
                out.partial_pages[r] = goes_on ? before / out.page_tokens : -1;
            }
        }
        for (std::int32_t row = 0; out.chunks != nullptr && row < length - before; row += out.chunk_rows) {
            out.chunks[2 * chunk] = r;
            out.chunks[2 * chunk++ + 1] = row / out.chunk_rows;
        }
        at += length - before;
    }
    for (chunk *= 2; out.chunks != nullptr && chunk < std::int64_t{2} * out.num_chunks; ++chunk) {
        out.chunks[chunk] = -1;
    }
    put(out.cu_seqlens, out.num_requests, at);
    for (; at < out.num_rows; ++at) {
        put(out.row_positions, at, -1);
        put(out.write_rows, at, -1);
        put(out.window_rows, at, -1);
    }
}

/// Slots of layers [first, end) of a list, which are of one set; @p size entries each. Asks for them in the
/// order of note_slots().
template <class Slots, class Slot>
inline void drop_ledger<backend::host>::fill_slots(const ledger_step& step, const layer_list layers,
                                                   std::int32_t first, std::int32_t end, const Slots slots,
                                                   Slot* out, std::int32_t size, Slot padding,
                                                   detail::noted_slots& noted) const noexcept {
    const std::int32_t set = layer_sets()[layers.at(first)];
    std::int64_t at = 0;
    for_each_request(step, [&](std::int32_t r, std::int32_t request, const detail::request_record& state) {
        const std::int32_t index = slots.rows == request_index::batch ? r : request;
        const std::int32_t before = state.length_before(set);
        const std::int32_t length = state.length(set);
        const auto write_each = [&](auto slot_of) {
            for (std::int32_t row = before; row < length; ++row, ++at) {
                for (std::int32_t i = first; i < end; ++i) {
                    const auto look_up = [&] { return slots.slot(layers.at(i), index, row); };
                    out[std::int64_t{i - first} * size + at] = static_cast<Slot>(slot_of(look_up));
                }
            }
        };
        if (detail::noted_slots::worth_it(length - before)) {
            write_each([&noted](auto look_up) { return noted.next(look_up); });
        } else {
            write_each([](auto look_up) { return look_up(); });
        }
    });
    for (; at < size; ++at) {
        for (std::int32_t i = first; i < end; ++i) {
            out[std::int64_t{i - first} * size + at] = padding;
        }
    }
}

template <class Index>
inline status drop_ledger<backend::host>::cached_lens(const ledger_step& step, std::int32_t layer, Index* out,
                                                      std::int32_t size, stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, false));
    step_arrays<Index, Index> wanted;
    wanted.num_requests = size;
    wanted.cached_lens = out;
    fill_layer(step, layer_sets()[layer], wanted);
    return success();
}

template <class Index>
inline status drop_ledger<backend::host>::seq_lens(const ledger_step& step, std::int32_t layer, Index* out,
                                                   std::int32_t size, stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, false));
    step_arrays<Index, Index> wanted;
    wanted.num_requests = size;
    wanted.seq_lens = out;
    fill_layer(step, layer_sets()[layer], wanted);
    return success();
}

template <class Index>
inline status drop_ledger<backend::host>::cu_seqlens(const ledger_step& step, std::int32_t layer, Index* out,
                                                     std::int32_t size, stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, false));
    if (size < step.num_requests_ + 1) {
        return failure(status_code::out_of_range, "size", "at least num_requests + 1", size).at_layer(layer);
    }
    step_arrays<Index, Index> wanted;
    wanted.num_requests = size - 1;
    wanted.cu_seqlens = out;
    fill_layer(step, layer_sets()[layer], wanted);
    return success();
}

template <class Index>
inline status drop_ledger<backend::host>::row_positions(const ledger_step& step, std::int32_t layer,
                                                        Index* out, std::int32_t size,
                                                        stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, true));
    step_arrays<Index, Index> wanted;
    wanted.num_rows = size;
    wanted.row_positions = out;
    fill_layer(step, layer_sets()[layer], wanted);
    return success();
}

template <class Index>
inline status drop_ledger<backend::host>::write_rows(const ledger_step& step, std::int32_t layer, Index* out,
                                                     std::int32_t size, stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, true));
    step_arrays<Index, Index> wanted;
    wanted.num_rows = size;
    wanted.write_rows = out;
    fill_layer(step, layer_sets()[layer], wanted);
    return success();
}

template <class Slots, class Index>
inline status drop_ledger<backend::host>::slot_mapping(const ledger_step& step, std::int32_t layer,
                                                       const Slots& slots, Index* out, std::int32_t size,
                                                       stream) const noexcept {
    UNIPREFILL_TRY(check_output(step, layer, out != nullptr, size, true));
    UNIPREFILL_TRY(slots.check().at_layer(layer));
    // Every slot is looked up before the first is written.
    constexpr std::int64_t most = (std::numeric_limits<Index>::max)();
    const layer_list only{layer, 1};
    detail::noted_slots noted;
    note_slots(step, only, 0, 1, slots, noted);
    if (!noted.all_within(most)) {
        return misfit(step, layer, slots, most);
    }
    fill_slots(step, only, 0, 1, slots, out, size, Index{-1}, noted);
    return success();
}

template <class Slots, class Index, class Slot>
inline status drop_ledger<backend::host>::look_up(const ledger_step& step, const layer_list& layers,
                                                  const Slots& slots, const step_arrays<Index, Slot>& out,
                                                  stream) const noexcept {
    static_assert(detail::is_index<Index> && detail::is_index<Slot>, "indices are int32 or int64");
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layers(layers));
    UNIPREFILL_TRY(detail::check(out));
    const bool by_request = out.cached_lens != nullptr || out.seq_lens != nullptr ||
                            out.cu_seqlens != nullptr || out.num_pages != nullptr ||
                            out.partial_pages != nullptr;
    const bool by_row = out.row_positions != nullptr || out.write_rows != nullptr ||
                        out.window_rows != nullptr || out.slots != nullptr;
    if (by_request && out.num_requests < step.num_requests_) {
        return failure(status_code::out_of_range, "step_arrays.num_requests", "at least the step's",
                       out.num_requests);
    }
    // Layers of one set that follow each other, [first, end) of the list.
    const auto end_of_group = [&](std::int32_t first) {
        std::int32_t end = first + 1;
        while (end < layers.count && layer_sets()[layers.at(end)] == layer_sets()[layers.at(first)]) {
            ++end;
        }
        return end;
    };
    const bool same_slots = detail::shares_layers(slots);
    constexpr std::int64_t most = (std::numeric_limits<Slot>::max)();
    detail::noted_slots noted;
    if (out.slots != nullptr) {
        UNIPREFILL_TRY(slots.check());
    }
    for (std::int32_t first = 0; first < layers.count;) {
        const std::int32_t end = end_of_group(first);
        const std::int32_t set = layer_sets()[layers.at(first)];
        std::int32_t rows = 0;
        if (out.slots != nullptr) {
            rows = note_slots(step, layers, first, same_slots ? first + 1 : end, slots, noted);
        } else if (by_row) {
            rows = count_rows(step, set);
        }
        if (out.num_rows < rows) {
            return failure(status_code::out_of_range, "step_arrays.num_rows",
                           "at least the rows that enter the layer", out.num_rows)
                .at_layer(layers.at(first));
        }
        if (out.chunks != nullptr && out.num_chunks < count_chunks(step, set, out.chunk_rows)) {
            return failure(status_code::out_of_range, "step_arrays.num_chunks",
                           "at least the chunks of the rows that enter the layer", out.num_chunks)
                .at_layer(layers.at(first));
        }
        for (std::int32_t i = first; !noted.all_within(most) && i < end; ++i) {
            UNIPREFILL_TRY(misfit(step, layers.at(i), slots, most));
        }
        first = end;
    }
    step_arrays<Index, Slot> part = out;
    for (std::int32_t first = 0; first < layers.count;) {
        const std::int32_t end = end_of_group(first);
        if (out.slots != nullptr) {
            fill_slots(step, layers, first, same_slots ? first + 1 : end, slots, part.slots, out.num_rows,
                       out.no_slot, noted);
        }
        fill_layer(step, layer_sets()[layers.at(first)], part);
        detail::next_part(part);
        for (++first; first < end; ++first) {
            detail::repeat_part(part);
            if (same_slots) {
                detail::repeat(part.slots, out.num_rows);
            }
            detail::next_part(part);
        }
    }
    return success();
}

template <class Index, class Slot>
inline status drop_ledger<backend::host>::look_up(const ledger_step& step, const layer_list& layers,
                                                  const step_arrays<Index, Slot>& out,
                                                  stream on) const noexcept {
    return out.slots == nullptr ? look_up(step, layers, contiguous_slots{}, out, on)
                                : failure(status_code::invalid_argument, "step_arrays.slots",
                                          "a null pointer, as no slot source is given", 1);
}

template <class Index>
inline status drop_ledger<backend::host>::logits_rows(const ledger_step& step, std::int32_t layer,
                                                      const span_lists& wanted, Index* out, std::int32_t size,
                                                      Index* offsets, stream) const noexcept {
    UNIPREFILL_TRY(check_step(step));
    UNIPREFILL_TRY(check_layer(layer));
    UNIPREFILL_TRY(detail::check_wanted(wanted, step.num_requests_).at_layer(layer));
    // Calls enter(place in the batch), then visit(row among the layer's rows, or -1) for each wanted one.
    const std::int32_t set = layer_sets()[layer];
    const auto for_each_wanted = [&](auto enter, auto visit) {
        std::int32_t first_row = 0;
        for (std::int32_t r = 0; r < step.num_requests_; ++r) {
            enter(r);
            if (step.request_ids_[r] < 0) {
                continue;
            }
            const detail::request_record state = record(step.request_ids_[r]);
            const std::int32_t begin = state.header->committed.num_tokens;
            const std::int32_t end = state.header->staged.num_tokens;
            const auto visit_span = [&](position_span span) {
                const std::int32_t from = span.begin > begin ? span.begin : begin;
                const std::int32_t to = span.end < end ? span.end : end;
                for (std::int32_t position = from; position < to; ++position) {
                    visit(state.holds(set, position)
                              ? first_row + state.rows_below(set, position) - state.length_before(set)
                              : -1);
                }
            };
            if (wanted.offsets != nullptr) {
                for (std::int32_t i = wanted.offsets[r]; i < wanted.offsets[r + 1]; ++i) {
                    visit_span(wanted.spans[i]);
                }
            } else {
                visit_span({state.header->tag == request_tag::verify ? begin : end - 1, end});
            }
            first_row += state.length(set) - state.length_before(set);
        }
    };
    const auto nothing = [](std::int32_t) {};
    std::int64_t needed = 0;
    for_each_wanted(nothing, [&](std::int32_t) { ++needed; });
    if (size < needed) {
        return failure(status_code::out_of_range, "size", "at least the rows that need logits", size)
            .at_layer(layer);
    }
    if (size > 0 && out == nullptr) {
        return failure(status_code::invalid_argument, "out", "an array, not a null pointer", 0)
            .at_layer(layer);
    }
    std::int32_t at = 0;
    for_each_wanted(
        [&](std::int32_t r) {
            if (offsets != nullptr) {
                offsets[r] = at;
            }
        },
        [&](std::int32_t row) { out[at++] = row; });
    if (offsets != nullptr) {
        offsets[step.num_requests_] = at;
    }
    for (; at < size; ++at) {
        out[at] = -1;
    }
    return success();
}

UNIPREFILL_END_NAMESPACE
