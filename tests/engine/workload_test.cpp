// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

// What clients ask for: the draw, the trace, and the percentiles of what came of it.

#include "support/catch.hpp"

#include "engine/app_support.hpp"
#include "engine/serving/serve_report.hpp"
#include "engine/serving/workload.hpp"

#include <cmath>
#include <fstream>

using app_test::refusal;

namespace {

std::vector<std::vector<std::int32_t>> some_texts() {
    std::vector<std::vector<std::int32_t>> texts(4);
    for (std::size_t i = 0; i < texts.size(); ++i) {
        for (std::int32_t token = 0; token < 500; ++token) {
            texts[i].push_back(static_cast<std::int32_t>(i) * 1000 + token);
        }
    }
    return texts;
}

const char* const head = "TIMESTAMP,ContextTokens,GeneratedTokens\n";

std::string refused_trace(const std::string& rows) {
    return refusal([&] { static_cast<void>(engine::read_trace("t.csv", head + rows, 10)); });
}

} // namespace

TEST_CASE("a workload is within its bounds and the same for the same seed") {
    engine::workload_options options;
    options.requests = 200;
    options.min_prompt = 50;
    options.max_prompt = 300;
    options.min_new = 2;
    options.max_new = 9;
    const auto drawn = engine::draw_workload(options, some_texts());
    REQUIRE(drawn.size() == 200);
    double before = 0;
    int shared = 0;
    for (const engine::arrival& one : drawn) {
        CHECK(one.seconds >= before);
        before = one.seconds;
        CHECK(one.request.prompt.size() >= 50);
        CHECK(one.request.prompt.size() <= 300);
        CHECK(one.request.new_tokens >= 2);
        CHECK(one.request.new_tokens <= 9);
        shared += one.request.prompt[0] % 1000 == 0 && one.request.prompt[1] % 1000 == 1 ? 1 : 0;
    }
    CHECK(shared > 60); // half of 200, but for chance
    CHECK(shared < 140);
    CHECK(before > 60); // 100 s, but for chance
    CHECK(before < 150);

    const auto again = engine::draw_workload(options, some_texts());
    CHECK(again.back().request.prompt == drawn.back().request.prompt);
    CHECK(again.back().seconds == drawn.back().seconds);
    options.seed = 2;
    CHECK(engine::draw_workload(options, some_texts()).back().seconds != drawn.back().seconds);
}

TEST_CASE("another order of arrival brings the same requests") {
    engine::workload_options options;
    options.requests = 30;
    const auto drawn = engine::draw_workload(options, some_texts());
    options.order = 5;
    const auto shuffled = engine::draw_workload(options, some_texts());
    int moved = 0;
    std::vector<bool> seen(30);
    for (std::size_t i = 0; i < shuffled.size(); ++i) {
        const auto number = static_cast<std::size_t>(shuffled[i].number);
        CHECK(shuffled[i].seconds == drawn[i].seconds);
        CHECK(shuffled[i].request.prompt == drawn[number].request.prompt);
        CHECK_FALSE(seen[number]);
        seen[number] = true;
        moved += number != i ? 1 : 0;
    }
    CHECK(moved > 20);
}

TEST_CASE("a trace is read to the line asked for") {
    const auto rows = engine::read_trace("t.csv",
                                         std::string(head) + "2023-11-16 23:59:59.5000000,374,44\r\n"
                                                             "2023-11-17 00:00:00.7500000,396,109\n"
                                                             "nonsense",
                                         2);
    REQUIRE(rows.size() == 2);
    CHECK(rows[0].seconds == 0);
    CHECK(std::abs(rows[1].seconds - 1.25) < 1e-4);
    CHECK(rows[1].prompt == 396);
    CHECK(rows[1].new_tokens == 109);
    CHECK(engine::read_trace("t.csv",
                             std::string(head) + "2024-02-28 00:00:00.0,1,1\n2024-03-01 00:00:00.0,1,1\n", 9)
              .back()
              .seconds == 2 * 86400.0);
    CHECK(engine::read_trace("t.csv", head, 10).empty());
}

