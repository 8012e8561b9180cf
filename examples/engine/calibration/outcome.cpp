// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/calibration/outcome.hpp"

#include "engine/app/number_text.hpp"
#include "engine/app/policy_file.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace engine::calibration {

namespace {

using json = nlohmann::ordered_json;

json json_of(const score& of) {
    return {{"kl_mean", of.kl},      {"kl_max", of.kl_max}, {"kl_by_window", of.by_window},
            {"work", of.work.total}, {"lin", of.work.lin},  {"att", of.work.att},
            {"looks", of.work.looks}};
}

json json_of(const measured_choice& of) {
    json made = {{"choice", describe(of.choice)}};
    made.update(json_of(of.measured));
    return made;
}

json json_of(const std::vector<measured_choice>& all) {
    json made = json::array();
    for (const measured_choice& one : all) {
        made.push_back(json_of(one));
    }
    return made;
}

std::string padded(const std::string& text, std::size_t columns) {
    return std::string(columns > text.size() ? columns - text.size() : 0, ' ') + text;
}

std::string work_text(const work& of) {
    return fixed(of.total, 3) + " of the dense work (lin " + fixed(of.lin, 3) + ", att " + fixed(of.att, 3) +
           ")";
}

std::string bounds_text(const sweep_options& of, const char* between) {
    return "lin " + short_number(of.lin) + between + "att " + short_number(of.att);
}

std::string wanted_text(const outcome& found) {
    if (!found.within) return "wanted divergence " + short_number(found.divergence);
    return "least divergence (mean and " + short_number(found.within->worst) +
           " times the worst window's) within " + bounds_text(*found.within, " and ");
}

/// That the bounds couldn't be met; empty where they are, and without any.
std::string missed_text(const outcome& found) {
    if (is_within(found)) return {};
    return "Nothing was within " + bounds_text(*found.within, " and ") + "; this came nearest.";
}

/// FNV-1a, eight digits.
std::string digits_of(std::string_view text) {
    std::uint32_t hash = 2166136261u;
    for (const char c : text) {
        hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
    }
    std::string digits;
    for (int shift = 28; shift >= 0; shift -= 4) {
        digits += "0123456789abcdef"[(hash >> shift) & 15u];
    }
    return digits;
}

/// What was asked for, and digits of all that @p made says: another policy has another name.
std::string name_of(const outcome& found, policy made) {
    made.name.clear();
    made.comment.clear();
    return "calibrated " +
           (found.within ? "within " + bounds_text(*found.within, ", ")
                         : "for divergence " + short_number(found.divergence)) +
           ", seed " + std::to_string(found.seed) + " (" + digits_of(write_policy(made)) + ")";
}

/// Longer ones aren't told in a comment, which has an end too.
constexpr std::size_t most_told = 2000;

} // namespace

bool is_within(const outcome& found) {
    const calibration::work& took = found.best.measured.work;
    return !found.within || (took.lin <= found.within->lin && took.att <= found.within->att);
}

std::optional<double> baseline_at_equal_work(const outcome& found) {
    std::vector<const score*> points;
    for (const measured_choice& one : found.baseline) {
        points.push_back(&one.measured);
    }
    std::sort(points.begin(), points.end(),
              [](const score* a, const score* b) { return a->work.total < b->work.total; });
    const double wanted = found.best.measured.work.total;
    for (std::size_t i = 1; i < points.size(); ++i) {
        const score& less = *points[i - 1];
        const score& more = *points[i];
        if (wanted < less.work.total || wanted > more.work.total || less.kl <= 0 || more.kl <= 0) continue;
        const double width = more.work.total - less.work.total;
        const double part = width > 0 ? (wanted - less.work.total) / width : 0;
        return std::exp(std::log(less.kl) + part * (std::log(more.kl) - std::log(less.kl)));
    }
    return std::nullopt;
}

