// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/quality.hpp"
#include "support/catch.hpp"

#include <cmath>
#include <limits>
#include <vector>

using app_test::contains;
using app_test::refusal;
using engine::compare_logits;

namespace {

float log_of(double x) {
    return static_cast<float>(std::log(x));
}

bool near(double a, double b, double within = 1e-6) {
    return std::fabs(a - b) <= within;
}

} // namespace

TEST_CASE("app: quality against hand numbers") {
    // p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = 1/2 ln 2 - 1/4 ln 2 = ln 2 / 4. The next rows are alike
    // up to a constant, then uniform against (1/2, 1/4, 1/4): KL = -(ln(3/2) + 2 ln(3/4)) / 3.
    const std::vector<float> dense = {log_of(.5), log_of(.25), log_of(.25), 1, 3, 2, 0, 0, 0};
    const std::vector<float> ours = {log_of(.25), log_of(.5), log_of(.25), 101,        103,
                                     102,         log_of(.5), log_of(.25), log_of(.25)};
    const double first = std::log(2) / 4;
    const double third = -(std::log(1.5) + 2 * std::log(.75)) / 3;
    const engine::quality found = compare_logits(dense.data(), ours.data(), 3, 3, {0, 1});
    CHECK(found.positions == 3);
    CHECK(near(found.kl_mean, (first + third) / 3));
    CHECK(near(found.kl_median, third));
    CHECK(near(found.kl_max, first));
    CHECK(near(found.agree, 2.0 / 3));
    CHECK(found.sure_positions == 2); // the uniform row isn't
    CHECK(near(found.agree_sure, 0.5));
    const double second_nll = std::log(std::exp(-2) + 1 + std::exp(-1));
    CHECK(found.real_tokens == 2);
    CHECK(near(found.dense_nll, (std::log(2) + second_nll) / 2));
    CHECK(near(found.dnll, std::log(2) / 2)); // ln 4 - ln 2 at the first, nothing at the second
}

TEST_CASE("app: quality of an even number of rows and of identical runs") {
    const std::vector<float> dense = {0, 0, 0, 0};
    const std::vector<float> ours = {0, 0, log_of(3), 0};
    const double kl = -(std::log(2 * .75) + std::log(2 * .25)) / 2;
    const engine::quality found = compare_logits(dense.data(), ours.data(), 2, 2, {});
    CHECK(near(found.kl_median, kl / 2));
    CHECK(std::isnan(found.agree_sure));
    CHECK(std::isnan(found.dense_nll));
    CHECK(found.agree == 1);

    const engine::quality same = compare_logits(ours.data(), ours.data(), 2, 2, {0, 1});
    CHECK(same.kl_max == 0);
    CHECK(same.dnll == 0);
}

TEST_CASE("app: sureness is a margin of more than 0.1 nat") {
    const std::vector<float> dense = {0.0999F, 0, -5, 0.1001F, 0, -5};
    CHECK(compare_logits(dense.data(), dense.data(), 2, 3, {}).sure_positions == 1);
}

TEST_CASE("app: quality holds for extreme logits") {
    const std::vector<float> dense = {3e38F, -3e38F, 0};
    const std::vector<float> ours = {3e38F, 0, -3e38F};
    const engine::quality found = compare_logits(dense.data(), ours.data(), 1, 3, {0});
    CHECK(found.kl_mean == 0);
    CHECK(near(found.dense_nll, 0));
}

TEST_CASE("app: quality refuses what it can't judge") {
    std::vector<float> good = {0, 1, 2, 3};
    std::vector<float> bad = good;
    bad[3] = std::numeric_limits<float>::infinity();
    CHECK(refusal([&] { compare_logits(good.data(), bad.data(), 2, 2, {}); }) ==
          "sparsified logits, row 1, token 1: expected a finite number, came inf");
    bad[3] = std::numeric_limits<float>::quiet_NaN();
    CHECK(contains(refusal([&] { compare_logits(bad.data(), good.data(), 2, 2, {}); }),
                   "dense logits, row 1, token 1"));
    CHECK(contains(refusal([&] { compare_logits(good.data(), good.data(), 2, 2, {2}); }),
                   "expected 0 to 1, came 2"));
    CHECK(contains(refusal([&] { compare_logits(good.data(), good.data(), 2, 2, {-1}); }), "came -1"));
    CHECK(contains(refusal([&] {
                       compare_logits(good.data(), good.data(), 2, 2, {0, 0, 0});
                   }),
                   "next tokens"));
    CHECK(contains(refusal([&] { compare_logits(good.data(), good.data(), 0, 2, {}); }), "rows"));
}
