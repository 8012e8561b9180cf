// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#include "engine/app/drop_scale.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <map>
#include <string_view>

namespace engine {
namespace {

using colour = std::array<double, 3>;

// From the first drop to the last, in rising lightness, so that order survives without hue. Behind text they
// are mixed with the page's own colour, which leaves the ink a contrast of at least 4.5.
constexpr std::array<colour, 4> light_stops = {
    {{176, 124, 216}, {224, 128, 159}, {240, 160, 106}, {240, 212, 120}}};
constexpr std::array<colour, 4> dark_stops = {
    {{150, 95, 205}, {200, 95, 135}, {205, 125, 70}, {190, 165, 70}}};

std::string at(const std::array<colour, 4>& stops, double where) {
    const double scaled = where * 3;
    const auto low = std::min(static_cast<std::size_t>(scaled), stops.size() - 2);
    const double part = scaled - static_cast<double>(low);
    std::array<unsigned, 3> mixed{};
    for (std::size_t i = 0; i < 3; ++i) {
        mixed[i] = static_cast<unsigned>(std::lround(stops[low][i] * (1 - part) + stops[low + 1][i] * part));
    }
    char text[8];
    std::snprintf(text, sizeof(text), "#%02x%02x%02x", mixed[0] & 255, mixed[1] & 255, mixed[2] & 255);
    return text;
}

std::string properties(const std::array<colour, 4>& stops, std::size_t count) {
    std::string out;
    for (std::size_t i = 0; i < count; ++i) {
        const double where = count > 1 ? static_cast<double>(i) / static_cast<double>(count - 1) : 0;
        out += "--d" + std::to_string(i) + ":" + at(stops, where) + ";";
    }
    out += "--steps:linear-gradient(90deg";
    for (std::size_t i = 0; i < count; ++i) {
        out += ",var(--d" + std::to_string(i) + ")";
    }
    return out + ");";
}

/// `pattern` with `number` for every @.
std::string numbered(std::string_view pattern, const std::string& number) {
    std::string out;
    for (const char c : pattern) {
        if (c == '@') {
            out += number;
        } else {
            out += c;
        }
    }
    return out;
}

} // namespace

drop_scale::drop_scale(const report& shown) {
    std::map<std::int32_t, std::int32_t> counts;
    for (const std::int32_t layer : shown.drop_layer) {
        if (layer < 0) {
            ++never_;
        } else {
            ++counts[layer];
        }
    }
    for (const auto& [layer, count] : counts) {
        layers_.push_back(layer);
        tokens_.push_back(count);
    }
}

std::int32_t drop_scale::index_of(std::int32_t layer) const {
    const auto found = std::lower_bound(layers_.begin(), layers_.end(), layer);
    return found != layers_.end() && *found == layer ? static_cast<std::int32_t>(found - layers_.begin())
                                                     : -1;
}

std::string drop_scale::css() const {
    std::string out = ":root{" + properties(light_stops, layers_.size()) + "}\n";
    out += "@media (prefers-color-scheme:dark){:root{" + properties(dark_stops, layers_.size()) + "}}\n";
    for (std::size_t i = 0; i < layers_.size(); ++i) {
        const std::string n = std::to_string(i);
        out += numbered(".d@{background:var(--d@)}svg .d@{fill:var(--d@)}svg .s@{stroke:var(--d@)}"
                        ".prompt .d@{background:color-mix(in srgb,var(--d@) var(--tint),var(--card))}\n"
                        "#left@:focus-visible~.legend [for=left@]{outline:2px solid var(--ours)}"
                        "#left@:checked~.legend [for=left@]{border-color:var(--ink)}\n",
                        n);
        // "What is left after this layer": the first i + 1 colours fade.
        for (std::size_t earlier = 0; earlier <= i; ++earlier) {
            out += numbered(earlier > 0 ? ",#left@:checked~.prompt .d" : "#left@:checked~.prompt .d", n);
            out += std::to_string(earlier);
        }
        out += "{background:none;color:var(--gone)}\n";
    }
    return out;
}

std::vector<token_run> runs_of(const std::vector<std::int32_t>& drop_layer) {
    std::vector<token_run> out;
    for (std::size_t i = 0; i < drop_layer.size(); ++i) {
        if (out.empty() || out.back().layer != drop_layer[i]) {
            out.push_back({static_cast<std::int32_t>(i), 0, drop_layer[i]});
        }
        ++out.back().count;
    }
    return out;
}

} // namespace engine
