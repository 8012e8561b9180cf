// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Steps on the device: uploaded in one copy, decided, compared with what the host selector writes.

#include "step.hpp"
#include "support/cuda.cuh"
#include "support/scale.hpp"

#include <uniprefill/select/selector.cuh>

#include <algorithm>
#include <string>
#include <vector>

namespace select_test {

using uniprefill_test::captured_graph;
using uniprefill_test::check_cuda;
using uniprefill_test::device_array;
using uniprefill_test::has_device;
using uniprefill_test::scaled;

inline up::cuda_device this_device() {
    up::cuda_device device;
    REQUIRE(up::cuda_device::current(device).ok());
    return device;
}

/// A step of @p requests requests of about @p blocks blocks each, dense or thinned, with masses of one
/// style.
inline step many_requests(generator& random, std::int32_t requests, std::int32_t blocks,
                          std::int32_t block_rows) {
    step what(block_rows);
    for (std::int32_t r = 0; r < requests; ++r) {
        const auto rows = static_cast<std::int32_t>(random.below(2 * blocks * block_rows + 1));
        std::vector<std::int32_t> where;
        std::int32_t position = 0;
        const bool thinned = random.chance(2);
        for (std::int32_t i = 0; i < rows; ++i) {
            where.push_back(position);
            position += 1 + static_cast<std::int32_t>(thinned && random.chance(7) ? random.below(200) : 0);
        }
        std::vector<up::position_span> forced;
        if (random.chance(6) && rows > 0) {
            const auto from = static_cast<std::int32_t>(random.below(position + 1));
            forced.push_back({from, from + static_cast<std::int32_t>(random.below(3 * block_rows))});
        }
        up::request_options options;
        options.enabled = random.chance(20) ? 0 : 1;
        options.sink = options.tail = random.chance(2) ? 128 : 3;
        const auto tag = random.chance(10) ? up::request_tag::decode : up::request_tag::prefill;
        what.add_request({rows}, where, forced, options, random_rule(random, rows + 1), tag);
    }
    what.close();
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        randomise_masses(random, what, s);
    }
    what.bounds.max_forced_spans = 1 << 13;
    return what;
}

/// Everything a call reads, in host memory: a batch whose arrays may be spoiled before they are uploaded.
template <class Rule>
struct host_arrays {
    std::vector<up::request_tag> tags;
    std::vector<std::int32_t> cu_seqlens;
    std::vector<std::int32_t> positions;
    std::vector<up::request_options> options;
    std::vector<std::int32_t> cu_segments; // empty: no segment arrays
    std::vector<std::int32_t> segment_request;
    std::vector<std::int32_t> span_offsets;
    std::vector<up::position_span> spans;
    std::vector<Rule> rules;
    std::vector<std::int64_t> rank_buffer;

    host_arrays(const step& from, const std::vector<Rule>& wanted)
        : tags(from.tags)
        , cu_seqlens(from.cu_seqlens)
        , positions(from.positions)
        , options(from.options)
        , span_offsets(from.span_offsets)
        , spans(from.spans)
        , rules(wanted)
        , rank_buffer(from.rank_buffer) {
        if (from.num_segments() != from.num_requests()) {
            cu_segments = from.cu_segments;
            segment_request = from.segment_request;
        }
    }
};

/// Device memory for steps within some limits. Arrays always lie at the same places, so a graph can be
/// replayed.
template <class Rule>
class device_step {
  public:
    explicit device_step(const up::limits& bounds)
        : bounds_(bounds)
        , bytes_(carve(nullptr))
        , input_(bytes_)
        , staging_(bytes_ + 256)
        , output_bytes_(decision::bytes(bounds))
        , output_(output_bytes_ + guard) {
        carve(input_.data());
        up::workspace pieces(output_.data(), output_bytes_);
        out = up::selection::carve(pieces, bounds, up::memory_space::device);
    }

