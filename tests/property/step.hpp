// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Requests packed into one step, as an engine would hold them: the arrays behind a batch_view, q and k rows,
/// and the cached keys in each of the layouts of core/kv_view.hpp.

#include "property/request.hpp"

#include <uniprefill/core/element.hpp>
#include <uniprefill/core/kv_view.hpp>
#include <uniprefill/core/mass.hpp>
#include <uniprefill/core/rows.hpp>

#include <numeric>

namespace property {

template <class Element>
Element as_element(double value) {
    return up::from_float<Element>(static_cast<float>(value));
}

/// The arrays of a step. Rows of q and k are @p padding elements further apart than they need to be.
template <class Element>
class step {
  public:
    step(const std::vector<request>& requests, const shape& of, int padding = 0)
        : of_(of)
        , q_stride_(std::int64_t{of.heads} * of.dim + padding)
        , k_stride_(std::int64_t{of.kv_heads} * of.dim + padding) {
        cu_seqlens_.push_back(0);
        cu_segments_.push_back(0);
        forced_offsets_.push_back(0);
        observed_offsets_.push_back(0);
        for (const request& one : requests) {
            add(one);
        }
        // Arrays without elements still have an address.
        positions_.reserve(1);
        q_.resize(q_.size() + 1);
        k_.resize(k_.size() + 1);
    }

    up::batch_view batch() const {
        up::batch_view view;
        view.num_requests = static_cast<std::int32_t>(tags_.size());
        view.num_segments = static_cast<std::int32_t>(segment_request_.size());
        view.num_rows = cu_seqlens_.back();
        view.tags = tags_.data();
        view.cu_seqlens = cu_seqlens_.data();
        view.positions = positions_.data();
        view.cached_lens = cached_lens_.data();
        view.options = options_.data();
        if (view.num_segments != view.num_requests) {
            view.cu_segments = cu_segments_.data();
            view.segment_request = segment_request_.data();
        }
        view.forced = {forced_offsets_.data(), forced_.data()};
        view.observed = {observed_offsets_.data(), observed_.data()};
        return view;
    }
    up::head_rows<const Element> q() const {
        return {q_.data(), q_stride_, of_.dim, cu_seqlens_.back(), of_.heads, of_.dim};
    }
    up::head_rows<const Element> k() const {
        return {k_.data(), k_stride_, of_.dim, cu_seqlens_.back(), of_.kv_heads, of_.dim};
    }
    void spoil_query(int row, int head, int i, Element value) {
        q_[static_cast<std::size_t>(row * q_stride_ + head * of_.dim + i)] = value;
    }
    void spoil_key(int row, int head, int i, Element value) {
        k_[static_cast<std::size_t>(row * k_stride_ + head * of_.dim + i)] = value;
    }
    /// Limits that this step just fits; @p global_heads as in limits.
    up::limits limits(int global_heads = 0) const {
        up::limits bounds;
        bounds.max_requests = std::max(1, static_cast<int>(tags_.size()));
        bounds.max_segments = std::max(bounds.max_requests, static_cast<int>(segment_request_.size()));
        bounds.max_rows = cu_seqlens_.back();
        bounds.max_cached_tokens = std::accumulate(cached_lens_.begin(), cached_lens_.end(), 0);
        bounds.num_heads = of_.heads;
        bounds.num_kv_heads = of_.kv_heads;
        bounds.head_dim = of_.dim;
        bounds.block_rows = of_.block_rows;
        bounds.num_observations = of_.observations;
        bounds.num_global_heads = global_heads;
        return bounds;
    }

