// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/calibration/search.hpp"
#include "engine/calibration/sweep.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace engine::calibration {

/// What a calibration found, for people and programs.
struct outcome {
    std::string model;
    std::string device;
    std::string arithmetic;
    std::int32_t threads = 1;
    std::int32_t tokens = 0;             ///< of a window's prompt
    std::vector<std::int64_t> begins;    ///< of the windows among the texts' tokens
    std::int32_t length = 0;             ///< that work is counted for
    double attention_share = 0;          ///< of the dense work at that length
    double divergence = 0;               ///< wanted, unless
    std::optional<sweep_options> within; ///< the least divergence within bounds of work was
    std::uint64_t seed = 0;
    bool complete = false; ///< whether the search came to its end before the time limit
    double seconds = 0;
    std::int64_t evaluations = 0;     ///< choices that were run on all windows
    std::int64_t layers_run = 0;      ///< over all of them
    std::int64_t layers_replayed = 0; ///< left by other runs, and not run again
    std::vector<layer_probe> probes;
    std::vector<measured_choice> path;
    measured_choice best;
    std::vector<measured_choice> baseline; ///< the fixed list at several p, lists as in the best
};

/// Whether the best choice's work is within the bounds, or there are none.
bool is_within(const outcome& found);

/// The baseline's divergence at the best choice's work, on a straight line between the logarithms of the
/// nearest two; none where that lies outside of what was measured.
std::optional<double> baseline_at_equal_work(const outcome& found);

/// The policy, its name what was asked for and eight digits of what it says, its comment the choice and its
/// figures.
policy policy_of(const outcome& found, const policy& base);

std::string table_of_layers(const outcome& found);
std::string summary_of(const outcome& found);
std::string json_of(const outcome& found);

} // namespace engine::calibration
