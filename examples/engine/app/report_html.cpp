// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/drop_scale.hpp"
#include "engine/app/embedded.hpp"
#include "engine/app/number_text.hpp"
#include "engine/app/report.hpp"
#include "engine/app/report_charts.hpp"
#include "engine/app/safe_text.hpp"
#include "engine/model_file/utf8.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string_view>

namespace engine {
namespace {

std::string section(const std::string& title, const std::string& about, const std::string& body) {
    return "<section><h2>" + title + "</h2><p class='about'>" + about + "</p>" + body + "</section>\n";
}

std::string tile(const std::string& value, const std::string& label) {
    return "<li><b>" + value + "</b><span>" + label + "</span></li>";
}

std::string header(const report& shown) {
    const double speedup = shown.speedup();
    const std::string ours = duration_text(shown.sparsified.ttft_s);
    const std::string dense = duration_text(shown.dense.ttft_s);
    std::string out =
        "<header><p class='eyebrow'>uniprefill: one prompt, prefilled dense and sparsified</p><h1>";
    out += "First token after <em>" + ours + "</em>" +
           (speedup >= 1.005 ? " instead of " + dense : ", dense after " + dense) + "</h1><p class='lead'>";
    out += escape_html(shown.model) + " read " + with_commas(shown.tokens) + " tokens of " +
           escape_html(shown.prompt_name) + " twice, on " +
           (shown.machine.device.empty()
                ? escape_html(shown.machine.cpu) + " with " + std::to_string(shown.machine.threads) +
                      (shown.machine.threads == 1 ? " thread" : " threads")
                : escape_html(shown.machine.device)) +
           ". Leaving tokens out as soon as no later layer needs them made the prefill " +
           speed_text(speedup) + ".";
    if (shown.quality.positions > 0) {
        out += " The next-token probabilities moved by " + significant(shown.quality.kl_mean, 2) +
               " nats on average.";
    }
    out += "</p>" + two_times(shown) + "<ul class='tiles'>";
    out += tile(fixed(speedup, 2) + "&times;", "speed-up of the time to first token");
    out += tile(percent(shown.lin), "of the rows in matrix products (lin)");
    out += tile(percent(shown.att),
                "of the attention pairs (att), and " + percent(shown.estimator_pairs) + " more to decide");
    if (shown.quality.positions > 0) {
        out += tile(significant(shown.quality.kl_mean, 2) + " nats",
                    "mean KL divergence from the dense run's answers");
        out += tile(percent(shown.quality.agree_sure), "same next token where the dense run is sure");
    }
    return out + "</ul></header>\n";
}

std::string work(const report& shown, const drop_scale& scale) {
    std::string body;
    if (!shown.drop_layer.empty()) body += survival_map(shown, scale);
    body += "<div class='two'>" + rows_by_layer(shown, scale) + time_by_layer(shown) + "</div>";
    return section("What each layer worked on",
                   "Every layer of a dense prefill computes every token. Here, selecting layers measure "
                   "which tokens the "
                   "end of the prompt still attends to, and drop the others from there on.",
                   body);
}

std::string masses(const report& shown, const drop_scale& scale) {
    if (shown.masses.empty()) return {};
    return section("What the selecting layers saw",
                   "How much of the attention of the prompt's last " +
                       std::to_string(shown.policy.num_observations) + " tokens falls on each block of " +
                       std::to_string(shown.policy.block_rows) +
                       " tokens, in percent of the whole and on a logarithmic scale, along the prompt. Below "
                       "the dashed line "
                       "blocks are dropped.<br><span class='key'><i class='ours'></i>kept</span><span "
                       "class='key'><i "
                       "class='d0'></i>dropped</span><span class='key'><i class='forced'></i>always "
                       "kept: start and end</span>",
                   "<div class='many'>" + masses_by_layer(shown, scale) + "</div>");
}

/// The prompt cut where the drop layer changes. A character of several tokens belongs to the token of its
/// first byte.
std::string shaded_text(const report& shown, const drop_scale& scale) {
    std::string bytes;
    std::vector<std::size_t> ends; // of each token in bytes
    for (const std::string& token : shown.token_bytes) {
        bytes += token;
        ends.push_back(bytes.size());
    }
    const std::string_view text = bytes;
    std::string out;
    std::size_t next = 0; // first byte not written yet
    for (const token_run& run : runs_of(shown.drop_layer)) {
        const auto last = static_cast<std::size_t>(run.first + run.count) - 1;
        if (last >= ends.size()) break;
        std::size_t end = next;
        while (end < ends[last]) {
            end += utf8_next(text.substr(end)).bytes;
        }
        if (end <= next) continue;
        const std::string piece = escape_html(text.substr(next, end - next));
        next = end;
        const std::int32_t index = scale.index_of(run.layer);
        if (index < 0) {
            out += piece;
            continue;
        }
        const std::string first = with_commas(run.first);
        const std::string positions =
            run.count == 1 ? "token " + first
                           : "tokens " + first + " to " + with_commas(static_cast<std::int64_t>(last));
        for (const std::string& part :
             {"<span class='d" + std::to_string(index) + "' title='", positions,
              ", dropped at layer " + std::to_string(run.layer) + "'>", piece, std::string("</span>")}) {
            out += part;
        }
    }
    return out;
}

std::string prompt(const report& shown, const drop_scale& scale) {
    if (shown.token_bytes.empty()) return {};
    // Radio buttons and sibling selectors do what a script would: the page needs none.
    std::string body = "<div class='reader'><input type='radio' name='left' id='whole' checked>";
    std::string legend = "<div class='legend'><p class='small'>What is left after</p>"
                         "<label for='whole'><i></i><span>nothing yet</span><b>" +
                         with_commas(static_cast<std::int64_t>(shown.drop_layer.size())) + "</b></label>";
    auto left = static_cast<std::int64_t>(shown.drop_layer.size());
    for (std::size_t i = 0; i < scale.layers().size(); ++i) {
        const std::string id = "left" + std::to_string(i);
        left -= scale.tokens(i);
        body += "<input type='radio' name='left' id='" + id + "'>";
        legend += "<label for='" + id + "'><i class='d" + std::to_string(i) + "'></i><span>layer " +
                  std::to_string(scale.layers()[i]) + " drops " + with_commas(scale.tokens(i)) +
                  "</span><b>" + with_commas(left) + "</b></label>";
    }
    body += legend + "</div>";
    body += "<div class='prompt card' tabindex='0' role='region' aria-label='Text of the prompt'>" +
            shaded_text(shown, scale) + "</div></div>";
    return section(
        "What was dropped, and when",
        "The prompt, shaded by the layer at which each token was dropped. " +
            with_commas(scale.tokens_never_dropped()) +
            " tokens stand unshaded: they went through all layers. Choose a layer to see what was left "
            "after it.",
        body);
}

std::string quality_list(const report& shown) {
    const quality& compared = shown.quality;
    const auto row = [](const std::string& term, const std::string& text) {
        return "<dt>" + term + "</dt><dd>" + text + "</dd>";
    };
    std::string out = "<div class='card'><h3>Next-token probabilities</h3><p class='small'>Compared at " +
                      std::to_string(compared.positions) + " positions, fed with " +
                      (shown.quality_on_real_tokens ? "the tokens that really follow the prompt."
                                                    : "the tokens that the dense run prefers.") +
                      "</p><dl>";
    out += row("KL divergence", "mean <b>" + significant(compared.kl_mean, 3) + "</b>, median " +
                                    significant(compared.kl_median, 3) + ", maximum " +
                                    significant(compared.kl_max, 3) + " nats");
    out += row("Same likeliest token", percent(compared.agree));
    out += row("The same, where dense is sure", percent(compared.agree_sure) + " of " +
                                                    std::to_string(compared.sure_positions) +
                                                    " positions whose top two differ by more than 0.1 nat");
    out += row("Surprise at those tokens", fixed(compared.dense_nll, 3) + " nats dense, " +
                                               (compared.dnll >= 0 ? "+" : "&minus;") +
                                               fixed(std::fabs(compared.dnll), 4) + " sparsified");
    return out + "</dl></div>";
}

/// The text with the first difference from the other run underlined onwards.
std::string said(const std::string& title, const std::string& text, std::size_t common) {
    const std::string_view all = text;
    std::string out =
        "<div class='card'><h3>" + title + "</h3><p class='said'>" + escape_html(all.substr(0, common));
    if (common < all.size()) out += "<mark>" + escape_html(all.substr(common)) + "</mark>";
    return out + "</p></div>";
}

/// Bytes of the whole characters that both texts start with.
std::size_t common_characters(std::string_view a, std::string_view b) {
    std::size_t common = 0;
    while (common < std::min(a.size(), b.size())) {
        const std::size_t step = utf8_next(a.substr(common)).bytes;
        if (a.substr(common, step) != b.substr(common, step)) break;
        common += step;
    }
    return common;
}

std::string answers(const report& shown) {
    const std::string& dense = shown.dense.generated_text;
    const std::string& ours = shown.sparsified.generated_text;
    const std::string figures = shown.quality.positions > 0 ? quality_list(shown) : "";
    std::string body = figures;
    if (!dense.empty() || !ours.empty()) {
        const std::string count = std::to_string(shown.dense.generated.size()) + " tokens";
        const std::string side_by_side = "<div class='two lowest'>";
        if (dense == ours) {
            body = side_by_side + figures + said("Both runs go on alike, " + count, dense, dense.size()) +
                   "</div>";
        } else {
            const std::size_t common = common_characters(dense, ours);
            body += side_by_side + said("The dense run goes on, " + count, dense, common) +
                    said("The sparsified run goes on", ours, common) + "</div>";
        }
    }
    if (body.empty()) return {};
    return section("Is it the same answer?",
                   "Both runs are asked for the tokens after the prompt; what the sparsified one dropped it "
                   "can no longer "
                   "see.",
                   body);
}

std::string table(const report& shown) {
    std::string rows;
    for (std::size_t i = 0; i < shown.sparsified.layers.size(); ++i) {
        const layer_row& row = shown.sparsified.layers[i];
        const auto cell = [](const std::string& text) { return "<td>" + text + "</td>"; };
        const int width = static_cast<int>(std::lround(std::clamp(row.share, 0.0, 1.0) * 1000));
        rows += row.selects ? "<tr class='selects'>" : "<tr>";
        rows += cell(std::to_string(row.layer)) + cell(with_commas(row.rows_in)) +
                cell(with_commas(row.rows_kept)) + cell(percent(row.share)) +
                "<td class='bar'><svg viewBox='0 0 1000 1' preserveAspectRatio='none' "
                "aria-hidden='true'><rect "
                "class='lane' width='1000' height='1'/><rect class='ours' width='" +
                std::to_string(width) + "' height='1'/></svg></td>" +
                cell(row.selects ? percent(row.dropped_mass_share, 2) : "") +
                cell(i < shown.dense.layers.size() ? fixed(shown.dense.layers[i].seconds * 1000, 1) : "-") +
                cell(fixed(row.seconds * 1000, 1)) + "<td class='why'>" +
                (row.selects ? escape_html(row.reason) : "") + "</td></tr>\n";
    }
    return section("Layer by layer", "Tinted layers select. The share is of the prompt's tokens.",
                   "<div class='card scroll' tabindex='0'><table><thead><tr><th>layer</th><th>rows "
                   "in</th><th>rows kept</th><th>share</th><th></th><th>mass dropped</th><th>dense "
                   "ms</th><th>sparsified ms</th><th></th></tr></thead><tbody>" +
                       rows + "</tbody></table></div>");
}

std::string how_it_ran(const report& shown) {
    const policy& used = shown.policy;
    std::string layers;
    for (const layer_rule& rule : used.rules) {
        layers += (layers.empty() ? "" : "<br>") + std::to_string(rule.layer) + ": " + describe(rule.rule);
    }
    std::string listed;
    for (const layer_rule& rule : used.list_rules) {
        listed += "<br>layer " + std::to_string(rule.layer) + ": " + describe(rule.rule);
    }
    const auto row = [](const char* term, const std::string& text) {
        return std::string("<dt>") + term + "</dt><dd>" + text + "</dd>";
    };
    std::string out = "<div class='two lowest'><div class='card'><h3>Policy</h3><dl>";
    out += row("Name", escape_html(used.name)) + row("Selecting layers", layers.empty() ? "none" : layers) +
           row("Blocks that each head reads",
               used.lists ? describe(used.lists->rule) + ", the first " + with_commas(used.lists->sink) +
                                " tokens, a window of " + with_commas(used.lists->window) +
                                (used.list_sampling
                                     ? ", by " + std::to_string(used.list_sampling->query_rows) +
                                           " rows from one in " + std::to_string(used.list_sampling->sample)
                                     : "") +
                                (used.list_means ? "; others by their means" : "") + listed
                          : "all") +
           row("Blocks", std::to_string(used.block_rows) + " tokens (G)") +
           row("Observed", "the last " + std::to_string(used.num_observations) + " tokens (n)") +
           row("Always kept",
               "the first " + with_commas(used.sink) + " and the last " + with_commas(used.tail)) +
           row("Dropped tokens", used.propagation == uniprefill::propagation::revive
                                     ? "are scored again at each selecting layer (revive)"
                                     : "never return (cumulative)");
    out += "</dl></div><div class='card'><h3>Run</h3><dl>";
    out += row("Model", escape_html(shown.model)) + row("Prompt", escape_html(shown.prompt_name)) +
           row("Processor", escape_html(shown.machine.cpu)) +
           (shown.machine.device.empty() ? row("Threads", std::to_string(shown.machine.threads))
                                         : row("Device", escape_html(shown.machine.device))) +
           row("Products in", escape_html(shown.machine.arithmetic)) +
           row("Peak memory", "dense " + memory_text(shown.dense.peak_memory_bytes) + ", sparsified " +
                                  memory_text(shown.sparsified.peak_memory_bytes));
    return section("How it was run", "report.json beside this page has all figures.",
                   out + "</dl></div></div>");
}

} // namespace

std::string report_html(const report& made) {
    const drop_scale scale(made);
    std::string out =
        "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'>\n"
        R"(<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">)"
        "\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n<title>";
    out += escape_html(made.model) + ", " + escape_html(made.prompt_name) + ": " + fixed(made.speedup(), 2) +
           " times</title>\n<style>\n" + embedded_report_css() + scale.css() +
           "</style></head>\n<body><main>\n";
    out += header(made) + work(made, scale) + masses(made, scale) + prompt(made, scale) + answers(made) +
           table(made) + how_it_ran(made);
    return out + "<footer>Written by uniprefill's example engine.</footer>\n</main></body></html>\n";
}

} // namespace engine
