// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/policy.hpp"

#include <array>
#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

namespace engine::calibration {

/// What is chosen among: how far each layer, and its lists, have gone down their ladder of p. Step 0:
/// nothing.
struct choice {
    static constexpr std::array<double, 15> layer_shares = {
        0.999, 0.998, 0.995, 0.9925, 0.99, 0.985, 0.98, 0.97, 0.96, 0.95, 0.93, 0.90, 0.87, 0.84, 0.80};
    static constexpr std::array<double, 14> list_shares = {0.999, 0.998, 0.995, 0.9925, 0.99, 0.985, 0.98,
                                                           0.97,  0.96,  0.95,  0.93,   0.90, 0.85,  0.80};
    static constexpr std::array<std::int32_t, 6> list_windows = {128, 256, 384, 512, 768, 1024};
    static constexpr std::array<std::int32_t, 6> forced_rows = {16, 32, 64, 96, 128, 256};

    std::vector<std::int8_t> steps; ///< by layer
    std::vector<std::int8_t> lists; ///< by layer
    std::int8_t window = 1;         ///< of list_windows, at every layer with lists
    std::int8_t sink = -1;          ///< of forced_rows; -1: as many as the policy has that all begins with
    std::int8_t tail = -1;          ///< the same

    friend bool operator<(const choice& a, const choice& b) {
        if (a.steps != b.steps) return a.steps < b.steps;
        if (a.lists != b.lists) return a.lists < b.lists;
        return std::tie(a.window, a.sink, a.tail) < std::tie(b.window, b.sink, b.tail);
    }
    friend bool operator==(const choice& a, const choice& b) {
        return a.steps == b.steps && a.lists == b.lists && a.window == b.window && a.sink == b.sink &&
               a.tail == b.tail;
    }
};

/// Nothing dropped in a model of @p layers layers.
choice dense_choice(std::int32_t layers);

/// The step down a ladder that has just this p; the nearest one where there is none.
std::int8_t layer_step(double share);
std::int8_t list_step(double share);

/// The same with one step of lists at every layer.
choice with_lists(choice of, std::int8_t step);

/// Throws `error`, its argument @p where and a field, unless choices can say what @p given says: cumulative,
/// no spans, rules of top-p over free mass and lists of top-p over all mass that have nothing else of their
/// own, none by query block, all at layers of the model. Nor may prompts of @p tokens be too short for it.
void check_begin(const policy& given, std::int32_t layers, std::int32_t tokens, const std::string& where);

/// The choice that says what @p given says, but for p, windows and forced rows that no ladder has: the
/// nearest step is taken. Throws `error` as check_begin() does.
choice choice_of(const policy& given, std::int32_t layers);

/// The fixed list for models that nobody has measured, from little to much dropped, with these lists; none
/// where the model has too few layers for one.
std::vector<choice> fixed_list_choices(const choice& lists);

/// The policy that @p chosen says; everything else as in @p base, whose rules, lists and forced rows are
/// replaced.
policy policy_of(const choice& chosen, const policy& base);

/// The first layer that does something else in @p b than in @p a; the number of layers where none does.
std::int32_t first_difference(const choice& a, const choice& b);

/// "7:0.99 15:0.995 + lists 0.99", "dense"; with lists of several p "+ lists 0.99 3:0.95 4:1", with a window
/// or forced rows that aren't the usual ones "window 512", "sink 64" and "tail 64" at the end.
std::string describe(const choice& chosen);

} // namespace engine::calibration
