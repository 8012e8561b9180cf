// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/sweep.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

using engine::calibration::choice;
using engine::calibration::dense_choice;
using engine::calibration::score;
using engine::calibration::search_calls;
using engine::calibration::sweep;
using engine::calibration::sweep_options;

namespace {

double left_out(std::int8_t step) {
    return step == 0 ? 0 : 1 - choice::layer_shares[static_cast<std::size_t>(step - 1)];
}

/// A model of models: a layer drops the more of what is left the smaller its p, and harms by that as it is
/// easy or hard to do without; lists cost a little and save a lot.
struct pretended_model {
    explicit pretended_model(std::vector<double> of)
        : hardness(std::move(of)) {}
    std::vector<double> hardness; ///< by layer
    int runs = 0;
    int adopted = 0;
    int left = 1 << 30;

    score measure(const choice& one) const {
        score made;
        const auto layers = static_cast<double>(hardness.size());
        double rows = 1;
        made.work = {0, 0, 0, 0};
        for (std::size_t layer = 0; layer < hardness.size(); ++layer) {
            const double out = left_out(one.steps[layer]);
            made.kl += rows * hardness[layer] * std::pow(out, 1.3);
            rows *= 1 - std::min(0.8, 8 * out / (1 + 8 * out));
            const std::int8_t list = one.lists[layer];
            const double listed = list == 0 ? 0 : 1 - choice::list_shares[static_cast<std::size_t>(list - 1)];
            const double window = choice::list_windows[static_cast<std::size_t>(one.window)] / 8000.0;
            made.kl += 0.1 * rows * listed * hardness[layer] * (list == 0 ? 0 : 0.03 / (window + 0.01));
            made.work.lin += rows / layers;
            made.work.att +=
                rows * (list == 0 ? rows : std::min(rows, 0.3 * rows * std::exp(-9 * listed) + window)) /
                layers;
        }
        made.work.total = (made.work.lin + made.work.att) / 2;
        made.kl_max = 3 * made.kl;
        return made;
    }
    search_calls calls() {
        return {[this](const choice& one) -> std::optional<score> {
                    if (left-- <= 0) return std::nullopt;
                    ++runs;
                    return measure(one);
                },
                [this](const choice&, const std::vector<bool>& layers) {
                    ++adopted;
                    CHECK(layers == std::vector<bool>(hardness.size(), true));
                },
                [](const std::string&) {}};
    }
};

pretended_model twelve_layers() {
    return pretended_model({2, 3, 0.1, 2, 0.5, 0.4, 0.02, 0.3, 0.1, 0.01, 0.05, 0.01});
}

double value(const score& of, const sweep_options& options) {
    return of.kl + options.worst * of.kl_max;
}

} // namespace

TEST_CASE("sweep: bounds hold, and no p that layers share does as well") {
    sweep_options options;
    options.idle = 4;
    for (const auto& [lin, att] : {std::pair{0.45, 0.10}, {0.6, 0.05}, {0.8, 0.7}, {0.3, 0.2}}) {
        options.lin = lin;
        options.att = att;
        pretended_model model = twelve_layers();
        sweep found(12, options, model.calls());
        CAPTURE(lin, att);
        REQUIRE(found.run(dense_choice(12)));
        const auto best = found.best();
        CAPTURE(describe(best.choice), best.measured.kl, best.measured.work.lin, best.measured.work.att,
                model.runs);
        CHECK(best.measured.work.lin <= lin);
        CHECK(best.measured.work.att <= att);
        CHECK(model.runs == found.evaluations());
        CHECK(found.path().back().choice == best.choice);
        for (std::size_t i = 1; i < found.path().size(); ++i) {
            CHECK(found.better(found.path()[i].measured, found.path()[i - 1].measured));
        }
        // One p at layers 2, 4, 6 and on, and one p of lists: none within the bounds comes near.
        for (std::int8_t step = 0; step <= 15; ++step) {
            for (std::int8_t list = 0; list <= 14; ++list) {
                choice plain = with_lists(dense_choice(12), list);
                for (std::size_t layer = 2; layer < 11; layer += 2) {
                    plain.steps[layer] = step;
                }
                const score of = model.measure(plain);
                CHECK((of.work.lin > lin || of.work.att > att ||
                       value(of, options) > value(best.measured, options)));
            }
        }

        pretended_model again = twelve_layers();
        sweep repeated(12, options, again.calls());
        REQUIRE(repeated.run(dense_choice(12)));
        CHECK(repeated.best().choice == best.choice);
        CHECK(again.runs == model.runs);
    }
}

