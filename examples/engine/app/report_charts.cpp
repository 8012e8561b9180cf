// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/report_charts.hpp"

#include "engine/app/number_text.hpp"
#include "engine/app/safe_text.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <utility>
#include <vector>

namespace engine {
namespace {

/// Coordinates need two decimals at most.
std::string num(double value) {
    char text[48];
    std::snprintf(text, sizeof(text), "%.2f", value);
    std::string out = text;
    while (out.back() == '0') {
        out.pop_back();
    }
    if (out.back() == '.') out.pop_back();
    return out == "-0" ? "0" : out;
}

std::string rect(const std::string& classes, double x, double y, double width, double height,
                 const std::string& title = "") {
    std::string out = "<rect class='" + classes + "' x='" + num(x) + "' y='" + num(y) + "' width='" +
                      num(width) + "' height='" + num(std::max(height, 0.0)) + "'";
    return out + (title.empty() ? "/>" : "><title>" + escape_html(title) + "</title></rect>");
}

/// A label at `where` (0 to 1) along an axis.
struct tick {
    double where = 0;
    std::string label;
};

/// A plotting area of `width` by `height` units with labels around it. y grows upwards in what callers give.
class plot {
  public:
    plot(double width, double height, std::string description)
        : width_(width)
        , height_(height)
        , description_(std::move(description)) {}

    void y_ticks(std::vector<tick> ticks) { y_ticks_ = std::move(ticks); }
    void x_ticks(std::vector<tick> ticks) { x_ticks_ = std::move(ticks); }

    void bar(const std::string& classes, double x, double width, double bottom, double top,
             const std::string& title = "") {
        shapes_ += rect(classes, x, height_ - top, width, top - bottom, title);
    }
    void line(const std::string& classes, double y) {
        shapes_ += "<path class='" + classes + "' d='M0 " + num(height_ - y) + "H" + num(width_) + "'/>";
    }
    /// A dot for each (x, y): a stroke of no length with round ends stays round in a stretched drawing.
    void dots(const std::string& classes, const std::vector<std::pair<double, double>>& places) {
        if (places.empty()) return;
        shapes_ += "<path class='" + classes + "' d='";
        for (const auto& [x, y] : places) {
            shapes_ += "M" + num(x) + " " + num(height_ - y) + "h0";
        }
        shapes_ += "'/>";
    }

    std::string markup(const std::string& size_class) const {
        std::string out = "<div class='plot " + size_class + "'><div class='ys' aria-hidden='true'>";
        for (const tick& one : y_ticks_) {
            out += "<span style='bottom:" + num(one.where * 100) + "%'>" + escape_html(one.label) + "</span>";
        }
        out += "</div><div class='area'><svg viewBox='0 0 " + num(width_) + " " + num(height_) +
               "' preserveAspectRatio='none' role='img' aria-label='" + escape_html(description_) + "'>";
        for (const tick& one : y_ticks_) {
            const double y = height_ * (1 - one.where);
            out += "<path class='grid' d='M0 " + num(y) + "H" + num(width_) + "'/>";
        }
        out += shapes_ + "</svg>";
        out += "</div><div class='xs' aria-hidden='true'>";
        for (const tick& one : x_ticks_) {
            out += "<span style='left:" + num(one.where * 100) + "%'>" + escape_html(one.label) + "</span>";
        }
        return out + "</div></div>";
    }

