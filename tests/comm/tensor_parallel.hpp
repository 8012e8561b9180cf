// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

/// @file
/// A step whose heads are spread over ranks, as tensor parallelism does: KV heads in order, each with its
/// query heads. Every rank decides by the facade, with whatever reduction the test has.

#include "property/decision.hpp"
#include "property/memory.hpp"
#include "property/step.hpp"

#include <uniprefill/pipeline/prefill_sparsifier.hpp>

#include <limits>
#include <vector>

namespace tensor_parallel {

using namespace property;

/// Masses summed over heads and ranks, or their maximum.
template <class HeadReduction>
struct policy {
    using estimator = up::estimator_policy<up::dynamic, up::dynamic, HeadReduction>;
    using rule = up::selection_rule;
};

/// The requests of one step, their heads whole.
struct problem {
    shape of;
    std::vector<request> requests;
    std::vector<up::selection_rule> rules;
};

/// A problem whose heads @p ranks ranks can share: a few requests, among them a decode.
inline problem random_problem(random_numbers& numbers, int ranks) {
    problem made;
    shape& of = made.of;
    of.kv_heads = ranks * numbers.between(1, 2);
    of.heads = of.kv_heads * numbers.between(1, 3);
    of.dim = numbers.one_of({8, 16, 40});
    of.block_rows = numbers.one_of({8, 24});
    of.observations = numbers.one_of({1, 5, 16});
    of.score.scale = 0.25;
    if (numbers.chance(0.3)) {
        for (int head = 0; head < of.heads; ++head) {
            of.score.sink_logits.push_back(rounded(numbers.normal(), rounding::f32));
        }
    }
    for (int count = numbers.between(1, 3); count > 0; --count) {
        request_wishes wishes;
        wishes.rows = numbers.between(1, 5 * of.block_rows);
        wishes.segments = numbers.between(1, 2);
        wishes.gaps = numbers.chance(0.3);
        wishes.spans = numbers.chance(0.3);
        wishes.style = random_style(numbers);
        made.requests.push_back(random_request(numbers, of, wishes, rounding::f32));
        made.requests.back().options.enabled = 1;
        made.rules.push_back(random_rule(numbers, made.requests.back().rows()).ours);
    }
    request_wishes decode;
    decode.rows = 1;
    decode.tag = up::request_tag::decode;
    made.requests.push_back(random_request(numbers, of, decode, rounding::f32));
    made.rules.push_back(up::selection_rule::top_p(0.9));
    return made;
}

/// What rank @p rank of @p ranks holds of @p whole.
inline problem share_of(const problem& whole, int rank, int ranks) {
    problem share = whole;
    share.of.heads /= ranks;
    share.of.kv_heads /= ranks;
    const int first = rank * share.of.heads;
    if (!whole.of.score.sink_logits.empty()) {
        share.of.score.sink_logits.assign(whole.of.score.sink_logits.begin() + first,
                                          whole.of.score.sink_logits.begin() + first + share.of.heads);
    }
    const auto cut = [](const oracle::tensor& from, int first_head, int heads) {
        oracle::tensor part(from.rows, heads, from.dim);
        for (int row = 0; row < from.rows; ++row) {
            for (int head = 0; head < heads; ++head) {
                for (int i = 0; i < from.dim; ++i) {
                    part.at(row, head, i) = from.at(row, first_head + head, i);
                }
            }
        }
        return part;
    };
    for (request& one : share.requests) {
        one.q = cut(one.q, first, share.of.heads);
        one.k = cut(one.k, rank * share.of.kv_heads, share.of.kv_heads);
    }
    return share;
}

/// Makes every key of a request something that no score can be made of.
inline void spoil_keys(problem& what, int request) {
    for (double& value : what.requests[static_cast<std::size_t>(request)].k.data) {
        value = std::numeric_limits<double>::infinity();
    }
}

/// One rank's decision about its share. Only decide() may run beside other ranks: all else judges.
template <class HeadReduction>
class rank_step {
  public:
    rank_step(const problem& share, int global_heads)
        : rows_(share.requests, share.of)
        , sinks_(share.of.score.sink_logits.begin(), share.of.score.sink_logits.end())
        , bounds_(rows_.limits(global_heads))
        , rules_(share.rules)
        , layer_{0, {}, rules_.data()}
        , sparsifier_(bounds_, {&layer_, 1})
        , memory_(sparsifier_.workspace_bytes())
        , step_(sparsifier_) {
        attention_.scale = static_cast<float>(share.of.score.scale);
        attention_.sink_logits = sinks_.empty() ? nullptr : sinks_.data();
        REQUIRE(sparsifier_.check().ok());
        REQUIRE(step_.begin(rows_.batch(), memory_.view()).ok());
    }
    rank_step(const rank_step&) = delete;
    rank_step& operator=(const rank_step&) = delete;

    template <class Reduction>
    void decide(const Reduction& reduction) {
        result_ = step_.decide(0, rows_.q(), up::key_source<float>{rows_.k(), {}}, attention_, nullptr,
                               decided_, {}, reduction);
    }

    const up::status& result() const { return result_; }
    /// The whole rank buffer as it was after the reduction.
    std::vector<std::int64_t> masses() const {
        const std::int64_t* first = step_.masses().free;
        return {first, first + up::mass_view::rank_buffer_size(bounds_)};
    }
    std::vector<kept_segment> kept() const { return consistent(decided_, rows_.batch()); }
    const up::batch_view rows_alive() const { return step_.rows(); }

  private:
    step<float> rows_;
    std::vector<float> sinks_;
    up::attention_params attention_;
    up::limits bounds_;
    std::vector<up::selection_rule> rules_;
    up::selecting_layer<up::selection_rule> layer_;
    up::prefill_sparsifier<policy<HeadReduction>> sparsifier_;
    aligned_memory memory_;
    up::prefill_step<policy<HeadReduction>> step_;
    up::selection decided_;
    up::status result_;
};

/// What one rank with all heads decides.
template <class HeadReduction>
struct unsplit {
    explicit unsplit(const problem& whole) {
        rank_step<HeadReduction> all(whole, whole.of.heads);
        all.decide(up::no_reduction{});
        REQUIRE(all.result().ok());
        masses = all.masses();
        kept = all.kept();
    }
    std::vector<std::int64_t> masses;
    std::vector<kept_segment> kept;
};

/// Whether a decision that met keys that aren't finite, on whatever rank, kept what the unsplit one kept and
/// said why.
inline bool same_rows_and_reasons(const std::vector<kept_segment>& a, const std::vector<kept_segment>& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                      [](const kept_segment& x, const kept_segment& y) {
                          return x.keep == y.keep && x.outcome.reason == y.outcome.reason;
                      });
}

} // namespace tensor_parallel