  private:
    void add(const request& one) {
        const auto index = static_cast<std::int32_t>(tags_.size());
        tags_.push_back(one.tag);
        options_.push_back(one.options);
        cached_lens_.push_back(one.cached);
        positions_.insert(positions_.end(), one.positions.begin(), one.positions.end());
        for (const int rows : one.span_rows) {
            cu_segments_.push_back(cu_segments_.back() + rows);
            segment_request_.push_back(index);
        }
        cu_seqlens_.push_back(cu_seqlens_.back() + one.rows());
        add_spans(one.forced, forced_offsets_, forced_);
        add_spans(one.observed, observed_offsets_, observed_);
        append(one.q, 0, q_, q_stride_);
        append(one.k, one.cached, k_, k_stride_);
    }
    static void add_spans(const std::vector<oracle::range>& ranges, std::vector<std::int32_t>& offsets,
                          std::vector<up::position_span>& spans) {
        for (const oracle::range& r : ranges) {
            spans.push_back({r.begin, r.end});
        }
        offsets.push_back(static_cast<std::int32_t>(spans.size()));
    }
    static void append(const oracle::tensor& from, int first_row, std::vector<Element>& to,
                       std::int64_t stride) {
        for (int row = first_row; row < from.rows; ++row) {
            const std::size_t begin = to.size();
            to.resize(begin + static_cast<std::size_t>(stride), as_element<Element>(1e4));
            for (int head = 0; head < from.heads; ++head) {
                for (int i = 0; i < from.dim; ++i) {
                    to[begin + static_cast<std::size_t>(head * from.dim + i)] =
                        as_element<Element>(from.at(row, head, i));
                }
            }
        }
    }

    shape of_;
    std::int64_t q_stride_;
    std::int64_t k_stride_;
    std::vector<up::request_tag> tags_;
    std::vector<up::request_options> options_;
    std::vector<std::int32_t> cached_lens_;
    std::vector<std::int32_t> cu_seqlens_;
    std::vector<std::int32_t> positions_;
    std::vector<std::int32_t> cu_segments_;
    std::vector<std::int32_t> segment_request_;
    std::vector<std::int32_t> forced_offsets_;
    std::vector<std::int32_t> observed_offsets_;
    std::vector<up::position_span> forced_;
    std::vector<up::position_span> observed_;
    std::vector<Element> q_;
    std::vector<Element> k_;
};

/// Cached keys of the requests of a step, in every layout. Pages and slots are scattered, and what lies
/// between is large, so that a wrong address shows.
template <class Element>
class key_caches {
  public:
    key_caches(const std::vector<request>& requests, const shape& of, random_numbers& numbers)
        : of_(of)
        , page_tokens_(numbers.one_of({1, 4, 16, 7})) {
        for (const request& one : requests) {
            longest_ = std::max(longest_, one.cached);
            pages_.push_back((one.cached + page_tokens_ - 1) / page_tokens_);
            total_pages_ += pages_.back();
        }
        table_stride_ = (longest_ + page_tokens_ - 1) / page_tokens_ + 1;
        shuffle_pages(numbers);
        fill(requests);
    }

    up::contiguous_cache<Element> contiguous() const {
        const std::int64_t token = std::int64_t{of_.kv_heads} * of_.dim;
        return {flat_.data(), token * (longest_ + 1), token, of_.dim};
    }
    /// Heads outside tokens (HND) inside a page.
    up::page_table_cache<Element> page_table() const {
        return {paged_.data(), page_stride(), of_.dim,     std::int64_t{page_tokens_} * of_.dim,
                table_.data(), table_stride_, page_tokens_};
    }
    up::csr_page_cache<Element> csr_pages() const {
        return {paged_.data(),  page_stride(),   of_.dim,     std::int64_t{page_tokens_} * of_.dim,
                indptr_.data(), indices_.data(), page_tokens_};
    }
    up::token_slot_cache<Element, std::int64_t> token_slots() const {
        return {slotted_.data(), std::int64_t{of_.kv_heads} * of_.dim, of_.dim, slots_.data(), longest_ + 1};
    }
    up::page_pointer_cache<Element> page_pointers() const {
        return {pointers_.data(), table_stride_, 0, of_.dim, std::int64_t{page_tokens_} * of_.dim,
                page_tokens_};
    }