    /// Uploads @p from, and forgets what was written before. Rows beyond the step's hold rubbish.
    void upload(const host_arrays<Rule>& from, bool with_segments) {
        with_segments_ = with_segments;
        std::fill(staging_.begin(), staging_.end(), static_cast<unsigned char>(0x77));
        put(tags_, from.tags);
        put(cu_seqlens_, from.cu_seqlens);
        put(positions_, from.positions);
        put(options_, from.options);
        put(cu_segments_, from.cu_segments);
        put(segment_request_, from.segment_request);
        put(span_offsets_, from.span_offsets);
        put(spans_, from.spans);
        put(rules_, from.rules);
        put(rank_buffer_, from.rank_buffer);
        check_cuda(cudaMemcpy(input_.data(), staging_.data(), bytes_, cudaMemcpyHostToDevice), "upload");
        check_cuda(cudaMemset(output_.data(), 0xa5, output_.size()), "cudaMemset");
    }
    up::batch_view batch(std::int32_t requests, std::int32_t segments, std::int32_t rows) const {
        up::batch_view view;
        view.space = up::memory_space::device;
        view.num_requests = requests;
        view.num_segments = segments;
        view.num_rows = rows;
        view.tags = tags_;
        view.cu_seqlens = cu_seqlens_;
        view.positions = positions_;
        view.options = options_;
        if (with_segments_) {
            view.cu_segments = cu_segments_;
            view.segment_request = segment_request_;
        }
        view.forced = {span_offsets_, spans_};
        return view;
    }
    up::mass_view masses() const {
        return up::mass_view::over(rank_buffer_, bounds_, up::memory_space::device);
    }
    const Rule* rules() const { return rules_; }

    /// Runs a selector on a stream.
    void run(const up::cuda_device& device, const up::cuda_selector_options& options,
             const up::batch_view& batch, std::int32_t kept_bound, cudaStream_t stream) {
        const up::block_selector<Rule, up::backend::cuda> selector(bounds_, device, options);
        if (scratch_.size() < selector.workspace_bytes()) {
            scratch_ = device_array<unsigned char>(selector.workspace_bytes());
        }
        const up::status done = selector.run(masses(), batch, rules_, kept_bound, out,
                                             {scratch_.data(), selector.workspace_bytes()}, stream);
        INFO(done.argument << ": " << done.expected << " " << done.came);
        REQUIRE(done.ok());
    }
    /// What was written, in host memory.
    up::selection download() {
        written_ = output_.get();
        for (std::size_t i = output_bytes_; i < written_.size(); ++i) {
            REQUIRE(written_[i] == 0xa5); // nothing beyond the selection
        }
        up::selection there = out;
        const auto move = [&](auto*& pointer) {
            const auto offset = reinterpret_cast<unsigned char*>(pointer) - output_.data();
            pointer = reinterpret_cast<std::remove_reference_t<decltype(pointer)>>(written_.data() + offset);
        };
        move(there.keep_bits);
        move(there.kept_to_old);
        move(there.old_to_kept);
        move(there.cu_seqlens);
        move(there.cu_segments);
        move(there.outcomes);
        return there;
    }

    up::selection out;

  private:
    static constexpr std::size_t guard = 4096;

    std::size_t carve(unsigned char* memory) {
        up::workspace pieces(memory, memory != nullptr ? bytes_ : 0);
        tags_ = pieces.take<up::request_tag>(bounds_.max_requests);
        cu_seqlens_ = pieces.take<std::int32_t>(bounds_.max_requests + 1);
        positions_ = pieces.take<std::int32_t>(bounds_.max_rows);
        options_ = pieces.take<up::request_options>(bounds_.max_requests);
        cu_segments_ = pieces.take<std::int32_t>(bounds_.max_segments + 1);
        segment_request_ = pieces.take<std::int32_t>(bounds_.max_segments);
        span_offsets_ = pieces.take<std::int32_t>(bounds_.max_requests + 1);
        spans_ = pieces.take<up::position_span>(bounds_.max_forced_spans);
        rules_ = pieces.take<Rule>(bounds_.max_requests);
        rank_buffer_ = pieces.take<std::int64_t>(up::mass_view::rank_buffer_size(bounds_));
        return pieces.bytes_used();
    }
    template <class T>
    void put(T* place, const std::vector<T>& values) {
        if (!values.empty()) {
            const auto offset = reinterpret_cast<unsigned char*>(place) - input_.data();
            REQUIRE(static_cast<std::size_t>(offset) + values.size() * sizeof(T) <= bytes_);
            std::memcpy(staging_.data() + offset, values.data(), values.size() * sizeof(T));
        }
    }

    up::limits bounds_;
    up::request_tag* tags_ = nullptr;
    std::int32_t* cu_seqlens_ = nullptr;
    std::int32_t* positions_ = nullptr;
    up::request_options* options_ = nullptr;
    std::int32_t* cu_segments_ = nullptr;
    std::int32_t* segment_request_ = nullptr;
    std::int32_t* span_offsets_ = nullptr;
    up::position_span* spans_ = nullptr;
    Rule* rules_ = nullptr;
    std::int64_t* rank_buffer_ = nullptr;
    bool with_segments_ = false;
    std::size_t bytes_;
    device_array<unsigned char> input_;
    std::vector<unsigned char> staging_;
    std::size_t output_bytes_;
    device_array<unsigned char> output_;
    std::vector<unsigned char> written_;
    device_array<unsigned char> scratch_;
};

