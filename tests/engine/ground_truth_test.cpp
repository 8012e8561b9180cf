// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// The real model against figures that were measured apart from this engine: token ids, likelihoods, answers.

#include "support/catch.hpp"

#include "engine/app/quality.hpp"
#include "engine/app/sampling.hpp"
#include "engine/reading/reader.hpp"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>

using engine::cpu::arithmetic;

namespace {

const char* model_path() {
    return std::getenv("UNIPREFILL_MODEL");
}

std::string whole_gpl3() {
    std::ifstream file("/usr/share/common-licenses/GPL-3", std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

bool can_run() {
    if (model_path() == nullptr) {
        uniprefill_test::skip("UNIPREFILL_MODEL doesn't name the model's file");
        return false;
    }
    if (whole_gpl3().empty()) {
        uniprefill_test::skip("/usr/share/common-licenses/GPL-3 isn't there");
        return false;
    }
    return true;
}

/// Logits of the prompt's last row and of @p fed rows of the text after it.
std::vector<float> logits_after(engine::loaded_model& model, const engine::policy& policy,
                                const std::vector<std::int32_t>& text, std::int32_t prompt,
                                std::int32_t fed) {
    engine::reader pass(model, policy, prompt, fed);
    pass.prefill({text.begin(), text.begin() + prompt});
    std::vector<float> logits = pass.logits();
    pass.feed({text.begin() + prompt, text.begin() + prompt + fed});
    logits.insert(logits.end(), pass.logits().begin(), pass.logits().end());
    return logits;
}

double nll_after(engine::loaded_model& model, const std::vector<std::int32_t>& text, std::int32_t prompt) {
    const std::vector<float> logits = logits_after(model, engine::dense(), text, prompt, 64);
    return engine::compare_logits(logits.data(), logits.data(), 65, model.config().vocab,
                                  {text.begin() + prompt, text.begin() + prompt + 64})
        .dense_nll;
}

} // namespace

TEST_CASE("dense likelihoods of the GPL-3 are those of exact weights") {
    if (!can_run()) return;
    for (const arithmetic kind : {arithmetic::fp32, arithmetic::automatic}) {
        engine::loaded_model model(model_path(), kind);
        const auto text = model.words().encode(whole_gpl3());
        REQUIRE(text.size() == 7639);
        INFO(engine::cpu::name(model.ops().kind()));
        CHECK(std::abs(nll_after(model, text, 512) - 3.1307) < 0.003);
        CHECK(std::abs(nll_after(model, text, 64) - 3.390) < 0.003);
    }
}

TEST_CASE("the capital of France is Paris, dense and sparsified") {
    if (!can_run()) return;
    engine::loaded_model model(model_path(), arithmetic::automatic);
    const auto prompt = model.words().encode("The capital of France is");
    for (const engine::policy& policy : {engine::dense(), engine::default_policy(model.identity())}) {
        engine::reader pass(model, policy, static_cast<std::int32_t>(prompt.size()), 8);
        pass.prefill(prompt);
        std::string answer;
        for (int i = 0; i < 2; ++i) {
            const std::int32_t token = engine::greedy(pass.logits().data(), model.config().vocab);
            answer += model.words().bytes_of(token);
            pass.feed_one(token);
        }
        CHECK(answer == " Paris.");
    }
}

TEST_CASE("on half of the GPL-3 the shipped policy drops work and keeps the answer") {
    if (!can_run()) return;
    engine::loaded_model model(model_path(), arithmetic::automatic);
    const auto text = model.words().encode(whole_gpl3());
    constexpr std::int32_t prompt = 3800;
    const std::vector<float> dense = logits_after(model, engine::dense(), text, prompt, 64);
    const engine::policy policy = engine::default_policy(model.identity());
    REQUIRE(policy.rules.size() == 8);
    engine::reader pass(model, policy, prompt, 64);
    pass.prefill({text.begin(), text.begin() + prompt});
    std::vector<float> ours = pass.logits();
    pass.feed({text.begin() + prompt, text.begin() + prompt + 64});
    ours.insert(ours.end(), pass.logits().begin(), pass.logits().end());
    const engine::quality made = engine::compare_logits(dense.data(), ours.data(), 65, model.config().vocab,
                                                        {text.begin() + prompt, text.begin() + prompt + 64});
    CHECK(engine::share_of_rows(pass.layers(), prompt) < 0.8);
    CHECK(engine::share_of_pairs(pass.layers(), prompt) < 0.5); // 0.64 without lists
    CHECK(made.kl_mean < 0.03);
    CHECK(made.agree_sure > 0.9);
}
