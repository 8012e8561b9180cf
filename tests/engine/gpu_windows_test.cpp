// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// Calibration's windows on a CUDA device: against the CPU's, and against sessions that share nothing.

#include "support/cuda.cuh"

#include "engine/calibration/cpu_windows.hpp"
#include "engine/calibration/search.hpp"
#include "engine/calibration/trial.hpp"
#include "engine/cuda/model.hpp"
#include "engine/cuda/policy_session.hpp"
#include "engine/cuda/program.hpp"
#include "engine/cuda/windows.hpp"
#include "engine/reading/reader.hpp"
#include "engine/wide_model.hpp"

#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <vector>

namespace calibration = engine::calibration;
using calibration::choice;
using calibration::layer_step;
using calibration::list_step;
using engine_test::wide_model;
using uniprefill_test::has_device;

namespace {

constexpr std::int32_t prompt = 1500;
constexpr std::int32_t layers = wide_model::layers;

std::vector<calibration::window> windows_of(int vocab, std::int32_t count) {
    std::mt19937_64 random(uniprefill_test::seed());
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < count * (prompt + 100); ++i) {
        tokens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
    return calibration::draw_windows(tokens, prompt, count, 1);
}

choice dropping(double first, double third) {
    choice made = calibration::dense_choice(layers);
    made.steps[1] = layer_step(first);
    made.steps[3] = layer_step(third);
    return made;
}

struct device_windows {
    explicit device_windows(std::int32_t count, std::int32_t workers)
        : plain(uniprefill_test::seed())
        , weights(engine::gguf(engine_test::span_of(plain.file)))
        , windows(windows_of(plain.vocab, count))
        , reader(weights, engine::policy{}, windows, workers, std::size_t{1} << 30) {}
    wide_model plain;
    engine::cuda::cuda_model weights;
    std::vector<calibration::window> windows;
    engine::cuda::cuda_windows reader;
};

/// Logits of the prompt's last row and of those fed, from a session made for this policy alone.
std::vector<float> alone(const engine::cuda::cuda_model& model, const calibration::window& window,
                         const engine::policy& policy) {
    auto options = engine::cuda::options_under(policy, prompt, static_cast<std::int32_t>(window.fed.size()));
    options.row_multiple = 128;
    engine::cuda::session session(model, options);
    session.prefill(window.prompt);
    std::vector<float> logits = session.logits();
    session.feed(window.fed);
    const auto rest = session.logits();
    logits.insert(logits.end(), rest.begin(), rest.end());
    return logits;
}

bool same_layers(const std::vector<engine::layer_record>& a, const std::vector<engine::layer_record>& b) {
    if (a.size() != b.size()) return false;
    for (std::size_t i = 0; i < a.size(); ++i) {
        if (a[i].rows_in != b[i].rows_in || a[i].rows_kept != b[i].rows_kept || a[i].pairs != b[i].pairs ||
            a[i].estimator_pairs != b[i].estimator_pairs) {
            return false;
        }
    }
    return true;
}

} // namespace

TEST_CASE("cuda windows: what choices come to is what it is on the CPU") {
    if (!has_device()) return;
    device_windows cuda(2, 1);
    const std::string path = engine_test::written(cuda.plain.file, "windows.gguf");
    engine::loaded_model model(path, engine::cpu::arithmetic::fp32);
    calibration::cpu_windows cpu(model.weights(), model.ops(), engine::policy{}, cuda.windows, 0);
    const std::vector<bool> everywhere(layers, true);
    for (std::size_t window = 0; window < 2; ++window) {
        cpu.read_dense(window, everywhere, 0);
        cuda.reader.read_dense(window, everywhere, 0);
    }
    choice mixed = with_lists(dropping(0.95, 0.90), list_step(0.90));
    mixed.lists[2] = 0;
    const choice listed = with_lists(calibration::dense_choice(layers), list_step(0.80));
    for (const choice& one : {calibration::dense_choice(layers), dropping(0.90, 0.80), listed, mixed}) {
        CAPTURE(describe(one));
        for (std::size_t window = 0; window < 2; ++window) {
            const auto expected = cpu.read(window, one, 0);
            const auto came = cuda.reader.read(window, one, 0);
            CAPTURE(window, expected.kl, came.kl);
            // A block near the cut may fall on either side of it.
            CHECK(std::fabs(came.kl - expected.kl) <= 0.3 * expected.kl + 0.01);
            REQUIRE(came.layers.size() == expected.layers.size());
            for (std::size_t layer = 0; layer < layers; ++layer) {
                const auto& a = expected.layers[layer];
                const auto& b = came.layers[layer];
                CAPTURE(layer, a.rows_in, b.rows_in, a.rows_kept, b.rows_kept, a.pairs, b.pairs);
                CHECK(std::abs(a.rows_in - b.rows_in) <= 2 * 64);
                CHECK(std::abs(a.rows_kept - b.rows_kept) <= 2 * 64);
                CHECK(std::abs(static_cast<double>(a.pairs - b.pairs)) <=
                      0.05 * static_cast<double>(a.pairs) + 2.0 * 64 * prompt);
                CHECK((a.estimator_pairs > 0) == (b.estimator_pairs > 0));
                if (a.rows_in == b.rows_in) CHECK(a.estimator_pairs == b.estimator_pairs);
            }
            if (one == calibration::dense_choice(layers)) {
                CHECK(came.kl == 0);
                CHECK(came.layers.front().pairs == std::int64_t{prompt} * (prompt + 1) / 2);
            } else {
                CHECK(came.kl > 0);
            }
        }
    }
}

