// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The engine on a CUDA device against the engine on the CPU, and against itself run in other ways.

#include "support/cuda.cuh"

#include "engine/app/quality.hpp"
#include "engine/cuda/model.hpp"
#include "engine/cuda/program.hpp"
#include "engine/cuda/session.hpp"
#include "engine/reading/reader.hpp"
#include "engine/wide_model.hpp"

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>

using engine::attention_kind;
using engine::counts_kind;
using engine_test::wide_model;
using uniprefill::selection_rule;
using uniprefill_test::has_device;

namespace {

std::vector<std::int32_t> random_tokens(int count, int vocab, std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::int32_t> tokens;
    for (int i = 0; i < count; ++i) {
        tokens.push_back(static_cast<std::int32_t>(random() % static_cast<std::uint64_t>(vocab)));
    }
    return tokens;
}

/// A small model on both devices.
struct both_devices {
    both_devices()
        : plain(uniprefill_test::seed())
        , path(engine_test::written(plain.file, "wide.gguf"))
        , cpu(path, engine::cpu::arithmetic::fp32)
        , cuda(engine::open_cuda_model(path)) {}
    wide_model plain;
    std::string path;
    engine::loaded_model cpu;
    std::unique_ptr<engine::prompt_model> cuda;
};

/// Logits of a prompt's last row and of the rows fed after it.
std::vector<float> answers(engine::prompt_reader& pass, const std::vector<std::int32_t>& prompt,
                           const std::vector<std::int32_t>& following) {
    pass.prefill(prompt);
    std::vector<float> logits = pass.logits();
    pass.feed(following);
    logits.insert(logits.end(), pass.logits().begin(), pass.logits().end());
    return logits;
}

double mean_kl(const std::vector<float>& reference, const std::vector<float>& logits, std::int32_t vocab) {
    REQUIRE(reference.size() == logits.size());
    const auto rows = static_cast<std::int32_t>(logits.size() / static_cast<std::size_t>(vocab));
    return engine::compare_logits(reference.data(), logits.data(), rows, vocab, {}).kl_mean;
}

engine::policy dropping(const selection_rule& first, const selection_rule& second) {
    engine::policy policy = engine::dense();
    policy.rules = {{1, first}, {2, second}};
    policy.sink = 64;
    policy.tail = 128;
    return policy;
}

engine::cuda::session_options options_of(std::int32_t prompt, counts_kind counts) {
    engine::cuda::session_options options;
    options.prompt = prompt;
    options.following = 8;
    options.counts = counts;
    options.bucket_rows = 64;
    options.request.sink = 64;
    const std::int32_t first = prompt * 6 / 10;
    options.selecting = {{1, selection_rule::fixed_budget(first), nullptr},
                         {2, selection_rule::fixed_budget(first / 2), nullptr}};
    return options;
}

struct device_model {
    device_model()
        : plain(uniprefill_test::seed())
        , weights(engine::gguf(engine_test::span_of(plain.file))) {}
    wide_model plain;
    engine::cuda::cuda_model weights;
};

} // namespace

TEST_CASE("cuda engine: a dense prefill says what the CPU's says") {
    if (!has_device()) return;
    both_devices models;
    const int vocab = models.plain.vocab;
    for (const int rows : {1, 5, 130, 1000}) {
        const auto prompt = random_tokens(rows, vocab, 1);
        const auto following = random_tokens(9, vocab, 2);
        engine::reader cpu(models.cpu, engine::dense(), rows, 9);
        const auto cuda = models.cuda->reader_of(engine::dense(), rows, 9);
        const auto wanted = answers(cpu, prompt, following);
        const auto came = answers(*cuda, prompt, following);
        CHECK(mean_kl(wanted, came, vocab) < 2e-3);
    }
}

TEST_CASE("cuda engine: a prefill that drops rows says what the CPU's says") {
    if (!has_device()) return;
    both_devices models;
    const int vocab = models.plain.vocab;
    const int rows = 1500;
    const auto prompt = random_tokens(rows, vocab, 3);
    const auto following = random_tokens(9, vocab, 4);
    for (const auto& policy : {dropping(selection_rule::fixed_budget(900), selection_rule::fixed_budget(500)),
                               dropping(selection_rule::top_p(0.9), selection_rule::top_p(0.8))}) {
        engine::reader cpu(models.cpu, policy, rows, 9);
        const auto cuda = models.cuda->reader_of(policy, rows, 9);
        const auto wanted = answers(cpu, prompt, following);
        const auto came = answers(*cuda, prompt, following);
        // A block near the cut may fall on either side of it.
        CHECK(mean_kl(wanted, came, vocab) < 2e-2);
        int differ = 0;
        for (int row = 0; row < rows; ++row) {
            const auto i = static_cast<std::size_t>(row);
            differ += cpu.dropped_at()[i] != cuda->dropped_at()[i] ? 1 : 0;
        }
        CHECK(differ <= 4 * 64);
        for (std::size_t layer = 0; layer < wide_model::layers; ++layer) {
            const auto& a = cpu.layers()[layer];
            const auto& b = cuda->layers()[layer];
            CHECK(a.selected == b.selected);
            CHECK(std::abs(a.rows_kept - b.rows_kept) <= 2 * 64);
            CHECK(std::abs(static_cast<double>(a.pairs - b.pairs)) <= 0.15 * static_cast<double>(a.pairs));
        }
        CHECK(cuda->layers().back().rows_kept < rows);
    }
}

