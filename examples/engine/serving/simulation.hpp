// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/serving/server.hpp"
#include "engine/serving/workload.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace engine {

/// One request's times, in seconds of the simulation.
struct request_times {
    double arrived = 0;
    double first_token = 0; ///< when its step ended
    double last_token = 0;
    double finished = 0;
    /// Between tokens, on average; negative where there is but one.
    double per_token(std::int32_t tokens) const {
        return tokens > 1 ? (last_token - first_token) / (tokens - 1) : -1;
    }
};

/// The state of the server after a step.
struct step_sample {
    double end = 0; ///< seconds
    std::int32_t pages = 0;
    std::int32_t cached_pages = 0; ///< of them, those that only the prefix cache holds
    std::int64_t dense_pages = 0;  ///< that the running requests would hold, had nothing been dropped
    std::int32_t running = 0;
    std::int32_t waiting = 0;
    step_outcome did;
};

/// What came of a workload.
struct simulation {
    std::vector<request_times> requests;
    std::vector<step_sample> steps;
    double seconds = 0;            ///< from the first arrival to the last token
    std::int32_t leaked_pages = 0; ///< taken when no request and no beginning was left; there are none
};

/// How long a step takes.
struct step_clock {
    double fixed = 0;            ///< seconds, where that isn't 0; else what it took
    bool processor_time = false; ///< of a thread instead of the wall clock's
    std::int32_t threads = 1;
};

/// Serves a workload. Time passes in steps alone; when nothing is left to do it jumps to the next arrival.
/// @param progress  called after each step with the share of requests that are finished
simulation simulate(server& serving, const std::vector<arrival>& workload, const step_clock& clock,
                    const std::function<void(double)>& progress = {});

/// The tokens of a request that runs alone: its prompt read in one step, and what the model says.
std::vector<std::int32_t> run_alone(loaded_model& model, const policy& policy, const serving_request& asked);

} // namespace engine