TEST_CASE("fractions of seconds may have fewer digits than seven") {
    const auto rows = engine::read_trace("t.csv",
                                         std::string(head) + "2023-11-16 18:15:46.25,1,1\n"
                                                             "2023-11-16 18:15:46.5,1,1\n"
                                                             "2023-11-16 18:15:47.0000001,1,1\n",
                                         9);
    CHECK(std::abs(rows[1].seconds - 0.25) < 1e-4);
    CHECK(std::abs(rows[2].seconds - 0.75) < 1e-4);
}

TEST_CASE("a trace's bad lines are named") {
    CHECK(refusal([] { static_cast<void>(engine::read_trace("t.csv", "a,b\n", 1)); }) ==
          "--trace 't.csv' line 1: expected TIMESTAMP,ContextTokens,GeneratedTokens, came 'a,b'");
    const std::string good = "2023-11-16 18:15:46.6805900,374,44\n";
    for (const char* const bad :
         {"", "2023-11-16 18:15:50.9951690", "2023-11-16 18:15:50.9951690,396",
          "2023-11-16 18:15:50.9951690,396,-1", "2023-11-16 18:15:50.9951690,396,1,2",
          "2023-11-16 18:15:50.9951690,4294967297,1", "2023-11-16T18:15:50.9951690,396,1",
          "2023-13-16 18:15:50.9951690,396,1", "2023-11-16 18:15:45.9951690,396,1",
          "2023-00-16 18:15:50.9951690,396,1", "2023-11-00 18:15:50.9951690,396,1",
          "2023-11-16 18:15:50.99516900,396,1", "2023-11-16 18:15:50.,396,1", "2023-11-16 18:15:50,396,1",
          "2023-11-16 18:15:50.9951690,-0,1", "2023-11-16 18:15:50.9951690,396,1 "}) {
        INFO(bad);
        CHECK(app_test::contains(refused_trace(good + bad + "\n"), "--trace 't.csv' line 3: expected"));
    }
}

TEST_CASE("a workload takes times and lengths from a trace, cut to its bounds") {
    const app_test::scratch_folder folder;
    const std::string path = (folder.path() / "trace.csv").string();
    std::ofstream(path) << head << "2023-11-16 18:15:40.0,10,1\n2023-11-16 18:15:41.0,100,5\n"
                        << "2023-11-16 18:15:44.0,1000,50\n";
    engine::workload_options options;
    options.trace = path;
    options.requests = 3;
    options.rate = 4;
    options.min_prompt = 20;
    options.max_prompt = 300;
    options.min_new = 2;
    options.max_new = 9;
    const auto drawn = engine::draw_workload(options, some_texts());
    CHECK(drawn[0].request.prompt.size() == 20);
    CHECK(drawn[1].request.prompt.size() == 100);
    CHECK(drawn[2].request.prompt.size() == 300);
    CHECK(drawn[1].request.new_tokens == 5);
    CHECK(drawn[2].request.new_tokens == 9);
    CHECK(std::abs(drawn[2].seconds - 0.5) < 1e-9); // two intervals at 4 a second
    CHECK(std::abs(drawn[1].seconds - 0.125) < 1e-9);
    options.rate.reset(); // the trace's own times
    CHECK(std::abs(engine::draw_workload(options, some_texts())[1].seconds - 1) < 1e-4);
    options.requests = 4;
    CHECK(refusal([&] { static_cast<void>(engine::draw_workload(options, some_texts())); }) ==
          "--trace '" + path + "': expected 4 requests, came 3");
}

TEST_CASE("percentiles are values that were there") {
    std::vector<double> values;
    for (int i = 200; i > 0; --i) {
        values.push_back(i);
    }
    const engine::percentiles of = engine::percentiles_of(values);
    CHECK(of.p50 == 100);
    CHECK(of.p90 == 180);
    CHECK(of.p99 == 198);
    CHECK(of.max == 200);
    CHECK(engine::percentiles_of({7}).p50 == 7);
    CHECK(engine::percentiles_of({7}).p99 == 7);
    CHECK(engine::percentiles_of({}).max == 0);
}