TEST_CASE("sweep: without lists there are none") {
    pretended_model model = twelve_layers();
    const search_calls calls = model.calls();
    int listed = 0;
    sweep_options options;
    options.lin = 0.4;
    options.att = 0.5;
    options.lists = false;
    options.idle = 5;
    const auto run = [&](const choice& one) {
        listed += std::any_of(one.lists.begin(), one.lists.end(), [](auto step) { return step != 0; });
        return calls.run(one);
    };
    sweep look(12, options, {run, calls.adopt, calls.say});
    REQUIRE(look.run(dense_choice(12)));
    CHECK(model.runs > 100);
    CHECK(listed == 0);
    CHECK(look.best().measured.work.lin <= options.lin);
    options.lists = true;
    sweep with(12, options, {run, calls.adopt, calls.say});
    REQUIRE(with.run(dense_choice(12)));
    CHECK(listed > 0);
}

TEST_CASE("sweep: where few choices are to be had it comes near to the best of all") {
    for (const auto& hardness :
         {std::vector<double>{1, 0.05, 0.3, 1}, {0.1, 0.1, 0.1, 1}, {0.02, 1, 0.02, 1}}) {
        sweep_options options;
        options.lin = 0.55;
        options.att = 1; // lists are no matter
        pretended_model model(hardness);
        sweep found(4, options, model.calls());
        REQUIRE(found.run(dense_choice(4)));
        double least = 1e9;
        choice of_all = dense_choice(4);
        for (int number = 0; number < 16 * 16 * 16; ++number) {
            choice one = dense_choice(4);
            one.steps = {static_cast<std::int8_t>(number % 16), static_cast<std::int8_t>(number / 16 % 16),
                         static_cast<std::int8_t>(number / 256), 0};
            const score came = model.measure(one);
            if (came.work.lin <= options.lin && value(came, options) < least) {
                least = value(came, options);
                of_all = one;
            }
        }
        CAPTURE(describe(of_all), least, describe(found.best().choice), found.best().measured.kl, model.runs);
        CHECK(value(found.best().measured, options) <= 1.03 * least);
    }
}

TEST_CASE("sweep: a bound that leaves no single step is left by exchanges") {
    // Begins just within the bound at the wrong layer: every step saves work and harms, or helps and spends.
    pretended_model model({1, 0.01, 0.02, 1, 1, 1});
    choice start = dense_choice(6);
    start.steps[0] = engine::calibration::layer_step(0.95);
    sweep_options options;
    options.lin = model.measure(start).work.lin;
    options.att = 1;
    options.idle = 0; // no kicks
    sweep found(6, options, model.calls());
    REQUIRE(found.run(start));
    CAPTURE(describe(found.best().choice));
    CHECK(found.best().measured.work.lin <= options.lin);
    CHECK(value(found.best().measured, options) < 0.2 * value(model.measure(start), options));
}

TEST_CASE("sweep: the worst window counts as it is told to") {
    sweep_options options;
    options.worst = 0;
    sweep mean(2, options, {});
    options.worst = 1;
    sweep worst(2, options, {});
    score one;
    one.kl = 0.01;
    one.kl_max = 0.02;
    one.work = {0.4, 0.1, 0, 0.3};
    score other = one;
    other.kl = 0.009;
    other.kl_max = 0.04;
    CHECK(mean.better(other, one));
    CHECK(worst.better(one, other));
    score beyond = other;
    beyond.work.lin = 0.55;
    CHECK(mean.better(one, beyond));
    beyond.work = {0.4, 0.2, 0, 0.3};
    CHECK(mean.better(one, beyond));
    score farther = beyond;
    farther.kl = 0.001;
    farther.work.att = 0.3;
    CHECK(mean.better(beyond, farther));
}

TEST_CASE("sweep: one that runs out of time has the best so far") {
    sweep_options options;
    options.lin = 0.5;
    options.att = 0.2;
    pretended_model whole = twelve_layers();
    sweep complete(12, options, whole.calls());
    REQUIRE(complete.run(dense_choice(12)));
    std::optional<score> before;
    for (const int left : {0, 1, 2, 20, 60, 300, whole.runs}) {
        pretended_model few = twelve_layers();
        few.left = left;
        sweep cut(12, options, few.calls());
        CHECK(cut.run(dense_choice(12)) == (left >= whole.runs));
        CHECK(few.runs <= left);
        CHECK(cut.path().empty() == (left == 0));
        if (left == 0) continue;
        const score& best = cut.best().measured;
        if (before) CHECK_FALSE(cut.better(*before, best)); // more time never makes it worse
        before = best;
    }
}
