// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors
#pragma once

#include "engine/app/report.hpp"
#include "engine/serving/simulation.hpp"

#include <cstdint>
#include <iosfwd>
#include <string>
#include <vector>

namespace engine {

/// Percentiles by nearest rank; all 0 where there is nothing.
struct percentiles {
    double p50 = 0;
    double p90 = 0;
    double p99 = 0;
    double max = 0;
};
percentiles percentiles_of(std::vector<double> values);

/// One request, as it was served.
struct served_request {
    std::int32_t number = 0; ///< in the workload, whatever the order of arrival
    request_times times;
    std::int32_t prompt = 0;
    std::int32_t spans = 0;
    std::int32_t reused = 0;
    std::int32_t dropped = 0;
    std::int32_t preemptions = 0;
    std::int64_t pages = 0;
    std::int64_t dense_pages = 0;
    std::vector<std::int32_t> generated;
};

/// All that `serve-sim` has to say.
struct serve_report {
    std::string model;
    machine_info machine;
    engine::policy policy;
    serve_options options; ///< as resolved: budget and pages are what they were
    std::int32_t page_tokens = 0;
    std::size_t page_bytes = 0;
    simulation run;
    server_counts counts;
    std::vector<served_request> requests;
    bool checked = false;                ///< every request was run alone
    std::vector<std::int32_t> different; ///< those whose tokens weren't those served
};

/// What a server that has served a workload knows of it.
std::vector<served_request> served_by(const server& served, const std::vector<arrival>& workload,
                                      const simulation& run);

void print_serve_report(const serve_report& made, std::ostream& out);
/// One JSON object (docs/report.md). Ends with a newline.
std::string serve_report_json(const serve_report& made);

} // namespace engine
