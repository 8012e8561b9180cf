// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// Runs the estimator on packed requests, and keeps what it wrote.

#include "property/decision.hpp"
#include "property/memory.hpp"
#include "property/step.hpp"

#include <uniprefill/importance/importance.hpp>

namespace property {

/// Masses of one step, the library's own integers. Copies own their memory.
struct estimated {
    up::limits bounds;
    std::vector<std::int64_t> buffer;      // a rank buffer
    std::vector<std::int64_t> head_free;   // [heads][max_blocks]
    std::vector<std::int64_t> head_forced; // [heads][max_blocks]

    up::mass_view masses() { return up::mass_view::over(buffer.data(), bounds, up::memory_space::host); }
};

/// All that is known of one segment, wherever its step put it.
struct segment_masses {
    std::vector<std::int64_t> free;
    std::vector<std::int64_t> forced;
    std::vector<std::vector<std::int64_t>> head_free;
    std::vector<std::vector<std::int64_t>> head_forced;
    std::int64_t fault = 0;
};

inline bool operator==(const segment_masses& a, const segment_masses& b) {
    return a.free == b.free && a.forced == b.forced && a.head_free == b.head_free &&
           a.head_forced == b.head_forced && a.fault == b.fault;
}

inline segment_masses masses_of_segment(const estimated& what, const up::batch_view& batch, int segment) {
    const int begin = batch.segment_begin(segment);
    const int blocks = up::num_blocks(batch.segment_end(segment) - begin, what.bounds.block_rows);
    const std::int64_t offset = up::block_offset(segment, begin, what.bounds.block_rows);
    const std::int64_t all = what.bounds.max_blocks();
    const auto cut = [&](const std::vector<std::int64_t>& from, std::int64_t first) {
        return std::vector<std::int64_t>(from.begin() + first, from.begin() + first + blocks);
    };
    segment_masses one;
    one.free = cut(what.buffer, offset);
    one.forced = cut(what.buffer, all + offset);
    for (int head = 0; head < what.bounds.num_heads; ++head) {
        one.head_free.push_back(cut(what.head_free, head * all + offset));
        one.head_forced.push_back(cut(what.head_forced, head * all + offset));
    }
    one.fault = what.buffer[static_cast<std::size_t>(2 * all + segment)];
    return one;
}

inline up::attention_params attention_of(const shape& of, const std::vector<float>& sink_logits) {
    up::attention_params params;
    params.scale = static_cast<float>(of.score.scale);
    params.softcap = static_cast<float>(of.score.softcap);
    params.sink_logits = sink_logits.empty() ? nullptr : sink_logits.data();
    return params;
}

template <class Policy = up::estimator_policy<up::dynamic, up::dynamic>, class Element, class Cache>
estimated estimate(const step<Element>& packed, const shape& of, const Cache& cache,
                   const up::limits& bounds) {
    const std::vector<float> sink_logits(of.score.sink_logits.begin(), of.score.sink_logits.end());
    const up::importance_estimator<Policy> estimator(bounds);
    const aligned_memory memory(estimator.workspace_bytes());
    estimated out;
    out.bounds = bounds;
    out.buffer.assign(static_cast<std::size_t>(up::mass_view::rank_buffer_size(bounds)), -1);
    const auto blocks = static_cast<std::size_t>(bounds.max_blocks());
    out.head_free.assign(blocks * static_cast<std::size_t>(bounds.num_heads), -1);
    out.head_forced = out.head_free;
    const up::head_mass_view per_head{out.head_free.data(), out.head_forced.data(), bounds.max_blocks(),
                                      bounds.num_heads};
    const up::status done = estimator.run(packed.q(), up::key_source<Element, Cache>{packed.k(), cache},
                                          attention_of(of, sink_logits), packed.batch(), out.masses(),
                                          per_head, memory.view(), {});
    char message[256];
    up::format(done, message, sizeof message);
    INFO("estimator: " << message);
    REQUIRE(done.ok());
    return out;
}

template <class Element>
estimated estimate(const step<Element>& packed, const shape& of) {
    return estimate(packed, of, up::no_cache<Element>{}, packed.limits());
}

} // namespace property
