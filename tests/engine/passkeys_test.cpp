// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/error.hpp"
#include "quality/passkey_prompt.hpp"
#include "quality/sign_test.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cmath>
#include <set>

using quality_bench::make_passkey_prompt;
using quality_bench::passkey_prompt;
using quality_bench::sign_test_of;

namespace {

bool near(double a, double b) {
    return std::fabs(a - b) < 1e-12;
}

/// A token for each byte, above those of the text around.
std::vector<std::int32_t> bytes_of(const std::string& text) {
    std::vector<std::int32_t> tokens;
    for (const char byte : text) {
        tokens.push_back(100000 + static_cast<unsigned char>(byte));
    }
    return tokens;
}

std::vector<std::int32_t> counting(std::int32_t count) {
    std::vector<std::int32_t> tokens;
    for (std::int32_t i = 0; i < count; ++i) {
        tokens.push_back(i);
    }
    return tokens;
}

} // namespace

TEST_CASE("passkeys: the sign test against hand numbers") {
    const auto none = sign_test_of({20, 0, 0, 28});
    CHECK(none.fewer == 1);
    CHECK(none.two_sided == 1);
    // Five coins, all against us: 1/32; either way 1/16.
    const auto five = sign_test_of({10, 5, 0, 3});
    CHECK(near(five.fewer, 1.0 / 32));
    CHECK(near(five.two_sided, 1.0 / 16));
    // Five coins, all for us.
    const auto better = sign_test_of({10, 0, 5, 3});
    CHECK(near(better.fewer, 1));
    CHECK(near(better.two_sided, 1.0 / 16));
    // Ten coins, at most two: (1 + 10 + 45) / 1024.
    const auto ten = sign_test_of({0, 8, 2, 0});
    CHECK(near(ten.fewer, 56.0 / 1024));
    CHECK(near(ten.two_sided, 112.0 / 1024));
    const auto even = sign_test_of({0, 4, 4, 0});
    CHECK(near(even.fewer, 163.0 / 256));
    CHECK(even.two_sided == 1);
    // Many coins neither overflow nor vanish.
    const auto many = sign_test_of({0, 2000, 2000, 0});
    CHECK(many.fewer > 0.5);
    CHECK(many.fewer < 0.51);
}

TEST_CASE("passkeys: prompts have their length, their depth and their key, and repeat") {
    const std::vector<std::int32_t> text = counting(5000);
    std::set<std::string> hashes;
    for (std::int32_t trial = 0; trial < 48; ++trial) {
        const passkey_prompt made = make_passkey_prompt(bytes_of, text, 1024, trial, 48, 7);
        CHECK(made.tokens.size() == 1024);
        CHECK(made.key.size() == 5);
        CHECK(made.answer == bytes_of(" " + made.key));
        CHECK(near(made.depth, (trial + 0.5) / 48));
        const auto sentence = bytes_of(quality_bench::passkey_sentence(made.key));
        const auto at = std::search(made.tokens.begin(), made.tokens.end(), sentence.begin(), sentence.end());
        REQUIRE(at != made.tokens.end());
        CHECK(at - made.tokens.begin() == made.position);
        const auto question = bytes_of(quality_bench::passkey_question());
        CHECK(std::equal(question.rbegin(), question.rend(), made.tokens.rbegin()));
        const double around = 1024 - static_cast<double>(sentence.size() + question.size());
        CHECK(std::fabs(static_cast<double>(made.position) / around - made.depth) < 0.002);
        // What is around the sentence is one stretch of the text.
        const auto before = made.tokens[static_cast<std::size_t>(made.position) - 1];
        CHECK(made.tokens[static_cast<std::size_t>(made.position) + sentence.size()] == before + 1);
        hashes.insert(quality_bench::hash_of(made.tokens));

        const passkey_prompt again = make_passkey_prompt(bytes_of, text, 1024, trial, 48, 7);
        CHECK(again.tokens == made.tokens);
        CHECK(make_passkey_prompt(bytes_of, text, 1024, trial, 48, 8).tokens != made.tokens);
    }
    CHECK(hashes.size() == 48);
    CHECK(quality_bench::hash_of({}) == "cbf29ce484222325");
    CHECK(quality_bench::hash_of({0x61}) != quality_bench::hash_of({0x61, 0}));
}

TEST_CASE("passkeys: a text that is too short, a prompt without room, a trial that isn't") {
    CHECK_THROWS_AS(make_passkey_prompt(bytes_of, counting(500), 1024, 0, 1, 1), engine::error);
    CHECK_THROWS_AS(make_passkey_prompt(bytes_of, counting(5000), 100, 0, 1, 1), engine::error);
    CHECK_THROWS_AS(make_passkey_prompt(bytes_of, counting(5000), 1024, 1, 1, 1), engine::error);
    CHECK_THROWS_AS(make_passkey_prompt(bytes_of, counting(5000), 1024, -1, 1, 1), engine::error);
}