TEST_CASE("cuda engine: with spans looks score what the CPU's score") {
    if (!has_device()) return;
    both_devices models;
    const int vocab = models.plain.vocab;
    const int rows = 1500;
    const auto prompt = random_tokens(rows, vocab, 7);
    // As many rows go on whatever the scores are.
    for (const std::int32_t min_length : {0, 400, 480, 600}) {
        engine::policy policy =
            dropping(selection_rule::fixed_budget(350), selection_rule::fixed_budget(200));
        policy.span = 512;
        policy.min_length = min_length;
        engine::reader cpu(models.cpu, policy, rows, 1);
        const auto cuda = models.cuda->reader_of(policy, rows, 1);
        cpu.prefill(prompt);
        cuda->prefill(prompt);
        for (std::size_t layer = 0; layer < wide_model::layers; ++layer) {
            const auto& a = cpu.layers()[layer];
            const auto& b = cuda->layers()[layer];
            CAPTURE(min_length, layer, a.rows_in, b.rows_in, a.estimator_pairs);
            CHECK(b.rows_in == a.rows_in);
            CHECK(b.estimator_pairs == a.estimator_pairs);
            const bool looks = layer == 1 ? min_length <= 480 : layer == 2 && min_length == 0;
            CHECK((b.estimator_pairs > 0) == looks);
        }
    }
}

TEST_CASE("cuda engine: lists read what the CPU's read") {
    if (!has_device()) return;
    both_devices models;
    const int vocab = models.plain.vocab;
    const int rows = 1500;
    const auto prompt = random_tokens(rows, vocab, 5);
    const auto following = random_tokens(5, vocab, 6);
    for (const bool drops : {false, true}) {
        std::int64_t without_means = 0;
        for (const bool means : {false, true}) {
            engine::policy policy =
                drops ? dropping(selection_rule::fixed_budget(900), selection_rule::fixed_budget(500))
                      : engine::dense();
            policy.lists.emplace();
            policy.lists->rule = selection_rule::top_p(0.8, uniprefill::mass_scope::all);
            policy.lists->window = 128;
            policy.list_means = means;
            INFO((drops ? "drops" : "drops nothing") << (means ? ", with means" : ""));
            engine::reader cpu(models.cpu, policy, rows, 5);
            const auto cuda = models.cuda->reader_of(policy, rows, 5);
            CHECK(mean_kl(answers(cpu, prompt, following), answers(*cuda, prompt, following), vocab) < 2e-2);
            const auto& a = cpu.layers().front();
            const auto& b = cuda->layers().front();
            CHECK(a.pairs < std::int64_t{rows} * (rows + 1) / 2);
            CHECK(std::abs(static_cast<double>(a.pairs - b.pairs)) <= 0.02 * static_cast<double>(a.pairs));
            if (means) {
                CHECK(b.pairs > without_means);
            } else {
                without_means = b.pairs;
            }
        }
    }
}

TEST_CASE("cuda engine: one graph comes to the bits of its kernels run one by one") {
    if (!has_device()) return;
    device_model model;
    const int rows = 1111;
    engine::cuda::session graphs(model.weights, options_of(rows, counts_kind::budget));
    engine::cuda::session eager(model.weights, options_of(rows, counts_kind::read));
    for (std::uint64_t prompt = 0; prompt < 4; ++prompt) {
        const auto tokens = random_tokens(rows, model.plain.vocab, 10 + prompt);
        const auto times = graphs.prefill(tokens);
        CHECK(times.count_reads == 0);
        CHECK((graphs.graph_nodes() > 0) == (prompt > 0));
        CHECK(eager.prefill(tokens).count_reads == 2);
        CHECK(graphs.logits() == eager.logits());
        CHECK(graphs.lengths() == eager.lengths());
        CHECK(graphs.lengths() == std::vector<std::int32_t>{rows, rows, rows * 6 / 10, rows * 6 / 10 / 2});
        for (const auto& decision : graphs.decisions()) {
            CHECK(decision.outcomes.front().reason == uniprefill::keep_reason::selected);
        }
        CHECK(graphs.likeliest() >= 0);
    }
}

