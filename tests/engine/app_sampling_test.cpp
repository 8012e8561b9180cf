// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/sampling.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <limits>
#include <set>
#include <vector>

using app_test::contains;
using app_test::refusal;

namespace {

std::vector<std::int32_t> draw(const engine::sampling_options& options, const std::vector<float>& logits,
                               int count) {
    engine::sampler sampler(options);
    std::vector<std::int32_t> out;
    for (int i = 0; i < count; ++i) {
        out.push_back(sampler.next(logits.data(), static_cast<std::int32_t>(logits.size())));
    }
    return out;
}

engine::sampling_options at_temperature(double temperature, std::uint64_t seed = 1) {
    engine::sampling_options options;
    options.temperature = temperature;
    options.seed = seed;
    return options;
}

} // namespace

TEST_CASE("app: greedy takes the largest, the lower of equals") {
    const std::vector<float> logits = {-1, 5, 2, 5, -7};
    CHECK(engine::greedy(logits.data(), 5) == 1);
    CHECK(engine::greedy(logits.data(), 1) == 0);
    CHECK(draw(at_temperature(0), logits, 3) == std::vector<std::int32_t>{1, 1, 1});
}

TEST_CASE("app: the draw is fixed by the seed, on every platform") {
    const std::vector<float> logits = {0, 1, 2, 0.5F, -1, 1.5F, 0.25F, -2};
    const auto first = draw(at_temperature(1, 42), logits, 16);
    CHECK(first == draw(at_temperature(1, 42), logits, 16));
    CHECK(first != draw(at_temperature(1, 43), logits, 16));
    CHECK(first == std::vector<std::int32_t>{2, 2, 1, 0, 4, 3, 1, 3, 1, 5, 1, 2, 3, 2, 1, 6});
}

TEST_CASE("app: frequencies are the softmax's") {
    const std::vector<float> logits = {0, 1, 2};
    const int count = 60000;
    std::vector<int> seen(3);
    for (const std::int32_t id : draw(at_temperature(2), logits, count)) {
        ++seen[static_cast<std::size_t>(id)];
    }
    double sum = 0;
    for (const float logit : logits) {
        sum += std::exp(logit / 2.0);
    }
    for (std::size_t id = 0; id < 3; ++id) {
        const double p = std::exp(logits[id] / 2.0) / sum;
        CHECK(std::fabs(seen[id] - p * count) < 5 * std::sqrt(p * (1 - p) * count));
    }
}

TEST_CASE("app: top-k and top-p bound what can come") {
    const std::vector<float> logits = {3, 1, 3, 2, 0};
    engine::sampling_options options = at_temperature(5);
    options.top_k = 3;
    auto drawn = draw(options, logits, 500);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0, 2, 3});
    options.top_k = 1;
    drawn = draw(options, logits, 50);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0});

    // Probabilities 1/2, 1/4, 1/8, 1/8: the fewest that hold 3/4 are the first two, those that hold more are
    // three.
    std::vector<float> halves;
    for (const double p : {.5, .25, .125, .125}) {
        halves.push_back(static_cast<float>(std::log(p)));
    }
    options = at_temperature(1);
    options.top_p = 0.7499;
    drawn = draw(options, halves, 500);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0, 1});
    options.top_p = 0.76;
    drawn = draw(options, halves, 500);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0, 1, 2});
    const std::vector<float> equals = {0, 0};
    options.top_p = 0.5; // held exactly by the first
    drawn = draw(options, equals, 50);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0});
    options.top_p = 1e-9;
    drawn = draw(options, halves, 50);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0});
}

TEST_CASE("app: a tiny temperature is greedy, a huge one is uniform") {
    const std::vector<float> logits = {3e38F, -3e38F, 3e38F};
    auto drawn = draw(at_temperature(1e-300), logits, 200);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0, 2});
    drawn = draw(at_temperature(1e300), logits, 200);
    CHECK(std::set<std::int32_t>(drawn.begin(), drawn.end()) == std::set<std::int32_t>{0, 1, 2});
}

TEST_CASE("app: sampling refuses bad numbers") {
    const std::vector<float> logits = {0, std::numeric_limits<float>::quiet_NaN()};
    CHECK(contains(refusal([&] { engine::greedy(logits.data(), 2); }),
                   "logit of token 1: expected a finite number"));
    CHECK(contains(refusal([] { engine::sampler s(at_temperature(-1)); }), "temperature"));
    CHECK(contains(refusal([] { engine::sampler s(at_temperature(std::nan(""))); }), "temperature"));
    engine::sampling_options options;
    options.top_p = 0;
    CHECK(contains(refusal([&] { engine::sampler s(options); }), "top-p"));
    options.top_p = 1;
    options.top_k = -1;
    CHECK(contains(refusal([&] { engine::sampler s(options); }), "top-k"));
}