policy policy_of(const outcome& found, const policy& base) {
    policy made = policy_of(found.best.choice, base);
    const score& at = found.best.measured;
    made.name = name_of(found, made);
    const std::string windows =
        std::to_string(found.begins.size()) + " windows of " + with_commas(found.tokens) + " tokens";
    made.comment = "Found by a search for " + (found.model.empty() ? "an unnamed model" : found.model) +
                   " on " + windows + ", seed " + std::to_string(found.seed) + ", " + wanted_text(found) +
                   (found.complete ? "." : "; the time limit ended it early.");
    if (const std::string chosen = describe(found.best.choice); chosen.size() <= most_told) {
        made.comment += "\nChosen: " + chosen + ".";
    }
    if (!is_within(found)) made.comment += "\n" + missed_text(found);
    made.comment += "\nThere: KL(dense || sparsified) mean " + significant(at.kl, 3) + ", worst window " +
                    significant(at.kl_max, 3) + " nats; " + work_text(at.work) + " at " +
                    with_commas(found.length) + " tokens.";
    if (const auto equal = baseline_at_equal_work(found)) {
        made.comment += "\nThe fixed list of every fourth layer has a KL of " + significant(*equal, 3) +
                        " at the same work on the same windows.";
    }
    made.comment += "\nThese are the windows that it was chosen on: others come out somewhat worse.";
    return made;
}

std::string table_of_layers(const outcome& found) {
    std::string text = "One selection at p 0.90 at one layer, nothing else:\n"
                       "  layer    KL mean     KL max     lin    work\n";
    for (const layer_probe& one : found.probes) {
        text += padded(std::to_string(one.layer), 7) + padded(significant(one.measured.kl, 3), 11) +
                padded(significant(one.measured.kl_max, 3), 11) + padded(fixed(one.measured.work.lin, 3), 8) +
                padded(fixed(one.measured.work.total, 3), 8) + "\n";
    }
    return text;
}

std::string summary_of(const outcome& found) {
    const score& at = found.best.measured;
    std::string text = is_within(found) ? "" : missed_text(found) + "\n";
    text += "Chosen: " + describe(found.best.choice) + "\n  KL mean " + significant(at.kl, 3) +
            ", worst window " + significant(at.kl_max, 3) + "; " + work_text(at.work) + "\n";
    for (const measured_choice& one : found.baseline) {
        text += "The fixed list, " + describe(one.choice) + "\n  KL mean " + significant(one.measured.kl, 3) +
                ", worst window " + significant(one.measured.kl_max, 3) + "; " +
                work_text(one.measured.work) + "\n";
    }
    if (const auto equal = baseline_at_equal_work(found)) {
        text += "At equal work the fixed list's KL is " + significant(*equal, 3) + ", " +
                percent(1 - at.kl / *equal, 0) + " of it saved, on the windows that were calibrated on\n";
    }
    text += std::to_string(found.evaluations) + " choices run in " + duration_text(found.seconds) +
            (found.complete ? "" : "; the time limit ended the search early") + "\n";
    return text;
}

std::string json_of(const outcome& found) {
    json made = {{"model", found.model},
                 {"device", found.device},
                 {"arithmetic", found.arithmetic},
                 {"threads", found.threads},
                 {"tokens", found.tokens},
                 {"windows", found.begins},
                 {"for_length", found.length},
                 {"attention_share", found.attention_share},
                 {"wanted", wanted_text(found)},
                 {"seed", found.seed},
                 {"complete", found.complete},
                 {"seconds", found.seconds},
                 {"evaluations", found.evaluations},
                 {"layers_run", found.layers_run},
                 {"layers_replayed", found.layers_replayed},
                 {"layers", json::array()},
                 {"path", json_of(found.path)},
                 {"best", json_of(found.best)},
                 {"fixed_list", json_of(found.baseline)}};
    for (const layer_probe& one : found.probes) {
        json row = {{"layer", one.layer}};
        row.update(json_of(one.measured));
        made["layers"].push_back(row);
    }
    if (found.within) made["within"] = is_within(found);
    if (const auto equal = baseline_at_equal_work(found)) made["fixed_list_at_equal_work"] = *equal;
    return made.dump(1, ' ', false, json::error_handler_t::replace) + "\n";
}

} // namespace engine::calibration
