// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "app_support.hpp"
#include "engine/app/drop_scale.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/app/report.hpp"
#include "engine/app/safe_text.hpp"
#include "support/catch.hpp"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <string>
#include <vector>

using app_test::contains;

namespace {

/// 16 tokens, 4 layers; layer 1 drops four tokens, layer 3 two.
engine::report small_report() {
    engine::report made;
    made.model = "model";
    made.prompt_name = "prompt";
    made.policy = engine::parse_policy(
        R"({"uniprefill_policy": 1, "name": "test", "block_rows": 8, "observations": 2, "sink": 1, "layers": [1, 3]})",
        "test");
    made.machine = {"cpu", 2, "fp32"};
    made.tokens = 16;
    const int in[] = {16, 16, 12, 12};
    const int kept[] = {16, 12, 12, 10};
    for (int layer = 0; layer < 4; ++layer) {
        engine::layer_row row;
        row.layer = layer;
        row.rows_in = row.rows_kept = 16;
        row.seconds = 0.25;
        made.dense.layers.push_back(row);
        row.rows_in = in[layer];
        row.rows_kept = kept[layer];
        row.share = kept[layer] / 16.0;
        row.seconds = 0.125;
        row.selects = layer % 2 == 1;
        row.dropped_mass_share = row.selects ? 0.01 : 0;
        row.reason = "selected";
        made.sparsified.layers.push_back(row);
    }
    made.dense.ttft_s = 1;
    made.sparsified.ttft_s = 0.5;
    made.lin = 0.78;
    made.att = 0.7;
    made.estimator_pairs = 0.125;
    made.dense.generated = made.sparsified.generated = {1, 2};
    made.dense.generated_text = made.sparsified.generated_text = "and so on";
    made.dense.peak_memory_bytes = 1 << 20;
    made.quality.positions = 3;
    made.quality.kl_mean = 0.25;
    made.quality.kl_median = 0.125;
    made.quality.kl_max = 0.5;
    made.quality.agree = 0.75;
    made.quality.agree_sure = 1;
    made.quality.sure_positions = 2;
    made.quality.dnll = -0.5;
    made.quality.dense_nll = 2;
    made.quality.real_tokens = 2;
    for (const int layer : {1, 3}) {
        engine::selecting_layer_masses seen;
        seen.layer = layer;
        seen.rule = "top-p 0.98, scope free";
        seen.block_mass = {0.9, 0.1};
        seen.block_first_position = {0, 8};
        seen.kept = {true, layer == 1};
        seen.forced = {true, false};
        made.masses.push_back(seen);
    }
    made.drop_layer = {-1, -1, 1, 1, 1, 1, -1, -1, -1, 3, 3, -1, -1, -1, -1, -1};
    for (int i = 0; i < 16; ++i) {
        made.token_bytes.push_back(" t" + std::to_string(i));
    }
    return made;
}

std::size_t count(const std::string& text, const std::string& part) {
    std::size_t found = 0;
    for (std::size_t at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) {
        ++found;
    }
    return found;
}

/// Whether every tag that opens closes, in order, and nothing between tags or in attributes is raw.
std::string markup_fault(const std::string& page) {
    std::vector<std::string> open;
    std::size_t at = page.find("<html");
    while (at < page.size()) {
        if (page[at] != '<') {
            if (page[at] == '>') return "a raw >";
            const std::size_t next = page.find_first_of("<>", at);
            if (next == std::string::npos) break;
            at = next;
            continue;
        }
        const bool closes = page[at + 1] == '/';
        std::size_t end = at + 1;
        bool in_value = false;
        char quote = 0;
        while (end < page.size() && (in_value || page[end] != '>')) {
            if (page[end] == (in_value ? quote : '"') || (!in_value && page[end] == '\'')) {
                quote = page[end];
                in_value = !in_value;
            }
            if (!in_value && page[end] == '<') return "a raw <";
            ++end;
        }
        const std::string tag =
            page.substr(at + (closes ? 2 : 1), page.find_first_of(" >/", at + 2) - at - (closes ? 2 : 1));
        at = end + 1;
        if (tag == "style" && !closes) at = page.find("</style>", at);
        if (closes) {
            if (open.empty() || open.back() != tag)
                return "</" + tag + "> closes " + (open.empty() ? "nothing" : open.back());
            open.pop_back();
        } else if (tag != "meta" && tag != "br" && tag != "input" && page[end - 1] != '/') {
            open.push_back(tag);
        }
    }
    return open.empty() ? "" : open.back() + " stays open";
}

} // namespace

