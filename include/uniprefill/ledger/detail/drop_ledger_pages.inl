// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#pragma once

#include <uniprefill/ledger/detail/divided_pages.hpp>

#include <initializer_list>

UNIPREFILL_BEGIN_NAMESPACE

namespace detail {

[[nodiscard]] inline UNIPREFILL_HOST_API status check_tables(const page_tables& tables) noexcept {
    const auto bad = [](const char* argument, const char* expected, std::int64_t came) {
        return failure(status_code::invalid_argument, argument, expected, came);
    };
    if (tables.max_pages < 0 || (tables.max_pages > 0 && tables.table == nullptr)) {
        return bad("page_tables.table", "max_pages entries a request", tables.max_pages);
    }
    if (tables.in_use == nullptr) {
        return bad("page_tables.in_use", "an array, not a null pointer", 0);
    }
    return (tables.layer_stride == 0) == (tables.span_layer_stride == 0)
               ? success()
               : bad("page_tables.span_layer_stride",
                     "0 where the tables are shared by layers, and only there", tables.span_layer_stride);
}

} // namespace detail

/// Calls visit(layer, index of the request in the tables, slot, live entries) for each table.
template <class Visit>
inline void drop_ledger<backend::host>::for_each_table(const std::int32_t* request_ids, std::int32_t count,
                                                       const layer_list& layers, const page_rule& rule,
                                                       const page_tables& tables,
                                                       Visit visit) const noexcept {
    const bool shared = tables.layer_stride == 0;
    for (std::int32_t i = 0; i < layers.count; i += shared ? layers.count : 1) {
        for (std::int32_t r = 0; r < count; ++r) {
            const std::int32_t request = request_ids[r];
            if (request < 0) {
                continue;
            }
            const detail::request_record state = record(request);
            const auto live_of = [&](std::int32_t index) {
                return detail::held_rows_maker::make(state, layer_sets()[layers.at(index)]).live_pages(rule);
            };
            page_span live = live_of(i);
            for (std::int32_t other = i + 1; shared && other < layers.count; ++other) {
                live = detail::together(live, live_of(other));
            }
            visit(layers.at(i), tables.rows == request_index::batch ? r : request, request, live);
        }
    }
}

inline status drop_ledger<backend::host>::hand_back_pages(const std::int32_t* request_ids, std::int32_t count,
                                                          const layer_list& layers, const page_rule& rule,
                                                          const page_tables& tables, std::int32_t* pages,
                                                          std::int32_t capacity, std::int32_t& num_pages,
                                                          stream) const noexcept {
    UNIPREFILL_TRY(check_layers(layers));
    if (count < 0 || (count > 0 && request_ids == nullptr)) {
        return failure(status_code::invalid_argument, "request_ids", "an array of count slots", count);
    }
    for (std::int32_t r = 0; r < count; ++r) {
        if (request_ids[r] != -1) {
            UNIPREFILL_TRY(check_request(request_ids[r]));
        }
    }
    UNIPREFILL_TRY(rule.check());
    if (count == 0 || layers.count == 0) {
        num_pages = 0;
        return success();
    }
    UNIPREFILL_TRY(detail::check_tables(tables));
    if (capacity < 0 || (capacity > 0 && pages == nullptr)) {
        return failure(status_code::invalid_argument, "pages", "an array of capacity pages", capacity);
    }
    // Everything is looked at before the first entry is changed.
    status fault = success();
    std::int64_t found = 0;
    const auto judge = [&](std::int32_t layer, std::int32_t index, std::int32_t request, page_span live) {
        if (!fault.ok()) {
            return;
        }
        const page_span used = tables.span(layer, index);
        const auto bad = [&](const char* argument, const char* expected, std::int64_t came) {
            fault = failure(status_code::invalid_argument, argument, expected, came)
                        .at_request(request)
                        .at_layer(layer);
        };
        if (used.begin < 0 || used.end < used.begin || used.end > tables.max_pages) {
            bad("page_tables.in_use", "entries below max_pages, the end not before the begin", used.end);
            return;
        }
        const detail::divided_pages parts(used, live);
        for (const page_span part : {parts.before, parts.after}) {
            for (std::int32_t entry = part.begin; entry < part.end; ++entry) {
                const std::int32_t page = tables.entries(layer, index)[entry];
                if (page < 0 || page == tables.no_page) {
                    bad("page_tables.table", "a page in each entry in use", page);
                    return;
                }
                ++found;
            }
        }
    };
    for_each_table(request_ids, count, layers, rule, tables, judge);
    UNIPREFILL_TRY(fault);
    if (found > capacity) {
        return failure(status_code::capacity_exceeded, "capacity", "room for every page handed back", found);
    }
    num_pages = 0;
    for_each_table(request_ids, count, layers, rule, tables,
                   [&](std::int32_t layer, std::int32_t index, std::int32_t, page_span live) {
                       page_span& used = tables.span(layer, index);
                       const detail::divided_pages parts(used, live);
                       for (const page_span part : {parts.before, parts.after}) {
                           for (std::int32_t entry = part.begin; entry < part.end; ++entry) {
                               std::int32_t& page = tables.entries(layer, index)[entry];
                               pages[num_pages++] = page;
                               page = tables.no_page;
                           }
                       }
                       used = parts.kept;
                   });
    return success();
}

inline status drop_ledger<backend::host>::pages_of(std::int32_t request, const layer_list& layers,
                                                   const page_rule& rule, page_usage& usage) const noexcept {
    UNIPREFILL_TRY(check_request(request));
    UNIPREFILL_TRY(check_layers(layers).at_request(request));
    UNIPREFILL_TRY(rule.check().at_request(request));
    const detail::request_record state = record(request);
    const std::int64_t dense = detail::held_rows_maker::make(state, 0).live_pages(rule).count();
    page_usage counted;
    for (std::int32_t i = 0; i < layers.count; ++i) {
        counted.pages +=
            detail::held_rows_maker::make(state, layer_sets()[layers.at(i)]).live_pages(rule).count();
        counted.dense_pages += dense;
    }
    usage = counted;
    return success();
}

UNIPREFILL_END_NAMESPACE
