// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Steps, caches and masses in device memory, and what the estimator makes of them there.
#pragma once

#include "caches.hpp"
#include "estimate.hpp"
#include "support/cuda.cuh"

#include <uniprefill/importance/importance.cuh>

#include <algorithm>
#include <cmath>
#include <vector>

namespace importance_test {

using uniprefill_test::device_array;

inline up::cuda_device this_device() {
    up::cuda_device device;
    const up::status found = up::cuda_device::current(device);
    INFO(message(found));
    REQUIRE(found.ok());
    return device;
}

/// Values as elements of another type.
template <class To, class From>
std::vector<To> converted(const std::vector<From>& from) {
    std::vector<To> to(from.size());
    std::transform(from.begin(), from.end(), to.begin(),
                   [](From value) { return element_of<To>(up::to_float(value)); });
    return to;
}

/// A step's arrays on the device. Q and T are the elements of queries and keys there.
template <class Q, class T = Q>
class device_step {
  public:
    /// @param from like step<Source>
    template <class Step>
    explicit device_step(const Step& from)
        : view_(from.batch())
        , query_rows_(from.query_rows().num_rows)
        , shape_(from.shape())
        , tags_(from.tags)
        , cu_seqlens_(from.cu_seqlens)
        , positions_(from.positions)
        , cached_lens_(from.cached_lens)
        , options_(from.options)
        , cu_segments_(from.cu_segments)
        , segment_request_(from.segment_request)
        , forced_offsets_(from.forced_offsets)
        , forced_spans_(from.forced_spans)
        , observed_offsets_(from.observed_offsets)
        , observed_spans_(from.observed_spans)
        , queries_(converted<Q>(from.queries))
        , keys_(converted<T>(from.keys)) {
        view_.space = up::memory_space::device;
        view_.tags = tags_.data();
        view_.cu_seqlens = cu_seqlens_.data();
        view_.positions = positions_.data();
        view_.cached_lens = cached_lens_.data();
        view_.options = options_.data();
        view_.cu_segments = cu_segments_.data();
        view_.segment_request = segment_request_.data();
        view_.forced = {forced_offsets_.data(), forced_spans_.data()};
        view_.observed = {observed_offsets_.data(), observed_spans_.data()};
    }

    [[nodiscard]] up::batch_view& batch() { return view_; }
    [[nodiscard]] up::head_rows<const Q> query_rows() const { return rows(queries_.data(), shape_.heads); }
    [[nodiscard]] up::head_rows<const T> key_rows() const { return rows(keys_.data(), shape_.kv_heads); }

    /// Replaces the contents of arrays, which stay where they are, by those of a step that is no larger.
    template <class Step>
    void assign(const Step& from) {
        tags_.set(from.tags);
        cu_seqlens_.set(from.cu_seqlens);
        positions_.set(from.positions);
        cached_lens_.set(from.cached_lens);
        options_.set(from.options);
        cu_segments_.set(from.cu_segments);
        segment_request_.set(from.segment_request);
        forced_offsets_.set(from.forced_offsets);
        forced_spans_.set(from.forced_spans);
        observed_offsets_.set(from.observed_offsets);
        observed_spans_.set(from.observed_spans);
        queries_.set(converted<Q>(from.queries));
        keys_.set(converted<T>(from.keys));
    }

  private:
    template <class Element>
    [[nodiscard]] up::head_rows<const Element> rows(const Element* data, std::int32_t heads) const {
        return {data,           std::int64_t{heads} * shape_.head_dim, shape_.head_dim, query_rows_, heads,
                shape_.head_dim};
    }

    up::batch_view view_;
    std::int32_t query_rows_;
    model shape_;
    device_array<up::request_tag> tags_;
    device_array<std::int32_t> cu_seqlens_, positions_, cached_lens_;
    device_array<up::request_options> options_;
    device_array<std::int32_t> cu_segments_, segment_request_, forced_offsets_;
    device_array<up::position_span> forced_spans_;
    device_array<std::int32_t> observed_offsets_;
    device_array<up::position_span> observed_spans_;
    device_array<Q> queries_;
    device_array<T> keys_;
};

/// A copy of a host cache's arrays. Views must not outlive it.
template <class T>
class device_caches {
  public:
    explicit device_caches(const caches<T>& from)
        : from_(from)
        , rows_(from.rows())
        , pages_(from.pages())
        , slots_(from.slots())
        , table_(from.table())
        , indptr_(from.indptr())
        , indices_(from.indices()) {
        std::vector<const void*> pointers;
        for (const std::int32_t page : from.table()) {
            pointers.push_back(pages_.data() + page * from.page_table().page_stride);
        }
        pointers_ = device_array<const void*>(pointers);
    }
    [[nodiscard]] up::contiguous_cache<T> contiguous() const {
        auto view = from_.contiguous();
        view.data = rows_.data();
        return view;
    }
    [[nodiscard]] up::page_table_cache<T> page_table() const {
        auto view = from_.page_table();
        view.data = pages_.data();
        view.table = table_.data();
        return view;
    }
    [[nodiscard]] up::csr_page_cache<T> csr_pages() const {
        auto view = from_.csr_pages();
        view.data = pages_.data();
        view.indptr = indptr_.data();
        view.indices = indices_.data();
        return view;
    }
    [[nodiscard]] up::token_slot_cache<T> token_slots() const {
        auto view = from_.token_slots();
        view.data = pages_.data();
        view.slots = slots_.data();
        return view;
    }
    [[nodiscard]] up::page_pointer_cache<T> page_pointers() const {
        auto view = from_.page_pointers();
        view.pages = pointers_.data();
        return view;
    }