TEST_CASE("app: report.json holds what was promised") {
    const auto read = nlohmann::json::parse(engine::report_json(small_report()));
    CHECK(read["tokens"] == 16);
    CHECK(read["dense"]["ttft_s"] == 1.0);
    CHECK(read["sparsified"]["ttft_s"] == 0.5);
    CHECK(read["speedup"] == 2.0);
    CHECK(read["lin"] == 0.78);
    CHECK(read["att"] == 0.7);
    CHECK(read["quality"]["kl_mean"] == 0.25);
    CHECK(read["quality"]["kl_median"] == 0.125);
    CHECK(read["quality"]["kl_max"] == 0.5);
    CHECK(read["quality"]["agree"] == 0.75);
    CHECK(read["quality"]["agree_sure"] == 1.0);
    CHECK(read["quality"]["dnll"] == -0.5);
    REQUIRE(read["layers"].size() == 4);
    CHECK(read["layers"][1]["layer"] == 1);
    CHECK(read["layers"][1]["rows_in"] == 16);
    CHECK(read["layers"][1]["rows_kept"] == 12);
    CHECK(read["layers"][1]["share"] == 0.75);
    CHECK(read["layers"][1]["dropped_mass_share"] == 0.01);
    CHECK(read["layers"][1]["seconds"] == 0.125);
    CHECK(read["layers"][1]["dense_seconds"] == 0.25);
    CHECK(read["layers"][1]["selects"] == true);
    CHECK(read["dropped"] ==
          nlohmann::json::parse(
              R"([{"first": 2, "last": 5, "layer": 1}, {"first": 9, "last": 10, "layer": 3}])"));
    CHECK(read["selecting_layers"][0]["block_mass"][0] == 0.9);
    CHECK(read["sparsified"]["peak_memory_bytes"].is_null());
    CHECK(read["machine"] == nlohmann::json({{"cpu", "cpu"}, {"threads", 2}, {"arithmetic", "fp32"}}));
    CHECK(engine::parse_policy(read["policy"].dump(), "report").rules.size() == 2);
}

TEST_CASE("app: reports of a device name it, and no threads") {
    engine::report made = small_report();
    made.machine = {"a processor", 2, "bf16", "a <device>"};
    CHECK(nlohmann::json::parse(engine::report_json(made))["machine"] ==
          nlohmann::json({{"cpu", "a processor"}, {"device", "a <device>"}, {"arithmetic", "bf16"}}));
    const std::string page = engine::report_html(made);
    CHECK(markup_fault(page).empty());
    CHECK(contains(page, "twice, on a &lt;device&gt;. Leaving"));
    CHECK(contains(page, "<dt>Processor</dt><dd>a processor</dd><dt>Device</dt><dd>a &lt;device&gt;</dd>"));
    CHECK(!contains(page, "hreads"));
    std::ostringstream out;
    engine::print_report(made, out);
    CHECK(contains(out.str(), "  machine  a <device>, bf16\n"));
    made.machine.device.clear();
    out.str("");
    engine::print_report(made, out);
    CHECK(contains(out.str(), "  machine  a processor, 2 threads, bf16\n"));
    CHECK(contains(engine::report_html(made), "twice, on a processor with 2 threads. Leaving"));
    CHECK(contains(engine::report_html(made), "<dt>Threads</dt><dd>2</dd>"));
}

TEST_CASE("app: report.json survives hostile texts and missing numbers") {
    engine::report made = small_report();
    made.model = "\xff\"\\\n</script>";
    made.dense.generated_text = std::string("\x80\0\xc3", 3);
    made.quality.agree_sure = std::numeric_limits<double>::quiet_NaN();
    const auto read = nlohmann::json::parse(engine::report_json(made));
    CHECK(read["model"] == "\xef\xbf\xbd\"\\\n</script>");
    CHECK(read["quality"]["agree_sure"].is_null());
}

