// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/model/paged_kv_store.hpp"

#include <uniprefill/core/batch.hpp>

#include <algorithm>

namespace engine {

namespace {

constexpr std::int32_t no_page = -1;

} // namespace

paged_kv_store::paged_kv_store(const paged_kv_limits& limits)
    : limits_(limits)
    , max_pages_(uniprefill::num_blocks(limits.max_tokens, limits.page_tokens))
    , row_elements_(static_cast<std::size_t>(limits.kv_heads) * static_cast<std::size_t>(limits.head_dim))
    , page_elements_(row_elements_ * static_cast<std::size_t>(limits.page_tokens))
    , k_(static_cast<std::size_t>(limits.pages) * page_elements_)
    , v_(k_.size())
    , pool_(limits.pages)
    , in_use_(static_cast<std::size_t>(limits.layers) * static_cast<std::size_t>(limits.requests)) {
    table_.assign(in_use_.size() * static_cast<std::size_t>(max_pages_), no_page);
}

void paged_kv_store::write(std::int32_t layer, std::int32_t request, std::int64_t first, const float* k,
                           const float* v, std::int64_t rows, std::int64_t stride) {
    const std::size_t table = index(layer, request);
    const std::int64_t room = std::int64_t{in_use_[table].end} * limits_.page_tokens;
    if (first + rows > room) {
        throw error("KV store", "pages reserved for " + std::to_string(first + rows) + " rows",
                    "pages for " + std::to_string(room));
    }
    const std::int32_t* pages = entries(table);
    for (std::int64_t row = 0; row < rows; ++row) {
        check_unshared(pages, first + row);
        const std::size_t to = offset_of(pages, first + row);
        std::copy_n(k + row * stride, row_elements_, k_.data() + to);
        std::copy_n(v + row * stride, row_elements_, v_.data() + to);
    }
}

void paged_kv_store::check_unshared(const std::int32_t* pages, std::int64_t row) const {
    if (pool_.references(pages[row / limits_.page_tokens]) != 1) {
        throw error("KV store", "rows in pages of one holder", "a shared page");
    }
}

void paged_kv_store::keep(std::int32_t layer, std::int32_t request, const std::int32_t* from,
                          std::int32_t count) {
    const std::int32_t* pages = entries(index(layer, request));
    for (std::int32_t row = 0; row < count; ++row) {
        if (from[row] != row) check_unshared(pages, row);
    }
    for (std::vector<float>* rows : {&k_, &v_}) {
        for (std::int32_t row = 0; row < count; ++row) {
            if (from[row] != row) {
                std::copy_n(rows->data() + offset_of(pages, from[row]), row_elements_,
                            rows->data() + offset_of(pages, row));
            }
        }
    }
}

kv_sequence paged_kv_store::rows(std::int32_t layer, std::int32_t request) const {
    const std::size_t table = index(layer, request);
    return {k_.data(),
            v_.data(),
            static_cast<std::int64_t>(row_elements_),
            limits_.head_dim,
            std::int64_t{in_use_[table].end} * limits_.page_tokens,
            entries(table)};
}

void paged_kv_store::release(std::int32_t request) {
    for (std::int32_t layer = 0; layer < limits_.layers; ++layer) {
        const std::size_t table = index(layer, request);
        for (std::int32_t i = 0; i < in_use_[table].end; ++i) {
            pool_.give_back(entries(table)[i]);
            entries(table)[i] = no_page;
        }
        in_use_[table] = {};
    }
}

std::size_t paged_kv_store::bytes() const {
    return static_cast<std::size_t>(pool_.num_taken()) * page_bytes();
}

uniprefill::page_tables paged_kv_store::tables() {
    uniprefill::page_tables made;
    made.table = table_.data();
    made.in_use = in_use_.data();
    made.layer_stride = std::int64_t{limits_.requests} * max_pages_;
    made.request_stride = max_pages_;
    made.span_layer_stride = limits_.requests;
    made.max_pages = max_pages_;
    made.no_page = no_page;
    made.rows = uniprefill::request_index::ledger;
    return made;
}

std::vector<std::int32_t> paged_kv_store::pages_of(std::int32_t layer, std::int32_t request) const {
    const std::size_t table = index(layer, request);
    return {entries(table), entries(table) + in_use_[table].end};
}

std::int32_t paged_kv_store::shared_partial_page(std::size_t table, std::int32_t held) const {
    const std::int32_t page = held / limits_.page_tokens;
    const bool partial = held % limits_.page_tokens != 0 && page < in_use_[table].end;
    return partial && pool_.references(entries(table)[page]) > 1 ? page : -1;
}

std::int32_t paged_kv_store::pages_needed(std::int32_t layer, std::int32_t request, std::int32_t held,
                                          std::int32_t more) const {
    const std::size_t table = index(layer, request);
    const std::int32_t copies = more > 0 && shared_partial_page(table, held) >= 0 ? 1 : 0;
    return copies +
           std::max(0, uniprefill::num_blocks(held + more, limits_.page_tokens) - in_use_[table].end);
}

std::int32_t paged_kv_store::reserve(std::int32_t layer, std::int32_t request, std::int32_t held,
                                     std::int32_t more) {
    const std::size_t table = index(layer, request);
    std::int32_t copies = 0;
    if (const std::int32_t at = more > 0 ? shared_partial_page(table, held) : -1; at >= 0) {
        const std::int32_t shared = entries(table)[at];
        const std::int32_t own = pool_.take();
        for (std::vector<float>* rows : {&k_, &v_}) {
            std::copy_n(rows->data() + static_cast<std::size_t>(shared) * page_elements_, page_elements_,
                        rows->data() + static_cast<std::size_t>(own) * page_elements_);
        }
        entries(table)[at] = own;
        pool_.give_back(shared);
        copies = 1;
    }
    const std::int32_t pages = uniprefill::num_blocks(held + more, limits_.page_tokens);
    for (std::int32_t& end = in_use_[table].end; end < pages; ++end) {
        entries(table)[end] = pool_.take();
    }
    return copies;
}

void paged_kv_store::adopt(std::int32_t layer, std::int32_t request, const std::vector<std::int32_t>& pages) {
    const std::size_t table = index(layer, request);
    std::copy(pages.begin(), pages.end(), entries(table));
    in_use_[table].end = static_cast<std::int32_t>(pages.size());
    for (const std::int32_t page : pages) {
        pool_.share(page);
    }
}

void paged_kv_store::copy_out(std::int32_t layer, std::int32_t request, std::int32_t held,
                              std::vector<float>& out) const {
    const std::int32_t* pages = entries(index(layer, request));
    for (const std::vector<float>* rows : {&k_, &v_}) {
        for (std::int32_t row = 0; row < held; ++row) {
            const float* from = rows->data() + offset_of(pages, row);
            out.insert(out.end(), from, from + row_elements_);
        }
    }
}

const float* paged_kv_store::copy_in(std::int32_t layer, std::int32_t request, std::int32_t held,
                                     const float* in) {
    const auto elements = static_cast<std::ptrdiff_t>(row_elements_) * held;
    write(layer, request, 0, in, in + elements, held, static_cast<std::int64_t>(row_elements_));
    return in + 2 * elements;
}

} // namespace engine