TEST_CASE("cuda windows: what is shared with the adopted choice changes no bit") {
    if (!has_device()) return;
    device_windows sharing(2, 1);
    device_windows plain(2, 1);
    const std::vector<bool> everywhere(layers, true);
    for (std::size_t window = 0; window < 2; ++window) {
        sharing.reader.read_dense(window, everywhere, 0);
        plain.reader.read_dense(window, everywhere, 0);
        plain.reader.forget(window);
    }
    choice own_lists = with_lists(dropping(0.95, 0.90), list_step(0.98));
    own_lists.lists[2] = list_step(0.80);
    choice other_lists = own_lists;
    other_lists.lists[3] = 0;
    choice other_window = own_lists;
    other_window.window = 0;
    choice second = dropping(0.95, 0);
    second.steps[2] = layer_step(0.80);
    const std::vector<choice> path = {
        dropping(0.95, 0), dropping(0.95, 0.80), second,      dropping(0.95, 0.90),
        own_lists,         other_lists,          other_window};
    for (const choice& one : path) {
        CAPTURE(describe(one));
        for (std::size_t window = 0; window < 2; ++window) {
            const auto expected = plain.reader.read(window, one, 0);
            const auto came = sharing.reader.read(window, one, 0);
            CAPTURE(window, expected.kl, came.kl);
            CHECK(came.kl == expected.kl);
            CHECK(same_layers(came.layers, expected.layers));
            CHECK(sharing.reader.logits(window, one, 0) ==
                  alone(plain.weights, plain.windows[window], policy_of(one, engine::policy{})));
            sharing.reader.adopt(window, one, everywhere, 0);
            // And what was adopted is where it begins now.
            CHECK(sharing.reader.read(window, one, 0).kl == expected.kl);
        }
    }
    CHECK(plain.reader.layers_replayed() == 0);
    CHECK(sharing.reader.layers_replayed() > sharing.reader.layers_run() / 4);
}

TEST_CASE("cuda windows: several workers come to the bits of one") {
    if (!has_device()) return;
    constexpr std::int32_t count = 7;
    device_windows one(count, 1);
    device_windows several(count, 3);
    const calibration::cost_model cost(one.weights.config(), prompt);
    const auto always = [] { return true; };
    calibration::trial expected(one.reader, cost, always);
    calibration::trial came(several.reader, cost, always);
    const std::vector<bool> everywhere(layers, true);
    REQUIRE(expected.read_dense(everywhere));
    REQUIRE(came.read_dense(everywhere));
    for (const choice& chosen :
         {dropping(0.95, 0.80), with_lists(dropping(0.95, 0.90), list_step(0.95)), dropping(0.99, 0.90)}) {
        CAPTURE(describe(chosen));
        const auto a = expected.run(chosen);
        const auto b = came.run(chosen);
        REQUIRE(a);
        REQUIRE(b);
        CHECK(a->by_window == b->by_window);
        CHECK(a->work.total == b->work.total);
        expected.adopt(chosen, everywhere);
        came.adopt(chosen, everywhere);
    }
}