TEST_CASE("app: bytes are made visible") {
    using engine::line_breaks;
    const auto shown = [](const std::string& bytes) { return engine::visible(bytes, line_breaks::keep); };
    CHECK(shown("plain \xc3\xa9 \xf0\x9f\x98\x80\n\tx") == "plain \xc3\xa9 \xf0\x9f\x98\x80\n\tx");
    CHECK(shown(std::string("\0\x1b\r\x7f", 4)) == "\xe2\x90\x80\xe2\x90\x9b\xe2\x90\x8d\xe2\x90\xa1");
    CHECK(shown("a\xff\xc3(") == "a\\xFF\\xC3(");
    CHECK(shown("\xe2\x80\xae") == "\\u{202E}");
    CHECK(shown("\xc2\x9b") == "\\u{9B}");
    CHECK(shown("\xed\xa0\x80") == "\\xED\\xA0\\x80"); // a surrogate
    CHECK(engine::visible("a\nb\tc", line_breaks::escape) == "a\\nb\xe2\x90\x89"
                                                             "c");
    CHECK(engine::escape_html("<a href='x'>&\"") == "&lt;a href=&#39;x&#39;&gt;&amp;&quot;");
}

TEST_CASE("app: report.html is whole and needs nothing from outside") {
    const std::string page = engine::report_html(small_report());
    CHECK(markup_fault(page).empty());
    CHECK(contains(page, "default-src 'none'"));
    CHECK(contains(page, "prefers-color-scheme"));
    CHECK(!contains(page, "<script"));
    CHECK(!contains(page, "url("));
    CHECK(!contains(page, "http:"));
    CHECK(!contains(page, "https:"));
    CHECK(count(page, "dropped at layer 1'>") == 1); // four tokens, one span
    CHECK(contains(page, "tokens 2 to 5, dropped at layer 1'> t2 t3 t4 t5</span>"));
    CHECK(contains(page, "</span> t6 t7 t8<span class='d1'"));
    CHECK(contains(page, "2.00&times;"));
    CHECK(contains(page, "layer 1 drops 4</span><b>12</b>"));
    CHECK(contains(page, "<dt>Blocks that each head reads</dt><dd>all</dd>"));

    engine::report listed = small_report();
    listed.policy.lists.emplace();
    listed.policy.lists->window = 1024;
    const std::string other = engine::report_html(listed);
    CHECK(markup_fault(other).empty());
    CHECK(contains(other, "the first 64 tokens, a window of 1,024</dd>"));
    for (const double p : {0.9, 1.0}) {
        listed.policy.list_rules.push_back(
            {p < 1 ? 2 : 3, uniprefill::selection_rule::top_p(p, uniprefill::mass_scope::all)});
    }
    const std::string by_layer = engine::report_html(listed);
    CHECK(markup_fault(by_layer).empty());
    CHECK(contains(by_layer,
                   "a window of 1,024<br>layer 2: top-p 0.9, scope all<br>layer 3: top-p 1, scope all</dd>"));
}

TEST_CASE("app: report.html escapes every hostile text") {
    std::string nasty = "</span></title></style><script>alert(1)</script>\"'&\xff\xe2\x80\xae";
    nasty += '\0';
    engine::report made = small_report();
    made.model = made.prompt_name = made.policy.name = made.machine.cpu = made.machine.arithmetic = nasty;
    made.machine.device = nasty;
    made.dense.generated_text = nasty;
    made.sparsified.generated_text = nasty + nasty;
    made.sparsified.layers[1].reason = made.masses[0].rule = nasty;
    for (std::string& token : made.token_bytes) {
        token = nasty;
    }
    const std::string page = engine::report_html(made);
    CHECK(markup_fault(page).empty());
    CHECK(!contains(page, "<script"));
    CHECK(count(page, "</title>") == count(page, "<title>"));
    CHECK(!contains(page, std::string(1, '\0')));
    CHECK(!contains(page, "\xff"));
    CHECK(!contains(page, "\xe2\x80\xae"));
}