    void spoil_contiguous(int request, int token, int head, int i, Element value) {
        const std::int64_t entry = std::int64_t{request} * (longest_ + 1) + token;
        flat_[static_cast<std::size_t>((entry * of_.kv_heads + head) * of_.dim + i)] = value;
    }

  private:
    std::int64_t page_stride() const { return std::int64_t{of_.kv_heads} * page_tokens_ * of_.dim; }

    void shuffle_pages(random_numbers& numbers) {
        std::vector<std::int32_t> free_pages(static_cast<std::size_t>(2 * total_pages_ + 1));
        std::iota(free_pages.begin(), free_pages.end(), 0);
        for (std::size_t i = free_pages.size(); i > 1; --i) {
            std::swap(free_pages[i - 1],
                      free_pages[static_cast<std::size_t>(numbers.between(0, static_cast<int>(i) - 1))]);
        }
        const auto wrong = static_cast<double>(1e4);
        paged_.assign(static_cast<std::size_t>(page_stride()) * free_pages.size(),
                      as_element<Element>(wrong));
        table_.assign(static_cast<std::size_t>(table_stride_) * pages_.size() + 1, 0);
        pointers_.assign(table_.size(), nullptr);
        indptr_.push_back(0);
        std::size_t next = 0;
        for (std::size_t r = 0; r < pages_.size(); ++r) {
            for (int page = 0; page < pages_[r]; ++page, ++next) {
                const std::size_t entry =
                    r * static_cast<std::size_t>(table_stride_) + static_cast<std::size_t>(page);
                table_[entry] = free_pages[next];
                pointers_[entry] = paged_.data() + free_pages[next] * page_stride();
                indices_.push_back(free_pages[next]);
            }
            indptr_.push_back(static_cast<std::int32_t>(indices_.size()));
        }
        indices_.push_back(0);
    }

    void fill(const std::vector<request>& requests) {
        const std::int64_t token_size = std::int64_t{of_.kv_heads} * of_.dim;
        const auto tokens = static_cast<std::size_t>(longest_ + 1) * requests.size() + 1;
        const auto wrong = as_element<Element>(1e4);
        flat_.assign(tokens * static_cast<std::size_t>(token_size), wrong);
        slotted_ = flat_;
        slots_.assign(tokens, 0);
        for (std::size_t r = 0; r < requests.size(); ++r) {
            for (int token = 0; token < requests[r].cached; ++token) {
                const std::size_t entry =
                    r * static_cast<std::size_t>(longest_ + 1) + static_cast<std::size_t>(token);
                slots_[entry] = static_cast<std::int64_t>(tokens - 1 - entry); // backwards
                for (int head = 0; head < of_.kv_heads; ++head) {
                    for (int i = 0; i < of_.dim; ++i) {
                        const auto value = as_element<Element>(requests[r].k.at(token, head, i));
                        const auto within = static_cast<std::size_t>(head * of_.dim + i);
                        flat_[entry * static_cast<std::size_t>(token_size) + within] = value;
                        slotted_[(tokens - 1 - entry) * static_cast<std::size_t>(token_size) + within] =
                            value;
                        const std::int64_t page = table_[r * static_cast<std::size_t>(table_stride_) +
                                                         static_cast<std::size_t>(token / page_tokens_)];
                        paged_[static_cast<std::size_t>(
                            page * page_stride() +
                            (std::int64_t{head} * page_tokens_ + token % page_tokens_) * of_.dim + i)] =
                            value;
                    }
                }
            }
        }
    }

    shape of_;
    int page_tokens_;
    int longest_ = 0;
    int total_pages_ = 0;
    std::int64_t table_stride_ = 0;
    std::vector<int> pages_;
    std::vector<Element> flat_;
    std::vector<Element> paged_;
    std::vector<Element> slotted_;
    std::vector<std::int32_t> table_;
    std::vector<std::int32_t> indptr_;
    std::vector<std::int32_t> indices_;
    std::vector<const void*> pointers_;
    std::vector<std::int64_t> slots_;
};

} // namespace property
