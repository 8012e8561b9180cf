// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/search.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

using engine::calibration::choice;
using engine::calibration::score;
using engine::calibration::search;

namespace {

constexpr std::int32_t layers = 12;

/// Where a p is between 1 and 0.90: 1 for 0.995 to 5 for 0.90.
int depth_of(std::int8_t step) {
    int depth = 0;
    for (const double share : {0.995, 0.99, 0.98, 0.95, 0.90}) {
        depth += step > 0 && engine::calibration::layer_step(share) <= step ? 1 : 0;
    }
    return depth;
}

/// A model of models: each layer drops a share of what is left, and harms by what it drops.
score pretend(const choice& one) {
    score made;
    double left = 1;
    double lin = 0;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        const int step = depth_of(one.steps[static_cast<std::size_t>(layer)]);
        if (step > 0) {
            const double harm = layer % 3 == 1 ? 0.001 : 0.02;
            made.kl += left * harm * step * step / (1 + layer);
            left *= 1 - 0.08 * step;
        }
        lin += left / layers;
    }
    const int lists = depth_of(one.lists.front());
    made.kl += 0.0004 * lists * lists;
    made.work = {lin, lin * (1 - 0.2 * lists), 0, 0.5 * lin + 0.5 * lin * (1 - 0.2 * lists)};
    made.kl_max = 2 * made.kl;
    return made;
}

struct counted {
    int runs = 0;
    int adopted = 0;
    int left = 1 << 30;
    engine::calibration::search_calls calls() {
        return {[this](const choice& one) -> std::optional<score> {
                    if (left-- <= 0) return std::nullopt;
                    ++runs;
                    return pretend(one);
                },
                [this](const choice&, const std::vector<bool>&) { ++adopted; }, [](const std::string&) {}};
    }
};

} // namespace

TEST_CASE("calibration: candidates") {
    CHECK(engine::calibration::candidate_layers(6) == std::vector<std::int32_t>{0, 1, 2, 3, 4});
    const auto many = engine::calibration::candidate_layers(30);
    CHECK(many.front() == 1);
    CHECK(many.back() == 27);
    CHECK(many.size() == 14);
    CHECK(engine::calibration::candidate_layers(1).empty());
}

TEST_CASE("calibration: the search stays within the divergence and beats one p at every third layer") {
    for (const double divergence : {0.002, 0.01, 0.05}) {
        counted runs;
        search found(layers, {divergence, false, 3}, runs.calls());
        REQUIRE(found.probe());
        CHECK(found.probes().size() == 11);
        REQUIRE(found.run());
        const auto best = found.best();
        CHECK(best.measured.kl <= divergence);
        CHECK(best.choice.lists == std::vector<std::int8_t>(layers, 0));
        CHECK(best.measured.work.total < 1);
        CHECK(found.evaluations() == runs.runs + 1);
        for (const double share : {0.995, 0.99, 0.98, 0.95, 0.90}) {
            choice plain = engine::calibration::dense_choice(layers);
            for (const std::size_t layer : {2u, 5u, 8u}) {
                plain.steps[layer] = engine::calibration::layer_step(share);
            }
            const score of = pretend(plain);
            CHECK((of.kl > divergence || of.work.total > best.measured.work.total));
        }
        // The layers that harm little are the ones that drop most.
        int harmless = 0;
        int harmful = 0;
        for (std::size_t layer = 0; layer < layers; ++layer) {
            (layer % 3 == 1 ? harmless : harmful) += depth_of(best.choice.steps[layer]);
        }
        CHECK(harmless > harmful);

        counted again;
        search repeated(layers, {divergence, false, 3}, again.calls());
        REQUIRE(repeated.probe());
        REQUIRE(repeated.run());
        CHECK(repeated.best().choice == best.choice);
        CHECK(again.runs == runs.runs);
    }
}

TEST_CASE("calibration: lists are chosen where they may be") {
    counted runs;
    search found(layers, {0.01, true, 1}, runs.calls());
    REQUIRE(found.probe());
    REQUIRE(found.run());
    CHECK(found.best().choice.lists.front() > 0);
    CHECK(found.best().choice.lists == std::vector<std::int8_t>(layers, found.best().choice.lists.front()));
}

TEST_CASE("calibration: a search that runs out of time has the best so far") {
    counted whole;
    search complete(layers, {0.01, false, 1}, whole.calls());
    REQUIRE(complete.probe());
    REQUIRE(complete.run());
    double before = 2;
    for (const int left : {0, 5, 11, 15, 25, whole.runs}) {
        counted few;
        few.left = left;
        search cut(layers, {0.01, false, 1}, few.calls());
        const bool probed = cut.probe();
        CHECK(probed == (left >= 11));
        const bool ended = probed && cut.run();
        CHECK(ended == (left >= whole.runs));
        CHECK(cut.best().measured.kl <= 0.01);
        CHECK(few.runs <= left);
        // More time never makes it worse.
        const double work = left == 0 ? 1 : cut.best().measured.work.total;
        CHECK(work <= before);
        before = work;
    }
    // Nothing measured: nothing is dropped.
    counted none;
    none.left = 0;
    search nothing(layers, {0.01, false, 1}, none.calls());
    CHECK_FALSE(nothing.probe());
    CHECK(nothing.best().choice == engine::calibration::dense_choice(layers));
    CHECK(nothing.best().measured.work.total == 1);
}