TEST_CASE("app: characters cut by token edges stay whole in the page") {
    engine::report made = small_report();
    made.token_bytes.assign(16, "x");
    made.token_bytes[1] = "\xf0\x9f"; // never dropped
    made.token_bytes[2] = "\x98\x80"; // dropped at layer 1
    made.token_bytes[5] = "\xf0\x9f"; // never finished
    const std::string page = engine::report_html(made);
    CHECK(contains(page, "x\xf0\x9f\x98\x80<span class='d0'"));
    CHECK(contains(page, ">xx\\xF0\\x9F</span>"));
}

TEST_CASE("app: random bytes in random reports never break the page") {
    std::mt19937_64 random(uniprefill_test::seed());
    for (int round = 0; round < 300; ++round) {
        engine::report made = small_report();
        const std::size_t tokens = random() % 40;
        made.tokens = static_cast<std::int32_t>(tokens);
        made.drop_layer.assign(tokens, -1);
        made.token_bytes.assign(random() % 4 == 0 ? 0 : tokens, "");
        for (std::int32_t& layer : made.drop_layer) {
            layer = static_cast<std::int32_t>(random() % 5) - 1;
        }
        for (std::string& token : made.token_bytes) {
            for (std::size_t i = random() % 6; i > 0; --i) {
                token += "<>&\"'\n\xe2\x80\xae\xf0\xff\x01z"[random() % 14];
            }
        }
        if (round % 7 == 0) made.sparsified.layers.clear();
        if (round % 7 == 1) made.dense.layers.clear();
        if (round % 7 == 2) made.masses.clear();
        if (round % 7 == 3) made.quality = {};
        if (round % 7 == 4) made.dense.generated_text.clear();
        if (round % 7 == 5) made.sparsified.ttft_s = made.dense.ttft_s = 0;
        if (round % 7 == 6) made.masses[0].block_mass = {0, std::numeric_limits<double>::quiet_NaN()};
        const std::string page = engine::report_html(made);
        CHECK(markup_fault(page).empty());
        CHECK(!contains(page, "nan"));
        CHECK(!contains(page, "inf"));
        std::ostringstream text;
        engine::print_report(made, text);
        CHECK(nlohmann::json::accept(engine::report_json(made)));
    }
}

TEST_CASE("app: long prompts give light pages") {
    engine::report made = small_report();
    made.tokens = 100000;
    made.drop_layer.clear();
    made.token_bytes.assign(100000, "word ");
    for (int i = 0; i < 100000; ++i) {
        made.drop_layer.push_back(i / 64 % 2 == 0 ? 1 : 3);
    }
    CHECK(engine::report_html(made).size() < 1200000);
}

TEST_CASE("app: the printed report fits a terminal and says what happened") {
    engine::report made = small_report();
    made.model = "m\x1b[2J";
    made.sparsified.layers[3].reason = "zero mass";
    made.sparsified.generated_text = "and \xc3\xa9 so\non " + std::string(200, 'x');
    made.sparsified.generated = {9};
    std::ostringstream out;
    engine::print_report(made, out);
    const std::string text = out.str();
    CHECK(!contains(text, "\x1b"));
    CHECK(contains(text, "2.00 times faster"));
    CHECK(contains(text, "mean 0.250, median 0.125, maximum 0.500 nats"));
    CHECK(contains(text, "0.780 of matmul rows (lin), 0.700 of attention pairs (att)"));
    CHECK(contains(text, "zero mass"));
    CHECK(contains(text, "and \xc3\xa9 so\\non"));
    std::istringstream lines(text);
    for (std::string line; std::getline(lines, line);) {
        INFO(line);
        CHECK(line.size() <= 101);
    }
}

TEST_CASE("app: runs of tokens and the scale of layers") {
    const auto runs = engine::runs_of({-1, -1, 3, 3, 3, 1});
    REQUIRE(runs.size() == 3);
    CHECK(runs[1].first == 2);
    CHECK(runs[1].count == 3);
    CHECK(runs[1].layer == 3);
    CHECK(engine::runs_of({}).empty());
    const engine::drop_scale scale(small_report());
    CHECK(scale.layers() == std::vector<std::int32_t>{1, 3});
    CHECK(scale.tokens(0) == 4);
    CHECK(scale.tokens_never_dropped() == 10);
    CHECK(scale.index_of(3) == 1);
    CHECK(scale.index_of(2) == -1);
    CHECK(scale.index_of(-1) == -1);
}
