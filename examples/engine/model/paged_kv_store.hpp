// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/model/kv_store.hpp"
#include "engine/model/page_pool.hpp"

#include <uniprefill/ledger/pages.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace engine {

/// What a paged store is made for.
struct paged_kv_limits {
    std::int32_t layers = 0;
    std::int32_t requests = 0; ///< alive at once
    std::int32_t kv_heads = 0;
    std::int32_t head_dim = 0;
    std::int32_t max_tokens = 0; ///< positions of one request
    std::int32_t pages = 0;      ///< of the pool
    std::int32_t page_tokens = 16;
};

/// Keys and values in pages of one pool. A page holds `page_tokens` rows of one layer of one request, and
/// each (layer, request) has a block table of its own, so what one layer drops is room for any other layer or
/// request. Requests may share pages; a shared page is never written.
///
/// The tables are as the ledger takes them (uniprefill::page_tables, requests by slot).
class paged_kv_store final : public kv_store {
  public:
    explicit paged_kv_store(const paged_kv_limits& limits);

    /// The pages must have been reserved.
    void write(std::int32_t layer, std::int32_t request, std::int64_t first, const float* k, const float* v,
               std::int64_t rows, std::int64_t stride) override;
    /// Pages stay until the ledger's hand_back_pages() takes them; those that are written mustn't be shared.
    void keep(std::int32_t layer, std::int32_t request, const std::int32_t* from,
              std::int32_t count) override;
    kv_sequence rows(std::int32_t layer, std::int32_t request) const override;
    std::int32_t page_tokens() const override { return limits_.page_tokens; }
    void release(std::int32_t request) override;
    std::size_t bytes() const override;

    page_pool& pool() { return pool_; }
    const page_pool& pool() const { return pool_; }
    std::size_t page_bytes() const { return 2 * page_elements_ * sizeof(float); }
    uniprefill::page_tables tables();
    /// Pages of a request in a layer, in order of position.
    std::vector<std::int32_t> pages_of(std::int32_t layer, std::int32_t request) const;

    /// Pages that reserve() would take from the pool.
    std::int32_t pages_needed(std::int32_t layer, std::int32_t request, std::int32_t held,
                              std::int32_t more) const;
    /// Makes room for @p more rows behind the @p held ones of a layer. A partly filled page that others have
    /// too is replaced by a copy first. @return pages copied
    std::int32_t reserve(std::int32_t layer, std::int32_t request, std::int32_t held, std::int32_t more);
    /// A layer of a request that has no pages takes these, which stay with their other holders too.
    void adopt(std::int32_t layer, std::int32_t request, const std::vector<std::int32_t>& pages);

    /// The first @p held rows of a layer, for a request that is swapped out; appended to @p out.
    void copy_out(std::int32_t layer, std::int32_t request, std::int32_t held, std::vector<float>& out) const;
    /// Writes them back from @p in, into pages reserved for them. @return where the next layer's begin
    const float* copy_in(std::int32_t layer, std::int32_t request, std::int32_t held, const float* in);

  private:
    std::size_t index(std::int32_t layer, std::int32_t request) const {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(limits_.requests) +
               static_cast<std::size_t>(request);
    }
    std::int32_t* entries(std::size_t table) {
        return table_.data() + table * static_cast<std::size_t>(max_pages_);
    }
    const std::int32_t* entries(std::size_t table) const {
        return table_.data() + table * static_cast<std::size_t>(max_pages_);
    }
    /// Throws `error` where others have the page of a row that is about to be written.
    void check_unshared(const std::int32_t* pages, std::int64_t row) const;
    /// The table entry whose page would have to be copied before a row is written behind @p held rows, or -1.
    std::int32_t shared_partial_page(std::size_t table, std::int32_t held) const;
    std::size_t offset_of(const std::int32_t* pages, std::int64_t row) const {
        const std::int64_t slot =
            std::int64_t{pages[row / limits_.page_tokens]} * limits_.page_tokens + row % limits_.page_tokens;
        return static_cast<std::size_t>(slot) * row_elements_;
    }

    paged_kv_limits limits_;
    std::int32_t max_pages_; ///< of one layer of one request
    std::size_t row_elements_;
    std::size_t page_elements_;
    std::vector<float> k_; // [pages, page_tokens, kv_heads, head_dim]
    std::vector<float> v_; // as k
    page_pool pool_;
    std::vector<std::int32_t> table_;           // [layers, requests, max_pages]
    std::vector<uniprefill::page_span> in_use_; // [layers, requests] from 0 on
};

} // namespace engine