  private:
    double width_;
    double height_;
    std::string description_;
    std::string shapes_;
    std::vector<tick> x_ticks_;
    std::vector<tick> y_ticks_;
};

/// A round step of 1, 2 or 5 times a power of ten that cuts `top` into `pieces` or fewer.
double round_step(double top, int pieces) {
    const double least = top / pieces;
    const double power = std::pow(10, std::floor(std::log10(least)));
    for (const double factor : {1.0, 2.0, 5.0}) {
        if (factor * power >= least * (1 - 1e-9)) return factor * power;
    }
    return 10 * power;
}

template <class Label>
std::vector<tick> ticks_up_to(double top, int pieces, Label label) {
    std::vector<tick> out = {{0, label(0.0)}};
    if (!(top > 0) || !std::isfinite(top)) return out;
    const double step = round_step(top, pieces);
    for (int i = 1; i * step <= top * (1 + 1e-9); ++i) {
        out.push_back({i * step / top, label(i * step)});
    }
    return out;
}

std::vector<tick> layer_ticks(const std::vector<layer_row>& layers) {
    std::vector<tick> out;
    const std::size_t every = std::max<std::size_t>(1, (layers.size() + 7) / 8);
    const auto step = every > 4 ? (every + 4) / 5 * 5 : every > 2 ? std::size_t{4} : every;
    for (std::size_t i = 0; i < layers.size(); i += step) {
        out.push_back({(static_cast<double>(i) + 0.5) / static_cast<double>(layers.size()),
                       std::to_string(layers[i].layer)});
    }
    return out;
}

std::vector<tick> position_ticks(double tokens, int pieces) {
    return ticks_up_to(tokens, pieces, [](double at) { return with_commas(std::llround(at)); });
}

/// Bars of layers stand `pitch` units apart.
constexpr double pitch = 10;

std::string figure(const std::string& title, const std::string& text, const std::string& body) {
    return "<figure><figcaption><h3>" + title + "</h3><p>" + text + "</p></figcaption>" + body +
           "</figure>\n";
}

std::string swatch(const std::string& classes, const std::string& label) {
    return "<span class='key'><i class='" + classes + "'></i>" + label + "</span>";
}

} // namespace

std::string two_times(const report& shown) {
    const double longest = std::max({shown.dense.ttft_s, shown.sparsified.ttft_s, 1e-9});
    std::string out = "<div class='race'>";
    const auto lane = [&](const char* label, const char* classes, double seconds) {
        out += std::string("<span>") + label + "</span><svg viewBox='0 0 100 1' preserveAspectRatio='none' " +
               "role='img' aria-label='" + label + ": " + duration_text(seconds) + "'>" +
               rect("lane", 0, 0, 100, 1) + rect(classes, 0, 0, 100 * std::max(seconds, 0.0) / longest, 1) +
               "</svg><b>" + duration_text(seconds) + "</b>";
    };
    lane("Dense", "dense", shown.dense.ttft_s);
    lane("Sparsified", "ours", shown.sparsified.ttft_s);
    return out + "</div>";
}

std::string survival_map(const report& shown, const drop_scale& scale) {
    const auto layers = static_cast<double>(std::max<std::size_t>(shown.sparsified.layers.size(), 1));
    const auto tokens = static_cast<double>(std::max<std::size_t>(shown.drop_layer.size(), 1));

    // Finer than the screen's points nobody sees anything: long prompts are shown by every k-th token.
    const std::size_t stride = (shown.drop_layer.size() + 2999) / 3000;
    std::vector<std::int32_t> sampled;
    for (std::size_t i = 0; i < shown.drop_layer.size(); i += std::max<std::size_t>(stride, 1)) {
        sampled.push_back(shown.drop_layer[i]);
    }
    const auto scaled = static_cast<double>(std::max<std::size_t>(stride, 1));

    plot chart(tokens, layers, "For each part of the prompt, the layers that still work on it.");
    std::vector<tick> down;
    for (const tick& one : layer_ticks(shown.sparsified.layers)) {
        down.push_back({1 - one.where, one.label});
    }
    chart.y_ticks(down);
    chart.x_ticks(position_ticks(tokens, 5));
    for (const token_run& run : runs_of(sampled)) {
        const std::int32_t index = scale.index_of(run.layer);
        const std::string classes = index < 0 ? "ours" : "d" + std::to_string(index);
        const double bottom = index < 0 ? 0 : layers - run.layer;
        const double first = run.first * scaled;
        const double end = std::min((run.first + run.count) * scaled, tokens);
        const std::string where = "positions " + with_commas(static_cast<std::int64_t>(first)) + " to " +
                                  with_commas(static_cast<std::int64_t>(end) - 1);
        chart.bar(classes, first, end - first, bottom, layers,
                  where +
                      (index < 0 ? ": never dropped" : ": dropped at layer " + std::to_string(run.layer)));
    }
    return figure(
        "Where in the prompt the work goes",
        "Each column is a place in the prompt, layer 0 at the top. A column ends at the layer that dropped "
        "it: everything below is work that nobody does.",
        chart.markup("tall"));
}

std::string rows_by_layer(const report& shown, const drop_scale& scale) {
    const std::vector<layer_row>& layers = shown.sparsified.layers;
    const double top = std::max(shown.tokens, 1);
    const double height = 100;
    plot chart(pitch * static_cast<double>(std::max<std::size_t>(layers.size(), 1)), height,
               "Rows alive by layer; the table at the end of the page has the numbers.");
    chart.y_ticks(ticks_up_to(top, 4, [](double rows) { return with_commas(std::llround(rows)); }));
    chart.x_ticks(layer_ticks(layers));
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const layer_row& row = layers[i];
        const double x = pitch * static_cast<double>(i) + 1;
        const double kept = height * std::min(row.rows_kept / top, 1.0);
        const double in = height * std::min(row.rows_in / top, 1.0);
        const std::int32_t index = scale.index_of(row.layer);
        std::string title = "layer " + std::to_string(row.layer) + ": " + with_commas(row.rows_kept) +
                            " rows, " + percent(row.share);
        if (row.rows_kept < row.rows_in) {
            title += "; " + with_commas(row.rows_in - row.rows_kept) + " dropped here with " +
                     percent(row.dropped_mass_share, 2) + " of the mass";
            chart.bar(index < 0 ? "gone" : "d" + std::to_string(index), x, pitch - 2, kept, in, title);
        }
        chart.bar("ours", x, pitch - 2, 0, kept, title);
    }
    return figure("Rows alive by layer",
                  swatch("ours", "go on through the layer") +
                      swatch(scale.layers().size() > 1 ? "steps" : "d0", "dropped at it") +
                      "<br>On average " + percent(shown.lin) + " of the dense run's rows.",
                  chart.markup("mid"));
}

