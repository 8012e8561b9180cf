// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// Random steps.
#pragma once

#include "step.hpp"

#include <uniprefill/core/attention_params.hpp>

#include <initializer_list>

namespace importance_test {

/// Draws models, requests and parameters, with lengths around everything that a length may fall on.
class generator {
  public:
    explicit generator(std::uint64_t seed)
        : random_(seed) {}

    std::int32_t below(std::int32_t bound) {
        return static_cast<std::int32_t>(random_() % static_cast<std::uint64_t>(bound));
    }
    bool chance(std::int32_t percent) { return below(100) < percent; }
    template <class Choice>
    Choice among(std::initializer_list<Choice> choices) {
        return choices.begin()[below(static_cast<std::int32_t>(choices.size()))];
    }

    model any_model() {
        model shape;
        shape.kv_heads = among({1, 1, 2, 3});
        shape.heads = shape.kv_heads * among({1, 3, 4, 8});
        shape.head_dim = among({1, 5, 17, 64, 80});
        shape.block_rows = among({8, 13, 16, 50, 64, 100});
        shape.num_observations = among({1, 2, 7, 16, 33});
        return shape;
    }

    std::vector<up::position_span> any_spans(std::int32_t positions) {
        std::vector<up::position_span> spans;
        for (std::int32_t at = below(40); at < positions && spans.size() < 6;) {
            const std::int32_t end = at + below(30); // may be empty
            spans.push_back({at, end});
            at = end + below(60);
        }
        return spans;
    }

    request any_request(const model& shape) {
        const std::int32_t n = shape.num_observations;
        const std::int32_t g = shape.block_rows;
        request what;
        what.seed = random_();
        what.options.sink = among({0, 3, g, 2 * g + 1});
        what.options.tail = among({0, 1, n, g});
        const std::int32_t count = chance(25) ? 1 + below(3) : 1;
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t rows =
                among({0, 1, n - 1, n, n + 1, g - 1, g, g + 1, what.options.sink + n, 3 * g + 7, 200});
            what.segments.push_back(rows);
        }
        if (chance(40)) {
            what.tag = up::request_tag::chunk;
            what.cached = among({0, 1, g - 1, g, 2 * g + 3, 90});
        }
        if (chance(10)) {
            what.tag = among({up::request_tag::decode, up::request_tag::verify});
        }
        what.options.enabled = chance(8) ? 0 : 1;
        what.options.min_length = chance(10) ? 40 : 0;
        what.gaps = chance(30);
        if (chance(40)) {
            what.forced = any_spans(what.cached + what.rows());
        }
        if (chance(30)) {
            what.observed = any_spans(what.cached + what.rows());
        }
        what.spread = among({0.1f, 1.0f, 4.0f});
        return what;
    }

    up::attention_params any_params(const model& shape, std::vector<float>& sinks) {
        up::attention_params params;
        params.scale = chance(30) ? 0.03f + 0.01f * static_cast<float>(below(20)) : 0.0f;
        params.softcap = among({0.0f, 0.0f, 2.0f, 30.0f});
        if (chance(30)) {
            for (std::int32_t head = 0; head < shape.heads; ++head) {
                sinks.push_back(static_cast<float>(below(12)) - 6.0f);
            }
            params.sink_logits = sinks.data();
        }
        return params;
    }

  private:
    std::mt19937_64 random_;
};

} // namespace importance_test