TEST_CASE("cuda windows: a search runs on them") {
    if (!has_device()) return;
    device_windows cuda(3, 2);
    const calibration::cost_model cost(cuda.weights.config(), 100 * prompt); // looks cost next to nothing
    calibration::trial trial(cuda.reader, cost, [] { return true; });
    REQUIRE(trial.read_dense(std::vector<bool>(layers, true)));
    const double wanted =
        4 * trial.run(dropping(0.95, 0.90))->kl; // single moves cost more than they do together
    calibration::search search(
        layers, {wanted, true, 1},
        {[&](const choice& one) { return trial.run(one); },
         [&](const choice& one, const std::vector<bool>& marked) { trial.adopt(one, marked); },
         [](const std::string&) {}});
    REQUIRE(search.probe());
    REQUIRE(search.run());
    const auto best = search.best();
    CAPTURE(describe(best.choice), wanted, best.measured.kl, best.measured.work.total);
    CHECK(best.measured.kl <= wanted);
    CHECK(best.measured.work.total < 1);
    // The trail that it leaves doesn't tell: from the beginning it is the same.
    for (std::size_t window = 0; window < 3; ++window) {
        cuda.reader.forget(window);
    }
    CHECK(trial.run(best.choice)->kl == best.measured.kl);
}

TEST_CASE("cuda windows: a session whose policy changes is one made for it") {
    if (!has_device()) return;
    device_windows cuda(1, 1);
    const calibration::window& window = cuda.windows.front();
    engine::policy none;
    engine::policy drops = policy_of(dropping(0.95, 0.80), none);
    engine::policy lists = policy_of(with_lists(dropping(0.90, 0.90), list_step(0.90)), none);
    lists.sink = 64;
    auto options = engine::cuda::options_under(none, prompt, static_cast<std::int32_t>(window.fed.size()));
    options.row_multiple = 128;
    engine::cuda::session session(cuda.weights, options);
    for (const engine::policy* policy : {&none, &lists, &none, &drops, &lists}) {
        engine::cuda::change_policy(session, *policy);
        session.prefill(window.prompt);
        std::vector<float> logits = session.logits();
        session.feed(window.fed);
        const auto rest = session.logits();
        logits.insert(logits.end(), rest.begin(), rest.end());
        CHECK(logits == alone(cuda.weights, window, *policy));
    }
    engine::policy spans = drops;
    spans.span = 500;
    CHECK_THROWS_AS(engine::cuda::change_policy(session, spans), engine::error);
    engine::policy revives = drops;
    revives.propagation = uniprefill::propagation::revive;
    CHECK_THROWS_AS(engine::cuda::change_policy(session, revives), engine::error);
    engine::cuda::device_trail trail;
    CHECK_THROWS_AS(session.prefill_from(trail, 1, window.prompt), engine::error);
}

TEST_CASE("cuda windows: counted rows and pairs don't depend on how rows are rounded, with spans neither") {
    if (!has_device()) return;
    device_windows cuda(1, 1);
    const calibration::window& window = cuda.windows.front();
    engine::policy policy = policy_of(with_lists(dropping(0.95, 0.80), list_step(0.90)), engine::policy{});
    for (const std::int32_t span : {0, 500}) {
        policy.span = span;
        std::vector<engine::layer_record> exact;
        for (const std::int32_t multiple : {1, 128}) {
            auto options = engine::cuda::options_under(policy, prompt, 1);
            options.row_multiple = multiple;
            engine::cuda::session session(cuda.weights, options);
            session.count(true);
            session.prefill(window.prompt);
            const auto counted = engine::cuda::records_of(session);
            session.count(false);
            session.record(true);
            session.prefill(window.prompt);
            CHECK(same_layers(engine::cuda::records_of(session), counted));
            for (std::size_t layer = 0; layer < layers; ++layer) {
                const auto& facts = session.facts()[layer];
                if (layer == 1 || layer == 3) {
                    CHECK(facts.kept_to_old.size() == static_cast<std::size_t>(facts.rows_kept));
                }
                CHECK(facts.estimator_pairs > 0);
                CHECK(facts.rows_kept <= facts.rows_in);
                if (layer > 0) CHECK(facts.rows_in == session.facts()[layer - 1].rows_kept);
            }
            CHECK(session.facts().back().rows_kept < prompt);
            // Rows that pad are computed with, and products of other sizes may round otherwise.
            if (multiple == 1) exact = counted;
            for (std::size_t layer = 0; layer < layers; ++layer) {
                CHECK(std::abs(counted[layer].rows_kept - exact[layer].rows_kept) <= 2 * 64);
            }
        }
    }
}
