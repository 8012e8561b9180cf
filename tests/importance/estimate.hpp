// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Runs the estimator on a step with buffers of its own, guarded on both sides.
#pragma once

#include "step.hpp"
#include "support/catch.hpp"

#include <uniprefill/importance/importance.hpp>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

namespace importance_test {

/// A buffer of exactly so many bytes at an aligned address, with guard bytes around it.
class guarded_buffer {
  public:
    explicit guarded_buffer(std::size_t bytes)
        : bytes_(bytes)
        , memory_(bytes + 3 * up::workspace::alignment, guard) {
        void* start = memory_.data() + up::workspace::alignment;
        std::size_t space = memory_.size() - up::workspace::alignment;
        start_ = static_cast<unsigned char*>(std::align(up::workspace::alignment, bytes, start, space));
        std::memset(start_, 0xff, bytes); // NaN and nonsense: contents must not matter
    }
    [[nodiscard]] void* data() const { return start_; }
    [[nodiscard]] bool is_intact() const {
        const auto inside = [&](const unsigned char& byte) {
            return &byte >= start_ && &byte < start_ + bytes_;
        };
        return std::all_of(memory_.begin(), memory_.end(),
                           [&](const unsigned char& byte) { return inside(byte) || byte == guard; });
    }
    [[nodiscard]] bool is_unwritten() const {
        return std::all_of(start_, start_ + bytes_, [](unsigned char byte) { return byte == 0xff; });
    }

  private:
    static constexpr unsigned char guard = 0xa5;
    std::size_t bytes_;
    std::vector<unsigned char> memory_;
    unsigned char* start_;
};

/// Masses of a step, with nonsense in them until something is written.
struct masses {
    explicit masses(const up::limits& given)
        : bounds(given)
        , buffer(static_cast<std::size_t>(up::mass_view::rank_buffer_size(given)), nonsense)
        , heads(2 * static_cast<std::size_t>(given.num_heads * given.max_blocks()), nonsense) {}

    [[nodiscard]] up::mass_view view() {
        return up::mass_view::over(buffer.data(), bounds, up::memory_space::host);
    }
    [[nodiscard]] up::head_mass_view head_view() {
        return {heads.data(), heads.data() + heads.size() / 2, bounds.max_blocks(), bounds.num_heads};
    }
    [[nodiscard]] bool is_unwritten() const {
        const auto same = [](std::int64_t value) { return value == nonsense; };
        return std::all_of(buffer.begin(), buffer.end(), same) &&
               std::all_of(heads.begin(), heads.end(), same);
    }

    static constexpr std::int64_t nonsense = 0x5a5a5a5a5a5a5a5a;
    up::limits bounds;
    std::vector<std::int64_t> buffer;
    std::vector<std::int64_t> heads; // [2][num_heads][max_blocks]
};

inline std::string message(const up::status& what) {
    char text[320];
    static_cast<void>(up::format(what, text, sizeof text));
    return text;
}

using dynamic_estimator = up::importance_estimator<up::estimator_policy<up::dynamic, up::dynamic>>;

/// @param what like step<T>
template <class Estimator = dynamic_estimator, class Step, class Cache>
masses estimate(const Step& what, const Cache& cached, const up::attention_params& params,
                const up::limits& bounds) {
    using element = std::remove_cv_t<std::remove_pointer_t<decltype(what.key_rows().data)>>;
    const Estimator estimator(bounds);
    masses result(bounds);
    const guarded_buffer memory(estimator.workspace_bytes());
    const up::status done = estimator.run(
        what.query_rows(), up::key_source<element, Cache>{what.key_rows(), cached}, params, what.batch(),
        result.view(), result.head_view(), up::workspace(memory.data(), estimator.workspace_bytes()));
    INFO(message(done));
    REQUIRE(done.ok());
    REQUIRE(memory.is_intact());
    return result;
}

template <class T>
masses estimate(const step<T>& what, const up::attention_params& params = {}) {
    return estimate(what, up::no_cache<T>{}, params, what.tight_limits());
}

/// Everything that was said about one segment: fault word, free and forced masses, and both for each head.
inline std::vector<std::int64_t> of_segment(masses& from, const up::batch_view& batch, std::int32_t segment) {
    const std::int32_t begin = batch.segment_begin(segment);
    const std::int32_t g = from.bounds.block_rows;
    const std::int64_t first = up::block_offset(segment, begin, g);
    const std::int32_t blocks = up::num_blocks(batch.segment_end(segment) - begin, g);
    std::vector<std::int64_t> all{from.view().faults[segment]};
    const auto append = [&](const std::int64_t* values) {
        all.insert(all.end(), values + first, values + first + blocks);
    };
    append(from.view().free);
    append(from.view().forced);
    for (std::int32_t head = 0; head < from.bounds.num_heads; ++head) {
        append(from.head_view().free + head * from.head_view().head_stride);
        append(from.head_view().forced + head * from.head_view().head_stride);
    }
    return all;
}

/// The largest difference of masses of scored blocks, as a share of 1e-5 of the mass plus 1e-7 of a head's
/// total: at most 1 where the two agree. Fault words must be equal.
inline double worst_difference(masses& a, masses& b, const up::batch_view& batch) {
    double worst = 0;
    const double one = static_cast<double>(std::int64_t{1} << a.view().format.fraction_bits);
    for (std::int32_t s = 0; s < batch.num_segments; ++s) {
        const std::vector<std::int64_t> left = of_segment(a, batch, s);
        const std::vector<std::int64_t> right = of_segment(b, batch, s);
        CAPTURE(s, batch.segment_end(s) - batch.segment_begin(s));
        REQUIRE(left[0] == right[0]);
        for (std::size_t i = 1; i < left.size(); ++i) {
            const double x = static_cast<double>(left[i]) / one;
            const double y = static_cast<double>(right[i]) / one;
            worst =
                std::max(worst, std::abs(x - y) / (1e-5 * std::abs(y) + 1e-7 * a.bounds.num_observations));
        }
    }
    return worst;
}

} // namespace importance_test