  private:
    const caches<T>& from_;
    device_array<T> rows_, pages_;
    device_array<std::int32_t> slots_, table_, indptr_, indices_;
    device_array<const void*> pointers_;
};

// How keys of a step are found, whatever their elements.
struct none {
    template <class Caches>
    static auto view(const Caches& from) {
        return up::no_cache<typename decltype(from.contiguous())::element>{};
    }
};
struct contiguous {
    template <class Caches>
    static auto view(const Caches& from) {
        return from.contiguous();
    }
};
struct page_table {
    template <class Caches>
    static auto view(const Caches& from) {
        return from.page_table();
    }
};
struct csr_pages {
    template <class Caches>
    static auto view(const Caches& from) {
        return from.csr_pages();
    }
};
struct token_slots {
    template <class Caches>
    static auto view(const Caches& from) {
        return from.token_slots();
    }
};
struct page_pointers {
    template <class Caches>
    static auto view(const Caches& from) {
        return from.page_pointers();
    }
};

/// Masses in device memory.
class device_masses {
  public:
    explicit device_masses(const up::limits& bounds)
        : bounds_(bounds)
        , buffer_(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)))
        , heads_(2 * static_cast<std::size_t>(bounds.num_heads * bounds.max_blocks())) {
        // Blocks that nothing uses have no masses by head, but all are read back.
        uniprefill_test::check_cuda(cudaMemset(heads_.data(), 0xa5, heads_.size() * sizeof(std::int64_t)),
                                    "cudaMemset");
    }
    [[nodiscard]] up::mass_view view() const {
        return up::mass_view::over(buffer_.data(), bounds_, up::memory_space::device);
    }
    [[nodiscard]] up::head_mass_view head_view() const {
        return {heads_.data(), heads_.data() + heads_.size() / 2, bounds_.max_blocks(), bounds_.num_heads};
    }
    [[nodiscard]] masses get() const {
        masses copy(bounds_);
        copy.buffer = buffer_.get();
        copy.heads = heads_.get();
        return copy;
    }

  private:
    up::limits bounds_;
    device_array<std::int64_t> buffer_;
    device_array<std::int64_t> heads_;
};

/// Runs the estimator on the device, between guard bytes.
template <class Policy, class Q, class T, class Cache>
masses run_on_device(const up::head_rows<const Q>& queries, const up::key_source<T, Cache>& keys,
                     const up::attention_params& params, const up::batch_view& batch,
                     const up::limits& bounds, const up::cuda_device& device) {
    const up::importance_estimator<Policy, up::backend::cuda> estimator(bounds, device);
    const up::status ready = estimator.template prepare<Q, T, Cache>();
    INFO(message(ready));
    REQUIRE(ready.ok());
    constexpr std::size_t guard = 4096;
    const std::size_t bytes = estimator.workspace_bytes();
    const device_array<unsigned char> memory(bytes + guard);
    // Whether or not new arrays are filled.
    uniprefill_test::check_cuda(cudaMemset(memory.data() + bytes, 0xa5, guard), "guard bytes");
    const device_masses result(bounds);
    const up::status done = estimator.run(queries, keys, params, batch, result.view(), result.head_view(),
                                          up::workspace(memory.data(), bytes), nullptr);
    INFO(message(done));
    REQUIRE(done.ok());
    const masses made = result.get();
    std::vector<unsigned char> beyond(guard);
    uniprefill_test::check_cuda(
        cudaMemcpy(beyond.data(), memory.data() + bytes, guard, cudaMemcpyDeviceToHost),
        "copy from the device");
    REQUIRE(std::all_of(beyond.begin(), beyond.end(), [](unsigned char byte) { return byte == 0xa5; }));
    return made;
}
template <class Policy, class Q, class T, class Cache>
masses estimate_on_device(device_step<Q, T>& what, const Cache& cached, const up::attention_params& params,
                          const up::limits& bounds, const up::cuda_device& device) {
    return run_on_device<Policy>(what.query_rows(), up::key_source<T, Cache>{what.key_rows(), cached}, params,
                                 what.batch(), bounds, device);
}

/// This device with each body that it has for some types.
template <bool HasSm90>
std::vector<up::cuda_device> each_body() {
    std::vector<up::cuda_device> made(1, this_device());
    made[0].body = up::cuda_body::portable;
    if (HasSm90 && made[0].compute_capability == 90) {
        made.push_back(made[0]);
        made[1].body = up::cuda_body::sm90;
    }
    return made;
}

} // namespace importance_test
