// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace engine {

/// What becomes of a request that must make room: its pages are lost and its rows run again, or they wait in
/// memory of their own.
enum class preemption { recompute, swap };

/// Requests a second where neither a rate nor a trace is given.
constexpr double default_rate = 2;

/// What clients ask for, and when: drawn from texts by a seed.
struct workload_options {
    std::string texts; ///< a file with the paths of text files, one on a line
    std::string trace; ///< a file whose arrival times and lengths are taken instead of drawn ones
    std::int32_t requests = 32;
    std::optional<double> rate; ///< requests a second, on average; none: default_rate, or the trace's own
    std::uint64_t seed = 1;
    std::int32_t min_prompt = 200; ///< tokens
    std::int32_t max_prompt = 3000;
    std::int32_t min_new = 8;
    std::int32_t max_new = 64;
    double shared = 0.5;     ///< of the prompts begin like others do
    std::uint64_t order = 0; ///< draws another order of arrival for the same requests; 0: as drawn
};

/// `serve-sim`'s own options.
struct serve_options {
    workload_options workload;
    std::int32_t slots = 8;  ///< requests running at once
    std::int32_t budget = 0; ///< prompt rows of a step; 0: the least, span + n - 1
    std::int32_t pages = 0;  ///< of the pool; 0: those of half the slots' longest requests
    engine::preemption preemption = engine::preemption::recompute;
    bool without_prefix_cache = false;
    double step_seconds = 0;     ///< that each step counts as; 0: as measured
    bool processor_time = false; ///< measured as processor time of a thread
    bool check = false;          ///< runs every request alone afterwards
};

} // namespace engine