TEST_CASE("cuda engine: graphs by rounded row counts") {
    if (!has_device()) return;
    device_model model;
    const int rows = 1111;
    auto options = options_of(rows, counts_kind::buckets);
    options.selecting = {{1, selection_rule::top_p(0.9), nullptr}, {2, selection_rule::top_p(0.8), nullptr}};
    auto plain = options;
    plain.counts = counts_kind::read;
    engine::cuda::session graphs(model.weights, options);
    engine::cuda::session eager(model.weights, plain);
    for (std::uint64_t prompt = 0; prompt < 12; ++prompt) { // each several times, in turn
        const auto tokens = random_tokens(rows, model.plain.vocab, 20 + prompt % 3);
        CHECK(graphs.prefill(tokens).count_reads == 2);
        CHECK(eager.prefill(tokens).count_reads == 2);
        CHECK(graphs.lengths() == eager.lengths());
        CHECK((graphs.graphs() == 0) == (prompt == 0)); // stretches are seen once, then recorded
        // Products of other row counts may sum in another order.
        CHECK(mean_kl(eager.logits(), graphs.logits(), model.plain.vocab) < 1e-3);
    }
    CHECK(graphs.graphs() >= 3); // each of three stretches for at least one row count
    CHECK(graphs.graphs() <= 7); // the first for one, the others for at most three
}

TEST_CASE("cuda engine: tokens fed at once or one by one, and forgotten again") {
    if (!has_device()) return;
    device_model model;
    const int rows = 700;
    engine::cuda::session session(model.weights, options_of(rows, counts_kind::read));
    static_cast<void>(session.prefill(random_tokens(rows, model.plain.vocab, 30)));
    const auto following = random_tokens(6, model.plain.vocab, 31);
    session.feed(following);
    const auto at_once = session.logits();
    session.back_to_prompt();
    std::vector<float> one_by_one;
    for (const std::int32_t token : following) {
        session.feed({token});
        const auto logits = session.logits();
        one_by_one.insert(one_by_one.end(), logits.begin(), logits.end());
    }
    CHECK(mean_kl(at_once, one_by_one, model.plain.vocab) < 1e-3);
    session.back_to_prompt();
    session.feed(following);
    CHECK(session.logits() == at_once);
}

TEST_CASE("cuda engine: cuDNN's attention says what the library's says") {
    if (!has_device()) return;
    if (!engine::cuda::dense_attention::built() ||
        engine::cuda::dense_attention::library().find("frontend") == std::string::npos) {
        uniprefill_test::skip("no cuDNN");
        return;
    }
    device_model model;
    for (const bool drops : {false, true}) {
        for (const counts_kind counts : {counts_kind::read, counts_kind::budget, counts_kind::buckets}) {
            const int rows = 1000;
            auto options = options_of(rows, counts);
            if (!drops) options.selecting.clear();
            auto baseline = options;
            baseline.attention = attention_kind::cudnn;
            engine::cuda::session ours(model.weights, options);
            engine::cuda::session theirs(model.weights, baseline);
            for (std::uint64_t prompt = 0; prompt < 4; ++prompt) {
                const auto tokens = random_tokens(rows, model.plain.vocab, 40 + prompt % 2);
                static_cast<void>(ours.prefill(tokens));
                static_cast<void>(theirs.prefill(tokens));
                CHECK(mean_kl(theirs.logits(), ours.logits(), model.plain.vocab) < (drops ? 2e-2 : 1e-3));
            }
        }
    }
}

TEST_CASE("cuda engine: what it doesn't do is refused by name") {
    if (!has_device()) return;
    device_model model;
    auto options = options_of(100, counts_kind::budget);
    options.selecting = {{1, selection_rule::top_p(0.9), nullptr}};
    CHECK_THROWS_AS(engine::cuda::session(model.weights, options), engine::error);
    options = options_of(100, counts_kind::read);
    options.block_rows = 32;
    CHECK_THROWS_AS(engine::cuda::session(model.weights, options), engine::error);
    engine::cuda::session session(model.weights, options_of(100, counts_kind::read));
    CHECK_THROWS_AS(session.prefill({1, 2, 3}), engine::error);
    CHECK_THROWS_AS(session.prefill(std::vector<std::int32_t>(100, model.plain.vocab)), engine::error);
}

TEST_CASE("cuda engine: the real model agrees with the CPU") {
    if (!has_device()) return;
    const char* const path = std::getenv("UNIPREFILL_MODEL");
    if (path == nullptr) {
        uniprefill_test::skip("UNIPREFILL_MODEL doesn't name the model's file");
        return;
    }
    engine::loaded_model cpu(path, engine::cpu::arithmetic::fp32);
    const auto cuda = engine::open_cuda_model(path);
    std::ifstream file("LICENSE", std::ios::binary); // where a checkout is the present folder
    if (!file.is_open()) file.open(std::string(ENGINE_TEST_DATA) + "/../../LICENSE", std::ios::binary);
    const std::string license{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
    const auto text = cpu.words().encode(license);
    const int rows = 2000;
    const int fed = 64;
    REQUIRE(text.size() >= rows + fed);
    const std::vector<std::int32_t> prompt(text.begin(), text.begin() + rows);
    const std::vector<std::int32_t> following(text.begin() + rows, text.begin() + rows + fed);
    engine::reader expected(cpu, engine::dense(), rows, fed);
    const auto pass = cuda->reader_of(engine::dense(), rows, fed);
    const double kl =
        mean_kl(answers(expected, prompt, following), answers(*pass, prompt, following), cpu.config().vocab);
    CAPTURE(kl);
    CHECK(kl < 1e-3);
}