inline bool same(const up::segment_outcome& a, const up::segment_outcome& b) {
    return a.total_mass == b.total_mass && a.dropped_mass == b.dropped_mass && a.rows == b.rows &&
           a.kept == b.kept && a.cut_block == b.cut_block && a.cut_rows == b.cut_rows && a.reason == b.reason;
}

/// Every output of the device against the host's. @p rows: what the device took for an upper bound.
inline void check_alike(const step& what, const decision& wanted, const up::selection& came,
                        std::int32_t rows) {
    REQUIRE_FALSE(came.identity);
    REQUIRE(came.num_requests == what.num_requests());
    REQUIRE(came.num_segments == what.num_segments());
    REQUIRE(came.num_rows == rows);
    std::int64_t wrong = 0;
    for (std::int32_t s = 0; s < what.num_segments(); ++s) {
        const up::segment_outcome& mine = came.outcomes[s];
        const up::segment_outcome& told = wanted.outcome(s);
        if (!same(mine, told)) {
            FAIL("segment " << s << " of " << what.rows_of(s) << " rows: wanted "
                            << up::to_string(told.reason) << " kept " << told.kept << " total "
                            << told.total_mass << " dropped " << told.dropped_mass << " cut "
                            << told.cut_block << "/" << told.cut_rows << ", came "
                            << up::to_string(mine.reason) << " kept " << mine.kept << " total "
                            << mine.total_mass << " dropped " << mine.dropped_mass << " cut "
                            << mine.cut_block << "/" << mine.cut_rows);
        }
    }
    for (std::int32_t r = 0; r <= what.num_requests(); ++r) {
        wrong += came.cu_seqlens[r] != wanted.out.cu_seqlens[r] ? 1 : 0;
    }
    REQUIRE(wrong == 0);
    for (std::int32_t s = 0; s <= what.num_segments(); ++s) {
        wrong += came.cu_segments[s] != wanted.out.cu_segments[s] ? 1 : 0;
    }
    REQUIRE(wrong == 0);
    for (std::int64_t i = 0; i < (what.bounds.max_blocks() + 31) / 32; ++i) {
        wrong += came.keep_bits[i] != wanted.out.keep_bits[i] ? 1 : 0;
    }
    REQUIRE(wrong == 0);
    const std::int32_t true_rows = what.cu_seqlens.back();
    for (std::int32_t row = 0; row < rows; ++row) {
        wrong += came.old_to_kept[row] != (row < true_rows ? wanted.out.old_to_kept[row] : -1) ? 1 : 0;
    }
    REQUIRE(wrong == 0);
    const std::int32_t kept = wanted.out.cu_seqlens[what.num_requests()];
    for (std::int32_t i = 0; i < came.kept_bound; ++i) {
        wrong += came.kept_to_old[i] != (i < kept ? wanted.out.kept_to_old[i] : -1) ? 1 : 0;
    }
    REQUIRE(wrong == 0);
}

/// Runs @p what once with the given choices and compares.
template <class Rule>
void check_run(device_step<Rule>& memory, step& what, const std::vector<Rule>& rules, const decision& wanted,
               const up::cuda_device& device, const up::cuda_selector_options& options) {
    const auto rows = static_cast<std::int32_t>(what.positions.size());
    const host_arrays<Rule> arrays(what, rules);
    memory.upload(arrays, !arrays.cu_segments.empty());
    memory.run(device, options, memory.batch(what.num_requests(), what.num_segments(), rows), rows, nullptr);
    check_alike(what, wanted, memory.download(), rows);
}

/// Of the choices below, so many meet each grid, cluster and number of launches.
constexpr std::int32_t enough_choices = 7;

/// The choices of case @p i: a grid of one thread block and up, one launch and two, clusters and none.
inline up::cuda_selector_options choices(std::int32_t i, up::cuda_device& device) {
    constexpr std::int32_t grids[] = {0, 1, 2, 7, 16, 0, 33};
    constexpr std::int32_t clusters[] = {0, 1, 2, 4, 8};
    using launch_count = up::cuda_selector_options::launch_count;
    up::cuda_selector_options options;
    device.max_ctas = grids[i % 7];
    options.cluster_ctas = clusters[i % 5];
    options.launches = i % 4 == 3   ? launch_count::two
                       : i % 4 == 2 ? launch_count::one
                                    : launch_count::automatic;
    return options;
}

} // namespace select_test