std::string time_by_layer(const report& shown) {
    const std::vector<layer_row>& layers = shown.sparsified.layers;
    double top = 0;
    for (const prefill_run* run : {&shown.dense, &shown.sparsified}) {
        for (const layer_row& row : run->layers) {
            top = std::max(top, row.seconds);
        }
    }
    if (!(top > 0) || !std::isfinite(top)) top = 1;
    const double height = 100;
    const bool in_ms = top < 1;
    plot chart(pitch * static_cast<double>(std::max<std::size_t>(layers.size(), 1)), height,
               "Time by layer, dense and sparsified; the table at the end of the page has the numbers.");
    chart.y_ticks(ticks_up_to(top, 4, [&](double seconds) {
        return in_ms ? significant(seconds * 1000, 3) + " ms" : significant(seconds, 2) + " s";
    }));
    chart.x_ticks(layer_ticks(layers));
    for (std::size_t i = 0; i < layers.size(); ++i) {
        const double x = pitch * static_cast<double>(i);
        const double ours = std::max(layers[i].seconds, 0.0);
        std::string title =
            "layer " + std::to_string(layers[i].layer) + ": sparsified " + duration_text(layers[i].seconds);
        if (i < shown.dense.layers.size()) {
            const double dense = std::max(shown.dense.layers[i].seconds, 0.0);
            title += ", dense " + duration_text(dense);
            chart.bar("dense", x + 1, pitch - 2, 0, height * dense / top, title);
        }
        chart.bar("ours", x + 2.75, pitch - 5.5, 0, height * ours / top, title);
    }
    return figure("Time by layer",
                  swatch("dense", "dense") + swatch("ours", "sparsified") +
                      "<br>Selecting layers also pay for the look that decides.",
                  chart.markup("mid"));
}

std::string masses_by_layer(const report& shown, const drop_scale& scale) {
    // All panels share one scale, so that layers can be compared.
    double least = 1;
    for (const selecting_layer_masses& seen : shown.masses) {
        for (const double mass : seen.block_mass) {
            if (mass > 0 && std::isfinite(mass)) least = std::min(least, mass);
        }
    }
    const double decades = std::clamp(std::ceil(-std::log10(least)), 1.0, 8.0);
    const double height = 100;
    const auto level = [&](double mass) {
        if (!(mass > 0)) return 0.0;
        return height * std::clamp(1 + std::log10(mass) / decades, 0.0, 1.0);
    };
    std::vector<tick> masses;
    for (int decade = 0; decade <= static_cast<int>(decades); decade += decades > 4 ? 2 : 1) {
        masses.push_back({1 - decade / decades, decade == 0 ? "100 %"
                                                : decade <= 2
                                                    ? (decade == 1 ? "10 %" : "1 %")
                                                    : fixed(std::pow(10, 2 - decade), decade - 2) + " %"});
    }

    std::string out;
    for (const selecting_layer_masses& seen : shown.masses) {
        const std::size_t blocks = std::min(
            {seen.block_mass.size(), seen.kept.size(), seen.forced.size(), seen.block_first_position.size()});
        const double tokens = std::max(shown.tokens, 1);
        std::vector<std::pair<double, double>> kept;
        std::vector<std::pair<double, double>> dropped;
        std::vector<std::pair<double, double>> forced;
        double cut = 1;
        for (std::size_t b = 0; b < blocks; ++b) {
            auto& group = seen.forced[b] ? forced : seen.kept[b] ? kept : dropped;
            group.emplace_back(seen.block_first_position[b] + shown.policy.block_rows / 2.0,
                               level(seen.block_mass[b]));
            if (seen.kept[b] && !seen.forced[b]) cut = std::min(cut, seen.block_mass[b]);
        }
        const std::int32_t index = scale.index_of(seen.layer);
        plot chart(tokens, height,
                   "Mass of each block at layer " + std::to_string(seen.layer) + ": " +
                       std::to_string(kept.size()) + " kept, " + std::to_string(dropped.size()) +
                       " dropped, " + std::to_string(forced.size()) + " forced.");
        chart.y_ticks(masses);
        chart.x_ticks(position_ticks(tokens, 3));
        chart.dots("dots s-forced", forced);
        chart.dots(index < 0 ? "dots s-gone" : "dots s" + std::to_string(index), dropped);
        chart.dots("dots s-ours", kept);
        std::string counts = "keeps " + with_commas(static_cast<std::int64_t>(kept.size())) + " of " +
                             with_commas(static_cast<std::int64_t>(kept.size() + dropped.size()));
        if (!dropped.empty() && !kept.empty()) {
            chart.line("cut", level(cut));
            counts += ", cut at " + significant(cut * 100, 2) + "&nbsp;%";
        }
        out += figure("Layer " + std::to_string(seen.layer), escape_html(seen.rule) + "<br>" + counts,
                      chart.markup("small"));
    }
    return out;
}

} // namespace engine
