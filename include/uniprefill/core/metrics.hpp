// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

/// @file
/// A callback through which an engine hears what was dropped and how long the stages took.
#pragma once

#include <uniprefill/core/selection.hpp>

#include <cstdint>

UNIPREFILL_BEGIN_NAMESPACE

/// What one decision did to one segment, as told to the observer.
struct decision_metrics {
    std::int32_t layer = 0;
    std::int32_t request = 0;
    std::int32_t segment = 0;
    segment_outcome outcome{};
    double dropped_share = 0; ///< dropped mass / total mass, 0 where the total is 0
};

/// Seconds that a decision took, by stage.
struct stage_times {
    std::int32_t layer = 0;
    double estimate_s = 0;
    double select_s = 0;
};

/// Called on the host by the host backend, after each decision. Function pointers and a context, so that the
/// library needs neither std::function nor exceptions; null members are not called.
struct metrics_observer {
    void* context = nullptr; ///< handed to each call
    /// Hears of every segment of every decision.
    void (*on_decision)(void* context, const decision_metrics& what) = nullptr;
    /// Hears how long a decision took; clocks are read only where this is set.
    void (*on_stage_times)(void* context, const stage_times& times) = nullptr;
};

UNIPREFILL_END_NAMESPACE
