// SPDX-License-Identifier: Apache-2.0
// SPDX-FileCopyrightText: The uniprefill authors

#include "engine/serving/serve_report.hpp"

#include "engine/app/number_text.hpp"
#include "engine/app/options.hpp"
#include "engine/app/policy_file.hpp"
#include "engine/app/safe_text.hpp"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <ostream>

namespace engine {

namespace {

using json = nlohmann::ordered_json;

/// Sums over the requests of a report.
struct sums {
    std::int64_t prompt_tokens = 0;
    std::int64_t generated = 0;
    std::int64_t dropped = 0;
    std::int64_t reused = 0;
    std::int64_t pages = 0;
    std::int64_t dense_pages = 0;
    std::int32_t of_several_spans = 0;
    std::int32_t with_drops = 0;
    std::int32_t preempted = 0;
    std::int32_t with_reuse = 0;

    explicit sums(const std::vector<served_request>& requests) {
        for (const served_request& one : requests) {
            prompt_tokens += one.prompt;
            generated += static_cast<std::int64_t>(one.generated.size());
            dropped += one.dropped;
            reused += one.reused;
            pages += one.pages;
            dense_pages += one.dense_pages;
            of_several_spans += one.spans > 1 ? 1 : 0;
            with_drops += one.dropped > 0 ? 1 : 0;
            preempted += one.preemptions > 0 ? 1 : 0;
            with_reuse += one.reused > 0 ? 1 : 0;
        }
    }
};

percentiles first_token_times(const serve_report& made) {
    std::vector<double> values;
    for (const served_request& one : made.requests) {
        values.push_back(one.times.first_token - one.times.arrived);
    }
    return percentiles_of(std::move(values));
}

percentiles token_times(const serve_report& made) {
    std::vector<double> values;
    for (const served_request& one : made.requests) {
        const double time = one.times.per_token(static_cast<std::int32_t>(one.generated.size()));
        if (time >= 0) values.push_back(time);
    }
    return percentiles_of(std::move(values));
}

std::int32_t most_pages(const serve_report& made) {
    std::int32_t most = 0;
    for (const step_sample& step : made.run.steps) {
        most = std::max(most, step.pages);
    }
    return most;
}

json to_json(const percentiles& of) {
    return {{"p50", of.p50}, {"p90", of.p90}, {"p99", of.p99}, {"max", of.max}};
}

json workload_to_json(const workload_options& asked) {
    return {{"requests", asked.requests},
            {"rate", asked.rate ? json(*asked.rate) : json()},
            {"seed", asked.seed},
            {"min_prompt", asked.min_prompt},
            {"max_prompt", asked.max_prompt},
            {"min_new", asked.min_new},
            {"max_new", asked.max_new},
            {"shared", asked.shared},
            {"order", asked.order},
            {"trace", !asked.trace.empty()}};
}

json counts_to_json(const serve_report& made, const sums& all) {
    const server_counts& counts = made.counts;
    return {{"steps", counts.steps},
            {"mixed_steps", counts.mixed_steps},
            {"prompt_tokens", all.prompt_tokens},
            {"generated_tokens", all.generated},
            {"requests_of_several_spans", all.of_several_spans},
            {"requests_with_drops", all.with_drops},
            {"tokens_dropped", all.dropped},
            {"preemptions", counts.preemptions},
            {"requests_preempted", all.preempted},
            {"recomputed_rows", counts.recomputed_rows},
            {"swapped_pages", counts.swapped_pages},
            {"prefix_hits", counts.prefix_hits},
            {"requests_with_prefix", all.with_reuse},
            {"prefix_tokens", counts.prefix_tokens},
            {"prefix_evictions", counts.prefix_evictions},
            {"prefix_refusals", counts.prefix_refusals},
            {"copied_pages", counts.copied_pages},
            {"pages_handed_back", counts.pages_handed_back},
            {"most_pages", most_pages(made)},
            {"prompt_pages", all.pages},
            {"dense_prompt_pages", all.dense_pages},
            {"leaked_pages", made.run.leaked_pages}};
}

json requests_to_json(const std::vector<served_request>& requests) {
    json out = json::array();
    for (const served_request& one : requests) {
        const double time = one.times.per_token(static_cast<std::int32_t>(one.generated.size()));
        out.push_back({{"number", one.number},
                       {"arrival_s", one.times.arrived},
                       {"ttft_s", one.times.first_token - one.times.arrived},
                       {"tpot_s", time >= 0 ? json(time) : json(nullptr)},
                       {"finished_s", one.times.finished},
                       {"prompt", one.prompt},
                       {"spans", one.spans},
                       {"reused", one.reused},
                       {"dropped", one.dropped},
                       {"preemptions", one.preemptions},
                       {"pages", one.pages},
                       {"dense_pages", one.dense_pages},
                       {"generated_ids", one.generated}});
    }
    return out;
}

/// By column: a run has thousands of steps.
json steps_to_json(const std::vector<step_sample>& steps) {
    const auto column = [&](auto value) {
        json out = json::array();
        for (const step_sample& step : steps) {
            out.push_back(value(step));
        }
        return out;
    };
    return {{"end_s", column([](const step_sample& s) { return s.end; })},
            {"pages", column([](const step_sample& s) { return s.pages; })},
            {"cached_pages", column([](const step_sample& s) { return s.cached_pages; })},
            {"dense_pages", column([](const step_sample& s) { return s.dense_pages; })},
            {"running", column([](const step_sample& s) { return s.running; })},
            {"waiting", column([](const step_sample& s) { return s.waiting; })},
            {"prompt_rows", column([](const step_sample& s) { return s.did.prompt_rows; })},
            {"decode_rows", column([](const step_sample& s) { return s.did.decode_rows; })},
            {"repeated_rows", column([](const step_sample& s) { return s.did.repeated_rows; })}};
}

} // namespace

percentiles percentiles_of(std::vector<double> values) {
    if (values.empty()) return {};
    std::sort(values.begin(), values.end());
    const auto rank = [&](double share) {
        const double at = std::ceil(share * static_cast<double>(values.size()));
        return values[static_cast<std::size_t>(std::max(at, 1.0)) - 1];
    };
    return {rank(0.5), rank(0.9), rank(0.99), values.back()};
}

std::vector<served_request> served_by(const server& served, const std::vector<arrival>& workload,
                                      const simulation& run) {
    std::vector<served_request> made;
    for (std::int32_t id = 0; id < served.num_requests(); ++id) {
        const request_state& of = served.request(id);
        served_request one;
        one.number = workload[static_cast<std::size_t>(id)].number;
        one.times = run.requests[static_cast<std::size_t>(id)];
        one.prompt = of.prompt;
        one.spans = static_cast<std::int32_t>(of.span_ends.size());
        one.reused = of.reused;
        one.dropped = of.dropped;
        one.preemptions = of.preemptions;
        one.pages = of.pages;
        one.dense_pages = of.dense_pages;
        one.generated.assign(of.tokens.begin() + of.prompt, of.tokens.end());
        made.push_back(std::move(one));
    }
    return made;
}

void print_serve_report(const serve_report& made, std::ostream& out) {
    const sums all(made.requests);
    const server_counts& counts = made.counts;
    const auto requests = static_cast<std::int64_t>(made.requests.size());
    const auto row = [&](const char* name, const percentiles& of) {
        out << "  " << name << "  p50 " << duration_text(of.p50) << ", p90 " << duration_text(of.p90)
            << ", p99 " << duration_text(of.p99) << ", most " << duration_text(of.max) << '\n';
    };
    const auto megabytes = [&](std::int64_t pages) {
        return memory_text(pages * static_cast<std::int64_t>(made.page_bytes));
    };
    out << visible(made.model, line_breaks::escape) << " serves " << with_commas(requests) << " requests ("
        << with_commas(all.prompt_tokens) << " prompt tokens, " << with_commas(all.generated)
        << " generated) in " << duration_text(made.run.seconds) << '\n'
        << "  machine  " << visible(made.machine.cpu, line_breaks::escape) << ", " << made.machine.threads
        << " threads, products in " << made.machine.arithmetic << '\n'
        << "  policy   " << visible(made.policy.name, line_breaks::escape) << ", spans of "
        << made.policy.span << '\n'
        << "  server   " << made.options.slots << " slots, " << made.options.budget << " prompt rows a step, "
        << with_commas(made.options.pages) << " pages of " << made.page_tokens << " rows of a layer ("
        << megabytes(made.options.pages) << "), preemption by " << name_of(made.options.preemption) << "\n\n";
    row("time to first token ", first_token_times(made));
    row("time per later token", token_times(made));
    out << "\n  steps        " << with_commas(counts.steps)
        << ", of them with prompt rows beside decode rows " << with_commas(counts.mixed_steps) << '\n'
        << "  dropped      " << with_commas(all.dropped) << " prompt tokens, in " << all.with_drops << " of "
        << requests << " requests; " << all.of_several_spans << " had several spans\n"
        << "  pages        " << with_commas(counts.pages_handed_back)
        << " handed back; at their prompts' ends requests held " << with_commas(all.pages) << " of "
        << with_commas(all.dense_pages) << " (" << megabytes(all.dense_pages - all.pages)
        << " saved); most in use " << with_commas(most_pages(made)) << '\n'
        << "  preemptions  " << with_commas(counts.preemptions) << ", of " << all.preempted << " requests; "
        << with_commas(counts.recomputed_rows) << " rows run again, " << with_commas(counts.swapped_pages)
        << " pages written back\n"
        << "  prefixes     " << with_commas(counts.prefix_hits) << " hits for "
        << with_commas(counts.prefix_tokens) << " tokens, " << with_commas(counts.prefix_evictions)
        << " evictions, " << with_commas(counts.copied_pages) << " pages copied before a write\n";
    if (made.checked) {
        out << "  alone        " << with_commas(requests - static_cast<std::int64_t>(made.different.size()))
            << " of " << with_commas(requests) << " requests have the same tokens\n";
    }
}

std::string serve_report_json(const serve_report& made) {
    const sums all(made.requests);
    json out = {{"model", made.model},
                {"machine",
                 {{"cpu", made.machine.cpu},
                  {"threads", made.machine.threads},
                  {"arithmetic", made.machine.arithmetic}}},
                {"policy", json::parse(write_policy(made.policy))},
                {"workload", workload_to_json(made.options.workload)},
                {"server",
                 {{"slots", made.options.slots},
                  {"budget", made.options.budget},
                  {"pages", made.options.pages},
                  {"page_tokens", made.page_tokens},
                  {"page_bytes", made.page_bytes},
                  {"preemption", name_of(made.options.preemption)},
                  {"prefix_cache", !made.options.without_prefix_cache},
                  {"step_seconds", made.options.step_seconds},
                  {"processor_time", made.options.processor_time}}},
                {"seconds", made.run.seconds},
                {"ttft_s", to_json(first_token_times(made))},
                {"tpot_s", to_json(token_times(made))},
                {"counts", counts_to_json(made, all)}};
    out["alone"] =
        made.checked ? json{{"requests", made.requests.size()}, {"different", made.different}} : json();
    out["requests"] = requests_to_json(made.requests);
    out["steps"] = steps_to_json(made.run.steps);
    return out.dump(-1, ' ', false, json::error_handler_t::replace) + "\n";
}

} // namespace engine
